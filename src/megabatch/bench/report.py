"""What is printed of a benchmark: tables, figures."""

from collections.abc import Sequence


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """First column and last to the left, the numbers between them to the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return "\n".join(line(row, widths) for row in (head, *body))


def line(row: Sequence[str], widths: Sequence[int]) -> str:
    last = len(row) - 1
    cells = [
        cell.ljust(width) if index in (0, last) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """The same for a page of documentation."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, rule, *body))


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 0.01 else f"{value * 1e3:.2f} ms"


def mebibytes(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 2**20:,.0f}" if value >= 100 * 2**20 else f"{value / 2**20:,.1f}"


def small(value: float | None) -> str:
    """An error."""
    return "-" if value is None else f"{value:.1e}"


def remark(status: str, note: str) -> str:
    """What stands at the end of a row."""
    word = {"ok": "", "wrong": "WRONG"}.get(status, status)
    return f"{word}: {note}" if note else word
