"""Backend: what the walk asks of whoever computes its tiles, and what all of them share.

Letters: S the tile's logits, [r, c]; G = d loss / d S, the slope, up to a factor common to all tiles.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from .workspace import borrow

MIB = 2**20
# What a slope is multiplied by before it is rounded to float16, whose smallest normal number is 6e-5: slopes are of
# size 2 at most, and those of a batch of a million still have all their digits.
FLOAT16_LIFT = 2.0**14


@dataclass
class Kept:
    """Memory for one tile that outlives its fold, and a number that tells the backend what it holds."""

    buffer: Tensor
    mark: float = math.nan


class Backend(ABC):
    """Computes the tiles of one call, whose logits are S = scale * x.y + bias.

    Attributes:
        default_budget: Bytes that a call may take if the caller names none; the O(N) vectors come on top.
        useful_height: A strip of so many rows still multiplies at nearly full speed.
    """

    name: str
    default_budget: int
    useful_height: int

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
            product: Of the operands of products, where halves are multiplied into float32.
            stats: Fold what the caller's statistics need, too.
            sums_slopes: Add up sum(G * x.y) tile by tile, for a gradient of the scale that no feature gradient gives.
        """
        self.spec = spec
        self.scale = scale
        self.bias = bias
        self.compute = compute
        self.device = device
        self.product = product or compute
        self.stats = stats
        self.sums_slopes = sums_slopes
        self._buffers: dict[str, Tensor] = {}
        self._loaded: dict[str, Block] = {}

    # ---- what it can do, and what it takes

    @staticmethod
    @abstractmethod
    def suits(device: torch.device) -> bool:
        """Whether it is for devices of this kind: "auto" asks no other."""

    @staticmethod
    @abstractmethod
    def reasons_against(device: torch.device, dtype: torch.dtype) -> list[str]:
        """Why this backend cannot run a call; none if it can."""

    @staticmethod
    @abstractmethod
    def multiplies_halves(device: torch.device, normalize: bool) -> bool:
        """Whether half features are multiplied as they are, into float32; else they are converted, tile by tile."""

    @staticmethod
    @abstractmethod
    def sides(width: int, threads: int) -> tuple[int, int]:
        """Height and width of the tiles that run fastest, for features of this width."""

    @staticmethod
    @abstractmethod
    def tile_bytes(spec: Spec, rows: int, columns: int, element: int, operand: int, products: bool) -> int:
        """What is held while it works on one tile, copies of its features apart.

        Args:
            element, operand: Bytes of a logit, and of what products take.
            products: x.y is held beside the logits.
        """

    # ---- tiles

    @abstractmethod
    def fold(self, tile: Tile, kept: Kept | None = None) -> None:
        """Add the tile to the statistics of its rows and, where they have a loss too, of its columns."""

    @abstractmethod
    def push(self, tile: Tile, kept: Kept | None = None, last: bool = False) -> None:
        """Add the tile to the gradients of its rows and its columns, from what `fold` kept where it did.

        That is left as it is, for a graph that is walked again, unless this is its `last` use.
        """

    @abstractmethod
    def scores(self, tile: Tile) -> Tensor:
        """S, in a buffer that the next tile overwrites."""

    @abstractmethod
    def slope_sums(self) -> tuple[float, float]:
        """sum(G * x.y), where it is asked for, and sum(G), for the bias, over all tiles that were pushed."""

    @property
    def lift(self) -> float:
        """What slopes are multiplied by before they are rounded to what products take."""
        return FLOAT16_LIFT if self.product == torch.float16 else 1.0

    def _add_to_gradients(self, tile: Tile, slope: Tensor) -> None:
        """The two products that follow a slope, which is lifted."""
        alpha = 1 / self.lift
        if tile.rows.grad is not None:
            multiply(slope, self._operand("columns", tile.columns), out=tile.rows.grad, alpha=alpha, beta=1.0)
        if tile.columns.grad is not None and not tile.diagonal:
            multiply(slope.T, self._operand("rows", tile.rows), out=tile.columns.grad, alpha=alpha, beta=1.0)

    def _operand(self, side: str, block: Block) -> Tensor:
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

    def _buffer(self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        size = shape[0] * shape[1]
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = borrow(name, size, dtype or self.compute, self.device)
        return shaped(self._buffers[name], shape)


def shaped(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
    return buffer[: shape[0] * shape[1]].view(shape)


def multiply(left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """out = alpha * left @ right + beta * out, added up in the precision of `out`."""
    if left.dtype == out.dtype:
        return torch.addmm(out, left, right, alpha=alpha, beta=beta, out=out)
    if left.device.type == "cpu":  # which cannot multiply halves into float32
        product = torch.mm(left.to(out.dtype), right.to(out.dtype))
    else:
        product = torch.mm(left, right, out_dtype=out.dtype)
    return torch.add(out, product, alpha=alpha, out=out) if beta else torch.mul(product, alpha, out=out)


@cache
def products_of_halves(device: torch.device) -> bool:
    """Whether halves can be multiplied into float32: on the CPU they are converted, on ROCm older versions of torch
    cannot."""
    if device.type == "cpu":
        return True
    half = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(half, half, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


def float32_precision(device: torch.device) -> str:
    """How products of float32 are multiplied, which is the caller's choice: "ieee" or "tf32"."""
    if device.type != "cuda":
        return "ieee"
    matmul = torch.backends.cuda.matmul
    chosen = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if chosen in (True, "tf32") else "ieee"
