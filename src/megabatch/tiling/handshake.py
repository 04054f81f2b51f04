"""Handshake: facts of all ranks of a call, exchanged once before blocks move.

Messages and their sizes follow from it alone, so that no rank can be left waiting.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.backend import Backend, float32_precision
from ..backends.eager import Eager
from ..backends.select import select
from ..callers import warn_once
from ..distributed.ranks import Facts, Ranks
from .guards import EMPTY_RANGE, check_indices, check_scalars, check_weight, id_range, max_norms, scalar
from .options import LossInputs, LossOptions, Needs

MANY_ROWS = 8  # fewer may have one id by chance
PRECISION = "the precision of float32 products"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # of features


class RankInfo(NamedTuple):
    """Facts of one rank. Triples are about `rows`, `columns` and `negatives` of its LossInputs.

    Attributes:
        max_norms: Bounds of the lengths of rows.
        id_range: Smallest and largest id, where equal ids are masked.
        needs: Of LossOptions.
        scale, bias: NaN where only the device knows.
        grad_enabled: It records gradients.
        budget: Bytes that it may take, if its caller named them; else 0.
    """

    rows: tuple[int, ...] = (0, 0, 0)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
    ids: tuple[bool, ...] = (False,) * 3
    max_norms: tuple[float, ...] = (0.0,) * 3
    id_range: tuple[float, float] = EMPTY_RANGE
    needs: tuple[bool, ...] = (False,) * 5
    grad_enabled: bool = False
    scale: float = 1.0
    bias: float = 0.0
    budget: int = 0

    def encode(self) -> list[float]:
        """As numbers, which is what a handshake can carry."""
        values = [x for value in self for x in (value if isinstance(value, tuple) else (value,))]
        return [DTYPES.index(x) if isinstance(x, torch.dtype) else x for x in values]


class GroupInfo(NamedTuple):
    """RankInfo of all ranks: for every number there, a list by rank."""

    rows: list[list[int]]
    dtypes: list[list[float]]
    ids: list[list[float]]
    max_norms: list[list[float]]
    id_range: list[list[float]]
    needs: list[list[float]]
    grad_enabled: list[float]
    scale: list[float]
    bias: list[float]
    budget: list[float]

    @classmethod
    def decode(cls, ranks: list[list[float]]) -> "GroupInfo":
        """From every rank's `RankInfo.encode()`."""
        fields: Any = map(list, zip(*ranks, strict=True))
        lists = ([next(fields) for _ in x] if isinstance(x, tuple) else next(fields) for x in RankInfo())
        info = cls(*lists)
        return info._replace(rows=[[int(length) for length in lengths] for lengths in info.rows])

    def dtype(self, index: int) -> torch.dtype:
        """Of the features of an input, which all ranks that have rows of it share."""
        used = [code for code, length in zip(self.dtypes[index], self.rows[index], strict=True) if length]
        return DTYPES[int(used[0] if used else self.dtypes[index][0])]

    def length(self, *inputs: int) -> int:
        """Rows of these inputs, on all ranks."""
        return sum(sum(self.rows[index]) for index in inputs)


class Handshake:
    """Facts of all ranks of a call.

    Attributes:
        info: From the forward.
        backend, scale, bias: The same on all ranks.
        needs: Which gradients some rank needs.
    """

    def __init__(self, inputs: LossInputs, ranks: Ranks, info: GroupInfo, backend: type[Backend]) -> None:
        self.ranks, self.info, self.backend = ranks, info, backend
        scale, bias = info.scale[0], info.bias[0]
        self.scale = scalar(inputs.scale, 1.0, inputs.rows) if math.isnan(scale) else scale
        self.bias = scalar(inputs.bias, 0.0, inputs.rows) if math.isnan(bias) else bias
        self.needs = Needs(*map(any, info.needs))

    @classmethod
    def of_forward(cls, inputs: LossInputs, options: LossOptions) -> "Handshake":
        """An error of one rank is raised on all."""
        device = inputs.rows.device
        ranks = Ranks(options.function, options.group, "forward", device)
        own = RankInfo()
        backend: type[Backend] = Eager
        with ranks.deferred_errors() as errors:
            backend = select(options.function, options.backend, device, inputs.rows.dtype)
            ranks.check_device()
            own = _rank_info(inputs, options)
        facts = _same_on_all_ranks(inputs, options, backend) if options.group else {}
        info = GroupInfo.decode(ranks.handshake(facts, own.encode(), errors, options.call_site))
        handshake = cls(inputs, ranks, info, backend)
        handshake._check_together(options.spec.symmetric)
        return handshake

    @classmethod
    def of_backward(
        cls,
        inputs: LossInputs,
        options: LossOptions,
        info: GroupInfo,
        upstream: Tensor,
        forward_number: int,
    ) -> "Handshake":
        """`info` is that of the forward, whose handshake had that number in its group."""
        device = inputs.rows.device
        ranks = Ranks(options.function, options.group, "backward", device)
        if options.group:
            same = {"the order of backwards": f"that of loss {forward_number}", PRECISION: float32_precision(device)}
            known = options.reduction != "none" and device.type == "cpu"
            upstreams = ranks.handshake(same, [upstream.double().item()] if known else [])
            advice = "Pass weight or reduction='none' to weigh rows."
            ranks.check_same("what the loss is multiplied by", [number for own in upstreams for number in own], advice)
        return cls(inputs, ranks, info, select(options.function, options.backend, device, inputs.rows.dtype))

    def _warn_of_equal_ids(self, found: int) -> None:
        """On all ranks, or, where one rank's user turned warnings into errors, raise on all."""
        with self.ranks.deferred_errors() as errors:
            warn_once(
                self.ranks.function,
                "ids",
                f"all ids are equal ({found}), so every pair but a row and its own positive is masked, and the loss is "
                '0. Pass ids that differ between rows, or same_ids="positive".',
            )
        self.ranks.where += ", its warning"
        self.ranks.handshake({}, errors=errors)

    def _check_together(self, symmetric: bool) -> None:
        """What no rank can see alone. All see the same, so all raise the same."""
        function, info, num_rows = self.ranks.function, self.info, self.info.length(0)
        if not num_rows and not (symmetric and info.length(1)):
            raise ValueError(
                f"{function}: the group must have at least one row, got none on all of its {self.ranks.size} ranks."
            )
        low, high = min(info.id_range[0]), max(info.id_range[1])
        id_of_negatives = {has_ids for has_ids, length in zip(info.ids[2], info.rows[2], strict=True) if length}
        # Beyond 2^53 ids that differ may be equal as floating-point numbers.
        if low == high and abs(low) < 2**53 and num_rows >= MANY_ROWS and False not in id_of_negatives:
            self._warn_of_equal_ids(int(low))
        if self.ranks.size == 1:
            return
        if info.ids[0][0] and not any(info.ids[1] + info.ids[2]):
            raise ValueError(
                f"{function}: ids must be given for both sides of a pair, query_ids with key_ids or negative_ids, got "
                "query_ids alone on every rank of the group."
            )
        if len(id_of_negatives) > 1:
            raise ValueError(
                f"{function}: negative_ids must be given on all ranks of the group that have negatives, or on none."
            )
        for index, name in enumerate(("first features", "second features", "negatives")):
            pairs = zip(info.dtypes[index], info.rows[index], strict=True)
            dtypes = [str(DTYPES[int(code)] if length else info.dtype(index)) for code, length in pairs]
            self.ranks.check_same(f"the dtype of the {name}", dtypes)
        for name, values in (("scale", info.scale), ("bias", info.bias)):
            self.ranks.check_same(f"logit_{name}", values, "Broadcast it from one rank before training.")
        if any(self.needs) and not all(info.grad_enabled):
            raise ValueError(
                f"{function}: gradients must be recorded on every rank if one needs them, but rank "
                f"{info.grad_enabled.index(False)} runs "
                "under torch.no_grad or torch.inference_mode. Run it with gradients on, or detach the others' inputs."
            )


def _rank_info(inputs: LossInputs, options: LossOptions) -> RankInfo:
    """Or what this rank has against its own values."""
    function = options.function
    column_ids = inputs.row_ids if options.spec.symmetric else inputs.column_ids
    scale, bias = scalar(inputs.scale, 1.0, inputs.rows), scalar(inputs.bias, 0.0, inputs.rows)
    check_scalars(function, scale, bias)
    if inputs.positives is not None and inputs.columns is not None:
        check_indices(function, "positives", inputs.positives, len(inputs.columns), options.group)
    if inputs.weight is not None:
        check_weight(function, inputs.weight, options.group)
    return RankInfo(
        rows=tuple([0 if x is None else len(x) for x in inputs.features]),
        dtypes=tuple([inputs.rows.dtype if x is None else x.dtype for x in inputs.features]),
        ids=(inputs.row_ids is not None, column_ids is not None, inputs.negative_ids is not None),
        max_norms=max_norms(inputs, options),
        id_range=id_range(inputs, options),
        needs=options.needs,
        grad_enabled=options.grad_enabled,
        scale=math.nan if isinstance(scale, Tensor) else scale,
        bias=math.nan if isinstance(bias, Tensor) else bias,
        budget=options.memory_budget or 0,
    )


def _same_on_all_ranks(inputs: LossInputs, options: LossOptions, backend: type[Backend]) -> Facts:
    """By the names that users know."""
    given: dict[str, Any] = {"ids": inputs.row_ids, "key_ids": inputs.column_ids, "weight": inputs.weight}
    return {
        **feature_facts(inputs.rows),
        **{f"{name} (given or missing)": "missing" if x is None else "given" for name, x in given.items()},
        "the autocast dtype": options.autocast_dtype,
        "same_ids": options.spec.id_rule,
        "label_smoothing": options.spec.label_smoothing,
        "normalize": bool(options.normalize),
        **{name: getattr(options, name) for name in ("reduction", "return_stats", "grad_reduction", "exchange")},
        "the backend": backend.name,  # another one rounds differently, or sums the scale's gradient elsewhere
        PRECISION: float32_precision(inputs.rows.device),
    }


def feature_facts(features: Tensor) -> Facts:
    """What must be the same on all ranks of a group."""
    return {
        "the width of features": features.shape[1],
        "the dtype of features": str(features.dtype).removeprefix("torch."),
        "the kind of device": features.device.type,
    }
