"""Who is measured: a step with tiles of one size. And the plain products of the same plane, which are the yardstick."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

import megabatch

from ...backends.backend import Backend
from ..cases import Case, Inputs
from ..loss import contenders
from ..loss.contenders import Step
from ..ring.contenders import WHOLE

OWN, UNDIVIDED = "own", "whole"
TITLES = {OWN: "megabatch, its own choice", UNDIVIDED: "undivided"}
# Of logits, that a tile takes while it is worked on, with its mask.
MATRICES = 3


@dataclass(frozen=True)
class Tiling:
    """How a plane is cut.

    Attributes:
        size: "own": what the plan chooses. "whole": tiles are as large as the block of rows that a process has. Or the
            side of a tile.
        overlap: Over ranks, blocks are sent while tiles are computed.
    """

    size: str
    overlap: bool = True

    @property
    def name(self) -> str:
        return self.size if self.overlap else f"{self.size}, no overlap"

    @property
    def title(self) -> str:
        return TITLES.get(self.size, self.size) + ("" if self.overlap else ", no overlap")

    @property
    def tile(self) -> int | None:
        return {OWN: None, UNDIVIDED: WHOLE}[self.size] if self.size in TITLES else int(self.size)

    def held(self, case: Case, ranks: int) -> int:
        """Bytes that all ranks hold at their peak, about: a tile, or the logits that the default budget keeps."""
        element, local = case.torch_dtype.itemsize, case.rows // ranks
        tile = MATRICES * min(self.tile or 0, local) ** 2 * element
        return ranks * max(tile, min(Backend.default_budget, case.matrix_bytes // ranks))

    def step(self, case: Case, ranks: int) -> Step:
        options: dict[str, Any] = {"normalize": False, "backend": "eager", "tile": self.tile, "group": None}
        if ranks > 1:
            options |= {"group": dist.group.WORLD, "exchange": "ring", "overlap": self.overlap}
        return contenders.step_of(partial(getattr(megabatch, case.kind.function), **options))


def tilings(sizes: Sequence[str], ranks: int) -> list[Tiling]:
    return [Tiling(size, overlap) for size in sizes for overlap in ((True, False) if ranks > 1 else (True,))]


def plain_products(case: Case, ranks: int) -> Step:
    """Those of one rank: its rows meet as many blocks of columns as there are ranks."""
    block = contenders.products(case.with_rows(case.rows // ranks))

    def step(inputs: Inputs) -> None:
        for _ in range(ranks):
            block(inputs)

    return step


def products_held(case: Case, ranks: int) -> int:
    """Bytes of all ranks."""
    return ranks * case.with_rows(case.rows // ranks).matrix_bytes
