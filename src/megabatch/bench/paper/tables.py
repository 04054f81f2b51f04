"""The paper's tables: methods down, batch sizes across, as far as they were measured."""

from collections.abc import Mapping, Sequence

from .. import report
from ..results import Row, row_of
from ..ring.contenders import ENTRANTS
from .contenders import STAGES
from .largest import Found
from .trial import Extrapolated, Measured, unmeasured

ABLATION_HEAD = ("", "memory", "products", "peak MiB/rank", "/ above", "best", "mean ± std", "/ above", "")
LARGEST_HEAD = ("", "largest batch", "rows/rank", "/ first row", "time of its step", "then")


def memory(measured: Measured, names: Sequence[str]) -> str:
    """Table 1."""

    def cell(row: Row, rows: int) -> str:
        return bytes_of(row, unmeasured(measured, row, rows))

    return _across(measured, names, {name: {n: cell(row, n) for n, row in _of(measured, name)} for name in names})


def time(measured: Measured, names: Sequence[str]) -> str:
    """Figure 4."""

    def cell(row: Row) -> str:
        known = f"{report.spread(row.mean, row.deviation)} ({report.seconds(row.best)})"
        return known if row.seconds else report.remark(row.status, "") or "-"

    return _across(measured, names, {name: {n: cell(row) for n, row in _of(measured, name)} for name in names})


def ablation(measured: Measured, rows: int, products: Mapping[str, float]) -> str:
    """Table 4, of the stages that took part at this number of rows."""
    body = []
    above: Row | None = None
    for name, stage in STAGES.items():
        row = row_of(measured[rows], name)
        if row is None:
            continue
        body.append(
            (
                stage.title,
                f"O({stage.memory})",
                f"{products[name]:.2f}" if name in products else "-",
                bytes_of(row, unmeasured(measured, row, rows)),
                report.ratio(row.peak_bytes, above.peak_bytes if above else None),
                report.seconds(row.best),
                report.spread(row.mean, row.deviation),
                report.ratio(row.best, above.best if above else None),
                report.remark(row.status, row.note),
            )
        )
        above = row
    return report.table(ABLATION_HEAD, body)


def largest(found: Mapping[str, tuple[Row, Found | None]], size: int) -> str:
    """Table 2."""
    first = next((batch for _, batch in found.values()), None)
    base = first.rows if first and first.rows and not first.at_least else None
    return report.table(LARGEST_HEAD, [_largest(row, batch, size, base) for row, batch in found.values()])


def _largest(row: Row, batch: Found | None, size: int, base: int | None) -> tuple[str, ...]:
    if batch is None:
        return (row.title, "-", "-", "-", "-", report.remark(row.status, row.note))
    least = "≥ " if batch.at_least else ""
    return (
        row.title,
        f"{least}{batch.rows:,}",
        f"{least}{batch.rows // size:,}",
        "-" if base is None else f"{least}{batch.rows / base:.2f}",
        report.seconds(batch.seconds),
        what_stopped(batch),
    )


def what_stopped(batch: Found) -> str:
    """Why the search went no further."""
    words = [] if batch.failed is None else [f"{batch.failed:,} rows: {batch.note}"]
    return "; ".join([*words, "a larger step would take too long"] if batch.at_least else words)


def bytes_of(row: Row, instead: Extrapolated | None) -> str:
    """A cell: what was measured or, marked, what was not."""
    if instead is not None:
        return f"~{report.mebibytes(instead.bytes)} (extrapolated)"
    return report.mebibytes(row.peak_bytes) if row.peak_bytes is not None else report.remark(row.status, "") or "-"


def _of(measured: Measured, name: str) -> list[tuple[int, Row]]:
    found = ((rows, row_of(others, name)) for rows, others in measured.items())
    return [(rows, row) for rows, row in found if row is not None]


def _across(measured: Measured, names: Sequence[str], cells: Mapping[str, Mapping[int, str]]) -> str:
    sizes = sorted(measured)
    head = ("", *(f"N={rows:,}" for rows in sizes), "")
    body = [(ENTRANTS[name].title, *(cells[name].get(rows, "") for rows in sizes), "") for name in names]
    return report.table(head, body)
