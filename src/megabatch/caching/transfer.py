"""Chunks on their way from host memory to an accelerator: the next one is copied while this one computes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .containers import map_tensors, tensors_of


class Transfer:
    """Moves tensors to a device. With None, they stay where they are.

    Copies run on a stream of their own, where the device has streams, and from pinned memory, without which the host
    would wait for them.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._module: Any = None
        if device is not None and device.type not in ("cpu", "meta"):
            self._module = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device) if hasattr(self._module, "Stream") else None
        self._ahead: dict[int, Any] = {}

    def fetch(self, chunks: Sequence[Any], index: int, following: int) -> Any:
        """A chunk on the device. A copy of the following one is started."""
        if self._stream is None:
            return chunks[index]
        moved, copied = self._ahead.pop(index, None) or self._start(chunks[index])
        now = self._module.current_stream(self._device)
        now.wait_event(copied)
        for tensor in tensors_of(moved):
            if tensor.device.type != "cpu":
                tensor.record_stream(now)  # so that its memory is not reused while it is read
        exists = 0 <= following < len(chunks)
        self._ahead = {following: self._start(chunks[following])} if exists else {}
        return moved

    def _start(self, chunk: Any) -> tuple[Any, Any]:
        with self._module.stream(self._stream):
            return map_tensors(self._from_host, chunk), self._stream.record_event()

    def _from_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or tensor.requires_grad:
            return tensor
        return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self._device, non_blocking=True)

    def move(self, tensor: Tensor) -> Tensor:
        if self._device is None or tensor.device == self._device:
            return tensor
        return tensor.to(self._device, non_blocking=tensor.device.type == "cpu")
