"""What one tiling goes through: would it fit, is it right, what memory. And what all go through together: the clock,
with the stopwatch and without.

Everything runs on the ranks of a group or, where there is one, in a process of its own.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...tiling import call
from ...tiling.plan import Plan
from ..cases import Case, Inputs
from ..instruments import measure, processes
from ..instruments.ranks import Crew, Member
from ..loss import contenders, trial
from ..loss.contenders import CONTENDERS, Step
from ..loss.trial import Results
from ..results import Row
from .contenders import TITLES, UNDIVIDED, Tiling, plain_products, products_held, tilings
from .stopwatch import STAGES, Lap, Stopwatch, replaced

PRODUCTS = "products"


@dataclass
class TilingRow(Row):
    """Of one tiling. Its seconds are those without the stopwatch.

    Attributes:
        overlap: Over ranks, blocks are sent while tiles are computed.
        plan: What was done.
        laps: Of every run with the stopwatch, the seconds of each stage; over ranks, of the one that took longest.
    """

    overlap: bool = True
    plan: Plan | None = None
    laps: list[Lap] = field(default_factory=list)

    @property
    def sums(self) -> list[float]:
        return [sum(lap.values()) for lap in self.laps]

    def stage(self, name: str) -> list[float]:
        return [lap[name] for lap in self.laps]

    @property
    def best_lap(self) -> Lap | None:
        return min(self.laps, key=lambda lap: sum(lap.values()), default=None)

    def record(self, **more: Any) -> dict[str, Any]:
        """The tile and the stages, too, are columns of a file."""
        columns: dict[str, Any] = {}
        if self.plan is not None:
            tile = [self.plan.rows, self.plan.columns]
            columns = {"tile": tile, "one_pass": self.plan.one_pass, "kept": self.plan.kept}
        for name in STAGES if self.laps else ():
            seconds, best = self.stage(name), self.best_lap
            columns[f"{name}_seconds"] = seconds
            columns[f"{name}_mean"] = statistics.mean(seconds)
            columns[f"{name}_deviation"] = statistics.stdev(seconds) if len(seconds) > 1 else None
            columns[f"{name}_of_best"] = None if best is None else best[name]
        known = super().record(**columns, **more)
        del known["plan"], known["laps"]
        return known


class Outcome(NamedTuple):
    """What one process saw of a tiling."""

    wrong: str
    peak_bytes: int
    plan: Plan


class Taken(NamedTuple):
    """What one process brings home from the race: seconds without the stopwatch by name, and laps with it."""

    seconds: dict[str, list[float]]
    laps: dict[str, list[Lap]]


def contest(
    case: Case,
    ranks: int,
    sizes: list[str],
    repeats: int,
    seconds: float,
    reached: Callable[[float], None] = lambda share: None,
) -> list[TilingRow]:
    """The plain products first, then every tiling. All must be right for any to be timed."""
    entrants = {tiling.name: tiling for tiling in tilings(sizes, ranks)}
    plain = _fitting(TilingRow(PRODUCTS, CONTENDERS[PRODUCTS].title), products_held(case, ranks))
    rows = [plain, *(TilingRow(tiling.name, tiling.title, overlap=tiling.overlap) for tiling in entrants.values())]
    beside = products_held(case, ranks) if plain.status == "ok" else 0
    try:
        with tempfile.TemporaryDirectory(prefix="megabatch-") as folder:
            processes.run(write_references, case, Path(folder))
            for index, row in enumerate(rows[1:]):
                _enter(row, case, ranks, sizes, entrants[row.name], beside, Path(folder))
                reached((index + 1) / (2 * len(entrants)))
        runners = [row for row in rows if row.status == "ok"]
        if not any(row.status == "wrong" for row in rows):
            taken = _run(ranks, race, case, [entrants.get(row.name) for row in runners], repeats, seconds)
            for row in runners:
                _record(row, taken)
    except processes.Failed as failure:
        for row in rows:
            if row.status == "ok":
                row.fail(failure)
    return rows


def _run(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    if ranks == 1:
        return [processes.run(function, Member(0, 1, _Nobody()), *args)]
    return Crew(ranks).run(function, *args)


class _Nobody:
    """Nobody to wait for."""

    def wait(self) -> None:
        pass


def _fitting(row: TilingRow, needed: int) -> TilingRow:
    if not trial.would_fit(needed):
        row.status, row.note = "would not fit", f"needs about {needed / 2**30:.1f} GiB"
    return row


def _enter(row: TilingRow, case: Case, ranks: int, sizes: list[str], tiling: Tiling, beside: int, folder: Path) -> None:
    """Fills in whether the tiling is right, and its memory. `beside`: bytes that others hold while it is timed."""
    if tiling.size not in TITLES and UNDIVIDED in sizes and int(tiling.size) >= case.rows // ranks:
        row.status, row.note = "not run", f"the same as {TITLES[UNDIVIDED]}"
        return
    if _fitting(row, tiling.held(case, ranks) + beside).status != "ok":
        return
    try:
        outcomes: list[Outcome] = _run(ranks, examine, case, tiling, folder)
    except processes.Failed as failure:
        row.fail(failure)
        return
    row.plan, row.peak_bytes = outcomes[0].plan, max(outcome.peak_bytes for outcome in outcomes)
    if wrong := next((outcome.wrong for outcome in outcomes if outcome.wrong), ""):
        row.convict(wrong)


# ---- is it right?


def write_references(case: Case, folder: Path) -> None:
    """The loss and its gradients in float64, and in the case's own dtype, both by chunks of rows: any size fits."""
    trial.write_truth(case, False, folder / "truth.pt")
    torch.save(trial.results(contenders.chunked(case), case.inputs()), folder / "peer.pt")


def examine(member: Member, case: Case, tiling: Tiling, folder: Path) -> Outcome:
    """In this process. A small step warms it up."""
    step = tiling.step(case, member.size)
    small = case.with_rows(member.size * -(-min(case.rows, trial.SMALL) // member.size))
    step(small.inputs().cut(member.share(small.rows)))
    inputs = case.inputs().cut(member.share(case.rows))
    with plans_made() as plans:
        peak = trial.peak_of(step, inputs)
    inputs.clear()
    # A rank's gradients are n times its part of the mean's: trainers average over ranks.
    got = {name: x / member.size if x.dim() else x for name, x in trial.results(step, inputs).items()}
    truth, peer = (_mine(member, case, torch.load(folder / name)) for name in ("truth.pt", "peer.pt"))
    return Outcome(trial.difference(case, got, truth, peer), peak, plans[-1])


def _mine(member: Member, case: Case, whole: Results) -> Results:
    return {name: x[member.share(case.rows)] if x.dim() else x for name, x in whole.items()}


@contextmanager
def plans_made() -> Iterator[list[Plan]]:
    """Those of the calls inside."""
    plans: list[Plan] = []

    def noting(make_plan: Callable[..., Plan]) -> Callable[..., Plan]:
        def make(*args: Any) -> Plan:
            plans.append(make_plan(*args))
            return plans[-1]

        return make

    with replaced(call, "make_plan", noting):
        yield plans


# ---- the clock


def race(member: Member, case: Case, entrants: list[Tiling | None], repeats: int, seconds: float) -> Taken:
    """All by turns, a tiling once with the stopwatch and once without; ranks start together. None: plain products."""
    inputs = case.inputs().cut(member.share(case.rows))
    steps: dict[str, Callable[[], object]] = {}
    watches: dict[str, Stopwatch] = {}
    for tiling in entrants:
        if tiling is None:
            steps[PRODUCTS] = partial(plain_products(case, member.size), inputs)
            continue
        step, watch = tiling.step(case, member.size), Stopwatch()
        steps[tiling.name] = partial(_afresh, step, inputs)
        steps[f"{tiling.name}, timed by stages"] = partial(_lap, watch, step, inputs)
        watches[tiling.name] = watch
    # Ranks must agree on the number of rounds, which the time would not be the same for.
    taken = measure.take_turns(steps, repeats, seconds if member.size == 1 else 0.0, partial(_together, member))
    return Taken(
        {name: taken[name] for name in taken if name == PRODUCTS or name in watches},
        {name: watch.laps[1:] for name, watch in watches.items()},  # the first was to warm up
    )


def _afresh(step: Step, inputs: Inputs) -> None:
    inputs.clear()
    step(inputs)


def _lap(watch: Stopwatch, step: Step, inputs: Inputs) -> None:
    with watch.lap():
        _afresh(step, inputs)


def _together(member: Member, step: Callable[[], object]) -> float:
    member.meet()
    return measure.clocked(step)


def _record(row: TilingRow, taken: list[Taken]) -> None:
    """What all processes saw of one tiling's runs, put together: of every run, that of the slowest."""
    row.seconds = [max(run) for run in zip(*(x.seconds[row.name] for x in taken), strict=True)]
    if row.name != PRODUCTS:
        runs = zip(*(x.laps[row.name] for x in taken), strict=True)
        row.laps = [max(run, key=lambda lap: sum(lap.values())) for run in runs]
