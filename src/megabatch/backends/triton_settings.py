"""How the kernels are launched: a table of defaults by architecture and, where asked for, what was timed to be best.

Forward and backward of a call must form the same products, so one entry serves all kernels of an architecture.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

AUTOTUNE = "MEGABATCH_AUTOTUNE"
SMALLEST_TUNED = 2048  # sides of a tile: smaller ones would be decided by chance


@dataclass(frozen=True)
class Settings:
    """One way to launch.

    Attributes:
        rows, columns: Sides of the block that a program computes.
        width: Features that it loads at a time.
        band: Blocks that go down before the next ones across: they share rows and columns in the cache.
        parts: How many parts the epilogue takes a block in, for it needs registers.
    """

    rows: int
    columns: int
    width: int
    band: int
    parts: int
    warps: int
    stages: int


# By architecture, for halves, for float32 multiplied as tf32, and for float32 as it is.
DEFAULTS = {
    "sm_80": {
        "half": Settings(128, 64, 64, 8, parts=2, warps=8, stages=3),
        "tf32": Settings(128, 64, 32, 8, parts=2, warps=8, stages=3),
        "ieee": Settings(64, 64, 16, 8, parts=4, warps=8, stages=3),
    },
    "sm_86": {
        "half": Settings(128, 64, 32, 8, parts=2, warps=8, stages=3),
        "tf32": Settings(128, 64, 16, 8, parts=2, warps=8, stages=3),
        "ieee": Settings(64, 64, 16, 8, parts=4, warps=8, stages=3),
    },
    "sm_90": {
        "half": Settings(128, 128, 64, 8, parts=8, warps=8, stages=3),
        "tf32": Settings(128, 128, 32, 8, parts=8, warps=8, stages=3),
        "ieee": Settings(64, 64, 16, 8, parts=4, warps=8, stages=3),
    },
    "sm_100": {
        "half": Settings(128, 64, 64, 8, parts=4, warps=8, stages=3),
        "tf32": Settings(128, 64, 32, 8, parts=4, warps=8, stages=3),
        "ieee": Settings(64, 64, 16, 8, parts=4, warps=8, stages=3),
    },
    "gfx942": {
        "half": Settings(128, 128, 32, 8, parts=8, warps=8, stages=2),
        "tf32": Settings(128, 128, 16, 8, parts=8, warps=8, stages=2),
        "ieee": Settings(128, 128, 16, 8, parts=8, warps=8, stages=2),
    },
    # Small, so that small tests have several blocks.
    "interpreter": {kind: Settings(32, 32, 32, 2, parts=2, warps=1, stages=1) for kind in ("half", "tf32", "ieee")},
}


# Where products are read, rather than formed: nothing is used twice, so small blocks do.
ELEMENTWISE = Settings(32, 64, 16, 8, parts=1, warps=4, stages=1)


def precision(wanted: str, architecture: str) -> str:
    """How float32 is multiplied: of AMD's, only one has units for tf32."""
    return "ieee" if architecture.startswith("gfx") and architecture != "gfx942" else wanted


def architecture(device: torch.device) -> str:
    """As in the table: "sm_90", "gfx942"; "interpreter" on the CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def defaults(architecture: str, kind: str) -> Settings:
    """Of this architecture, or of the most like it."""
    return DEFAULTS[architecture if architecture in DEFAULTS else _relative(architecture)][kind]


def _relative(architecture: str) -> str:
    if architecture.startswith("gfx"):
        return "gfx942"
    # A generation's first has the most shared memory; what nobody knows gets what fits the least.
    return {"sm_9": "sm_90", "sm_10": "sm_100"}.get(architecture[:-1], "sm_86")


# ---- timing


def autotunes() -> bool:
    word = os.environ.get(AUTOTUNE, "") or "0"
    if word not in ("0", "1"):
        raise ValueError(f"megabatch: {AUTOTUNE} must be 0 or 1, got {word!r}.")
    return word == "1"


def variants(settings: Settings) -> list[Settings]:
    """What is tried: the defaults first, which win a tie."""
    shapes = [(128, 128), (128, 64), (64, 128), (128, 256), (64, 64)]
    tried = [
        Settings(rows, columns, width, settings.band, settings.parts, warps, stages)
        for rows, columns in shapes
        for width in (settings.width, settings.width // 2)
        if width >= 16
        for warps in (4, 8)
        for stages in (settings.stages, settings.stages + 1)
    ]
    return [settings, *(other for other in tried if other != settings)]


class Tuning:
    """The best settings by key, in a file that the next process finds."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or _cache_folder() / "tuning.json"
        self._found: dict[str, Settings] = {}

    def known(self, key: str) -> Settings | None:
        if key not in self._found:
            self._found = self._read() | self._found
        return self._found.get(key)

    def search(self, key: str, candidates: list[Settings], time: Callable[[Settings], float | None]) -> Settings:
        """Time them all; None is for settings that do not fit this device. Where none fits, the first are left."""
        timed = [(taken, settings) for settings in candidates if (taken := time(settings)) is not None]
        best = min(timed, key=lambda pair: pair[0])[1] if timed else candidates[0]
        self._found = {**self._read(), **self._found, key: best}
        with contextlib.suppress(OSError):  # nowhere to write: the next process will time again
            self._write()
        return best

    def _read(self) -> dict[str, Settings]:
        """Whatever of the file can be read: it may be of another version, or half of one."""
        try:
            stored = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        entries = stored.items() if isinstance(stored, dict) else ()
        return {key: Settings(**entry) for key, entry in entries if _can_be(entry)}

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
            json.dump({key: asdict(settings) for key, settings in self._found.items()}, file, indent=1)
        os.replace(file.name, self.path)


def _can_be(entry: object) -> bool:
    """Whether these are settings."""
    if not isinstance(entry, dict) or entry.keys() != {member.name for member in fields(Settings)}:
        return False
    sides = [entry[name] for name in ("rows", "columns", "width", "parts", "warps")]
    powers = all(type(side) is int and side > 0 and side & (side - 1) == 0 for side in sides)
    return powers and all(type(entry[name]) is int and entry[name] > 0 for name in ("band", "stages"))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"
