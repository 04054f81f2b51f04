"""What a training step costs: its work, what share of the device's peak that is, and memory."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megabatch.plan.hardware import GPUS

from ..distributed.world import World
from .evaluate import Figures
from .towers import Towers


class StepCosts:
    """Figures of a step, from the rows of all ranks and the seconds that this one took."""

    def __init__(self, towers: Towers, world: World, precision: str, *, texts_only: bool) -> None:
        self._world = world
        self._flops = flops_per_sample(towers, texts_only=texts_only)
        self._peak = peak_flops(world.device, precision)
        self._marks: list[tuple[str, Any]] = []
        # Events are of the stream that computes, also where ranks meet on another.
        self._stream = torch.cuda.current_stream(world.device) if world.device.type == "cuda" else None

    def mark(self, part: str) -> None:
        """What was done since the last mark was this part of the step. The device is not waited for."""
        if self._world.device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The loss waits for other ranks."""
        self.mark("loss")
        yield
        self.mark("communication")

    def _parts(self) -> Figures:
        """Once the step is done, and its loss was read: then all events have happened."""
        seconds: Figures = {}
        for (_, before), (part, mark) in pairwise(self._marks):
            taken = mark - before if isinstance(mark, float) else before.elapsed_time(mark) / 1e3
            seconds[f"train/{part}_seconds"] = seconds.get(f"train/{part}_seconds", 0.0) + taken
        self._marks.clear()
        return seconds

    def __call__(self, rows: int, data_seconds: float, seconds: float) -> Figures:
        flops = self._flops * rows / self._world.size / seconds
        return {
            "train/samples_per_second": rows / seconds,
            "train/data_seconds": data_seconds,
            "train/step_seconds": seconds,
            **self._parts(),
            "train/tflops_per_second": flops / 1e12,
            **({} if self._peak is None else {"train/mfu": flops / self._peak}),
            "train/memory_mib": peak_mib(self._world.device),
        }


def check_memory(towers: Towers, batch_size: int, world: World, *, texts_only: bool) -> None:
    """Of a batch, and of the next, which is made meanwhile. Absurd sizes would fill it slowly."""
    image = towers.preprocessing
    row = 2 * towers.tokenizer(["a"]).nbytes + (0 if texts_only else image.channels * image.size**2)
    needed = 2 * (batch_size // world.size * row + batch_size * 16)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"--global-batch-size must leave room for two batches in memory, got {batch_size}, which takes "
            f"{needed / 2**30:.0f} of {there / 2**30:.0f} GiB on each of {world.size} ranks. Take a "
            "smaller one, or more machines."
        )


@torch.no_grad()
def flops_per_sample(towers: Towers, *, texts_only: bool) -> float:
    """Of the towers: one forward and, where a tower is trained, a backward that is twice that. What is formed a second
    time (--chunk-size, --grad-checkpointing) does not count, nor does the loss."""
    device, size, channels = towers.logit_scale.device, towers.preprocessing.size, towers.preprocessing.channels
    image = torch.zeros(1, channels, size, size, device=device)
    tokens = towers.tokenizer(["a"]).to(device)
    was_training, was_fast = towers.training, torch.backends.mha.get_fastpath_enabled()
    towers.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # whose operators are not counted
    with FlopCounterMode(display=False) as of_image:
        towers.encode_image(image)
    with FlopCounterMode(display=False) as of_text:
        towers.encode_text(tokens)
    torch.backends.mha.set_fastpath_enabled(was_fast)
    towers.train(was_training)
    images = 0 if texts_only else 1 if towers.image_is_locked else 3
    return float(images * of_image.get_total_flops() + (6 if texts_only else 3) * of_text.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """By the GPU's data sheet. None where it is not among those of `megabatch plan`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = [gpu for gpu in GPUS.values() if gpu.name.removesuffix("-80").replace("-", " ") in name]
    return (found[0].tf32 if precision == "fp32" else found[0].half) if found else None


def peak_mib(device: torch.device) -> float:
    """The most memory that there was at a time: of the device's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
