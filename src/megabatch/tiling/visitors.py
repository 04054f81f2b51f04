"""Visitors: columns of other ranks as blocks, from the bytes they travel in and back."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..distributed.parcel import Parcel
from ..distributed.ring import Cargo, Visit, pack
from ..losses.block import Block
from ..losses.state import State
from .meeting import Meeting, Place

Kind = tuple[torch.dtype, tuple[int, ...]]
Members = dict[str, Any]  # of a Block, by name: tensors, and a State


class Visitors:
    """What travels with every rank's columns, and what is added up for them.

    Attributes:
        home: This rank's own columns.
        brought: Names of the Block's members that travel.
        carried: Name of the one that is added up: "state", "grad", or "" for none.
    """

    def __init__(
        self, meeting: Meeting, home: list[Block], compute: torch.dtype, brought: tuple[str, ...], carried: str
    ) -> None:
        self.meeting, self.compute = meeting, compute
        self.brought, self.carried = brought, (carried,) if carried else ()
        self.home = [block for block in home if len(block)]
        self.width, self.device = home[0].features.shape[1], home[0].features.device
        self.state_names = home[0].state.names
        ranks = range(meeting.ranks.size)
        self.places = [[place for place in meeting.column_places[rank] if place.length] for rank in ranks]
        self.parcels = [self._parcel(rank, self.brought) for rank in ranks]
        self.sums = [self._parcel(rank, self.carried) for rank in ranks]

    def cargo(self) -> Cargo:
        members = (getattr(block, name) for block in self.home for name in self.brought)
        tensors = (value.table if isinstance(value, State) else value for value in members if value is not None)
        own = pack(self.meeting.ranks.rank, self.parcels, tensors, self.device)
        sizes, sum_sizes = ([parcel.nbytes for parcel in parcels] for parcels in (self.parcels, self.sums))
        return Cargo(own, sizes, sum_sizes, self._merge, self._take_home)

    def arrive(self, visit: Visit) -> list[Block]:
        """The owner's blocks, with nothing added up for them so far."""
        assert visit.parcel is not None
        assert visit.sums is not None
        blocks = []
        read, added = self._open(visit.owner, visit.parcel), self._open_sums(visit.owner, visit.sums)
        for place, members, sums in zip(self.places[visit.owner], read, added, strict=True):
            for value in sums.values():
                value.clear() if isinstance(value, State) else value.zero_()
            blocks.append(Block(start=place.start, **members, **sums))
        return blocks

    def _merge(self, owner: int, into: Tensor, other: Tensor) -> None:
        for one, another in zip(self._open_sums(owner, into), self._open_sums(owner, other), strict=True):
            _add(one, another)

    def _take_home(self, sums: Tensor) -> None:
        for block, added in zip(self.home, self._open_sums(self.meeting.ranks.rank, sums), strict=True):
            _add(vars(block), added)

    # ---- what is in a parcel

    def _open(self, rank: int, memory: Tensor) -> list[Members]:
        return self._members(rank, self.brought, self.parcels[rank].open(memory))

    def _open_sums(self, rank: int, memory: Tensor) -> list[Members]:
        return self._members(rank, self.carried, self.sums[rank].open(memory))

    def _members(self, rank: int, names: tuple[str, ...], tensors: list[Tensor]) -> list[Members]:
        """Of every block of a rank."""
        rest = iter(tensors)
        members: list[Members] = [
            {name: next(rest) for name, _ in self._kinds(rank, place, names)} for place in self.places[rank]
        ]
        for found in members:
            if "state" in found:
                found["state"] = State(self.state_names, found["state"])
        return members

    def _parcel(self, rank: int, names: tuple[str, ...]) -> Parcel:
        return Parcel(tuple(kind for place in self.places[rank] for _, kind in self._kinds(rank, place, names)))

    def _kinds(self, rank: int, place: Place, names: tuple[str, ...]) -> Iterator[tuple[str, Kind]]:
        """Dtype and shape of those members that a block of a rank has."""
        guest, which, length = self.meeting.guests[rank], place.which, place.length
        kinds: dict[str, tuple[bool, torch.dtype, tuple[int, ...]]] = {
            "features": (True, getattr(torch, guest.dtypes[which]), (length, self.width)),
            "ids": (guest.ids[which], torch.int64, (length,)),
            "inverse_norm": (bool(self.meeting.call.normalize), self.compute, (length,)),
            "state": (True, torch.float64, (len(self.state_names), length)),
            "pull": (True, torch.float64, (length,)),
            "grad": (guest.needs[which], self.compute, (length, self.width)),
        }
        yield from ((name, kinds[name][1:]) for name in names if kinds[name][0])


def _add(into: Members, other: Members) -> None:
    for name, value in other.items():
        if isinstance(value, State):
            into[name].merge({field: value[field] for field in value.names})
        else:
            into[name].add_(value)
