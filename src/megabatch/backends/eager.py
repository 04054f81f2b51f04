"""The eager backend: tiles in plain torch, on any device.

One product writes S into a buffer that all tiles share; the epilogue works on it in place; two more products add dS to
the gradients of its rows and columns. As long as nothing is allocated, a tile costs what its products cost.
"""

import torch
from torch import Tensor

from ..losses.block import Tile
from ..losses.spec import Spec
from .backend import Backend, multiply, supports_half_products
from .epilogues import Sigmoid, Softmax, common_shift
from .workspace import shaped


class Eager(Backend):
    """What is kept of a tile is what its epilogue leaves of the logits."""

    name = "eager"
    useful_height = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        epilogue = Softmax if self.spec.epilogue == "softmax" else Sigmoid
        self._epilogue = epilogue(self.spec, self.stats, self.shift, self._buffer)

    @staticmethod
    def multiplies_half(device: torch.device, normalize: bool) -> bool:
        return device.type != "cpu" and not normalize and supports_half_products(device)

    @staticmethod
    def tile_sides(width: int, threads: int) -> tuple[int, int]:
        if not threads:  # an accelerator, which many small tiles would keep waiting
            return 4096, 4096
        side = 2048 if width >= 128 else 512
        return (side // 2 if threads > 1 else side // 4), side

    @staticmethod
    def tile_bytes(spec: Spec, rows: int, columns: int, element: int, operand: int, sum_for_scale: bool) -> int:
        masked = spec.id_rule != "ignore" or spec.label_smoothing > 0
        floats = 2 + sum_for_scale + masked
        rounded = operand if operand != element else 0  # dlogits
        return rows * columns * (floats * element + rounded + (3 if masked else 0))

    common_shift = staticmethod(common_shift)

    def accumulate_statistics(self, tile: Tile, kept: Tensor | None = None) -> None:
        self._epilogue.statistics(tile, self.scores(tile, kept))

    def accumulate_gradients(self, tile: Tile, kept: Tensor | None = None) -> None:
        logits = self.scores(tile) if kept is None else shaped(kept, tile.shape)
        dlogits = self._epilogue.dlogits(tile, logits, fresh=kept is None)
        if self.sum_for_bias:
            self.scalar_sums[1].add_(dlogits.sum(1).sum(dtype=torch.float64))
        if self.sum_for_scale:
            products = self._buffer("products", tile.shape) if kept is None else self._products(tile)
            total = products.mul_(dlogits).sum(1).sum(dtype=torch.float64)
            # The dlogits of a diagonal tile serve both triangles, and both are in it.
            self.scalar_sums[0].add_(total, alpha=0.5 if tile.is_diagonal else 1.0)
        if self.dlogits_scale != 1:
            dlogits.mul_(self.dlogits_scale)
        self._multiply_dlogits(tile, dlogits.to(self.operand_dtype))

    def scores(self, tile: Tile, memory: Tensor | None = None) -> Tensor:
        out = self._buffer("logits", tile.shape) if memory is None else shaped(memory, tile.shape)
        if isinstance(self.scale, float) and self.scale and not self.sum_for_scale:
            rows, columns = self._operand("rows", tile.rows), self._operand("columns", tile.columns)
            if self.operand_dtype == out.dtype:
                torch.addmm(out, rows, columns.T, alpha=self.scale, beta=0, out=out)
            else:
                multiply(rows, columns.T, out=out, alpha=self.scale)
        else:  # the host does not know it, or a BLAS skips the product at 0: then inf * 0 would not be NaN
            products = self._products(tile, None if self.sum_for_scale else out)
            torch.mul(products, self.scale, out=out)
        if tile.is_diagonal:
            # A BLAS rounds (i, j) and (j, i) differently, but row i's sum has one and column i's dlogits the other.
            torch.mul(torch.add(out, out.T, out=self._buffer("scratch", tile.shape)), 0.5, out=out)
        return out.add_(self.bias) if isinstance(self.bias, Tensor) or self.bias else out

    def _products(self, tile: Tile, out: Tensor | None = None) -> Tensor:
        """x.y, by default in a buffer that the next tile overwrites."""
        rows, columns = self._operand("rows", tile.rows), self._operand("columns", tile.columns)
        return multiply(rows, columns.T, out=self._buffer("products", tile.shape) if out is None else out)
