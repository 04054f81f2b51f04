"""Plan: how large the tiles are, how many of them are kept, and whether the forward computes the gradients too.

Letters: r, c height and width of a tile; N, M rows and columns of the logits; D width of the features.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..backends.backend import MIB, Backend
from .options import LossOptions

SMALLEST_SIDE = 16
SMALL_LOGITS = 4 * MIB
SMALLEST_SHARE_KEPT = 1 / 8  # of the tiles: fewer would cost memory and save nothing to speak of


@dataclass(frozen=True)
class Sizes:
    """What the plan must know of a call.

    Attributes:
        rows, columns, remote: Lengths of the blocks of rows, of columns, and of columns of other ranks.
        width: Of the features.
        element, operand: Bytes of a logit, and of what products multiply.
        copied: Features are converted or normalised strip by strip.
        sum_for_scale: x.y is held beside the logits.
        threads: Of the CPU; 0 on an accelerator.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    remote: tuple[int, ...]
    width: int
    element: int
    operand: int
    copied: bool
    sum_for_scale: bool
    backend: type[Backend]
    threads: int


class Plan(NamedTuple):
    """How a call is carried out.

    Attributes:
        rows, columns: Height and width of a tile.
        one_pass: The forward computes the gradients too.
        kept: Number of tiles whose logits are kept: for the backward or, in one pass, until their strip is complete.
    """

    rows: int
    columns: int
    one_pass: bool = False
    kept: int = 0

    @property
    def slot_size(self) -> int:
        """Elements of a tile that is kept, in whole cache lines."""
        return -(-self.rows * self.columns // 16) * 16


@lru_cache(maxsize=128)
def make_plan(options: LossOptions, sizes: Sizes, may_be_one_pass: bool) -> Plan:
    """`may_be_one_pass`: the forward may compute the gradients, if a strip of useful height fits the budget."""
    budget = sizes.backend.default_budget if options.memory_budget is None else options.memory_budget
    rows, columns = _sides(options, sizes, budget)
    spec = options.spec
    if may_be_one_pass and spec.epilogue == "sigmoid":
        return Plan(rows, columns, one_pass=True, kept=1)
    if may_be_one_pass and not spec.two_sided:
        lowest = rows if options.tile is not None else min(rows, sizes.backend.useful_height)
        tiles = sum(-(-block // columns) for block in sizes.columns)
        for height in range(rows, lowest - 1, -16):
            kept = tiles * Plan(height, columns).slot_size * sizes.element
            if working_bytes(options, sizes, height, columns) + kept <= budget:
                return Plan(height, columns, one_pass=True, kept=tiles)
    spare = budget - working_bytes(options, sizes, rows, columns)
    tiles = _num_tiles(options, sizes, rows, columns)
    kept = min(spare // (Plan(rows, columns).slot_size * sizes.element), tiles)
    worthwhile = any(options.needs) and kept >= tiles * SMALLEST_SHARE_KEPT
    return Plan(rows, columns, kept=kept if worthwhile else 0)


def working_bytes(options: LossOptions, sizes: Sizes, rows: int, columns: int) -> int:
    """Memory for the work on one tile."""
    copies = (rows + columns) * sizes.width * sizes.element if sizes.copied else 0
    if sizes.operand != sizes.element:  # a product of bf16/fp16 is computed before it is added to a gradient
        copies += max(rows, columns) * sizes.width * sizes.element
    tile_bytes = sizes.backend.tile_bytes
    return tile_bytes(options.spec, rows, columns, sizes.element, sizes.operand, sizes.sum_for_scale) + copies


def _sides(options: LossOptions, sizes: Sizes, budget: int) -> tuple[int, int]:
    longest = max(*sizes.rows, 1), max(*sizes.columns, *sizes.remote, 1)
    if options.spec.symmetric:
        longest = max(longest), max(longest)
    if options.tile is not None:
        rows, columns = min(options.tile[0], longest[0]), min(options.tile[1], longest[1])
        needed = working_bytes(options, sizes, rows, columns)
        if options.memory_budget is not None and needed > budget:
            raise ValueError(
                f"{options.function}: memory_budget must hold one tile, and a tile of {rows} x {columns} needs "
                f"{needed} bytes, got {budget}. Raise it, or pass a smaller tile."
            )
        return rows, columns
    needed = working_bytes(options, sizes, min(SMALLEST_SIDE, longest[0]), min(SMALLEST_SIDE, longest[1]))
    if needed > budget:
        raise ValueError(
            f"{options.function}: memory_budget must be at least {needed} bytes for features of width {sizes.width}, "
            f"got {budget}. The default is {sizes.backend.default_budget}."
        )
    height, width = (min(side, length) for side, length in zip(_preferred(options, sizes), longest, strict=True))
    while working_bytes(options, sizes, height, width) > budget:
        if options.spec.symmetric:
            height = width = width // 2
        elif height >= width:
            height //= 2
        else:
            width //= 2
    return _even(longest[0], height), _even(longest[1], width)


def _preferred(options: LossOptions, sizes: Sizes) -> tuple[int, int]:
    """The sides that run fastest, if the logits are that large."""
    height, side = sizes.backend.tile_sides(sizes.width, sizes.threads)
    if not options.spec.symmetric:
        return height, side
    longest = max(*sizes.rows, *sizes.remote, 1)
    if sum(sizes.rows) * sum(sizes.columns + sizes.remote) * sizes.element <= SMALL_LOGITS:
        return longest, longest
    # A diagonal tile is computed whole though half of it would do: more strips, less waste.
    return (min(side // 2, max(256, _even(longest, -(-sum(sizes.rows) // 8)))),) * 2


def _even(length: int, side: int) -> int:
    """The side of nearly equal strips, none longer than `side`, in whole cache lines where that is possible."""
    side = max(side, 1)
    if length <= side:
        return length
    strips = -(-length // side)
    return min(side, -(-length // strips // 16) * 16)


def _num_tiles(options: LossOptions, sizes: Sizes, rows: int, columns: int) -> int:
    """At most: where two ranks share what lies between them, each has fewer."""
    across, remote = (sum(-(-block // columns) for block in side) for side in (sizes.columns, sizes.remote))
    down = sum(-(-block // rows) for block in sizes.rows)
    return (down * (down + 1) // 2 if options.spec.symmetric else down * across) + down * remote
