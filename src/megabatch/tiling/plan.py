"""Plan: how large the tiles are, how many of them are kept, and in how many walks the job is done.

Letters: r, c height and width of a tile; N, M rows and columns of the plane; D width of the features.
"""

from dataclasses import dataclass
from functools import lru_cache

from ..backends.backend import MIB, Backend
from .call import Call

SMALLEST_SIDE = 16
SMALL_PLANE = 4 * MIB


@dataclass(frozen=True)
class Shape:
    """What the plan must know of a call: rows and columns of the plane by block, those of visiting ranks apart, width,
    bytes of a logit and of what products take, whether features are copied strip by strip and x.y is held beside the
    logits, and who computes it with how many threads."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    visiting: tuple[int, ...]
    width: int
    element: int
    operand: int
    copied: bool
    products: bool
    backend: type[Backend]
    threads: int


@dataclass(frozen=True)
class Plan:
    """How a call is carried out.

    Attributes:
        rows, columns: Height and width of a tile.
        passes: 1 where the forward walk computes the gradients too; 2 where a backward walk does.
        kept: Tiles whose logits are kept: for the backward walk or, in one pass, until their strip is complete.
    """

    rows: int
    columns: int
    passes: int = 2
    kept: int = 0

    def as_numbers(self) -> list[int]:
        """To travel from the forward to the backward in a tensor."""
        return [self.rows, self.columns, self.passes, self.kept]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "Plan":
        return cls(*map(int, numbers))


@lru_cache(maxsize=128)
def make_plan(call: Call, shape: Shape, one_pass: bool) -> Plan:
    """`one_pass`: the forward walk may compute the gradients, if a strip of useful height fits the budget."""
    budget = shape.backend.default_budget if call.memory_budget is None else call.memory_budget
    rows, columns = _sides(call, shape, budget)
    spec = call.spec
    if one_pass and spec.link == "sigmoid":
        return Plan(rows, columns, passes=1, kept=1)
    if one_pass and spec.two_sided:
        whole = rows >= max(shape.rows) and columns >= max(shape.columns)
        tiles = _num_tiles(call, shape, rows, columns)
        memory = tiles * rows * columns * shape.element + working_bytes(call, shape, rows, columns)
        if whole and _small(shape) and memory <= budget:
            return Plan(rows, columns, passes=1, kept=tiles)
    elif one_pass:
        wanted = rows if call.tile is not None else min(rows, shape.backend.useful_height)
        height = _strip_height(call, shape, budget, rows, columns, wanted)
        if height:
            return Plan(height, columns, passes=1, kept=sum(-(-block // columns) for block in shape.columns))
    kept = 0
    if call.memory_budget is not None and any(call.needs):
        spare = budget - working_bytes(call, shape, rows, columns)
        kept = min(spare // (slot_size(rows, columns) * shape.element), _num_tiles(call, shape, rows, columns))
    return Plan(rows, columns, passes=2, kept=kept)


def _strip_height(call: Call, shape: Shape, budget: int, highest: int, columns: int, wanted: int) -> int:
    """Of a strip of rows whose logits are all kept within the budget; 0 where it would be lower than wanted."""
    tiles = sum(-(-block // columns) for block in shape.columns)
    for height in range(highest, wanted - 1, -16):
        if working_bytes(call, shape, height, columns) + tiles * slot_size(height, columns) * shape.element <= budget:
            return height
    return 0


def slot_size(rows: int, columns: int) -> int:
    """Numbers of a tile that is kept, in whole cache lines, and a mark."""
    return -(-rows * columns // 16) * 16 + 1


def working_bytes(call: Call, shape: Shape, rows: int, columns: int) -> int:
    """What is held while one tile is worked on."""
    copies = (rows + columns) * shape.width * shape.element if shape.copied else 0
    if shape.operand != shape.element:  # a product of halves is made before it is added to a gradient
        copies += max(rows, columns) * shape.width * shape.element
    return shape.backend.tile_bytes(call.spec, rows, columns, shape.element, shape.operand, shape.products) + copies


def _sides(call: Call, shape: Shape, budget: int) -> tuple[int, int]:
    longest = max(*shape.rows, 1), max(*shape.columns, *shape.visiting, 1)
    if call.spec.symmetric:
        longest = max(longest), max(longest)
    if call.tile is not None:
        rows, columns = min(call.tile[0], longest[0]), min(call.tile[1], longest[1])
        needed = working_bytes(call, shape, rows, columns)
        if call.memory_budget is not None and needed > budget:
            raise ValueError(
                f"{call.function}: memory_budget must hold one tile, and a tile of {rows} x {columns} needs {needed} "
                f"bytes, got {budget}. Raise it, or pass a smaller tile."
            )
        return rows, columns
    smallest = min(SMALLEST_SIDE, longest[0]), min(SMALLEST_SIDE, longest[1])
    needed = working_bytes(call, shape, *smallest)
    if needed > budget:
        raise ValueError(
            f"{call.function}: memory_budget must be at least {needed} bytes for features of width {shape.width}, "
            f"got {budget}. The default is {shape.backend.default_budget}."
        )
    height, width = (min(side, length) for side, length in zip(_preferred(call, shape), longest, strict=True))
    while working_bytes(call, shape, height, width) > budget:
        if call.spec.symmetric:
            height = width = width // 2
        elif height >= width:
            height //= 2
        else:
            width //= 2
    return _even(longest[0], height), _even(longest[1], width)


def _preferred(call: Call, shape: Shape) -> tuple[int, int]:
    """The sides that ran fastest, as far as the plane reaches."""
    height, side = shape.backend.sides(shape.width, shape.threads)
    longest = max(*shape.rows, *shape.visiting, 1)
    if call.spec.symmetric and _small(shape):
        return longest, longest
    if call.spec.symmetric:
        # A diagonal tile is computed whole though half of it would do: more strips, less waste.
        return (min(side // 2, max(256, _even(longest, -(-sum(shape.rows) // 8)))),) * 2
    return height, side


def _small(shape: Shape) -> bool:
    """Whether a plane is so small that its logits are kept for the moment between fold and push, whatever the loss."""
    return sum(shape.rows) * sum(shape.columns + shape.visiting) * shape.element <= SMALL_PLANE


def _even(length: int, side: int) -> int:
    """Sides of nearly equal strips, none longer than `side`, in whole cache lines where that is possible."""
    side = max(side, 1)
    if length <= side:
        return length
    strips = -(-length // side)
    return min(side, -(-length // strips // 16) * 16)


def _num_tiles(call: Call, shape: Shape, rows: int, columns: int) -> int:
    """At most: where two ranks share what lies between them, each has fewer."""
    across, visiting = (sum(-(-block // columns) for block in side) for side in (shape.columns, shape.visiting))
    down = sum(-(-block // rows) for block in shape.rows)
    return (down * (down + 1) // 2 if call.spec.symmetric else down * across) + down * visiting
