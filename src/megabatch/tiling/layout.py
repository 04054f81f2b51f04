"""Layout: who holds which rows. The blocks of this rank, those of the others, and the tiles where they cross.

On both sides all ranks' rows of one input come in rank order, and those of the next input after them. Where a block
begins is arithmetic on the numbers of rows that the ranks have exchanged.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..distributed.ring import Packing, RingPass
from ..losses.block import Block, Tile
from ..losses.spec import Spec
from ..losses.state import State
from .guards import Norms
from .handshake import RankInfo
from .options import LossInputs, compute_dtype

Members = dict[str, Any]  # of a Block, by name: tensors, and a State


class Layout:
    """The rows and columns of a call on all ranks.

    Attributes:
        rows, columns: The blocks of this rank; of a symmetric loss, the same list.
        reach: How many other ranks' columns come by. Of a symmetric loss half are enough.
        gathers: Columns are exchanged all at once, not from neighbour to neighbour.
    """

    def __init__(
        self,
        inputs: LossInputs,
        spec: Spec,
        norms: Norms,
        ranks: Ranks,
        infos: Sequence[RankInfo],
        *,
        overlap: bool = True,
        gathers: bool = False,
    ) -> None:
        self.spec, self.ranks, self.infos = spec, ranks, infos
        self.overlap, self.gathers = overlap, gathers
        self.shift = 0.0  # of the states of remote columns
        self.row_inputs: tuple[int, ...] = (0, 1) if spec.symmetric else (0,)
        self.column_inputs = (0, 1) if spec.symmetric else (1, 2)
        self._row_offsets, self._column_offsets = self._offsets(self.row_inputs), self._offsets(self.column_inputs)
        self.dtype, self.device, self.width = compute_dtype(inputs.rows), inputs.rows.device, inputs.rows.shape[1]
        self.normalized = norms.inverse[0] is not None
        self.reach = ranks.size // 2 if spec.symmetric else ranks.size - 1
        self.rows, self.columns = self._own_blocks(inputs, norms)

    def _offsets(self, which: tuple[int, ...]) -> dict[int, list[int]]:
        """By input: where every rank's rows begin."""
        offsets, start = {}, 0
        for index in which:
            *offsets[index], start = accumulate((info.rows[index] for info in self.infos), initial=start)
        return offsets

    def _own_blocks(self, inputs: LossInputs, norms: Norms) -> tuple[list[Block], list[Block]]:
        ids = (inputs.row_ids, inputs.row_ids if self.spec.symmetric else inputs.column_ids, inputs.negative_ids)

        def block(index: int, offsets: dict[int, list[int]], **targets: Any) -> Block:
            features, own_ids = inputs.features[index], ids[index]
            assert features is not None
            return Block(
                features,
                offsets[index][self.ranks.rank],
                None if own_ids is None else own_ids.long().contiguous(),
                inverse_norm=norms.inverse[index],
                max_norm=norms.largest[index],
                **targets,
            )

        rows, columns = self._row_offsets, self._column_offsets
        first = columns[self.column_inputs[0]][self.ranks.rank]
        if self.spec.symmetric and inputs.columns is None:
            own = [block(0, rows)]
            return own, own
        if self.spec.symmetric:
            own = [block(0, rows, target_offset=rows[1][self.ranks.rank]), block(1, rows, target_offset=first)]
            return own, own
        targets: Members = {"target_offset": first}
        if inputs.positives is not None:
            targets = {"targets": inputs.positives.long() + first}
        others = [block(index, columns) for index in self.column_inputs if inputs.features[index] is not None]
        return [block(0, rows, **targets)], others

    # ---- who holds what

    @property
    def num_columns(self) -> int:
        """Of all ranks."""
        return sum(info.rows[index] for info in self.infos for index in self.column_inputs)

    def remote_lengths(self) -> list[int]:
        """Of the blocks of columns that come by."""
        owners = ((self.ranks.rank - step) % self.ranks.size for step in range(1, self.reach + 1))
        return [self.infos[owner].rows[index] for owner in owners for index in self.column_inputs]

    def all_need(self, which: tuple[int, ...]) -> bool:
        """Whether every row of these inputs, on every rank, gets a gradient."""
        return all(info.needs[index] or not info.rows[index] for info in self.infos for index in which)

    def feature_blocks(self) -> list[Block]:
        """In the order of the inputs."""
        return self.rows if self.spec.symmetric else self.rows + self.columns

    # ---- the walk over tiles

    def strips(
        self, height: int, width: int, brought: tuple[str, ...] = (), collected: str = ""
    ) -> Iterator[list[Tile]]:
        """The only loop over tiles, by strips of rows: half of those with the own columns, those with the columns of
        every other rank, and the other half.

        Args:
            brought: Names of members of a Block that travel with columns, beside the features.
            collected: Name of the member that other ranks add up for columns: "state", "grad", or "" for none.
        """
        rows, columns = self._own_strips(height, width)
        own = self._own_tiles(rows, columns)
        if self.ranks.size == 1:
            yield from own
            return
        remote = _RemoteColumns(self, ("features", "ids", "inverse_norm", *brought), collected)
        for step in remote.ring_pass().steps():
            if step.block is None:
                yield from own if step.is_last else islice(own, -(-len(rows) // 2))
            else:
                blocks = remote.unpack(step.owner, step.block, step.sums)
                yield from cross(*self._shared_strips(step.owner, rows, blocks, width))

    def _own_tiles(self, rows: list[Block], columns: list[Block]) -> Iterator[list[Tile]]:
        yield from cross(rows, columns, self.spec.symmetric)
        for strip in rows + columns:
            strip.finish_grad()

    def _own_strips(self, height: int, width: int) -> tuple[list[Block], list[Block]]:
        """Of a symmetric loss on an even number of ranks, no strip crosses the middle of its block: see below."""
        halve = self.spec.symmetric and self.ranks.size % 2 == 0
        blocks = [half for block in self.rows for half in _split_in_two(block)] if halve else self.rows
        rows = [strip for block in blocks for strip in block.strips(height)]
        if self.spec.symmetric:
            return rows, rows
        return rows, [strip for block in self.columns for strip in block.strips(width)]

    def _shared_strips(
        self, owner: int, rows: list[Block], columns: list[Block], width: int
    ) -> tuple[list[Block], list[Block]]:
        """This rank's part of what lies between it and another. Opposite ranks of a symmetric loss meet twice: the
        lower one takes all its rows and the first half of the columns, the other the second half of its rows."""
        if self.spec.symmetric and 2 * abs(self.ranks.rank - owner) == self.ranks.size:
            if self.ranks.rank < owner:
                columns = [_split_in_two(block)[0] for block in columns]
            else:
                ends = [(block.offset + len(block) // 2, block.offset + len(block)) for block in self.rows]
                rows = [strip for strip in rows if any(start <= strip.offset < end for start, end in ends)]
        return rows, [strip for block in columns for strip in block.strips(width)]


def cross(rows: list[Block], columns: list[Block], symmetric: bool = False) -> Iterator[list[Tile]]:
    """The tiles of every strip of rows; of a symmetric loss, the upper triangle."""
    for index, strip in enumerate(rows):
        yield [Tile(strip, column, column is strip) for column in (columns[index:] if symmetric else columns)]


def _split_in_two(block: Block) -> tuple[Block, Block]:
    middle = len(block) // 2
    return block.slice(0, middle), block.slice(middle, len(block))


class _RemoteColumns:
    """Columns of other ranks as blocks, from the bytes they travel in and back."""

    def __init__(self, layout: Layout, brought: tuple[str, ...], collected: str) -> None:
        self.layout, self.infos = layout, layout.infos
        self.brought, self.collected = brought, (collected,) if collected else ()
        self.home = [block for block in layout.columns if len(block)]
        self.state_names = layout.columns[0].state.names
        self.packings = [self._packing(rank, self.brought) for rank in range(len(self.infos))]
        self.sums = [self._packing(rank, self.collected) for rank in range(len(self.infos))]

    def ring_pass(self) -> RingPass:
        layout, rank = self.layout, self.layout.ranks.rank
        members = (getattr(block, name) for block in self.home for name in self.brought)
        tensors = (value.table if isinstance(value, State) else value for value in members if value is not None)
        sizes, sum_sizes = ([packing.nbytes for packing in packings] for packings in (self.packings, self.sums))
        own = torch.empty(max(sizes), dtype=torch.uint8, device=layout.device)
        self.packings[rank].pack(tensors, own)
        return RingPass(
            layout.ranks,
            layout.reach,
            own,
            sizes,
            sum_sizes,
            merge=self._merge,
            receive_sums=self._receive,
            overlap=layout.overlap,
            gather=layout.gathers,
        )

    def unpack(self, owner: int, packed: Tensor, sums: Tensor | None) -> list[Block]:
        """The owner's blocks, with nothing added up for them so far."""
        assert sums is not None
        blocks = []
        read = self._members(owner, self.brought, self.packings[owner].unpack(packed))
        added = self._members(owner, self.collected, self.sums[owner].unpack(sums))
        for index, members, zeros in zip(self._inputs(owner), read, added, strict=True):
            for value in zeros.values():
                value.reset(self.layout.shift) if isinstance(value, State) else value.zero_()
            offset = self.layout._column_offsets[index][owner]
            blocks.append(Block(offset=offset, max_norm=self.infos[owner].max_norms[index], **members, **zeros))
        return blocks

    def _merge(self, owner: int, into: Tensor, other: Tensor) -> None:
        packing = self.sums[owner]
        for one, another in zip(
            *(self._members(owner, self.collected, packing.unpack(memory)) for memory in (into, other)), strict=True
        ):
            _add(one, another)

    def _receive(self, sums: Tensor) -> None:
        rank = self.layout.ranks.rank
        for block, added in zip(
            self.home, self._members(rank, self.collected, self.sums[rank].unpack(sums)), strict=True
        ):
            _add(vars(block), added)

    # ---- what is in a packed block

    def _inputs(self, rank: int) -> list[int]:
        return [index for index in self.layout.column_inputs if self.infos[rank].rows[index]]

    def _members(self, rank: int, names: tuple[str, ...], tensors: list[Tensor]) -> list[Members]:
        """Of every block of a rank."""
        rest = iter(tensors)
        members: list[Members] = [
            {name: next(rest) for name in self._shapes(rank, index, names)} for index in self._inputs(rank)
        ]
        for found in members:
            if "state" in found:
                found["state"] = State(self.state_names, found["state"])
        return members

    def _packing(self, rank: int, names: tuple[str, ...]) -> Packing:
        return Packing(
            tuple(kind for index in self._inputs(rank) for kind in self._shapes(rank, index, names).values())
        )

    def _shapes(self, rank: int, index: int, names: tuple[str, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of those members that a block of a rank has."""
        info, layout = self.infos[rank], self.layout
        length = info.rows[index]
        shapes: dict[str, tuple[bool, torch.dtype, tuple[int, ...]]] = {
            "features": (True, getattr(torch, info.dtypes[index] or "float32"), (length, layout.width)),
            "ids": (info.ids[index], torch.int64, (length,)),
            "inverse_norm": (layout.normalized, layout.dtype, (length,)),
            "state": (True, torch.float64, (len(self.state_names), length)),
            "row_grad": (True, torch.float64, (length,)),
            "grad": (info.needs[index], layout.dtype, (length, layout.width)),
        }
        return {name: shapes[name][1:] for name in names if shapes[name][0]}


def _add(into: Members, other: Members) -> None:
    for name, value in other.items():
        if isinstance(value, State):
            into[name].merge({field: value[field] for field in value.names})
        else:
            into[name].add_(value)
