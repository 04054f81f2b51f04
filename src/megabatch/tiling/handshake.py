"""Handshake: what the ranks of a call know of each other, exchanged once before blocks move.

Messages, their sizes and who takes part in what follow from it alone, so that no rank can be left waiting.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..backends.backend import Backend, float32_precision
from ..backends.eager import Eager
from ..backends.select import select
from ..distributed.ranks import Facts, Ranks, feature_facts, first_difference
from .guards import MANY_ROWS, Norms, check_values, id_range, warn_of_range
from .options import LossInputs, LossOptions, Needs

SCALE_TOLERANCE = 1e-5  # relative: ranks may round the exponential of a logarithm differently
WIDE = 2**16  # features
SMALLEST_ROW_GRAD = torch.finfo(torch.float64).tiny  # to divide by


_NONE = Needs()


@dataclass(frozen=True)
class RankInfo:
    """What one rank brings. Triples are about `rows`, `columns` and `negatives` of its LossInputs.

    Attributes:
        max_norms: Bounds of the lengths of rows.
        id_range: Smallest and largest id, where equal ids are masked.
        grad_enabled: It records gradients: it can take part in a backward.
        weights: Sum and maximum of its rows' weights.
        upstream: d objective / d value, in the backward of a mean or sum; of losses per row, the largest.
        budget: Bytes that it may take, if its caller named them.
        plan_may_fail: Its caller chose a tile or a budget, or its rows are so wide that the default may not do.
    """

    rows: tuple[int, ...]
    dtypes: tuple[str, ...]
    ids: tuple[bool, ...]
    max_norms: tuple[float, ...]
    id_range: tuple[float, float] | None = None
    needs: Needs = _NONE
    grad_enabled: bool = False
    scale: float = 1.0
    bias: float = 0.0
    weights: tuple[float, float] = (0.0, 0.0)
    upstream: float = 0.0
    budget: int | None = None
    plan_may_fail: bool = False

    @classmethod
    def from_facts(cls, facts: Facts) -> "RankInfo":
        """From what JSON made of it."""
        tuples = {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
        return cls(**{**facts, **tuples, "needs": Needs(*facts["needs"])})


class Handshake:
    """All ranks of a call.

    Attributes:
        infos: Of every rank.
        backend, scale, bias: The same on all ranks.
    """

    def __init__(
        self,
        inputs: LossInputs,
        options: LossOptions,
        norms: Norms,
        error: Exception | None = None,
        upstream: Tensor | None = None,
        forward_number: int = 0,
    ) -> None:
        """`upstream` and `forward_number`, that of the handshake of the forward, come with a backward. `error` is what
        this rank has against the call."""
        self.options, self.spec = options, options.spec
        self.phase = "forward" if upstream is None else "backward"
        device = inputs.rows.device
        self.ranks = Ranks(options.function, options.group, self.phase, device)
        mine = _rank_info(inputs, options, norms, upstream)
        self.backend: type[Backend] = Eager
        try:
            self.backend = select(options.function, options.backend, device, inputs.rows.dtype)
            if upstream is None:
                self.ranks.check_device()
                check_values(inputs, options, mine.scale, mine.bias)
        except ValueError as refused:
            error = refused.with_traceback(None)  # which would hold this frame, and with it the group
        self.infos = [mine]
        if options.group:
            same = _same_on_all_ranks(inputs, options) | {
                "the order of backwards": f"that of loss {forward_number}",
                # Another one rounds differently, or sums the scale's gradient elsewhere.
                "the backend": self.backend.name,
                "the precision of float32 products": float32_precision(device),
            }
            facts = self.ranks.handshake(same, asdict(mine), error, options.call_site)
            self.infos = [RankInfo.from_facts(own) for own in facts]
            self._check_together()
        elif error is not None:
            raise error
        self.scale, self.bias = self.infos[0].scale, self.infos[0].bias
        if not 0 < self.weight_sum < math.inf:
            raise ValueError(f"{options.function}: weight must have a positive, finite sum, got {self.weight_sum}.")

    @cached_property
    def needs(self) -> Needs:
        """Which gradients some rank needs."""
        return Needs(*(any(needs) for needs in zip(*(info.needs for info in self.infos), strict=True)))

    @cached_property
    def weight_sum(self) -> float:
        """Of all rows of all ranks, each counted once."""
        return math.fsum(info.weights[0] for info in self.infos)

    @cached_property
    def largest_row_grad(self) -> float:
        """Row gradients are divided by it, so that dlogits are of size 1 whatever the weights."""
        per_row = self.phase == "backward" and self.options.reduction == "none"
        largest = [info.upstream if per_row else info.weights[1] for info in self.infos]
        return math.nan if any(map(math.isnan, largest)) else max(*largest, SMALLEST_ROW_GRAD)

    def agree_on_plan(self, error: ValueError | None) -> None:
        """Raise what a rank has against its plan on all ranks, if any may have something."""
        if any(info.plan_may_fail for info in self.infos):
            self.ranks.where += ", its second part"
            self.ranks.handshake({}, {}, error)
        elif error is not None:
            raise error

    def _check_together(self) -> None:
        """What no rank can see alone. All see the same, so all raise the same."""
        function, infos = self.options.function, self.infos
        if not any(info.rows[0] or (self.spec.symmetric and info.rows[1]) for info in infos):
            raise ValueError(
                f"{function}: the group must bring at least one row, got none on all of its {len(infos)} ranks."
            )
        if infos[0].ids[0] and not any(info.ids[1] or info.ids[2] for info in infos):
            raise ValueError(
                f"{function}: ids must be given for both sides of a pair, query_ids with key_ids or negative_ids, got "
                "query_ids alone on every rank of the group."
            )
        if len({info.ids[2] for info in infos if info.rows[2]}) > 1:
            raise ValueError(
                f"{function}: negative_ids must be given on all ranks of the group that bring negatives, or on none."
            )
        for name in ("scale", "bias"):
            if difference := first_difference([getattr(info, name) for info in infos], _close):
                raise ValueError(
                    f"{function}: logit_{name} must be the same on every rank of the group, got {difference}. "
                    "Broadcast it from one rank before training."
                )
        ranges = [info.id_range for info in infos if info.id_range is not None]
        unmasked = any(info.rows[2] and not info.ids[2] for info in infos)
        if ranges and not unmasked and sum(info.rows[0] for info in infos) >= MANY_ROWS:
            lows, highs = zip(*ranges, strict=True)
            warn_of_range(function, "ids", min(lows), max(highs))
        disabled = [rank for rank, info in enumerate(infos) if not info.grad_enabled]
        if any(self.needs) and disabled:
            raise ValueError(
                f"{function}: gradients must be recorded on every rank if one needs them, but rank {disabled[0]} runs "
                "under torch.no_grad or torch.inference_mode. Run it with gradients on, or detach the others' inputs."
            )
        # Losses per row may have another multiplier each.
        upstreams = [] if self.options.reduction == "none" else [info.upstream for info in infos]
        if difference := first_difference(upstreams, _same_number):
            raise ValueError(
                f"{function}: what the loss is multiplied by must be the same on every rank of the group, got "
                f"{difference}. Pass weight or reduction='none' to weigh rows."
            )


def _rank_info(inputs: LossInputs, options: LossOptions, norms: Norms, upstream: Tensor | None) -> RankInfo:
    column_ids = inputs.row_ids if options.spec.symmetric else inputs.column_ids
    count, weight = float(len(inputs.rows)), inputs.weight
    if weight is None:
        weights = count, min(count, 1.0)
    else:
        weights = (weight.double().sum().item(), weight.double().amax().item()) if len(weight) else (0.0, 0.0)
    multiplier = 0.0
    if upstream is not None and options.reduction == "none":
        multiplier = _largest_row_grad(weight, upstream)
    elif upstream is not None and options.group:  # alone, there is no other to compare it with
        multiplier = upstream.double().item()
    return RankInfo(
        rows=tuple([0 if x is None else len(x) for x in inputs.features]),
        dtypes=tuple(["" if x is None else str(x.dtype).removeprefix("torch.") for x in inputs.features]),
        ids=(inputs.row_ids is not None, column_ids is not None, inputs.negative_ids is not None),
        max_norms=norms.largest,
        id_range=id_range(inputs, options) if upstream is None else None,
        needs=options.needs,
        grad_enabled=options.grad_enabled,
        scale=1.0 if inputs.scale is None else inputs.scale.item(),
        bias=0.0 if inputs.bias is None else inputs.bias.item(),
        weights=weights,
        upstream=multiplier,
        budget=options.memory_budget,
        plan_may_fail=options.memory_budget is not None or options.tile is not None or inputs.rows.shape[1] > WIDE,
    )


def _largest_row_grad(weight: Tensor | None, upstream: Tensor) -> float:
    row_grad = upstream.double()
    if weight is not None:
        row_grad = row_grad * weight.double().repeat(len(row_grad) // max(len(weight), 1))
    return row_grad.abs().amax().item() if len(row_grad) else 0.0


def _same_on_all_ranks(inputs: LossInputs, options: LossOptions) -> Facts:
    """By the names that users know."""
    given: dict[str, Any] = {"ids": inputs.row_ids, "key_ids": inputs.column_ids, "weight": inputs.weight}
    return {
        **feature_facts(inputs.rows),
        **{f"{name} (given or missing)": "missing" if x is None else "given" for name, x in given.items()},
        "the autocast dtype": options.autocast_dtype,
        "same_ids": options.spec.id_rule,
        "label_smoothing": options.spec.label_smoothing,
        "normalize": bool(options.normalize),
        "reduction": options.reduction,
        "return_stats": options.return_stats,
        "grad_reduction": options.grad_reduction,
        "exchange": options.exchange,
    }


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SCALE_TOLERANCE, abs_tol=1e-12)


def _same_number(one: float, other: float) -> bool:
    """NaN, too, is the same on all ranks."""
    return one == other or (math.isnan(one) and math.isnan(other))
