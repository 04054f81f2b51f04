"""Meeting: what the ranks of a call know of each other, exchanged once before anything else moves.

Messages, their sizes and who takes part in what follow from it alone, so that no rank can be left waiting.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.backend import Backend, float32_precision
from ..backends.eager import Eager
from ..backends.select import select
from ..distributed.collectives import Facts, Ranks, first_difference, kind_of
from ..distributed.ring import owner_at
from .call import Call, Inputs, Needs
from .values import check_values

FURTHEST_SCALES = 1e-5  # relative: ranks may round a logarithm's exponential differently
WIDE = 2**16  # features
SMALLEST_PULL = torch.finfo(torch.float64).tiny  # to divide by


@dataclass(frozen=True)
class Guest:
    """What one rank brings. Triples are about `first`, `second` and `extra` of its Inputs.

    Attributes:
        gradients: It records gradients: it can take part in a backward.
        weights: Sum and maximum of its rows' weights.
        upstream: d objective / d value, in the backward of a mean or sum; of losses per row, the largest.
        budget: Bytes that it may take, if its caller named them.
        decides: Its caller chose a tile or a budget, or came with rows so wide that the default budget may not do.
    """

    rows: tuple[int, ...]
    dtypes: tuple[str, ...]
    ids: tuple[bool, ...]
    needs: Needs
    gradients: bool
    scale: float
    bias: float
    weights: tuple[float, float]
    upstream: float
    budget: int | None
    decides: bool


class Place(NamedTuple):
    """A block of a rank: which of its inputs, and where its rows lie on their side of the plane."""

    which: int
    start: int
    length: int


class Meeting:
    """All ranks of a call.

    Attributes:
        backend, scale, bias: The same on all ranks.
    """

    def __init__(self, inputs: Inputs, call: Call, upstream: Tensor | None = None, forward: int = 0) -> None:
        """`upstream` and `forward`, the number of its forward, come with a backward."""
        self.call, self.spec = call, call.spec
        turn = "forward" if upstream is None else "backward"
        self.ranks = Ranks(call.function, call.group, turn, inputs.first.device)
        self.width = inputs.first.shape[1]
        mine, error = _guest(inputs, call, upstream), None
        self.backend: type[Backend] = Eager
        try:
            self.backend = select(call.function, call.backend, inputs.first.device, inputs.first.dtype)
            if upstream is None:
                self.ranks.check_device()
                check_values(inputs, call, mine.scale, mine.bias)
        except ValueError as refused:
            error = refused
        self.guests = [mine]
        if call.group:
            options = _options(inputs, call) | {"the order of backwards": f"that of loss {forward}"}
            # Others round in another way, or add up the scale's gradient elsewhere.
            options["the backend"] = self.backend.name
            options["the precision of float32 products"] = float32_precision(inputs.first.device)
            self.guests = [_guest_from(own) for own in self.ranks.agree(options, vars(mine), error)]
            self._check_together()
        elif error is not None:
            raise error
        self.scale, self.bias = self.guests[0].scale, self.guests[0].bias
        if not 0 < self.weight < math.inf:
            raise ValueError(f"{call.function}: weight must have a positive, finite sum, got {self.weight}.")

    @cached_property
    def wanted(self) -> Needs:
        """Which gradients some rank needs."""
        return Needs(*(any(needs) for needs in zip(*(guest.needs for guest in self.guests), strict=True)))

    def _check_together(self) -> None:
        """What no rank can see alone. All see the same, so all raise the same."""
        function = self.call.function
        if self.num_rows == 0:
            raise ValueError(
                f"{function}: the group must bring at least one row, got none on all of its {self.ranks.size} ranks."
            )
        if self.guests[0].ids[0] and not any(guest.ids[1] or guest.ids[2] for guest in self.guests):
            raise ValueError(
                f"{function}: ids must be given for both sides of a pair, query_ids with key_ids or negative_ids, got "
                "query_ids alone on every rank of the group."
            )
        if len({guest.ids[2] for guest in self.guests if guest.rows[2]}) > 1:
            raise ValueError(
                f"{function}: negative_ids must be given on all ranks of the group that bring negatives, or on none."
            )
        for name in ("scale", "bias"):
            if difference := first_difference([getattr(guest, name) for guest in self.guests], _close):
                raise ValueError(
                    f"{function}: logit_{name} must be the same on every rank of the group, got {difference}. "
                    "Broadcast it from one rank before training."
                )
        unwilling = [rank for rank, guest in enumerate(self.guests) if not guest.gradients]
        if any(self.wanted) and unwilling:
            raise ValueError(
                f"{function}: gradients must be recorded on every rank if one needs them, but rank {unwilling[0]} runs "
                "under torch.no_grad or torch.inference_mode. Run it with gradients on, or detach the others' inputs."
            )
        # Losses per row may have another multiplier each.
        upstreams = [] if self.call.reduction == "none" else [guest.upstream for guest in self.guests]
        if difference := first_difference(upstreams, _same_number):
            raise ValueError(
                f"{function}: what the loss is multiplied by must be the same on every rank of the group, got "
                f"{difference}. Pass weight or reduction='none' to weigh rows."
            )

    def agree_on_plans(self, error: ValueError | None) -> None:
        """Raise what a rank has against its plan on all ranks, if any may have something."""
        if any(guest.decides for guest in self.guests):
            self.ranks.place += ", its second part"
            self.ranks.agree({}, {}, error)
        elif error is not None:
            raise error

    # ---- who holds what

    @cached_property
    def num_rows(self) -> int:
        """Of all ranks: the rows that have a loss."""
        return sum(place.length for places in self.row_places for place in places)

    @cached_property
    def weight(self) -> float:
        """Of all rows of all ranks, each counted once."""
        return math.fsum(guest.weights[0] for guest in self.guests)

    @cached_property
    def largest_pull(self) -> float:
        """Pulls are divided by it, so that slopes are of size 1 whatever the weights."""
        per_row = self.ranks.turn == "backward" and self.call.reduction == "none"
        largest = [guest.upstream if per_row else guest.weights[1] for guest in self.guests]
        return math.nan if any(map(math.isnan, largest)) else max(*largest, SMALLEST_PULL)

    @cached_property
    def row_places(self) -> list[list[Place]]:
        """The blocks of every rank's rows."""
        return self._places((0, 1) if self.spec.symmetric else (0,))

    @cached_property
    def column_places(self) -> list[list[Place]]:
        return self._places((0, 1) if self.spec.symmetric else (1, 2))

    def _places(self, side: tuple[int, ...]) -> list[list[Place]]:
        """All ranks' rows of a side's first input come before those of its second."""
        places: list[list[Place]] = [[] for _ in self.guests]
        start = 0
        for which in side:
            for rank, guest in enumerate(self.guests):
                places[rank].append(Place(which, start, guest.rows[which]))
                start += guest.rows[which]
        return places

    def all_needed(self, side: list[list[Place]]) -> bool:
        """Whether every row of a side, on every rank, gets a gradient."""
        return all(
            guest.needs[place.which] or place.length == 0
            for guest, places in zip(self.guests, side, strict=True)
            for place in places
        )

    @property
    def reach(self) -> int:
        """How many ranks' columns come by. Of a symmetric plane half are enough."""
        return self.ranks.size // 2 if self.spec.symmetric else self.ranks.size - 1

    def visiting(self) -> list[Place]:
        """The blocks that come by."""
        owners = (owner_at(step, self.ranks.rank, self.ranks.size) for step in range(1, self.reach + 1))
        return [place for owner in owners for place in self.column_places[owner]]

    def gathers(self) -> bool:
        """Whether ranks exchange all columns at once rather than one after the other."""
        if self.call.exchange != "auto":
            return self.call.exchange == "gather"
        columns = sum(place.length for places in self.column_places for place in places)
        features: int = max(getattr(torch, name).itemsize for guest in self.guests for name in guest.dtypes if name)
        gradients = 2 * max(features, torch.float32.itemsize)  # those that go home and those that come
        return columns * self.width * (features + gradients) <= min(
            guest.budget or self.backend.default_budget for guest in self.guests
        )


def _guest(inputs: Inputs, call: Call, upstream: Tensor | None) -> Guest:
    features = inputs[:3]
    ids = (inputs.first_ids, inputs.first_ids if call.spec.symmetric else inputs.second_ids, inputs.extra_ids)
    count, weight = float(len(inputs.first)), inputs.weight
    weights = (count, min(count, 1.0)) if weight is None else _sum_and_largest(weight.double())
    multiplied = 0.0
    if upstream is not None and call.reduction == "none":
        multiplied = _largest_pull(inputs, upstream)
    elif upstream is not None and call.group:  # alone, there is no other to compare it with
        multiplied = upstream.double().item()
    return Guest(
        rows=tuple(0 if x is None else len(x) for x in features),
        dtypes=tuple("" if x is None else str(x.dtype).removeprefix("torch.") for x in features),
        ids=tuple(x is not None for x in ids),
        needs=call.needs,
        gradients=call.gradients,
        scale=inputs.scale.item(),
        bias=0.0 if inputs.bias is None else inputs.bias.item(),
        weights=weights,
        upstream=multiplied,
        budget=call.memory_budget,
        decides=call.memory_budget is not None or call.tile is not None or inputs.first.shape[1] > WIDE,
    )


def _sum_and_largest(weight: Tensor) -> tuple[float, float]:
    return (weight.sum().item(), weight.amax().item()) if len(weight) else (0.0, 0.0)


def _largest_pull(inputs: Inputs, upstream: Tensor) -> float:
    pull = upstream.double()
    if inputs.weight is not None:
        pull = pull * inputs.weight.double().repeat(len(pull) // max(len(inputs.weight), 1))
    return pull.abs().amax().item() if len(pull) else 0.0


def _options(inputs: Inputs, call: Call) -> Facts:
    """What must be the same on all ranks, by the names that users know."""
    return {
        **kind_of(inputs.first),
        "the autocast dtype": call.product,
        "ids (given or missing)": _given(inputs.first_ids),
        "key_ids (given or missing)": _given(inputs.second_ids),
        "weight (given or missing)": _given(inputs.weight),
        "same_ids": call.spec.same,
        "label_smoothing": call.spec.smoothing,
        "normalize": bool(call.normalize),
        "reduction": call.reduction,
        "return_stats": call.stats,
        "grad_reduction": call.grad_reduction,
        "exchange": call.exchange,
    }


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=FURTHEST_SCALES, abs_tol=1e-12)


def _same_number(one: float, other: float) -> bool:
    """NaN, too, is the same on all ranks."""
    return one == other or (math.isnan(one) and math.isnan(other))


def _given(x: Tensor | None) -> str:
    return "missing" if x is None else "given"


def _guest_from(own: Facts) -> Guest:
    """A guest from what JSON made of it."""
    lists = {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
    return Guest(**{**own, **lists, "needs": Needs(*own["needs"])})
