"""Row: what is known of one contender in one case, whatever the benchmark."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.utils.benchmark import Measurement, TaskSpec

from . import report
from .contenders import Contender

# Head and body.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass
class Row:
    """Of one contender. `status`: ok, wrong, not installed, cannot run, out of memory, failed.

    Memory is that of one step beyond inputs and gradients (None where it cannot be measured), loss and gradient_norm
    those at the case's own size, `parts` the seconds of one run as the profiler saw it, `seconds` those of all rounds.
    Over ranks memory is that of the rank that takes most, a run's seconds those of the slowest, bytes the average.
    """

    name: str
    title: str
    status: str = "ok"
    note: str = ""
    peak_bytes: int | None = None
    sent_bytes: float | None = None
    error: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        return _measurement(self.seconds).median if self.seconds else None

    @property
    def iqr(self) -> float | None:
        """Between the quartiles."""
        return _measurement(self.seconds).iqr if self.seconds else None

    @property
    def weighed(self) -> bool:
        """Whether its memory was looked at: bare products hold what they are given."""
        return self.status == "ok" and self.loss is not None

    def convict(self, wrong: str) -> None:
        """No figures for what is wrong."""
        self.status, self.note = "wrong", wrong
        self.peak_bytes = self.sent_bytes = self.error = self.loss = self.gradient_norm = None
        self.parts, self.seconds = {}, []

    def record(self, **more: Any) -> dict[str, Any]:
        """For a file: everything, and the figures of the table."""
        return {**asdict(self), "median": self.median, "iqr": self.iqr, **more}


class Ratio(NamedTuple):
    """Of two contenders' times: the median of the ratios of their rounds, and the quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def over(row: Row, base: Row | None) -> Ratio | None:
    """What slows a round down slows both: so ratios within a round, not of the fastest or of the means."""
    if base is None or not row.seconds or not base.seconds:
        return None
    ratios = _measurement([own / its for own, its in zip(row.seconds, base.seconds, strict=True)])
    return Ratio(ratios.median, ratios._p25, ratios._p75)


def _measurement(values: Sequence[float]) -> Measurement:
    return Measurement(1, list(values), TaskSpec("", ""))


def row_of(rows: Sequence[Row], name: str) -> Row | None:
    return next((row for row in rows if row.name == name), None)


def healthy(rows: Iterable[Row], known: Mapping[str, Contender]) -> bool:
    """Nobody is wrong, and ours ran; others may fail."""
    return all(row.status != "wrong" and (row.status == "ok" or not known[row.name].ours) for row in rows)


def table(
    rows: Sequence[Row], ratios: Mapping[str, str], more: Mapping[str, Callable[[Row], str]] | None = None
) -> Table:
    """Time, ratios to the contenders that `ratios` names by column, `more` columns, and memory."""
    more = more or {}
    head = ("", "median", "IQR", *ratios, *more, "peak MiB", "")
    body = [
        (
            row.title,
            report.seconds(row.median),
            report.seconds(row.iqr),
            *(str(over(row, row_of(rows, base)) or "-") for base in ratios.values()),
            *(cell(row) for cell in more.values()),
            report.mebibytes(row.peak_bytes) if row.weighed else "-",
            report.remark(row.status, row.note),
        )
        for row in rows
    ]
    return head, body
