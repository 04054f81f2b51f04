"""The eager backend: tiles in plain torch, on any device.

Letters: S the tile's logits, [r, c]; G = d loss / d S, the slope, up to a factor common to all tiles.

One product makes S in a buffer that all tiles share; a link's epilogue works on it in place; two more products add G
to the gradients of its rows and of its columns. A tile then costs what its products cost, as long as nothing is
allocated.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from .links import link_of
from .workspace import borrow


@dataclass
class Kept:
    """Memory for one tile's logits that outlives its fold: exp(S - shift), or S itself where the shift is NaN."""

    buffer: Tensor
    shift: float = math.nan


class Eager:
    """Computes the tiles of one call, whose logits are S = scale * x.y + bias."""

    name = "eager"

    @staticmethod
    def reasons_against(device: torch.device, dtype: torch.dtype) -> list[str]:
        """Why this backend cannot run a call; none if it can."""
        return []

    def __init__(
        self,
        spec: Spec,
        scale: float,
        bias: float,
        compute: torch.dtype,
        device: torch.device,
        *,
        product: torch.dtype | None = None,
        stats: bool = False,
        sums_slopes: bool = False,
    ) -> None:
        """
        Args:
            compute: Of logits, slopes and gradients: float32 or float64.
            product: Of the operands of products, where an accelerator multiplies halves into float32.
            stats: Fold what the caller's statistics need, too.
            sums_slopes: Add up sum(G * x.y) tile by tile, for a gradient of the scale that no feature gradient gives.
        """
        self.spec = spec
        self.scale = scale
        self.bias = bias
        self.compute = compute
        self.device = device
        self.product = product or compute
        self.sums_slopes = sums_slopes
        self.scale_sum = 0.0
        self.bias_sum = 0.0
        self._link = link_of(spec, stats)
        self._buffers: dict[str, Tensor] = {}
        self._loaded: dict[str, Block] = {}

    def fold(self, tile: Tile, kept: Kept | None = None) -> None:
        """Add the tile to the statistics of its rows and, where they have a loss too, of its columns."""
        logits = self._logits(tile, kept)
        scratch = self._buffer("scratch", tile.shape)
        shift = self._link.fold(tile, logits, scratch, again=lambda: self._logits(tile, kept))
        if kept is not None:
            kept.shift = shift

    def push(self, tile: Tile, kept: Kept | None = None, last: bool = False) -> None:
        """Add the tile to the gradients of its rows and its columns, from its kept logits where there are any.

        Kept logits are left as they are, for a graph that is walked again, unless this is their `last` use.
        """
        if kept is None:
            logits, shift = self._logits(tile, None), math.nan
        else:
            logits, shift = _shaped(kept.buffer, tile.shape), kept.shift
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
        slope = slope.to(self.product)
        if tile.rows.grad is not None:
            self._multiply(slope, self._load("columns", tile.columns), out=tile.rows.grad, beta=1.0)
        if tile.columns.grad is not None and not tile.diagonal:
            self._multiply(slope.T, self._load("rows", tile.rows), out=tile.columns.grad, beta=1.0)

    def scores(self, tile: Tile) -> Tensor:
        """S, in a buffer that the next tile overwrites."""
        return self._logits(tile, None)

    def _logits(self, tile: Tile, kept: Kept | None) -> Tensor:
        out = self._buffer("logits", tile.shape) if kept is None else _shaped(kept.buffer, tile.shape)
        if self.sums_slopes:
            torch.mul(self._multiply_features(tile, self._buffer("products", tile.shape)), self.scale, out=out)
        else:
            self._multiply_features(tile, out, alpha=self.scale)
        if tile.diagonal:
            # Products round (i, j) and (j, i) differently, but row i's total has one and column i's slope the other.
            torch.mul(torch.add(out, out.T, out=self._buffer("scratch", tile.shape)), 0.5, out=out)
        return out.add_(self.bias) if self.bias else out

    def _multiply_features(self, tile: Tile, out: Tensor, alpha: float = 1.0) -> Tensor:
        rows, columns = self._load("rows", tile.rows), self._load("columns", tile.columns)
        return self._multiply(rows, columns.T, out=out, alpha=alpha)

    def _load(self, side: str, block: Block) -> Tensor:
        """The block's features as products take them: themselves where they can, else a copy in a shared buffer."""
        features = block.features
        if block.inverse_norm is None and features.dtype == self.product:
            return features
        copy = self._buffer(side, (len(block), features.shape[1]), self.product)
        if self._loaded.get(side) is not block:
            if block.inverse_norm is None:
                copy.copy_(features)
            else:
                torch.mul(features, block.inverse_norm[:, None], out=copy)
            self._loaded[side] = block
        return copy

    def _multiply(self, left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
        """out = alpha * left @ right + beta * out, added up in the precision of `out`."""
        if left.dtype == out.dtype:
            return torch.addmm(out, left, right, alpha=alpha, beta=beta, out=out)
        if left.device.type == "cpu":  # which cannot multiply halves into float32
            product = torch.mm(left.to(out.dtype), right.to(out.dtype))
        else:
            product = torch.mm(left, right, out_dtype=out.dtype)
        return torch.add(out, product, alpha=alpha, out=out) if beta else torch.mul(product, alpha, out=out)

    def _buffer(self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        size = shape[0] * shape[1]
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = borrow(name, size, dtype or self.compute, self.device)
        return _shaped(self._buffers[name], shape)


def _shaped(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
    return buffer[: shape[0] * shape[1]].view(shape)
