"""What is printed, and the document that goes into a report. Neither names the machine or a path on it."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import megabatch
from megabatch.bench.report import line
from megabatch.bench.report import machine as this_cpu

from ..distributed.world import World
from .exactness import Comparison
from .findings import FAILED, NOT_RUN, Finding, status, summary
from .speed import Contest

PACKAGES = ("triton", "open_clip_torch", "inf_cl", "siglip-kernel")
MOST_SHOWN = 10
NAME_WIDTH, CELL_WIDTH = 44, 12


def machine(world: World, interpreted: bool) -> dict[str, Any]:
    cpu = this_cpu()
    on_gpu = world.device.type == "cuda"
    return {
        "megabatch": megabatch.__version__,
        "commit": commit(Path(megabatch.__file__).parent),
        "python": platform.python_version(),
        "system": platform.system(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: _version(name) for name in PACKAGES},
        "triton_interpreted": interpreted,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else cpu["cpu"],
        "device_type": world.device.type,
        **(gpu(torch.cuda.get_device_properties(world.device)) if on_gpu else {}),
        "cores": cpu["cores"],
        "threads": cpu["threads"],
        "ranks": world.size,
        "group": world.backend,
    }


def gpu(properties: Any) -> dict[str, Any]:
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "gpus": torch.cuda.device_count(),
    }


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


def verdict(
    comparisons: Sequence[Comparison],
    findings: Mapping[str, Sequence[Finding]],
    contests: Sequence[Contest],
    refused: Sequence[str],
) -> str:
    """The last line."""
    bad = [*_wrong(comparisons, refused), *_bad(findings), *_unhealthy(contests)]
    if not comparisons and not bad:
        bad = ["nothing could be checked"]
    if bad:
        return f"FAILED - {'; '.join(bad)}"
    worst = max(found.share for found in comparisons)
    parts = [f"OK - {len(comparisons)} comparisons, the worst error is {worst:.2f} of what is allowed"]
    parts += [summary(name, found) for name, found in findings.items() if status(found) != NOT_RUN]
    left_out = {name: found[0].note for name, found in findings.items() if status(found) == NOT_RUN}
    if left_out:
        parts.append(f"not run: {', '.join(left_out)} ({next(iter(left_out.values()))})")
    return "; ".join([*parts, *[contest.summary for contest in contests if contest.summary][:1]])


def _wrong(comparisons: Sequence[Comparison], refused: Sequence[str]) -> list[str]:
    wrong = [found for found in comparisons if not found.ok]
    first = [f"{len(wrong)} of {len(comparisons)} comparisons, first: {wrong[0]}"] if wrong else []
    return [*first, *(" ".join(text.split()) for text in refused[:1])]


def _bad(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    return [summary(name, found) for name, found in findings.items() if status(found) == FAILED]


def _unhealthy(contests: Sequence[Contest]) -> list[str]:
    for contest in contests:
        if not contest.healthy:
            bad = next(row for row in contest.rows if row.status != "ok")
            return [f"speed, {contest.case}, {bad.title}: {bad.status} {bad.note}".rstrip()]
    return []


def document(
    machine: dict[str, Any],
    comparisons: Sequence[Comparison],
    findings: Mapping[str, Sequence[Finding]],
    contests: Sequence[Contest],
    notes: Sequence[str],
    verdict: str,
    whole: bool,
) -> dict[str, Any]:
    """`whole`: every result; otherwise the comparisons that failed, the worst of every group, and the findings that
    tell something."""
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
        "sections": {name: _section(found, whole) for name, found in findings.items()},
        "speed": [
            {**asdict(contest.case), "contenders": [{**asdict(row), "best": row.best} for row in contest.rows]}
            for contest in contests
        ],
        "notes": list(notes),
        "verdict": verdict,
    }
    return document | ({"comparisons": [_record(member) for member in comparisons]} if whole else {})


def _section(findings: Sequence[Finding], whole: bool) -> dict[str, Any]:
    told = [asdict(found) for found in findings if whole or not found.silent]
    return {
        "status": status(findings),
        "examined": sum(found.status != NOT_RUN for found in findings),
        "failed": sum(found.status == FAILED for found in findings),
        "results": [
            {name: value for name, value in found.items() if name != "section" and value not in (None, "")}
            for found in told
        ],
    }


def _record(found: Comparison, short: bool = False) -> dict[str, Any]:
    record = asdict(found) | {"ok": found.ok}
    kept = ("case", "result", "error", "allowed") if short else [name for name in record if name != "value"]
    return {name: _rounded(record[name]) for name in kept}


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value
