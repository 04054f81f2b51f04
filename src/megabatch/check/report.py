"""What is printed of a check: the machine, a cell of the table, a line for a section."""

from collections.abc import Sequence
from typing import Any

from megabatch.bench import report
from megabatch.bench.cases import Case
from megabatch.bench.results import Row, over, row_of

from .exactness import Comparison
from .gpu import FAILED, NOT_RUN, OK, Finding

DENSE = "formula"


def described(machine: dict[str, Any]) -> str:
    ranks = f"{machine['ranks']} ranks over {machine['group']}"
    if machine["ranks"] == 1:
        ranks = "one process; for ranks: torchrun --nproc-per-node 4 -m megabatch check"
    interpreted = "\nTriton's kernels are interpreted on the CPU" if machine["triton_interpreted"] else ""
    return f"{report.describe(machine)}\n{ranks}{interpreted}"


def cell(comparisons: Sequence[Comparison]) -> str:
    """The worst error as a share of what is allowed."""
    if not comparisons:
        return "-"
    wrong = sum(not found.ok for found in comparisons)
    return f"{wrong}/{len(comparisons)} WRONG" if wrong else f"{max(found.share for found in comparisons):.2f}"


def beside_dense(case: Case, rows: Sequence[Row]) -> str:
    """In words; "" where there is nothing to compare."""
    ours, dense = rows[0], row_of(rows, DENSE)
    if dense is None or not ours.seconds:
        return ""
    ratio = over(dense, ours)
    if ratio is None:
        return f"{case}: dense {report.remark(dense.status, dense.note)}"
    words = f"{case}: {ratio.median:.1f} times as fast as dense"
    if ours.peak_bytes and dense.peak_bytes:
        words += f", in {ours.peak_bytes / dense.peak_bytes:.1%} of its memory"
    return words


def status(findings: Sequence[Finding]) -> str:
    """Of a section: failed if anything did, not run if nothing ran."""
    seen = {found.status for found in findings}
    return FAILED if FAILED in seen else OK if OK in seen else NOT_RUN


def summary(section: str, findings: Sequence[Finding]) -> str:
    """One line."""
    failed = [found for found in findings if found.status == FAILED]
    if failed:
        return f"{section}: {len(failed)} of {len(findings)} FAILED, first: {failed[0]}"
    if status(findings) == NOT_RUN:
        return f"{section}: not run" + (f": {findings[0].note}" if findings else "")
    return f"{section}: {sum(found.status == OK for found in findings)} of {len(findings)} ok"
