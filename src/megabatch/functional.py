"""The losses as functions: check what came in, describe the loss, run it."""

from typing import Any

import torch
from torch import Tensor

from .checks import (
    Group,
    autocast_dtype,
    bytes_of,
    check_features,
    check_keys,
    check_no_tangents,
    check_not_empty,
    check_rows,
    check_smoothing,
    check_vector,
    check_ways,
    check_word,
    group_name,
    scalar,
    scale_of,
    tile_of,
)
from .distributed.ranks import refuse_together
from .losses import spec as specs
from .losses.spec import Spec
from .tiling.operators import contrastive_loss
from .tiling.options import LossInputs, LossOptions, Needs

Loss = Tensor | tuple[Tensor, dict[str, Tensor]]

_PAIRED = "row i of one belongs with row i of the other"


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor | None = None,
    *,
    logit_bias: float | Tensor | None = None,
    temperature: float | Tensor | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Group = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
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
    ranks = group_name(name, group)
    with refuse_together(name, ranks):
        check_features(name, image_features=image_features, text_features=text_features)
        check_rows(name, _PAIRED, image_features=image_features, text_features=text_features)
        check_word(name, "same_ids", same_ids, ("mask", "positive"))
        check_vector(name, "ids", ids, "image_features", image_features, integers=True)
        bias = None if logit_bias is None else scalar(name, "logit_bias", logit_bias)
        call = _describe(
            name,
            specs.clip(_same(same_ids, ids), check_smoothing(name, label_smoothing)),
            ("image_features", image_features),
            text_features,
            logit_scale=logit_scale,
            temperature=temperature,
            normalize=normalize,
            ids=(ids, ids, None),
            weight=weight,
            reduction=reduction,
            return_stats=return_stats,
            ranks=ranks,
            grad_reduction=grad_reduction,
            exchange=exchange,
            overlap=overlap,
            tile=tile,
            memory_budget=memory_budget,
            backend=backend,
            directions=("image_to_text", "text_to_image"),
        )
    result = _run(*call)
    if bias is None:
        return result
    value, *stats = result if isinstance(result, tuple) else (result,)
    value = value + (bias.sum() * 0).to(value)
    return (value, stats[0]) if stats else value


def info_nce_loss(
    query: Tensor,
    key: Tensor,
    logit_scale: float | Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    positives: Tensor | None = None,
    temperature: float | Tensor | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Group = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Loss:
    """InfoNCE from queries to keys, without the matrix of logits.

    Equals, up to rounding,

        logits = logit_scale * query @ torch.cat([key, negatives]).T
        cross_entropy(logits, positives)

    Args:
        query: `[N, D]`.
        key: `[M, D]`, M at least N unless `positives` is given.
        negatives: `[K, D]`: more columns for every query, nobody's positives, for instance mined ones or a queue. With
            a group every rank's are columns for the queries of all: give each rank its shard of a queue they share.
        positives: `[N]` integers: the row of `key` that belongs with each query. Default: row i with query i. With a
            group, rows of this rank's `key`.
        query_ids, key_ids, negative_ids: `[N]`, `[M]`, `[K]` integers, in place of `ids`. Extra negatives are never
            masked unless `negative_ids` is given.
    """
    name = "info_nce_loss"
    ranks = group_name(name, group)
    with refuse_together(name, ranks):
        if isinstance(negatives, Tensor) and negatives.dim() == 3:
            raise ValueError(
                f"{name}: negatives must have 2 dimensions, because each is a negative for every query, got shape "
                f"{tuple(negatives.shape)}. Pass negatives.flatten(0, 1)."
            )
        extra = {} if negatives is None else {"negatives": negatives}
        check_features(name, query=query, key=key, **extra)
        if not ranks:
            check_not_empty(name, "key", key)
        check_word(name, "same_ids", same_ids, ("mask", "positive"))
        check_keys(name, query, key, positives)
        check_vector(name, "positives", positives, "query", query, integers=True)
        check_vector(name, "query_ids", query_ids, "query", query, integers=True)
        check_vector(name, "key_ids", key_ids, "key", key, integers=True)
        if negative_ids is not None and negatives is None:
            raise ValueError(f"{name}: negative_ids must come with negatives, got none.")
        if negatives is not None:
            check_vector(name, "negative_ids", negative_ids, "negatives", negatives, integers=True)
        others = key_ids is not None or negative_ids is not None
        # On several ranks the other side's ids may be those of another rank's negatives.
        if others != (query_ids is not None) and (others or not ranks):
            given = "query_ids alone" if query_ids is not None else "no query_ids"
            raise ValueError(
                f"{name}: ids must be given for both sides of a pair, query_ids with key_ids or negative_ids, got "
                f"{given}."
            )
        call = _describe(
            name,
            specs.info_nce(_same(same_ids, query_ids), check_smoothing(name, label_smoothing)),
            ("query", query),
            key,
            negatives,
            logit_scale=logit_scale,
            temperature=temperature,
            normalize=normalize,
            ids=(query_ids, key_ids, negative_ids),
            positives=positives,
            weight=weight,
            reduction=reduction,
            return_stats=return_stats,
            ranks=ranks,
            grad_reduction=grad_reduction,
            exchange=exchange,
            overlap=overlap,
            tile=tile,
            memory_budget=memory_budget,
            backend=backend,
        )
    return _run(*call)


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float | Tensor | None = None,
    logit_bias: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    normalize: bool | None = None,
    weight: Tensor | None = None,
    ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Group = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
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
    ranks = group_name(name, group)
    with refuse_together(name, ranks):
        check_features(name, image_features=image_features, text_features=text_features)
        check_rows(name, _PAIRED, image_features=image_features, text_features=text_features)
        check_word(name, "same_ids", same_ids, ("mask", "positive"))
        check_vector(name, "ids", ids, "image_features", image_features, integers=True)
        call = _describe(
            name,
            specs.siglip(_same(same_ids, ids)),
            ("image_features", image_features),
            text_features,
            logit_scale=logit_scale,
            temperature=temperature,
            logit_bias=logit_bias,
            normalize=normalize,
            ids=(ids, ids, None),
            weight=weight,
            reduction=reduction,
            return_stats=return_stats,
            ranks=ranks,
            grad_reduction=grad_reduction,
            exchange=exchange,
            overlap=overlap,
            tile=tile,
            memory_budget=memory_budget,
            backend=backend,
            directions=("image_to_text", "text_to_image"),
        )
    return _run(*call)


def nt_xent_loss(
    view1: Tensor,
    view2: Tensor,
    logit_scale: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Group = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Loss:
    """NT-Xent, the loss of SimCLR, without the matrix of logits.

    Equals, up to rounding,

        views = torch.cat([view1, view2])
        logits = (logit_scale * views @ views.T).fill_diagonal_(-inf)
        cross_entropy(logits, torch.arange(2 * N).roll(N))

    Args:
        view1: `[N, D]`.
        view2: `[N, D]`. Row i is the other view of row i of `view1`; all others of both views are its negatives.
            With reduction "none" there are 2N losses, those of `view1` first; `weight` and `ids` serve both views.
    """
    name = "nt_xent_loss"
    ranks = group_name(name, group)
    with refuse_together(name, ranks):
        check_features(name, view1=view1, view2=view2)
        check_rows(name, _PAIRED, view1=view1, view2=view2)
        check_word(name, "same_ids", same_ids, ("mask", "positive"))
        check_vector(name, "ids", ids, "view1", view1, integers=True)
        call = _describe(
            name,
            specs.nt_xent(_same(same_ids, ids), check_smoothing(name, label_smoothing)),
            ("view1", view1),
            view2,
            logit_scale=logit_scale,
            temperature=temperature,
            normalize=normalize,
            ids=(ids, ids, None),
            weight=weight,
            reduction=reduction,
            return_stats=return_stats,
            ranks=ranks,
            grad_reduction=grad_reduction,
            exchange=exchange,
            overlap=overlap,
            tile=tile,
            memory_budget=memory_budget,
            backend=backend,
        )
    return _run(*call)


def supcon_loss(
    features: Tensor,
    labels: Tensor,
    logit_scale: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
    return_stats: bool = False,
    group: Group = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Loss:
    """Supervised contrastive loss (Khosla et al., "out"), without the matrix of logits.

    Equals, up to rounding,

        logits = (logit_scale * features @ features.T).fill_diagonal_(-inf)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        anchors = positive.any(1)
        loss = -log_softmax(logits, 1).where(positive, 0).sum(1) / positive.sum(1)
        loss[anchors].mean()

    An anchor without positives is left out of the mean; where none has any, the loss is 0.

    Args:
        features: `[N, D]`.
        labels: `[N]` integers. Rows of one label are positives of each other.
    """
    name = "supcon_loss"
    ranks = group_name(name, group)
    with refuse_together(name, ranks):
        check_features(name, features=features)
        if labels is None:
            raise TypeError(f"{name}: labels must be a tensor, got None.")
        check_vector(name, "labels", labels, "features", features, integers=True)
        call = _describe(
            name,
            specs.supcon(check_smoothing(name, label_smoothing)),
            ("features", features),
            logit_scale=logit_scale,
            temperature=temperature,
            normalize=normalize,
            ids=(labels, None, None),
            weight=weight,
            reduction=reduction,
            return_stats=return_stats,
            ranks=ranks,
            grad_reduction=grad_reduction,
            exchange=exchange,
            overlap=overlap,
            tile=tile,
            memory_budget=memory_budget,
            backend=backend,
        )
    return _run(*call)


_OPTIONS = """
        logit_scale: 1 / temperature, already exponentiated; a float, 0-d or shape-[1] tensor. Gets its exact gradient.
        temperature: In place of `logit_scale`.
        normalize: True: L2-normalise inside, in float32. False: as given. None: as given, and warn once if the rows of
            the first batch are not of unit length.
        {smoothing}weight: `[N]` weight per row, for every direction. The mean is sum(weight * loss) / sum(weight). A
            row of weight 0 still is a negative for others.
        {ids}reduction: "mean", "sum", or "none" for `weight * loss` of every row of this rank.
        return_stats: Also return a dict of detached statistics from the same tiles: loss, accuracy (top-1), and
            positive_logit; per direction where there are two. With a group, those of all ranks' rows.
        group: Process group whose ranks' rows make the batch. None: this process alone. May be left out unless
            torch.distributed runs with more than one rank. Ranks may hold different numbers of rows, also none; the
            value is that of all their rows together, the same on every rank.
        grad_reduction: "mean" if the trainer averages gradients over ranks (DDP, FSDP), "sum" if it adds them. Then
            what it makes of the parameters' gradients is what one process with all rows would have.
        exchange: "ring": columns pass from rank to rank. "gather": every rank gets all columns at once. "auto":
            gather while that fits the memory budget.
        overlap: False makes transfers between ranks blocking.
        tile: Side, or (height, width), of a tile. None: chosen by the plan.
        memory_budget: Bytes, or a word like "512MiB", for tiles and kept logits. Where it has room to spare, logits
            are kept for the backward instead of formed again.
        backend: "auto", "eager" or "triton". One asked for by name is used or refused.

    Returns:
        The loss, 0-d (or a vector, with "none"): float64 for float64 features, else float32. With `return_stats`, a
        pair of the loss and the dict.
    """
_SMOOTHING = """label_smoothing: As torch.nn.functional.cross_entropy, uniform over the columns that count.
        """
_IDS = """ids: `[N]` integers: rows of one id are the same thing.
        same_ids: What pairs of one id are, beside row i with row i: "mask": no negatives. "positive": positives too.
        """
for _loss in (clip_loss, info_nce_loss, siglip_loss, nt_xent_loss, supcon_loss):
    assert _loss.__doc__ is not None
    _loss.__doc__ = _loss.__doc__.rstrip() + _OPTIONS.format(
        smoothing="" if _loss is siglip_loss else _SMOOTHING, ids="" if _loss is supcon_loss else _IDS
    )


def _same(same_ids: str, ids: Tensor | None) -> str:
    return "ignore" if ids is None else same_ids


def _describe(
    name: str,
    spec: Spec,
    rows: tuple[str, Tensor],
    second: Tensor | None = None,
    extra: Tensor | None = None,
    *,
    logit_scale: float | Tensor | None,
    temperature: float | Tensor | None,
    logit_bias: float | Tensor | None = None,
    normalize: bool | None,
    ids: tuple[Tensor | None, Tensor | None, Tensor | None],
    positives: Tensor | None = None,
    weight: Tensor | None,
    reduction: str,
    return_stats: bool,
    ranks: str,
    grad_reduction: str,
    exchange: str,
    overlap: bool,
    tile: int | tuple[int, int] | None,
    memory_budget: int | str | None,
    backend: str,
    directions: tuple[str, ...] = (),
) -> tuple[LossInputs, LossOptions, tuple[str, ...]]:
    """What all losses do after they have checked what is their own."""
    rows_name, first = rows
    if not ranks:
        check_not_empty(name, rows_name, first)
    check_vector(name, "weight", weight, rows_name, first, integers=False)
    check_word(name, "normalize", normalize, (True, False, None))
    check_word(name, "reduction", reduction, ("mean", "sum", "none"))
    check_word(name, "grad_reduction", grad_reduction, ("mean", "sum"))
    check_word(name, "return_stats", return_stats, (True, False))
    check_ways(name, exchange, overlap, backend)
    if weight is not None and weight.requires_grad:
        raise ValueError(f"{name}: weight must not require grad, because it gets none. Pass weight.detach().")
    scale = scale_of(name, logit_scale, temperature)
    bias = None if logit_bias is None else scalar(name, "logit_bias", logit_bias)
    differentiable = (first, second, extra, scale, bias)
    check_no_tangents(name, *differentiable)
    call = LossOptions(
        name,
        spec,
        Needs(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in differentiable)),
        reduction,
        return_stats,
        normalize,
        tile_of(name, tile, square=spec.symmetric),
        bytes_of(name, memory_budget),
        backend,
        autocast_dtype(first),
        ranks,
        grad_reduction,
        exchange,
        overlap,
        grad_enabled=torch.is_grad_enabled(),
    )
    return LossInputs(first, second, extra, scale, bias, *ids, positives, weight), call, directions


def _run(inputs: LossInputs, options: LossOptions, directions: tuple[str, ...]) -> Loss:
    value, stats = contrastive_loss(inputs, options)
    return (value, _named(stats, value.dtype, options.spec, directions)) if options.return_stats else value


def _named(stats: Tensor, dtype: torch.dtype, spec: Spec, directions: tuple[str, ...]) -> dict[str, Tensor]:
    loss, accuracy, positive_logit, *losses_and_accuracies = stats.detach().to(dtype).unbind()
    named: dict[str, Any] = {"loss": loss, "accuracy": accuracy, "positive_logit": positive_logit}
    for index, direction in enumerate(directions):
        if spec.epilogue == "softmax":
            named[f"loss_{direction}"] = losses_and_accuracies[index]
        named[f"accuracy_{direction}"] = losses_and_accuracies[2 + index]
    return named
