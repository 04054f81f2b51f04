"""Row: what is known of one contender in one case, whatever the benchmark."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from .instruments import processes


@dataclass
class Row:
    """Of one contender. `status`: ok, wrong, not installed, would not fit, not run, failed.

    Over ranks, memory is that of the rank that takes most, a run's seconds those of the slowest, bytes the average.

    Attributes:
        peak_bytes: Beyond inputs and gradients.
        error: The largest of the loss and its gradients, relative, against float64.
        gradient: Over ranks, the length of the features' gradient after averaging, over that of one process.
    """

    name: str
    title: str
    status: str = "ok"
    note: str = ""
    peak_bytes: int | None = None
    sent_bytes: float | None = None
    error: float | None = None
    gradient: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float | None:
        return min(self.seconds, default=None)

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.seconds) if self.seconds else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else None

    def fail(self, failure: processes.Failed) -> None:
        self.status, self.note = "failed", str(failure)

    def convict(self, wrong: str) -> None:
        self.status, self.note = "wrong", wrong
        self.peak_bytes, self.sent_bytes, self.error, self.gradient, self.seconds = None, None, None, None, []

    def record(self, **more: Any) -> dict[str, Any]:
        """For a file: everything, and the figures of the table."""
        return {**asdict(self), "best": self.best, "mean": self.mean, "deviation": self.deviation, **more}


class Known(Protocol):
    """Whoever is measured."""

    @property
    def ours(self) -> bool: ...


def healthy(rows: Iterable[Row], known: Mapping[str, Known]) -> bool:
    """Nobody is wrong, and ours ran; others may fail."""
    return all(row.status != "wrong" and (row.status != "failed" or not known[row.name].ours) for row in rows)


def row_of(rows: Sequence[Row], name: str) -> Row | None:
    return next((row for row in rows if row.name == name), None)


def over(row: Row, base: Row | None) -> float | None:
    """The median of the ratios of their rounds: what slows one round down slows both."""
    if base is None or not row.seconds or not base.seconds:
        return None
    return statistics.median(own / its for own, its in zip(row.seconds, base.seconds, strict=False))
