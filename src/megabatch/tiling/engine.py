"""The forward and the backward of a call on plain tensors: below the operators, above the tiles.

Letters: x a row's features as the products take them; A the sum over its columns of slope * column, so that
d loss / d x = factor * scale * A, with one factor for all rows.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.state import State, fields, remembered
from .call import Call, Inputs
from .job import Job, attach
from .plan import Plan
from .values import LONGEST_INVERSE, strip_height, warn_of_lengths
from .walk import strips_of


class Outputs(NamedTuple):
    """What the forward leaves; all but `value` and `stats` is for the backward.

    Attributes:
        value: The loss: 0-d, or one per row.
        stats: loss, accuracy, mean positive logit, then loss and accuracy of the rows and of the columns.
        rows, columns: What a backward walk must know of every row and column: `remembered`.
        scalars: Gradients of scale and bias, where the forward walk computed them, then `Remembered`.
        kept: The features' gradients, or the logits that the plan keeps for a backward walk.
    """

    value: Tensor
    stats: Tensor
    rows: Tensor
    columns: Tensor
    scalars: Tensor
    kept: Tensor

    def as_tuple(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A plain one, as operators return it."""
        return self.value, self.stats, self.rows, self.columns, self.scalars, self.kept


class Gradients(NamedTuple):
    """One for every differentiable input; None where none is needed."""

    first: Tensor | None
    second: Tensor | None
    extra: Tensor | None
    scale: Tensor | None
    bias: Tensor | None

    def as_tuple(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Without None, which operators cannot return: empty tensors in its place."""
        first, second, extra, scale, bias = (like.new_empty(0) if value is None else value for value in self)
        return first, second, extra, scale, bias


class Remembered(NamedTuple):
    """Numbers that a backward must know of its forward.

    Attributes:
        denominator: What the mean divides by.
        wanted: Whether any rank needs a gradient.
        forward: The forward's number among the handshakes of its group.
    """

    denominator: float
    wanted: bool
    forward: int
    plan: Plan

    def after(self, gradients: Tensor) -> Tensor:
        """As `Outputs.scalars`."""
        numbers = [self.denominator, self.wanted, self.forward, *self.plan.as_numbers()]
        return torch.cat([gradients, gradients.new_tensor(numbers)])

    @classmethod
    def of(cls, scalars: Tensor) -> "Remembered":
        denominator, wanted, forward, *plan = scalars[2:].tolist()
        return cls(denominator, bool(wanted), int(forward), Plan.from_numbers(plan))


NUM_STATS, NUM_SUMS, NUM_SCALARS = 7, 5, 9


def forward(inputs: Inputs, call: Call) -> Outputs:
    """The loss and, where the plan says so, the gradients with it."""
    job = Job(inputs, call)
    names = fields(job.spec, call.stats)
    rows = State.neutral(names, job.num_rows, job.device)
    columns = rows if job.spec.symmetric else State.neutral(names, job.num_columns, job.device)
    attach(job.rows, "state", rows)
    attach(job.columns, "state", columns)
    if job.plan.passes == 1:
        kept, gradients = _fold_and_push(job, rows)
    else:
        kept, gradients = _fold(job), rows.table.new_zeros(2)
    value, stats, denominator = _reduce(job, rows, columns)
    warn_of_lengths(inputs, call)
    scalars = Remembered(denominator, any(job.meeting.wanted), job.ranks.handshakes, job.plan).after(gradients)
    of_columns = _remember(job, columns) if job.spec.columns else scalars.new_empty(0, 0)
    return Outputs(value, stats, _remember(job, rows), of_columns, scalars, kept)


def _fold(job: Job) -> Tensor:
    """The first of two walks. Returns the logits that the plan keeps."""
    kept, slots = job.new_slots()
    tiles = (tile for strip in job.strips(carried=_carried(job)) for tile in strip)
    for index, tile in enumerate(tiles):
        job.backend.fold(tile, slots[index] if index < len(slots) else None)
    if slots:
        kept[-len(slots) :] = kept.new_tensor([slot.mark for slot in slots])
    return kept


def _carried(job: Job) -> str:
    """What others add up for columns that travel in the forward: their state, where columns have one."""
    return "state" if job.spec.two_sided or (job.spec.link == "sigmoid" and job.call.stats) else ""


def _push(job: Job, kept: Tensor) -> None:
    """The second walk, over the same tiles in the same order."""
    job.attach_gradients()
    slots = job.slots(kept)
    brought = ("state", "pull") if job.spec.two_sided else ()
    tiles = (tile for strip in job.strips(brought, carried="grad") for tile in strip)
    for index, tile in enumerate(tiles):
        if job.moves(tile):
            job.backend.push(tile, slots[index] if index < len(slots) else None)


def _fold_and_push(job: Job, rows: State) -> tuple[Tensor, Tensor]:
    """Both in one walk: tiles are pushed as soon as their rows are complete, while their logits are at hand."""
    gradients = job.attach_gradients_in_one()
    for side in (job.rows, job.columns)[: job.spec.directions]:
        attach(side, "pull", job.weights(side) / job.meeting.largest_pull)
    _, slots = job.new_slots()
    for group, complete in _groups(job):
        for tile, slot in zip(group, slots, strict=True):
            job.backend.fold(tile, slot)
        for block in complete:
            block.state.settle(job.spec)
            block.pull = block.state.weights(job.spec, block.pull)
        for tile, slot in zip(group, slots, strict=True):
            job.backend.push(tile, slot, last=True)
    factor = job.meeting.largest_pull / job.spec.directions
    if job.call.reduction == "mean":
        factor /= _denominator(job, None if job.spec.targets else _weights(job, rows).sum())
    return gradients, _finish(job, factor)


def _groups(job: Job) -> Iterator[tuple[list[Tile], list[Block]]]:
    """The tiles that are folded before any of them can be pushed, and the rows that are complete then."""
    strips = job.strips()
    if job.spec.link == "sigmoid":  # a tile at a time: a pair is complete by itself
        yield from (([tile], []) for strip in strips for tile in strip)
    elif job.spec.two_sided:  # the whole plane, a small one
        blocks = job.rows + job.columns if job.spec.columns else job.rows
        yield [tile for strip in strips for tile in strip], blocks
    else:
        yield from ((strip, [strip[0].rows]) for strip in strips)


def backward(inputs: Inputs, call: Call, upstream: Tensor, outputs: Outputs) -> Gradients:
    """The gradient of every input that needs one, from what the forward left."""
    # The forward's own plan: made anew, it might be another, for the number of threads may have changed.
    denominator, _, forward, plan = Remembered.of(outputs.scalars)
    if plan.passes == 1:
        return _multiplied(inputs, call, upstream, outputs)
    job = Job(inputs, call, plan, upstream, forward)
    names = remembered(job.spec)
    rows = State(names, outputs.rows)
    _attach_pulls(job, rows, State(names, outputs.columns) if job.spec.columns else rows, upstream)
    _push(job, outputs.kept)
    factor: Tensor | float = job.meeting.largest_pull / job.spec.directions
    if call.reduction != "none":
        factor = factor * upstream.double() / (denominator if call.reduction == "mean" else 1.0)
    scalars = _finish(job, factor)
    features = [block.grad for block, _ in job.features() if block.grad is not None]
    return _gradients(inputs, call, features, scalars)


def _multiplied(inputs: Inputs, call: Call, upstream: Tensor, outputs: Outputs) -> Gradients:
    """The forward's gradients times what the caller makes of the loss."""
    needed = [x for x, need in zip(inputs[:3], call.needs, strict=False) if x is not None and need]
    parts = torch.split(outputs.kept, [x.numel() for x in needed])
    upstream = upstream.to(outputs.kept.dtype)
    features = (part.view(x.shape) * upstream for x, part in zip(needed, parts, strict=True))
    return _gradients(inputs, call, features, outputs.scalars[:2] * upstream)


def _gradients(inputs: Inputs, call: Call, features: Iterable[Tensor], scalars: Tensor) -> Gradients:
    """One rounding to the dtype of each input, one after the other; no two of them share memory."""
    needed = (scalar for scalar, need in zip(scalars, call.needs[3:], strict=True) if need)
    found = chain(features, needed)
    given = zip(inputs[:5], call.needs, strict=True)
    return Gradients(*(_like(next(found), x) if x is not None and need else None for x, need in given))


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.to(x, copy=gradient.dim() == 0).view(x.shape)


def _attach_pulls(job: Job, rows: State, columns: State, upstream: Tensor) -> None:
    """Give every row d objective / d (its loss), up to a factor common to all."""
    for side, state in [(job.rows, rows), (job.columns, columns)][: job.spec.directions]:
        pull = job.weights(side)
        if job.spec.link == "softmax":
            attach(side, "state", state)
            pull = state.weights(job.spec, pull)
        if job.call.reduction == "none":
            pull = pull * upstream.double()
        attach(side, "pull", pull / job.meeting.largest_pull)


def _finish(job: Job, factor: Tensor | float) -> Tensor:
    """From sums of slopes to gradients, in place, and those of scale and bias, which are returned."""
    scale_sum, bias_sum = job.backend.slope_sums()
    if job.meeting.wanted.scale and not job.sums_slopes:
        scale_sum = _scale_sum(job)
    scalars = factor * torch.tensor([scale_sum, bias_sum], dtype=torch.float64, device=job.device)
    # A rank's features have their own part of the gradient, the scale's is whole on all: n times the former, where the
    # trainer averages over n ranks; the n-th part of the latter, where it adds or the losses are per row.
    averaged = job.call.reduction != "none" and job.call.grad_reduction == "mean"
    coefficient = factor * job.scale * (job.ranks.size if averaged else 1)
    for block, _ in job.features():
        if block.inverse_norm is not None and block.grad is not None:
            for strip in block.strips(strip_height(block.features)):
                _back_through_normalisation(job, strip)
        if block.grad is not None:
            block.grad.mul_(coefficient)
    return job.ranks.total(scalars) / (1 if averaged else job.ranks.size)


def _back_through_normalisation(job: Job, strip: Block) -> None:
    assert strip.grad is not None
    assert strip.inverse_norm is not None
    x = _as_multiplied(job, strip)
    along = torch.linalg.vecdot(x, strip.grad)[:, None]
    along.masked_fill_(strip.inverse_norm[:, None] >= LONGEST_INVERSE, 0.0)  # a length that was clamped is a constant
    strip.grad.addcmul_(x, along, value=-1).mul_(strip.inverse_norm[:, None])


def _scale_sum(job: Job) -> float:
    """sum(slope * x.y) = sum(x.A) over either side; a symmetric plane is summed twice over."""
    total = 0.0
    for strip in strips_of(job.scale_side(), strip_height(job.inputs.first)):
        assert strip.grad is not None
        total += torch.linalg.vecdot(_as_multiplied(job, strip), strip.grad).sum(dtype=torch.float64).item()
    return total / 2 if job.spec.symmetric else total


def _as_multiplied(job: Job, block: Block) -> Tensor:
    features = block.features.to(job.compute)
    return features if block.inverse_norm is None else features * block.inverse_norm[:, None]


# ---- from the rows' losses to the value


def _reduce(job: Job, rows: State, columns: State) -> tuple[Tensor, Tensor, float]:
    """The value, the statistics, and what the mean divides by."""
    losses = rows.losses(job.spec)
    if job.spec.columns:
        losses = (losses + columns.losses(job.spec)) / 2
    if job.inputs.weight is not None:
        losses = losses * job.weights(job.rows)
    sums = [losses.sum()] if job.spec.targets else [losses.sum(), _weights(job, rows).sum()]
    if job.call.stats:
        sums += _statistics(job, rows, columns)
    totals = job.ranks.total(torch.stack(sums) if len(sums) > 1 else sums[0][None])
    denominator = _denominator(job, None if job.spec.targets else totals[1])
    mean = totals[0] / denominator
    value = {"mean": mean, "sum": totals[0], "none": losses}[job.call.reduction]
    if not job.call.stats:
        return value.to(job.compute), mean.new_zeros(NUM_STATS), denominator
    means = totals[-NUM_SUMS:] / denominator
    return value.to(job.compute), torch.cat([mean[None], means[3:].mean()[None], means]), denominator


def _weights(job: Job, rows: State) -> Tensor:
    """Of the rows that have a loss."""
    return rows.weights(job.spec, job.weights(job.rows))


def _denominator(job: Job, weight: Tensor | None) -> float:
    """What the mean divides by: the weight of all rows that have a loss, which is known before (None) where all have
    one. 1 where none has, and every loss is 0."""
    return job.meeting.weight * len(job.rows) if weight is None else weight.item() or 1.0


def _statistics(job: Job, rows: State, columns: State) -> list[Tensor]:
    """Sums over the rows: of the positive logits, the losses of both directions, and the right answers of both."""
    weight = _weights(job, rows)
    sides = [rows, columns] if job.spec.columns or job.spec.link == "sigmoid" else [rows]
    losses = [side.losses(job.spec) for side in sides]
    # Equal columns of different tiles may differ by a rounding or two: they still tie.
    slack = 4 * torch.finfo(job.compute).eps
    right = [side["best_positive"] >= side["best"] - slack * side["best"].abs() for side in sides]
    return [
        (weight * values).sum() for values in (rows.mean_positive(job.spec), losses[0], losses[-1], right[0], right[-1])
    ]


# ---- what the backward must know of a row


def _remember(job: Job, state: State) -> Tensor:
    names = remembered(job.spec)
    if job.plan.passes == 1 or not names:  # nobody will ask
        return state.table.new_zeros(len(names), state.table.shape[1] if names else 0)
    state.settle(job.spec)
    return torch.stack([state[name] for name in names])
