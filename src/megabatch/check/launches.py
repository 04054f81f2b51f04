"""How many kernels does a step launch? Small batches wait for launches, not for arithmetic.

Everything that the profiler saw on the device counts: kernels, copies and fills. What a matrix product of a library
launches beside itself, to add up its parts, does not.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

from .calls import PLAIN, SCALE, Call, leaves_of
from .findings import FAILED, Finding, counted, each

SECTION = "launches"
STEP_ROWS, STEP_WIDTH, STEP_LIMIT = 256, 512, 45
TILE_LIMIT = 3
# Both passes are one walk over the tiles, so a tile may launch in the forward what others do in the backward.
ONE_PASS = ("siglip_loss", "info_nce_loss")
# What the profiler does on its own account.
OVERHEAD = ("Activity Buffer", "Command Buffer", "Lazy Function", "Instrumentation", "Resource")
SPLIT_PRODUCT = "splitkreduce"

# What the profiler saw while the work was done.
Profile = Callable[[Callable[[], Any]], tuple[Any, Iterable[Any]]]


class Tiles(NamedTuple):
    """Batches of several numbers of tiles: `sides` times `tile` rows."""

    title: str
    tile: int
    sides: tuple[int, int, int]
    options: dict[str, Any]


# Kept: all logits fit the default budget. Computed again: fewer fit than are worth keeping.
TILES = (
    Tiles("logits kept", 256, (2, 4, 6), {}),
    Tiles("logits computed again", 2048, (8, 12, 16), {"memory_budget": "48MiB"}),
)


def profiled(work: Callable[[], Any]) -> tuple[Any, list[Any]]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=activities) as profile:
            result = work()
            torch.cuda.synchronize()
        return result, list(profile.events() or [])


def launched(events: Iterable[Any]) -> Counter[str]:
    """What ran on the device, by name."""
    return Counter(
        event.name
        for event in events
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(OVERHEAD)
        and SPLIT_PRODUCT not in event.name.lower()
    )


def examine(
    losses: Sequence[str], backends: Sequence[str], dtype: str, device: torch.device, profile: Profile = profiled
) -> list[Finding]:
    steps = [
        Call("clip_loss", SCALE, backend, dtype, STEP_ROWS, STEP_WIDTH, {})
        for backend in backends
        if "clip_loss" in losses
    ]
    found = each(SECTION, steps, lambda call: [_whole_step(call, device, profile)])
    if "triton" in backends:
        # Nothing is multiplied by tensor cores but half precision, and nothing else is what kernels are for.
        for tiles in TILES:
            tiled = [Call(loss, PLAIN, "triton", "bfloat16", more=tiles.options) for loss in losses]
            found += each(SECTION, tiled, partial(_per_tile, tiles, device, profile))
    return found


def _whole_step(call: Call, device: torch.device, profile: Profile) -> Finding:
    forward, backward = _passes(call, device, profile)
    name = f"{call.loss}, whole step of {call.rows} rows, {call.backend}"
    return _judged(name, (forward + backward).total(), STEP_LIMIT, forward + backward)


def _per_tile(tiles: Tiles, device: torch.device, profile: Profile, call: Call) -> list[Finding]:
    """Launches grow by a constant, by strips of tiles and by tiles. The second difference leaves the tiles alone."""
    symmetric = call.loss in ("nt_xent_loss", "supcon_loss")
    counts, numbers, seen = [], [], Counter[str]()
    for side in tiles.sides:
        more = {**call.more, "tile": tiles.tile}
        sized = Call(call.loss, call.option, call.backend, call.dtype, side * tiles.tile, call.width, more)
        forward, backward = _passes(sized, device, profile)
        counts.append((forward.total(), backward.total()))
        side *= 2 if call.loss == "nt_xent_loss" else 1
        numbers.append(side * (side + 1) / 2 if symmetric else side**2)
        seen = forward + backward
    if not seen:
        return [_judged(f"{call.loss}, a tile, {tiles.title}", 0, TILE_LIMIT, seen)]
    ahead, back = (_second(values) / _second(numbers) for values in zip(*counts, strict=True))
    if call.loss in ONE_PASS:
        name = f"{call.loss}, a tile forward and backward, {tiles.title}"
        return [_judged(name, ahead + back, 2 * TILE_LIMIT, seen)]
    return [
        _judged(f"{call.loss}, a tile {way}, {tiles.title}", count, TILE_LIMIT, seen)
        for way, count in (("forward", ahead), ("backward", back))
    ]


def _second(values: Sequence[float]) -> float:
    low, middle, high = values
    return high - 2 * middle + low


def _passes(call: Call, device: torch.device, profile: Profile) -> tuple[Counter[str], Counter[str]]:
    """Launches of forward and backward, the second time that both run: the first compiles, and starts the profiler."""
    passes = Counter[str](), Counter[str]()
    for _ in range(2):
        inputs = call.inputs(device)
        value, forward = profile(partial(call.forward, inputs))
        _, backward = profile(partial(torch.autograd.grad, value, leaves_of(inputs)))
        passes = launched(forward), launched(backward)
    return passes


def _judged(name: str, count: float, allowed: float, seen: Counter[str]) -> Finding:
    if not seen:  # a meter that sees nothing proves nothing
        return Finding(SECTION, name, FAILED, note="the profiler saw nothing run on the device")
    most = ", ".join(f"{times} {kernel[:60]}" for kernel, times in seen.most_common(8))
    return counted(SECTION, name, count, allowed, most if count > allowed else "")
