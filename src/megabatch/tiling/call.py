"""Call: everything about a call that is not a tensor, in one object that fits through an operator's signature."""

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..losses.spec import Spec


class Inputs(NamedTuple):
    """The tensors of a call. A symmetric plane has `first` and perhaps `second` on both sides; any other has the rows
    in `first`, the columns in `second`, and perhaps more columns, nobody's positives, in `extra`."""

    first: Tensor
    second: Tensor | None
    extra: Tensor | None
    scale: Tensor
    bias: Tensor | None
    first_ids: Tensor | None
    second_ids: Tensor | None
    extra_ids: Tensor | None
    positives: Tensor | None
    weight: Tensor | None


class Needs(NamedTuple):
    """Which inputs get a gradient."""

    first: bool = False
    second: bool = False
    extra: bool = False
    scale: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Call:
    """What was asked for.

    Attributes:
        function: The public name, for errors.
        normalize: True or False, or None: as given, and look once whether the rows are of unit length.
        tile: Height and width of a tile, if the caller chose them.
        memory_budget: Bytes, if the caller chose them.
        product: Name of the dtype that autocast multiplies in, or "".
        group: Name of the process group, or "" for this process alone.
        gradients: Autograd records: the loss of this rank can take part in a backward.
    """

    function: str
    spec: Spec
    needs: Needs
    reduction: str = "mean"
    stats: bool = False
    normalize: bool | None = None
    tile: tuple[int, int] | None = None
    memory_budget: int | None = None
    backend: str = "auto"
    product: str = ""
    group: str = ""
    grad_reduction: str = "mean"
    exchange: str = "auto"
    overlap: bool = True
    gradients: bool = True

    def encode(self) -> str:
        """As a string, which is what an operator can take and a compiler can treat as a constant."""
        spec = self.spec
        return repr(
            (
                self.function,
                (spec.link, spec.columns, spec.same, spec.symmetric, spec.smoothing, spec.targets),
                (self.needs.first, self.needs.second, self.needs.extra, self.needs.scale, self.needs.bias),
                self.reduction,
                self.stats,
                self.normalize,
                self.tile,
                self.memory_budget,
                self.backend,
                self.product,
                self.group,
                self.grad_reduction,
                self.exchange,
                self.overlap,
                self.gradients,
            )
        )

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(code: str) -> "Call":
        function, spec, needs, *rest = ast.literal_eval(code)
        return Call(function, Spec(*spec), Needs(*needs), *rest)

    @property
    def product_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.product) if self.product else None
