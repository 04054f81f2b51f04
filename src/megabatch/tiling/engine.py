"""The forward and the backward of a call on plain tensors: below autograd, above the tiles.

Letters: x the features of a row as products multiply them; A the sum over its columns of dlogits * column, so that
d loss / d x = factor * scale * A, with one factor for all rows.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from ..backends import workspace
from ..backends.backend import Backend, Kept, float32_precision, shaped
from ..losses.block import Block, Tile
from ..losses.state import State, state_fields
from .guards import LARGEST_INVERSE_NORM, Norms, inverse_norms, measure_norms, row_norms, strip_height
from .handshake import Handshake
from .layout import Layout
from .options import LossInputs, LossOptions
from .plan import Plan, Sizes, make_plan
from .saved import Gradients, SavedNumbers, SavedTensors

NUM_STATS, NUM_SUMS = 7, 5


class Engine:
    """One forward or backward: where its rows are, the plan for its tiles, and the backend that computes them."""

    def __init__(
        self,
        inputs: LossInputs,
        options: LossOptions,
        norms: Norms,
        handshake: Handshake,
        plan: Plan | None = None,
    ) -> None:
        """A backward comes with the plan of its forward: made anew it might differ, if the number of threads has."""
        self.inputs, self.options, self.spec, self.handshake = inputs, options, options.spec, handshake
        self.ranks, self.scale = handshake.ranks, handshake.scale
        self.layout = Layout(inputs, self.spec, norms, self.ranks, handshake.infos, overlap=options.overlap)
        self.layout.gathers = self._gathers()
        operand_dtype = self._operand_dtype()
        self.sum_for_scale = self._sum_for_scale(operand_dtype)
        self.plan = plan or self._make_plan(operand_dtype)
        self.backend: Backend = handshake.backend(
            self.spec,
            self.scale,
            handshake.bias,
            self.layout.dtype,
            self.layout.device,
            operand_dtype=operand_dtype,
            stats=options.return_stats,
            sum_for_scale=self.sum_for_scale,
            sum_for_bias=handshake.needs.bias,
        )

    # ---- decisions

    def _operand_dtype(self) -> torch.dtype | None:
        """What products multiply, where that is not what they are summed in: bf16 or fp16."""
        half = self.handshake.backend.multiplies_half(self.layout.device, bool(self.options.normalize))
        if not half or self.layout.dtype == torch.float64:
            return None
        if self.options.autocast_dtype:
            dtype: torch.dtype = getattr(torch, self.options.autocast_dtype)
            return dtype
        return None if self.inputs.rows.dtype == torch.float32 else self.inputs.rows.dtype

    def _sum_for_scale(self, operand_dtype: torch.dtype | None) -> bool:
        """Whether the scale's gradient is summed tile by tile: where no side has whole and exact feature gradients."""
        layout = self.layout
        whole = layout.all_need(layout.row_inputs) or layout.all_need(layout.column_inputs)
        exact = operand_dtype is None and float32_precision(layout.device) == "ieee"
        return self.handshake.needs.scale and not (exact and whole)

    def _gathers(self) -> bool:
        """Whether columns are exchanged all at once."""
        if self.options.exchange != "auto" or self.ranks.size == 1:
            return self.options.exchange == "gather"
        infos = self.handshake.infos
        features: int = max(dtype.itemsize for info in infos for dtype in info.dtypes)
        gradients = 2 * max(features, torch.float32.itemsize)  # those that are sent and those that are received
        budget = min(info.budget or self.handshake.backend.default_budget for info in infos)
        return self.layout.num_columns * self.layout.width * (features + gradients) <= budget

    def _make_plan(self, operand_dtype: torch.dtype | None) -> Plan:
        """Or the same error on all ranks."""
        layout, error = self.layout, None
        operand = operand_dtype or layout.dtype
        sizes = Sizes(
            rows=tuple(map(len, layout.rows)),
            columns=tuple(map(len, layout.columns)),
            remote=tuple(layout.remote_lengths()),
            width=layout.width,
            element=layout.dtype.itemsize,
            operand=operand.itemsize,
            copied=layout.normalized or any(block.features.dtype != operand for block in layout.feature_blocks()),
            sum_for_scale=self.sum_for_scale,
            backend=self.handshake.backend,
            threads=torch.get_num_threads() if layout.device.type == "cpu" else 2,
        )
        one_pass = any(self.options.needs) and self.options.reduction != "none" and self.ranks.size == 1
        try:
            plan = make_plan(self.options, sizes, one_pass)
        except ValueError as refused:
            error = refused.with_traceback(None)
        self.handshake.agree_on_plan(error)
        return plan

    # ---- tiles

    def strips(self, brought: tuple[str, ...] = (), collected: str = "") -> Iterator[list[Tile]]:
        return self.layout.strips(self.plan.rows, self.plan.columns, brought, collected)

    def slots(self, memory: Tensor, marks: Iterable[float]) -> list[Kept]:
        """The memory of the tiles that the plan keeps, by tile."""
        size = self.plan.slot_size
        return [Kept(memory[index * size : (index + 1) * size], mark) for index, mark in enumerate(marks)]

    # ---- blocks

    @cached_property
    def row_weight(self) -> Tensor:
        """The weight of every row of one input."""
        weight, rows = self.inputs.weight, self.inputs.rows
        return rows.new_ones(len(rows), dtype=torch.float64) if weight is None else weight.double()

    def weights(self, side: list[Block]) -> Tensor:
        """The weight of every row of a side that has losses."""
        return self.row_weight.repeat(len(side)) if len(side) > 1 else self.row_weight

    def attach_row_grads(self, side: list[Block], upstream: Tensor | None = None) -> None:
        """d objective / d (loss of every row), up to a factor common to all."""
        row_grad, largest = self.weights(side), self.handshake.largest_row_grad
        if not self.spec.has_targets:
            row_grad = torch.cat([block.state.where_positives(self.spec, self.row_weight) for block in side])
        if upstream is not None:
            row_grad = row_grad * upstream
        attach(side, row_grad if largest == 1 else row_grad / largest)
        for block in side:
            block.has_unit_row_grad = self.inputs.weight is None and upstream is None and self.spec.has_targets

    def scalar_sums(self) -> Tensor:
        """sum(dlogits * x.y) and sum(dlogits), where the scale and the bias need them."""
        needs, backend = self.handshake.needs, self.backend
        if not (needs.scale or needs.bias):
            return torch.zeros(2, dtype=torch.float64, device=self.layout.device)
        if self.sum_for_scale or not needs.scale:
            return backend.scalar_sums
        scale_sum = _scale_sum(self)
        return torch.stack([scale_sum, backend.scalar_sums[1]]) if needs.bias else scale_sum[None]

    @property
    def needing(self) -> list[Block]:
        """The blocks whose features need a gradient."""
        return [block for block, need in zip(self.layout.feature_blocks(), self.options.needs, strict=False) if need]


def forward(inputs: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor | None, SavedTensors, SavedNumbers]:
    """The loss, its statistics, and what the backward needs: the gradients themselves, where the plan says so."""
    norms, error = Norms((None,) * 3, (0.0,) * 3), None
    try:
        norms = measure_norms(inputs, options)
    except Warning as raised:  # which the user turned into an error: on all ranks, then
        error = raised.with_traceback(None)
    engine = Engine(inputs, options, norms, Handshake.of_forward(inputs, options, norms, error))
    layout, spec, plan = engine.layout, engine.spec, engine.plan
    blocks = layout.feature_blocks()
    state = State.neutral(state_fields(spec, options.return_stats), sum(map(len, blocks)), layout.device)
    attach(blocks, state)
    marks: list[float] = []
    if plan.one_pass:
        kept, scalars = _one_pass(engine)
    else:
        kept = workspace.allocate(plan.kept * plan.slot_size, layout.dtype, layout.device)
        slots = engine.slots(kept, [0.0] * plan.kept)
        # What other ranks add up for this rank's columns: their state, where columns have one.
        collected = "state" if spec.two_sided or (spec.epilogue == "sigmoid" and options.return_stats) else ""
        tiles = chain.from_iterable(engine.strips(collected=collected))
        for index, tile in enumerate(tiles):
            engine.backend.accumulate_statistics(tile, slots[index] if index < len(slots) else None)
        marks = [slot.mark for slot in slots]
    value, stats, denominator = _reduce(engine, state)
    if not plan.one_pass:
        state.fill_empty_rows(spec)
        scalars = denominator.view(1) if isinstance(denominator, Tensor) else value.new_empty(0, dtype=torch.float64)
    numbers = SavedNumbers(
        plan,
        engine.ranks.num_handshakes,
        any(engine.handshake.needs),
        math.nan,
        math.nan if isinstance(denominator, Tensor) else denominator,
        marks,
        engine.handshake.infos,  # and not the handshake: a group must not live as long as the loss
    )
    return value, stats, SavedTensors(state.table, kept, scalars), numbers


def _one_pass(engine: Engine) -> tuple[Tensor, Tensor]:
    """Gradients in the forward: those of a tile as soon as its rows are complete, while its logits are at hand. Returns
    those of the features, in one tensor, and those of scale and bias."""
    layout, spec, backend = engine.layout, engine.spec, engine.backend
    sizes = [block.features.numel() for block in engine.needing]
    gradients = torch.empty(sum(sizes), dtype=layout.dtype, device=layout.device)
    for block, part in zip(engine.needing, torch.split(gradients, sizes), strict=True):
        block.new_grad(part)
    engine.attach_row_grads(layout.rows)
    size = engine.plan.kept * engine.plan.slot_size
    memory = workspace.buffer("slots", size, layout.dtype, layout.device)
    slots = engine.slots(memory, [0.0] * engine.plan.kept)
    for strip in engine.strips():
        # A pair of a sigmoid loss is complete by itself, a row of a softmax at the end of its strip.
        groups = [[tile] for tile in strip] if spec.epilogue == "sigmoid" else [strip]
        for group in groups:
            for tile, slot in zip(group, slots, strict=True):
                backend.accumulate_statistics(tile, slot)
            for tile, slot in zip(group, slots, strict=True):
                backend.accumulate_gradients(tile, slot)
    factor = engine.handshake.largest_row_grad / spec.directions
    if engine.options.reduction == "mean":
        factor /= engine.handshake.weight_sum * len(layout.rows)
    return gradients, _finish_gradients(engine, factor)


def backward(
    inputs: LossInputs, options: LossOptions, upstream: Tensor, saved: SavedTensors, numbers: SavedNumbers
) -> Gradients:
    """The gradient of every input that needs one."""
    if numbers.plan.one_pass:
        return _rescaled(inputs, options, upstream, saved)
    inverse: tuple[Tensor | None, ...] = (None,) * 3
    if options.normalize:
        inverse = tuple(None if x is None else inverse_norms(row_norms(x)) for x in inputs.features)
    handshake = Handshake.of_backward(inputs, options, numbers.infos, upstream, numbers.forward_number)
    norms = Norms(inverse, handshake.infos[handshake.ranks.rank].max_norms)
    engine = Engine(inputs, options, norms, handshake, numbers.plan)
    layout, spec = engine.layout, engine.spec
    state = State(state_fields(spec, options.return_stats), saved.state, numbers.shared_max)
    attach(layout.feature_blocks(), state)
    for side in (layout.rows, layout.columns)[: spec.directions]:
        engine.attach_row_grads(side, upstream.double() if options.reduction == "none" else None)
    for block in engine.needing:
        block.new_grad(torch.empty(block.features.shape, dtype=layout.dtype, device=layout.device))
    slots = engine.slots(saved.kept, numbers.marks)
    brought = ("state", "row_grad") if spec.two_sided else ()
    needs_scalars = handshake.needs.scale or handshake.needs.bias
    for index, tile in enumerate(chain.from_iterable(engine.strips(brought, collected="grad"))):
        # On other ranks' account this one meets tiles on which no gradient depends.
        if tile.rows.grad is not None or tile.columns.grad is not None or needs_scalars:
            engine.backend.accumulate_gradients(tile, slots[index] if index < len(slots) else None)
    factor: Tensor | float = handshake.largest_row_grad / spec.directions
    if options.reduction == "mean":
        factor = factor / (saved.scalars if math.isnan(numbers.denominator) else numbers.denominator)
    if options.reduction != "none":
        factor = factor * (upstream.item() if layout.device.type == "cpu" else upstream.double())
    scalars = _finish_gradients(engine, factor)
    features = [block.grad for block in engine.needing if block.grad is not None]
    return _as_inputs(inputs, options, features, scalars)


def _rescaled(inputs: LossInputs, options: LossOptions, upstream: Tensor, saved: SavedTensors) -> Gradients:
    """The forward's gradients times what the caller makes of the loss."""
    needed = [x for x, need in zip(inputs.features, options.needs, strict=False) if x is not None and need]
    parts = torch.split(saved.kept, [x.numel() for x in needed])
    upstream = upstream.to(saved.kept.dtype)
    features = (part.view(x.shape) * upstream for x, part in zip(needed, parts, strict=True))
    return _as_inputs(inputs, options, features, saved.scalars * upstream)


def _as_inputs(inputs: LossInputs, options: LossOptions, features: Iterable[Tensor], scalars: Tensor) -> Gradients:
    """One rounding to the dtype of each input; no two of them share memory."""
    found = chain(features, (scalars[index] for index, need in enumerate(options.needs[3:]) if need))
    given = zip(inputs[:5], options.needs, strict=True)
    return Gradients(*(_like(next(found), x) if x is not None and need else None for x, need in given))


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    if gradient.dim() == 0:
        return gradient.to(x, copy=True).view(x.shape)
    return gradient if gradient.dtype == x.dtype else gradient.to(x.dtype)


def _finish_gradients(engine: Engine, factor: Tensor | float) -> Tensor:
    """From sums of dlogits to gradients: those of features in place, those of scale and bias are returned."""
    options, ranks = engine.options, engine.ranks
    sums = engine.scalar_sums()
    # A rank's features have their own part of the gradient, the scale's is whole on all: n times the former, where the
    # trainer averages over n ranks; the n-th part of the latter, where it adds or the losses are per row.
    averaged = options.reduction != "none" and options.grad_reduction == "mean"
    coefficient = factor * (engine.scale * (ranks.size if averaged else 1))
    for block in engine.needing:
        assert block.grad is not None
        if block.inverse_norm is not None:
            _backward_of_normalization(block)
        block.grad.mul_(coefficient)
    return ranks.all_sum(sums * factor) / (1 if averaged else ranks.size) if ranks.size > 1 else sums * factor


def _backward_of_normalization(block: Block) -> None:
    for strip in block.strips(strip_height(block.features)):
        assert strip.grad is not None
        assert strip.inverse_norm is not None
        x = _as_multiplied(strip)
        along = torch.linalg.vecdot(x, strip.grad)[:, None]
        # A length that was clamped is a constant.
        along.masked_fill_(strip.inverse_norm[:, None] >= LARGEST_INVERSE_NORM, 0.0)
        strip.grad.addcmul_(x, along, value=-1).mul_(strip.inverse_norm[:, None])


def _scale_sum(engine: Engine) -> Tensor:
    """sum(dlogits * x.y) = sum(x.A) over either side; a symmetric loss has it twice."""
    layout = engine.layout
    side = layout.rows if layout.all_need(layout.row_inputs) else layout.columns
    sums = []
    for strip in (strip for block in side for strip in block.strips(strip_height(block.features))):
        assert strip.grad is not None
        buffer = workspace.buffer("products", strip.grad.numel(), layout.dtype, layout.device)
        product = torch.mul(_as_multiplied(strip), strip.grad, out=shaped(buffer, (len(strip), layout.width)))
        sums.append(product.sum(1).sum(dtype=torch.float64))
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=layout.device)
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return total / 2 if engine.spec.symmetric else total


def _as_multiplied(block: Block) -> Tensor:
    assert block.grad is not None
    features = block.features.to(block.grad.dtype)
    return features if block.inverse_norm is None else features * block.inverse_norm[:, None]


def attach(side: list[Block], values: Tensor | State) -> None:
    """Give every block of a side its part of the state, or of the gradients of rows, that covers the side."""
    start = 0
    for block in side:
        stop = start + len(block)
        if isinstance(values, State):
            block.state = values.slice(start, stop)
        else:
            block.row_grad = values if len(side) == 1 else values[start:stop]
        start = stop


# ---- from the losses of rows to the value


def _reduce(engine: Engine, state: State) -> tuple[Tensor, Tensor | None, Tensor | float]:
    """The value, the statistics, and what the mean divides by."""
    spec, options, layout = engine.spec, engine.options, engine.layout
    num_rows = sum(map(len, layout.rows))
    rows = state if spec.symmetric or spec.column_loss else state.slice(0, num_rows)
    losses = rows.losses(spec)
    if spec.column_loss and engine.inputs.weight is None and options.reduction != "none":
        sums = [losses.sum() / 2]
    else:
        if spec.column_loss:
            losses = (losses[:num_rows] + losses[num_rows:]) / 2
        if engine.inputs.weight is not None:
            losses = losses * engine.weights(layout.rows)
        sums = [losses.sum()]
    if not spec.has_targets:
        sums.append(rows.where_positives(spec, engine.weights(layout.rows)).sum())
    if options.return_stats:
        columns = state if spec.symmetric else state.slice(num_rows, None)
        sums += _statistics(engine, state if spec.symmetric else state.slice(0, num_rows), columns)
    if len(sums) > 1 or options.group:
        totals = engine.ranks.all_sum(torch.stack(sums))
        sums = [totals[index] for index in range(len(sums))]
    denominator: Tensor | float = engine.handshake.weight_sum * len(layout.rows)
    if not spec.has_targets:  # 1 where no row has positives, and every loss is 0
        denominator = torch.where(sums[1] == 0, 1.0, sums[1])
    mean = sums[0] / denominator
    value = {"mean": mean, "sum": sums[0], "none": losses}[options.reduction].to(layout.dtype)
    if not options.return_stats:
        return value, None, denominator
    means = torch.stack(sums[-NUM_SUMS:]) / denominator
    return value, torch.cat([mean[None], means[3:].mean()[None], means]), denominator


def _statistics(engine: Engine, rows: State, columns: State) -> list[Tensor]:
    """Sums over the rows: of the positive logits, the losses of both directions, and the right answers of both."""
    spec = engine.spec
    weight = rows.where_positives(spec, engine.weights(engine.layout.rows))
    sides = [rows, columns] if spec.column_loss or spec.epilogue == "sigmoid" else [rows]
    losses = [side.losses(spec) for side in sides]
    # Equal columns of different tiles may differ by a rounding or two: they still tie.
    slack = 4 * torch.finfo(engine.layout.dtype).eps
    right = [side["top_positive"] >= side["top"] - slack * side["top"].abs() for side in sides]
    return [
        (weight * values).sum() for values in (rows.positive_logits(spec), losses[0], losses[-1], right[0], right[-1])
    ]
