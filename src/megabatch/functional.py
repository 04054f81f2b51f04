"""The losses as functions: check the arguments, describe the loss, run it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from .checks import (
    as_scalar,
    autocast_dtype,
    call_site,
    check_execution_options,
    check_features,
    check_no_tangents,
    check_not_empty,
    check_pairs,
    check_positives,
    check_smoothing,
    check_vector,
    check_word,
    group_name,
    parse_budget,
    parse_tile,
    resolve_scale,
)
from .distributed.ranks import refuse_together
from .keywords import (
    ClipKeywords,
    InfoNCEKeywords,
    LeftOut,
    LogitScale,
    LossKeywords,
    Scalar,
    SigLipKeywords,
    SupConKeywords,
    complete,
    with_keywords,
)
from .losses import spec as specs
from .losses.spec import Spec
from .tiling.operators import contrastive_loss
from .tiling.options import LossInputs, LossOptions, Needs

Loss = Tensor | tuple[Tensor, dict[str, Tensor]]

_IMAGE_AND_TEXT = ("image_to_text", "text_to_image")


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
    ranks = group_name(name, options.get("group", LeftOut.GROUP))
    with refuse_together(name, ranks):
        options = complete(name, options)
        check_pairs(name, image_features=image_features, text_features=text_features)
        id_rule = _check_ids(name, options, "image_features", image_features)
        bias = None if logit_bias is None else as_scalar(name, "logit_bias", logit_bias)
        spec = specs.clip(id_rule, check_smoothing(name, options["label_smoothing"]))
        call = _check(name, ranks, spec, options, "image_features", (image_features, text_features, None), logit_scale)
    result = _run(call, (options["ids"], options["ids"], None), directions=_IMAGE_AND_TEXT)
    if bias is None:
        return result
    value, *stats = result if isinstance(result, tuple) else (result,)
    value = value + (bias.sum() * 0).to(value)
    return (value, stats[0]) if stats else value


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
        negatives: `[K, D]`: more columns for every query, positives of none, for instance mined ones or a queue. With a
            group they are columns for the queries of all ranks: give each rank its shard of a queue they share.
        positives: `[N]` integers: the row of `key` that belongs with each query. Default: row i with query i. With a
            group, rows of this rank's `key`.
    """
    name = "info_nce_loss"
    ranks = group_name(name, options.get("group", LeftOut.GROUP))
    with refuse_together(name, ranks):
        options = complete(name, options)
        if isinstance(negatives, Tensor) and negatives.dim() == 3:
            raise ValueError(
                f"{name}: negatives must have 2 dimensions, because each is a negative for every query, got shape "
                f"{tuple(negatives.shape)}. Pass negatives.flatten(0, 1)."
            )
        extra = {} if negatives is None else {"negatives": negatives}
        check_features(name, query=query, key=key, **extra)
        if not ranks:
            check_not_empty(name, "key", key)
        check_positives(name, positives, query, key, "give query_ids and key_ids with same_ids='positive'")
        id_rule = _check_pair_ids(name, ranks, options, query, key, negatives)
        spec = specs.info_nce(id_rule, check_smoothing(name, options["label_smoothing"]))
        call = _check(name, ranks, spec, options, "query", (query, key, negatives), logit_scale)
    return _run(call, (options["query_ids"], options["key_ids"], options["negative_ids"]), positives)


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
    ranks = group_name(name, options.get("group", LeftOut.GROUP))
    with refuse_together(name, ranks):
        options = complete(name, options)
        check_pairs(name, image_features=image_features, text_features=text_features)
        spec = specs.siglip(_check_ids(name, options, "image_features", image_features))
        features = (image_features, text_features, None)
        call = _check(name, ranks, spec, options, "image_features", features, logit_scale, logit_bias)
    return _run(call, (options["ids"], options["ids"], None), directions=_IMAGE_AND_TEXT)


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
    ranks = group_name(name, options.get("group", LeftOut.GROUP))
    with refuse_together(name, ranks):
        options = complete(name, options)
        check_pairs(name, view1=view1, view2=view2)
        id_rule = _check_ids(name, options, "view1", view1)
        spec = specs.nt_xent(id_rule, check_smoothing(name, options["label_smoothing"]))
        call = _check(name, ranks, spec, options, "view1", (view1, view2, None), logit_scale)
    return _run(call, (options["ids"], options["ids"], None))


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
    ranks = group_name(name, options.get("group", LeftOut.GROUP))
    with refuse_together(name, ranks):
        options = complete(name, options)
        check_features(name, features=features)
        if labels is None:
            raise TypeError(f"{name}: labels must be a tensor, got None.")
        check_vector(name, "labels", labels, "features", features, integers=True)
        spec = specs.supcon(check_smoothing(name, options["label_smoothing"]))
        call = _check(name, ranks, spec, options, "features", (features, None, None), logit_scale)
    return _run(call, (labels, None, None))


def _check_ids(name: str, options: SigLipKeywords, rows_name: str, rows: Tensor) -> str:
    """What pairs of equal ids are: "mask", "positive", or "ignore" if there are no ids."""
    check_word(name, "same_ids", options["same_ids"], ("mask", "positive"))
    check_vector(name, "ids", options["ids"], rows_name, rows, integers=True)
    return "ignore" if options["ids"] is None else options["same_ids"]


def _check_pair_ids(
    name: str, ranks: str, options: InfoNCEKeywords, query: Tensor, key: Tensor, negatives: Tensor | None
) -> str:
    check_word(name, "same_ids", options["same_ids"], ("mask", "positive"))
    query_ids, key_ids, negative_ids = options["query_ids"], options["key_ids"], options["negative_ids"]
    check_vector(name, "query_ids", query_ids, "query", query, integers=True)
    check_vector(name, "key_ids", key_ids, "key", key, integers=True)
    if negative_ids is not None and negatives is None:
        raise ValueError(f"{name}: negative_ids must come with negatives, got none.")
    if negatives is not None:
        check_vector(name, "negative_ids", negative_ids, "negatives", negatives, integers=True)
    has_column_ids = key_ids is not None or negative_ids is not None
    # With several ranks, the columns that have ids may be another rank's negatives.
    if has_column_ids != (query_ids is not None) and (has_column_ids or not ranks):
        got = "query_ids alone" if query_ids is not None else "no query_ids"
        raise ValueError(
            f"{name}: ids must be given for both sides of a pair, query_ids with key_ids or negative_ids, got {got}."
        )
    return "ignore" if query_ids is None else options["same_ids"]


class _Checked(NamedTuple):
    """The arguments of a loss that have been checked."""

    function: str
    ranks: str
    spec: Spec
    options: LossKeywords
    features: tuple[Tensor, Tensor | None, Tensor | None]
    scale: Tensor
    bias: Tensor | None
    tile: tuple[int, int] | None
    memory_budget: int | None


def _check(
    name: str,
    ranks: str,
    spec: Spec,
    options: LossKeywords,
    rows_name: str,
    features: tuple[Tensor, Tensor | None, Tensor | None],
    logit_scale: Scalar | None,
    logit_bias: Scalar | None = None,
) -> _Checked:
    """The checks that all losses share."""
    rows, weight = features[0], options["weight"]
    if not ranks:
        check_not_empty(name, rows_name, rows)
    check_vector(name, "weight", weight, rows_name, rows, integers=False)
    if weight is not None and weight.requires_grad:
        raise ValueError(f"{name}: weight must not require grad, because it gets none. Pass weight.detach().")
    check_word(name, "normalize", options["normalize"], (True, False, None))
    check_word(name, "reduction", options["reduction"], ("mean", "sum", "none"))
    check_word(name, "grad_reduction", options["grad_reduction"], ("mean", "sum"))
    check_word(name, "return_stats", options["return_stats"], (True, False))
    check_execution_options(name, options)
    tile = parse_tile(name, options["tile"], square=spec.symmetric)
    budget = parse_budget(name, options["memory_budget"])
    bias = None if logit_bias is None else as_scalar(name, "logit_bias", logit_bias)
    scale = resolve_scale(name, logit_scale, options["temperature"])
    check_no_tangents(name, *features, scale, bias)
    return _Checked(name, ranks, spec, options, features, scale, bias, tile, budget)


def _run(
    checked: _Checked,
    ids: tuple[Tensor | None, Tensor | None, Tensor | None],
    positives: Tensor | None = None,
    directions: tuple[str, ...] = (),
) -> Loss:
    """The only place that knows how the tiled computation is called."""
    options, grad_enabled = checked.options, torch.is_grad_enabled()
    differentiable = (*checked.features, checked.scale, checked.bias)
    call = LossOptions(
        checked.function,
        checked.spec,
        Needs(*(grad_enabled and x is not None and x.requires_grad for x in differentiable)),
        options["reduction"],
        options["return_stats"],
        options["normalize"],
        checked.tile,
        checked.memory_budget,
        options["backend"],
        autocast_dtype(checked.features[0]),
        checked.ranks,
        options["grad_reduction"],
        options["exchange"],
        options["overlap"],
        grad_enabled,
        call_site() if checked.ranks else "",
    )
    inputs = LossInputs(*differentiable, *ids, positives, options["weight"])
    value, stats = contrastive_loss(inputs, call)
    if stats is None or not call.return_stats:
        return value
    return value, _named(stats, value.dtype, call.spec, directions)


def _named(stats: Tensor, dtype: torch.dtype, spec: Spec, directions: tuple[str, ...]) -> dict[str, Tensor]:
    loss, accuracy, positive_logit, *losses_and_accuracies = stats.detach().to(dtype).unbind()
    named: dict[str, Any] = {"loss": loss, "accuracy": accuracy, "positive_logit": positive_logit}
    for index, direction in enumerate(directions):
        if spec.epilogue == "softmax":
            named[f"loss_{direction}"] = losses_and_accuracies[index]
        named[f"accuracy_{direction}"] = losses_and_accuracies[2 + index]
    return named
