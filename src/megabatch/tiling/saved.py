"""What a forward leaves for its backward, and what the backward returns."""

import math
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from .handshake import RankInfo
from .plan import Plan

_NAN = -torch.finfo(torch.float64).max  # in its place in a packed tensor: a copy of it should be equal to it


class Gradients(NamedTuple):
    """One for every differentiable input; None where none is needed."""

    rows: Tensor | None
    columns: Tensor | None
    negatives: Tensor | None
    scale: Tensor | None
    bias: Tensor | None


class SavedTensors(NamedTuple):
    """What the forward leaves on the device for the backward.

    Attributes:
        state: The statistics of the rows and then, unless they are the same, of the columns.
        kept: The logits that the plan keeps or, after one pass, the gradients of the features.
        scalars: After one pass the gradients of scale and bias; else what the mean divides by, unless the host knows.
    """

    state: Tensor
    kept: Tensor
    scalars: Tensor


@dataclass
class SavedNumbers:
    """What the forward leaves on the host for the backward.

    Attributes:
        forward_number: Of the forward among the handshakes of its group.
        joins_backward: Some rank needs a gradient.
        shared_max: Of the state, where the host knows it; else NaN.
        denominator: What the mean divides by, where the host knows it; else NaN.
        marks: Of the tiles that are kept.
        infos: What the ranks brought to the forward.
    """

    plan: Plan
    forward_number: int
    joins_backward: bool
    shared_max: float
    denominator: float
    marks: list[float]
    infos: list[RankInfo]

    def pack(self) -> Tensor:
        """As a tensor on the CPU, which is what an operator can return."""
        plan = self.plan
        numbers: list[float] = [plan.rows, plan.columns, plan.one_pass, plan.kept]
        numbers += [self.forward_number, self.joins_backward, self.shared_max, self.denominator]
        numbers += [len(self.marks), *self.marks, len(self.infos)]
        numbers += chain.from_iterable(info.encode() for info in self.infos)
        packed = [_NAN if math.isnan(number) else number for number in numbers]
        return torch.tensor(packed, dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> "SavedNumbers":
        rest = iter([math.nan if number == _NAN else number for number in packed.tolist()])
        rows, columns, one_pass, kept, forward_number, joins_backward, shared_max, denominator = islice(rest, 8)
        plan = Plan(int(rows), int(columns), bool(one_pass), int(kept))
        marks = list(islice(rest, int(next(rest))))
        infos = [RankInfo.decode(rest) for _ in range(int(next(rest)))]
        return cls(plan, int(forward_number), bool(joins_backward), shared_max, denominator, marks, infos)
