"""What is computed: calls of the five losses whose options reach every branch of a kernel, and their batches.

A batch is made for a number of ranks; one process is one rank. The numbers are the same every time, on every rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = ("clip_loss", "siglip_loss", "info_nce_loss", "nt_xent_loss", "supcon_loss")
DTYPES = ("float32", "bfloat16", "float16", "float64")

SIDES = {
    "clip_loss": ("image_features", "text_features"),
    "siglip_loss": ("image_features", "text_features"),
    "info_nce_loss": ("query", "key"),
    "nt_xent_loss": ("view1", "view2"),
    "supcon_loss": ("features",),
}
SCALARS = ("logit_scale", "logit_bias")
EXTRA_KEYS = 3

# What one rank brings, by the name of the argument.
Share = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call of a loss.

    Attributes:
        rows: Of the whole batch, about: ranks get different numbers of them.
        gives: What it is given beside features and scale: "weight", "ids", "positives", "negatives", "negative_ids",
            "logit_bias".
        fitted: Positives coincide and the scale is 100.
        absent: On several ranks, the last brings no rows.
    """

    loss: str
    title: str
    rows: int
    width: int
    gives: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    fitted: bool = False
    absent: bool = False

    @property
    def scale(self) -> float:
        return 100.0 if self.fitted else 7.0

    def sizes(self, ranks: int) -> list[int]:
        """Rows on each rank."""
        if ranks == 1:
            return [self.rows]
        sizes = [max(self.rows // ranks + 5 * rank % 7 - 3, 2) for rank in range(ranks)]
        return [*sizes[:-1], 0] if self.absent else sizes

    def shares(self, ranks: int, dtype: torch.dtype) -> list[Share]:
        random = torch.Generator().manual_seed(self.rows * 31 + self.width)
        sizes = self.sizes(ranks)
        return [self._share(random, rows, rank, sum(sizes), dtype) for rank, rows in enumerate(sizes)]

    def _share(self, random: torch.Generator, rows: int, rank: int, total: int, dtype: torch.dtype) -> Share:
        def features(count: int) -> Tensor:
            return F.normalize(torch.randn(count, self.width, generator=random), dim=1)

        def integers(count: int, high: int) -> Tensor:
            return torch.randint(high, (count,), generator=random)

        ids, keys = max(total // 3, 2), rows + EXTRA_KEYS if rows else 0
        negatives = 5 + 2 * rank
        share: Share = {}
        own = _crowded(features(rows), torch.ones(self.width)) if self.fitted else None
        for name in SIDES[self.loss]:
            count = keys if name == "key" else rows
            share[name] = features(count) if own is None else torch.cat([own, features(count - rows)])
        if self.loss == "supcon_loss":
            if own is not None:  # pairs, nearly alike
                alike = own.repeat_interleave(2, 0)[:rows] + 1e-4 * features(rows)
                share |= {"features": F.normalize(alike, dim=1), "labels": torch.arange(rows) // 2 + 1000 * rank}
            else:
                share["labels"] = integers(rows, ids)
        if "negatives" in self.gives:
            share["negatives"] = features(negatives)
        if "positives" in self.gives:
            share["positives"] = integers(rows, max(keys, 1))
        if "weight" in self.gives:
            share["weight"] = torch.rand(rows, generator=random).masked_fill_(torch.arange(rows) % 5 == 2, 0)
        if "ids" in self.gives and self.loss == "info_nce_loss":
            share |= {"query_ids": integers(rows, ids), "key_ids": integers(keys, ids)}
        elif "ids" in self.gives:
            share["ids"] = integers(rows, ids)
        if "negative_ids" in self.gives:
            share["negative_ids"] = integers(negatives, ids)
        length = 1.3 if self.options.get("normalize") else 1.0
        return {name: (length * x).to(dtype) if x.dim() == 2 else x for name, x in share.items()}

    def scalars(self, dtype: torch.dtype) -> Share:
        """The scale, and the bias where there is one: float32 beside half features, as a model's parameters are."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        found = {"logit_scale": torch.tensor(self.scale, dtype=dtype)}
        if self.loss == "siglip_loss" or "logit_bias" in self.gives:
            found["logit_bias"] = torch.tensor([-2.0], dtype=dtype)
        return found


def _crowded(rows: Tensor, common: Tensor) -> Tensor:
    """Rows whose logits lie 18 below that of a row with itself, at scale 100."""
    return F.normalize(rows + F.normalize(common, dim=0) * math.sqrt(1 / 0.18 - 1), dim=1)


def together(shares: list[Share]) -> Share:
    """The batch of all ranks: rows in rank order, positives as rows of all keys."""
    batch = {name: torch.cat([share[name] for share in shares]) for name in shares[0] if name != "positives"}
    if "key" in batch:
        positives, offset = [], 0
        for share in shares:
            query = share["query"]
            positives.append(offset + share.get("positives", torch.arange(len(query), device=query.device)))
            offset += len(share["key"])
        batch["positives"] = torch.cat(positives)
    return batch


def of_ranks(loss: str, per_row: Tensor, sizes: list[int]) -> list[Tensor]:
    """One number per row of the batch, cut into what each rank gets."""
    if loss != "nt_xent_loss":
        return list(torch.split(per_row, sizes))
    first, second = (torch.split(view, sizes) for view in per_row.chunk(2))
    return [torch.cat(views) for views in zip(first, second, strict=True)]


def cases(loss: str, quick: bool, few: bool = False) -> Iterator[Case]:
    """Odd sizes, and tiles so small that several are walked, and so large that a kernel has several blocks of them.

    `few`: those that reach everything; `quick`: so, and the smallest.
    """
    rows, width, tile = (37, 24, 16) if quick else (293, 72, 160)
    smooth = {} if loss == "siglip_loss" else {"label_smoothing": 0.1}
    ids = () if loss == "supcon_loss" else ("ids",)
    bias = ("logit_bias",) if loss == "clip_loss" else ()
    mask, positive = ({"same_ids": word} if ids else {} for word in ("mask", "positive"))
    extras = ("positives", "negatives") if loss == "info_nce_loss" else ()
    tiles = {"tile": tile}

    yield Case(loss, "plain", rows, width, bias, {**tiles, "return_stats": True})
    options: dict[str, Any] = {**tiles, **smooth, **mask, "return_stats": True}
    name = "ids masked, smoothing, weights" if ids else "smoothing, weights"
    yield Case(loss, name, rows - 2, width + 9, ("weight", *ids, *extras), options)
    given = (*ids, *extras, *(("negative_ids",) if extras else ()))
    options = {**tiles, **positive, "reduction": "none", "normalize": True}
    name = "ids positive, per row, normalised" if ids else "per row, normalised"
    yield Case(loss, name, rows - 4, width + 1, given, options, absent=True)
    yield Case(loss, "fitted, scale 100", rows + 2, width, (), tiles, fitted=True)
    if quick or few:
        return
    yield Case(loss, "one tile, summed", rows - 8, width, ("weight",), {**smooth, "reduction": "sum"})
    yield Case(loss, "logits kept", 2 * rows, width, extras[1:], {"tile": 2 * tile, "memory_budget": "64MiB"})
    yield Case(loss, "long and wide", 4 * rows + 5, 3 * width - 5, (), {"normalize": True})
    yield Case(loss, "three rows", 3, 5, (), smooth, absent=True)
