"""The walk over the tiles of the plane: the only loop."""

from collections.abc import Iterator

from ..losses.block import Block, Tile
from .plan import Plan


def strips_of(blocks: list[Block], height: int) -> list[Block]:
    return [strip for block in blocks if len(block) for strip in block.strips(height)]


def walk(plan: Plan, rows: list[Block], columns: list[Block], symmetric: bool) -> Iterator[list[Tile]]:
    """Yield the tiles, one strip of rows after the other. Of a symmetric plane, the upper triangle."""
    row_strips = strips_of(rows, plan.rows)
    column_strips = row_strips if symmetric else strips_of(columns, plan.columns)
    for index, strip in enumerate(row_strips):
        first = index if symmetric else 0
        yield [Tile(strip, column, diagonal=column is strip) for column in column_strips[first:]]
