"""The steps that every benchmark shares: installed, fits, right, memory, time.

Every contender runs in separate processes (on an accelerator, and under torchrun, in the ones there are): is
it installed, does a step fit the memory there is, are the loss and all gradients right, what memory does a step take.
Then those that are right run by turns. Ours must be right for anybody to be timed.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..distributed.world import World
from ..tolerance import SAME_LOSS, slack
from . import measure
from .cases import Results, Work, results
from .contenders import CannotRun, Contender, NotInstalled
from .processes import Failed, OutOfMemory, Runner
from .results import Row

# The profiler's view of a step on a device: seconds by part.
Parts = Callable[[Callable[[], object], torch.device], dict[str, float]]

# What is measured, a Case for instance: frozen, and small enough to be sent to a process. It has rows, ranks, scale and
# torch_dtype; few(), the same with few rows; work(world), what a rank computes on; expected(), what it should get.
Problem = Any


@dataclass(frozen=True)
class Rules:
    """How a benchmark is run.

    Attributes:
        repeats: Rounds, at least; 0: no times.
        seconds: Go on with rounds for this long.
        limit: Bytes that a process may take beyond what it holds before its inputs are made; None: what there is.
        error_rows: Up to this many rows, errors are measured at the case's own size.
    """

    repeats: int = 7
    seconds: float = 0.0
    limit: int | None = None
    error_rows: int = 0


def contest(
    problem: Problem,
    contenders: Sequence[Contender],
    rules: Rules,
    runner: Runner,
    reached: Callable[[], None] = lambda: None,
    parts: Parts | None = None,
) -> list[Row]:
    """A row for each. `reached` is called once per contender, and once for the race; `parts` is the profiler's view of
    a step, to be taken of everyone."""
    rows = []
    for contender in contenders:
        rows.append(_enter(problem, contender, rules, runner))
        reached()
    by_name = {contender.name: contender for contender in contenders}
    _hold_together(problem, rows, by_name)
    if rules.repeats and not any(by_name[row.name].ours and row.status == "wrong" for row in rows):
        runners = [row for row in rows if row.status == "ok"]
        try:
            taken = runner.run(problem.ranks, race, problem, [by_name[row.name] for row in runners], rules, parts)
        except Failed as failure:
            for row in runners:
                _fail(row, failure)
        else:
            for row in runners:
                _record(row, [runs[row.name] for runs, _ in taken if runs[row.name]], by_name[row.name])
                row.parts = taken[0][1].get(row.name, {})
    reached()
    return rows


def _fail(row: Row, failure: Failed) -> None:
    row.status, row.note = ("out of memory", "") if isinstance(failure, OutOfMemory) else ("failed", str(failure))


def _enter(problem: Problem, contender: Contender, rules: Rules, runner: Runner) -> Row:
    threads = f", {_threads(problem.ranks)} threads" if contender.alone else ""
    row = Row(contender.name, contender.title + threads)
    try:
        found = runner.run(problem.ranks, examine, problem, row, contender, rules)
    except Failed as failure:
        _fail(row, failure)
        return row
    peaks = [each.peak_bytes for each in found if each.peak_bytes is not None]
    return replace(found[0], peak_bytes=max(peaks, default=None))


def _threads(ranks: int) -> int:
    """Of one process beside ranks of one thread: more than there are cores would only hinder it."""
    return min(ranks, max(torch.get_num_threads(), torch.multiprocessing.cpu_count()))


# ---- in the processes of one contender


def examine(world: World, problem: Problem, row: Row, contender: Contender, rules: Rules) -> Row:
    """Fills in whether the contender is right, what memory it takes and, up to some number of rows, its error."""
    measure.return_freed_memory()
    own, takes_part = _world_of(world, contender)
    try:
        few = problem.few(contender.multiple)
        step = contender.make(few.work(own)) if takes_part else None
    except (NotInstalled, CannotRun) as reason:
        row.status, row.note = "not installed" if isinstance(reason, NotInstalled) else "cannot run", str(reason)
    if any(world.gather(row.status != "ok")):
        return row
    del step
    if contender.bare:
        return row
    found = world.gather(_results(few, own, contender) if takes_part else None)
    if wrong := fault(few, contender, [each for each in found if each is not None]):
        row.convict(wrong)
        return row
    if takes_part:
        _weigh(problem, own, contender, row, rules)
    totals = world.gather((row.loss, row.gradient_norm, row.error))
    everyones = [each for each in totals if each[0] is not None]
    row.loss = statistics.mean(loss for loss, _, _ in everyones)
    row.error = max((error for _, _, error in everyones if error is not None), default=None)
    norms = [norm for _, norm, _ in everyones]
    row.gradient_norm = norms[0] if len(norms) == 1 else math.hypot(*norms) / len(norms)
    return row


def _world_of(world: World, contender: Contender) -> tuple[World, bool]:
    """The world as the contender sees it, and whether this rank has a part in it."""
    if not contender.alone:
        return world, True
    return World(world.device), world.rank == 0


def _results(problem: Problem, world: World, contender: Contender) -> Results:
    with _own_threads(contender, problem.ranks):
        work = problem.work(world)
        return results(contender.make(work), work)


def _weigh(problem: Problem, world: World, contender: Contender, row: Row, rules: Rules) -> None:
    wanted = problem.rows <= rules.error_rows and problem.ranks == 1
    truth = problem.exact(contender.normalizes) if wanted else None
    with _own_threads(contender, problem.ranks):
        limit = measure.limit_memory(rules.limit, problem.ranks, world.device)
        work = problem.work(world)
        step = contender.make(work)
        limit()  # making inputs takes more than holding them
        if contender.compiles or world.device.type != "cpu":
            step()
        work.clear()
        with measure.PeakMemory(world.device) as memory:
            loss = step()
        gradients = work.gradients()
        if memory.bytes is not None:
            row.peak_bytes = max(memory.bytes - sum(x.nbytes for x in gradients.values()), 0)
        assert loss is not None
        named = {name: x for name, x in gradients.items() if not work.own_rows or "features" in name}
        row.loss = loss.item()
        row.gradient_norm = math.hypot(*(x.double().norm().item() for x in named.values()))
        if not work.own_rows:  # all ranks have the same: their share of it, for what is added up
            row.gradient_norm *= math.sqrt(world.size)
        if truth is not None:
            row.error = error({"loss": loss, **gradients}, truth)


@contextmanager
def _own_threads(contender: Contender, ranks: int) -> Iterator[None]:
    """One process beside ranks has the threads of all of them, as long as it works."""
    before = torch.get_num_threads()
    torch.set_num_threads(_threads(ranks) if contender.alone else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- is it right?


def combined(found: Sequence[Results], grad_reduction: str = "mean") -> Results:
    """As a trainer that averages gradients over ranks has it: rows one below the other, all else the mean."""
    ranks = len(found) if grad_reduction == "mean" else 1
    whole: Results = {}
    for name in found[0]:
        parts = [each[name] for each in found]
        if "features" in name:
            whole[name] = torch.cat(parts) / ranks
        else:
            whole[name] = torch.stack(parts).mean(0) * (1 if name == "loss" else len(found) / ranks)
    return whole


def fault(problem: Problem, contender: Contender, found: Sequence[Results]) -> str:
    """What is wrong with the results of all ranks, or ""."""
    if contender.ours and len({each["loss"].item() for each in found}) > 1:
        return f"at N={problem.rows} the ranks report different losses"
    got, truth = combined(found), problem.expected(contender.normalizes)
    allowed: dict[str, float] = {}
    if contender.ours:
        dense = problem.expected(contender.normalizes, exact=False)
        for name, exact in truth.items():
            natural = 1.0 if exact.dim() == 0 else problem.scale / problem.rows
            dtype = torch.float32 if exact.dim() == 0 and problem.torch_dtype != torch.float64 else problem.torch_dtype
            allowed[name] = distance(dense[name], exact) + slack(dtype, largest(exact), natural, problem.scale)
    else:
        # To some the scale is a constant; in bf16/fp16 its gradient is a difference of large numbers.
        for name in [name for name, exact in truth.items() if exact.dim() or name == "loss"]:
            allowed[name] = SAME_LOSS[problem.torch_dtype] * largest(truth[name])
    for name, most in allowed.items():
        off = distance(got[name], truth[name]) if name in got else math.nan
        if not off <= most:  # NaN is wrong too
            return f"at N={problem.rows} the {name} is off by {off:.1e}, allowed {most:.1e}"
    return ""


def error(got: Results, truth: Results) -> float:
    """The largest of the loss and the features' gradients, each relative to the largest element of its truth."""
    named = [name for name in truth if name == "loss" or "features" in name]
    return max(distance(got[name], truth[name].to(got[name].device)) / largest(truth[name]) for name in named)


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def distance(a: Tensor, b: Tensor) -> float:
    return largest(a.double() - b)


def _hold_together(problem: Problem, rows: Sequence[Row], by_name: dict[str, Contender]) -> None:
    """At the problem's own size, where the dense loss may not fit: all against the first of ours."""
    measured = [row for row in rows if row.weighed]
    for normalizes in {by_name[row.name].normalizes for row in measured}:
        alike = [row for row in measured if by_name[row.name].normalizes == normalizes]
        base = next((row for row in alike if by_name[row.name].ours), alike[0])
        for row in alike:
            for what in ("loss", "gradient_norm"):
                got, expected = getattr(row, what), getattr(base, what)
                if not abs(got - expected) <= SAME_LOSS[problem.torch_dtype] * abs(expected):
                    words = what.replace("_", " ")
                    row.convict(f"at N={problem.rows} the {words} is {got:.6g}, of {base.title} {expected:.6g}")
                    break


# ---- the race


def race(
    world: World, problem: Problem, contenders: Sequence[Contender], rules: Rules, parts: Parts | None = None
) -> tuple[measure.Runs, dict[str, dict[str, float]]]:
    """Everyone by turns: seconds and bytes sent of every run, and the parts of one more run."""
    measure.limit_memory(None, world.size, world.device)()
    steps: dict[str, Callable[[], object] | None] = dict.fromkeys(one.name for one in contenders)
    works: dict[bool, Work] = {}
    for contender in contenders:
        own, takes_part = _world_of(world, contender)
        if takes_part:
            work = works[contender.alone] = works.get(contender.alone) or problem.work(own)
            steps[contender.name] = _afresh(contender, work, problem.ranks)
    runs = measure.rounds(world, steps, rules.repeats, rules.seconds)
    if parts is None:
        return runs, {}
    own_steps = [(one.name, steps[one.name]) for one in contenders if not one.bare]
    return runs, {name: parts(step, world.device) for name, step in own_steps if step is not None}


def _afresh(contender: Contender, work: Work, ranks: int) -> Callable[[], None]:
    """A step that begins without gradients."""
    step = contender.make(work)

    def run() -> None:
        work.clear()
        with _own_threads(contender, ranks):
            step()

    return run


def _record(row: Row, runs: Sequence[list[tuple[float, int | None]]], contender: Contender) -> None:
    """What all ranks saw of one contender's runs, put together."""
    row.seconds = [max(seconds for seconds, _ in run) for run in zip(*runs, strict=True)]
    if not contender.alone and not contender.bare:
        # Others' traffic can only add to it, so the least of all runs is the truest.
        sent = [bytes_ for _, bytes_ in runs[0] if bytes_ is not None]
        row.sent_bytes = min(sent) / len(runs) if sent else None
