"""Parcel: tensors of known shapes in one piece of memory, so that whatever travels together is one message."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64


@dataclass(frozen=True)
class Parcel:
    """What is inside, in order: dtype and shape of every tensor. Both ends derive it from what was agreed on."""

    contents: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        places, end = [], 0
        for dtype, shape in self.contents:
            size = prod(shape) * dtype.itemsize
            places.append((end, end + size))
            end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        return places

    @property
    def nbytes(self) -> int:
        return self._places[-1][1] if self.contents else 0

    def open(self, memory: Tensor) -> list[Tensor]:
        """The tensors, as views of `memory`."""
        pieces = (memory[start:end] for start, end in self._places)
        return [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, self.contents, strict=True)]

    def pack(self, tensors: Iterable[Tensor], memory: Tensor) -> None:
        for inside, tensor in zip(self.open(memory), tensors, strict=True):
            inside.copy_(tensor)
