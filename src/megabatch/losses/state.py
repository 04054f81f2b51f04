"""State: what one row keeps of the logits it has met, and how two such pieces become one.

Every field is a float64 vector with one entry per row; there are O(N) of them, so their precision costs nothing, and
a loss of 1e-5 at logits of 100 needs it. Fields, present where the loss or its statistics need them:

    shift, total      softmax: the logits' sum of exponentials is total * exp(shift). Neutral: (-inf, 0)
                      sigmoid: total alone, the sum of softplus
    positive, count   sum and number of the logits of the row's positives
    everything, valid sum and number of the logits of the columns that are neither masked nor the row itself
    best, best_positive   largest logit of the valid columns, and of the positives
"""

import math

import torch
from torch import Tensor

from .spec import Spec

NEUTRAL_IS_LOWEST = {"shift", "best", "best_positive"}


def fields(spec: Spec, stats: bool) -> tuple[str, ...]:
    """The fields a row of this loss has."""
    names = ["total"]
    if spec.link == "softmax":
        names += ["shift", "positive", "count"]
    if spec.smoothing:
        names += ["everything", "valid"]
    if stats:
        names += ["best", "best_positive"]
        if spec.link == "sigmoid":
            names += ["positive", "count"]
    return tuple(names)


def remembered(spec: Spec) -> tuple[str, ...]:
    """Those that a backward walk must know."""
    if spec.link == "sigmoid":
        return ()
    return ("shift", "total", "count", "valid") if spec.smoothing else ("shift", "total", "count")


class State:
    """A table of fields by rows; `state["total"]` is a view of one field, `cut` a view of some rows."""

    def __init__(self, names: tuple[str, ...], table: Tensor) -> None:
        self.names = names
        self.table = table
        self._fields = dict(zip(names, table.unbind(), strict=True))

    @classmethod
    def neutral(cls, names: tuple[str, ...], num_rows: int, device: torch.device) -> "State":
        return cls(names, torch.empty(len(names), num_rows, dtype=torch.float64, device=device)).clear()

    @classmethod
    def of_nothing(cls) -> "State":
        return cls((), torch.empty(0, 0))

    def clear(self) -> "State":
        """Forget what the rows have met."""
        self.table.zero_()
        for name in NEUTRAL_IS_LOWEST.intersection(self.names):
            self[name].fill_(-math.inf)
        return self

    def __getitem__(self, name: str) -> Tensor:
        return self._fields[name]

    def cut(self, start: int, stop: int) -> "State":
        return State(self.names, self.table[:, start:stop])

    def merge(self, piece: dict[str, Tensor]) -> None:
        """Take in what one tile knows of these rows: sums add up, maxima compete, sums of exponentials meet as

        t e^m + t' e^m' = (t e^(m-M) + t' e^(m'-M)) e^M,  M = max(m, m').
        """
        softmax = "shift" in piece
        for name, value in piece.items():
            if name in ("best", "best_positive"):
                torch.maximum(self[name], value.double(), out=self[name])
            elif not (softmax and name in ("shift", "total")):
                self[name].add_(value)
        if not softmax:
            return
        shift, total = self["shift"], self["total"]
        peak = torch.maximum(shift, piece["shift"].double())
        # Where both are neutral, the anchor is finite: exp(-inf + huge) is 0, not NaN.
        anchor = peak.clamp_min(torch.finfo(torch.float64).min)
        total.mul_((shift - anchor).exp_()).add_(piece["total"] * (piece["shift"] - anchor).exp_())
        shift.copy_(peak)

    def settle(self, spec: Spec) -> None:
        """Give rows that have met nothing a sum of exponentials that can be divided by."""
        if not spec.targets:
            lonely = self["total"] == 0
            self["shift"].masked_fill_(lonely, 0.0)
            self["total"].masked_fill_(lonely, 1.0)

    def exponential(self, shift: Tensor | float) -> Tensor:
        """What turns exp(logit - shift) into a probability, in every row."""
        return (shift - self["shift"]).exp_() / self["total"]

    def losses(self, spec: Spec) -> Tensor:
        """The loss of every row, unweighted; 0 for a row that has no positive."""
        if spec.link == "sigmoid":
            return self["total"]
        count = self["count"]
        positive = self["positive"] / count
        aim = positive
        if spec.smoothing:
            aim = (1 - spec.smoothing) * positive + spec.smoothing * self["everything"] / self["valid"]
        # shift and positive come from one tile and are close: their difference first, so that nothing cancels late.
        return self._unless_lonely(spec, (self["shift"] - aim) + self["total"].log())

    def mean_positive(self, spec: Spec) -> Tensor:
        """Logit of every row's positives; 0 for a row that has none."""
        return self._unless_lonely(spec, self["positive"] / self["count"])

    def weights(self, spec: Spec, weight: Tensor) -> Tensor:
        """`weight`, but 0 for a row that has no positive and so no loss."""
        return self._unless_lonely(spec, weight)

    def _unless_lonely(self, spec: Spec, values: Tensor) -> Tensor:
        return values if spec.targets else torch.where(self["count"] == 0, 0.0, values)
