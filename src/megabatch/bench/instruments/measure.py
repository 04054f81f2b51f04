"""The instruments: a clock that lets contenders take turns, and a meter of peak memory; on a GPU its own of each."""

import contextlib
import ctypes
import gc
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

STATUS = Path("/proc/self/status")
MOST_ROUNDS = 1000
M_MMAP_THRESHOLD = -3  # of malloc.h


def clocked(step: Callable[[], object]) -> float:
    """Seconds of a run."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def clocked_on_gpu(step: Callable[[], object]) -> float:
    """Seconds between two events of the stream: what the GPU did, and what it waited for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def finish(device: torch.device) -> None:
    """Wait for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_of(device: torch.device) -> Callable[[Callable[[], object]], float]:
    return clocked_on_gpu if device.type == "cuda" else clocked


def take_turns(
    steps: Mapping[str, Callable[[], object]],
    repeats: int,
    seconds: float,
    clock: Callable[[Callable[[], object]], float] = clocked,
) -> dict[str, list[float]]:
    """Seconds of every run of every step. One run each is thrown away; then all run once per round, in another order
    in every round. Ranks that take turns together take them in the same order.

    There are at least `repeats` rounds, and more until `seconds` have passed: small steps need them.
    """
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    begin, rounds, order = time.perf_counter(), 0, random.Random(0)
    try:
        while rounds < repeats or (rounds < MOST_ROUNDS and time.perf_counter() - begin < seconds):
            rounds += 1
            for name in order.sample(list(steps), len(steps)):
                taken[name].append(clock(steps[name]))
    finally:
        gc.enable()
    return taken


class PeakMemory:
    """The most that this process held inside the `with` beyond what it held before, in `bytes`.

    Resident memory, so whatever was allocated and never touched does not count. Freed memory is handed back first, that
    it may not be used again unseen.
    """

    bytes: int

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = _status("VmHWM") - self._before


class PeakAllocated:
    """The same for a GPU, as its allocator saw it."""

    bytes: int

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "PeakAllocated":
        gc.collect()
        finish(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        finish(self._device)
        self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before


class Meter(Protocol):
    bytes: int

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


def meter_of(device: torch.device) -> Meter:
    return PeakAllocated(device) if device.type == "cuda" else PeakMemory()


def return_freed_memory() -> None:
    """From now on, have malloc hand back what is freed at once, all but small blocks.

    By itself glibc keeps holes of up to 32 MiB for blocks that fit. Where many sizes come and go these add up to a good
    part of resident memory, by chance; without them it is what is in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes; where there is none, the peak since the process began stands for all."""
    if STATUS.exists():
        return status_bytes(STATUS.read_text(), field)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def status_bytes(text: str, field: str) -> int:
    """The value of a `field: 123 kB` line, the form of /proc/self/status and /proc/meminfo."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    return status_bytes(meminfo.read_text(), "MemAvailable") if meminfo.exists() else None


def private_bytes() -> int:
    """Writable memory of this process alone, touched or not: what RLIMIT_DATA limits."""
    return _status("VmData")
