"""`megabatch bench ring`: one batch spread over ranks: time, bytes on the wire, memory."""

import argparse
import sys
from collections.abc import Sequence

from . import flags, report
from .cases import Case
from .contenders import CONTENDERS
from .loss import cases_of, hold
from .processes import Runner, runner
from .results import Row, Table, table

DESCRIPTION = """\
Time, bytes sent and peak memory of a training step through the CLIP loss of one batch spread over ranks: the ranks of
torchrun, or --ranks new processes (one thread each on a CPU). Verified and timed as in `bench loss`; the slowest rank
counts. Beside it one process that holds the whole batch, with as many threads as ranks. With more ranks than cores,
compare the rows of one table only. Bytes: what the loopback carried, per rank, on a CPU.
"""
ON_RANKS = {name: one for name, one in CONTENDERS.items() if one.on in ("ranks", "both")}
USUAL = ("ring", "blocking", "gather", "alone", "by_hand", "compiled", "formula", "open_clip")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_sizes(parser, [16384])
    add_ranks(parser)
    flags.add_contest(parser, ON_RANKS, USUAL)
    flags.add_files(parser)


def add_ranks(parser: argparse.ArgumentParser, default: Sequence[int] = (2, 4)) -> None:
    parser.add_argument(
        "--ranks",
        type=flags.positive,
        nargs="+",
        default=list(default),
        metavar="n",
        help="numbers of ranks; under torchrun, those of torchrun",
    )


def main(options: argparse.Namespace, name: str = "ring") -> int:
    flags.shrink(options, rows=[64], width=[8], ranks=[2])
    with runner(options.device) as where:
        ranks = ranks_of(options, where)
        if min(ranks) < 2:
            print(f"{name}: --ranks must be 2 or more, got {min(ranks)}.", file=sys.stderr)
            return 2
        return hold(name, options, where, cases_of(options, where, ["clip"], ranks), table_of, base="ring")


def ranks_of(options: argparse.Namespace, where: Runner) -> list[int]:
    return [where.world.size] if where.under_torchrun else list(options.ranks)


def table_of(case: Case, rows: list[Row]) -> Table:
    sent = {"MiB sent": lambda row: "-" if row.sent_bytes is None else report.mebibytes(row.sent_bytes)}
    return table(rows, {"/ ring": "ring", "/ one process": "alone"}, sent)
