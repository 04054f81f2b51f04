"""Memory for tiles.

Fresh pages are expensive: at small batches they would cost a step more than its arithmetic. On the CPU every thread
keeps the buffers of its last calls until `empty_cache`, each of 16 MiB at most; larger memory is taken in huge pages
and given back. Accelerators have caching allocators of their own.
"""

import contextlib
import mmap
import threading

import torch
from torch import Tensor

LARGEST_CACHED = 16 * 2**20  # bytes
SMALLEST_HUGE = 8 * 2**20

_cached: dict[tuple[int, str, torch.dtype], Tensor] = {}  # by thread, name and dtype


def buffer(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """At least `size` elements of undefined content, the caller's until this thread asks for the same name again."""
    if device.type != "cpu" or size * dtype.itemsize > LARGEST_CACHED:
        return allocate(size, dtype, device)
    key = threading.get_ident(), name, dtype
    found = _cached.get(key)
    if found is None or found.numel() < size:
        found = _cached[key] = allocate(size, dtype, device)
    return found


class Buffers:
    """The scratch memory of one call, by name."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        size = shape[0] * shape[1]
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = buffer(name, size, dtype or self.dtype, self.device)
        return shaped(self._buffers[name], shape)


def shaped(memory: Tensor, shape: tuple[int, int]) -> Tensor:
    """The beginning of a buffer as a matrix."""
    return memory.as_strided(shape, (shape[1], 1))


def allocate(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of undefined content."""
    with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
        if device.type != "cpu" or size * dtype.itemsize < SMALLEST_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(size, dtype=dtype, device=device)
        pages = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype)


def empty_cache() -> None:
    """Release the buffers that the losses keep between calls on the CPU: those of all threads.

    Each thread that has called a loss keeps up to seven buffers of at most 16 MiB for each dtype. Running
    calls are not affected.
    """
    _cached.clear()
