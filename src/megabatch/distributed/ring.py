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
    sum_size: int,
    add: Callable[[int, Tensor, Tensor | None], None],
    *,
    overlap: bool = True,
) -> Iterator[tuple[int, Tensor, Tensor] | None]:
    """The packed block of one rank after another: its owner, the block, and memory for what is added up for it, which
    is sent to the owner when the next is asked for.

    None stands for the own block, which comes twice: while the first block is received, and while the last sums are.
    On a ring two blocks are here at a time, the one in use and the one being received.

    Args:
        reach: How many other ranks' blocks come by: at step t that of rank - t. All, or half of them where every pair
            of ranks need meet on one side only.
        own: This rank's packed block: bytes, as many on all ranks.
        sum_size: Bytes of what is added up for a rank; 0 where nothing is.
        add: (owner, sums, into): add what another rank has added up for the owner to what is in memory here or, for
            None, to the owner's own.
        overlap: Blocks are sent while others are computed on. Otherwise every transfer is waited for.
    """

    def start(hops: int, sent: Tensor, received: Tensor, tag: int) -> Transfer:
        """Send that many places ahead, and receive from as many behind."""
        to, source = (ranks.rank + hops) % ranks.size, (ranks.rank - hops) % ranks.size
        transfer = ranks.transfer(to, sent, source, received, tag)
        if not overlap:
            ranks.wait(transfer)
        return transfer

    blocks, sums = [own, torch.empty_like(own)], [own.new_empty(sum_size) for _ in range(min(2, reach))]
    partial = own.new_empty(sum_size)
    receiving: Transfer = []
    adding: Transfer = []
    for step in range(reach + 1):
        ranks.where = f"step {step} of {reach} of the {ranks.phase} pass"
        ranks.wait(receiving)
        if step < reach:
            receiving = start(1, blocks[step % 2], blocks[(step + 1) % 2], BLOCKS)
        if step == 0:
            yield None
            continue
        owner, mine = (ranks.rank - step) % ranks.size, sums[step % len(sums)]
        yield owner, blocks[step % 2], mine
        if step > 1:
            ranks.wait(adding)
            add(owner, partial, mine)
        adding = start(1 if step < reach else -step, mine, partial, SUMS)
    yield None
    ranks.wait(adding)
    add(ranks.rank, partial, None)
