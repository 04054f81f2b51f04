"""What `ring`'s contest does not tell: the products of a step, counted, and memory where nobody could measure it."""

from collections.abc import Sequence
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

from .. import plot
from ..cases import Case
from ..instruments.ranks import Crew, Member
from ..loss.contenders import step_of
from ..results import Row, row_of
from ..ring.contenders import ENTRANTS

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Rows per rank, where products are counted.
COUNTED_ROWS = 64

# What a contest at each number of rows brought, of one number of ranks.
Measured = dict[int, list[Row]]


class Extrapolated(NamedTuple):
    """Memory that was not measured: `measured_rows`' own, grown with a power of the rows."""

    bytes: float
    power: float
    measured_rows: int


def extrapolated(measured: Sequence[tuple[int, int]], rows: int) -> Extrapolated | None:
    """Memory at `rows` from the largest (rows, bytes) that were measured below; None where there are none.

    The power is that between the last two of them, or the 2 of a matrix of logits, whichever is less.
    """
    points = sorted(point for point in measured if point[0] < rows)
    if not points:
        return None
    found = plot.exponent(points[-2:])
    power = 2.0 if found is None else min(found, 2.0)
    last_rows, last_bytes = points[-1]
    return Extrapolated(last_bytes * (rows / last_rows) ** power, power, last_rows)


def outgrown(row: Row) -> bool:
    """Whether there is no figure because the machine has not the memory."""
    return row.status == "would not fit" or (row.status, row.note) == ("failed", "out of memory")


def unmeasured(measured: Measured, row: Row, rows: int) -> Extrapolated | None:
    """In place of the memory of a contender that outgrew the machine, from its own at fewer rows."""
    if not outgrown(row):
        return None
    others = ((n, row_of(contenders, row.name)) for n, contenders in measured.items())
    return extrapolated([(n, other.peak_bytes) for n, other in others if other and other.peak_bytes], rows)


def products(names: Sequence[str], size: int, width: int) -> dict[str, float]:
    """Matrix products of a step by entrant, of all ranks together, in units of N·N·D multiplications."""
    rows = size * COUNTED_ROWS
    counted = Crew(size, quiet=True).run(count, list(names), width)
    return {name: sum(flops[name] for flops in counted) / (2 * rows * rows * width) for name in names}


def count(member: Member, names: list[str], width: int) -> dict[str, int]:
    """Floating-point operations in this rank's matrix products, by entrant."""
    counted = {}
    for name in names:
        step, inputs = step_of(ENTRANTS[name].make(member)), Case("clip", COUNTED_ROWS, width).inputs()
        with profile(activities=[ProfilerActivity.CPU], with_flops=True, acc_events=True) as profiler:
            step(inputs)
        counted[name] = sum(event.flops for event in profiler.events() if event.name in PRODUCTS)
    return counted
