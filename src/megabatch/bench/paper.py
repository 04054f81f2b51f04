"""`megabatch bench paper`: the tables of arXiv 2410.17243 at this machine's scale."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.utils.benchmark import timer

from ..distributed.world import World
from . import flags, measure, report, ring
from .cases import Case
from .contenders import Contender
from .loss import entrants
from .processes import OutOfMemory, Runner, runner
from .results import Row
from .session import Session

DESCRIPTION = """\
The tables of the Inf-CL paper (arXiv 2410.17243) at this machine's scale: the CLIP loss of one batch spread over ranks.
contest: `bench ring` with the paper's methods and the steps of its ablation (its Tables 1 and 4 and its Figure 4).
largest: the largest batch that runs while every rank may take --limit of memory and no more, inputs and gradients
included; found by running steps until they fail (its Table 2). products: the matrix products of a step, counted.
"""
TABLES = ("contest", "largest", "products")
# In the paper's order, DisCo-CLIP beside them; then what each of its ideas, and ours, adds.
METHODS = ("by_hand", "formula", "disco", "ring_only", "two_passes", "ring", "ring_kept")
# Rows of a rank: the search starts with the first, tries multiples of the second, and ends this near to the edge.
FIRST_ROWS, UNIT, NEAR, COUNTED_ROWS = 256, 16, 1 / 16, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which tables")
    flags.add_sizes(parser, [1024, 2048, 4096, 8192], width=256)
    ring.add_ranks(parser)
    words = "for largest: longest step to try, in seconds"
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help=words)
    flags.add_contest(parser, METHODS)
    flags.add_files(parser)


def main(options: argparse.Namespace) -> int:
    flags.shrink(options, rows=[64], width=[8], ranks=[2], time_limit=0.05)
    limit, options.limit = options.limit or 64 * 2**20, None
    if "largest" in options.tables and measure.private_bytes() is None:
        print("paper: --tables largest must run on Linux, where memory can be limited. Choose others.", file=sys.stderr)
        return 2
    code = ring.main(options, "paper") if "contest" in options.tables else 0
    if set(options.tables) & {"largest", "products"} and code in (0, 1):
        for kind in ("json", "csv", "plot") if "contest" in options.tables else ():
            if path := getattr(options, kind):  # beside what the contest wrote
                setattr(options, kind, path.with_name(f"{path.stem}-largest{path.suffix}"))
        code = max(code, _beyond(options, limit))
    return code


def _beyond(options: argparse.Namespace, limit: int) -> int:
    """The largest batch, and the products."""
    with runner(options.device) as where:
        if where.under_torchrun and "largest" in options.tables:
            print("paper: --tables largest must start its own ranks. Run it without torchrun.", file=sys.stderr)
            return 2
        ranks = ring.ranks_of(options, where)
        with Session("paper", options, where, len(ranks) * len(options.contenders)) as session:
            for size in ranks:
                case = Case("clip", size * FIRST_ROWS, options.width[0], options.dtype[0], where.device, size)
                body = []
                for contender in entrants(case, options.contenders):
                    count = products(case, contender, where) if "products" in options.tables else None
                    searched = "largest" in options.tables
                    found = largest(case, contender, where, limit, options.time_limit) if searched else None
                    body.append(_cells(contender, count, found, size))
                    about = {"width": case.width, "ranks": size, "limit_bytes": limit}
                    figures = {} if found is None else vars(found)
                    session.add(about, [Row(contender.name, contender.title).record(products=count, **figures)])
                    session.reached()
                heading = f"largest batch with {report.mebibytes(limit)} MiB per rank: {case}"
                session.show(heading, ("", "products of N·N·D", "largest batch", "per rank", "its step", ""), body)
    return session.exit_code


def _cells(contender: Contender, count: float | None, found: "Found | None", ranks: int) -> tuple[str, ...]:
    counted = "-" if count is None else f"{count:.2f}"
    if found is None:
        return contender.title, counted, *"---", ""
    least = "≥ " if found.at_least else ""
    return (
        contender.title,
        counted,
        f"{least}{found.largest_rows:,}",
        f"{least}{found.largest_rows // ranks:,}",
        report.seconds(found.step_seconds),
        f"{found.failed_rows:,} rows: out of memory" if found.failed_rows else "a larger step would take too long",
    )


# ---- the largest batch


@dataclass(frozen=True)
class Found:
    """The largest batch that ran (0: none did), its step, and the smallest that ran out of memory, if one was met.
    `at_least`: a larger one may run, but its step would take too long."""

    largest_rows: int = 0
    step_seconds: float | None = None
    failed_rows: int | None = None
    at_least: bool = False


def search(attempt: Callable[[int], float | None], first: int, unit: int, time_limit: float) -> Found:
    """The largest number of rows that runs: doubling until a step fails (None), then bisection.

    A step that would take longer than `time_limit` seconds, by the square of the rows, is not tried.
    """
    rows, seconds, failed = 0, None, None
    while True:
        candidate = 2 * rows or first
        if failed is not None:
            if failed - rows <= max(NEAR * rows, unit):
                return Found(rows, seconds, failed)
            candidate = (rows + failed) // 2 // unit * unit
        if seconds is not None and seconds * (candidate / rows) ** 2 > time_limit:
            return Found(rows, seconds, failed, at_least=True)
        taken = attempt(candidate)
        if taken is None:
            failed = candidate
        else:
            rows, seconds = candidate, taken


def largest(case: Case, contender: Contender, where: Runner, limit: int, time_limit: float) -> Found:
    def attempt(rows: int) -> float | None:
        """Raises Failed where a step fails for another reason than memory."""
        try:
            return max(where.run(case.ranks, step_within, replace(case, rows=rows), contender, limit))
        except OutOfMemory:
            return None

    return search(attempt, case.ranks * FIRST_ROWS, case.ranks * UNIT, time_limit)


def step_within(world: World, case: Case, contender: Contender, limit: int) -> float:
    """Seconds of a step while this rank may take `limit` bytes more than it has, for its inputs too."""
    measure.return_freed_memory()  # what malloc keeps for later would count
    warm = contender.make(case.few().work(world))
    warm()
    allow = measure.limit_memory(limit, case.ranks, world.device)
    step = contender.make(case.work(world))
    allow()  # making inputs takes more than holding them
    start = timer()
    step()
    return timer() - start


# ---- products


def products(case: Case, contender: Contender, where: Runner) -> float:
    """Of all ranks together, in units of N·N·D multiplications and additions, counted by the profiler on few rows."""
    few = replace(case, rows=case.ranks * COUNTED_ROWS)
    return sum(where.run(case.ranks, count, few, contender)) / (2 * few.rows**2 * few.width)


def count(world: World, case: Case, contender: Contender) -> float:
    return measure.products(contender.make(case.work(world)), world.device)
