"""Job: a call with its tensors laid out as the two sides of the plane, its plan and its backend."""

import math
import warnings
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from ..backends.eager import Eager, Kept
from ..backends.select import select
from ..backends.workspace import borrow
from ..distributed.ring import Ring
from ..losses.block import Block, Tile
from ..losses.state import State
from .call import Call, Inputs
from .plan import Plan, Shape, make_plan
from .walk import walk

LONGEST_INVERSE = 1e12  # of a row's length, as torch.nn.functional.normalize
_SEEN: set[str] = set()  # functions whose first batch was looked at


class Job:
    """What the forward and the backward of one call have in common.

    Attributes:
        rows, columns: The blocks of the two sides; of a symmetric plane, the same list.
        compute: dtype of logits, slopes and sums of gradients.
    """

    def __init__(self, inputs: Inputs, call: Call, plan: Plan | None = None) -> None:
        self.inputs, self.call, self.spec = inputs, call, call.spec
        self.ring = Ring(call.group)
        self.ring.agree(
            call.function,
            rows=len(inputs.first),
            width=inputs.first.shape[1],
            bits=torch.finfo(inputs.first.dtype).bits,
            ids=int(inputs.first_ids is not None),
            gradients=sum(need << bit for bit, need in enumerate(call.needs)),
        )
        self.device = inputs.first.device
        self.compute = torch.float64 if inputs.first.dtype == torch.float64 else torch.float32
        self.scale = inputs.scale.item()
        self.bias = 0.0 if inputs.bias is None else inputs.bias.item()
        self.rows, self.columns = self._sides()
        self.num_rows, self.num_columns = sum(map(len, self.rows)), sum(map(len, self.columns))
        product = self._product()
        self.sums_slopes = self._sums_slopes(product)
        self.plan = plan or make_plan(call, self._shape(product), self._one_pass())
        self.backend: Eager = select(call.function, call.backend, self.device, inputs.first.dtype)(
            self.spec,
            self.scale,
            self.bias,
            self.compute,
            self.device,
            product=product,
            stats=call.stats,
            sums_slopes=self.sums_slopes,
        )

    # ---- layout

    def _sides(self) -> tuple[list[Block], list[Block]]:
        first, second, extra, *_ = self.inputs
        ids, n = self.inputs.first_ids, len(first)
        if self.spec.symmetric:
            if second is None:
                rows = [Block(first, 0, ids)]
            else:
                rows = [Block(first, 0, ids, *self._paired(n, n)), Block(second, n, ids, *self._paired(0, n))]
            columns = rows
        else:
            assert second is not None
            start = self.ring.rank * n
            positives = self.inputs.positives
            target, within = self._paired(start, n) if positives is None else (positives.long(), None)
            rows = [Block(first, start, ids, target, within)]
            columns = [Block(second, start, self.inputs.second_ids)]
            if extra is not None:
                columns.append(Block(extra, len(second), self.inputs.extra_ids))
        if self.call.normalize:
            for block in {id(block): block for block in rows + columns}.values():
                block.inverse_norm = inverse_lengths(block.features, self.compute)
        return rows, columns

    def _paired(self, start: int, count: int) -> tuple[Tensor, tuple[int, int]]:
        return torch.arange(start, start + count, device=self.device), (start, start + count)

    def features(self) -> list[tuple[Block, bool]]:
        """The blocks of the feature inputs in their order, and whether each gets a gradient."""
        blocks = self.rows if self.spec.symmetric else self.rows + self.columns
        return list(zip(blocks, self.call.needs, strict=False))

    def _needed(self, side: list[Block]) -> bool:
        return all(need for block, need in self.features() if any(block is member for member in side))

    def weights(self, side: list[Block]) -> Tensor:
        """The weight of every row of a side that has losses."""
        return self._weight.repeat(len(side)) if len(side) > 1 else self._weight

    @cached_property
    def _weight(self) -> Tensor:
        weight = self.inputs.weight
        return (
            self.inputs.first.new_ones(len(self.inputs.first), dtype=torch.float64)
            if weight is None
            else weight.double()
        )

    @cached_property
    def largest_weight(self) -> float:
        """Pulls are divided by it, so that slopes are of size 1 whatever the weights."""
        return 1.0 if self.inputs.weight is None else self._weight.amax().item()

    # ---- decisions

    def _product(self) -> torch.dtype | None:
        """What products multiply in, where that is not what they are summed in: halves, on an accelerator."""
        if self.device.type == "cpu" or self.call.normalize or self.compute == torch.float64:
            return None
        if self.call.product:
            return self.call.product_dtype
        return None if self.inputs.first.dtype == torch.float32 else self.inputs.first.dtype

    def _shape(self, product: torch.dtype | None) -> Shape:
        wanted = product or self.compute
        blocks = self.rows + self.columns
        return Shape(
            rows=tuple(map(len, self.rows)),
            columns=tuple(map(len, self.columns)),
            width=self.inputs.first.shape[1],
            element=torch.finfo(self.compute).bits // 8,
            copied=any(block.features.dtype != wanted or block.inverse_norm is not None for block in blocks),
            products=self.sums_slopes,
            threads=torch.get_num_threads() if self.device.type == "cpu" else 2,
        )

    def _one_pass(self) -> bool:
        """Whether the forward walk may compute gradients: what the caller makes of the loss is one factor then."""
        return any(self.call.needs) and self.call.reduction != "none" and self.ring.size == 1

    def _sums_slopes(self, product: torch.dtype | None) -> bool:
        """Whether the scale's gradient is summed tile by tile: where no side has whole and exact feature gradients."""
        exact = product is None and (self._needed(self.rows) or self._needed(self.columns))
        return self.call.needs.scale and not exact

    def scale_side(self) -> list[Block]:
        """The side whose feature gradients give the scale's."""
        return self.rows if self._needed(self.rows) else self.columns

    # ---- the walk

    def strips(self, read: tuple[str, ...] = (), summed: tuple[str, ...] = ()) -> Iterator[list[Tile]]:
        """The tiles of the plane by strips of rows. `read` and `summed` name what travels with columns."""
        if self.ring.size == 1:
            yield from walk(self.plan, self.rows, self.columns, self.spec.symmetric)
            return
        (home,) = self.columns
        read = ("features", "ids", "inverse_norm", *read)
        held = {name: getattr(home, name) for name in read + summed}
        tensors = {name: value.table if isinstance(value, State) else value for name, value in held.items()}
        read, summed = (tuple(name for name in names if tensors[name] is not None) for names in (read, summed))
        turn = self.ring.turn([tensors[name] for name in read], [tensors[name] for name in summed])
        for owner, reading, summing in turn:
            visitor = Block(home.features, owner * len(home))
            for name, tensor in zip(read + summed, reading + summing, strict=True):
                value = held[name]
                setattr(visitor, name, State(value.names, tensor) if isinstance(value, State) else tensor)
            yield from walk(self.plan, self.rows, [visitor], symmetric=False)

    def new_slots(self) -> tuple[Tensor, list[Kept]]:
        """Memory for the tiles that the plan keeps, as one tensor and as its parts."""
        size = self.plan.kept * (self.plan.rows * self.plan.columns + 1)
        if self.plan.passes == 1:
            memory = borrow("slots", size, self.compute, self.device)[:size]
        else:
            memory = torch.empty(size, dtype=self.compute, device=self.device)
        return memory, self.slots(memory)

    def slots(self, memory: Tensor) -> list[Kept]:
        """The parts: first a shift for every tile, then the tiles."""
        count = self.plan.kept
        if count == 0:
            return []
        shifts, tiles = memory[:count].tolist(), memory[count:].view(count, -1)
        return [Kept(buffer, shift) for buffer, shift in zip(tiles, shifts, strict=True)]

    def attach_gradients(self) -> None:
        """Give every block whose features need a gradient memory to sum it in."""
        for block, need in self.features():
            if need:
                block.grad = torch.zeros_like(block.features, dtype=self.compute, memory_format=torch.contiguous_format)

    def attach_gradients_in_one(self) -> Tensor:
        """The same, in a single tensor."""
        needed = [block for block, need in self.features() if need]
        size = sum(block.features.numel() for block in needed)
        memory = torch.zeros(size, dtype=self.compute, device=self.device)
        for block, part in zip(needed, torch.split(memory, [block.features.numel() for block in needed]), strict=True):
            block.grad = part.view(block.features.shape)
        return memory

    # ---- what can only be seen by looking at the data

    def check_values(self) -> None:
        function, inputs = self.call.function, self.inputs
        if not math.isfinite(self.scale):
            raise ValueError(
                f"{function}: logit_scale (1 / temperature) must be finite, got {self.scale}. Clamp it, as CLIP does "
                "at 100; a temperature must be positive."
            )
        if not math.isfinite(self.bias):
            raise ValueError(f"{function}: logit_bias must be finite, got {self.bias}.")
        if inputs.weight is not None:
            low, high = (bound.item() for bound in inputs.weight.aminmax())
            if not 0 <= low <= high < math.inf:
                raise ValueError(
                    f"{function}: weight must be finite and not negative, got {low} to {high}. Use 0 to leave a row "
                    "out."
                )
            total = inputs.weight.sum(dtype=torch.float64).item()
            if not 0 < total < math.inf:
                raise ValueError(f"{function}: weight must have a positive, finite sum, got {total}.")
        if inputs.positives is not None:
            low, high = (bound.item() for bound in inputs.positives.aminmax())
            last = len(self.columns[0]) - 1
            if low < 0 or high > last:
                raise ValueError(f"{function}: positives must be rows of key, 0 to {last}, got {low} to {high}.")
        if self.call.normalize is None and function not in _SEEN:
            _SEEN.add(function)
            lengths = [_lengths(block.features, self.compute) for block, _ in self.features()]
            low, high = (bound.item() for bound in torch.cat(lengths).aminmax())
            if max(abs(low - 1), abs(high - 1)) > 0.01:
                warnings.warn(
                    f"{function}: the rows of the first batch are not of unit length, but from {low:.4g} to "
                    f"{high:.4g}. Pass normalize=True for cosine similarity, or normalize=False if dot products are "
                    "meant.",
                    stacklevel=2,
                )


def inverse_lengths(features: Tensor, compute: torch.dtype) -> Tensor:
    """What makes every row one of unit length."""
    return _lengths(features, compute).reciprocal_().clamp_max_(LONGEST_INVERSE)


def _lengths(features: Tensor, compute: torch.dtype) -> Tensor:
    strips = torch.split(features, strip_height(features))
    return torch.cat([torch.linalg.vector_norm(x.to(compute), dim=1) for x in strips])


def strip_height(features: Tensor) -> int:
    """Rows at a time where features are read outside of tiles: about 1 MiB in float32."""
    return max(1, 2**18 // features.shape[1])


def attach(side: list[Block], name: str, values: Tensor | State) -> None:
    """Give every block of a side its part of a vector, or of a state, that covers the side."""
    if len(side) == 1:
        setattr(side[0], name, values)
        return
    start = 0
    for block in side:
        stop = start + len(block)
        setattr(block, name, values.cut(start, stop) if isinstance(values, State) else values[start:stop])
        start = stop
