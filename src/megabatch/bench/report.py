"""What is printed: the machine, and a table."""

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch


def machine() -> dict[str, str | int]:
    return {"cpu": _cpu(), "cores": os.cpu_count() or 1, "threads": torch.get_num_threads(), "torch": torch.__version__}


def describe(machine: dict[str, str | int], threads: str = "") -> str:
    """`threads`: what is said of them, if it is not torch's own number."""
    return "{cpu}, {cores} cores\ntorch {torch}, ".format(**machine) + (threads or f"{machine['threads']} threads")


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def versions(packages: Sequence[str]) -> str:
    """Of packages, by the names pip knows."""
    return ", ".join(f"{package} {_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """First column and last to the left, the numbers between them to the right."""
    return "\n".join(line(row, widths(head, body)) for row in (head, *body))


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """The same for a page of documentation."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, rule, *body))


def widths(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(head, *body, strict=True)]


def line(row: Sequence[str], widths: Sequence[int]) -> str:
    last = len(row) - 1
    cells = [
        cell.ljust(width) if index in (0, last) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 0.01 else f"{value * 1e3:.2f} ms"


def mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.1f}"


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def remark(status: str, note: str) -> str:
    """What stands at the end of a row."""
    word = {"ok": "", "wrong": "WRONG"}.get(status, status)
    return f"{word}: {note}" if note else word


def spread(mean: float | None, deviation: float | None) -> str:
    """Mean ± standard deviation."""
    return "-" if mean is None else f"{seconds(mean)} ± {seconds(deviation)}"


def small(value: float | None) -> str:
    """An error."""
    return "-" if value is None else f"{value:.1e}"
