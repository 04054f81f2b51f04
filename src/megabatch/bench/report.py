"""What is printed and kept of a run: the machine, tables, figures."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import megabatch

from ..distributed.world import World


def machine(world: World, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Names neither the host nor a path on it."""
    on_gpu = world.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(world.device) if on_gpu else _cpu(),
        "device_type": world.device.type,
        **(gpu(torch.cuda.get_device_properties(world.device)) if on_gpu else {}),
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "ranks": world.size,
        "group": world.backend,
        "system": platform.system(),
        "python": platform.python_version(),
        "megabatch": megabatch.__version__,
        "commit": commit(Path(megabatch.__file__).parent),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "packages": {name: version(name) for name in packages},
    }


def gpu(properties: Any) -> dict[str, Any]:
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "gpus": torch.cuda.device_count(),
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """The commit of the clone that the package is imported from, "-dirty" if files have changed since; None without."""
    try:
        said = [
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout
            for words in (("ls-files", "__init__.py"), ("describe", "--always", "--dirty", "--exclude", "*"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    # A package installed below somebody else's clone is no file of it.
    return said[1].strip() if said[0].strip() else None


def describe(machine: dict[str, Any]) -> str:
    """In two lines, and a third for packages."""
    cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    versions = ", ".join(f"{name} {found or 'not installed'}" for name, found in machine["packages"].items())
    return (
        f"{machine['device']} ({machine['device_type']}), {machine['cores']} cores, {machine['threads']} threads\n"
        f"megabatch {machine['megabatch']} ({machine['commit'] or 'no commit'}), torch {machine['torch']}{cuda}"
    ) + (f"\n{versions}" if versions else "")


# ---- tables


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
