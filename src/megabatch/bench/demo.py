"""`python -m megabatch.bench demo`: the batch grows, the memory does not; who goes on?"""

import argparse
import importlib.util
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from . import measure, processes, report, trial
from .cases import Case, Inputs
from .contenders import CONTENDERS
from .plot import Curves, Point, draw

DESCRIPTION = """\
One training step through the CLIP loss at growing batch sizes: the dense loss and megabatch, each in a process of its
own that may take --limit MiB of memory and not one more (setrlimit), beyond what Python and torch take themselves;
inputs and gradients count. The one that asks for more is out; the other goes on. Prints a table as it goes and draws a
plot.

Memory in table and plot is the peak beyond inputs and gradients.
"""

NAMES = ("dense", "megabatch")
DOUBLINGS = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
COLUMNS = ("rows", "dense: time", "peak MiB", "megabatch: time", "peak MiB", "")
# Steps are repeated for this long, and the best counts.
ENOUGH_SECONDS = 0.5
WIDTHS = [8, 24, 10, 16, 10, 0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=DOUBLINGS, metavar="N", help="batch sizes, growing")
    parser.add_argument("--width", type=int, default=256, metavar="D", help="width of the features")
    parser.add_argument("--limit", type=int, default=2048, metavar="MIB", help="memory limit of each process, in MiB")
    parser.add_argument("--out", type=Path, default=Path("build/demo.png"), metavar="PNG", help="where the plot goes")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: small batches, small limit")


def main(options: argparse.Namespace) -> int:
    if options.quick:
        options.rows, options.width, options.limit = [256, 1024, 4096], 64, 128
    limit = options.limit * 2**20
    title = f"clip_loss, D={options.width}, float32, each process limited to {options.limit} MiB"
    print(f"{report.describe(report.machine())}\n\n{title}\n")
    drawable = importlib.util.find_spec("matplotlib") is not None
    if not drawable:
        print("There will be no plot, because matplotlib is missing: pip install 'megabatch[bench]'\n")
    print(report.line(COLUMNS, WIDTHS), flush=True)
    curves: Curves = {name: [] for name in NAMES}
    for points in _growing(options.rows, options.width, limit):
        for name, point in points.items():
            curves[name].append(point)
        print(_line(points), flush=True)
    print(f"\n{_moral(curves)}")
    if drawable:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw(curves, limit, title, options.out)
        print(f"plot: {options.out}")
    return 0


def _growing(sizes: list[int], width: int, limit: int) -> Iterator[dict[str, Point]]:
    """At each size, a point for everyone who was not killed before."""
    alive = list(NAMES)
    for rows in sizes:
        points = {name: _point(name, Case("clip", rows, width), limit) for name in alive}
        yield points
        alive = [name for name in alive if not points[name].killed]
        if not alive:
            return


def _point(name: str, case: Case, limit: int) -> Point:
    try:
        return processes.run(step_within, limit, name, case)
    except processes.Failed as failure:
        return Point(case.rows, killed=str(failure))


def step_within(limit: int, name: str, case: Case) -> Point:
    """Time and peak memory of a step while this process may take `limit` bytes more than it has."""
    make = CONTENDERS[name].make
    small = case.with_rows(64)
    make(small)(small.inputs())  # loads what it needs
    allowed = measure.private_bytes() + limit
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    step, inputs, taken = make(case), case.inputs(), list[float]()

    def timed(inputs: Inputs) -> None:
        start = time.perf_counter()
        step(inputs)
        taken.append(time.perf_counter() - start)

    peak = trial.peak_of(timed, inputs)
    while sum(taken) < ENOUGH_SECONDS:
        inputs.clear()
        timed(inputs)
    return Point(case.rows, min(taken), peak)


def _line(points: dict[str, Point]) -> str:
    rows = next(iter(points.values())).rows
    cells = [f"{rows}"]
    for name in NAMES:
        point = points.get(name)
        if point is None or point.killed:
            cells += [f"killed: {point.killed}" if point else "", ""]
        else:
            cells += [report.seconds(point.seconds), report.mebibytes(point.peak_bytes)]
    return report.line([*cells, ""], WIDTHS)


def _moral(curves: Curves) -> str:
    def largest(name: str) -> int:
        return max((point.rows for point in curves[name] if not point.killed), default=0)

    return f"largest batch: {largest('dense')} rows dense, {largest('megabatch')} rows with megabatch"
