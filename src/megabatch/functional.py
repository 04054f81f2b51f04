"""The losses as functions: check the arguments, describe the loss, run it."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import checks
from .callers import call_site
from .distributed.ranks import refuse_together
from .keywords import (
    ClipKeywords,
    InfoNCEKeywords,
    LogitScale,
    LossKeywords,
    Scalar,
    SigLipKeywords,
    SupConKeywords,
    complete,
    with_keywords,
)
from .losses import spec as specs
from .tiling.operators import contrastive_loss
from .tiling.options import LossInputs, LossOptions, Needs

Loss = Tensor | tuple[Tensor, dict[str, Tensor]]


@with_keywords
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: LogitScale = None,
    *,
    logit_bias: Scalar | None = None,
    **options: Unpack[ClipKeywords],
) -> Loss:
    """Symmetric image-text loss of CLIP, without the matrix of logits.

    Equals, up to rounding,

        logits = logit_scale * image_features @ text_features.T
        target = torch.arange(len(logits))
        (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2

    Args:
        image_features: `[N, D]`.
        text_features: `[N, D]`. Row i belongs with row i of `image_features`; all others are its negatives.
        logit_bias: Accepted because models return one. A softmax does not depend on it: its gradient is zero.
    """
    name = "clip_loss"
    ranks = checks.group_name(name, options.pop("group", ...))
    with refuse_together(name, ranks, image_features):
        inputs = _pairs(name, ranks, options, image_features=image_features, text_features=text_features)
        bias = None if logit_bias is None else checks.as_scalar(name, "logit_bias", logit_bias)
        call = _check(name, ranks, specs.clip, inputs, logit_scale, options)
    return _run(*call, unused_bias=bias)


@with_keywords
def info_nce_loss(
    query: Tensor,
    key: Tensor,
    logit_scale: LogitScale = None,
    *,
    negatives: Tensor | None = None,
    positives: Tensor | None = None,
    **options: Unpack[InfoNCEKeywords],
) -> Loss:
    """InfoNCE from queries to keys, without the matrix of logits.

    Equals, up to rounding,

        logits = logit_scale * query @ torch.cat([key, negatives]).T
        cross_entropy(logits, positives)

    Args:
        query: `[N, D]`.
        key: `[M, D]`, M at least N unless `positives` is given.
        negatives: `[K, D]`: extra negatives for every query, for instance mined ones or a queue. With a group they are
            negatives for the queries of all ranks: give each rank its shard of a shared queue.
        positives: `[N]` integers: the row of `key` that belongs with each query. Default: row i with query i. With a
            group, rows of this rank's `key`.
    """
    name = "info_nce_loss"
    ranks = checks.group_name(name, options.pop("group", ...))
    with refuse_together(name, ranks, query):
        if isinstance(negatives, Tensor) and negatives.dim() == 3:
            raise ValueError(
                f"{name}: negatives must have 2 dimensions, because each is a negative for every query, got shape "
                f"{tuple(negatives.shape)}. Pass negatives.flatten(0, 1)."
            )
        extra = {} if negatives is None else {"negatives": negatives}
        checks.features(name, ranks, query=query, key=key, **extra)
        checks.positives(name, positives, query, key, "give query_ids and key_ids with same_ids='positive'")
        query_ids = checks.vector(name, "query_ids", options.pop("query_ids", None), "query", query)
        key_ids = checks.vector(name, "key_ids", options.pop("key_ids", None), "key", key)
        negative_ids = options.pop("negative_ids", None)
        if negatives is not None:
            checks.vector(name, "negative_ids", negative_ids, "negatives", negatives)
        elif negative_ids is not None:
            raise ValueError(f"{name}: negative_ids must come with negatives, got none.")
        has_column_ids = key_ids is not None or negative_ids is not None
        # With several ranks, the columns that have ids may be another rank's negatives.
        if has_column_ids != (query_ids is not None) and (has_column_ids or not ranks):
            rule = "ids must be given for both sides of a pair, query_ids with key_ids or negative_ids"
            got = "query_ids alone" if query_ids is not None else "no query_ids"
            raise ValueError(f"{name}: {rule}, got {got}.")
        weight = checks.vector(name, "weight", options.pop("weight", None), "query", query, integers=False)
        inputs = LossInputs(query, key, negatives, None, None, query_ids, key_ids, negative_ids, positives, weight)
        call = _check(name, ranks, specs.info_nce, inputs, logit_scale, options)
    return _run(*call)


@with_keywords
def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: LogitScale = None,
    logit_bias: Scalar | None = None,
    **options: Unpack[SigLipKeywords],
) -> Loss:
    """Sigmoid image-text loss of SigLIP, without the matrix of logits.

    Equals, up to rounding,

        logits = logit_scale * image_features @ text_features.T + logit_bias
        sign = 2 * torch.eye(len(logits)) - 1
        -logsigmoid(sign * logits).sum() / len(logits)

    Args:
        image_features: `[N, D]`.
        text_features: `[N, D]`. Row i belongs with row i of `image_features`; all others are its negatives.
        logit_bias: Added to every logit; a float, 0-d or shape-[1] tensor. None: 0.
    """
    name = "siglip_loss"
    ranks = checks.group_name(name, options.pop("group", ...))
    with refuse_together(name, ranks, image_features):
        inputs = _pairs(name, ranks, options, image_features=image_features, text_features=text_features)
        call = _check(name, ranks, specs.siglip, inputs, logit_scale, options, logit_bias)
    return _run(*call)


@with_keywords
def nt_xent_loss(view1: Tensor, view2: Tensor, logit_scale: LogitScale = None, **options: Unpack[ClipKeywords]) -> Loss:
    """NT-Xent, the loss of SimCLR, without the matrix of logits.

    Equals, up to rounding,

        views = torch.cat([view1, view2])
        logits = (logit_scale * views @ views.T).fill_diagonal_(-inf)
        cross_entropy(logits, torch.arange(2 * N).roll(N))

    Args:
        view1: `[N, D]`.
        view2: `[N, D]`. Row i is the other view of row i of `view1`; all other rows of both views are its negatives.
            With reduction "none" there are 2N losses, those of `view1` first; `weight` and `ids` apply to both views.
    """
    name = "nt_xent_loss"
    ranks = checks.group_name(name, options.pop("group", ...))
    with refuse_together(name, ranks, view1):
        inputs = _pairs(name, ranks, options, view1=view1, view2=view2)
        call = _check(name, ranks, specs.nt_xent, inputs, logit_scale, options)
    return _run(*call)


@with_keywords
def supcon_loss(
    features: Tensor, labels: Tensor, logit_scale: LogitScale = None, **options: Unpack[SupConKeywords]
) -> Loss:
    """Supervised contrastive loss (Khosla et al., "out"), without the matrix of logits.

    Equals, up to rounding,

        logits = (logit_scale * features @ features.T).fill_diagonal_(-inf)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        anchors = positive.any(1)
        loss = -log_softmax(logits, 1).where(positive, 0).sum(1) / positive.sum(1)
        loss[anchors].mean()

    An anchor without positives is left out of the mean. If no anchor has any, the loss is 0.

    Args:
        features: `[N, D]`.
        labels: `[N]` integers. Rows of one label are positives of each other.
    """
    name = "supcon_loss"
    ranks = checks.group_name(name, options.pop("group", ...))
    with refuse_together(name, ranks, features):
        checks.features(name, ranks, features=features)
        checks.dense(name, "labels", labels)
        checks.vector(name, "labels", labels, "features", features)
        weight = checks.vector(name, "weight", options.pop("weight", None), "features", features, integers=False)
        inputs = LossInputs(features, row_ids=labels, weight=weight)
        call = _check(name, ranks, specs.supcon, inputs, logit_scale, options)
    return _run(*call)


def _pairs(name: str, ranks: str, options: SigLipKeywords, **features: Tensor) -> LossInputs:
    """Rows and columns, of which row i of one belongs with row i of the other."""
    checks.features(name, ranks, **features)
    (rows_name, rows), (columns_name, columns) = features.items()
    if rows.shape[0] != columns.shape[0]:
        raise ValueError(
            f"{name}: {rows_name} and {columns_name} must have the same number of rows, because row i of one belongs "
            f"with row i of the other; got {len(rows)} and {len(columns)}. Drop the ragged last batch in the loader, "
            "or pass the pairs that exist."
        )
    ids = checks.vector(name, "ids", options.pop("ids", None), rows_name, rows)
    weight = checks.vector(name, "weight", options.pop("weight", None), rows_name, rows, integers=False)
    return LossInputs(rows, columns, row_ids=ids, column_ids=ids, weight=weight)


def _check(
    name: str,
    ranks: str,
    make_spec: Callable[..., specs.Spec],
    inputs: LossInputs,
    logit_scale: Scalar | None,
    options: LossKeywords,
    logit_bias: Scalar | None = None,
) -> tuple[LossInputs, LossOptions]:
    """The checks that all losses share: of the scale, the bias, and the options that are no tensors."""
    temperature, grad_enabled = options.pop("temperature", None), torch.is_grad_enabled()
    rows, columns, negatives, _, _, *others = inputs  # torch 2.8 traces no property and no method of a named tuple
    features = (rows, columns, negatives)
    differentiable = (*features, logit_scale if temperature is None else temperature, logit_bias)
    needs = tuple([grad_enabled and isinstance(x, Tensor) and x.requires_grad for x in differentiable])
    has_ids, autocast = inputs.row_ids is not None, checks.autocast_dtype(inputs.rows)
    facts = (name, ranks, make_spec, has_ids, needs, grad_enabled, autocast, call_site() if ranks else "")
    cacheable = not torch.compiler.is_compiling() and _CACHEABLE.issuperset(map(type, options.values()))
    call = (_cached_options if cacheable else _make_options)(*facts, **options)
    scale = checks.resolve_scale(name, logit_scale, temperature)
    bias = None if logit_bias is None else checks.as_scalar(name, "logit_bias", logit_bias)
    checks.no_tangents(name, *features, scale, bias)
    return LossInputs(*features, scale, bias, *others), call


def _make_options(
    name: str,
    ranks: str,
    make_spec: Callable[..., specs.Spec],
    has_ids: bool,
    needs: tuple[bool, ...],
    grad_enabled: bool,
    autocast: str,
    site: str,
    /,  # an unknown keyword may have any name
    **given: Any,
) -> LossOptions:
    options = checks.options(name, complete(name, given))
    of_spec = {}
    if "same_ids" in options:
        same_ids = options.pop("same_ids")
        of_spec["id_rule"] = same_ids if has_ids else "ignore"
    if "label_smoothing" in options:
        of_spec["label_smoothing"] = options.pop("label_smoothing")
    spec, tile = make_spec(**of_spec), options["tile"]
    if spec.symmetric and tile is not None and tile[0] != tile[1]:
        raise ValueError(f"{name}: tile must be square, because the logits are symmetric, got {tile}.")
    options |= {"group": ranks, "autocast_dtype": autocast, "grad_enabled": grad_enabled, "call_site": site}
    return LossOptions(name, spec, Needs(*needs), **options)


_CACHEABLE = {str, bool, int, float, type(None)}  # no tensors, and nothing that equals a value of another type inside
_cached_options = lru_cache(maxsize=256, typed=True)(_make_options)


def _run(inputs: LossInputs, options: LossOptions, unused_bias: Tensor | None = None) -> Loss:
    """The only place that knows how the tiled computation is called."""
    value, stats = contrastive_loss(inputs, options)
    if unused_bias is not None:
        value = value + (unused_bias.sum() * 0).to(value.dtype)
    if stats is None or not options.return_stats:
        return value
    loss, accuracy, positive_logit, *each_direction = stats.detach().to(value.dtype).unbind()
    named = {"loss": loss, "accuracy": accuracy, "positive_logit": positive_logit}
    for index, direction in enumerate(("image_to_text", "text_to_image")):
        if options.spec.column_loss:
            named[f"loss_{direction}"] = each_direction[index]
        if options.spec.column_loss or options.spec.epilogue == "sigmoid":
            named[f"accuracy_{direction}"] = each_direction[2 + index]
    return value, named
