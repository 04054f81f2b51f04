"""Layout: who holds which rows. The blocks of this rank, those of the others, and the tiles where they cross.

On both sides all ranks' rows of one input come in rank order, and those of the next input after them. Where a block
begins is arithmetic on the numbers of rows that the ranks have exchanged.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..distributed.ring import ring_pass
from ..losses.block import Block, Tile
from ..losses.spec import Spec
from ..losses.state import State
from .guards import inverse_norms
from .handshake import GroupInfo
from .options import LossInputs, compute_dtype

ALIGNMENT = 64  # bytes, of a tensor in a message

_TRAVELLING = ("features", "ids", "inverse_norm")  # members of a Block

Members = dict[str, Any]  # tensors of a Block, by name


class Layout:
    """The rows and columns of a call on all ranks.

    Attributes:
        own: The blocks of this rank, in the order of the inputs.
        rows, columns: Of them; of a symmetric loss, all are both. After `gather`, columns are those of all ranks.
        reach: How many other ranks' columns come by. Of a symmetric loss half are enough.
        gathers: Columns are exchanged all at once, not from neighbour to neighbour.
        vectors: What all rows, and then all columns, of all ranks have: see `attach`.
    """

    def __init__(
        self,
        inputs: LossInputs,
        spec: Spec,
        ranks: Ranks,
        info: GroupInfo,
        normalize: bool = False,
        overlap: bool = True,
        gathers: bool = False,
    ) -> None:
        self.spec, self.ranks, self.info = spec, ranks, info
        self.normalize, self.overlap, self.gathers = normalize, overlap, gathers and ranks.size > 1
        self.has_column_statistics = False
        self.vectors: dict[str, Any] = {}
        self._padded_places: dict[int, Tensor | None] = {}
        self.row_inputs: tuple[int, ...] = (0, 1) if spec.symmetric and inputs.columns is not None else (0,)
        self.column_inputs = self.row_inputs if spec.symmetric else (1, 2)
        self._offsets: dict[int, list[int]] = {}  # by input: where every rank's rows begin
        for side in (self.row_inputs, self.column_inputs):
            start = 0
            for index in side:
                *self._offsets[index], start = accumulate(info.rows[index], initial=start)
        self.dtype, self.device, self.width = compute_dtype(inputs.rows), inputs.rows.device, inputs.rows.shape[1]
        self.reach = ranks.size // 2 if spec.symmetric else ranks.size - 1
        self.own = self._own_blocks(inputs)
        self.rows, self.columns = (self.own,) * 2 if spec.symmetric else (self.own[:1], self.own[1:])

    def _own_blocks(self, inputs: LossInputs) -> list[Block]:
        """In the order of the inputs. The positive of a row is that of the same number in the other input, if any."""
        blocks, rank = [], self.ranks.rank
        ids = (inputs.row_ids, inputs.row_ids if self.spec.symmetric else inputs.column_ids, inputs.negative_ids)
        for index, (features, own_ids) in enumerate(zip(inputs.features, ids, strict=True)):
            if features is not None:
                block = Block(features, self._offsets[index][rank])
                block.ids = None if own_ids is None else own_ids.long().contiguous()
                block.inverse_norm = inverse_norms(features) if self.normalize else None
                if index in self.row_inputs and self.spec.has_targets:
                    block.target_offset = self._offsets[1 - index][rank]
                blocks.append(block)
        if inputs.positives is not None:
            blocks[0].targets, blocks[0].target_offset = inputs.positives.long() + self._offsets[1][rank], None
        return blocks

    # ---- who holds what

    def column_lengths(self) -> tuple[list[int], list[int]]:
        """Of the blocks of columns that are here from the beginning, and of those that come by."""
        if self.gathers and not self.spec.symmetric:
            return [self.info.length(index) for index in self.column_inputs], []
        owners = [(self.ranks.rank - step) % self.ranks.size for step in range(1, self.reach + 1)]
        remote = [self.info.rows[index][owner] for owner in owners for index in self.column_inputs]
        return list(map(len, self.columns)), [sum(remote)] if self.gathers else remote

    @cached_property
    def num_losses(self) -> int:
        """Rows that have one, on all ranks."""
        return self.info.length(*self.row_inputs)

    @property
    def overlaps(self) -> bool:
        """Strips of gathered columns are also strips of rows, so that none of them knows whether it is the first."""
        return self.gathers and self.spec.symmetric

    def own_losses(self, losses: Tensor) -> Tensor:
        """Those of this rank's rows."""
        if self.ranks.size == 1:
            return losses
        return torch.cat(
            [losses[block.offset : block.offset + len(block)] for block in self.own[: len(self.row_inputs)]]
        )

    def all_rows(self, numbers: Tensor) -> Tensor:
        """Those of all ranks, from those of this rank's rows that have a loss."""
        parts = torch.split(numbers, [len(self.own[index]) for index in self.row_inputs])
        return torch.cat([self.gather_rows(part, index) for index, part in zip(self.row_inputs, parts, strict=True)])

    def attach(self, **vectors: Any) -> None:
        """Give every block its part of these: members of a Block, for all rows of all ranks and then, where they have
        statistics, all columns. Columns of other ranks get theirs when they come by."""
        self.vectors |= vectors
        for block in self.rows:
            self._attach(block, block.offset)
        for block in self.columns:
            self._attach_to_columns(block)

    def _attach_to_columns(self, block: Block) -> None:
        if self.has_column_statistics:
            self._attach(block, block.offset if self.spec.symmetric else self.num_losses + block.offset)

    def _attach(self, block: Block, start: int) -> None:
        for name, numbers in self.vectors.items():
            stop = start + len(block)
            setattr(block, name, numbers.slice(start, stop) if isinstance(numbers, State) else numbers[start:stop])
        block.state_is_empty = not self.overlaps

    def is_row_only(self, block: Block) -> bool:
        """Its gradient is complete here, where the columns of all ranks were gathered."""
        return not self.spec.symmetric and block is self.own[0]

    # ---- all columns at once

    def gather(self, memory: Tensor | None = None) -> Tensor:
        """Take the columns of all ranks for this rank's: from the `memory` of an earlier gather, if there is one."""
        packed = PackedColumns(self, _TRAVELLING)
        if memory is None:
            memory = self.ranks.all_gather_block(packed.pack()).flatten()
        self.gathered: list[tuple[Block, int]] = []
        for index, members in zip(self.column_inputs, packed.unpack(memory.view(self.ranks.size, -1)), strict=True):
            if members:
                compact: Members = {name: self.compact(x.flatten(0, 1), index) for name, x in members.items()}
                block = Block(offset=self._offsets[index][0], **compact)
                if self.spec.symmetric and self.spec.has_targets:
                    block.target_offset = self._offsets[1 - index][0]
                self.gathered.append((block, index))
        self.columns = [block for block, _ in self.gathered]
        return memory

    def gather_rows(self, vector: Tensor, index: int = 0) -> Tensor:
        """The numbers of all ranks for their rows of an input."""
        if self.ranks.size == 1:
            return vector
        padded = torch.nn.functional.pad(vector, (0, max(self.info.rows[index]) - len(vector)))
        return self.compact(self.ranks.all_gather_block(padded).flatten(), index)

    def compact(self, padded: Tensor, index: int) -> Tensor:
        """Rows of all ranks without what fills them up to one length."""
        places = self._places(index)
        return padded if places is None else padded[places]

    def _places(self, index: int) -> Tensor | None:
        """Of every rank's rows among rows that were filled up; None where all ranks have as many."""
        if index not in self._padded_places:
            lengths = self.info.rows[index]
            inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            places = inside.flatten().nonzero()[:, 0] if len(set(lengths)) > 1 else None
            if places is not None and self.device.type != "cpu":
                places = places.pin_memory().to(self.device, non_blocking=True)  # the host does not wait
            self._padded_places[index] = places
        return self._padded_places[index]

    def send_grads_home(self, numbers: Tensor) -> Tensor:
        """Add up, in rank order, what all ranks have of the gradients of columns, each at its owner. The `numbers` of
        every rank travel with them to all, and are returned by rank."""
        ranks, needing = self.ranks, [(block.grad, index) for block, index in self.gathered if block.grad is not None]
        longest = [max(self.info.rows[index]) for _, index in needing]
        sent = [numbers.view(self.dtype).expand(ranks.size, -1)]
        for (grad, index), length in zip(needing, longest, strict=True):
            if (places := self._places(index)) is not None:
                grad = grad.new_zeros(ranks.size * length, self.width).index_copy_(0, places, grad)
            sent.append(grad.view(ranks.size, -1))
        for block, _ in self.gathered:
            block.grad = None  # which is on its way now
        received = ranks.all_to_all(torch.cat(sent, 1))
        everyones, *parts = torch.split(received, [x.shape[1] for x in sent], 1)
        for (_, index), length, part in zip(needing, longest, parts, strict=True):
            if index < len(self.own) and self.info.needs[index][ranks.rank]:
                self.own[index].grad = part.sum(0).view(length, self.width)[: len(self.own[index])]
        return everyones.contiguous().view(torch.float64)

    # ---- the loop over tiles

    def strips(self, height: int, width: int, collects_grads: bool = False) -> Iterator[list[Tile]]:
        """The only loop over tiles, by strips of rows: half of those with the own columns, those with the columns of
        every other rank, and the other half. `collects_grads`: ranks add up gradients for each other's columns."""
        if self.gathers and self.spec.symmetric:
            rank = self.ranks.rank
            self.rows = [self._part(block, index, rank, rank + 1) for index, block in enumerate(self.columns)]
        rows, columns = self._own_strips(height, width)
        own = self._own_tiles(rows, columns)
        if self.ranks.size == 1 or self.gathers:
            yield from own
            if self.spec.symmetric and self.gathers:
                yield from self._gathered_tiles(rows, width)
            return
        packed, grads = PackedColumns(self, _TRAVELLING), PackedColumns(self, ("grad",) if collects_grads else ())
        parts = iter((islice(own, -(-len(rows) // 2)), own))
        own_block = packed.pack(grads.size)
        for step in ring_pass(self.ranks, self.reach, own_block, packed.size, grads.add, overlap=self.overlap):
            if step is None:
                yield from next(parts)
            else:
                owner, block, sums = step
                remote = self._remote_blocks(owner, packed.unpack(block), grads.unpack(sums.zero_()))
                yield from cross(*self._shared_strips(owner, rows, remote, width))

    def _part(self, block: Block, index: int, first: int, last: int) -> Block:
        """The rows of some ranks in a gathered block."""
        starts = [*self._offsets[index], block.offset + len(block)]
        return block.slice(starts[first] - block.offset, starts[last] - block.offset)

    def _gathered_tiles(self, rows: list[Block], width: int) -> Iterator[list[Tile]]:
        """Of a symmetric loss: those that this rank shares with the ranks before it, up to half of them."""
        rank, size = self.ranks.rank, self.ranks.size
        first = rank - (size - 1) // 2
        for start, stop in ((max(first, 0), rank), (first % size, size if first < 0 else 0)):
            if start < stop:
                parts = [self._part(block, index, start, stop) for index, block in enumerate(self.columns)]
                yield from cross(rows, [strip for part in parts for strip in part.strips(width)])
        if size % 2 == 0:
            owner = (rank - size // 2) % size
            parts = [self._part(block, index, owner, owner + 1) for index, block in enumerate(self.columns)]
            yield from cross(*self._shared_strips(owner, rows, parts, width))

    def _own_tiles(self, rows: list[Block], columns: list[Block]) -> Iterator[list[Tile]]:
        yield from cross(rows, columns, self.spec.symmetric)
        for strip in rows + columns:
            strip.finish_grad()

    def _remote_blocks(self, owner: int, columns: list[Members], grads: list[Members]) -> list[Block]:
        """The columns of another rank, and memory for their gradients."""
        blocks = []
        for index, *members in zip(self.column_inputs, columns, grads, strict=True):
            if length := self.info.rows[index][owner]:
                views = {name: x[:length] for each in members for name, x in each.items()}
                blocks.append(Block(offset=self._offsets[index][owner], **views))
                self._attach_to_columns(blocks[-1])
        return blocks

    def _own_strips(self, height: int, width: int) -> tuple[list[Block], list[Block]]:
        """Of a symmetric loss on an even number of ranks, no strip is in both parts of its rows: see below."""
        blocks = _two_parts(self.rows) if self.spec.symmetric and self.ranks.size % 2 == 0 else self.rows
        rows = [strip for block in blocks for strip in block.strips(height)]
        if self.spec.symmetric:
            return rows, rows
        return rows, [strip for block in self.columns for strip in block.strips(width)]

    def _shared_strips(
        self, owner: int, rows: list[Block], columns: list[Block], width: int
    ) -> tuple[list[Block], list[Block]]:
        """This rank's part of what lies between it and another. Opposite ranks of a symmetric loss meet twice: the
        lower one takes all its rows and the first part of the columns, the other the second part of its rows."""
        if self.spec.symmetric and 2 * abs(self.ranks.rank - owner) == self.ranks.size:
            if self.ranks.rank < owner:
                columns = _two_parts(columns)[:1]
            else:
                rows = [strip for strip in rows if strip.offset >= _two_parts(self.rows)[1].offset]
        return rows, [strip for block in columns for strip in block.strips(width)]


def cross(rows: list[Block], columns: list[Block], symmetric: bool = False) -> Iterator[list[Tile]]:
    """The tiles of every strip of rows; of a symmetric loss, the upper triangle."""
    for index, strip in enumerate(rows):
        yield [Tile(strip, column, column is strip) for column in (columns[index:] if symmetric else columns)]


def _two_parts(blocks: list[Block]) -> list[Block]:
    """The rows of a rank in a symmetric loss: its two inputs, or its only one in two."""
    if len(blocks) != 1:
        return blocks
    (block,), middle = blocks, len(blocks[0]) // 2
    return [block.slice(0, middle), block.slice(middle, len(block))]


class PackedColumns:
    """Some members of a rank's columns, by name, as they travel: in one message, of one size on all ranks. The
    handshake says how many rows of it are used."""

    def __init__(self, layout: Layout, names: tuple[str, ...]) -> None:
        self.layout = layout
        self.members: list[tuple[int, str, torch.dtype, tuple[int, ...], int]] = []  # the last: where it begins
        self.size = 0
        for place, index in enumerate(layout.column_inputs):
            for name in names:
                dtype, shape = self._padded(name, index)
                if prod(shape):
                    self.members.append((place, name, dtype, shape, self.size))
                    self.size += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def _padded(self, name: str, index: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a member, as long as on the rank with the most rows; of no length where no rank has it."""
        layout, info = self.layout, self.layout.info
        longest, width = max(info.rows[index]), layout.width
        if name == "features":
            return info.dtype(index), (longest, width)
        if name == "ids":
            return torch.int64, (longest if any(info.ids[index]) else 0,)
        if name == "inverse_norm":
            return layout.dtype, (longest if layout.normalize else 0,)
        return layout.dtype, (longest if any(info.needs[index]) else 0, width)

    def pack(self, room: int = 0) -> Tensor:
        """Those of this rank, and room for so many bytes behind them."""
        memory = torch.empty(self.size + room, dtype=torch.uint8, device=self.layout.device)
        for block, members in zip(self.layout.columns, self.unpack(memory), strict=False):
            for name, inside in members.items():
                if (value := getattr(block, name)) is not None:
                    inside[: len(block)].copy_(value)
        return memory

    def unpack(self, memory: Tensor) -> list[Members]:
        """By input, as views of the `memory` of one rank or, with one more dimension, of all."""
        found: list[Members] = [{} for _ in self.layout.column_inputs]
        for place, name, dtype, shape, start in self.members:
            part = memory[..., start : start + prod(shape) * dtype.itemsize].view(dtype)
            found[place][name] = part.view(*memory.shape[:-1], *shape)
        return found

    def add(self, sums: Tensor, into: Tensor | None) -> None:
        """To what is in other memory or, for None, to the columns of this rank."""
        for block, found in zip(self.layout.columns, self.unpack(sums), strict=False):
            if into is None and block.grad is not None:
                block.grad.add_(found["grad"][: len(block)])
        if into is not None and len(into):
            into.view(self.layout.dtype).add_(sums.view(self.layout.dtype))
