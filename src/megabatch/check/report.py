"""What is printed, and the document that goes into a report. Neither names the machine or a path on it."""

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import megabatch
from megabatch.bench.report import line
from megabatch.bench.report import machine as this_cpu

from ..distributed.world import World
from .exactness import Comparison
from .speed import Contest

PACKAGES = ("triton", "open_clip_torch", "inf_cl")
MOST_SHOWN = 10
NAME_WIDTH, CELL_WIDTH = 44, 12


def machine(world: World, interpreted: bool) -> dict[str, Any]:
    cpu = this_cpu()
    on_gpu = world.device.type == "cuda"
    return {
        "megabatch": megabatch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: _version(name) for name in PACKAGES},
        "triton_interpreted": interpreted,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else cpu["cpu"],
        "device_type": world.device.type,
        "cores": cpu["cores"],
        "threads": cpu["threads"],
        "ranks": world.size,
        "group": world.backend,
    }


def describe(machine: dict[str, Any]) -> str:
    triton = machine["triton"] or "not installed"
    if machine["triton_interpreted"]:
        triton += ", interpreted on the CPU"
    ranks = (
        f"{machine['ranks']} ranks over {machine['group']}"
        if machine["ranks"] > 1
        else "one process; for ranks: torchrun --nproc-per-node 4 -m megabatch check"
    )
    cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    return (
        f"{machine['device']} ({machine['device_type']}), {machine['cores']} cores, {machine['threads']} threads\n"
        f"megabatch {machine['megabatch']}, torch {machine['torch']}{cuda}, triton {triton}\n{ranks}"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def exactness_line(name: str, cells: Sequence[str]) -> str:
    return line([name, *cells, ""], [NAME_WIDTH, *[CELL_WIDTH] * len(cells), 0])


def cell(comparisons: Sequence[Comparison]) -> str:
    """The worst error as a share of what is allowed."""
    if not comparisons:
        return "-"
    wrong = sum(not found.ok for found in comparisons)
    return f"{wrong}/{len(comparisons)} WRONG" if wrong else f"{max(found.share for found in comparisons):.2f}"


def verdict(comparisons: Sequence[Comparison], contests: Sequence[Contest], refused: Sequence[str]) -> str:
    """The last line."""
    wrong = [found for found in comparisons if not found.ok]
    if wrong:
        return f"FAILED - {len(wrong)} of {len(comparisons)} comparisons, first: {wrong[0]}"
    if refused:
        return f"FAILED - {' '.join(refused[0].split())}"
    for contest in contests:
        if not contest.healthy:
            bad = next(row for row in contest.rows if row.status != "ok")
            return f"FAILED - speed, {contest.case}, {bad.title}: {bad.status} {bad.note}".rstrip()
    if not comparisons:
        return "FAILED - nothing could be checked"
    worst = max(found.share for found in comparisons)
    parts = [f"OK - {len(comparisons)} comparisons, the worst error is {worst:.2f} of what is allowed"]
    return "; ".join([*parts, *[contest.summary for contest in contests if contest.summary][:1]])


def document(
    machine: dict[str, Any],
    comparisons: Sequence[Comparison],
    contests: Sequence[Contest],
    notes: Sequence[str],
    verdict: str,
    whole: bool,
) -> dict[str, Any]:
    """`whole`: every comparison; otherwise those that failed, and the worst of every group."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for found in comparisons:
        groups.setdefault((found.function, found.way, found.dtype), []).append(found)
    document: dict[str, Any] = {
        "machine": machine,
        "exactness": [
            {
                "function": function,
                "way": way,
                "dtype": dtype,
                "comparisons": len(members),
                "failed": sum(not member.ok for member in members),
                "worst": _record(max(members, key=lambda member: member.share), short=True),
            }
            for (function, way, dtype), members in groups.items()
        ],
        "failed": [_record(member) for member in comparisons if not member.ok],
        "speed": [
            {**asdict(contest.case), "contenders": [{**asdict(row), "best": row.best} for row in contest.rows]}
            for contest in contests
        ],
        "notes": list(notes),
        "verdict": verdict,
    }
    return document | ({"comparisons": [_record(member) for member in comparisons]} if whole else {})


def _record(found: Comparison, short: bool = False) -> dict[str, Any]:
    record = asdict(found) | {"ok": found.ok}
    kept = ("case", "result", "error", "allowed") if short else [name for name in record if name != "value"]
    return {name: _rounded(record[name]) for name in kept}


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value
