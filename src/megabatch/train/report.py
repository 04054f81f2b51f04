"""What a run shows of itself: a progress bar or plain lines, out.log, metrics.jsonl, TensorBoard and report.html.

metrics.jsonl is the record: a line of JSON per step, and one per validation, with `step` and the values by name. It is
flushed line by line, and cut back to the checkpoint when a run is resumed, so that it reads as if nothing had happened.
Numbers are exact. JSON has none for nan and the infinities: they are the strings "nan", "inf" and "-inf", which
Python's float() reads as it reads the numbers.

Nothing here runs in a thread of its own but TensorBoard's writer and wandb: workers of a loader may be forked at any
time.
"""

import json
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .checkpoint import append, atomically
from .config import Run, said

Recorder = Callable[[int, Mapping[str, float]], None]
LOGGER = logging.getLogger("megabatch")
SECONDS_BETWEEN_FRAMES = 0.1

# What is shown of a step, where it is there.
_FIGURES = {
    "train/data_seconds": "Data (t): {:.3f}",
    "train/step_seconds": "Batch (t): {:.3f}",
    "train/samples_per_second": "{:.1f}/s",
    "train/mfu": "MFU: {:.1%}",
    "train/lr": "LR: {:.6g}",
    "train/logit_scale": "Logit Scale: {:.3f}",
    "train/grad_norm": "Grad Norm: {:.4g}",
    "train/memory_mib": "Memory: {:.0f} MiB",
    "train/accuracy": "Accuracy: {:.4f}",
    "train/loss": "Loss: {:.5g}",
}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, numbers as they were."""

    def numbers(values: dict[str, float | str]) -> dict[str, float]:
        return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}

    return [numbers(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


class Report(ExitStack):
    """Of one run. `step` is the number of steps that are done, in all methods.

    Args:
        first_step: Steps done before; what metrics.jsonl has beyond is cut off.
        console: A bar is drawn on it where it is a terminal.
    """

    def __init__(
        self, folder: Path, run: Run, *, total_steps: int, first_step: int, console: Console | None = None
    ) -> None:
        super().__init__()
        self.total_steps, self.first_step, self.log_every = total_steps, first_step, run.log_every_n_steps
        self._bar: _Bar | None = None
        self._folder, self._writes_page, self._last_step = folder, run.report, first_step
        self._recorders: list[Recorder] = []
        console = console or Console(stderr=True)
        console.soft_wrap = True  # a path stays in one piece
        with ExitStack() as stack:  # what was opened is closed again should the rest fail
            folder.mkdir(parents=True, exist_ok=True)
            if run.report_to == "all" or "tensorboard" in run.report_to:
                self._recorders.append(_open_tensorboard(folder / "tensorboard", first_step, stack))
            if run.report_to == "all" or "wandb" in run.report_to:
                self._recorders.append(_open_wandb(folder, run.wandb_project_name, stack))
            self._metrics, self._not_finite = folder / "metrics.jsonl", folder / "nonfinite.jsonl"
            self._metrics.touch()
            unreadable = _cut(self._metrics, first_step)
            _cut(self._not_finite, first_step)
            live = console.is_interactive
            terminal = logging.StreamHandler(FileProxy(console, console.file) if live else console.file)
            terminal.addFilter(lambda record: not getattr(record, "file_only", False))
            # Names of files may be what no encoding has.
            file = _LogFile(folder / "out.log", encoding="utf-8", errors="backslashreplace")
            stack.enter_context(_logging_to(terminal, file))
            if live:
                self._bar = stack.enter_context(_Bar(console, total_steps, first_step))
            self.push(stack.pop_all())
        if unreadable:
            self.warn(f"{self._metrics}: {unreadable} lines could not be read, and were dropped")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._record(step, values)
        epoch = f"Train Epoch: {values['train/epoch']:.0f}" if "train/epoch" in values else "Train"
        figures = " ".join(words.format(values[name]) for name, words in _FIGURES.items() if name in values)
        if self._bar is not None:
            self._bar.show(step, epoch, figures)
        if step % self.log_every == 0 or step in (self.first_step + 1, self.total_steps):
            share = f"[{step}/{self.total_steps} ({step / self.total_steps:.0%})]"
            LOGGER.info(f"{epoch} {share} {figures}", extra={"file_only": self._bar is not None})

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        self._record(step, values)
        self.say(f"Eval Step: {step} " + " ".join(f"{name}: {value:.5g}" for name, value in values.items()))
        self._write_page(examples=False)

    def not_finite(self, step: int, values: Mapping[str, float], samples: Sequence[str]) -> None:
        """The samples of a step from which nothing could be learned, in nonfinite.jsonl."""
        append(self._not_finite, _json(step, values, samples=samples))

    def say(self, text: str) -> None:
        LOGGER.info(text)

    def warn(self, text: str) -> None:
        LOGGER.warning(text)

    def replay(self, held: Sequence[logging.LogRecord]) -> None:
        """What was logged before there was a report."""
        for record in held:
            LOGGER.handle(record)

    def __exit__(self, *raised: Any) -> None:
        error = raised[1]
        if isinstance(error, Exception):  # Python shows it on the terminal
            LOGGER.error("the run ended with an error", exc_info=error, extra={"file_only": True})
        if error is None or isinstance(error, Exception):
            self._write_page(examples=self._last_step == self.total_steps)
        super().__exit__(*raised)

    def _write_page(self, *, examples: bool) -> None:
        """report.html, as of now. No run ends because it cannot be drawn."""
        if not self._writes_page:
            return
        try:
            from .report_command import EXAMPLES, write_report

            write_report([self._folder], self._folder / "report.html", examples=EXAMPLES if examples else 0)
        except Exception as error:
            self.warn(f"report.html was not written: {said(error)}.")

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        self._last_step = step
        append(self._metrics, _json(step, values))
        for record in self._recorders:
            record(step, values)


class SilentReport(Report):
    """For the other ranks: it can be told everything, and shows nothing."""

    def __init__(self) -> None:
        ExitStack.__init__(self)

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    step = validation = not_finite = say = warn = replay = __exit__ = _nothing


# ---- on the terminal


class _Bar(Progress):
    """The figures of the last step, and below them how far the run is. It is drawn when a step is done."""

    def __init__(self, console: Console, total_steps: int, first_step: int) -> None:
        self._figures = ""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._task = self.add_task("Train", total=total_steps, completed=first_step)
        self._drawn = -math.inf

    def get_renderables(self) -> list[RenderableType]:
        return [Text(self._figures, no_wrap=False, overflow="fold"), *super().get_renderables()]

    def show(self, step: int, epoch: str, figures: str) -> None:
        self._figures = figures
        self.update(self._task, completed=step, description=epoch)
        if time.monotonic() - self._drawn >= SECONDS_BETWEEN_FRAMES:
            self._drawn = time.monotonic()
            self.refresh()


# ---- in files


class _LogFile(logging.FileHandler):
    """What a full disk does not take is on the terminal still."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
            return
        with suppress(OSError):  # it would try again to write the rest
            self.stream.close()
        self.stream: Any = None  # opened anew for the next line


@contextmanager
def _logging_to(*handlers: logging.Handler) -> Iterator[None]:
    """The library's logger has these handlers, and no others above it."""
    level, propagate = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # others set up the root logger, and lines would come twice
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S"))
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            LOGGER.removeHandler(handler)
            handler.close()
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate


@contextmanager
def holding_log() -> Iterator[list[logging.LogRecord]]:
    """What the library logs meanwhile, shown to nobody yet."""
    holder = MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    with _logging_to(holder):
        yield holder.buffer


def _open_wandb(folder: Path, project: str, stack: ExitStack) -> Recorder:
    """What it has of a step already stays: a resumed run has the same values.

    Its id is kept in the folder: runs of one name in two folders are two.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--report-to wandb needs wandb, got none. Run pip install wandb.") from error
    kept = folder / "wandb.id"
    if not kept.exists():
        atomically(kept, lambda file: file.write(uuid.uuid4().hex.encode()))
    run = wandb.init(project=project, name=folder.name, id=kept.read_text(), dir=str(folder), resume="allow")
    stack.callback(run.finish)
    return lambda step, values: run.log(dict(values), step=step)


def _open_tensorboard(folder: Path, first_step: int, stack: ExitStack) -> Recorder:
    from torch.utils.tensorboard import SummaryWriter

    # What a killed run wrote beyond its checkpoint is hidden.
    writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
    stack.callback(writer.close)

    def add(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return add


def _json(step: int, values: Mapping[str, float], **more: object) -> str:
    numbers = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    return json.dumps({"step": step, **numbers, **more}, allow_nan=False) + "\n"


def _cut(path: Path, last_step: int) -> int:
    """Leave the lines of steps up to `last_step`. Returns how many could not be read, which go too.

    A last line without an end is what a killed run leaves behind, and does not count.
    """
    if not path.exists():
        return 0
    *lines, _ = path.read_bytes().split(b"\n")
    steps = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            steps.append((int(json.loads(line)["step"]), line + b"\n"))
    atomically(path, lambda file: file.writelines(line for step, line in steps if step <= last_step))
    return len(lines) - len(steps)
