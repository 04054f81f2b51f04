"""What a run shows of itself: a progress bar or plain lines, out.log, metrics.jsonl and TensorBoard.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .checkpoint import WriteFailed, atomically

Recorder = Callable[[int, Mapping[str, float]], None]
LOGGER = logging.getLogger("megabatch")
SECONDS_BETWEEN_FRAMES = 0.1

# What a line of the log shows of a step, where it is there.
_LINE = {
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
# What stands above the bar, in two lines that fit 80 columns.
_ABOVE_BAR = (
    {
        "train/loss": "loss {:.4f}",
        "train/accuracy": "accuracy {:.3f}",
        "train/samples_per_second": "{:,.0f} samples/s",
        "train/step_seconds": "batch {:.3f} s",
        "train/data_seconds": "data {:.3f} s",
    },
    {
        "train/lr": "lr {:.3g}",
        "train/logit_scale": "scale {:.2f}",
        "train/grad_norm": "norm {:.3g}",
        "train/memory_mib": "{:,.0f} MiB",
    },
)


def _figures(values: Mapping[str, float], shown: Mapping[str, str]) -> list[str]:
    return [words.format(values[name]) for name, words in shown.items() if name in values]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, numbers as they were."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{name: _number(value) for name, value in json.loads(line).items()} for line in lines]


def _number(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value


class Report:
    """Of one run. `step` is the number of steps that are done, in all methods.

    Args:
        first_step: Steps done before; what metrics.jsonl has beyond is cut off.
        log_every: Steps between lines of the log; the first and the last have one too.
        live: Whether to draw a bar. None: if there is a terminal to draw on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        first_step: int,
        log_every: int,
        report_to: str = "",
        wandb_project: str = "",
        live: bool | None = None,
        console: Console | None = None,
    ) -> None:
        self.total_steps, self.first_step, self.log_every = total_steps, first_step, log_every
        self._bar: _Bar | None = None
        self._recorders: list[Recorder] = []
        console = console or Console(stderr=True)
        live = console.is_interactive if live is None else live
        with ExitStack() as stack:  # what was opened is closed again should the rest fail
            folder.mkdir(parents=True, exist_ok=True)
            if report_to == "all" or "tensorboard" in report_to:
                self._recorders.append(_open_tensorboard(folder / "tensorboard", first_step, stack))
            if report_to == "all" or "wandb" in report_to:
                self._recorders.append(_open_wandb(folder, wandb_project, stack))
            path = folder / "metrics.jsonl"
            unreadable = _cut(path, first_step)
            self._not_finite = folder / "nonfinite.jsonl"
            _cut(self._not_finite, first_step)
            self._metrics = stack.enter_context(path.open("a", encoding="utf-8"))
            terminal = _Lines(console) if live else logging.StreamHandler(console.file)
            terminal.addFilter(lambda record: not getattr(record, "file_only", False))
            file = _LogFile(folder / "out.log", encoding="utf-8")
            stack.callback(_open_log(terminal, file))
            if live:
                self._bar = stack.enter_context(_Bar(console, total_steps, first_step))
            self._stack = stack.pop_all()
        if unreadable:
            self.warn(f"{path}: {unreadable} lines could not be read, and were dropped")

    @staticmethod
    def silent() -> "Report":
        """For the other ranks: it can be told everything, and shows nothing."""
        return _Silent()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._record(step, values)
        if self._bar is not None:
            self._bar.show(step, values)
        if step % self.log_every == 0 or step in (self.first_step + 1, self.total_steps):
            # The bar shows the same.
            LOGGER.info(self._line(step, values), extra={"file_only": self._bar is not None})

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        self._record(step, values)
        self.say(f"Eval Step: {step} " + " ".join(f"{name}: {value:.5g}" for name, value in values.items()))

    def not_finite(self, step: int, values: Mapping[str, float], samples: Sequence[str]) -> None:
        """The samples of a step from which nothing could be learned, in nonfinite.jsonl."""
        with self._not_finite.open("a", encoding="utf-8") as file:
            file.write(_json(step, values, samples=samples))

    def say(self, text: str) -> None:
        LOGGER.info(_writable(text))

    def warn(self, text: str) -> None:
        LOGGER.warning(_writable(text))

    def replay(self, held: Sequence[logging.LogRecord]) -> None:
        """What was logged before there was a report."""
        for record in held:
            LOGGER.handle(record)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # Python shows it on the terminal
            LOGGER.error("the run ended with an error", exc_info=error, extra={"file_only": True})
        self.close()

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self._metrics.write(_json(step, values))
            self._metrics.flush()
        except OSError as error:
            with suppress(OSError):  # it would try again to write the rest
                self._metrics.close()
            raise WriteFailed(error.errno, error.strerror, str(self._metrics.name)) from None
        for record in self._recorders:
            record(step, values)

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        epoch = f"Train Epoch: {values['train/epoch']:.0f} " if "train/epoch" in values else "Train "
        share = f"[{step}/{self.total_steps} ({step / self.total_steps:.0%})]"
        return " ".join([epoch + share, *_figures(values, _LINE)])


class _Silent(Report):
    def __init__(self) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    step = validation = not_finite = say = warn = replay = close = __exit__ = _nothing


# ---- on the terminal


class _Bar(Progress):
    """The figures of the last step, and below them how far the run is. It is drawn when a step is done."""

    def __init__(self, console: Console, total_steps: int, first_step: int) -> None:
        self._lines = [""] * len(_ABOVE_BAR)
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
        self._task = self.add_task("train", total=total_steps, completed=first_step)
        self._drawn = -math.inf

    def get_renderables(self) -> list[RenderableType]:
        figures = [Text(line, no_wrap=True, overflow="ellipsis") for line in self._lines]
        return [*figures, *super().get_renderables()]

    def show(self, step: int, values: Mapping[str, float]) -> None:
        self._lines = [" · ".join(_figures(values, shown)) for shown in _ABOVE_BAR]
        epoch = f"epoch {values['train/epoch']:.0f}" if "train/epoch" in values else "train"
        self.update(self._task, completed=step, description=epoch)
        if time.monotonic() - self._drawn >= SECONDS_BETWEEN_FRAMES:
            self._drawn = time.monotonic()
            self.refresh()


class _Lines(logging.Handler):
    """Lines above the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(Text(self.format(record)), soft_wrap=True)
        except Exception:
            self.handleError(record)


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


def _open_log(*handlers: logging.Handler) -> Callable[[], None]:
    """The library's logger, with these handlers and no others above it, until the result is called."""
    level, propagate = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # others set up the root logger, and lines would come twice
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d,%H:%M:%S"))
        LOGGER.addHandler(handler)

    def close() -> None:
        for handler in handlers:
            LOGGER.removeHandler(handler)
            handler.close()
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate

    return close


def _open_wandb(folder: Path, project: str, stack: ExitStack) -> Recorder:
    """A run of the same name goes on. What it has of a step already stays: a resumed run has the same values."""
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--report-to wandb needs the package wandb: pip install wandb.", name=error.name
        ) from error
    run = wandb.init(project=project, name=folder.name, id=folder.name, dir=str(folder), resume="allow")
    stack.callback(run.finish)

    def add(step: int, values: Mapping[str, float]) -> None:
        run.log(dict(values), step=step)

    return add


def _open_tensorboard(folder: Path, first_step: int, stack: ExitStack) -> Recorder:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--report-to tensorboard needs the package tensorboard: pip install 'megabatch[train]'.", name=error.name
        ) from error
    # What a killed run wrote beyond its checkpoint is hidden.
    writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
    stack.callback(writer.close)

    def add(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return add


@contextmanager
def holding_log() -> Iterator[list[logging.LogRecord]]:
    """What the library logs meanwhile, shown to nobody yet."""
    records: list[logging.LogRecord] = []
    holder = logging.Handler()
    holder.emit = records.append  # type: ignore[assignment, method-assign]
    close = _open_log(holder)
    try:
        yield records
    finally:
        close()


def _writable(text: str) -> str:
    """Names of files may be what no encoding has."""
    return text.encode(errors="backslashreplace").decode()


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
    kept, unreadable = [], 0
    for line in lines:
        step = _step_of(line)
        if step is None:
            unreadable += 1
        elif step <= last_step:
            kept.append(line + b"\n")
    atomically(path, lambda file: file.writelines(kept))
    return unreadable


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
