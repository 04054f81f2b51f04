"""The eager backend: tiles in plain torch, on any device.

One product makes S in a buffer that all tiles share; a link's epilogue works on it in place; two more products add G
to the gradients of its rows and of its columns. A tile then costs what its products cost, as long as nothing is
allocated.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..losses.block import Tile
from ..losses.spec import Spec
from .backend import MIB, Backend, Kept, multiply, products_of_halves, shaped
from .links import link_of


class Eager(Backend):
    """What is kept of a tile is exp(S - mark), or S itself where the mark is NaN."""

    name = "eager"
    default_budget = 48 * MIB
    useful_height = 128

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scale_sum = 0.0
        self.bias_sum = 0.0
        self._link = link_of(self.spec, self.stats)

    @staticmethod
    def suits(device: torch.device) -> bool:
        return True

    @staticmethod
    def reasons_against(device: torch.device, dtype: torch.dtype) -> list[str]:
        return []

    @staticmethod
    def multiplies_halves(device: torch.device, normalize: bool) -> bool:
        return device.type != "cpu" and not normalize and products_of_halves(device)

    @staticmethod
    def sides(width: int, threads: int) -> tuple[int, int]:
        side = 2048 if width >= 128 else 512
        return (side // 2 if threads > 1 else side // 4), side

    @staticmethod
    def tile_bytes(spec: Spec, rows: int, columns: int, element: int, operand: int, products: bool) -> int:
        masked = spec.same != "ignore" or spec.smoothing > 0
        floats = 2 + products + (1 if masked else 0)
        rounded = operand if operand != element else 0  # the slope
        return rows * columns * (floats * element + rounded + (3 if masked else 0))

    def fold(self, tile: Tile, kept: Kept | None = None) -> None:
        logits = self._logits(tile, kept)
        scratch = self._buffer("scratch", tile.shape)
        shift = self._link.fold(tile, logits, scratch, again=lambda: self._logits(tile, kept))
        if kept is not None:
            kept.mark = shift

    def push(self, tile: Tile, kept: Kept | None = None, last: bool = False) -> None:
        if kept is None:
            logits, shift = self._logits(tile, None), math.nan
        else:
            logits, shift = shaped(kept.buffer, tile.shape), kept.mark
        fresh = kept is None
        scratch = self._buffer("scratch", tile.shape)
        out = logits if fresh or last else self._buffer("logits", tile.shape)
        slope = self._link.slope(tile, logits, scratch, shift, fresh, out)
        if self.spec.link == "sigmoid":
            self.bias_sum += slope.sum(1).sum(dtype=torch.float64).item()
        if self.sums_slopes:
            products = self._buffer("products", tile.shape) if fresh else self._multiply_features(tile, scratch)
            total = products.mul_(slope).sum(1).sum(dtype=torch.float64).item()
            # A diagonal tile's slope is that of both halves of the plane, and both halves are in it.
            self.scale_sum += total / 2 if tile.diagonal else total
        if self.lift != 1:
            slope.mul_(self.lift)
        self._add_to_gradients(tile, slope.to(self.product))

    def scores(self, tile: Tile) -> Tensor:
        return self._logits(tile, None)

    def slope_sums(self) -> tuple[float, float]:
        return self.scale_sum, self.bias_sum

    def _logits(self, tile: Tile, kept: Kept | None) -> Tensor:
        out = self._buffer("logits", tile.shape) if kept is None else shaped(kept.buffer, tile.shape)
        if self.sums_slopes:
            torch.mul(self._multiply_features(tile, self._buffer("products", tile.shape)), self.scale, out=out)
        else:
            self._multiply_features(tile, out, alpha=self.scale)
        if tile.diagonal:
            # Products round (i, j) and (j, i) differently, but row i's total has one and column i's slope the other.
            torch.mul(torch.add(out, out.T, out=self._buffer("scratch", tile.shape)), 0.5, out=out)
        return out.add_(self.bias) if self.bias else out

    def _multiply_features(self, tile: Tile, out: Tensor, alpha: float = 1.0) -> Tensor:
        rows, columns = self._operand("rows", tile.rows), self._operand("columns", tile.columns)
        return multiply(rows, columns.T, out=out, alpha=alpha)
