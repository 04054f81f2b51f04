"""From the sums over tiles to the loss, its statistics, and the gradients of the inputs.

Letters: x the features of a row as products multiply them; A the sum over its columns of dlogits * column, so that
d loss / d x = factor * scale * A, with one factor for all rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..backends import workspace
from ..backends.epilogues import SMALLEST_SUM
from ..losses.block import Block
from ..losses.state import State
from .call import SMALLEST, Call
from .guards import LARGEST_INVERSE_NORM, check_alike, strip_height
from .options import LossInputs, LossOptions

STATISTICS = ("positive_logit", "row_loss", "column_loss", "row_accuracy", "column_accuracy")
NUM_STATS = 2 + len(STATISTICS)  # with the loss, and the accuracy of both directions

Gradients = tuple[Tensor | None, ...]  # of LossInputs[:5]; None where none is needed


def reduce_losses(call: Call, state: State) -> tuple[Tensor, Tensor | None, Tensor | float] | None:
    """From the statistics of all rows: the loss (of all ranks, or of every row of this rank), its statistics, and what
    the mean divides by. None where a sum of exponentials has underflowed."""
    spec, options, layout = call.spec, call.options, call.layout
    num_rows = layout.num_losses
    rows = state if spec.two_sided else state.slice(0, num_rows)
    losses = rows.losses(spec)
    weighted = call.inputs.weight is not None
    directions = spec.directions  # whose losses are added up
    if directions > 1 and (weighted or options.reduction == "none"):
        losses, directions = losses.view(2, num_rows).mean(0), 1
    if weighted:
        losses = losses * call.weights
    sums = {"loss": losses.sum()}
    if call.shift > 0:
        sums["underflows"] = (rows["sum_exp"] < SMALLEST_SUM).sum(dtype=torch.float64)
    if weighted or not spec.has_targets:
        sums["weight"] = rows.where_positives(spec, call.weights).sum()
    if options.return_stats:
        columns = state if spec.symmetric else state.slice(num_rows, None)
        sums |= _statistics(call, state if spec.symmetric else state.slice(0, num_rows), columns)
    if call.shift > 0 and sums["underflows"].item():
        return None
    if isinstance(call.largest_weight, Tensor):
        rule = f"{options.function}: weight must have a positive, finite sum"
        check_alike(call.largest_weight > SMALLEST, rule, ", got 0.0")
    denominator = sums.get("weight", float(num_rows))
    if not spec.has_targets:  # 1 where no row has positives, and every loss is 0
        denominator = torch.where(sums["weight"] == 0, 1.0, sums["weight"])
    mean, stats = sums["loss"] / (denominator * directions), None
    value = {"mean": mean, "sum": sums["loss"], "none": layout.own_losses(losses)}[options.reduction]
    if options.reduction == "sum" and directions > 1:
        value = value / directions
    value = value.to(layout.dtype)
    if options.return_stats:
        means = torch.stack([sums[name] for name in STATISTICS]) / denominator
        stats = torch.cat([mean[None], means[3:].mean()[None], means])
    return value, stats, denominator


def _statistics(call: Call, rows: State, columns: State) -> dict[str, Tensor]:
    """Sums over the rows: of the positive logits, the losses of both directions, and the right answers of both."""
    spec = call.spec
    weight = rows.where_positives(spec, call.weights)
    sides = [rows, columns] if spec.column_loss or spec.epilogue == "sigmoid" else [rows]
    losses = [side.losses(spec) for side in sides]
    # Equal columns of different tiles may differ by a rounding or two: they still tie.
    slack = 4 * torch.finfo(call.layout.dtype).eps
    right = [side["top_positive"] >= side["top"] - slack * side["top"].abs() for side in sides]
    values = (rows.positive_logits(spec), losses[0], losses[-1], right[0], right[-1])
    return {name: (weight * value).sum() for name, value in zip(STATISTICS, values, strict=True)}


def finish_gradients(
    call: Call, upstream: Tensor | float, denominator: Tensor | float, largest: Tensor | float
) -> Tensor:
    """From A to the gradients of features, in place; those of scale and bias are returned."""
    options, ranks, needs, layout = call.options, call.ranks, call.handshake.needs, call.layout
    by = largest / call.spec.directions  # numbers that the host knows first
    factor = upstream * (by / denominator if options.reduction == "mean" else by)
    # A rank's features have their own part of the gradient, the scale's is whole on all: n times the former, where the
    # trainer averages over n ranks; the n-th part of the latter, where it adds or the losses are per row.
    averaged = options.reduction != "none" and options.grad_reduction == "mean"
    coefficient = factor * call.scale if ranks.size == 1 or not averaged else factor * call.scale * ranks.size
    blocks, at_home = call.needing, []
    if layout.gathers:  # the gradients of columns, and of all rows of a symmetric loss, are still to be added up
        blocks, at_home = [x for x in blocks if layout.is_row_only(x)], [x for x in blocks if not layout.is_row_only(x)]
    scale_sum = _finish_blocks(call, blocks, coefficient)
    if not call.side_for_scale:
        sums = call.backend.scalar_sums[: 1 + needs.bias] * factor
    elif needs.bias:
        sums = torch.cat([scale_sum, call.backend.scalar_sums[1:]]) * factor
    else:
        sums = scale_sum * factor
    if not options.group:
        return sums
    # What only the devices know, to be compared there.
    unseen = [x.double() for x in (upstream, call.scale, call.handshake.bias) if isinstance(x, Tensor)]
    numbers = torch.cat([torch.stack(unseen), sums]) if unseen else sums
    if layout.gathers:
        everyones = layout.send_grads_home(numbers)
        scale_sum = _finish_blocks(call, at_home, coefficient)
    elif unseen or needs.scale or needs.bias:
        everyones = ranks.all_gather(numbers)
    else:
        return sums
    if unseen:
        _check_equal(call, everyones[:, : len(unseen)])
        everyones = everyones[:, len(unseen) :]
    if layout.overlaps and call.side_for_scale:
        everyones = ranks.all_gather(scale_sum * factor)
    return everyones.sum(0) / (1 if averaged else ranks.size)


def _check_equal(call: Call, everyones: Tensor) -> None:
    """Of every rank, by column: the upstream gradient, the scale and the bias."""
    rule = "logit_scale, logit_bias and what the loss is multiplied by must be the same on every rank of the group"
    close = (everyones - everyones[0]).abs() <= 1e-5 * everyones[0].abs()
    same = (close | (everyones == everyones[0]) | everyones.isnan()).all()
    check_alike(same, f"{call.options.function}: {rule}")


def _finish_blocks(call: Call, blocks: list[Block], coefficient: Tensor | float) -> Tensor:
    """From A to gradients, in place. Returns sum(dlogits * x.y), which is sum(x.A) over either side; a symmetric loss
    has it twice."""
    parts = [call.layout.own[0].features.new_zeros((), dtype=torch.float64)] if call.layout.gathers else []
    for block in blocks:
        is_summed = any(block is other for other in call.side_for_scale)
        for strip in block.strips(strip_height(block.features)):
            assert strip.grad is not None
            if is_summed or strip.inverse_norm is not None:
                along = _backward_of_normalization(strip, strip.grad)
            if is_summed:
                parts.append(along.sum(dtype=torch.float64))
            strip.grad.mul_(coefficient)
    if not parts:
        return call.layout.own[0].features.new_zeros(1, dtype=torch.float64)
    total = sum(parts[1:], parts[0]).view(1)
    return total * 0.5 if call.spec.symmetric else total


def _backward_of_normalization(block: Block, grad: Tensor) -> Tensor:
    """Where rows were normalised, takes the part of A along x out of it. Returns what x.A is the sum of."""
    x, inverse = block.features.to(grad.dtype), block.inverse_norm
    if inverse is not None:
        x = x * inverse[:, None]
    buffer = workspace.buffer("products", grad.numel(), grad.dtype, grad.device)
    products = torch.mul(x, grad, out=workspace.shaped(buffer, (len(grad), grad.shape[1])))
    if inverse is None and grad.device.type != "cpu":  # whose sums convert as they go; the CPU's make a copy first
        return products
    along = products.sum(1)
    if inverse is not None:
        # A length that was clamped is a constant.
        part = along.masked_fill(inverse >= LARGEST_INVERSE_NORM, 0.0)
        grad.addcmul_(x, part[:, None], value=-1).mul_(inverse[:, None])
    return along


def rescaled(
    inputs: LossInputs, options: LossOptions, upstream: Tensor, gradients: Tensor, scalars: Tensor
) -> Gradients:
    """The forward's gradients times what the caller makes of the loss."""
    needed = [x for x, need in zip(inputs.features, options.needs, strict=False) if x is not None and need]
    parts = torch.split(gradients, [x.numel() for x in needed])
    upstream = upstream.to(gradients.dtype)
    features = (part.view(x.shape) * upstream for x, part in zip(needed, parts, strict=True))
    return as_inputs(inputs, options, features, scalars * upstream)


def as_inputs(inputs: LossInputs, options: LossOptions, features: Iterable[Tensor], scalars: Tensor) -> Gradients:
    """One rounding to the dtype of each input; no two of them share memory."""
    found, needs = iter(features), options.needs
    gradients: list[Tensor | None] = [
        next(found).to(x.dtype) if x is not None and need else None
        for x, need in zip(inputs.features, needs, strict=False)
    ]
    for index, (x, need) in enumerate(((inputs.scale, needs.scale), (inputs.bias, needs.bias))):
        gradients.append(scalars[index].to(x, copy=True).view(x.shape) if x is not None and need else None)
    return tuple(gradients)
