"""One argument of an encoder: whether and where it is cut, and what of it belongs to a chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .nested import Names

Transform = Callable[[Any], Any]
Counts = Tensor | Sequence[int] | str | None  # of rows per sample; "offsets": the argument holds them, added up

OFFSETS = "offsets"


@dataclass
class Argument:
    """A leaf of the arguments.

    Attributes:
        path: How one would write it, for errors.
        names: All words that mean it.
        split: Cut along dim 0; otherwise passed whole.
        offsets: Of samples whose rows are packed: sample i has the rows from offsets[i] to offsets[i + 1].
        rebased: Holds such offsets itself, which count from the first row of a chunk.
        trimmed: Cut along dim 1 as well, to the longest row of the chunk.
        transform: Applied to every chunk of it, on the encoder's device.
    """

    path: str
    names: Names
    value: Any
    split: bool = False
    offsets: list[int] | None = None
    rebased: bool = False
    trimmed: bool = False
    transform: Transform | None = None

    @property
    def rows(self) -> int:
        return len(self.value) - 1 if self.rebased else len(self.offsets or self.value) - (self.offsets is not None)

    def slice(self, start: int, stop: int) -> slice:
        return slice(start, stop) if self.offsets is None else slice(self.offsets[start], self.offsets[stop])

    def piece(self, start: int, stop: int) -> Any:
        if self.rebased:
            return self.value[start : stop + 1] - self.value[start]
        return self.value[self.slice(start, stop)] if self.split else self.value

    def reorder(self, order: list[int]) -> None:
        """Samples in another order."""
        if self.rebased:
            counts = (self.value[1:] - self.value[:-1])[order]
            self.value = torch.cat([self.value[:1], self.value[:1] + counts.cumsum(0)]).to(self.value.dtype)
        elif self.split and isinstance(self.value, list | tuple):
            self.value = type(self.value)([self.value[i] for i in order])
        elif self.split and self.offsets is None:
            self.value = self.value[order]
        elif self.split:
            bounds = [self.slice(i, i + 1) for i in order]
            self.value = torch.cat([self.value[bound] for bound in bounds])
            self.offsets = [0, *accumulate(bound.stop - bound.start for bound in bounds)]


def pack(argument: Argument, counts: Counts) -> None:
    """Samples of several rows each."""
    if counts is None:
        return
    if not isinstance(argument.value, Tensor) or (isinstance(counts, str) and counts != OFFSETS):
        raise ValueError(
            f"chunked: {argument.path} must be a tensor, packed by a count of rows per sample or by {OFFSETS!r}, got "
            f"{described(argument.value)} and {counts!r}."
        )
    if isinstance(counts, str):
        argument.rebased = True
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
