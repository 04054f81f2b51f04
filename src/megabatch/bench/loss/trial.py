"""What one contender goes through in one case: is it there, would it fit, is it right, what memory does it need.

And what all go through together: the clock. Each runs in a process of its own, but for a GPU's.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Case, Inputs
from ..instruments import measure, processes
from ..results import Row
from . import contenders, rivals
from .contenders import CONTENDERS, ON_GPU, Contender, NotInstalled, Step

KNOWN = CONTENDERS | ON_GPU
SMALL = 300
# Rounding that says nothing, relative to the largest element.
SLACK = {"float64": 4e-15, "float32": 2e-6, "bfloat16": 2e-3, "float16": 2.5e-4}
# What computes the same loss, though perhaps from half-precision logits, comes this near.
SAME_LOSS = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
# Float64 matrices of logits that the check at full size holds at its peak, about.
CHECK_MATRICES = 12

# The loss and the gradients, by name.
Results = dict[str, Tensor]


def contest(
    case: Case,
    names: list[str],
    repeats: int,
    seconds: float,
    error_rows: int = 0,
    reached: Callable[[float], None] = lambda share: None,
) -> list[Row]:
    """Every contender on its own first; then those that are right, by turns. Ours must be right for any to run.

    Args:
        error_rows: Up to so many rows, everyone's error is told.
        reached: Is told how much of it is done.
    """
    entrants = [KNOWN[name] for name in names if case.loss in KNOWN[name].losses]
    rows = []
    with tempfile.TemporaryDirectory(prefix="megabatch-") as folder:
        truths = Truths(case, Path(folder)) if case.rows <= error_rows else None
        for index, contender in enumerate(entrants):
            rows.append(_enter(case, contender, truths))
            reached((index + 1) / (len(entrants) + 1))
    if not any(KNOWN[row.name].ours and row.status == "wrong" for row in rows):
        clock(rows, lambda names: _runner(case)(race, case, names, repeats, seconds))
    return rows


@dataclass
class Truths:
    """The results in float64 at the case's own size, once for those who normalise inside and once for the others.

    A chunk of rows at a time, so that any size fits; each in a file, for a process of its own to read.
    """

    case: Case
    folder: Path

    def path(self, normalizes: bool) -> Path:
        path = self.folder / f"{normalizes}.pt"
        if not path.exists():
            _runner(self.case)(write_truth, self.case, normalizes, path)
        return path


def write_truth(case: Case, normalizes: bool, path: Path) -> None:
    function = rivals.CHUNKED[case.loss]

    def normalized(*arguments: Tensor) -> Tensor:
        views = case.kind.views
        return function(*(F.normalize(x, dim=1) for x in arguments[:views]), *arguments[views:])

    step = contenders.step_of(normalized if normalizes else function)
    torch.save(results(step, case.inputs().to(torch.float64)), path)


def clock(rows: list[Row], race: Callable[[list[str]], dict[str, list[float]]]) -> None:
    """Fill in the seconds of those that are right, which the race of their names gives."""
    runners = [row for row in rows if row.status == "ok"]
    try:
        taken = race([row.name for row in runners])
    except processes.Failed as failure:
        for row in runners:
            row.fail(failure)
    else:
        for row in runners:
            row.seconds = taken[row.name]


def _runner(case: Case) -> Callable[..., Any]:
    return processes.run if case.device == "cpu" else processes.run_here


def _enter(case: Case, contender: Contender, truths: Truths | None) -> Row:
    row = Row(contender.name, contender.title)
    needed = contender.held(case)
    if case.device == "cpu" and not would_fit(needed):  # a GPU says no by itself, and nothing is lost
        row.status, row.note = "would not fit", f"needs about {needed / 2**30:.1f} GiB"
        return row
    try:
        truth = None if truths is None or contender.bare else truths.path(contender.normalizes)
        entered: Row = _runner(case)(examine, case, row, truth)
        return entered
    except processes.Failed as failure:
        row.fail(failure)
        return row


def race(case: Case, names: list[str], repeats: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of every run of every contender, which take turns."""
    inputs = case.inputs()
    steps = {name: partial(_afresh, KNOWN[name].make(case), inputs) for name in names}
    return measure.take_turns(steps, repeats, seconds, measure.clock_of(torch.device(case.device)))


def examine(case: Case, row: Row, truth: Path | None = None) -> Row:
    """Fills in whether the contender is right, what memory it takes and, where the truth is in a file, its error. The
    small step before warms it up."""
    contender = KNOWN[row.name]
    rows = min(case.rows, SMALL)
    small = case.with_rows(rows - rows % contender.multiple)
    try:
        contender.make(small)
    except NotInstalled:
        row.status = "not installed"
        return row
    if contender.bare:
        contender.make(small)(small.inputs())
        return row
    wrong = fault(contender, small)
    if not wrong:
        step, inputs = contender.make(case), case.inputs()
        if contender.compiles or case.device != "cpu":
            _afresh(step, inputs)
        inputs.clear()
        row.peak_bytes = peak_of(step, inputs)
        if truth is not None:
            inputs.clear()
            row.error = error(results(step, inputs), torch.load(truth))
        del step, inputs
        needed = CHECK_MATRICES * 8 * case.side**2
        if contender.ours and case.rows > SMALL and would_fit(needed, case.device):
            wrong = fault(contender, case)
    if wrong:
        row.convict(wrong)
    return row


def error(got: Results, truth: Results) -> float:
    """The largest of the loss and the gradients of the features, each relative to the largest element of its truth."""
    named = [name for name in truth if name == "loss" or name.startswith("gradient of features")]
    return max(_distance(got[name], truth[name].to(got[name].device)) / _largest(truth[name]) for name in named)


def peak_of(step: Step, inputs: Inputs) -> int:
    """Peak memory of one step beyond the inputs and their gradients."""
    memory = measure.meter_of(inputs.scale.device)
    with memory:
        step(inputs)
    return max(memory.bytes - sum(x.grad.nbytes for x in inputs.leaves if x.grad is not None), 0)


def fault(contender: Contender, case: Case) -> str:
    """What is wrong with the contender's result in this case, or ""."""
    given = case.inputs()
    truth = results(contenders.dense(case, contender.normalizes), given.to(torch.float64))
    got = results(contender.make(case), given)
    return difference(case, got, truth, results(contenders.dense(case), case.inputs()) if contender.ours else None)


def difference(case: Case, got: Results, truth: Results, peer: Results | None = None) -> str:
    """What is wrong with these results, or "". With a peer they may be no worse than the peer's, but for a slack."""
    if peer is not None:
        allowed = {name: _distance(peer[name], exact) + _slack(case, exact) for name, exact in truth.items()}
    else:
        # To some the scale is a constant; in half precision its gradient is a difference of large numbers.
        truth = {name: exact for name, exact in truth.items() if exact.dim() or name == "loss"}
        allowed = {name: SAME_LOSS[case.dtype] * _largest(exact) for name, exact in truth.items()}
    for name, exact in truth.items():
        error = _distance(got[name], exact)
        if not error <= allowed[name]:  # NaN is wrong too
            return f"at N={case.rows} the {name} is off by {error:.1e}, allowed {allowed[name]:.1e}"
    return ""


def results(step: Step, inputs: Inputs) -> Results:
    """The loss and every gradient there is, in float64."""
    named = {"loss": step(inputs)}
    for index, features in enumerate(inputs.features, start=1):
        named[f"gradient of features {index}"] = features.grad
    named["gradient of the scale"] = inputs.scale.grad
    named["gradient of the bias"] = None if inputs.bias is None else inputs.bias.grad
    return {name: value.double() for name, value in named.items() if value is not None}


def _slack(case: Case, exact: Tensor) -> float:
    if exact.dim() == 0:
        # Scalars are float32 at least, and sums: it is their terms that are rounded.
        return SLACK["float64" if case.dtype == "float64" else "float32"] * max(_largest(exact), 1.0)
    return SLACK[case.dtype] * _largest(exact)


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _distance(a: Tensor, b: Tensor) -> float:
    return _largest(a - b)


def would_fit(needed: float, device: str = "cpu") -> bool:
    available = measure.available_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    return available is None or needed <= 0.9 * available


def _afresh(step: Step, inputs: Inputs) -> None:
    inputs.clear()
    step(inputs)
