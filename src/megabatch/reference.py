"""The losses again, dense and in plain torch: what each of them means.

Every function here has the signature of its twin in `megabatch` and, up to rounding, its value and gradients; it forms
the whole matrix of logits, and the gradients are autograd's own. Use it to look up a meaning or to check a result.
Options about how a loss is computed (`grad_reduction`, `exchange`, `overlap`, `tile`, `memory_budget`, `backend`) are
accepted and change nothing; `group` must be one process: gather the rows first.

Letters, in this file: N rows, M columns, K extra negatives, D width; s[i, j] is the logit of row i and column j.
A pair is *positive*, or it is a negative, or it is not *valid* and then does not count at all.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "clip_loss",
    "info_nce_loss",
    "nt_xent_loss",
    "retrieval_ranks",
    "siglip_loss",
    "similarity_topk",
    "supcon_loss",
]

Scalar = float | Tensor
Result = Tensor | tuple[Tensor, dict[str, Tensor]]


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Scalar | None = None,
    *,
    logit_bias: Scalar | None = None,
    temperature: Scalar | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Any = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Result:
    """Image-text contrastive loss, the mean of both directions.

        s = logit_scale * image_features @ text_features.T
        target = torch.arange(N)
        (cross_entropy(s, target) + cross_entropy(s.T, target)) / 2

    A softmax does not see a bias, so `logit_bias` changes nothing; its gradient is zero. Rows with one id are no
    negatives of each other ("mask") or are positives of each other ("positive").
    """
    _check("clip_loss", logit_scale, temperature, reduction, same_ids, group)
    s = _logits(_features(image_features, normalize), _features(text_features, normalize), logit_scale, temperature)
    if logit_bias is not None:
        s = s + 0 * _scalar(logit_bias, s)
    positive, valid = _relation(_one_hot(s), _equal(ids, ids, s), same_ids)
    image, text = _softmax(s, positive, valid, label_smoothing), _softmax(s.T, positive.T, valid.T, label_smoothing)
    return _finish(
        (image.loss + text.loss) / 2,
        weight,
        reduction,
        return_stats,
        loss_image_to_text=image.loss,
        loss_text_to_image=text.loss,
        accuracy=(image.accuracy + text.accuracy) / 2,
        accuracy_image_to_text=image.accuracy,
        accuracy_text_to_image=text.accuracy,
        positive_logit=image.positive_logit,
    )


def info_nce_loss(
    query: Tensor,
    key: Tensor,
    logit_scale: Scalar | None = None,
    *,
    negatives: Tensor | None = None,
    positives: Tensor | None = None,
    temperature: Scalar | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Any = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Result:
    """Each query against every key and every extra negative, one direction.

        columns = torch.cat([key, negatives])               # [M + K, D]
        s = logit_scale * query @ columns.T                 # [N, M + K]
        cross_entropy(s, positives)                         # positives: a row of key per query, default row i

    A query and a column with one id are no negatives ("mask") or are positives ("positive"). Extra negatives take part
    in this only where `negative_ids` says what they are.
    """
    _check("info_nce_loss", logit_scale, temperature, reduction, same_ids, group)
    if negatives is None:
        negatives = key[:0]
    columns = torch.cat([_features(key, normalize), _features(negatives, normalize)])
    s = _logits(_features(query, normalize), columns, logit_scale, temperature)
    same = torch.cat(
        [_equal(query_ids, key_ids, s[:, : len(key)]), _equal(query_ids, negative_ids, s[:, len(key) :])], dim=1
    )
    positive, valid = _relation(_one_hot(s, positives), same, same_ids)
    rows = _softmax(s, positive, valid, label_smoothing)
    return _finish(
        rows.loss, weight, reduction, return_stats, accuracy=rows.accuracy, positive_logit=rows.positive_logit
    )


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Scalar | None = None,
    logit_bias: Scalar | None = None,
    *,
    temperature: Scalar | None = None,
    normalize: bool | None = None,
    weight: Tensor | None = None,
    ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Any = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Result:
    """Every pair for itself: is it a match or not.

        s = logit_scale * image_features @ text_features.T + logit_bias
        sign = 2 * torch.eye(N) - 1                         # +1 for a match, -1 for any other pair
        -logsigmoid(sign * s).sum() / N

    Pairs of rows with one id are dropped ("mask") or are matches ("positive").
    """
    _check("siglip_loss", logit_scale, temperature, reduction, same_ids, group)
    s = _logits(_features(image_features, normalize), _features(text_features, normalize), logit_scale, temperature)
    if logit_bias is not None:
        s = s + _scalar(logit_bias, s)
    positive, valid = _relation(_one_hot(s), _equal(ids, ids, s), same_ids)
    pair_loss = -F.logsigmoid(torch.where(positive, s, -s))
    image, text = _accuracy(s, positive, valid), _accuracy(s.T, positive.T, valid.T)
    return _finish(
        _sum(pair_loss, valid),
        weight,
        reduction,
        return_stats,
        accuracy=(image + text) / 2,
        accuracy_image_to_text=image,
        accuracy_text_to_image=text,
        positive_logit=_mean(s, positive),
    )


def nt_xent_loss(
    view1: Tensor,
    view2: Tensor,
    logit_scale: Scalar | None = None,
    *,
    temperature: Scalar | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    ids: Tensor | None = None,
    same_ids: str = "mask",
    reduction: str = "mean",
    return_stats: bool = False,
    group: Any = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Result:
    """SimCLR's loss: all 2N rows are anchors, and each must find its other view among the 2N - 1 others.

        x = torch.cat([view1, view2])
        s = logit_scale * x @ x.T
        s.fill_diagonal_(-inf)                              # an anchor is no column of its own
        target = torch.arange(2 * N).roll(N)                # the other view
        cross_entropy(s, target)

    `weight` and `ids` are given once per row and hold for both views.
    """
    _check("nt_xent_loss", logit_scale, temperature, reduction, same_ids, group)
    x = torch.cat([_features(view1, normalize), _features(view2, normalize)])
    s = _logits(x, x, logit_scale, temperature)
    itself = _one_hot(s)
    if ids is not None:
        ids = torch.cat([ids, ids])
    if weight is not None:
        weight = torch.cat([weight, weight])
    positive, valid = _relation(itself.roll(len(view1), dims=1), _equal(ids, ids, s) & ~itself, same_ids)
    rows = _softmax(s, positive, valid & ~itself, label_smoothing)
    return _finish(
        rows.loss, weight, reduction, return_stats, accuracy=rows.accuracy, positive_logit=rows.positive_logit
    )


def supcon_loss(
    features: Tensor,
    labels: Tensor,
    logit_scale: Scalar | None = None,
    *,
    temperature: Scalar | None = None,
    normalize: bool | None = None,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
    return_stats: bool = False,
    group: Any = ...,
    grad_reduction: str = "mean",
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Result:
    """Supervised contrastive loss (Khosla et al., "out"): an anchor's positives are the other rows of its label.

        s = logit_scale * features @ features.T
        s.fill_diagonal_(-inf)                              # an anchor is no column of its own
        positive = (labels[:, None] == labels) & ~torch.eye(N, dtype=torch.bool)
        row_loss = torch.stack([-s[i].log_softmax(0)[positive[i]].mean() for i in range(N)])
        row_loss[positive.any(1)].mean()

    Anchors without positives are left out of the mean; if no anchor has any, the loss is 0.
    """
    _check("supcon_loss", logit_scale, temperature, reduction, "positive", group)
    x = _features(features, normalize)
    s = _logits(x, x, logit_scale, temperature)
    itself = _one_hot(s)
    positive = _equal(labels, labels, s) & ~itself
    rows = _softmax(s, positive, ~itself, label_smoothing)
    # An anchor without positives weighs nothing.
    weight = (torch.ones_like(rows.loss) if weight is None else weight) * positive.any(1)
    return _finish(
        rows.loss, weight, reduction, return_stats, accuracy=rows.accuracy, positive_logit=rows.positive_logit
    )


def retrieval_ranks(
    query: Tensor,
    key: Tensor,
    *,
    positives: Tensor | None = None,
    normalize: bool | None = False,
    group: Any = ...,
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> Tensor:
    """How many keys score strictly above each query's positive: 0 means it was found first.

        s = query @ key.T
        (s > s[torch.arange(N), positives][:, None]).sum(1)

    `positives` holds a row of `key` per query, by default row i. Keys that score the same as the positive do not count.
    A query whose positive scores NaN gets M: it was not found.
    """
    _check_group("retrieval_ranks", group)
    s = _logits(_features(query, normalize), _features(key, normalize))
    if positives is None:
        positives = torch.arange(len(s), device=s.device)
    bar = s.gather(1, positives[:, None].long())
    return (s > bar).sum(1).masked_fill(bar[:, 0].isnan(), len(key))


def similarity_topk(
    query: Tensor,
    key: Tensor,
    k: int,
    *,
    normalize: bool | None = False,
    group: Any = ...,
    exchange: str = "auto",
    overlap: bool = True,
    tile: int | tuple[int, int] | None = None,
    memory_budget: int | str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The k best keys of each query.

        (query @ key.T).topk(k, dim=1)

    Returns (values, indices), both [N, k], best first.
    """
    _check_group("similarity_topk", group)
    values, indices = _logits(_features(query, normalize), _features(key, normalize)).topk(k, dim=1)
    return values, indices


# What goes in: features, scale, logits.


def _features(x: Tensor, normalize: bool | None) -> Tensor:
    """Half precision becomes float32 before anything else; float64 stays. Normalise there if asked to."""
    x = x if x.dtype == torch.float64 else x.float()
    return F.normalize(x, dim=1) if normalize else x


def _scalar(value: Scalar, like: Tensor) -> Tensor:
    """A number, a 0-d or a [1] tensor, as a 0-d tensor of `like`'s type that keeps its gradient."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(())


def _logits(
    rows: Tensor, columns: Tensor, logit_scale: Scalar | None = None, temperature: Scalar | None = None
) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):  # logits are never half precision
        s = rows @ columns.T
    if logit_scale is not None:
        s = _scalar(logit_scale, s) * s
    if temperature is not None:
        s = s / _scalar(temperature, s)
    return s


# Which pairs are what.


def _one_hot(s: Tensor, column: Tensor | None = None) -> Tensor:
    """True where the column is the given one of its row, by default the one of the row's own number."""
    if column is None:
        column = torch.arange(len(s), device=s.device)
    return column[:, None] == torch.arange(s.shape[1], device=s.device)


def _equal(row_ids: Tensor | None, column_ids: Tensor | None, s: Tensor) -> Tensor:
    """True where the ids are equal; nowhere if there are none."""
    if row_ids is None or column_ids is None:
        return torch.zeros_like(s, dtype=torch.bool)
    return row_ids[:, None] == column_ids


def _relation(target: Tensor, same: Tensor, same_ids: str) -> tuple[Tensor, Tensor]:
    """(positive, valid): what the pairs of one id are, beside the target, is for `same_ids` to say."""
    if same_ids == "positive":
        return target | same, torch.ones_like(target)
    return target, target | ~same


# What comes out of each row.


class _Rows(NamedTuple):
    loss: Tensor
    accuracy: Tensor
    positive_logit: Tensor


def _softmax(s: Tensor, positive: Tensor, valid: Tensor, smoothing: float) -> _Rows:
    """Cross entropy of each row over its valid columns, with 1 - smoothing shared equally among its positives."""
    log_p = s.masked_fill(~valid, -torch.inf).log_softmax(1)
    loss = -(1 - smoothing) * _mean(log_p, positive) - smoothing * _mean(log_p, valid)
    return _Rows(loss, _accuracy(s, positive, valid), _mean(s, positive))


def _accuracy(s: Tensor, positive: Tensor, valid: Tensor) -> Tensor:
    """1 where no valid column of a row scores above the best of its positives."""
    best_positive = s.masked_fill(~positive, -torch.inf).amax(1)
    return (best_positive >= s.masked_fill(~valid, -torch.inf).amax(1)).to(s.dtype)


def _sum(values: Tensor, where: Tensor) -> Tensor:
    """Filled, not multiplied by 0: what is left out may be infinite, and 0 * inf is NaN, in the gradient too."""
    return values.masked_fill(~where, 0).sum(1)


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return _sum(values, where) / where.sum(1).clamp(min=1)


def _finish(loss: Tensor, weight: Tensor | None, reduction: str, return_stats: bool, **statistics: Tensor) -> Result:
    """Weigh the rows and put them together; each statistic is a value per row too."""
    weight = torch.ones_like(loss) if weight is None else weight.to(loss.dtype)
    total = weight.sum()
    total = torch.where(total > 0, total, 1)

    def mean(per_row: Tensor) -> Tensor:
        return (weight * per_row).sum() / total

    weighted = weight * loss
    result = {"none": weighted, "sum": weighted.sum(), "mean": mean(loss)}[reduction]
    if not return_stats:
        return result
    return result, {name: mean(per_row).detach() for name, per_row in {"loss": loss, **statistics}.items()}


# What is refused.


def _check(
    name: str,
    logit_scale: Scalar | None,
    temperature: Scalar | None,
    reduction: str,
    same_ids: str,
    group: Any,
) -> None:
    if (logit_scale is None) == (temperature is None):
        got = "neither" if logit_scale is None else "both"
        raise ValueError(f"{name}: exactly one of logit_scale and temperature must be given, got {got}.")
    for option, value, words in [
        ("reduction", reduction, ("mean", "sum", "none")),
        ("same_ids", same_ids, ("mask", "positive")),
    ]:
        if value not in words:
            raise ValueError(f"{name}: {option} must be one of {words}, got {value!r}.")
    _check_group(name, group)


def _check_group(name: str, group: Any) -> None:
    if group is not ... and group is not None and group.size() > 1:
        raise ValueError(
            f"{name}: group must be one process in the dense reference, got {group.size()} ranks. "
            f"Gather the rows first and pass group=None."
        )
