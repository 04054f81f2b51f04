"""The instruments: rounds in shuffled order, a meter of peak memory, a hard limit on it, and the profiler.

What a system cannot measure is None, and printed as n/a.
"""

import contextlib
import ctypes
import gc
import importlib
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark import timer  # waits for the accelerator, if there is one

from ..distributed.world import World

STATUS, MEMORY, FORGET = (Path("/proc") / name for name in ("self/status", "meminfo", "self/clear_refs"))
TRAFFIC, LOOPBACK = Path("/proc/self/net/dev"), "lo" if sys.platform == "linux" else "lo0"
MOST_ROUNDS = 1000
M_MMAP_THRESHOLD = -3  # of malloc.h
# Threads need a moment to fall asleep after a run, and would disturb the next.
PAUSE_SECONDS = 0.02
SHARE_OF_AVAILABLE = 0.9

# Whether this process was started for one measurement, and ends with it.
expendable = False

# Seconds and, where they are counted, bytes sent of every run of a contender.
Runs = dict[str, list[tuple[float, int | None]]]


def rounds(world: World, steps: Mapping[str, Callable[[], object] | None], repeats: int, seconds: float) -> Runs:
    """One run each that is thrown away; then every step once per round, in another order in every round.

    There are at least `repeats` rounds, and more until `seconds` have passed: small steps need them. Ranks run one step
    at a time, in the same order, and start together; None is a step that this rank has no part in.
    """
    runs: Runs = {name: [] for name in steps}
    order, begin = random.Random(0), time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for number in range(-1, MOST_ROUNDS):
            for name in order.sample(list(steps), len(steps)):
                run = _run(world, steps[name])
                if number >= 0 and steps[name] is not None:
                    runs[name].append(run)
            if number < 0:
                begin = time.perf_counter()
            elif number + 1 >= repeats and world.gather(time.perf_counter() - begin)[0] >= seconds:
                break
    finally:
        gc.enable()
    return runs


def _run(world: World, step: Callable[[], object] | None) -> tuple[float, int | None]:
    before = None
    if world.size > 1:
        world.wait()
        time.sleep(PAUSE_SECONDS)
        before = sent_bytes() if world.device.type == "cpu" else None
        world.wait()
    start = timer()
    if step is not None:
        step()
    taken = timer() - start
    if before is None:
        return taken, None
    world.wait()
    after = sent_bytes()
    return taken, None if after is None else after - before


def sent_bytes() -> int | None:
    """Bytes that went through the loopback so far, TCP's headers and acknowledgements too; None if not counted."""
    for line in TRAFFIC.read_text().splitlines() if TRAFFIC.exists() else []:
        name, _, counters = line.partition(":")
        if name.strip() == LOOPBACK:
            return int(counters.split()[8])
    return None


# ---- memory


class PeakMemory:
    """The most that was held inside the `with` beyond what was held before, in `bytes`; None where it is not counted.

    Of an accelerator what its allocator gave out, of a CPU resident memory of this process. Freed memory is handed back
    first, so that it is not used again unseen.
    """

    bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        # torch.cuda, torch.xpu, …; torch.mps counts no peaks.
        module = getattr(torch, device.type)
        self._allocator = module if hasattr(module, "reset_peak_memory_stats") else None
        self._device = device

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self._device.type == "cpu":
            self._before = _forget_peak()
        elif self._allocator is not None:
            self._allocator.synchronize(self._device)
            self._allocator.reset_peak_memory_stats(self._device)
            self._before = self._allocator.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cpu":
            self.bytes = None if self._before is None else _bytes_of(STATUS, "VmHWM") - self._before
        elif self._allocator is not None and self._before is not None:
            self._allocator.synchronize(self._device)
            self.bytes = self._allocator.max_memory_allocated(self._device) - self._before


def _forget_peak() -> int | None:
    """Resident memory now, from which a new peak counts; None where the system keeps the old one."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        FORGET.write_text("5")
        held, peak = (_bytes_of(STATUS, name) for name in ("VmRSS", "VmHWM"))
    except OSError:
        return None
    return held if peak <= held + 2**20 else None


def return_freed_memory() -> None:
    """From now on, have malloc hand back what is freed at once, all but small blocks.

    By itself glibc keeps holes of up to 32 MiB for blocks that fit. Where many sizes come and go these add up to a good
    part of resident memory, by chance; without them it is what is in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)


def limit_memory(limit: int | None, ranks: int, device: torch.device) -> Callable[[], None]:
    """A function that limits this process, once it is called, to `limit` bytes more than it holds now.

    None: to its share of what the machine has, which keeps it from taking down the machine. Only Linux limits, only
    memory of the CPU, and only processes that are `expendable`: the limit cannot be lifted again.
    """
    held, available = private_bytes(), available_bytes()
    if not expendable or held is None or device.type != "cpu" or (limit is None and available is None):
        return lambda: None
    allowed = held + (limit if limit is not None else int(SHARE_OF_AVAILABLE * (available or 0) / ranks))
    resource: Any = importlib.import_module("resource")
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    return _bytes_of(MEMORY, "MemAvailable") if MEMORY.exists() else None


def private_bytes() -> int | None:
    """Writable memory of this process alone, touched or not, which is what RLIMIT_DATA limits; None but on Linux."""
    return _bytes_of(STATUS, "VmData") if sys.platform == "linux" else None


def _bytes_of(file: Path, field: str) -> int:
    """The bytes of a `field: 123 kB` line."""
    lines = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) * 1024


# ---- the profiler

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def profiled(step: Callable[[], object], device: torch.device) -> Any:
    """What the profiler saw of one run of a step."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds, with_flops=True, acc_events=True) as profiler, record_function("step"):
        step()
        timer()
    return profiler.events()


def stages(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of one run: matrix products, communication, all other operators or kernels, and the time between them."""
    found = dict.fromkeys(("products", "communication", "other operators", "rest"), 0.0)
    events = profiled(step, device)
    whole = next(event for event in events if event.name == "step").time_range.elapsed_us() / 1e6
    on_device = device.type == "cuda"
    for event in events:
        beside = not on_device and (event.is_async or event.thread != events[0].thread)  # of the step
        if event.name == "step" or beside or (event.device_type == DeviceType.CUDA) != on_device:
            continue
        name = event.name.lower()
        kind = "products" if event.name in PRODUCTS or "gemm" in name or "cutlass" in name else "other operators"
        if name.startswith(("gloo:", "nccl", "c10d::")):
            kind = "communication"
        found[kind] += (event.time_range.elapsed_us() if on_device else event.self_cpu_time_total) / 1e6
    found["rest"] = max(whole - sum(found.values()), 0.0)
    return found


def ranges(step: Callable[[], object], device: torch.device, names: tuple[str, ...]) -> dict[str, float]:
    """Seconds of one run inside the `record_function` ranges of these names: of the device, or of the CPU."""
    events = [event for event in profiled(step, device) if event.name in names]
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    own = [event for event in events if event.device_type == kind]
    return {name: sum(e.time_range.elapsed_us() for e in own if e.name == name) / 1e6 for name in names}


def products(step: Callable[[], object], device: torch.device) -> float:
    """Multiplications and additions in the matrix products of one run."""
    return float(sum(event.flops for event in profiled(step, device) if event.name in PRODUCTS))
