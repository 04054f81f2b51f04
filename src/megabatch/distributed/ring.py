"""The ring: every rank's packed block passes the others, and what they add up for its owner comes home.

Letters: n ranks; t the step, at which the block of rank - t is here; reach the last step: n - 1, or n // 2 where every
pair of ranks need meet on one side only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .ranks import Ranks, Transfer

BLOCKS, SUMS = 1, 2  # tags: one for every kind of message
ALIGNMENT = 64


class Packing:
    """Tensors of known dtypes and shapes in one piece of memory: one message. Both ends know it from the handshake."""

    def __init__(self, contents: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.contents = contents
        self.sizes = [-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for dtype, shape in contents]
        self.nbytes = sum(self.sizes)

    def unpack(self, memory: Tensor) -> list[Tensor]:
        """The tensors, as views of `memory`."""
        pieces = zip(torch.split(memory[: self.nbytes], self.sizes), self.contents, strict=True)
        return [piece.view(dtype)[: prod(shape)].view(shape) for piece, (dtype, shape) in pieces]


class Step(NamedTuple):
    """What is here at one step: the owner's packed block, and memory for what is added up for it."""

    owner: int
    block: Tensor
    sums: Tensor


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

    def steps(self) -> Iterator[Step | None]:
        """Every step. What is in `sums` when the next is asked for is sent to its owner.

        None stands for the own block, which comes twice: while the first block is received, and while the last sums
        are. On a ring two blocks are here at a time, the one in use and the one being received.
        """
        self.ranks.connect()
        ahead = self.reach if self.gather else 1
        blocks = [self.own, *(torch.empty_like(self.own) for _ in range(ahead))]
        sums = [self._memory() for _ in range(min(ahead + 1, self.reach))]
        partials = [self._memory() for _ in range(ahead)]
        receiving: list[Transfer] = []
        adding: list[tuple[Transfer, Tensor]] = []
        started = 0
        for step in range(self.reach + 1):
            self.ranks.where = f"step {step} of {self.reach} of the {self.ranks.phase} pass"
            if step:
                self.ranks.wait(receiving.pop(0))
            while started < min(step + ahead, self.reach):
                started += 1
                hops = started if self.gather else 1
                sent, received = (self._block(blocks, at) for at in (started - hops, started))
                receiving.append(self._start(hops, sent, -hops, received, BLOCKS))
            if step == 0:
                yield None
                continue
            owner = self.owner_at(step)
            mine = sums[step % len(sums)][: self.sum_sizes[owner]]
            yield Step(owner, self._block(blocks, step), mine)
            if adding and not self.gather:
                transfer, partial = adding.pop()
                self.ranks.wait(transfer)
                self.merge(owner, mine, partial)
            goes_home = self.gather or step == self.reach
            to, source, receiver = (-step, step, 0) if goes_home else (1, -1, step + 1)
            partial = partials[step % ahead][: self.sum_sizes[self.owner_at(receiver)]]
            adding.append((self._start(to, mine, source, partial, SUMS), partial))
        yield None
        for transfer, partial in adding:
            self.ranks.wait(transfer)
            self.receive_sums(partial)

    def owner_at(self, step: int) -> int:
        """Whose block is here at a step."""
        return (self.ranks.rank - step) % self.ranks.size

    def _block(self, blocks: list[Tensor], step: int) -> Tensor:
        return blocks[step % len(blocks)][: self.sizes[self.owner_at(step)]]

    def _start(self, to: int, sent: Tensor, source: int, received: Tensor, tag: int) -> Transfer:
        """Send to, and receive from, the ranks that many places further on."""
        transfer = self.ranks.transfer(self.owner_at(-to), sent, self.owner_at(-source), received, tag)
        if not self.overlap:
            self.ranks.wait(transfer)
        return transfer

    def _memory(self) -> Tensor:
        """For the sums of any rank."""
        return self.own.new_empty(max(self.sum_sizes))
