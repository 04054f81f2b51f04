"""The forward and the backward of a call on plain tensors: below the operators, above the tiles.

Letters: x a row's features as the products take them; A the sum over its columns of slope * column, so that
d loss / d x = factor * scale * A, with one factor for all rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..losses.block import Block
from ..losses.spec import Spec
from ..losses.state import State, fields
from .call import Call, Inputs
from .job import STRIP, Job, attach
from .walk import strips_of


class Outputs(NamedTuple):
    """What the forward leaves; all but `value` and `stats` is for the backward.

    Attributes:
        value: The loss: 0-d, or one per row.
        stats: loss, accuracy, mean positive logit, then loss and accuracy of the rows and of the columns.
        rows, columns: What the backward must know of every row and column: see `REMEMBERED`.
        sums: Of slope * x.y and of the slope, where the forward walk computed them.
        kept: Logits of tiles, or the features' gradients up to a factor; nothing by default where two walks are made.
    """

    value: Tensor
    stats: Tensor
    rows: Tensor
    columns: Tensor
    sums: Tensor
    kept: Tensor

    def as_tuple(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A plain one, as operators return it."""
        return self.value, self.stats, self.rows, self.columns, self.sums, self.kept


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


NUM_STATS = 7


def forward(inputs: Inputs, call: Call) -> Outputs:
    """The loss and, where the plan says so, the gradients with it."""
    job = Job(inputs, call)
    job.check_values()
    names = fields(job.spec, call.stats)
    rows = State.neutral(names, job.num_rows, job.device)
    columns = rows if job.spec.symmetric else State.neutral(names, job.num_columns, job.device)
    attach(job.rows, "state", rows)
    attach(job.columns, "state", columns)
    kept = _fold_and_push(job) if job.plan.passes == 1 else _fold(job)
    value, stats = _reduce(job, rows, columns)
    sums = torch.tensor([job.backend.scale_sum, job.backend.bias_sum], dtype=torch.float64, device=job.device)
    remembered = [_remember(job.spec, side) for side in ([rows, columns] if job.spec.columns else [rows])]
    return Outputs(value, stats, remembered[0], remembered[1] if job.spec.columns else sums.new_empty(0, 0), sums, kept)


def _fold(job: Job) -> Tensor:
    """The first of two walks. Returns the logits that the plan keeps."""
    kept, slots = job.new_slots()
    tiles = (tile for strip in job.strips(("features", "ids"), ("state",)) for tile in strip)
    for index, tile in enumerate(tiles):
        job.backend.fold(tile, slots[index] if index < len(slots) else None)
    kept[: len(slots)] = kept.new_tensor([slot.shift for slot in slots])
    return kept


def _push(job: Job, kept: Tensor) -> None:
    """The second walk, over the same tiles in the same order."""
    job.attach_gradients()
    slots = job.slots(kept)
    read = ("features", "ids", "state", "log_sum_exp", "pull")
    tiles = (tile for strip in job.strips(read, ("grad",)) for tile in strip)
    for index, tile in enumerate(tiles):
        job.backend.push(tile, slots[index] if index < len(slots) else None)


def _fold_and_push(job: Job) -> Tensor:
    """Both in one walk: a strip is pushed while its logits are at hand. Returns the gradients, up to a factor."""
    gradients = job.attach_gradients_in_one()
    attach(job.rows, "pull", job.weights(job.rows))
    attach(job.rows, "log_sum_exp", torch.zeros(job.num_rows, dtype=torch.float64, device=job.device))
    _, slots = job.new_slots()
    for strip in job.strips(("features", "ids"), ("state",)):
        # A tile of sigmoids is complete by itself, and one slot serves all; a softmax needs its whole strip.
        for group in [[tile] for tile in strip] if job.spec.link == "sigmoid" else [strip]:
            for tile, slot in zip(group, slots, strict=True):
                job.backend.fold(tile, slot)
            if job.spec.link == "softmax":
                group[0].rows.log_sum_exp.copy_(group[0].rows.state.log_sum_exp(job.spec))
            for tile, slot in zip(group, slots, strict=True):
                job.backend.push(tile, slot, last=True)
    return gradients


def backward(inputs: Inputs, call: Call, upstream: Tensor, outputs: Outputs) -> Gradients:
    """The gradient of every input that needs one, from what the forward left."""
    job = Job(inputs, call)
    names = remembered_fields(job.spec)
    rows = State(names, outputs.rows)
    factor = upstream.double() if call.reduction == "sum" else upstream.double() / _denominator(job, rows)
    if job.plan.passes == 1:
        job.attach_gradients_in_one(outputs.kept)
        sums = outputs.sums
    else:
        largest = _attach_pulls(job, rows, State(names, outputs.columns) if job.spec.columns else rows, upstream)
        factor = largest if call.reduction == "none" else factor
        _push(job, outputs.kept)
        sums = outputs.sums.new_tensor([job.backend.scale_sum, job.backend.bias_sum])
    return _finish(job, factor / job.spec.directions, sums)


def _attach_pulls(job: Job, rows: State, columns: State, upstream: Tensor) -> Tensor:
    """Give every row d value / d (its loss), up to a factor; return the factor for reduction "none"."""
    largest = upstream.new_ones((), dtype=torch.float64)
    for side, state in [(job.rows, rows), (job.columns, columns)][: job.spec.directions]:
        pull = job.weights(side)
        if job.spec.link == "softmax":
            attach(side, "state", state)
            attach(side, "log_sum_exp", state["log_sum_exp"])
            pull = state.weights(job.spec, pull)
        if job.call.reduction == "none":
            pull = pull * upstream.double()
            largest = pull.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
            pull = pull / largest
        attach(side, "pull", pull)
    return largest


def _finish(job: Job, factor: Tensor, sums: Tensor) -> Gradients:
    """From sums of slopes to gradients: the common factor, the scale, the way back through the normalisation."""
    scale, bias = job.inputs.scale, job.inputs.bias
    scale_sum = sums[0] if job.sums_slopes or not job.call.needs.scale else _scale_sum(job)
    scale_sum, bias_sum = job.ring.total(factor * torch.stack([scale_sum, sums[1]]))
    # With a group, trainers average gradients over its ranks.
    coefficient = (factor * job.scale * job.ring.size).to(job.compute)
    features = [_feature_gradient(job, block, coefficient) if need else None for block, need in job.features()]
    first, second, extra = features + [None] * (3 - len(features))
    return Gradients(
        first,
        second,
        extra,
        scale=scale_sum.to(scale, copy=True).view(scale.shape) if job.call.needs.scale else None,
        bias=bias_sum.to(bias, copy=True).view(bias.shape) if bias is not None and job.call.needs.bias else None,
    )


def _scale_sum(job: Job) -> Tensor:
    """sum(slope * x.y) = sum(x.A) over either side; a symmetric plane is summed twice over."""
    total = torch.zeros((), dtype=torch.float64, device=job.device)
    for strip in strips_of(job.scale_side(), STRIP):
        assert strip.grad is not None
        total += torch.linalg.vecdot(_as_multiplied(job, strip), strip.grad).sum(dtype=torch.float64)
    return total / 2 if job.spec.symmetric else total


def _feature_gradient(job: Job, block: Block, coefficient: Tensor) -> Tensor:
    """coefficient * A, in the features' dtype; in place where A is nobody else's."""
    assert block.grad is not None
    in_place = job.plan.passes == 2 and block.features.dtype == job.compute
    out = block.grad if in_place else torch.empty_like(block.features, memory_format=torch.contiguous_format)
    if block.inverse_norm is None and out.dtype == job.compute:
        return torch.mul(block.grad, coefficient, out=out)
    for strip, part in zip(block.strips(STRIP), torch.split(out, STRIP), strict=True):
        assert strip.grad is not None
        grad = strip.grad * coefficient
        if strip.inverse_norm is not None:
            x = _as_multiplied(job, strip)
            grad.addcmul_(x, torch.linalg.vecdot(x, grad)[:, None], value=-1).mul_(strip.inverse_norm[:, None])
        part.copy_(grad)
    return out


def _as_multiplied(job: Job, block: Block) -> Tensor:
    features = block.features.to(job.compute)
    return features if block.inverse_norm is None else features * block.inverse_norm[:, None]


# ---- from the rows' losses to the value


def _reduce(job: Job, rows: State, columns: State) -> tuple[Tensor, Tensor]:
    weight = job.weights(job.rows)
    losses = weight * rows.losses(job.spec)
    if job.spec.columns:
        losses = (losses + weight * columns.losses(job.spec)) / 2
    total, denominator = job.ring.total(torch.stack([losses.sum(), _weight_sum(job, rows)]))
    mean = torch.where(denominator == 0, 0.0, total / denominator)
    value = {"mean": mean, "sum": total, "none": losses}[job.call.reduction]
    stats = _statistics(job, rows, columns, mean) if job.call.stats else mean.new_zeros(NUM_STATS)
    return value.to(job.compute), stats


def _weight_sum(job: Job, rows: State) -> Tensor:
    return rows.weights(job.spec, job.weights(job.rows)).sum()


def _denominator(job: Job, rows: State) -> Tensor:
    """What the mean divides by; anything but 0 where no row has a positive, for then every slope is 0."""
    total = job.ring.total(_weight_sum(job, rows))
    return total if job.spec.targets else torch.where(total == 0, 1.0, total)


def _statistics(job: Job, rows: State, columns: State, mean: Tensor) -> Tensor:
    weight = rows.weights(job.spec, job.weights(job.rows))
    sides = [rows, columns] if job.spec.columns or job.spec.link == "sigmoid" else [rows]
    losses = [side.losses(job.spec) for side in sides]
    right = [side["best_positive"] >= side["best"] for side in sides]
    sums = [(weight * values).sum() for values in (rows.mean_positive(job.spec), losses[0], losses[-1], right[0], right[-1])]
    totals = job.ring.total(torch.stack([weight.sum(), *sums]))
    means = torch.where(totals[0] == 0, 0.0, totals[1:] / totals[0])
    return torch.cat([mean[None], means[3:].mean()[None], means])


# ---- what the backward must know of a row


def remembered_fields(spec: Spec) -> tuple[str, ...]:
    if spec.link == "sigmoid":
        return ()
    return ("log_sum_exp", "count", "valid") if spec.smoothing else ("log_sum_exp", "count")


def _remember(spec: Spec, state: State) -> Tensor:
    names = remembered_fields(spec)
    vectors = [state.log_sum_exp(spec) if name == "log_sum_exp" else state[name] for name in names]
    return torch.stack(vectors) if vectors else state.table.new_empty(0, 0)
