"""Block and Tile: rows of one side of the plane with all that belongs to them, and where two blocks cross."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from .spec import Spec
from .state import State

_NOTHING = torch.empty(0)


@dataclass
class Block:
    """Rows of one side. Every tensor has one entry per row; `pull` and `grad` come with the gradients.

    Attributes:
        features: `[n, D]`, as the caller gave them.
        start: Index of the first row among all rows of its side.
        ids: Equal ids mean the same thing. Integers.
        target: Index, on the other side, of each row's positive.
        targets_within: Bounds of `target` known without looking: (lowest, highest + 1).
        inverse_norm: What every row is multiplied by, in the features' own width: 1 / its length.
        state: What the rows have met so far.
        pull: d loss / d (loss of this row), up to a factor common to all rows.
        grad: `[n, D]` float32: d loss / d (scale * features), up to that factor, summed so far.
    """

    features: Tensor
    start: int
    ids: Tensor | None = None
    target: Tensor | None = None
    targets_within: tuple[int, int] | None = None
    inverse_norm: Tensor | None = None
    state: State = field(default_factory=State.of_nothing)
    pull: Tensor = _NOTHING
    grad: Tensor | None = None

    def __len__(self) -> int:
        return self.features.shape[0]

    def cut(self, start: int, stop: int) -> "Block":
        """Rows start to stop, as views."""
        within = self.targets_within
        if within is not None and within[1] - within[0] == len(self):  # consecutive targets stay so when cut
            within = (within[0] + start, within[0] + stop)
        values = ((member.name, getattr(self, member.name)) for member in fields(self))
        views = {name: value[start:stop] for name, value in values if isinstance(value, Tensor)}
        state = self.state.cut(start, stop)
        return replace(self, start=self.start + start, targets_within=within, state=state, **views)

    def strips(self, height: int) -> list["Block"]:
        if height >= len(self):
            return [self]
        return [self.cut(start, min(start + height, len(self))) for start in range(0, len(self), height)]

    def of(self, values: Tensor) -> Tensor:
        """These rows' part of something that covers the whole side."""
        return values[self.start : self.start + len(self)]

    @cached_property
    def log_sum_exp_range(self) -> tuple[float, float]:
        """Smallest and largest, looked up once per strip: it decides which form of the slope is safe."""
        low, high = (self.state["shift"] + self.state["total"].log()).aminmax()
        return low.item(), high.item()


@dataclass
class Tile:
    """Where a strip of rows crosses a strip of columns. `diagonal`: both are the same rows of a symmetric plane."""

    rows: Block
    columns: Block
    diagonal: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def folds_columns(self, spec: Spec) -> bool:
        """Whether this tile is added to the statistics of its columns, of a loss over distributions."""
        return spec.columns or (spec.symmetric and not self.diagonal)

    @property
    def may_hold_targets(self) -> bool:
        """False where surely no row's target is in this tile."""
        within, start, stop = self.rows.targets_within, self.columns.start, self.columns.start + len(self.columns)
        return self.rows.target is not None and not (within is not None and (within[1] <= start or stop <= within[0]))

    @cached_property
    def targets(self) -> tuple[Tensor, Tensor] | None:
        """For every row, (column of its target within this tile, whether it is here); None where surely none is."""
        if self.rows.target is None or not self.may_hold_targets:
            return None
        column = self.rows.target - self.columns.start
        here = (column >= 0) & (column < len(self.columns))
        return column.clamp_(0, len(self.columns) - 1), here

    def same(self) -> Tensor | None:
        """Mask of the pairs whose ids are equal, without the targets; None where there are none."""
        row_ids, column_ids = self.rows.ids, self.columns.ids
        if row_ids is None or column_ids is None or not torch.isin(row_ids, column_ids).any():
            return None
        mask = row_ids[:, None] == column_ids[None, :]
        if self.targets is not None:
            column, here = self.targets
            mask.scatter_(1, column[:, None], (mask.gather(1, column[:, None]) & ~here[:, None]))
        if self.diagonal:
            mask.fill_diagonal_(False)
        return mask if bool(mask.any()) else None
