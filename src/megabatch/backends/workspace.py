"""Memory for tiles that outlives a call.

Fresh pages are dear: at small batches they would cost a step more than its arithmetic. On the CPU every thread keeps
the buffers of its last calls; accelerators have allocators that do the same.
"""

import threading

import torch
from torch import Tensor

LARGEST_KEPT = 16 * 2**20  # bytes: larger buffers belong to calls that are long enough to pay for them

_local = threading.local()


def borrow(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """At least `size` elements of undefined content, the caller's until this thread borrows the same name again."""
    shelf: dict[tuple[str, torch.dtype], Tensor] = _local.__dict__.setdefault("shelf", {})
    buffer = shelf.get((name, dtype)) if device.type == "cpu" else None
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
            buffer = torch.empty(size, dtype=dtype, device=device)
        if device.type == "cpu" and size * dtype.itemsize <= LARGEST_KEPT:
            shelf[name, dtype] = buffer
    return buffer


def release() -> None:
    """Give this thread's buffers back."""
    _local.__dict__.pop("shelf", None)
