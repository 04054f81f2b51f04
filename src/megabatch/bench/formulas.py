"""The losses people write today: with a matrix of logits, whole or a chunk of rows at a time, on one process or ranks.

Each is the formula in plain torch, as fast as its method allows. bf16/fp16 features are multiplied as they are, as
models do; the logits then are float32.

Letters: N rows, D width; s[i, j] is the logit of row i and column j; a chunk holds rows `start` and following.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LossFunction = Callable[..., Tensor]

CHUNK = 1024


def _logits(rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    product = rows @ columns.T
    return scale * (product if product.dtype == torch.float64 else product.float())


def _range(rows: Tensor, start: int = 0) -> Tensor:
    return torch.arange(start, start + len(rows), device=rows.device)


# A chunk of rows against all columns: the sum of the rows' losses.


def _siglip_rows(start: int, rows: Tensor, columns: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    s = _logits(rows, columns, scale) + bias
    # -logsigmoid(-s) for every pair; for a match -logsigmoid(s), which is s less.
    return F.softplus(s).sum() - s.diagonal(start).sum()


def _info_nce_rows(start: int, rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(_logits(rows, columns, scale), _range(rows, start), reduction="sum")


def _nt_xent_rows(start: int, rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    s = _logits(rows, columns, scale)
    s.diagonal(start).fill_(-torch.inf)
    other_view = (_range(rows, start) + len(columns) // 2) % len(columns)
    return F.cross_entropy(s, other_view, reduction="sum")


def _supcon_rows(start: int, rows: Tensor, columns: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """With how many of the rows have positives: only they count."""
    s = _logits(rows, columns, scale)
    s.diagonal(start).fill_(-torch.inf)
    positive = labels[start : start + len(rows), None] == labels
    positive.diagonal(start).fill_(False)
    count = positive.sum(1)
    loss = -s.log_softmax(1).masked_fill(~positive, 0).sum(1) / count.clamp(min=1)
    return torch.stack([loss.sum(), (count > 0).sum().to(loss.dtype)])


def _clip_rows(rows: Tensor, columns: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of these rows, and of the columns as far as these rows go: enough for both directions."""
    s = _logits(rows, columns, scale)
    return s.logsumexp(1), s.logsumexp(0)


# The losses, given a way to add up such sums: over all rows at once, or over checkpointed chunks.

Total = Callable[..., Tensor]


def _whole(function: Callable[..., Tensor], rows: Tensor, *others: Tensor) -> Tensor:
    return function(0, rows, *others)


def _checkpointed(function: Callable[..., Tensor], rows: Tensor, *others: Tensor) -> Tensor:
    starts = range(0, len(rows), CHUNK)
    parts = [checkpoint(function, i, rows[i : i + CHUNK], *others, use_reentrant=False) for i in starts]
    return torch.stack(parts).sum(0)


def _siglip(total: Total, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return total(_siglip_rows, image, text, scale, bias) / len(image)


def _info_nce(total: Total, query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    return total(_info_nce_rows, query, key, scale) / len(query)


def _nt_xent(total: Total, view1: Tensor, view2: Tensor, scale: Tensor) -> Tensor:
    x = torch.cat([view1, view2])
    return total(_nt_xent_rows, x, x, scale) / len(x)


def _supcon(total: Total, features: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    loss, anchors = total(_supcon_rows, features, features, labels, scale).unbind()
    return loss / anchors.clamp(min=1)


def _clip_once(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    s = _logits(image, text, scale)
    target = _range(s)
    return (F.cross_entropy(s, target) + F.cross_entropy(s.T, target)) / 2


def _clip_chunked(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    parts = [checkpoint(_clip_rows, x, text, scale, use_reentrant=False) for x in torch.split(image, CHUNK)]
    rows, columns = (list(x) for x in zip(*parts, strict=True))
    positive = scale * (image * text).sum(1, dtype=scale.dtype)
    return ((torch.cat(rows) + torch.stack(columns).logsumexp(0)) / 2 - positive).mean()


_BY_ROWS: dict[str, LossFunction] = {"siglip": _siglip, "info_nce": _info_nce, "nt_xent": _nt_xent, "supcon": _supcon}

# Logits formed once, whole.
ONCE: dict[str, LossFunction] = {"clip": _clip_once, **{name: partial(f, _whole) for name, f in _BY_ROWS.items()}}


def _clip_by_hand(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    s, target = scale * image @ text.T, _range(image)
    return (F.cross_entropy(s, target) + F.cross_entropy(s.T, target)) / 2


# What people write by hand, not compiled.
BY_HAND = ONCE | {"clip": _clip_by_hand}

# Logits formed by chunks of rows, each again in the backward.
CHUNKED: dict[str, LossFunction] = {
    "clip": _clip_chunked,
    **{name: partial(f, _checkpointed) for name, f in _BY_ROWS.items()},
}


# open_clip's formulas: for clip a matrix of logits per direction, for siglip one, and one of signs.


def _clip_formula(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return local_rows(_range(image), image, text, image, text, scale)


def _siglip_formula(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * image @ text.T + bias
    signs = 2 * torch.eye(len(image), device=image.device, dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(image)


OPEN_CLIP_FORMULA: dict[str, LossFunction] = {"clip": _clip_formula, "siglip": _siglip_formula}


# Over ranks: everyone's features are gathered, and gradients go home.


def local_clip(rank: int, function: LossFunction, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """open_clip's local_loss=True, gather_with_grad=True: this rank's rows of both directions, against everyone's.

    `function`: local_rows, or that compiled.
    """
    return function(_range(image, rank * len(image)), image, text, _gather(image), _gather(text), scale)


def local_rows(target: Tensor, image: Tensor, text: Tensor, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    per_image, per_text = scale * image @ texts.T, scale * text @ images.T
    return (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2


def global_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """CLIP's: every rank has the whole matrix of logits, all the same."""
    return _clip_by_hand(_gather(image), _gather(text), scale)


def disco_clip(rank: int, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """DisCo-CLIP's: this rank's rows of both directions, and from them gradients for everyone's features, which are
    reduced over the ranks. They are added: the average that its code takes is too small by the number of ranks."""
    target = _range(image, rank * len(image))
    images, texts = _gather(image, _GatherAndReduce), _gather(text, _GatherAndReduce)
    return local_rows(target, images[target], texts[target], images, texts, scale)


def _gather(rows: Tensor, way: "type[_Gather] | None" = None) -> Tensor:
    gathered: Tensor = (way or _Gather).apply(rows)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """The rows of all ranks. A row's gradient is the sum of what the ranks have for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        everyones = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, rows)
        return torch.cat(everyones)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # gloo's reduce_scatter sends twice as much: it is an all_reduce.
        mine = torch.empty_like(gradient)
        dist.all_to_all_single(mine, gradient.contiguous())
        return mine.view(dist.get_world_size(), -1, *gradient.shape[1:]).sum(0)


class _GatherAndReduce(_Gather):
    """The same, but all ranks learn the gradients of all rows, and each takes its own."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()  # in place, as its own code does: a copy is memory that it does not take
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]
