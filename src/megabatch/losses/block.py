"""Block and Tile: rows of one side of the logits with all that belongs to them, and where two blocks cross."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .spec import Spec
from .state import State

_EMPTY_STATE = State((), torch.empty(0, 0))


@dataclass
class Block:
    """Rows of one side. Every tensor has one entry per row; `row_grad` and `grad` come with the gradients.

    Attributes:
        features: `[n, D]`, as the caller gave them.
        offset: Index of the first row among all rows of its side, on all ranks.
        ids: Integers; rows of equal ids are the same thing.
        target_offset: Index, on the other side, of the first row's positive; those of the next rows follow it.
        targets: Index of every row's positive where they do not follow each other.
        inverse_norm: 1 / length of every row, where rows are normalised.
        state: Statistics of the logits so far.
        state_is_empty: They are those of no columns.
        row_grad: d loss / d (loss of this row), up to a factor common to all rows. None: 1.
        inverse_sum, float_max: 1 / sum_exp and max of the state in the dtype of logits, if they were made for all rows
            at once.
        grad: `[n, D]`: d loss / d (scale * features), up to that factor, summed so far.
        grad_is_empty: Nothing was summed yet, and the content of `grad` is undefined.
    """

    features: Tensor
    offset: int
    ids: Tensor | None = None
    target_offset: int | None = None
    targets: Tensor | None = None
    inverse_norm: Tensor | None = None
    state: State = _EMPTY_STATE
    state_is_empty: bool = False
    row_grad: Tensor | None = None
    inverse_sum: Tensor | None = None
    float_max: Tensor | None = None
    grad: Tensor | None = None
    grad_is_empty: bool = False

    def __len__(self) -> int:
        return self.features.shape[0]

    def slice(self, start: int, stop: int) -> "Block":
        """Rows start to stop, as views."""
        if (start, stop) == (0, len(self)):
            return self
        members = {member.name: getattr(self, member.name) for member in fields(self)}
        views: dict[str, Any] = {name: x[start:stop] for name, x in members.items() if isinstance(x, Tensor)}
        if self.target_offset is not None:
            views["target_offset"] = self.target_offset + start
        return replace(self, offset=self.offset + start, state=self.state.slice(start, stop), **views)

    def strips(self, height: int) -> list["Block"]:
        return [self.slice(start, min(start + height, len(self))) for start in range(0, len(self), height)]

    def new_grad(self, memory: Tensor) -> None:
        self.grad, self.grad_is_empty = memory.view(self.features.shape), True

    def merge(self, piece: Mapping[str, Tensor]) -> None:
        """Add statistics of more columns to the state."""
        self.state.merge(piece, is_first=self.state_is_empty)
        self.state_is_empty = False

    def finish_grad(self) -> None:
        """Zero where nothing was summed."""
        if self.grad is not None and self.grad_is_empty:
            self.grad.zero_()
            self.grad_is_empty = False

    @cached_property
    def row_grads(self) -> Tensor:
        """One for every row."""
        return self.state.table.new_ones(len(self)) if self.row_grad is None else self.row_grad

    @cached_property
    def probability_factor(self) -> Tensor:
        """row_grad / sum_exp: turns exp(logit - max) into row_grad * probability."""
        inverse = self.state["sum_exp"].reciprocal() if self.inverse_sum is None else self.inverse_sum
        factor = inverse if self.row_grad is None else inverse * self.row_grad
        return factor if self.features.dtype == torch.float64 else factor.float()

    @cached_property
    def positive_share(self) -> Tensor:
        """row_grad, divided among the row's positives."""
        if "positive_count" not in self.state:
            return self.row_grads
        return self.row_grads / self.state["positive_count"].clamp_min(1)

    @cached_property
    def uniform_share(self) -> Tensor:
        """row_grad, divided among all columns that count, for label smoothing."""
        return self.row_grads / self.state["logit_count"].clamp_min(1)


class ConsecutiveTargets:
    """Positives of consecutive rows in consecutive columns of a tile: one of its diagonals."""

    def __init__(self, offset: int, rows: slice, columns: slice) -> None:
        self._offset = offset
        self._spans = {"rows": rows, "columns": columns}

    def of(self, values: Tensor) -> Tensor:
        """The values at the positives."""
        return values.diagonal(self._offset)

    def put(self, values: Tensor, new: Tensor | bool) -> None:
        """Write `new` where the positives are."""
        self.of(values)[:] = new

    def add(self, values: Tensor, amount: Tensor | float) -> None:
        self.of(values).add_(amount)

    def of_side(self, side: str, vector: Tensor) -> Tensor:
        """For every positive, the entry of its row, or of its column."""
        return vector[self._spans[side]]

    def add_to_side(self, side: str, vector: Tensor, amount: Tensor | float) -> None:
        self.of_side(side, vector).add_(amount)


class IndexedTargets:
    """Positives anywhere: for every row a column, and whether it lies in this tile. The host reads nothing."""

    def __init__(self, column: Tensor, num_columns: int) -> None:
        self._here = (column >= 0) & (column < num_columns)
        self._column = column.clamp(0, num_columns - 1)[:, None]

    def of(self, values: Tensor) -> Tensor:
        return values.gather(1, self._column)[:, 0]

    def put(self, values: Tensor, new: Tensor | bool) -> None:
        new = torch.where(self._here, new, self.of(values)).to(values.dtype)
        values.scatter_(1, self._column, new[:, None])

    def add(self, values: Tensor, amount: Tensor | float) -> None:
        self.put(values, self.of(values) + amount)

    def of_side(self, side: str, vector: Tensor) -> Tensor:
        return vector if side == "rows" else vector[self._column[:, 0]]

    def add_to_side(self, side: str, vector: Tensor, amount: Tensor | float) -> None:
        amount = torch.where(self._here, amount, 0.0).to(vector.dtype)
        vector.add_(amount) if side == "rows" else vector.index_add_(0, self._column[:, 0], amount)


@dataclass
class Tile:
    """Where a strip of rows crosses a strip of columns. `is_diagonal`: both are the same rows of a symmetric loss."""

    rows: Block
    columns: Block
    is_diagonal: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def has_column_statistics(self, spec: Spec) -> bool:
        """Whether this tile adds to the softmax statistics of its columns."""
        return spec.column_loss or (spec.symmetric and not self.is_diagonal)

    @cached_property
    def targets(self) -> ConsecutiveTargets | IndexedTargets | None:
        """The positives of its rows that lie in this tile; None where there are none."""
        if self.rows.targets is not None:
            return IndexedTargets(self.rows.targets - self.columns.offset, len(self.columns))
        if self.rows.target_offset is None:
            return None
        first = self.rows.target_offset - self.columns.offset
        start, stop = max(0, -first), min(len(self.rows), len(self.columns) - first)
        if start >= stop:
            return None
        return ConsecutiveTargets(first, slice(start, stop), slice(start + first, stop + first))

    def id_mask(self) -> Tensor | None:
        """The pairs whose ids are equal, apart from targets and self; None where the host sees that there are none."""
        row_ids, column_ids = self.rows.ids, self.columns.ids
        if row_ids is None or column_ids is None:
            return None
        looks = row_ids.device.type == "cpu"  # elsewhere the host would have to wait
        if looks and not torch.isin(row_ids, column_ids).any():
            return None
        mask = row_ids[:, None] == column_ids[None, :]
        if self.targets is not None:
            self.targets.put(mask, False)
        if self.is_diagonal:
            mask.fill_diagonal_(False)
        return None if looks and not mask.any() else mask
