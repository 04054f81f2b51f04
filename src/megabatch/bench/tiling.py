"""`megabatch bench tiling`: what tiles of one size or another cost, and what a step spends its time on."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from . import flags, measure, report, ring
from .cases import LOSSES, Case
from .contenders import CONTENDERS, WHOLE, Contender, ours
from .loss import cases_of, hold
from .processes import runner
from .results import Row, Table, table

DESCRIPTION = """\
A training step through a loss with tiles of several sizes, beside the full-size matrix products of the same shape.
Verified and timed as in `bench loss`. One more run of each under torch.profiler shows where the time goes:
matrix products, communication (over ranks), all other operators, and the rest (Python, autograd, memory).
"""
OWN, UNDIVIDED = "own", "whole"
PARTS = ("products", "other operators", "communication", "rest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["clip"], help="which losses")
    flags.add_sizes(parser, [2048, 4096, 8192])
    usual = [OWN, "256", "512", "1024", "2048", UNDIVIDED]
    words = f"sides of tiles; {OWN}: what megabatch chooses; {UNDIVIDED}: one tile"
    parser.add_argument("--tiles", type=tile, nargs="+", default=usual, metavar="SIDE", help=words)
    ring.add_ranks(parser, [1])
    flags.add_contest(parser, ["tiles", "products"])
    flags.add_files(parser)


def tile(text: str) -> str:
    if text not in (OWN, UNDIVIDED) and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, {OWN} or {UNDIVIDED}, got {text!r}")
    return text


def contenders(tiles: Sequence[str], case: Case, names: Sequence[str]) -> list[Contender]:
    named = {OWN: ("megabatch, its own choice", None), UNDIVIDED: ("one tile", WHOLE)}
    exchange: dict[str, Any] = {"exchange": "ring"} if case.ranks > 1 else {}
    tiled = []
    for size in dict.fromkeys(tiles if "tiles" in names else ()):
        title, side = named.get(size) or (f"tiles of {size}", int(size))
        tiled.append(Contender(size, title, partial(ours, tile=side, **exchange), ours=True))
    return tiled + ([CONTENDERS["products"]] if "products" in names else [])


def main(options: argparse.Namespace) -> int:
    flags.shrink(options, rows=[128], width=[8], tiles=[OWN, "64", UNDIVIDED])
    with runner(options.device) as where:
        cases = cases_of(options, where, options.losses, ring.ranks_of(options, where))
        tiled = partial(contenders, options.tiles)
        return hold("tiling", options, where, cases, table_of, tiled, measure.stages, base=UNDIVIDED)


def table_of(case: Case, rows: list[Row]) -> Table:
    ratios = {f"/ {case.kind.products} full-size products": "products", "/ one tile": UNDIVIDED}
    return table(rows, ratios, {part: partial(seconds_of, part) for part in PARTS})


def seconds_of(part: str, row: Row) -> str:
    return report.seconds(row.parts.get(part))
