"""`megabatch bench paper`: the paper's tables at this machine's scale."""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .. import report, session
from ..bar import work
from ..cases import Case
from ..instruments import measure, processes
from ..loss.trial import would_fit
from ..results import Row, healthy
from ..ring import trial as ring_trial
from ..ring.contenders import ENTRANTS
from ..session import Session
from . import tables, trial
from .contenders import METHODS, NAMES, STAGES
from .largest import Found, largest
from .trial import Measured

DESCRIPTION = """\
The tables of the Inf-CL paper (arXiv 2410.17243) made again on this machine: the CLIP loss of one batch spread over
ranks, forward and backward with all gradients. Ranks are gloo processes of one thread each, so batches are smaller than
the paper's, and where there are more ranks than cores times compare within a table only.

memory (its Table 1): peak resident memory of a rank beyond inputs and gradients, the largest of the ranks. Where a
method needs more than the machine has, its figure is extrapolated from those measured, by the power of the rows that
the last two of them show, and marked so.

largest (its Table 2): the largest batch that runs while every rank may take --limit MiB of memory and not one more
(setrlimit), beyond what Python and torch take themselves; inputs and gradients count. Found by running steps until
they fail: doubled, then halved to a sixteenth. Where a step would take more than --time-limit seconds the search stops,
and the batch is "at least" that.

time (its Figure 4): seconds of a step; mean ± standard deviation, and the best of all runs. Methods take turns.

ablation (its Table 4): what each idea does to memory and time, beside the row above it, on the largest number of ranks.
Products are the matrix products of a step, of all ranks together, in units of N·N·D multiplications: counted by the
profiler, at few rows, where all logits fit megabatch's default memory budget and are kept for the backward pass.

Right first: as in `megabatch bench ring`, what is wrong gets no figures, and the exit code is 1. The effect of
overlapping communication is there too: its "megabatch, ring, no overlap".
"""

# And who stands in each.
TABLES = {"memory": METHODS, "largest": METHODS, "time": METHODS, "ablation": tuple(STAGES)}
DEFAULTS: dict[str, Any] = {
    "rows": [1024, 2048, 4096, 8192],
    "width": 256,
    "ranks": [2, 4],
    "repeats": 3,
    "limit": 64.0,
    "time_limit": 60.0,
    "ablation_rows": 4096,
}
QUICK: dict[str, Any] = {
    "rows": [128],
    "width": 16,
    "ranks": [2],
    "repeats": 2,
    "limit": 4.0,
    "time_limit": 0.05,
    "ablation_rows": 128,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which of them")

    def told(name: str, words: str) -> str:
        value = DEFAULTS[name]
        return f"{words}; default {' '.join(map(str, value)) if isinstance(value, list) else value}"

    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help=told("rows", "batch sizes, of all ranks"))
    parser.add_argument("--width", type=int, metavar="D", help=told("width", "width of the features"))
    parser.add_argument("--ranks", type=int, nargs="+", metavar="n", help=told("ranks", "numbers of ranks"))
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES), help="who takes part")
    parser.add_argument("--repeats", type=int, help=told("repeats", "timed runs of each"))
    limit, longest = told("limit", "largest: memory that a rank may take"), told("time_limit", "largest: longest step")
    parser.add_argument("--limit", type=float, metavar="MIB", help=limit)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help=longest)
    parser.add_argument("--ablation-rows", type=int, metavar="N", help=told("ablation_rows", "ablation: batch size"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    session.add_arguments(parser)


@dataclass(frozen=True)
class Contest:
    """Time and memory of these entrants: for the tables by batch size, for the ablation, or for both at once."""

    case: Case
    size: int
    names: list[str]
    by_size: bool
    ablation: bool


@dataclass(frozen=True)
class Search:
    """For the largest batch of each of these entrants."""

    size: int
    names: list[str]


def main(options: argparse.Namespace) -> int:
    for name, value in (DEFAULTS | (QUICK if options.quick else {})).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if problem := _problem(options):
        print(f"paper: {problem}", file=sys.stderr)
        return 2
    jobs = list(_jobs(options))
    measured: dict[int, Measured] = {size: {} for size in options.ranks}
    with Session("paper", options, threads="ranks × 1 thread") as run:
        try:
            for job in run.each(jobs, [_work(job, options) for job in jobs]):
                if isinstance(job, Search):
                    _search(run, job, options)
                else:
                    _contest(run, job, options, measured[job.size])
        except KeyboardInterrupt:
            for size, found in measured.items():
                if set(found) & set(options.rows) and not _complete(found, options):
                    _show_by_size(run, size, found, options)
            raise
    return run.exit_code


def _problem(options: argparse.Namespace) -> str:
    """What is wrong with what was asked for, or ""."""
    for name in DEFAULTS:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if not 0 < number < math.inf:
                return f"--{name.replace('_', '-')} must be a positive number, got {number}."
    for table in options.tables:
        if not set(TABLES[table]) & set(options.contenders):
            needed, got = ", ".join(TABLES[table]), ", ".join(options.contenders)
            return f"--contenders must have one for the table {table}, {needed}; got {got}."
    for job in _jobs(options):
        if isinstance(job, Contest) and job.case.rows % job.size:
            return f"batch sizes must be multiples of --ranks, got {job.case.rows} rows for {job.size} ranks."
    if "largest" not in options.tables:
        return ""
    if not measure.STATUS.exists():
        return "--tables largest must run on Linux, where a process's memory can be limited. Choose other tables."
    most = max(options.ranks)
    if not would_fit(most * options.limit * 2**20):
        return f"--limit must fit the machine {most} times, got {options.limit:g} MiB. Choose less, or fewer --ranks."
    return ""


def _jobs(options: argparse.Namespace) -> Iterator[Contest | Search]:
    """One number of ranks after the other. What the ablation needs at a batch size that is measured anyway is measured
    in the same contest."""
    by_size = set(options.rows) if {"memory", "time"} & set(options.tables) else set()
    for size in options.ranks:
        ablation = {options.ablation_rows} if "ablation" in options.tables and size == max(options.ranks) else set()
        for rows in sorted(by_size | ablation):
            wanted = (METHODS if rows in by_size else ()) + (tuple(STAGES) if rows in ablation else ())
            names = [name for name in NAMES if name in wanted and name in options.contenders]
            yield Contest(Case("clip", rows, options.width), size, names, rows in by_size, rows in ablation)
        names = [name for name in METHODS if name in options.contenders]
        if "largest" in options.tables:
            yield Search(size, names)


def _work(job: Contest | Search, options: argparse.Namespace) -> float:
    if isinstance(job, Contest):
        runs = 5 * len(job.names) * (options.repeats + 2)
        return work(job.size * len(job.names), runs * job.case.rows**2 * options.width)
    # Inputs, gradients and what travels are about eight times a rank's features; the last steps take most of the time.
    rows = job.size * options.limit * 2**20 / (8 * 4 * options.width)
    return work(10 * job.size * len(job.names), 16 * rows**2 * options.width)


def _contest(run: Session, job: Contest, options: argparse.Namespace, measured: Measured) -> None:
    case, size = job.case, job.size
    rows = ring_trial.contest(case, size, job.names, options.repeats, run.part)
    measured[case.rows] = rows
    products: dict[str, float] = {}
    if job.ablation:
        countable = [row.name for row in rows if row.name in STAGES and (row.status == "ok" or trial.outgrown(row))]
        products = trial.products(countable, size, case.width)
    about = {"tables": _tables(job, options), **asdict(case), "ranks": size}
    run.add(about, [_record(row, case, measured, products) for row in rows], healthy=_healthy(rows))
    if job.by_size and _complete(measured, options):
        _show_by_size(run, size, measured, options)
    if job.ablation:
        heading = f"ablation (Table 4): {case}, {size} ranks; products counted at N={size * trial.COUNTED_ROWS}"
        run.show(heading, tables.ablation(measured, case.rows, products))


def _tables(job: Contest, options: argparse.Namespace) -> list[str]:
    """That take figures from a contest."""
    chosen = {"memory": job.by_size, "time": job.by_size, "ablation": job.ablation}
    return [name for name in options.tables if chosen.get(name)]


def _complete(measured: Measured, options: argparse.Namespace) -> bool:
    return set(options.rows) <= set(measured)


def _show_by_size(run: Session, size: int, measured: Measured, options: argparse.Namespace) -> None:
    """The tables with a column for each batch size, as far as they are there."""
    chosen = {rows: found for rows, found in sorted(measured.items()) if rows in options.rows}
    names = [name for name in METHODS if name in options.contenders]
    where = f"clip_loss, D={options.width}, float32, {size} ranks"
    if "memory" in options.tables:
        run.show(f"peak MiB per rank beyond inputs and gradients (Table 1): {where}", tables.memory(chosen, names))
    if "time" in options.tables:
        run.show(f"seconds per step, mean ± std (best) (Figure 4): {where}", tables.time(chosen, names))


def _record(row: Row, case: Case, measured: Measured, products: dict[str, float]) -> dict[str, Any]:
    instead = trial.unmeasured(measured, row, case.rows)
    return row.record(
        extrapolated_bytes=None if instead is None else instead.bytes,
        extrapolated_from_rows=None if instead is None else instead.measured_rows,
        extrapolated_power=None if instead is None else instead.power,
        products=products.get(row.name),
    )


def _healthy(rows: list[Row]) -> bool:
    """What holds logits may outgrow the machine."""
    return healthy((row for row in rows if not (ENTRANTS[row.name].matrices and trial.outgrown(row))), ENTRANTS)


def _search(run: Session, job: Search, options: argparse.Namespace) -> None:
    about = {"tables": ["largest"], "width": options.width, "ranks": job.size, "limit_mib": options.limit}
    found: dict[str, tuple[Row, Found | None]] = {}
    try:
        for index, name in enumerate(job.names):
            row, batch = Row(name, ENTRANTS[name].title), None
            try:
                batch = largest(name, job.size, options.width, int(options.limit * 2**20), options.time_limit)
            except processes.Failed as failure:
                row.fail(failure)
            found[name] = row, batch
            run.add(about, [_largest_record(row, batch)], healthy=_healthy([row]))
            run.part((index + 1) / len(job.names))
    finally:  # Ctrl-C leaves those that are done
        limit = report.mebibytes(options.limit * 2**20)
        where = f"clip_loss, D={options.width}, float32, {job.size} ranks"
        if found:
            run.show(f"largest batch with {limit} MiB per rank (Table 2): {where}", tables.largest(found, job.size))


def _largest_record(row: Row, batch: Found | None) -> dict[str, Any]:
    if batch is None:
        return row.record()
    return row.record(
        largest_rows=batch.rows,
        at_least=batch.at_least,
        step_seconds=batch.seconds,
        failed_rows=batch.failed,
        note=tables.what_stopped(batch),
    )
