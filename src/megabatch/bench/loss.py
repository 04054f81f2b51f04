"""`megabatch bench loss`: time and memory of every loss beside its peers."""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from . import flags, report
from .cases import LOSSES, Case
from .contenders import CONTENDERS, PACKAGES, Contender
from .processes import Runner, runner
from .results import Row, Table, healthy, over, row_of, table
from .session import Session
from .trial import Parts, Rules, contest

DESCRIPTION = """\
Time and peak memory of a training step through a loss, forward and backward with all gradients, of megabatch and other
libraries. Results are verified first; incorrect implementations are not timed. Contenders run once per round in random
order; times are medians, ratios medians of the rounds' ratios, with quartiles. Memory is beyond inputs and gradients,
each contender in a separate process. Error: against float64, relative to the largest element.
"""
ONE_PROCESS = {name: one for name, one in CONTENDERS.items() if one.on in ("one", "both")}
# Options of other contenders: to be asked for by name.
VARIANTS = ("kept", "eager", "drop_in")


def add_arguments(parser: argparse.ArgumentParser, losses: tuple[str, ...] = ("clip", "siglip", "nt_xent")) -> None:
    usual = [name for name in ONE_PROCESS if name not in VARIANTS]
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(losses), help="which losses")
    flags.add_sizes(parser, [256, 1024, 4096, 16384])
    words = "largest number of rows at which errors are measured"
    parser.add_argument("--error-rows", type=flags.count, default=4096, metavar="N", help=words)
    flags.add_contest(parser, ONE_PROCESS, usual)
    flags.add_files(parser)


def main(options: argparse.Namespace, name: str = "loss") -> int:
    flags.shrink(options, rows=[40, 80], width=[8])
    with runner(options.device) as where:
        return hold(name, options, where, cases_of(options, where, options.losses, [where.world.size]), table_of)


def cases_of(options: argparse.Namespace, where: Runner, losses: Sequence[str], ranks: Sequence[int]) -> list[Case]:
    return [
        Case(loss, rows, width, dtype, where.device, size)
        for dtype, loss, width, size, rows in itertools.product(
            options.dtype, losses, options.width, ranks, options.rows
        )
    ]


def hold(
    name: str,
    options: argparse.Namespace,
    where: Runner,
    cases: Sequence[Any],
    table: Callable[[Any, list[Row]], Table],
    entrants_of: Callable[[Any, list[str]], list[Contender]] | None = None,
    parts: Parts | None = None,
    base: str = "megabatch",
) -> int:
    """One contest after the other, each with a table. `base`: the contender that ratios of the files are to."""
    if uneven := next((case for case in cases if case.rows % case.ranks), None):
        got = f"{uneven.rows} rows for {uneven.ranks} ranks"
        print(f"{name}: --rows must be multiples of the number of ranks, got {got}.", file=sys.stderr)
        return 2
    known = [(entrants_of or entrants)(case, options.contenders) for case in cases]
    rules = Rules(options.repeats, options.seconds, options.limit, getattr(options, "error_rows", 0))
    with Session(name, options, where, sum(len(one) + 1 for one in known), PACKAGES) as session:
        for case, contenders in zip(cases, known, strict=True):
            rows = contest(case, contenders, rules, where, session.reached, parts)
            session.show(str(case), *table(case, rows))
            ratios = {f"over_{other}": row_of(rows, other) for other in (base, "products")}
            records = [row.record(**{to: over(row, other) for to, other in ratios.items()}) for row in rows]
            session.add(asdict(case), records, healthy(rows, {one.name: one for one in contenders}))
    return session.exit_code


def entrants(case: Case, names: list[str]) -> list[Contender]:
    return [CONTENDERS[name] for name in names if CONTENDERS[name].takes_part(case.loss, case.ranks, case.device)]


def table_of(case: Case, rows: list[Row]) -> Table:
    ratios = {"/ megabatch": "megabatch", f"/ {case.kind.products} full-size products": "products"}
    return table(rows, ratios, {"error": lambda row: report.small(row.error)})
