"""State: the statistics that a row keeps of its logits, and how two partial statistics become one.

Every field is a float64 vector with one entry per row: O(N) numbers cost nothing, and a loss of 1e-5 at logits of 100
needs the digits. A field is present where the loss or its statistics need it:

    max, sum_exp                softmax: sum(exp(logits)) = sum_exp * exp(max). `max` is the largest logit, or a shift
                                that all rows of a call have in common
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

OWN_MAX = -math.inf  # in place of a common shift: every row is shifted by its own maximum
MAXIMA = ("max", "top", "top_positive")


def state_fields(spec: Spec, stats: bool) -> tuple[str, ...]:
    """The fields that a row of this loss has, maxima first."""
    tops = ("top", "top_positive") if stats else ()
    if spec.epilogue == "sigmoid":
        return (*tops, "softplus_sum", *(("positive_sum", "positive_count") if stats else ()))
    names = ["sum_exp", "positive_sum"]
    if spec.id_rule == "positive":
        names.append("positive_count")
    if spec.label_smoothing:
        names += ["logit_sum", "logit_count"]
    return ("max", *tops, *names)


def has_column_statistics(spec: Spec, stats: bool) -> bool:
    """Whether columns have a State as rows do."""
    return spec.two_sided or (stats and spec.epilogue == "sigmoid")


class State:
    """A table of fields by rows. `state["sum_exp"]` is a view of one field, `slice` a view of some rows."""

    def __init__(self, names: tuple[str, ...], table: Tensor) -> None:
        self.names, self.table = names, table
        self._fields = dict(zip(names, table.unbind(), strict=True))

    @classmethod
    def neutral(cls, names: tuple[str, ...], num_rows: int, device: torch.device, shift: float) -> "State":
        """The statistics of no columns: the neutral element of `merge`."""
        return cls(names, torch.empty(len(names), num_rows, dtype=torch.float64, device=device)).reset(shift)

    def reset(self, shift: float = OWN_MAX) -> "State":
        self.table.zero_()
        for name, lowest in zip(MAXIMA, (shift, -math.inf, -math.inf), strict=True):
            if name in self and lowest:
                self[name].fill_(lowest)
        return self

    @property
    def maxima(self) -> Tensor:
        return self.table[: sum(name in MAXIMA for name in self.names)]

    @property
    def sums(self) -> Tensor:
        return self.table[sum(name in MAXIMA for name in self.names) :]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        return self._fields[name]

    def slice(self, start: int, stop: int | None) -> "State":
        return State(self.names, self.table[:, start:stop])

    def merge(self, piece: Mapping[str, Tensor], is_first: bool = False) -> None:
        """Add the statistics of more columns: of a tile, a block or another rank. The first are copied.

        Sums add up, and maxima compete. Sums of exponentials, unless they have one shift in common, combine as

            s e^m + s' e^m' = (s e^(m-M) + s' e^(m'-M)) e^M,  M = max(m, m').
        """
        if is_first:
            for name, value in piece.items():
                self[name].copy_(value)
            return
        if "max" in piece:
            # Where both are neutral: exp(-inf - lowest) is 0, where exp(-inf + inf) would be NaN.
            finite = torch.maximum(self["max"], piece["max"]).clamp_min_(torch.finfo(torch.float64).min)
            self["sum_exp"].mul_((self["max"] - finite).exp_())
            piece = {**piece, "sum_exp": piece["sum_exp"] * (piece["max"] - finite).exp_()}
        for name, value in piece.items():
            if name in MAXIMA:
                torch.maximum(self[name], value, out=self[name])
            else:
                self[name].add_(value)

    def fill_empty_rows(self) -> None:
        """Give rows that met no column statistics that can be divided by."""
        empty = self["sum_exp"] == 0
        self["max"].masked_fill_(empty, 0.0)
        self["sum_exp"].masked_fill_(empty, 1.0)

    def losses(self, spec: Spec) -> Tensor:
        """The loss of every row, unweighted; 0 for a row without positives."""
        if spec.epilogue == "sigmoid":
            return self["softplus_sum"].clone()  # which may be the result: it must not share memory with what is saved
        aim = self._mean_positive()
        if spec.label_smoothing:
            uniform = self["logit_sum"] / self["logit_count"]
            aim = (1 - spec.label_smoothing) * aim + spec.label_smoothing * uniform
        # max and positive_sum come from one tile and are close: their difference first, so that nothing cancels late.
        return self.where_positives(spec, self["sum_exp"].log().add_(self["max"] - aim))

    def positive_logits(self, spec: Spec) -> Tensor:
        """Mean logit of every row's positives; 0 for a row without positives."""
        return self.where_positives(spec, self._mean_positive())

    def where_positives(self, spec: Spec, values: Tensor) -> Tensor:
        """`values`, but 0 for a row without positives, which has no loss."""
        return values if spec.has_targets else torch.where(self["positive_count"] == 0, 0.0, values)

    def _mean_positive(self) -> Tensor:
        return self["positive_sum"] / self["positive_count"] if "positive_count" in self else self["positive_sum"]
