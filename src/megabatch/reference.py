"""The losses again, dense and in plain torch: what each of them means.

Every function here has the signature of its twin in `megabatch` and, up to rounding, its value and gradients. It forms
the whole matrix of logits, and the gradients are autograd's own. Use it to look up a meaning or to check a result.
Options about how a loss is computed (`grad_reduction`, `exchange`, `overlap`, `tile`, `memory_budget`, `backend`) are
accepted and change nothing. `group` must be one process: gather the rows first.

Letters in this file: N rows, M columns, K extra negatives, D width; s[i, j] is the logit of row i and column j.
A pair is *positive*, or it is a negative, or it is not *valid* and does not count at all.
"""

from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from .keywords import (
    ClipKeywords,
    ExecutionKeywords,
    InfoNCEKeywords,
    LeftOut,
    LogitScale,
    LossKeywords,
    Scalar,
    SearchKeywords,
    SigLipKeywords,
    SupConKeywords,
    complete,
    with_keywords,
)

__all__ = [
    "clip_loss",
    "info_nce_loss",
    "nt_xent_loss",
    "retrieval_ranks",
    "siglip_loss",
    "similarity_topk",
    "supcon_loss",
]

Result = Tensor | tuple[Tensor, dict[str, Tensor]]


@with_keywords
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: LogitScale = None,
    *,
    logit_bias: Scalar | None = None,
    **options: Unpack[ClipKeywords],
) -> Result:
    """Image-text contrastive loss, the mean of both directions.

        s = logit_scale * image_features @ text_features.T
        target = torch.arange(N)
        (cross_entropy(s, target) + cross_entropy(s.T, target)) / 2

    A softmax does not see a bias, so `logit_bias` changes nothing; its gradient is zero. Rows with one id are no
    negatives of each other ("mask") or are positives of each other ("positive").
    """
    options = _complete("clip_loss", options, logit_scale)
    s = _logits(image_features, text_features, logit_scale, options)
    if logit_bias is not None:
        s = s + 0 * _scalar(logit_bias, s)
    positive, valid = _relation(_one_hot(s), _equal(options["ids"], options["ids"], s), options["same_ids"])
    image = _softmax(s, positive, valid, options["label_smoothing"])
    text = _softmax(s.T, positive.T, valid.T, options["label_smoothing"])
    return _finish(
        options,
        loss=(image["loss"] + text["loss"]) / 2,
        loss_image_to_text=image["loss"],
        loss_text_to_image=text["loss"],
        accuracy=(image["accuracy"] + text["accuracy"]) / 2,
        accuracy_image_to_text=image["accuracy"],
        accuracy_text_to_image=text["accuracy"],
        positive_logit=image["positive_logit"],
    )


@with_keywords
def info_nce_loss(
    query: Tensor,
    key: Tensor,
    logit_scale: LogitScale = None,
    *,
    negatives: Tensor | None = None,
    positives: Tensor | None = None,
    **options: Unpack[InfoNCEKeywords],
) -> Result:
    """Each query against every key and every extra negative, one direction.

        columns = torch.cat([key, negatives])               # [M + K, D]
        s = logit_scale * query @ columns.T                 # [N, M + K]
        cross_entropy(s, positives)                         # positives: a row of key per query, default row i

    A query and a column with equal ids are not negatives ("mask") or are positives ("positive"). Extra negatives are
    compared only if `negative_ids` is given.
    """
    options = _complete("info_nce_loss", options, logit_scale)
    if negatives is None:
        negatives = key[:0]
    s = _logits(query, torch.cat([_float(key), _float(negatives)]), logit_scale, options)
    same_key = _equal(options["query_ids"], options["key_ids"], s[:, : len(key)])
    same_negative = _equal(options["query_ids"], options["negative_ids"], s[:, len(key) :])
    same = torch.cat([same_key, same_negative], dim=1)
    positive, valid = _relation(_one_hot(s, positives), same, options["same_ids"])
    return _finish(options, **_softmax(s, positive, valid, options["label_smoothing"]))


@with_keywords
def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: LogitScale = None,
    logit_bias: Scalar | None = None,
    **options: Unpack[SigLipKeywords],
) -> Result:
    """Every pair for itself: is it a match or not.

        s = logit_scale * image_features @ text_features.T + logit_bias
        sign = 2 * torch.eye(N) - 1                         # +1 for a match, -1 for any other pair
        -logsigmoid(sign * s).sum() / N

    Pairs of rows with one id are dropped ("mask") or are matches ("positive").
    """
    options = _complete("siglip_loss", options, logit_scale)
    s = _logits(image_features, text_features, logit_scale, options)
    if logit_bias is not None:
        s = s + _scalar(logit_bias, s)
    positive, valid = _relation(_one_hot(s), _equal(options["ids"], options["ids"], s), options["same_ids"])
    pair_loss = -F.logsigmoid(torch.where(positive, s, -s))
    image, text = _accuracy(s, positive, valid), _accuracy(s.T, positive.T, valid.T)
    return _finish(
        options,
        loss=_sum(pair_loss, valid),
        accuracy=(image + text) / 2,
        accuracy_image_to_text=image,
        accuracy_text_to_image=text,
        positive_logit=_mean(s, positive),
    )


@with_keywords
def nt_xent_loss(
    view1: Tensor, view2: Tensor, logit_scale: LogitScale = None, **options: Unpack[ClipKeywords]
) -> Result:
    """SimCLR's loss: all 2N rows are anchors, and each must find its other view among the 2N - 1 others.

        x = torch.cat([view1, view2])
        s = logit_scale * x @ x.T
        s.fill_diagonal_(-inf)                              # an anchor is no column of its own
        target = torch.arange(2 * N).roll(N)                # the other view
        cross_entropy(s, target)

    `weight` and `ids` are given once per row and hold for both views.
    """
    options = _complete("nt_xent_loss", options, logit_scale)
    x = torch.cat([_float(view1), _float(view2)])
    s = _logits(x, x, logit_scale, options)
    itself = _one_hot(s)
    ids, options["weight"] = _twice(options["ids"]), _twice(options["weight"])
    positive, valid = _relation(itself.roll(len(view1), dims=1), _equal(ids, ids, s) & ~itself, options["same_ids"])
    return _finish(options, **_softmax(s, positive, valid & ~itself, options["label_smoothing"]))


@with_keywords
def supcon_loss(
    features: Tensor, labels: Tensor, logit_scale: LogitScale = None, **options: Unpack[SupConKeywords]
) -> Result:
    """Supervised contrastive loss (Khosla et al., "out"): an anchor's positives are the other rows of its label.

        s = logit_scale * features @ features.T
        s.fill_diagonal_(-inf)                              # an anchor is no column of its own
        positive = (labels[:, None] == labels) & ~torch.eye(N, dtype=torch.bool)
        row_loss = torch.stack([-s[i].log_softmax(0)[positive[i]].mean() for i in range(N)])
        row_loss[positive.any(1)].mean()

    Anchors without positives are left out of the mean; if no anchor has any, the loss is 0.
    """
    options = _complete("supcon_loss", options, logit_scale)
    s = _logits(features, features, logit_scale, options)
    itself = _one_hot(s)
    positive = _equal(labels, labels, s) & ~itself
    rows = _softmax(s, positive, ~itself, options["label_smoothing"])
    weight = torch.ones_like(rows["loss"]) if options["weight"] is None else options["weight"]
    options["weight"] = weight * positive.any(1)  # 0 for an anchor without positives
    return _finish(options, **rows)


@with_keywords
def retrieval_ranks(
    query: Tensor, key: Tensor, *, positives: Tensor | None = None, **options: Unpack[SearchKeywords]
) -> Tensor:
    """How many keys score above each query's positive: 0 means it was found first.

        s = query @ key.T                                   # in float64
        bound = 2 * D * eps * |query| * max |key|           # [N, 1], twice the rounding error of a score
        (s > s[torch.arange(N), positives][:, None] + bound).sum(1)

    `positives` holds a row of `key` per query, by default row i. Keys that score the same as the positive do not count:
    the rounding error is allowed for, so that equal keys tie. A query whose positive scores NaN gets M: it was not
    found. Rows that are not finite count as length 0 in the bound.
    """
    options = _complete("retrieval_ranks", options)
    query, key = (_features(x.double(), options["normalize"]) for x in (query, key))
    s = _product(query, key)
    if positives is None:
        positives = torch.arange(len(s), device=s.device)
    positive_score = s.gather(1, positives[:, None].long())
    query_length, key_length = (torch.linalg.vector_norm(x, dim=1).nan_to_num(0, 0) for x in (query, key))
    bound: Tensor = 2 * key.shape[1] * torch.finfo(torch.float64).eps * query_length[:, None] * key_length.amax()
    above = (s > positive_score + bound).sum(1)
    return above.masked_fill(positive_score[:, 0].isnan(), len(key))


@with_keywords
def similarity_topk(
    query: Tensor,
    key: Tensor,
    k: int,
    *,
    exclude: Tensor | tuple[Tensor, Tensor] | None = None,
    **options: Unpack[SearchKeywords],
) -> tuple[Tensor, Tensor]:
    """The k best keys of each query.

        (query @ key.T).masked_fill(excluded, -inf).topk(k, dim=1)

    `exclude` says which keys a query never gets: an integer tensor `[N]`, the row of `key` to leave out for each query
    (its positive), or a pair (query_ids, key_ids) of integer tensors, `[N]` and `[M]`, to leave out the keys that have
    the query's id. If fewer than k keys are left, the rest of the row holds -inf and index -1.

    Returns:
        Values and indices, both [N, k], best first.
    """
    options = _complete("similarity_topk", options)
    s = _product(*(_features(x, options["normalize"]) for x in (query, key)))
    numbers = torch.arange(len(key), device=key.device)
    query_ids, key_ids = exclude if isinstance(exclude, tuple) else (exclude, numbers)
    excluded = _equal(query_ids, key_ids, s)
    values, indices = s.masked_fill(excluded, -torch.inf).topk(k, dim=1)
    return values, indices.masked_fill(excluded.gather(1, indices), -1)


# What goes in: features, scale, logits.


def _features(x: Tensor, normalize: bool | None) -> Tensor:
    return F.normalize(_float(x), dim=1) if normalize else _float(x)


def _float(x: Tensor) -> Tensor:
    """float32 for half precision, before anything else; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def _scalar(value: Scalar, like: Tensor) -> Tensor:
    """A number, a 0-d or a [1] tensor, as a 0-d tensor of `like`'s type that keeps its gradient."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(())


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):  # logits are never half precision
        return rows @ columns.T


def _logits(rows: Tensor, columns: Tensor, logit_scale: Scalar | None, options: LossKeywords) -> Tensor:
    s = _product(_features(rows, options["normalize"]), _features(columns, options["normalize"]))
    if logit_scale is not None:
        s = _scalar(logit_scale, s) * s
    if options["temperature"] is not None:
        s = s / _scalar(options["temperature"], s)
    return s


def _twice(values: Tensor | None) -> Tensor | None:
    return None if values is None else torch.cat([values, values])


# Which pairs are what.


def _one_hot(s: Tensor, column: Tensor | None = None) -> Tensor:
    """True where the column is the given one of its row, by default the one of the row's own number."""
    if column is None:
        column = torch.arange(len(s), device=s.device)
    return column[:, None] == torch.arange(s.shape[1], device=s.device)


def _equal(row_ids: Tensor | None, column_ids: Tensor | None, s: Tensor) -> Tensor:
    """True where the ids are equal; False everywhere if there are none."""
    if row_ids is None or column_ids is None:
        return torch.zeros_like(s, dtype=torch.bool)
    return row_ids[:, None] == column_ids


def _relation(target: Tensor, same: Tensor, same_ids: str) -> tuple[Tensor, Tensor]:
    """(positive, valid) of all pairs, given the targets, the pairs of equal ids and `same_ids`."""
    if same_ids == "positive":
        return target | same, torch.ones_like(target)
    return target, target | ~same


# What comes out of each row.


def _softmax(s: Tensor, positive: Tensor, valid: Tensor, smoothing: float) -> dict[str, Tensor]:
    """Cross entropy of each row over its valid columns, with 1 - smoothing shared equally among its positives."""
    log_p = s.masked_fill(~valid, -torch.inf).log_softmax(1)
    loss = -(1 - smoothing) * _mean(log_p, positive) - smoothing * _mean(log_p, valid)
    return {"loss": loss, "accuracy": _accuracy(s, positive, valid), "positive_logit": _mean(s, positive)}


def _accuracy(s: Tensor, positive: Tensor, valid: Tensor) -> Tensor:
    """1 where no valid column of a row scores above the best of its positives."""
    best_positive = s.masked_fill(~positive, -torch.inf).amax(1)
    return (best_positive >= s.masked_fill(~valid, -torch.inf).amax(1)).to(s.dtype)


def _sum(values: Tensor, where: Tensor) -> Tensor:
    """Filled, not multiplied by 0: what is left out may be infinite, and 0 * inf is NaN, in the gradient too."""
    return values.masked_fill(~where, 0).sum(1)


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return _sum(values, where) / where.sum(1).clamp(min=1)


def _finish(options: LossKeywords, *, loss: Tensor, **statistics: Tensor) -> Result:
    """Weight the rows and reduce them; each statistic is a value per row too."""
    weight = torch.ones_like(loss) if options["weight"] is None else options["weight"].to(loss.dtype)
    total = weight.sum()
    total = torch.where(total > 0, total, 1)

    def mean(per_row: Tensor) -> Tensor:
        return (weight * per_row).sum() / total

    weighted = weight * loss
    result = {"none": weighted, "sum": weighted.sum(), "mean": mean(loss)}[options["reduction"]]
    if not options["return_stats"]:
        return result
    return result, {name: mean(per_row).detach() for name, per_row in {"loss": loss, **statistics}.items()}


# What is refused.

_Options = TypeVar("_Options", bound=ExecutionKeywords)


def _complete(name: str, given: _Options, logit_scale: Scalar | None = None) -> _Options:
    """The options with their defaults."""
    options: Any = complete(name, given)
    if "temperature" in options and (logit_scale is None) == (options["temperature"] is None):
        got = "neither" if logit_scale is None else "both"
        raise ValueError(f"{name}: exactly one of logit_scale and temperature must be given, got {got}.")
    for option, words in {"reduction": ("mean", "sum", "none"), "same_ids": ("mask", "positive")}.items():
        if options.get(option, words[0]) not in words:
            raise ValueError(f"{name}: {option} must be one of {words}, got {options[option]!r}.")
    group = options["group"]
    if group not in (None, ..., LeftOut.GROUP) and group.size() > 1:
        raise ValueError(
            f"{name}: group must be one process in the dense reference, got {group.size()} ranks. "
            f"Gather the rows first and pass group=None."
        )
    return cast(_Options, options)
