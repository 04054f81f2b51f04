"""Launch settings of the kernels: a default per architecture and, on request, the fastest of those timed."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

AUTOTUNE = "MEGABATCH_AUTOTUNE"
# What kernels call the fields of Settings, in order.
ARGUMENTS = ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_WIDTH", "SUBTILES", "GROUP_ROWS", "num_warps", "num_stages")
SMALLEST_TUNED = 2048  # side of a tile; timings of smaller ones are noise


@dataclass(frozen=True)
class Settings:
    """How the tile kernel is launched, in the forward and the backward: both must compute the same logits.

    Attributes:
        rows, columns, width: BLOCK_M, BLOCK_N and BLOCK_K of the matrix product.
        subtiles: The epilogue works on a block in so many pieces, because it needs registers.
        group_rows: GROUP_M: so many blocks below each other run before the next column of blocks, to share the cache.
    """

    rows: int
    columns: int
    width: int
    subtiles: int
    group_rows: int = 8
    warps: int = 8
    stages: int = 3


_INTERPRETED = Settings(32, 32, 32, subtiles=2, group_rows=2, warps=1, stages=1)  # small tests have several blocks
_FMA = Settings(64, 64, 16, subtiles=4)
_AMD_FLOAT32 = Settings(128, 128, 16, subtiles=8, stages=2)
# For bf16/fp16, for float32 multiplied as tf32, and for float32 in full precision.
DEFAULTS = {
    "sm_80": {"half": Settings(128, 64, 64, subtiles=2), "tf32": Settings(128, 64, 32, subtiles=2), "ieee": _FMA},
    "sm_86": {"half": Settings(128, 64, 32, subtiles=2), "tf32": Settings(128, 64, 16, subtiles=2), "ieee": _FMA},
    "sm_90": {"half": Settings(128, 128, 64, subtiles=8), "tf32": Settings(128, 128, 32, subtiles=8), "ieee": _FMA},
    "sm_100": {"half": Settings(128, 64, 64, subtiles=4), "tf32": Settings(128, 64, 32, subtiles=4), "ieee": _FMA},
    "gfx942": {"half": Settings(128, 128, 32, subtiles=8, stages=2), "tf32": _AMD_FLOAT32, "ieee": _AMD_FLOAT32},
    "interpreter": dict.fromkeys(("half", "tf32", "ieee"), _INTERPRETED),
}
# Where dot products are loaded, not computed: nothing is reused, so small blocks do.
ELEMENTWISE = Settings(32, 64, 16, subtiles=1, warps=4, stages=1)


def precision(wanted: str, architecture: str) -> str:
    """How float32 is multiplied: of AMD's architectures, only gfx942 has tf32."""
    return "ieee" if architecture.startswith("gfx") and architecture != "gfx942" else wanted


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


# ---- autotuning


def autotunes() -> bool:
    word = os.environ.get(AUTOTUNE, "") or "0"
    if word not in ("0", "1"):
        raise ValueError(f"megabatch: {AUTOTUNE} must be 0 or 1, got {word!r}.")
    return word == "1"


def variants(settings: Settings) -> list[Settings]:
    """The candidates; the defaults come first and win a tie."""
    tried = [
        replace(settings, rows=rows, columns=columns, width=width, warps=warps, stages=stages)
        for rows, columns in [(128, 128), (128, 64), (64, 128), (128, 256), (64, 64)]
        for width in sorted({settings.width, max(settings.width // 2, 16)}, reverse=True)
        for warps in (4, 8)
        for stages in (settings.stages, settings.stages + 1)
    ]
    return [settings, *(other for other in tried if other != settings)]


class Tuning:
    """The fastest settings by key, in a file that later processes read."""

    def __init__(self, path: Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = path or cache / "megabatch" / "tuning.json"
        self._found: dict[str, Settings] = {}

    def known(self, key: str) -> Settings | None:
        if key not in self._found:
            self._found = self._read() | self._found
        return self._found.get(key)

    def search(self, key: str, candidates: list[Settings], time: Callable[[Settings], float | None]) -> Settings:
        """Time them all. `time` returns None for settings that do not fit the device; if none fits, the first wins."""
        timed = [(taken, settings) for settings in candidates if (taken := time(settings)) is not None]
        best = min(timed, key=lambda pair: pair[0])[1] if timed else candidates[0]
        self._found = {**self._read(), **self._found, key: best}
        with contextlib.suppress(OSError):  # not writable: the next process will time again
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump({key: asdict(settings) for key, settings in self._found.items()}, file, indent=1)
            os.replace(file.name, self.path)
        return best

    def _read(self) -> dict[str, Settings]:
        """The valid entries: the file may be of another version, or truncated."""
        try:
            stored = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        entries = stored.items() if isinstance(stored, dict) else ()
        return {key: Settings(**entry) for key, entry in entries if _is_valid(entry)}


def _is_valid(entry: object) -> bool:
    names = {member.name for member in fields(Settings)}
    if not isinstance(entry, dict) or entry.keys() != names:
        return False
    positive = all(type(value) is int and value > 0 for value in entry.values())
    return positive and all(entry[name] & (entry[name] - 1) == 0 for name in names - {"group_rows", "stages"})
