"""`python -m tools.kernels --tune`: the fastest launch settings on this GPU, for the library to read."""

import itertools
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict, replace

import torch

from megabatch.backends.triton_backend import Triton
from megabatch.backends.triton_settings import Settings, defaults, tuned, tuning_path
from megabatch.losses.block import Tile

from .compiling import VARIANTS, new_backend, new_tile


def main(names: list[str], dtypes: list[str], widths: list[int], device: str = "cuda") -> int:
    if not torch.cuda.is_available():
        print("kernels: --tune must run on a GPU, got none. Run it where you train.", file=sys.stderr)
        return 2
    forward = [variant for name in names if (variant := VARIANTS[name]).action in ("forward", "one pass")]
    found: dict[str, Settings] = {}
    for variant, dtype, width in itertools.product(forward, dtypes, widths):
        backend = new_backend(Triton, variant, dtype, device)
        with torch.device(device):
            tile = new_tile(variant, dtype, width)
        key = backend.tuning_key(tile)
        if key not in found:  # else a variant that is launched with the same settings
            default, *others = search(backend, tile, candidates(defaults(backend.architecture, backend.kind)))
            taken, found[key] = min([default, *others], key=lambda pair: pair[0])
            save(tuned() | found)
            print(f"{key}: {taken:.3f} ms, by default {default[0]:.3f} ms. {found[key]}", flush=True)
    print(f"written to {tuning_path()}")
    return 0


def candidates(settings: Settings) -> list[Settings]:
    """The defaults come first, and win a tie."""
    tried = [
        replace(settings, rows=rows, columns=columns, width=width, warps=warps, stages=stages)
        for rows, columns in [(128, 128), (128, 64), (64, 128), (128, 256), (64, 64)]
        for width in sorted({settings.width, max(settings.width // 2, 16)}, reverse=True)
        for warps in (4, 8)
        for stages in (settings.stages, settings.stages + 1)
    ]
    return [settings, *(other for other in tried if other != settings)]


def search(backend: Triton, tile: Tile, tried: list[Settings]) -> list[tuple[float, Settings]]:
    """The milliseconds of statistics and dlogits; inf where the device lacks the registers or the shared memory."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    for block in (tile.rows, tile.columns):
        block.features.normal_()
        block.row_grads.fill_(1.0)
        block.state.reset()

    kept = torch.empty(tile.shape, device=tile.rows.features.device) if backend.one_pass else None

    def step() -> None:
        backend.accumulate_statistics(tile, kept)
        backend.dlogits(tile, kept)

    def milliseconds(settings: Settings) -> float:
        backend.settings = settings
        try:
            return float(do_bench(step))
        except OutOfResources:
            return math.inf

    return [(milliseconds(settings), settings) for settings in tried]


def save(found: dict[str, Settings]) -> None:
    """At once, for processes that read it meanwhile."""
    path = tuning_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump({key: asdict(settings) for key, settings in found.items()}, file, indent=1)
    os.replace(file.name, path)
