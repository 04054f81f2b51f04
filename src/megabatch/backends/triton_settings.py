"""Launch settings of the kernels: what `python -m tools.kernels --tune` found, else a default per architecture."""

import json
import logging
import os
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)
# What kernels call the fields of Settings, in order.
ARGUMENTS = ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_WIDTH", "SUBTILES", "GROUP_ROWS", "num_warps", "num_stages")


@dataclass(frozen=True)
class Settings:
    """How the tile kernel is launched, in the forward and the backward: both must compute the same logits.

    Attributes:
        rows, columns, width: BLOCK_M, BLOCK_N and BLOCK_K of the matrix product.
        subtiles: Number of pieces in which the epilogue processes a block, to save registers.
        group_rows: GROUP_M: blocks below each other that run before the next column of blocks, to share the cache.
    """

    rows: int
    columns: int
    width: int
    subtiles: int
    group_rows: int = 8
    warps: int = 8
    stages: int = 3

    def __post_init__(self) -> None:
        sizes = (self.rows, self.columns, self.width, self.subtiles, self.warps)
        if any(type(size) is not int or size < 1 for size in astuple(self)) or any(size & (size - 1) for size in sizes):
            raise ValueError(f"settings must be positive integers, and sizes powers of two, got {self}")

    def arguments(self) -> dict[str, int]:
        return dict(zip(ARGUMENTS, astuple(self), strict=True))


_INTERPRETED = Settings(32, 32, 32, subtiles=2, group_rows=2, warps=1, stages=1)  # small tests have several blocks
# Where the dot products are given, kept or from a library: nothing is reused, so small blocks do.
_GIVEN = Settings(64, 64, 16, subtiles=1, stages=1)
_AMD = {
    "half": Settings(128, 128, 32, subtiles=8, stages=2),
    "tf32": Settings(128, 64, 16, subtiles=4, stages=2),
    "given": _GIVEN,
}
# For bf16/fp16, for float32 multiplied as tf32, and for dot products that are given.
DEFAULTS = {
    "sm_80": {"half": Settings(128, 64, 64, subtiles=2), "tf32": Settings(128, 64, 32, subtiles=2), "given": _GIVEN},
    "sm_86": {"half": Settings(128, 64, 32, subtiles=2), "tf32": Settings(128, 64, 16, subtiles=2), "given": _GIVEN},
    "sm_90": {"half": Settings(128, 128, 64, subtiles=8), "tf32": Settings(128, 128, 32, subtiles=8), "given": _GIVEN},
    "sm_100": {"half": Settings(128, 64, 64, subtiles=4), "tf32": Settings(128, 64, 32, subtiles=4), "given": _GIVEN},
    "gfx942": _AMD,
    "gfx950": _AMD,
    "interpreter": dict.fromkeys(("half", "tf32", "given"), _INTERPRETED),
}


def precision(wanted: str, architecture: str) -> str:
    """How float32 is multiplied: of AMD's architectures, only gfx942 has tf32."""
    return "ieee" if architecture.startswith("gfx") and architecture != "gfx942" else wanted


@cache
def architecture(device: torch.device) -> str:
    """As in DEFAULTS: "sm_90", "gfx942"; "interpreter" on the CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def defaults(architecture: str, kind: str) -> Settings:
    """Of this architecture, or of the one most like it."""
    if architecture not in DEFAULTS:
        # The first chip of a generation has the most shared memory; sm_86's settings need the least.
        nvidia = {"sm_9": "sm_90", "sm_10": "sm_100"}.get(architecture[:-1], "sm_86")
        architecture = "gfx942" if architecture.startswith("gfx") else nvidia
    return DEFAULTS[architecture][kind]


def tuning_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "megabatch", "tuning.json")


@cache
def tuned() -> dict[str, Settings]:
    """The settings that `python -m tools.kernels --tune` left, by `Triton.tuning_key`."""
    try:
        return {key: Settings(**entry) for key, entry in json.loads(tuning_path().read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # No warning, which may be an error to the user: ranks wait for each other here.
        _log.warning(
            "%s is ignored (%s). Run python -m tools.kernels --tune again, or delete it.", tuning_path(), error
        )
        return {}
