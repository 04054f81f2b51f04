"""What a way to train towers goes through: is it there, would it fit, is it right, what memory does it need.

And what all go through together: the clock. Each runs in a process of its own.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..instruments import measure, processes
from ..loss import trial
from ..loss.contenders import NotInstalled
from ..loss.trial import Results
from ..results import Row
from .contenders import CACHERS, Cacher, Step, plain
from .towers import Encoding, Task

# Of the check.
SMALL, SMALL_CHUNK = 40, 16


def contest(encoding: Encoding, names: list[str], repeats: int, seconds: float, limit: int) -> list[Row]:
    """Every one on its own first; then those that are right, by turns. Ours must be right for any to run."""
    rows = [_enter(encoding, CACHERS[name], limit) for name in names if encoding.task in CACHERS[name].tasks]
    if not any(CACHERS[row.name].ours and row.status == "wrong" for row in rows):
        trial.clock(rows, lambda runners: processes.run(race, encoding, runners, repeats, seconds))
    return rows


def _enter(encoding: Encoding, cacher: Cacher, limit: int) -> Row:
    row = Row(cacher.name, cacher.title)
    try:
        return processes.run(examine, encoding, row, limit)
    except processes.Failed as failure:
        row.fail(failure)
        return row


def race(encoding: Encoding, names: list[str], repeats: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of every run of every one, which take turns."""
    task = encoding.make()
    steps = {name: partial(_afresh, CACHERS[name].make(task, encoding.chunk), task) for name in names}
    return measure.take_turns(steps, repeats, seconds)


def examine(encoding: Encoding, row: Row, limit: int) -> Row:
    """Fills in whether the gradients are right and what memory a step takes. No step may need more than `limit` bytes
    for activations."""
    measure.return_freed_memory()
    cacher = CACHERS[row.name]
    small, sure = _small(encoding), encoding.without_dropout()
    try:
        cacher.make(small.make(), small.chunk)
    except NotInstalled:
        row.status = "not installed"
        return row
    wrong = fault(cacher, small)
    needed = bytes_in_one_piece(encoding)
    if cacher.whole and needed > limit:
        row.status, row.note = "not run", f"would take about {needed / 2**30:.1f} GiB"
        return row
    if not wrong:
        task = encoding.make()
        row.peak_bytes = peak_of(cacher.make(task, encoding.chunk), task)
        del task
        if not cacher.whole and needed <= limit:
            whole = sure.make()
            wrong = trial.difference(sure.case, results_of(cacher, sure), results(plain(whole, 0), whole))
    if wrong:
        row.convict(wrong)
    return row


def _small(encoding: Encoding) -> Encoding:
    """The same for the check: three chunks, the last of them smaller."""
    return encoding.without_dropout().with_rows(min(encoding.rows, SMALL), min(encoding.chunk, SMALL_CHUNK))


def fault(cacher: Cacher, encoding: Encoding) -> str:
    """What is wrong with the gradients, or "": held against a step in one piece through the dense loss, in float64."""
    truth, peer = (encoding.make(dtype, dense=True) for dtype in (torch.float64, torch.float32))
    return trial.difference(
        encoding.case,
        results_of(cacher, encoding),
        results(plain(truth, 0), truth),
        results(plain(peer, 0), peer) if cacher.ours else None,
    )


def results_of(cacher: Cacher, encoding: Encoding) -> Results:
    task = encoding.make()
    return results(cacher.make(task, encoding.chunk), task)


def results(step: Step, task: Task) -> Results:
    """The loss and the gradient of every parameter, in float64."""
    named: dict[str, Tensor] = {"loss": step()}
    for name, parameter in task.parameters():
        named[f"gradient of {name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: value.double() for name, value in named.items()}


def bytes_in_one_piece(encoding: Encoding) -> float:
    """What a step in one piece would take, about, judged by one of a single chunk."""
    rows = min(encoding.chunk, encoding.rows)
    task = encoding.with_rows(rows, rows).make()
    return peak_of(plain(task, rows), task) * encoding.rows / rows


def peak_of(step: Step, task: Task) -> int:
    """Peak memory of a step beyond the inputs, the parameters and their gradients."""
    with measure.PeakMemory() as memory:
        step()
    gradients = sum(parameter.grad.nbytes for _, parameter in task.parameters() if parameter.grad is not None)
    return max(memory.bytes - gradients, 0)


def _afresh(step: Step, task: Task) -> None:
    task.clear()
    step()


@dataclass
class Weight:
    """The memory of a real training step, in bytes, beyond what the process held before it. `status`: ok, wrong,
    not run, failed.

    Attributes:
        inputs: Of the batch itself, held before and not counted.
        loss: Of the features, their gradients and the loss alone, which grow with the batch whatever the encoder does.
        peak: Of all.
    """

    title: str
    rows: int
    status: str = "ok"
    note: str = ""
    inputs: int | None = None
    loss: int | None = None
    peak: int | None = None
    seconds: float | None = None


def weights(encoding: Encoding, limit: int, keep_freed: bool = False) -> list[Weight]:
    """One chunk in one piece; all rows in chunks; all rows in one piece, if that is below the limit.

    `keep_freed`: malloc is left as it is.
    """
    single = encoding.with_rows(encoding.chunk, encoding.chunk)
    found = [
        _weighed(name, case, keep_freed)
        for name, case in (("plain", single), ("megabatch", single), ("megabatch", encoding))
    ]
    last = Weight(CACHERS["plain"].title, encoding.rows)
    if found[0].peak is not None:
        needed = found[0].peak * encoding.rows / encoding.chunk
        if needed <= limit:
            last = _weighed("plain", encoding, keep_freed)
        else:
            last.status, last.note = "not run", f"would take about {needed / 2**30:.1f} GiB"
    else:
        last.status = "not run"
    return [*found, last]


def _weighed(name: str, encoding: Encoding, keep_freed: bool) -> Weight:
    weight = Weight(CACHERS[name].title, encoding.rows)
    try:
        return processes.run(weigh, name, encoding, weight, keep_freed)
    except processes.Failed as failure:
        weight.status, weight.note = "failed", str(failure)
        return weight


def weigh(name: str, encoding: Encoding, weight: Weight, keep_freed: bool) -> Weight:
    """A step of training, with an optimizer, once its gradients are known to be right on few rows."""
    if not keep_freed:
        measure.return_freed_memory()
    wrong = fault(CACHERS[name], _small(encoding))
    if wrong:
        weight.status, weight.note = "wrong", wrong
        return weight
    task = encoding.make()
    step = CACHERS[name].make(task, encoding.chunk)
    optimizer = torch.optim.SGD([parameter for _, parameter in task.parameters()], lr=1e-3)

    def train() -> None:
        step()
        optimizer.step()

    with measure.PeakMemory() as memory:
        weight.seconds = measure.clocked(train)
    weight.inputs, weight.peak = task.input_bytes, memory.bytes
    with measure.PeakMemory() as memory:
        features = [torch.randn(encoding.rows, encoding.shape.width).requires_grad_() for _ in task.sides]
        torch.autograd.backward(task.loss(*features))
    weight.loss = memory.bytes
    return weight
