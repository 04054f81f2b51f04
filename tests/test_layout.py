"""Who holds which rows: on any number of ranks, every pair of a row and a column is in exactly one tile."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabatch.losses import spec as specs
from megabatch.losses.block import Block
from megabatch.losses.spec import Spec
from megabatch.tiling.handshake import GroupInfo, RankInfo
from megabatch.tiling.layout import Layout, cross
from megabatch.tiling.options import LossInputs

ROWS = [5, 0, 3, 8, 1, 6]
NEGATIVES = [2, 4, 0, 1, 0, 3]


def layouts(spec: Spec, num_ranks: int, negatives: bool) -> list[Layout]:
    """Of every rank, as if they had exchanged what they hold."""
    infos = [
        RankInfo((rows, rows, extra if negatives else 0), (torch.float32,) * 3, (False,) * 3, (1.0,) * 3)
        for rows, extra in zip(ROWS[:num_ranks], NEGATIVES, strict=False)
    ]
    together, found = GroupInfo.decode([info.encode() for info in infos]), []
    for rank, info in enumerate(infos):
        rows, columns, extra = (torch.zeros(length, 2) for length in info.rows)
        inputs = LossInputs(rows, columns, extra if negatives else None)
        ranks: Any = SimpleNamespace(rank=rank, size=num_ranks)
        found.append(Layout(inputs, spec, ranks, together))
    return found


def pairs(rows: list[Block], columns: list[Block], symmetric: bool = False) -> list[tuple[int, int]]:
    """Of a symmetric loss a pair and its mirror image are one, and the diagonal of a tile has no pair."""
    found = []
    for tile in (tile for strip in cross(rows, columns, symmetric) for tile in strip):
        rows, columns = (range(block.offset, block.offset + len(block)) for block in (tile.rows, tile.columns))
        found += [(i, j) for i in rows for j in columns if not tile.is_diagonal or i < j]
    return found


def all_pairs(spec: Spec, num_ranks: int, height: int, width: int, negatives: bool) -> list[tuple[int, int]]:
    found = []
    everyones = layouts(spec, num_ranks, negatives)
    for rank, layout in enumerate(everyones):
        rows, columns = layout._own_strips(height, width)
        found += pairs(rows, columns, spec.symmetric)
        for step in range(1, layout.reach + 1):
            owner = (rank - step) % num_ranks
            found += pairs(*layout._shared_strips(owner, rows, everyones[owner].columns, width))
    return [(min(pair), max(pair)) for pair in found] if spec.symmetric else found


@pytest.mark.parametrize("negatives", [False, True])
@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("tile", [(2, 3), (4, 4), (100, 100)], ids=str)
def test_every_pair_is_in_one_tile_of_one_rank(num_ranks: int, tile: tuple[int, int], negatives: bool) -> None:
    rows = sum(ROWS[:num_ranks])
    columns = rows + (sum(NEGATIVES[:num_ranks]) if negatives else 0)
    found = all_pairs(specs.info_nce("ignore", 0.0), num_ranks, *tile, negatives)
    assert sorted(found) == [(i, j) for i in range(rows) for j in range(columns)]


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("side", [2, 3, 100])
def test_every_pair_of_a_symmetric_loss_is_in_one_tile_of_one_rank(num_ranks: int, side: int) -> None:
    rows = 2 * sum(ROWS[:num_ranks])
    found = all_pairs(specs.nt_xent("ignore", 0.0), num_ranks, side, side, False)
    assert sorted(found) == [(i, j) for i in range(rows) for j in range(i + 1, rows)]


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_targets_are_the_rows_of_the_same_pair(num_ranks: int) -> None:
    """Views of all ranks come first, then their other views."""
    total = sum(ROWS[:num_ranks])
    for layout in layouts(specs.nt_xent("ignore", 0.0), num_ranks, False):
        first, second = layout.rows
        assert (first.target_offset, second.target_offset) == (second.offset, first.offset)
        assert second.offset == first.offset + total
    for layout in layouts(specs.clip("ignore", 0.0), num_ranks, False):
        assert layout.rows[0].target_offset == layout.columns[0].offset
