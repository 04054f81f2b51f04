"""Chunks on their way from host memory to an accelerator: the next one is copied while this one computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .nested import map_leaves, tensors_of


class Transfer:
    """Moves tensors to a device; None: nowhere.

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

    def fetch(self, index: int, pieces: Callable[[int], Any], last: int) -> Any:
        """The pieces of a chunk, and a start with those of the next one, up to the last."""
        if self._stream is None:
            return pieces(index)
        moved, copied = self._ahead.pop(index, None) or self._start(pieces(index))
        now = self._module.current_stream(self._device)
        now.wait_event(copied)
        for tensor in tensors_of(moved):
            if tensor.device.type != "cpu":
                tensor.record_stream(now)  # so that its memory is not given away while it is used
        self._ahead = {index + 1: self._start(pieces(index + 1))} if index < last else {}
        return moved

    def _start(self, pieces: Any) -> tuple[Any, Any]:
        with self._module.stream(self._stream):
            moved = map_leaves(pieces, lambda leaf, *_: self._from_host(leaf), "")
            return moved, self._stream.record_event()

    def _from_host(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.requires_grad:
            return leaf
        return (leaf if leaf.is_pinned() else leaf.pin_memory()).to(self._device, non_blocking=True)

    def move(self, tensor: Tensor) -> Tensor:
        if self._device is None or tensor.device == self._device:
            return tensor
        return tensor.to(self._device, non_blocking=tensor.device.type == "cpu")
