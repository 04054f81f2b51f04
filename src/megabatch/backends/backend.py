"""Backend: the interface of what computes tiles, and what all backends share.

Letters: S the logits of a tile, [r, c]; dS = d loss / d S, its dlogits, up to a factor common to all tiles.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from ..losses.state import OWN_MAX
from .workspace import Buffers

MIB = 2**20
# dlogits are multiplied by it before they are rounded to float16, whose smallest normal number is 6e-5. They are 2 at
# most, and in a batch of a million they still have all their digits.
FLOAT16_DLOGITS_SCALE = 2.0**14


@dataclass(eq=False)
class Backend(ABC):
    """Computes the tiles of one call, whose logits are S = scale * x.y + bias.

    Attributes:
        scale, bias: Numbers where the host knows them, else 0-d tensors.
        default_budget: Bytes that a call may take if the caller names none; O(N) vectors come on top.
        useful_height: Rows from which a strip multiplies at nearly full speed.
        dtype: Of logits, dlogits and gradients: float32 or float64.
        operand_dtype: Of what products multiply: the same, or bf16 or fp16.
        stats: Collect what `return_stats` needs, too.
        sum_for_scale, sum_for_bias: Sum dS * x.y, and dS, over all tiles: the gradients of scale and bias.
        one_pass: Every tile's gradients follow its statistics at once.
        shift: As `common_shift` chose it.
    """

    name: ClassVar[str]
    useful_height: ClassVar[int]
    default_budget: ClassVar[int] = 256 * MIB

    spec: Spec
    scale: float | Tensor
    bias: float | Tensor
    dtype: torch.dtype
    operand_dtype: torch.dtype
    device: torch.device
    stats: bool = False
    sum_for_scale: bool = False
    sum_for_bias: bool = False
    one_pass: bool = False
    shift: float = OWN_MAX

    def __post_init__(self) -> None:
        self._buffer = Buffers(self.dtype, self.device)
        self._loaded: dict[str, Block] = {}  # by side: what its buffer holds a copy of

    # ---- what it can do, and what it takes

    @staticmethod
    def reasons_against(device: torch.device, dtype: torch.dtype) -> list[str]:
        """Why this backend cannot run a call."""
        return []

    @staticmethod
    @abstractmethod
    def multiplies_half(device: torch.device, normalize: bool) -> bool:
        """Whether bf16/fp16 features are multiplied as they are, into float32; else they are converted tile by tile."""

    @staticmethod
    @abstractmethod
    def tile_sides(width: int, threads: int) -> tuple[int, int]:
        """Height and width of the tiles that run fastest, for features of this width. No threads: an accelerator."""

    @staticmethod
    @abstractmethod
    def tile_bytes(spec: Spec, rows: int, columns: int, element: int, operand: int, sum_for_scale: bool) -> int:
        """Memory for the work on one tile, without copies of features.

        Args:
            element, operand: Bytes of a logit, and of what products multiply.
        """

    @staticmethod
    def common_shift(largest_logit: float) -> float:
        """What is subtracted from every logit of a call before its exponential; OWN_MAX: the maximum of its row, or of
        its column."""
        return OWN_MAX

    # ---- tiles

    @abstractmethod
    def accumulate_statistics(self, tile: Tile, kept: Tensor | None = None) -> None:
        """Add the tile to the statistics of its rows and, where they have a loss too, of its columns. What its
        gradients can start from is left in `kept`, memory of this tile."""

    @abstractmethod
    def accumulate_gradients(self, tile: Tile, kept: Tensor | None = None) -> None:
        """Add the tile to the gradients of its rows and columns, from what was kept, if it was. That stays as it is:
        the backward may run again."""

    @abstractmethod
    def scores(self, tile: Tile) -> Tensor:
        """S, in a buffer that the next tile overwrites."""

    @cached_property
    def scalar_sums(self) -> Tensor:
        """sum(dS * x.y) and sum(dS) of all tiles so far."""
        return torch.zeros(2, dtype=torch.float64, device=self.device)

    @property
    def dlogits_scale(self) -> float:
        """Multiplies dlogits before they are rounded to the operands' dtype."""
        return FLOAT16_DLOGITS_SCALE if self.operand_dtype == torch.float16 else 1.0

    def _multiply_dlogits(self, tile: Tile, dlogits: Tensor) -> None:
        """The two products of the backward: dS @ Y and dS.T @ X, added to the gradients."""
        products = [(tile.rows, dlogits, "columns", tile.columns), (tile.columns, dlogits.T, "rows", tile.rows)]
        for block, left, side, other in products[:1] if tile.is_diagonal else products:
            if block.grad is not None:
                beta = 0.0 if block.grad_is_empty else 1.0
                multiply(left, self._operand(side, other), out=block.grad, alpha=1 / self.dlogits_scale, beta=beta)
                block.grad_is_empty = False

    def _operand(self, side: str, block: Block) -> Tensor:
        """The features as products multiply them: themselves where they can, else a copy in a shared buffer."""
        features = block.features
        if block.inverse_norm is None and features.dtype == self.operand_dtype and features.stride(1) == 1:
            return features
        copy = self._buffer(side, (len(block), features.shape[1]), self.operand_dtype)
        if self._loaded.get(side) is not block:
            if block.inverse_norm is None:
                copy.copy_(features)
            else:
                torch.mul(features, block.inverse_norm[:, None], out=copy)
            self._loaded[side] = block
        return copy


def multiply(left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """out = alpha * left @ right + beta * out, accumulated in the dtype of `out`. One launch on accelerators, two where
    this torch cannot add a product of bf16/fp16 to float32."""
    if left.dtype == out.dtype:
        return torch.addmm(out, left, right, alpha=alpha, beta=beta, out=out)
    if left.device.type == "cpu":  # which cannot multiply bf16 or fp16 into float32
        product = torch.mm(left.to(out.dtype), right.to(out.dtype))
    elif supports_half_products(left.device, accumulated=True):
        return torch.addmm(out, left, right, out_dtype=out.dtype, alpha=alpha, beta=beta, out=out)
    else:
        product = torch.mm(left, right, out_dtype=out.dtype)
    return torch.add(out, product, alpha=alpha, out=out) if beta else torch.mul(product, alpha, out=out)


@cache
def supports_half_products(device: torch.device, accumulated: bool = False) -> bool:
    """Whether bf16/fp16 can be multiplied into float32 and, `accumulated`, added to what is there. The CPU converts;
    older versions of torch cannot on ROCm, or add a product to its own dtype only."""
    if device.type == "cpu" and not accumulated:
        return True
    half, out = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    try:
        if accumulated:
            torch.addmm(out, half, half, out_dtype=torch.float32, out=out)
        else:
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
