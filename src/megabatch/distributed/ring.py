"""The ring: every rank's packed block passes the others, and what they add up for its owner comes home."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .ranks import Ranks, Transfer

BLOCKS, SUMS = 1, 2  # tags: one for every kind of message


def ring_pass(
    ranks: Ranks,
    reach: int,
    own: Tensor,
    size: int,
    add: Callable[[Tensor, Tensor | None], None],
    *,
    overlap: bool = True,
) -> Iterator[tuple[int, Tensor, Tensor] | None]:
    """The packed block of one rank after another: its owner, the block, and memory for what is added up for it.

    What a rank adds up follows its block one step behind, in one message with the next block, and goes home at the end.
    None stands for the own block, which comes twice: while the first block is received, and while the last sums are.
    Two blocks are here at a time, the one in use and the one being received.

    Args:
        reach: How many other ranks' blocks come by: at step t that of rank - t. All, or half of them where every pair
            of ranks need be computed on one side only.
        own: This rank's packed block and, after its `size`, room for what is added up for a rank: bytes, as many on all
            ranks.
        add: (sums, into): add what was added up for a rank to what is in memory here or, for None, to this rank's own.
        overlap: Blocks are sent while others are computed on. Otherwise every transfer is waited for.
    """

    def start(hops: int, sent: Tensor, received: Tensor, tag: int) -> Transfer:
        """Send that many places ahead, and receive from as many behind."""
        to, source = (ranks.rank + hops) % ranks.size, (ranks.rank - hops) % ranks.size
        transfer = ranks.transfer(to, sent, source, received, tag)
        if not overlap:
            ranks.wait(transfer)
        return transfer

    buffers, mine = [own, torch.empty_like(own)], torch.empty_like(own[size:])
    moving: Transfer = []
    for step in range(reach + 1):
        ranks.where = f"step {step} of {reach} of the {ranks.phase} pass"
        ranks.wait(moving)
        here, other = buffers[step % 2], buffers[(step + 1) % 2]
        if step == 2:  # for the block of the last step, of which no other rank has had anything before
            here[size:].copy_(mine)
        elif step > 2:
            add(mine, here[size:])
        if step < reach:
            used = size if step < 2 else len(own)
            moving = start(1, here[:used], other[:used], BLOCKS)
        elif reach > 1:
            moving = start(1, here[size:], other[size:], SUMS)
        if step == 0:
            yield None
        else:
            yield (ranks.rank - step) % ranks.size, here[:size], mine
    if reach > 1:
        ranks.wait(moving)
        add(other[size:], mine)
    moving = start(-reach, mine, here[size:], SUMS)
    yield None
    ranks.wait(moving)
    add(here[size:], None)
