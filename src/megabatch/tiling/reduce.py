"""From the statistics of rows to the value of the loss."""

import torch
from torch import Tensor

from ..backends.epilogues import SMALLEST_SUM
from ..losses.state import State
from .call import Call

NUM_STATS, NUM_SUMS = 7, 5


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
