"""What one entrant goes through when a batch is spread over ranks: is it there, would it fit, is it right, what memory.

And what all go through together: the clock and the meter of bytes. As in `loss/trial`, but each in ranks of its own.
"""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..cases import Case, Inputs
from ..instruments import measure, processes, wire
from ..instruments.ranks import Crew, Member
from ..loss import contenders, trial
from ..loss.contenders import NotInstalled, Step
from ..loss.trial import Results
from ..results import Row
from .contenders import ENTRANTS, Entrant

# Threads need a moment to fall asleep after a run, and would disturb the next.
PAUSE_SECONDS = 0.02
# Below this the gradient of the scale is held to be as good as zero.
LEAST_SCALE_GRADIENT = 1e-2


class Lap(NamedTuple):
    """One run, as one process saw it."""

    seconds: float
    sent_bytes: int | None
    loss: float


class Digest(NamedTuple):
    """Enough of one process's result to hold it against another's at a size where nobody can check everything."""

    loss: float
    scale_gradient: float
    gradient_norm: float


class Taken(NamedTuple):
    """What one process brings home from the race, by entrant; nothing for those it had no part in."""

    digests: dict[str, Digest]
    laps: dict[str, list[Lap]]


def threads_alone(size: int) -> int:
    """Of the one process: as many as there are ranks. More than cores would only hinder it."""
    return min(size, os.cpu_count() or 1)


def contest(
    case: Case, size: int, names: list[str], repeats: int, reached: Callable[[float], None] = lambda share: None
) -> list[Row]:
    """Every entrant on its own first; then those that are right, by turns. Ours must be right for any to run.

    `reached` is told how much of it is done.
    """
    rows = []
    for index, name in enumerate(names):
        rows.append(_enter(case, size, ENTRANTS[name]))
        reached((index + 1) / (len(names) + 1))
    if _ours_is_wrong(rows):
        return rows
    runners = [row for row in rows if row.status == "ok"]
    try:
        taken = Crew(size, outsiders=1).run(race, case, [row.name for row in runners], repeats)
    except processes.Failed as failure:
        for row in runners:
            row.fail(failure)
        return rows
    judge(case, size, runners, taken)
    return rows


def judge(case: Case, size: int, rows: list[Row], taken: list[Taken]) -> None:
    """Fills in what the race of these showed: time and bytes, or that a result is wrong."""
    for row in rows:
        _record(row, size, taken)
    _compare(case, rows, taken)
    if _ours_is_wrong(rows):
        for row in rows:
            row.seconds = []


def _ours_is_wrong(rows: list[Row]) -> bool:
    return any(ENTRANTS[row.name].ours and row.status == "wrong" for row in rows)


def _enter(case: Case, size: int, entrant: Entrant) -> Row:
    row = Row(entrant.name, _title(entrant, size))
    needed = entrant.held(case, size)
    if not trial.would_fit(needed):
        row.status, row.note = "would not fit", f"needs about {needed / 2**30:.1f} GiB"
        return row
    crew = Crew(size, outsiders=1)
    small = case.with_rows(size * -(-min(case.rows, trial.SMALL) // size))
    try:
        outcomes = crew.run(examine, case, small, entrant.name)
    except processes.Failed as failure:
        row.fail(failure)
        return row
    present = [outcome for outcome in outcomes if outcome is not None]
    if not present:
        row.status = "not installed"
        return row
    row.peak_bytes = max(peak for _, peak in present)
    found = [results for results, _ in present]
    row.error, row.gradient = against_truth(small, found)
    if wrong := fault(entrant, small, found):
        row.convict(wrong)
    return row


def against_truth(case: Case, found: list[Results]) -> tuple[float, float]:
    """The error of all ranks' results together, and the length of the features' gradient over that of one process."""
    truth, got = trial.results(contenders.dense(case), case.inputs().to(torch.float64)), _averaged(found)
    lengths = [math.hypot(*(x.norm().item() for name, x in one.items() if "features" in name)) for one in (got, truth)]
    return trial.error(got, truth), lengths[0] / lengths[1]


def _title(entrant: Entrant, size: int) -> str:
    return f"1 process × {threads_alone(size)} threads" if entrant.alone else entrant.title


def examine(member: Member, case: Case, small: Case, name: str) -> tuple[Results, int] | None:
    """This process's results in the small case, which warms it up, and its peak memory in the large one.

    None where it has no part in it, or where the entrant is not installed.
    """
    entrant = ENTRANTS[name]
    if not _takes_part(member, entrant):
        return None
    try:
        step = _step(member, entrant)
    except NotInstalled:
        return None
    found = trial.results(step, _share(member, small))
    return found, trial.peak_of(step, _share(member, case))


def fault(entrant: Entrant, case: Case, found: list[Results]) -> str:
    """What is wrong with the results of all ranks in this case, or ""."""
    if entrant.ours and len({results["loss"].item() for results in found}) > 1:
        return f"at N={case.rows} the ranks report different losses"
    truth = trial.results(contenders.dense(case), case.inputs().to(torch.float64))
    peer = trial.results(contenders.dense(case), case.inputs()) if entrant.ours else None
    return trial.difference(case, _averaged(found), truth, peer)


def _averaged(found: list[Results]) -> Results:
    """As a trainer that averages gradients over ranks would have it: rows one below the other, scalars the mean."""
    return {
        name: torch.stack([x[name] for x in found]).mean(0)
        if value.dim() == 0
        else torch.cat([x[name] for x in found]) / len(found)
        for name, value in found[0].items()
    }


def race(member: Member, case: Case, names: list[str], repeats: int) -> Taken:
    """One run each that is not timed; then all once per round, in turns, everyone waiting for everyone."""
    taken, inputs = Taken({}, {}), _share(member, case)
    mine = {name: _step(member, ENTRANTS[name]) for name in names if _takes_part(member, ENTRANTS[name])}
    gc.collect()
    gc.disable()
    for round in range(repeats + 1):
        for name in names:
            lap = _lap(member, mine.get(name), inputs)
            if lap is None:
                continue
            if round:
                taken.laps.setdefault(name, []).append(lap)
            else:
                taken.digests[name] = _digest(lap.loss, inputs)
    return taken


def _lap(member: Member, step: Step | None, inputs: Inputs) -> Lap | None:
    inputs.clear()
    member.meet()
    time.sleep(PAUSE_SECONDS)
    before = wire.sent_bytes()
    member.meet()
    start = time.perf_counter()
    loss = None if step is None else step(inputs)
    measure.finish(inputs.scale.device)
    seconds = time.perf_counter() - start
    member.meet()
    after = wire.sent_bytes()
    if loss is None:
        return None
    return Lap(seconds, None if before is None or after is None else after - before, loss.item())


def _takes_part(member: Member, entrant: Entrant) -> bool:
    return member.outsider == entrant.alone


def _step(member: Member, entrant: Entrant) -> Step:
    if entrant.alone:
        torch.set_num_threads(threads_alone(member.size))
    return contenders.step_of(entrant.make(member))


def _share(member: Member, case: Case) -> Inputs:
    """The rows of this rank; of an outsider, all."""
    whole = case.inputs()
    return whole if member.outsider else whole.cut(member.share(case.rows))


def _record(row: Row, size: int, taken: list[Taken]) -> None:
    """What all processes saw of one entrant's runs, put together."""
    laps = [x.laps[row.name] for x in taken if row.name in x.laps]
    row.seconds = [max(lap.seconds for lap in run) for run in zip(*laps, strict=True)]
    if not ENTRANTS[row.name].alone:
        # Others' traffic can only add to it, so the least of all runs is the truest.
        seen = [lap.sent_bytes for lap in laps[0] if lap.sent_bytes is not None]
        row.sent_bytes = min(seen) / size if seen else None


def _digest(loss: float, inputs: Inputs) -> Digest:
    norms = [x.grad.double().norm().item() for x in inputs.features if x.grad is not None]
    scale = inputs.scale.grad
    return Digest(loss, math.nan if scale is None else scale.item(), math.hypot(*norms))


def _compare(case: Case, rows: list[Row], taken: list[Taken]) -> None:
    """At the case's own size, where the dense loss may not fit: everybody against the one process, or the first."""

    def digest(row: Row) -> Digest:
        return _whole([x.digests[row.name] for x in taken if row.name in x.digests])

    for base in [row for row in rows if ENTRANTS[row.name].alone] or rows[:1]:
        for row in rows:
            if wrong := _mismatch(case, digest(row), digest(base), ENTRANTS[row.name].ours, base.title):
                row.convict(wrong)


def _mismatch(case: Case, got: Digest, truth: Digest, ours: bool, whose: str) -> str:
    for name, value, exact in zip(Digest._fields, got, truth, strict=True):
        # The gradient of the scale is a difference of large numbers, to which others in half precision add noise.
        of_scale = name == "scale_gradient"
        allowed = trial.SAME_LOSS[case.dtype] * max(abs(exact), LEAST_SCALE_GRADIENT if of_scale else 0)
        if (ours or not of_scale) and not abs(value - exact) <= allowed:
            return f"at N={case.rows} the {name.replace('_', ' ')} is {value:.6g}, of {whose} {exact:.6g}"
    return ""


def _whole(digests: list[Digest]) -> Digest:
    """Of all ranks together, as a trainer that averages gradients would have it."""
    return Digest(
        statistics.mean(digest.loss for digest in digests),
        statistics.mean(digest.scale_gradient for digest in digests),
        math.hypot(*(digest.gradient_norm for digest in digests)) / len(digests),
    )
