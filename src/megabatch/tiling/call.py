"""Call: everything that is decided about a forward or a backward before its first tile."""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..backends.backend import Backend, float32_precision
from ..losses.block import Block, Tile
from ..losses.state import OWN_MAX, State, has_column_statistics, state_fields
from .handshake import Handshake
from .layout import Layout
from .options import LossInputs, LossOptions
from .plan import Plan, Sizes, make_plan

SMALLEST = torch.finfo(torch.float64).tiny
SHORT_STEP = {"cpu": 2**32, "gpu": 2**36}  # operations of one step of a ring, against the latency of a message
WIDE = 2**16  # features, for which the default budget may not do


class Call:
    """One forward or backward: where its rows are, the plan for its tiles, and the backend that computes them."""

    def __init__(
        self,
        inputs: LossInputs,
        options: LossOptions,
        handshake: Handshake,
        plan: Plan | None = None,
        shift: float | None = None,
        gathered: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """A backward comes with plan and shift of its forward, made anew they might differ, and what that gathered."""
        if weights is not None and len(weights):
            self.weights = weights
        self.inputs, self.options, self.spec, self.handshake = inputs, options, options.spec, handshake
        self.ranks, self.scale = handshake.ranks, handshake.scale
        self.layout = Layout(inputs, self.spec, self.ranks, handshake.info, bool(options.normalize), options.overlap)
        self.layout.gathers = self._gathers()
        self.layout.has_column_statistics = has_column_statistics(self.spec, options.return_stats)
        operand_dtype = self._operand_dtype()
        self.side_for_scale = self._side_for_scale(operand_dtype) if handshake.needs.scale else []
        self.sum_for_scale = handshake.needs.scale and not self.side_for_scale
        self.shift = self._common_shift() if shift is None else shift
        self.plan = plan or self._make_plan(operand_dtype)
        if self.layout.gathers:
            self.gathered = self.layout.gather(gathered)
        else:
            self.gathered = inputs.rows.new_empty(0, dtype=torch.uint8)
        self.backend: Backend = handshake.backend(
            self.spec,
            self.scale,
            handshake.bias,
            self.layout.dtype,
            operand_dtype,
            self.layout.device,
            stats=options.return_stats,
            sum_for_scale=self.sum_for_scale,
            sum_for_bias=handshake.needs.bias,
            one_pass=self.plan.one_pass,
            shift=self.shift,
        )

    # ---- decisions

    def _operand_dtype(self) -> torch.dtype:
        """What products multiply."""
        half = self.handshake.backend.multiplies_half(self.layout.device, bool(self.options.normalize))
        if not half or self.layout.dtype == torch.float64:
            return self.layout.dtype
        autocast: torch.dtype | None = getattr(torch, self.options.autocast_dtype, None)
        return autocast or self.inputs.rows.dtype

    def _side_for_scale(self, operand_dtype: torch.dtype) -> list[Block]:
        """A side from whose gradients the scale's follows, because they are exact and, on all ranks, whole; or none."""
        layout, info = self.layout, self.handshake.info
        if operand_dtype == layout.dtype and float32_precision(layout.device) == "ieee":
            sides = ((layout.rows, layout.row_inputs), (layout.columns, layout.column_inputs))
            # Gathered rows have their whole gradient at once, columns only when they are back at home.
            for side, which in sides[:1] if layout.gathers else sides:
                both = [pair for index in which for pair in zip(info.needs[index], info.rows[index], strict=True)]
                if all(need or not length for need, length in both):
                    return side
        return []

    def _common_shift(self) -> float:
        """See Backend.common_shift. It follows from what all ranks know."""
        if self.spec.epilogue == "sigmoid":
            return 0.0
        norms = list(map(max, self.handshake.info.max_norms))
        x, y = (max(norms[index] for index in side) for side in (self.layout.row_inputs, self.layout.column_inputs))
        if isinstance(self.scale, Tensor) or isinstance(self.handshake.bias, Tensor):
            return OWN_MAX
        shift = self.handshake.backend.common_shift(abs(self.scale) * x * y + abs(self.handshake.bias))
        # Whether it was too much is seen afterwards, and an accelerator would have to be waited for.
        return shift if shift <= 0 or self.layout.device.type == "cpu" else OWN_MAX

    def _gathers(self) -> bool:
        """Whether columns are exchanged all at once."""
        if self.options.exchange != "auto" or self.ranks.size == 1:
            return self.options.exchange == "gather" and self.ranks.size > 1
        info, layout = self.handshake.info, self.layout
        # The message, a copy of what is in it, and the gradients: all that are here, those that leave, those that come.
        features = 2 * max(info.dtype(index).itemsize for index in layout.column_inputs)
        gradients = 3 * layout.dtype.itemsize
        budget = min(budget or self.handshake.backend.default_budget for budget in info.budget)
        fits = info.length(*layout.column_inputs) * layout.width * (features + gradients) <= budget
        # Long steps of a ring hide their messages; of short ones, messages are the most of it.
        longest = max(map(sum, zip(*info.rows, strict=True)))
        return fits and 8 * longest**2 * layout.width <= SHORT_STEP["cpu" if layout.device.type == "cpu" else "gpu"]

    def _make_plan(self, operand_dtype: torch.dtype) -> Plan:
        """Or the same error on all ranks."""
        layout = self.layout
        features = [x for x in self.inputs.features if x is not None]
        columns, remote = layout.column_lengths()
        sizes = Sizes(
            rows=tuple(map(len, layout.rows)),
            columns=tuple(columns),
            remote=tuple(remote),
            width=layout.width,
            element=layout.dtype.itemsize,
            operand=operand_dtype.itemsize,
            copied=layout.normalize or any(x.dtype != operand_dtype or x.stride(1) != 1 for x in features),
            sum_for_scale=self.sum_for_scale,
            backend=self.handshake.backend,
            threads=torch.get_num_threads() if layout.device.type == "cpu" else 0,
        )
        one_pass = any(self.options.needs) and self.options.reduction != "none" and self.ranks.size == 1
        with self.ranks.deferred_errors() as errors:
            plan = make_plan(self.options, sizes, one_pass)
        # No other plan can fail, and where one may, all ranks ask whether it did.
        if errors or layout.width > WIDE or any(layout.info.budget):
            self.ranks.where += ", its second part"
            self.ranks.handshake({}, errors=errors)
        return plan

    # ---- tiles and blocks

    def tiles(self, kept: Tensor, collects_grads: bool = False) -> Iterator[tuple[Tile, Tensor | None]]:
        """Every tile, with its part of what is kept. See Layout.strips."""
        plan, size = self.plan, self.plan.slot_size
        strips = self.layout.strips(plan.rows, plan.columns, collects_grads)
        for index, tile in enumerate(chain.from_iterable(strips)):
            yield tile, kept[index * size : (index + 1) * size] if index < plan.kept else None

    @cached_property
    def needing(self) -> list[Block]:
        """The blocks whose features need a gradient."""
        return [block for block, need in zip(self.layout.own, self.options.needs, strict=False) if need]

    @cached_property
    def largest_weight(self) -> Tensor | float:
        """1, or what none of the weights exceeds."""
        return 1.0 if self.inputs.weight is None else largest(self.weights)

    @cached_property
    def weights(self) -> Tensor:
        """Of every row with a loss, on all ranks."""
        layout, weight = self.layout, self.inputs.weight
        if weight is None:
            return self.inputs.rows.new_ones(layout.num_losses, dtype=torch.float64)
        weight = layout.gather_rows(weight.double())
        return weight.repeat(len(layout.row_inputs)) if len(layout.row_inputs) > 1 else weight

    def attach_state(self, table: Tensor | None = None) -> State:
        """Give every block its part of the statistics, by default of no columns."""
        names, layout = state_fields(self.spec, self.options.return_stats), self.layout
        if table is None:
            columns = layout.has_column_statistics and not self.spec.symmetric
            length = layout.num_losses + (layout.info.length(*layout.column_inputs) if columns else 0)
            state = State.neutral(names, length, layout.device, self.shift)
        else:
            state = State(names, table)
        layout.attach(state=state)
        return state

    def all_reduce(self, state: State) -> None:
        """Merge the statistics of all ranks, each of which has had tiles of its own rows."""
        if self.shift == OWN_MAX or self.options.return_stats:
            before = state["max"].clone() if "max" in state else None
            self.ranks.all_reduce(state.maxima, ReduceOp.MAX)
            if before is not None:
                state["sum_exp"].mul_((before - state["max"].clamp_min(torch.finfo(torch.float64).min)).exp_())
        self.ranks.all_reduce(state.sums, ReduceOp.SUM)

    def attach_grads(self) -> None:
        """Memory for the gradients of features."""
        layout, blocks = self.layout, self.needing
        if layout.gathers:
            columns = [block for block, index in layout.gathered if self.handshake.needs[index]]
            blocks = columns + [block for block in blocks if not len(block) or layout.is_row_only(block)]
        for block in blocks:
            block.new_grad(torch.empty(block.features.shape, dtype=layout.dtype, device=layout.device))
            if layout.overlaps:
                block.finish_grad()

    @property
    def has_row_grads(self) -> bool:
        """Whether they are not 1 for every row."""
        weighted = self.inputs.weight is not None or self.options.reduction == "none"
        return weighted or not self.spec.has_targets

    def attach_row_grads(self, state: State, largest: Tensor | float, upstream: Tensor | None = None) -> None:
        """d objective / d (loss of every row), divided by the `largest`, so that dlogits are of size 1."""
        if not self.has_row_grads:
            return
        row_grad = state.slice(0, self.layout.num_losses).where_positives(self.spec, self.weights)
        if upstream is not None:
            row_grad = row_grad * upstream
        if isinstance(largest, Tensor):
            row_grad = row_grad / largest
        self.layout.attach(row_grad=row_grad.repeat(self.spec.directions))  # a column's is that of its pair

    def attach_factors(self, state: State) -> None:
        """What dlogits need of the complete statistics, for all rows and columns at once."""
        if self.spec.epilogue == "softmax":
            self.layout.attach(inverse_sum=state["sum_exp"].reciprocal().to(self.layout.dtype))
            if self.shift == OWN_MAX:
                self.layout.attach(float_max=state["max"].to(self.layout.dtype))


def largest(row_grads: Tensor) -> Tensor:
    """Of their sizes, to divide by."""
    return torch.nn.functional.pad(row_grads.abs(), (0, 1), value=SMALLEST).amax()
