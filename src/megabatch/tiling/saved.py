"""What a forward leaves for its backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from .handshake import RankInfo
from .plan import Plan


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


class SavedNumbers(NamedTuple):
    """What the forward leaves on the host for the backward.

    Attributes:
        shift: Of all logits, or OWN_MAX.
        forward_number: Of the forward among the handshakes of its group.
        joins_backward: Some rank needs a gradient.
        infos: What the ranks brought to the forward.
    """

    plan: Plan
    shift: float
    forward_number: int
    joins_backward: bool
    infos: list[RankInfo]

    def pack(self) -> Tensor:
        """As a tensor on the CPU, which is what an operator can return."""
        infos = (number for info in self.infos for number in info.encode())
        return torch.tensor([*self.plan, *self[1:4], *infos], dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> "SavedNumbers":
        rows, columns, one_pass, kept, shift, forward_number, joins_backward, *rest = packed.tolist()
        plan = Plan(int(rows), int(columns), bool(one_pass), int(kept))
        numbers, size = iter(rest), len(RankInfo().encode())
        infos = [RankInfo.decode(numbers) for _ in range(len(rest) // size)]
        return cls(plan, shift, int(forward_number), bool(joins_backward), infos)
