"""How far a benchmark is: cases done, the time so far and the time left, on a terminal and where rich is installed."""

import importlib.util
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

# A process that starts and loads what it needs, and what two cores multiply and add in a second: about.
START_SECONDS, PER_SECOND = 3.0, 1e11


def work(starts: int, products: float) -> float:
    """Seconds that so many processes and so many multiplications take, about: enough to tell cases apart."""
    return START_SECONDS * starts + 2 * products / PER_SECOND


class Estimate:
    """The time left, from what was done so far: a share of the whole, and when it was reached."""

    def __init__(self, now: float) -> None:
        self.begin = now
        self.share = 0.0
        self.reached = now

    def reach(self, share: float, now: float) -> None:
        self.share, self.reached = share, now

    def left(self, now: float) -> float | None:
        """Seconds; None while nothing is known."""
        if self.share <= 0:
            return None
        whole = (self.reached - self.begin) / self.share
        return max(whole - (now - self.begin), 0.0)


def clock(seconds: float) -> str:
    """1:05, 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Bar:
    """Of a number of cases, of which each takes its share of the time."""

    def __init__(self) -> None:
        self.cases = 0
        self._starts: list[float] = [0.0]
        self._at = 0
        self._estimate = Estimate(time.monotonic())
        self._progress: Any = None
        self._task: Any = None

    def begin(self, cases: int, work: Sequence[float]) -> None:
        self.cases = cases
        whole = sum(work) or 1.0
        self._starts = [done / whole for done in accumulate(work, initial=0.0)]
        self._estimate = Estimate(time.monotonic())
        if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            self._progress = _progress(self._estimate)
            self._task = self._progress.add_task("", total=1.0)
            self._progress.start()

    def reach(self, case: int) -> None:
        """Cases before this one are done."""
        self._at = case
        self._show(self._starts[case])

    def part(self, done: float) -> None:
        """So much of this one is done, from 0 to 1."""
        start, end = self._starts[self._at : self._at + 2]
        self._show(start + done * (end - start))

    def hide(self) -> None:
        """While something is printed, and at the end."""
        if self._progress is not None:
            self._progress.stop()

    def show(self) -> None:
        if self._progress is not None:
            self._progress.start()

    def _show(self, share: float) -> None:
        self._estimate.reach(share, time.monotonic())
        if self._progress is not None:
            words = f"case {min(self._at + 1, self.cases)} of {self.cases}"
            self._progress.update(self._task, completed=share, description=words)


def _progress(estimate: Estimate) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Left(ProgressColumn):
        """By what all cases take, not by the speed of the last seconds: cases are long."""

        def render(self, task: Task) -> Text:
            left = estimate.left(time.monotonic())
            return Text("" if left is None else f"about {clock(left)} left")

    # What is printed goes where it always goes, not through the bar.
    options = {"console": Console(stderr=True), "transient": True, "redirect_stdout": False, "redirect_stderr": False}
    options["refresh_per_second"] = 1  # whoever is measured wants the cores
    return Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), Left(), **options)  # type: ignore[arg-type]
