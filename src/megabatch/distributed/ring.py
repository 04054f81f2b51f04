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
    gather: bool = False,
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
        gather: Every block comes straight from its owner, all at once, and sums go straight home.
    """

    def start(hops: int, sent: Tensor, received: Tensor, tag: int) -> Transfer:
        """Send that many places ahead, and receive from as many behind."""
        to, source = (ranks.rank + hops) % ranks.size, (ranks.rank - hops) % ranks.size
        transfer = ranks.transfer(to, sent, source, received, tag)
        if not overlap:
            ranks.wait(transfer)
        return transfer

    ahead = reach if gather else 1
    blocks = [own, *(torch.empty_like(own) for _ in range(ahead))]
    sums = [own.new_empty(sum_size) for _ in range(min(ahead + 1, reach))]
    partials = [own.new_empty(sum_size) for _ in range(ahead)]
    receiving: list[Transfer] = []
    adding: list[tuple[Transfer, Tensor]] = []
    started = 0
    for step in range(reach + 1):
        ranks.where = f"step {step} of {reach} of the {ranks.phase} pass"
        if step:
            ranks.wait(receiving.pop(0))
        while started < min(step + ahead, reach):
            started += 1
            hops = started if gather else 1
            sent, received = blocks[(started - hops) % len(blocks)], blocks[started % len(blocks)]
            receiving.append(start(hops, sent, received, BLOCKS))
        if step == 0:
            yield None
            continue
        owner, mine, partial = (ranks.rank - step) % ranks.size, sums[step % len(sums)], partials[step % ahead]
        yield owner, blocks[step % len(blocks)], mine
        if adding and not gather:
            ranks.wait(adding.pop()[0])
            add(owner, partial, mine)
        goes_home = gather or step == reach
        adding.append((start(-step if goes_home else 1, mine, partial, SUMS), partial))
    yield None
    for transfer, partial in adding:
        ranks.wait(transfer)
        add(ranks.rank, partial, None)
