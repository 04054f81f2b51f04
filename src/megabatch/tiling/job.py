"""Job: a call with its tensors laid out as the two sides of the plane, its plan and its backend."""

from collections.abc import Iterator
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from ..backends.backend import Backend, Kept, float32_precision
from ..backends.workspace import borrow
from ..distributed.ring import Turn
from ..losses.block import Block, Tile
from ..losses.state import State
from .call import Call, Inputs
from .meeting import Meeting
from .plan import Plan, Shape, make_plan, slot_size
from .values import compute_dtype, inverse_lengths
from .visitors import Visitors
from .walk import walk


class Job:
    """What the forward and the backward of one call have in common.

    Attributes:
        rows, columns: The blocks of the two sides; of a symmetric plane, the same list.
        compute: dtype of logits, slopes and sums of gradients.
    """

    def __init__(
        self,
        inputs: Inputs,
        call: Call,
        plan: Plan | None = None,
        upstream: Tensor | None = None,
        forward: int = 0,
    ) -> None:
        """The forward's plan and number, and `upstream`, come with a backward."""
        self.inputs, self.call, self.spec = inputs, call, call.spec
        self.meeting = Meeting(inputs, call, upstream, forward)
        self.ranks = self.meeting.ranks
        self.device = inputs.first.device
        self.compute = compute_dtype(inputs.first)
        self.scale, self.bias = self.meeting.scale, self.meeting.bias
        self.rows, self.columns = self._sides()
        self.num_rows, self.num_columns = sum(map(len, self.rows)), sum(map(len, self.columns))
        product = self._product()
        self.sums_slopes = self._sums_slopes(product)
        self.plan = plan or self._make_plan(product)
        self.backend: Backend = self.meeting.backend(
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
        rank, (ids, second_ids, extra_ids) = self.ranks.rank, map(_long, self.inputs[5:8])
        # Where this rank's rows and columns begin among everyone's.
        starts = [place.start for place in self.meeting.row_places[rank]]
        column_starts = [place.start for place in self.meeting.column_places[rank]]
        if self.spec.symmetric and second is None:
            rows = columns = [Block(first, starts[0], ids)]
        elif self.spec.symmetric:
            assert second is not None
            of_first, of_second = (self._paired(start, len(first)) for start in starts)
            rows = columns = [Block(first, starts[0], ids, *of_second), Block(second, starts[1], ids, *of_first)]
        else:
            assert second is not None
            positives = self.inputs.positives
            target, within = self._paired(column_starts[0], len(first))
            if positives is not None:
                target, within = positives.long() + column_starts[0], None
            rows = [Block(first, starts[0], ids, target, within)]
            columns = [Block(second, column_starts[0], second_ids)]
            if extra is not None:
                columns.append(Block(extra, column_starts[1], extra_ids))
        if self.call.normalize:
            for block in {id(block): block for block in rows + columns}.values():
                block.inverse_norm = inverse_lengths(block.features)
        return rows, columns

    def _paired(self, start: int, count: int) -> tuple[Tensor, tuple[int, int] | None]:
        return torch.arange(start, start + count, device=self.device), (start, start + count)

    def features(self) -> list[tuple[Block, bool]]:
        """The blocks of the feature inputs in their order, and whether each gets a gradient."""
        blocks = self.rows if self.spec.symmetric else self.rows + self.columns
        return list(zip(blocks, self.call.needs, strict=False))

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

    # ---- decisions

    def _product(self) -> torch.dtype | None:
        """What products multiply in, where that is not what they are summed in: halves."""
        halves = self.meeting.backend.multiplies_halves(self.device, bool(self.call.normalize))
        if not halves or self.compute == torch.float64:
            return None
        if self.call.product:
            return self.call.product_dtype
        return None if self.inputs.first.dtype == torch.float32 else self.inputs.first.dtype

    def _make_plan(self, product: torch.dtype | None) -> Plan:
        """Or the same error on all ranks."""
        error = None
        try:
            plan = make_plan(self.call, self._shape(product), self._one_pass())
        except ValueError as refused:
            error = refused
        self.meeting.agree_on_plans(error)
        return plan

    def _shape(self, product: torch.dtype | None) -> Shape:
        wanted = product or self.compute
        blocks = self.rows + self.columns
        return Shape(
            rows=tuple(map(len, self.rows)),
            columns=tuple(map(len, self.columns)),
            visiting=tuple(place.length for place in self.meeting.visiting()),
            width=self.inputs.first.shape[1],
            element=self.compute.itemsize,
            operand=wanted.itemsize,
            copied=any(block.features.dtype != wanted or block.inverse_norm is not None for block in blocks),
            products=self.sums_slopes,
            backend=self.meeting.backend,
            threads=torch.get_num_threads() if self.device.type == "cpu" else 2,
        )

    def _one_pass(self) -> bool:
        """Whether the forward walk may compute gradients: what the caller makes of the loss is one factor then."""
        return any(self.call.needs) and self.call.reduction != "none" and self.ranks.size == 1

    def _sums_slopes(self, product: torch.dtype | None) -> bool:
        """Whether the scale's gradient is summed tile by tile: where no side has whole and exact feature gradients."""
        needed = self.meeting.all_needed(self.meeting.row_places) or self.meeting.all_needed(self.meeting.column_places)
        exact = product is None and float32_precision(self.device) == "ieee"
        return self.meeting.wanted.scale and not (exact and needed)

    def scale_side(self) -> list[Block]:
        """The side whose feature gradients give the scale's."""
        return self.rows if self.meeting.all_needed(self.meeting.row_places) else self.columns

    # ---- the walk

    def strips(self, brought: tuple[str, ...] = (), carried: str = "") -> Iterator[list[Tile]]:
        """The tiles of the plane by strips of rows: half of those with the own columns, those with the columns of every
        visiting rank, and the other half.

        `brought` and `carried` name what travels with columns, and what is added up for them.
        """
        own = walk(self.plan, self.rows, self.columns, self.spec.symmetric)
        if self.ranks.size == 1:
            yield from own
            return
        half = -(-sum(-(-len(block) // self.plan.rows) for block in self.rows) // 2)
        brought = ("features", "ids", "inverse_norm", *brought)
        visitors = Visitors(self.meeting, self.columns, self.compute, brought, carried)
        turn = Turn(self.ranks, self.meeting.reach, self.call.overlap, self.meeting.gathers())
        for visit in turn.visits(visitors.cargo()):
            if visit.parcel is None:
                yield from islice(own, half)
            else:
                rows, columns = self._shared(visit.owner, visitors.arrive(visit))
                yield from walk(self.plan, rows, columns, symmetric=False)

    def moves(self, tile: Tile) -> bool:
        """Whether any gradient hangs on a tile: on other ranks' account this one walks some where none does."""
        wanted = self.meeting.wanted
        return tile.rows.grad is not None or tile.columns.grad is not None or wanted.scale or wanted.bias

    def _shared(self, owner: int, columns: list[Block]) -> tuple[list[Block], list[Block]]:
        """This rank's part of what lies between it and another. Opposite ranks of a half turn meet twice: the lower one
        takes all its rows and the first half of the columns, which leaves the other the second half of its rows."""
        if not self.spec.symmetric or 2 * abs(self.ranks.rank - owner) != self.ranks.size:
            return self.rows, columns
        if self.ranks.rank < owner:
            return self.rows, [block.cut(0, len(block) // 2) for block in columns]
        return [block.cut(len(block) // 2, len(block)) for block in self.rows], columns

    def new_slots(self) -> tuple[Tensor, list[Kept]]:
        """Memory for the tiles that the plan keeps, as one tensor and as its parts."""
        size = self.plan.kept * slot_size(self.plan.rows, self.plan.columns)
        if self.plan.passes == 1:
            memory = borrow("slots", size, self.compute, self.device)[:size]
        else:
            memory = torch.empty(size, dtype=self.compute, device=self.device)
        return memory, self.slots(memory)

    def slots(self, memory: Tensor) -> list[Kept]:
        """The parts: first the tiles, whose memory is aligned, then a mark for each."""
        count = self.plan.kept
        if count == 0:
            return []
        marks, tiles = memory[-count:].tolist(), memory[:-count].view(count, -1)
        return [Kept(buffer, mark) for buffer, mark in zip(tiles, marks, strict=True)]

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


def _long(ids: Tensor | None) -> Tensor | None:
    """As ids travel, and as kernels read them: those of another rank may have been narrower."""
    return None if ids is None else ids.long().contiguous()


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
