"""The ring: every rank's packed block passes the others, and what they add up for its owner comes home.

Letters: n ranks; t the step, at which the block of rank - t is here; reach the last step: n - 1, or n // 2 where every
pair of ranks need meet on one side only.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .ranks import Ranks, Transfer

BLOCKS, SUMS = 1, 2  # tags: one for every kind of message
ALIGNMENT = 64


@dataclass(frozen=True)
class Packing:
    """Tensors of known dtypes and shapes in one piece of memory: one message. Both ends know it from the handshake."""

    contents: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        spans, end = [], 0
        for dtype, shape in self.contents:
            size = prod(shape) * dtype.itemsize
            spans.append((end, end + size))
            end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        return spans

    @property
    def nbytes(self) -> int:
        return self._spans[-1][1] if self.contents else 0

    def unpack(self, memory: Tensor) -> list[Tensor]:
        """The tensors, as views of `memory`."""
        pieces = (memory[start:end] for start, end in self._spans)
        return [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, self.contents, strict=True)]

    def pack(self, tensors: Iterable[Tensor], memory: Tensor) -> None:
        for inside, tensor in zip(self.unpack(memory), tensors, strict=True):
            inside.copy_(tensor)


class Step(NamedTuple):
    """What is here at one step: the owner's packed block, and memory for what is added up for it.

    Both are None for this rank's own block. It comes twice: while the first block is received, and as `is_last`, while
    the last sums are.
    """

    owner: int
    block: Tensor | None = None
    sums: Tensor | None = None
    is_last: bool = False


@dataclass
class RingPass:
    """One pass of all blocks.

    Attributes:
        reach: How many other ranks' blocks come by.
        own: This rank's packed block, at the beginning of memory that holds any rank's.
        sizes: Bytes of every rank's block.
        sum_sizes: Bytes of what is added up for every rank; 0 where nothing is.
        merge: (owner, into, other): combine what two ranks have added up for the owner.
        receive_sums: Called with what others have added up for this rank.
        overlap: Blocks are sent while others are computed on. Otherwise every transfer is waited for.
        gather: Every block comes straight from its owner, all at once, and sums go straight home.
    """

    ranks: Ranks
    reach: int
    own: Tensor
    sizes: list[int]
    sum_sizes: list[int]
    merge: Callable[[int, Tensor, Tensor], None]
    receive_sums: Callable[[Tensor], None]
    overlap: bool = True
    gather: bool = False

    def steps(self) -> Iterator[Step]:
        """Every step, the first and the last with the own block. What is in `sums` when the next is asked for is sent
        to its owner."""
        self.ranks.connect()
        return self._gathered() if self.gather else self._ring()

    def _ring(self) -> Iterator[Step]:
        """From neighbour to neighbour: two blocks are here at a time, the one in use and the one being received."""
        blocks = [self.own, torch.empty_like(self.own)]
        sums = [self._memory(max(self.sum_sizes)) for _ in range(min(2, self.reach))]
        partial = self._memory(max(self.sum_sizes))
        receiving, adding = Transfer(self.ranks), Transfer(self.ranks)
        for step in range(self.reach + 1):
            self._at(step)
            receiving.wait()
            owner, following = self.owner_at(step), self.owner_at(step + 1)
            here = blocks[step % 2][: self.sizes[owner]]
            if step < self.reach:
                receiving = self._start((1, here), (-1, blocks[(step + 1) % 2][: self.sizes[following]]), BLOCKS)
            if step == 0:
                yield Step(owner)
                continue
            mine = sums[step % len(sums)][: self.sum_sizes[owner]]
            yield Step(owner, here, mine)
            adding.wait()
            if step > 1 and len(mine):
                self.merge(owner, mine, partial[: len(mine)])
            if step < self.reach:
                adding = self._start((1, mine), (-1, partial[: self.sum_sizes[following]]), SUMS)
            else:
                home = partial[: self.sum_sizes[self.ranks.rank]]
                adding = self._start((-step, mine), (step, home), SUMS)
                yield Step(self.ranks.rank, is_last=True)
                adding.wait()
                self.receive_sums(home)

    def _gathered(self) -> Iterator[Step]:
        steps = range(1, self.reach + 1)
        self._at(0)
        own = self.own[: self.sizes[self.ranks.rank]]
        blocks = [self._memory(self.sizes[self.owner_at(step)]) for step in steps]
        receiving = [
            self._start((step, own), (-step, block), BLOCKS) for step, block in zip(steps, blocks, strict=True)
        ]
        yield Step(self.ranks.rank)
        adding = []
        for step, block in zip(steps, blocks, strict=True):
            self._at(step)
            receiving[step - 1].wait()
            owner = self.owner_at(step)
            mine = self._memory(self.sum_sizes[owner])
            yield Step(owner, block, mine)
            home = self._memory(self.sum_sizes[self.ranks.rank])
            adding.append((self._start((-step, mine), (step, home), SUMS), home))
        yield Step(self.ranks.rank, is_last=True)
        for transfer, home in adding:
            transfer.wait()
            self.receive_sums(home)

    def owner_at(self, step: int) -> int:
        """Whose block is here at a step."""
        return (self.ranks.rank - step) % self.ranks.size

    def _start(self, send: tuple[int, Tensor], receive: tuple[int, Tensor], tag: int) -> Transfer:
        """Send to, and receive from, the ranks that many places further on."""
        (to, sent), (source, received) = send, receive
        transfer = self.ranks.transfer(self.owner_at(-to), sent, self.owner_at(-source), received, tag)
        if not self.overlap:
            transfer.wait()
        return transfer

    def _at(self, step: int) -> None:
        self.ranks.where = f"step {step} of {self.reach} of the {self.ranks.phase} pass"

    def _memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.own.device)
