"""In words, from what was measured and nothing else: what share of a step the loss takes, and from where on it matters
which loss it is."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .trial import StepRow

# So much more time or memory of a step is worth a change.
WORTH = 1.1
WIDTH = 120

# By the number of rows of the batch.
Measured = Mapping[int, Sequence[StepRow]]


@dataclass(frozen=True)
class Pair:
    """The step with the dense loss and with megabatch's, on one batch, encoded one way."""

    rows: int
    dense: StepRow
    ours: StepRow

    @property
    def time_ratio(self) -> float | None:
        """Of our step with the time of the dense loss in the place of ours, to our step. All else is the same in both,
        and differs by nothing but noise, which is often more than what the loss takes."""
        dense, ours, step = self.dense.part("loss"), self.ours.part("loss"), self.ours.mean
        return None if dense is None or ours is None or not step else (step - ours + dense) / step

    @property
    def memory_ratio(self) -> float | None:
        dense, ours = self.dense.whole_bytes, self.ours.whole_bytes
        return None if dense is None or not ours else dense / ours

    @property
    def dense_cannot(self) -> bool:
        return self.dense.status == "would not fit" or (
            self.dense.status == "failed" and self.dense.note == "out of memory"
        )

    @property
    def matters(self) -> bool:
        ratios = (self.time_ratio, self.memory_ratio)
        return self.dense_cannot or any(ratio is not None and ratio >= WORTH for ratio in ratios)

    @property
    def shares(self) -> str:
        """Of the loss in the step, by megabatch and by the dense loss."""
        dense = "does not fit" if self.dense_cannot else _shares(self.dense)
        return f"{_shares(self.ours)} at N={self.rows}" + (f" (dense: {dense})" if dense else "")

    @property
    def compared(self) -> str:
        """What the step with the dense loss takes of that with megabatch's, or ""."""
        if self.time_ratio is None or self.memory_ratio is None:
            return ""
        return f"{self.time_ratio:.2f} times the time and {self.memory_ratio:.2f} times the memory at N={self.rows}"


def pairs(measured: Measured, chunked: bool) -> list[Pair]:
    """Those in which megabatch has figures, from few rows to many."""
    found = []
    for size, rows in sorted(measured.items()):
        own = {row.way.loss: row for row in rows if row.way.chunked == chunked}
        if own["megabatch"].seconds:
            found.append(Pair(size, own["dense"], own["megabatch"]))
    return found


def matters_from(found: Sequence[Pair]) -> int | None:
    """The smallest batch at which it matters, and at every larger one."""
    smallest = None
    for pair in reversed(found):
        if not pair.matters:
            break
        smallest = pair.rows
    return smallest


def verdict(measured: Measured, chunked: bool) -> str:
    """A few sentences, or "" where nothing was measured."""
    found = pairs(measured, chunked)
    if not found:
        return ""
    shares = ", ".join(pair.shares for pair in _ends(found))
    sentences = [f"{'In chunks' if chunked else 'In one piece'}, megabatch's loss takes of a step {shares}."]
    compared = [pair.compared for pair in _ends([pair for pair in found if pair.compared])]
    if compared:
        sentences.append(f"The step with the dense loss takes {', '.join(compared)}.")
    smallest = matters_from(found)
    if smallest is None:
        where = "At" if any(pair.matters for pair in found) else "Up to"
        sentences.append(f"{where} N={found[-1].rows} the dense loss will do.")
    else:
        least = ", the smallest batch measured," if smallest == found[0].rows else ""
        sentences.append(f"From N={smallest} on{least} megabatch matters.")
    return textwrap.fill(" ".join(sentences), WIDTH)


def _ends(found: Sequence[Pair]) -> Sequence[Pair]:
    return found if len(found) < 3 else (found[0], found[-1])


def _shares(row: StepRow) -> str:
    if row.time_share is None:
        return ""
    return f"{percent(row.time_share)} of the time and {percent(row.memory_share)} of the memory"


def percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share * 100:.0f} %" if share >= 0.0995 else f"{share * 100:.1f} %"
