"""`megabatch bench tiling`: what tiling costs, stage by stage, against the plain products."""

import argparse
import itertools
import statistics
import sys
from dataclasses import asdict
from typing import Any

from ...tiling.plan import Plan
from .. import report, session
from ..bar import work
from ..cases import LOSSES, Case
from ..results import Row, over, row_of
from ..session import Session
from . import trial as tiling_trial
from .contenders import OWN, UNDIVIDED, Tiling
from .stopwatch import STAGES
from .trial import PRODUCTS, TilingRow

DESCRIPTION = """\
What a step through a tiled loss, forward and backward with all gradients, spends its time on, for sizes of tiles. On
the CPU, in float32: a GPU's kernels do products and epilogue at once, and have no stages to tell apart.

  products       the matrix products of all tiles: their logits, and the gradients of their rows and columns
  epilogue       everything else per tile: exponentials, sums, dlogits, and the calls of the functions that do it
  merges         statistics of tiles merged: vectors of one entry per row; over ranks gradients, too
  communication  over ranks: packing, handshakes, sums over ranks, and waiting for them and for transfers
  rest           the plan, memory, autograd, scaling of gradients, Python between tiles

The stages are timed by a stopwatch that is told when each begins and ends. Their times are exclusive, so they add up
to the wall clock of the step ("sum"). The same step is timed without the stopwatch too ("no stopwatch"): the
difference is what measuring costs.

Plain products: the matrix products that a step in linear memory must do, of the full shape, into memory made before,
and nothing else. What a step takes beyond 100 % of them is what the loss costs. "/ undivided": the step over the same
step with tiles as large as they get, which hold all logits or, over ranks, all that two ranks share: what cutting the
logits into tiles costs, below 1 what it saves. Logits that fit the memory budget are kept for the backward pass. Where
that saves products, or where more are needed, the row says so: its products differ from the plain ones in number.

All take turns in one process, after a run each that is thrown away. First table: mean and standard deviation over all
runs, and peak memory of one step beyond inputs and gradients, in a process of its own. Second table: the fastest run of
each, over the fastest of the plain products.

--ranks: the batch spread over a ring of gloo processes of one thread each on this machine; 1 is one process with
torch's threads. Each size of tiles with overlap and without. Figures are those of the rank that took longest; plain
products are those of one rank's share, which all do at the same time.

Right first: loss and gradients of every size of tiles are compared at the case's own size with the loss by chunks of
rows in float64, and may be off by no more than that in float32, plus a small slack for rounding. What is wrong is
reported as WRONG, nothing is timed then, and the exit code is 1.
"""

SIZES = [OWN, "256", "512", "1024", "2048", "4096", UNDIVIDED]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 8192], metavar="N", help="batch sizes")
    parser.add_argument("--width", type=int, default=512, metavar="D", help="width of the features")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["clip"])
    parser.add_argument(
        "--tiles",
        type=_tile,
        nargs="+",
        default=SIZES,
        metavar="SIDE",
        help=f"sides of tiles; {OWN}: what megabatch chooses; {UNDIVIDED}: undivided",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], metavar="n", help="numbers of ranks")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="go on with rounds for this long, in one process")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: a small batch, few sizes")
    session.add_arguments(parser)


def _tile(text: str) -> str:
    if text in (OWN, UNDIVIDED) or (text.isdecimal() and int(text) > 0):
        return text if text in (OWN, UNDIVIDED) else str(int(text))
    raise argparse.ArgumentTypeError(f"must be a whole number from 1, {OWN} or {UNDIVIDED}, got {text!r}")


def main(options: argparse.Namespace) -> int:
    if options.quick:
        options.rows, options.width, options.repeats, options.seconds = [256], 32, 2, 0.0
        options.tiles = [OWN, "64", UNDIVIDED] if options.tiles == SIZES else options.tiles
    if refusal := _refusal(options):
        print(f"tiling: {refusal}", file=sys.stderr)
        return 2
    sizes = list(dict.fromkeys(options.tiles))
    cases = [
        (Case(loss, rows, options.width), ranks)
        for loss, ranks, rows in itertools.product(options.losses, options.ranks, options.rows)
    ]
    with Session("tiling", options) as run:
        if options.quick:
            print("quick: this batch is so small that fixed costs rule; the shares say nothing about real ones")
        for case, ranks in run.each(cases, [_work(case, ranks, options) for case, ranks in cases]):
            rows = tiling_trial.contest(case, ranks, sizes, options.repeats, options.seconds, run.part)
            tables = (_times(case, ranks, rows), _shares(rows), _overlap(rows))
            run.show(_heading(case, ranks), "\n\n".join(filter(None, tables)))
            healthy = all(row.status not in ("wrong", "failed") for row in rows)
            run.add({**asdict(case), "ranks": ranks}, [_record(row, rows) for row in rows], healthy=healthy)
    return run.exit_code


def _work(case: Case, ranks: int, options: argparse.Namespace) -> float:
    runs = 2 * len(options.tiles) * (options.repeats + 2)
    return work(2 * len(options.tiles) * ranks, 5 * runs * case.side**2 * case.width)


def _refusal(options: argparse.Namespace) -> str:
    for name in ("rows", "width", "ranks", "repeats"):
        value = getattr(options, name)
        least = min(value) if isinstance(value, list) else value
        if least < 1:
            return f"--{name} must be at least 1, got {least}."
    uneven = [(rows, size) for rows in options.rows for size in options.ranks if rows % size]
    if uneven:
        return "--rows must be multiples of --ranks, got {} rows for {} ranks.".format(*uneven[0])
    return ""


def _heading(case: Case, ranks: int) -> str:
    return f"{case}" + (f", {ranks} ranks × {case.rows // ranks} rows, 1 thread each" if ranks > 1 else "")


def _times(case: Case, ranks: int, rows: list[TilingRow]) -> str:
    head = ("ms, mean ± std", "tile", *STAGES, "sum", "no stopwatch", "peak MiB", "")
    return report.table(
        head,
        [
            (
                row.title,
                "-" if row.plan is None else f"{row.plan.rows} × {row.plan.columns}",
                *(_milliseconds(row.stage(name)) for name in STAGES),
                _milliseconds(row.sums),
                _milliseconds(row.seconds),
                report.mebibytes(row.peak_bytes),
                report.remark(row.status, row.note) or _formed(case, ranks, row),
            )
            for row in rows
        ],
    )


def _formed(case: Case, ranks: int, row: TilingRow) -> str:
    """Where the plan forms more logits, or fewer, than the plain products do."""
    plan = row.plan
    if plan is None:
        return ""
    once = plan.one_pass or plan.kept >= _num_tiles(case.rows // ranks, ranks, plan)
    # Of a symmetric loss, two passes over half of the logits are one product.
    if case.kind.joined or case.kind.formed == 2:
        return "logits kept: fewer products" if once or plan.kept else ""
    return "" if once else "logits formed twice: more products"


def _num_tiles(rows: int, ranks: int, plan: Plan) -> int:
    """Of one rank with so many rows."""
    return -(-rows // plan.rows) * -(-rows // plan.columns) * ranks


def _milliseconds(values: list[float]) -> str:
    if not values:
        return "-"
    spread = f"{statistics.stdev(values) * 1e3:.2f}" if len(values) > 1 else "-"
    return f"{statistics.mean(values) * 1e3:.2f} ± {spread}"


def _shares(rows: list[TilingRow]) -> str:
    """Nothing where there are no plain products to compare with."""
    products = row_of(rows, PRODUCTS)
    if products is None or products.best is None:
        return ""
    head = ("% of plain products, fastest run", *STAGES, "sum", "no stopwatch", "/ undivided")
    body = []
    for row in rows:
        lap = row.best_lap
        if lap is not None:
            parts = [_percent(lap[name], products.best) for name in STAGES]
            whole = [_percent(sum(lap.values()), products.best), _percent(row.best, products.best)]
            body.append((row.title, *parts, *whole, report.ratio(over(row, _undivided(row, rows)), 1)))
    return report.table(head, body)


def _percent(value: float | None, whole: float) -> str:
    return "-" if value is None else f"{100 * value / whole:.1f}"


def _overlap(rows: list[TilingRow]) -> str:
    """What it hides, of every size that ran with it and without."""
    lines = []
    for row in rows:
        without = row_of(rows, Tiling(row.name, overlap=False).name)
        if isinstance(without, TilingRow) and row.laps and without.laps:
            waits = [statistics.mean(one.stage("communication")) for one in (row, without)]
            lines.append(
                f"{row.title}: communication takes {report.seconds(waits[0])} with overlap and "
                f"{report.seconds(waits[1])} without; the step {report.seconds(row.mean)} and "
                f"{report.seconds(without.mean)} (means)"
            )
    return "\n".join(lines)


def _undivided(row: TilingRow, rows: list[TilingRow]) -> Row | None:
    return row_of(rows, Tiling(UNDIVIDED, row.overlap).name)


def _record(row: TilingRow, rows: list[TilingRow]) -> dict[str, Any]:
    products = row_of(rows, PRODUCTS)
    return row.record(over_products=over(row, products), over_undivided=over(row, _undivided(row, rows)))
