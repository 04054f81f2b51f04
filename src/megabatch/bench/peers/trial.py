"""What a tool goes through with one loss: its gradients over ranks, then one process at one size after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

from .. import plot
from ..cases import Case
from ..gradients import trial as gradients_trial
from ..gradients.trial import Setting
from ..loss import trial as loss_trial
from ..loss.contenders import CONTENDERS, Contender
from ..results import Row
from .contenders import peer_of

RANKS = 2
# Small: a ratio of gradients does not depend on the size.
SETTING = Setting(RANKS, rows=8, width=16, timeout=20)
# Of the progress, that the gradients take about.
GRADIENTS_SHARE = 0.1


@dataclass
class Standing:
    """What is known of one tool and one loss.

    Attributes:
        sizes: By number of rows, smallest first; it ends where the tool was wrong.
        over_ranks: Its gradients; None where it has no way of its own to spread a batch.
    """

    contender: Contender
    sizes: dict[int, Row] = field(default_factory=dict)
    over_ranks: gradients_trial.Row | None = None

    @property
    def wrong(self) -> bool:
        over_ranks = self.over_ranks is not None and self.over_ranks.wrong
        return over_ranks or any(row.status == "wrong" for row in self.sizes.values())

    @property
    def healthy(self) -> bool:
        """It is not wrong, and ours ran."""
        failed = any(row.status == "failed" for row in self.sizes.values())
        return not self.wrong and not (self.contender.ours and failed)

    @property
    def growth(self) -> float | None:
        return growth({rows: row.peak_bytes for rows, row in self.sizes.items()})


def growth(peaks: Mapping[int, int | None]) -> float | None:
    """The factor by which peak memory grows when the rows double: 2 is linear, 4 the square. From peaks by rows."""
    exponent = plot.exponent([(rows, peak) for rows, peak in peaks.items() if peak is not None])
    return None if exponent is None else 2.0**exponent


def contest(
    cases: Sequence[Case],
    names: Sequence[str],
    repeats: int,
    seconds: float,
    reached: Callable[[float], None] = lambda share: None,
) -> Iterator[tuple[Case, list[Standing]]]:
    """All standings after each of the cases: one loss, smallest first.

    Who is wrong goes no further, and where ours is, nobody does. `reached` is told how much of it is done.
    """
    loss = cases[0].loss
    standings = {name: Standing(CONTENDERS[name]) for name in names if loss in CONTENDERS[name].losses}
    for index, (name, standing) in enumerate(standings.items()):
        standing.over_ranks = gradients(name, loss)
        reached(GRADIENTS_SHARE * (index + 1) / len(standings))
    work = [case.rows**2 for case in cases]
    ends = [GRADIENTS_SHARE + (1 - GRADIENTS_SHARE) * done / sum(work) for done in accumulate(work, initial=0)]
    for case, (start, end) in zip(cases, pairwise(ends), strict=True):
        if not any(standing.contender.ours and standing.wrong for standing in standings.values()):
            right = [name for name, standing in standings.items() if not standing.wrong]
            between = partial(_between, reached, start, end)
            for row in loss_trial.contest(case, right, repeats, seconds, error_rows=case.rows, reached=between):
                standings[row.name].sizes[case.rows] = row
        yield case, list(standings.values())


def _between(reached: Callable[[float], None], start: float, end: float, share: float) -> None:
    reached(start + share * (end - start))


def gradients(name: str, loss: str) -> gradients_trial.Row | None:
    peer = peer_of(name, loss)
    if peer is None:
        return None
    (row,) = gradients_trial.contest(SETTING, [peer])
    return row
