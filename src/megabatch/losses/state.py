"""State: the statistics that a row keeps of its logits, and how two partial statistics become one.

Every field is a float64 vector with one entry per row: O(N) numbers cost nothing, and a loss of 1e-5 at logits of 100
needs the digits. A field is present where the loss or its statistics need it:

    max, sum_exp                softmax: sum(exp(logits)) = sum_exp * exp(max). `max` is at or near the largest logit
    softplus_sum                sigmoid: the sum of softplus(-sign * logit)
    positive_sum, positive_count    sum and number of the logits of the row's positives; without a count it is 1
    logit_sum, logit_count      sum and number of the logits that are neither masked nor the row itself (smoothing)
    top, top_positive           largest logit of all columns, and of the positives (accuracy)
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .spec import Spec

_NEUTRAL_IS_LOWEST = ("max", "top", "top_positive")


def state_fields(spec: Spec, stats: bool) -> tuple[str, ...]:
    """The fields that a row of this loss has."""
    if spec.epilogue == "sigmoid":
        return ("softplus_sum", *(("positive_sum", "positive_count", "top", "top_positive") if stats else ()))
    names = ["max", "sum_exp", "positive_sum"]
    if spec.id_rule == "positive":
        names.append("positive_count")
    if spec.label_smoothing:
        names += ["logit_sum", "logit_count"]
    return (*names, *(("top", "top_positive") if stats else ()))


class State:
    """A table of fields by rows. `state["sum_exp"]` is a view of one field, `slice` a view of some rows.

    Attributes:
        shared_max: The `max` of all rows where it is one number that the host knows, else NaN. -inf: no logit yet.
    """

    def __init__(self, names: tuple[str, ...], table: Tensor, shared_max: float = math.nan) -> None:
        self.names = names
        self.table = table
        self.shared_max = shared_max
        self._fields: dict[str, Tensor] = {}

    @classmethod
    def neutral(cls, names: tuple[str, ...], num_rows: int, device: torch.device) -> "State":
        return cls(names, torch.empty(len(names), num_rows, dtype=torch.float64, device=device)).reset()

    def reset(self) -> "State":
        """Back to the neutral element of `merge`."""
        self.table.zero_()
        for index, name in enumerate(self.names):
            if name in _NEUTRAL_IS_LOWEST:
                self.table[index].fill_(-math.inf)
        self.shared_max = -math.inf
        return self

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        field = self._fields.get(name)
        if field is None:
            field = self._fields[name] = self.table[self.names.index(name)]
        return field

    def slice(self, start: int, stop: int | None) -> "State":
        return State(self.names, self.table[:, start:stop], self.shared_max)

    def merge(self, piece: Mapping[str, Tensor | float]) -> None:
        """Add the statistics of more columns: of a tile, a block or another rank. `max` may be one number for all rows.

        Sums add up, maxima compete, and sums of exponentials combine as

            s e^m + s' e^m' = (s e^(m-M) + s' e^(m'-M)) e^M,  M = max(m, m').
        """
        for name, value in piece.items():
            if name in ("top", "top_positive"):
                assert isinstance(value, Tensor)
                torch.maximum(self[name], value.double(), out=self[name])
            elif name not in ("max", "sum_exp"):
                self[name].add_(value)
        if "max" in piece:
            self._merge_exponentials(piece["max"], piece["sum_exp"])

    def _merge_exponentials(self, new_max: Tensor | float, new_sum: Tensor | float) -> None:
        max_, sum_exp = self["max"], self["sum_exp"]
        if isinstance(new_max, float) and not math.isnan(self.shared_max):
            if self.shared_max == -math.inf:
                assert isinstance(new_sum, Tensor)
                max_.fill_(new_max)
                sum_exp.copy_(new_sum)
                self.shared_max = new_max
                return
            higher = max(self.shared_max, new_max)
            if higher != self.shared_max:
                sum_exp.mul_(math.exp(self.shared_max - higher))
                max_.fill_(higher)
                self.shared_max = higher
            sum_exp.add_(new_sum, alpha=math.exp(new_max - higher))
            return
        self.shared_max = math.nan
        new_maxima = torch.full_like(max_, new_max) if isinstance(new_max, float) else new_max.double()
        maxima = torch.maximum(max_, new_maxima)
        # Where both are neutral: exp(-inf - lowest) is 0, where exp(-inf + inf) would be NaN.
        finite = maxima.clamp_min(torch.finfo(torch.float64).min)
        sum_exp.mul_((max_ - finite).exp_()).add_(new_sum * (new_maxima - finite).exp_())
        max_.copy_(maxima)

    def fill_empty_rows(self, spec: Spec) -> None:
        """Give rows that met no column a sum of exponentials that can be divided by."""
        if not spec.has_targets:
            empty = self["sum_exp"] == 0
            self["max"].masked_fill_(empty, 0.0)
            self["sum_exp"].masked_fill_(empty, 1.0)

    def inverse_sum(self, shift: float) -> Tensor:
        """1 / sum(exp(logits - shift)) of every row."""
        if self.shared_max == shift:
            return self["sum_exp"].reciprocal()
        return (shift - self["max"]).exp_().div_(self["sum_exp"])

    def losses(self, spec: Spec) -> Tensor:
        """The loss of every row, unweighted; 0 for a row without positives."""
        if spec.epilogue == "sigmoid":
            return self["softplus_sum"]
        aim = self._mean_positive()
        if spec.label_smoothing:
            uniform = self["logit_sum"] / self["logit_count"]
            aim = (1 - spec.label_smoothing) * aim + spec.label_smoothing * uniform
        # max and positive_sum come from one tile and are close: their difference first, so that nothing cancels late.
        return self.where_positives(spec, (self["max"] - aim) + self["sum_exp"].log())

    def positive_logits(self, spec: Spec) -> Tensor:
        """Mean logit of every row's positives; 0 for a row without positives."""
        return self.where_positives(spec, self._mean_positive())

    def where_positives(self, spec: Spec, values: Tensor) -> Tensor:
        """`values`, but 0 for a row without positives, which has no loss."""
        return values if spec.has_targets else torch.where(self["positive_count"] == 0, 0.0, values)

    def _mean_positive(self) -> Tensor:
        return self["positive_sum"] / self["positive_count"] if "positive_count" in self else self["positive_sum"]
