"""What a way to take a training step goes through: would it fit, is it right, what memory does it need, and the clock,
which splits a step into its parts. Memory is measured in a process of its own for each; the clock lets them take turns
in one.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..cases import Case
from ..instruments import measure, processes
from ..loss import contenders, trial
from ..results import Row
from .contenders import LOSSES, WAYS, Way
from .training import PARTS, Step, Training

# Of the check of all gradients.
SMALL, SMALL_CHUNK = 20, 8
# By steps of so many rows it is judged what those of more would take.
JUDGED_BY = (16, 64)
LOSS_JUDGED_BY = 2048
# What must be the same by all ways at the full size, and how far it may be off, relative.
SAME = (("value", "loss", 1e-4), ("length", "length of the gradient", 1e-3))
# The parts of a step must make up this much of it.
ACCOUNTED = 0.95


@dataclass(frozen=True)
class Setting:
    model: str
    rows: int
    chunk: int


@dataclass(frozen=True)
class Room:
    """What steps take, in bytes, as far as few rows tell.

    Attributes:
        fixed: Whatever the batch.
        per_row: For each row whose activations are held.
        per_input: For each row of the batch, before the step begins.
        matrices: Of logits, that the dense loss holds.
        width: Of the features.
    """

    fixed: float
    per_row: float
    per_input: float
    matrices: float
    width: int

    def needed(self, way: Way, rows: int, chunk: int) -> float:
        """By a step of `rows`, about."""
        encoder = self.fixed + self.per_row * (min(chunk, rows) if way.chunked else rows)
        loss = 0.0 if way.ours else self.matrices * Case("clip", rows, self.width).matrix_bytes
        # In chunks, no activations are held while the loss is computed.
        return self.per_input * rows + (max(encoder, loss) if way.chunked else encoder + loss)


@dataclass
class StepRow(Row):
    """`peak_bytes` and `seconds` are of the whole step.

    Attributes:
        parts: Seconds of each part in each run.
        held_bytes: Of weights, the optimizer's state and the batch, which are there before the step begins.
        loss_bytes: Peak memory of the loss alone, beyond features and their gradients.
        extrapolated_bytes: What a step that was not run would take, judged by few rows. Not measured.
        value: The loss, without dropout.
        length: Of the gradient of all parameters, without dropout.
    """

    parts: dict[str, list[float]] = field(default_factory=dict)
    held_bytes: int | None = None
    loss_bytes: int | None = None
    extrapolated_bytes: float | None = None
    value: float | None = None
    length: float | None = None

    @property
    def way(self) -> Way:
        return WAYS[self.name]

    def part(self, name: str) -> float | None:
        """The mean over all runs."""
        return statistics.mean(self.parts[name]) if name in self.parts else None

    @property
    def time_share(self) -> float | None:
        """Of the loss in the step."""
        loss, step = self.part("loss"), self.mean
        return None if loss is None or not step else loss / step

    @property
    def whole_bytes(self) -> int | None:
        """Peak memory with what is held before the step begins."""
        return None if self.peak_bytes is None or self.held_bytes is None else self.held_bytes + self.peak_bytes

    @property
    def memory_share(self) -> float | None:
        """Of the loss alone, in the peak of the step and what is held before it."""
        return None if self.loss_bytes is None or not self.whole_bytes else self.loss_bytes / self.whole_bytes

    def convict(self, wrong: str) -> None:
        super().convict(wrong)
        self.value, self.length = None, None


def judge(model: str) -> Room:
    """By a forward of the encoders on few rows and on more, a step of few, and the dense loss of a small batch."""
    measure.return_freed_memory()
    fewer, more = JUDGED_BY
    training = Training.of(model, more)
    step = Step(training.first(fewer), WAYS["megabatch_whole"], fewer)
    step()  # makes the optimizer's state, and warms up
    whole, _ = _peak(step)
    low, high = (_peak_of_forward(training.first(rows)) for rows in JUDGED_BY)
    case = Case("clip", LOSS_JUDGED_BY, training.width)
    return Room(
        fixed=max(whole - low, 0),
        per_row=max(high - low, 0) / (more - fewer),
        per_input=training.input_bytes / more,
        matrices=bytes_of_loss("dense", case) / case.matrix_bytes,
        width=training.width,
    )


def _peak_of_forward(training: Training) -> int:
    with measure.PeakMemory() as memory:
        features = training.encode(None)  # which hold on to the activations
    del features
    return memory.bytes


def contest(
    setting: Setting,
    room: Room,
    limit: float,
    repeats: int,
    seconds: float,
    reached: Callable[[float], None] = lambda share: None,
) -> list[StepRow]:
    """Every way on its own first; then those that are right, by turns. Ours must be right for any to be clocked.

    Args:
        limit: No step may take more bytes than this, as far as can be told.
        reached: Is told how much of it is done.
    """
    rows = []
    for index, way in enumerate(WAYS.values(), start=1):
        rows.append(_enter(setting, way, room, limit))
        reached(index / (len(WAYS) + 2))
    hold_together(rows, setting)
    for loss in LOSSES:
        _weigh(loss, Case("clip", setting.rows, room.width), rows)
    if not any(row.way.ours and row.status == "wrong" for row in rows):
        trial.clock([*rows], lambda names: _timed(setting, rows, names, repeats, seconds))
    return rows


def _enter(setting: Setting, way: Way, room: Room, limit: float) -> StepRow:
    row = StepRow(way.name, way.title)
    if way.chunked and setting.rows <= setting.chunk:
        row.status, row.note = "not run", "one chunk holds the batch"
        return row
    needed = room.needed(way, setting.rows, setting.chunk)
    if needed > limit or not trial.would_fit(needed):
        row.status, row.extrapolated_bytes = "would not fit", needed
        row.note = f"about {needed / 2**30:.2f} GiB, extrapolated"
        return row
    try:
        return processes.run(examine, setting, row)
    except processes.Failed as failure:
        row.fail(failure)
        return row


def examine(setting: Setting, row: StepRow) -> StepRow:
    """Fills in whether the way is right and what memory it takes."""
    measure.return_freed_memory()
    training = Training.of(setting.model, setting.rows)
    wrong = fault(row.way, training.first(SMALL))  # makes the optimizer's state too, and warms up
    if wrong:
        row.convict(wrong)
        return row
    step = Step(training, row.way, setting.chunk)
    row.peak_bytes, loss = _peak(step)
    row.held_bytes = training.held_bytes
    row.value, row.length = loss.item(), nn.utils.get_total_norm(gradients(training).values()).item()
    return row


def fault(way: Way, training: Training) -> str:
    """What is wrong with the loss or a gradient in ragged chunks, or "": held against the dense loss in one piece."""
    truth, got = (results(Step(training, each, SMALL_CHUNK)) for each in (WAYS["dense_whole"], way))
    return trial.difference(Case("clip", len(training.images), training.width), got, truth)


def results(step: Step) -> trial.Results:
    """The loss and the gradient of every parameter, in float64."""
    loss = step()
    found = {f"gradient of {name}": gradient.double() for name, gradient in gradients(step.training).items()}
    return {"loss": loss.double(), **found}


def gradients(training: Training) -> dict[str, Tensor]:
    named = training.towers.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def hold_together(rows: list[StepRow], setting: Setting) -> None:
    """At the full size all must have the loss and the length of gradient that the first has: dense, where it fits."""
    right = [row for row in rows if row.status == "ok"]
    for row in right[1:]:
        for what, name, allowed in SAME:
            got, expected = getattr(row, what), getattr(right[0], what)
            if not math.isclose(got, expected, rel_tol=allowed):  # NaN is wrong too
                row.convict(f"at N={setting.rows} the {name} is {got:.6g}, and {expected:.6g} {right[0].title}")
                break


def _weigh(loss: str, case: Case, rows: list[StepRow]) -> None:
    """Fill in the memory of the loss alone, for the ways that train by it."""
    own = [row for row in rows if row.way.loss == loss and row.status == "ok"]
    if not own:
        return
    try:
        taken = processes.run(bytes_of_loss, loss, case)
    except processes.Failed as failure:
        for row in own:
            row.fail(failure)
    else:
        for row in own:
            row.loss_bytes = taken


def bytes_of_loss(loss: str, case: Case) -> int:
    """Peak memory of the loss and its backward, beyond features and their gradients."""
    measure.return_freed_memory()
    step = contenders.step_of(LOSSES[loss])
    step(case.with_rows(SMALL_CHUNK).inputs())
    return trial.peak_of(step, case.inputs())


def _timed(
    setting: Setting, rows: list[StepRow], names: list[str], repeats: int, seconds: float
) -> dict[str, list[float]]:
    taken, parts = processes.run(race, setting, names, repeats, seconds)
    for row in rows:
        row.parts = parts.get(row.name, {})
    return taken


def race(
    setting: Setting, names: list[str], repeats: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Seconds of every run of every way, which take turns; and the same part by part."""
    training = Training.of(setting.model, setting.rows, dropout=True)
    steps = {name: Step(training, WAYS[name], setting.chunk) for name in names}
    taken = measure.take_turns(steps, repeats, seconds)
    parts = {
        name: {part: [run[part] for run in step.runs[1:]] for part in PARTS}  # the first was thrown away
        for name, step in steps.items()
    }
    for name in names:
        check_sum(name, taken[name], parts[name])
    return taken, parts


def check_sum(name: str, seconds: list[float], parts: dict[str, list[float]]) -> None:
    """Refuse parts that are not the step. By the round in which they are most of it: in others, something else on the
    machine may have come between."""
    share = max(sum(run) / whole for run, whole in zip(zip(*parts.values(), strict=True), seconds, strict=True))
    if not ACCOUNTED <= share <= 1:
        raise RuntimeError(f"the parts of {name} make up {share:.0%} of its step")


def _peak(step: Step) -> tuple[int, Tensor]:
    """Memory of a step beyond weights, optimizer and batch; and the loss."""
    step.training.optimizer.zero_grad()
    with measure.PeakMemory() as memory:
        loss = step()
    return memory.bytes, loss
