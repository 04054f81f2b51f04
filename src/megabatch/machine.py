"""The machine, the versions and the commit that a benchmark, a check or a training run is of."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .distributed.world import World


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
        "megabatch": __version__,
        "commit": commit(Path(__file__).parent),
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
