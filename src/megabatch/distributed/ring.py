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
    sizes: list[int],
    sum_sizes: list[int],
    add: Callable[[int, Tensor, Tensor | None], None],
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
        own: This rank's packed block, at the beginning of memory that holds any rank's.
        sizes: Bytes of every rank's block.
        sum_sizes: Bytes of what is added up for every rank; 0 where nothing is.
        add: (owner, sums, into): add what another rank has added up for the owner to what is in memory here or, for
            None, to the owner's own.
        overlap: Blocks are sent while others are computed on. Otherwise every transfer is waited for.
        gather: Every block comes straight from its owner, all at once, and sums go straight home.
    """

    def owner_at(step: int) -> int:
        return (ranks.rank - step) % ranks.size

    def block_at(step: int) -> Tensor:
        return blocks[step % len(blocks)][: sizes[owner_at(step)]]

    def start(hops: int, sent: Tensor, received: Tensor, tag: int) -> Transfer:
        """Send that many places ahead, and receive from as many behind."""
        transfer = ranks.transfer(owner_at(-hops), sent, owner_at(hops), received, tag)
        if not overlap:
            ranks.wait(transfer)
        return transfer

    ranks.connect()
    ahead = reach if gather else 1
    blocks = [own, *(torch.empty_like(own) for _ in range(ahead))]
    sums = [own.new_empty(max(sum_sizes)) for _ in range(min(ahead + 1, reach))]
    partials = [own.new_empty(max(sum_sizes)) for _ in range(ahead)]
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
            receiving.append(start(hops, block_at(started - hops), block_at(started), BLOCKS))
        if step == 0:
            yield None
            continue
        owner = owner_at(step)
        mine = sums[step % len(sums)][: sum_sizes[owner]]
        yield owner, block_at(step), mine
        if adding and not gather:
            transfer, partial = adding.pop()
            ranks.wait(transfer)
            add(owner, partial, mine)
        # On to the next rank, or straight home.
        hops, addressee = (-step, 0) if gather or step == reach else (1, step + 1)
        partial = partials[step % ahead][: sum_sizes[owner_at(addressee)]]
        adding.append((start(hops, mine, partial, SUMS), partial))
    yield None
    for transfer, partial in adding:
        ranks.wait(transfer)
        add(ranks.rank, partial, None)
