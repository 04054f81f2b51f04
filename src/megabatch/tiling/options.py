"""LossInputs and LossOptions: a call as tensors, and everything else about it in one object."""

import ast
from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..losses.spec import Spec

# Of what the operators return. Another number, and no graph that a compiler has cached on disk is used again.
FORMAT = 2


class LossInputs(NamedTuple):
    """The tensors of a call. A symmetric loss has `rows`, and perhaps `columns`, on both sides. Any other has rows,
    columns, and perhaps more columns that are positives of no row, `negatives`."""

    rows: Tensor
    columns: Tensor | None = None
    negatives: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None
    negative_ids: Tensor | None = None
    positives: Tensor | None = None
    weight: Tensor | None = None

    @property
    def features(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.rows, self.columns, self.negatives


class Needs(NamedTuple):
    """Which inputs get a gradient."""

    rows: bool = False
    columns: bool = False
    negatives: bool = False
    scale: bool = False
    bias: bool = False


class LossOptions(NamedTuple):
    """What was asked for.

    Attributes:
        function: The public name, for errors.
        normalize: True or False, or None: as given, and warn where rows are not of unit length.
        tile: Height and width of a tile, if the caller chose them.
        memory_budget: Bytes, if the caller chose them.
        autocast_dtype: Name of the dtype that autocast multiplies in, or "".
        group: Name of the process group, or "" for this process alone.
        grad_enabled: Autograd records on this rank.
        call_site: The line that made the call, where it is known and there is a group.
    """

    function: str
    spec: Spec
    needs: Needs
    reduction: str = "mean"
    return_stats: bool = False
    normalize: bool | None = None
    tile: tuple[int, int] | None = None
    memory_budget: int | None = None
    backend: str = "auto"
    autocast_dtype: str = ""
    group: str = ""
    grad_reduction: str = "mean"
    exchange: str = "auto"
    overlap: bool = True
    grad_enabled: bool = True
    call_site: str = ""

    def encode(self) -> str:
        """As a string, which is what an operator can take and a compiler can treat as a constant."""
        function, spec, needs, *rest = self
        return repr((FORMAT, function, tuple([getattr(spec, name) for name in _SPEC_FIELDS]), tuple(needs), *rest))

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(code: str) -> "LossOptions":
        _, function, spec, needs, *rest = ast.literal_eval(code)
        return LossOptions(function, Spec(*spec), Needs(*needs), *rest)


_SPEC_FIELDS = tuple(member.name for member in fields(Spec))


def compute_dtype(features: Tensor) -> torch.dtype:
    """Of logits, dlogits and sums of gradients."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32
