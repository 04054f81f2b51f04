"""Act 1 of the demo: the batch grows, the memory does not; who goes on?"""

import importlib.util
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from .. import report
from ..cases import Case, Inputs
from ..instruments import measure, processes
from ..loss import trial
from ..loss.contenders import CONTENDERS
from ..plot import Curves, Point, draw

STORY = """\
One training step through the CLIP loss: the dense loss and megabatch, each in a process of its own that may take
{limit} MiB of memory and not one more (setrlimit), beyond what Python and torch take themselves; inputs and gradients
count. Memory in table and plot is the peak beyond inputs and gradients.
"""

NAMES = ("dense", "megabatch")
DOUBLINGS = [1024, 2048, 4096, 8192, 16384, 32768]
COLUMNS = ("rows", "dense: time", "peak MiB", "megabatch: time", "peak MiB", "")
# Steps are repeated for this long, and the best counts.
ENOUGH_SECONDS = 0.5
WIDTHS = [8, 24, 10, 16, 10, 0]


def grow(sizes: list[int], width: int, limit_mib: int, plot: Path) -> None:
    """Prints a table as it goes and draws a plot."""
    limit = limit_mib * 2**20
    print(STORY.format(limit=limit_mib))
    drawable = importlib.util.find_spec("matplotlib") is not None
    if not drawable:
        print("There will be no plot, because matplotlib is missing: pip install 'megabatch[bench]'\n")
    print(report.line(COLUMNS, WIDTHS), flush=True)
    curves: Curves = {name: [] for name in NAMES}
    for points in _growing(sizes, width, limit):
        for name, point in points.items():
            curves[name].append(point)
        print(_line(points), flush=True)
    print(f"\n{_moral(curves)}")
    if drawable:
        title = f"clip_loss, D={width}, float32, each process limited to {limit_mib} MiB"
        labels = {"dense": "dense loss", "megabatch": "megabatch"}
        draw({"": {labels[name]: points for name, points in curves.items()}}, title, plot, limit)
        print(f"plot: {plot}")


def _growing(sizes: list[int], width: int, limit: int) -> Iterator[dict[str, Point]]:
    """At each size, a point for everyone who was not killed before. One size after the first was, it ends."""
    alive = list(NAMES)
    for rows in sizes:
        points = {name: _point(name, Case("clip", rows, width), limit) for name in alive}
        yield points
        if len(alive) < len(NAMES):
            return
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
