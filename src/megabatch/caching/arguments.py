"""One argument of an encoder: whether and where it is split, and what of it belongs to a chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .containers import HALF_PRECISION, Name

Transform = Callable[[Any], Any]
Counts = Tensor | Sequence[int] | str | None  # rows per sample; "offsets": the argument holds their cumulative sum

OFFSETS = "offsets"


@dataclass
class Argument:
    """A leaf of the arguments.

    Attributes:
        split: Split along dim 0; otherwise passed whole.
        offsets: For packed tensors: sample i has the rows from offsets[i] to offsets[i + 1].
        cumulative: Holds such offsets itself (cu_seqlens), which start at 0 in every chunk.
        trimmed: Cut along dim 1 to the longest row of the chunk.
    """

    path: str
    names: frozenset[Name]
    value: Any
    split: bool = False
    offsets: list[int] | None = None
    cumulative: bool = False
    trimmed: bool = False
    transform: Transform | None = None

    @property
    def rows(self) -> int:
        if self.offsets is not None:
            return len(self.offsets) - 1
        return len(self.value) - self.cumulative

    @property
    def can_be_padded(self) -> bool:
        return isinstance(self.value, Tensor) and self.offsets is None and not self.cumulative

    def reorder(self, order: list[int]) -> None:
        if self.cumulative:
            counts = self.value.diff()[order]
            self.value = torch.cat([self.value[:1], self.value[0] + counts.cumsum(0, dtype=counts.dtype)])
        elif isinstance(self.value, list | tuple):
            self.value = type(self.value)(self.value[i] for i in order)
        elif self.offsets is None:
            self.value = self.value[order]
        else:
            packed = [range(*self.offsets[i : i + 2]) for i in order]
            self.value = self.value[[row for rows in packed for row in rows]]
            self.offsets = [0, *accumulate(map(len, packed))]

    def pieces(self, sizes: Sequence[int]) -> list[Any]:
        """For chunks of so many rows, as views where possible."""
        ends = [0, *accumulate(sizes)]
        if not self.split:
            # Gradients of all chunks are summed in float32.
            wide = isinstance(self.value, Tensor) and self.value.dtype in HALF_PRECISION and self.value.requires_grad
            return [self.value.float() if wide else self.value] * len(sizes)
        if self.cumulative:
            return [self.value[start : stop + 1] - self.value[start] for start, stop in pairwise(ends)]
        if self.offsets is not None:
            ends = [self.offsets[end] for end in ends]
        if isinstance(self.value, Tensor):
            return list(torch.split(self.value, [stop - start for start, stop in pairwise(ends)]))
        return [self.value[start:stop] for start, stop in pairwise(ends)]


def pack(argument: Argument, counts: Tensor | Sequence[int] | str) -> None:
    """Let samples have several rows each."""
    if not isinstance(argument.value, Tensor) or (isinstance(counts, str) and counts != OFFSETS):
        raise ValueError(
            f"chunked: {argument.path} must be a tensor, packed by a count of rows per sample or by {OFFSETS!r}, got "
            f"{described(argument.value)} and {counts!r}."
        )
    if isinstance(counts, str):
        argument.cumulative = True
        return
    argument.offsets = [0, *accumulate(counts.tolist() if isinstance(counts, Tensor) else counts)]
    if argument.offsets[-1] != len(argument.value):
        raise ValueError(
            f"chunked: the counts of {argument.path} in split must add up to its {len(argument.value)} rows, got "
            f"{argument.offsets[-1]}."
        )


def listed(words: Sequence[str], most: int = 8) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
