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
from .call import Call
from .guards import LARGEST_INVERSE_NORM, strip_height
from .options import LossInputs, LossOptions

NUM_STATS, NUM_SUMS = 7, 5

Gradients = tuple[Tensor | None, ...]  # of LossInputs[:5]; None where none is needed


def reduce_losses(call: Call, state: State) -> tuple[Tensor, Tensor | None, Tensor | float] | None:
    """The value, the statistics, and what the mean divides by. None where a sum of exponentials has underflowed."""
    spec, options, layout = call.spec, call.options, call.layout
    num_rows = sum(map(len, layout.rows))
    rows = state if spec.two_sided else state.slice(0, num_rows)
    losses = rows.losses(spec)
    if spec.column_loss:
        losses = losses.view(2, num_rows).mean(0)
    if call.inputs.weight is not None:
        losses = losses * call.weights
    sums = [losses.sum()]
    if call.shift > 0:
        sums.append((rows["sum_exp"] < SMALLEST_SUM).sum(dtype=torch.float64))
    if not spec.has_targets:
        sums.append(rows.where_positives(spec, call.weights).sum())
    if options.return_stats:
        columns = state if spec.symmetric else state.slice(num_rows, None)
        sums += _statistics(call, state if spec.symmetric else state.slice(0, num_rows), columns)
    if len(sums) > 1 or options.group:
        sums = list(call.ranks.all_sum(torch.stack(sums)).unbind())
    if call.shift > 0 and sums.pop(1).item():
        return None
    denominator: Tensor | float = call.handshake.weight_sum
    if not spec.has_targets:  # 1 where no row has positives, and every loss is 0
        denominator = torch.where(sums[1] == 0, 1.0, sums[1])
    mean = sums[0] / denominator
    value = {"mean": mean, "sum": sums[0], "none": losses}[options.reduction].to(layout.dtype)
    if not options.return_stats:
        return value, None, denominator
    means = torch.stack(sums[-NUM_SUMS:]) / denominator
    return value, torch.cat([mean[None], means[3:].mean()[None], means]), denominator


def _statistics(call: Call, rows: State, columns: State) -> list[Tensor]:
    """Sums over the rows: of the positive logits, the losses of both directions, and the right answers of both."""
    spec = call.spec
    weight = rows.where_positives(spec, call.weights)
    sides = [rows, columns] if spec.column_loss or spec.epilogue == "sigmoid" else [rows]
    losses = [side.losses(spec) for side in sides]
    # Equal columns of different tiles may differ by a rounding or two: they still tie.
    slack = 4 * torch.finfo(call.layout.dtype).eps
    right = [side["top_positive"] >= side["top"] - slack * side["top"].abs() for side in sides]
    return [
        (weight * values).sum() for values in (rows.positive_logits(spec), losses[0], losses[-1], right[0], right[-1])
    ]


def finish_gradients(call: Call, upstream: Tensor | float, denominator: Tensor | float) -> Tensor:
    """From A to the gradients of features, in place; those of scale and bias are returned."""
    options, ranks, sums = call.options, call.ranks, call.backend.scalar_sums
    factor = upstream * (call.handshake.largest_row_grad / call.spec.directions)
    if options.reduction == "mean":
        factor = factor / denominator
    # A rank's features have their own part of the gradient, the scale's is whole on all: n times the former, where the
    # trainer averages over n ranks; the n-th part of the latter, where it adds or the losses are per row.
    averaged = options.reduction != "none" and options.grad_reduction == "mean"
    coefficient = factor * (call.scale * (ranks.size if averaged else 1))
    # sum(dlogits * x.y) = sum(x.A) over either side. A symmetric loss has it twice.
    alpha = 0.5 if call.spec.symmetric else 1.0
    if call.side_for_scale:
        sums[0].zero_()  # Triton's kernels sum it over the tiles, too
    for block in call.needing:
        is_summed = any(block is other for other in call.side_for_scale)
        for strip in block.strips(strip_height(block.features)):
            assert strip.grad is not None
            if is_summed or strip.inverse_norm is not None:
                along = _backward_of_normalization(strip, strip.grad)
            if is_summed:
                sums[0].add_(along.sum(dtype=torch.float64), alpha=alpha)
            strip.grad.mul_(coefficient)
    return ranks.all_sum(sums * factor) / (1 if averaged else ranks.size) if ranks.size > 1 else sums * factor


def _backward_of_normalization(block: Block, grad: Tensor) -> Tensor:
    """Where rows were normalised, takes the part of A along x out of it. Returns x.A of every row."""
    x, inverse = block.features.to(grad.dtype), block.inverse_norm
    if inverse is not None:
        x = x * inverse[:, None]
    buffer = workspace.buffer("products", grad.numel(), grad.dtype, grad.device)
    along = torch.mul(x, grad, out=workspace.shaped(buffer, (len(grad), grad.shape[1]))).sum(1)
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
