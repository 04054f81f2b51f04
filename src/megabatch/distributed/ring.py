"""The ring: every rank's parcel visits the others, and what they add up for its owner comes home.

Letters: n ranks; t the step, at which the parcel of rank - t is here; reach the last step: n - 1, or n // 2 where two
ranks need meet on one side only.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .collectives import Ranks, Transfer
from .parcel import Parcel

PARCELS, SUMS = 1, 2  # tags: one for every kind of message


@dataclass
class Cargo:
    """What goes round, in bytes.

    Attributes:
        own: This rank's parcel, at the beginning of memory that holds any rank's.
        sizes: Of every rank's parcel.
        sum_sizes: Of what is added up for every rank; 0 where nothing is.
        merge: (owner, into, other): bring together what two ranks have added up for the owner.
        take_home: Called with what others have added up for this rank.
    """

    own: Tensor
    sizes: list[int]
    sum_sizes: list[int]
    merge: Callable[[int, Tensor, Tensor], None]
    take_home: Callable[[Tensor], None]


def pack(rank: int, parcels: list[Parcel], tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A rank's tensors as its parcel, in memory that holds any rank's."""
    memory = torch.empty(max(parcel.nbytes for parcel in parcels), dtype=torch.uint8, device=device)
    parcels[rank].pack(tensors, memory)
    return memory


def owner_at(step: int, rank: int, size: int) -> int:
    """Whose parcel is here at a step."""
    return (rank - step) % size


class Visit(NamedTuple):
    """What is here at one step: the owner's parcel, and memory for what is added up for it. Neither at home.

    One is at home twice: while the first parcel is on its way here, and `again`, while the last sums are on their way
    home.
    """

    owner: int
    parcel: Tensor | None = None
    sums: Tensor | None = None
    again: bool = False


@dataclass
class Turn:
    """One turn.

    Attributes:
        reach: How many other ranks come by.
        overlap: Parcels travel while others are worked on. Otherwise every transfer is waited for.
        gather: Every parcel comes straight from its owner, all at once, and sums go straight home: all parcels are
            held, and no rank waits for what its neighbour must do first.
    """

    ranks: Ranks
    reach: int
    overlap: bool = True
    gather: bool = False

    def visits(self, cargo: Cargo) -> Iterator[Visit]:
        """Every visit, the first and the last at home. What is in `sums` when the next visit is asked for goes home."""
        self.ranks.begin()
        return self._straight(cargo) if self.gather else self._round(cargo)

    def _round(self, cargo: Cargo) -> Iterator[Visit]:
        """From neighbour to neighbour: two parcels are here at a time, the one worked on and the one that comes."""
        sizes, sum_sizes = cargo.sizes, cargo.sum_sizes
        parcels = [cargo.own, torch.empty_like(cargo.own)]
        sums = [_memory(max(sum_sizes), cargo) for _ in range(min(2, self.reach))]
        partial = _memory(max(sum_sizes), cargo)
        coming, carried = Transfer(self.ranks), Transfer(self.ranks)
        for step in range(self.reach + 1):
            self._at(step)
            coming.wait()
            owner, following = self._owner(step), self._owner(step + 1)
            here = parcels[step % 2][: sizes[owner]]
            if step < self.reach:
                coming = self._begin((1, here), (-1, parcels[(step + 1) % 2][: sizes[following]]), PARCELS)
            if step == 0:
                yield Visit(owner)
                continue
            mine = sums[step % len(sums)][: sum_sizes[owner]]
            yield Visit(owner, here, mine)
            carried.wait()
            if step > 1 and len(mine):
                cargo.merge(owner, mine, partial[: len(mine)])
            if step < self.reach:
                carried = self._begin((1, mine), (-1, partial[: sum_sizes[following]]), SUMS)
            else:
                home = partial[: sum_sizes[self.ranks.rank]]
                carried = self._begin((-step, mine), (step, home), SUMS)
                yield Visit(self.ranks.rank, again=True)
                carried.wait()
                cargo.take_home(home)

    def _straight(self, cargo: Cargo) -> Iterator[Visit]:
        steps = range(1, self.reach + 1)
        self._at(0)
        own = cargo.own[: cargo.sizes[self.ranks.rank]]
        parcels = [_memory(cargo.sizes[self._owner(step)], cargo) for step in steps]
        coming = [
            self._begin((step, own), (-step, parcel), PARCELS) for step, parcel in zip(steps, parcels, strict=True)
        ]
        yield Visit(self.ranks.rank)
        homecoming = []
        for step, parcel in zip(steps, parcels, strict=True):
            self._at(step)
            coming[step - 1].wait()
            owner = self._owner(step)
            mine = _memory(cargo.sum_sizes[owner], cargo)
            yield Visit(owner, parcel, mine)
            home = _memory(cargo.sum_sizes[self.ranks.rank], cargo)
            homecoming.append((self._begin((-step, mine), (step, home), SUMS), home))
        yield Visit(self.ranks.rank, again=True)
        for transfer, home in homecoming:
            transfer.wait()
            cargo.take_home(home)

    def _begin(self, send: tuple[int, Tensor], receive: tuple[int, Tensor], tag: int) -> Transfer:
        """Begin to send to, and to receive from, the ranks that many places further."""
        (to, sent), (source, received) = send, receive
        transfer = self.ranks.transfer(self._owner(-to), sent, self._owner(-source), received, tag)
        if not self.overlap:
            transfer.wait()
        return transfer

    def _owner(self, step: int) -> int:
        return owner_at(step, self.ranks.rank, self.ranks.size)

    def _at(self, step: int) -> None:
        self.ranks.place = f"step {step} of {self.reach} of the {self.ranks.turn} turn"


def _memory(size: int, cargo: Cargo) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=cargo.own.device)
