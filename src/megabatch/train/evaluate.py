"""What towers are worth on data they have not seen: validation loss, retrieval both ways, zero-shot classification.

Features of all held-out samples are kept, scores are not: memory grows with the samples, not with their square.
Every rank encodes its share, and every figure is that of all.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import megabatch as mb

from ..distributed.world import World
from .config import Config
from .data.labelled import ImageFolder
from .data.loader import RankBatch, Requests, batches
from .data.order import Order
from .data.source import Source
from .encoding import Encoder, Features, make_prepare
from .objective import Objective, rows_of
from .optimization import autocast
from .towers.towers import Towers

RECALLS = (1, 5, 10)
ICONS = 1000  # of the held-out ones, if nothing else is said
Figures = dict[str, float]


class RunFailed(ValueError):
    """A run cannot go on. The text says why, and what to do."""


@torch.no_grad()
def evaluate(
    towers: Towers, held_out: Source | None, classes: ImageFolder | None, config: Config, world: World
) -> Figures:
    """Of what there is to evaluate on."""
    was_training, figures = towers.training, Figures()
    towers.eval()
    try:
        if held_out is not None:
            figures |= _validation(towers, held_out, config, world)
        if classes is not None:
            figures |= _zero_shot(towers, classes, config, world)
    finally:
        towers.train(was_training)
    return figures


def _validation(towers: Towers, source: Source, config: Config, world: World) -> Figures:
    """Loss, recalls, median rank (1 is the best) over a whole source, as one batch."""
    features, ids, texts, owners, skipped = _encode(towers, source, config, world)
    rows = sum(world.gather(len(ids)))
    if rows == 0:
        raise RunFailed(f"--val-data must have samples, got {skipped} that were all skipped. Look at its files.")
    with autocast(world.device, config.optimization.precision):
        loss, _ = Objective(replace(config.loss, dense_loss=False), world)(features, ids)
    first, second = ("query" if source.texts_only else "image"), "text"
    figures = {"val/loss": float(loss), "val/samples": rows, "val/skipped_samples": skipped}
    captions = sum(world.gather(len(texts)))
    if captions > rows:
        figures["val/captions"] = captions
    best = _best(texts, features.first, owners)
    forth, back = (ids, ids[owners]), (ids[owners], ids)
    figures |= _retrieval(f"{first}_to_{second}", features.first, texts, best, forth, world)
    figures |= _retrieval(f"{second}_to_{first}", texts, features.first, owners, back, world)
    recalls = [value for name, value in figures.items() if "_R@" in name]
    return figures | {"val/mean_recall": sum(recalls) / len(recalls)}


def _encode(
    towers: Towers, source: Source, config: Config, world: World
) -> tuple[Features, Tensor, Tensor, Tensor, int]:
    """Of this rank's share of the source: features and ids of rows; features of all captions, and the row that each
    belongs to; and how many samples of all ranks were skipped."""
    encoder = Encoder(towers, config.optimization.chunk_size, texts_only=source.texts_only)
    parts: list[tuple[Tensor, ...]] = []
    skipped = 0
    limit = config.evaluation.val_num_samples or (ICONS if config.evaluation.val_data == "icons" else len(source))
    for batch in _in_order(source, min(limit, len(source)), towers, config, world):
        with autocast(world.device, config.optimization.precision):
            captions = batch.negatives if not source.texts_only and batch.negatives is not None else batch.second[:0]
            encoded = encoder(replace(batch, negatives=captions if len(captions) else None))
        more, owners = encoded.negatives, batch.negative_ids  # further captions of images
        if more is None or owners is None:
            more, owners = encoded.second[:0], batch.ids[:0]
        parts.append((encoded.first.float(), encoded.second.float(), batch.ids, more.float(), owners))
        skipped += len(batch.bad)
    first, second, ids, more, owners = (torch.cat(each) for each in zip(*parts, strict=True))
    features = Features(first, second, None, towers.logit_scale.exp(), towers.logit_bias)
    rows = torch.cat([torch.arange(len(ids)), rows_of(owners, ids)])
    return features, ids, torch.cat([second, more]), rows, sum(world.gather(skipped))


def _in_order(source: Source, count: int, towers: Towers, config: Config, world: World) -> Iterator[RankBatch]:
    """The first so many samples, every rank its share of each batch."""
    batch_size = config.optimization.chunk_size * world.size
    order = Order(torch.tensor([count]), seed=0, batch_size=batch_size, block=source.block, shuffle=False)
    requests = Requests(order, world.rank, world.size)
    prepare = make_prepare(towers, config, train=False)
    return batches(source, prepare, requests, workers=config.data.workers, device=world.device)


def _best(texts: Tensor, images: Tensor, owners: Tensor) -> Tensor:
    """The row of each image's caption that scores highest: the one whose rank is that of the image."""
    owners = owners.to(images.device)
    scores = (normalize(texts, dim=1) * images[owners]).sum(1)
    highest = scores.new_full((len(images),), -math.inf).scatter_reduce(0, owners, scores, "amax")
    rows = torch.arange(len(texts), device=images.device).masked_fill(scores < highest[owners], len(texts))
    return rows.new_full((len(images),), len(texts)).scatter_reduce(0, owners, rows, "amin").cpu()


def _retrieval(
    name: str, query: Tensor, key: Tensor, positives: Tensor, ids: tuple[Tensor, Tensor], world: World
) -> Figures:
    """`positives` are rows of keys, `ids` those of queries and keys.

    Keys that score as the positive does may come before it or after it: half of them count, but for those of the
    same id, which are as right. So towers that say the same of everything find nothing."""
    of_queries, of_keys = ids
    counts = Counter(each for part in world.gather(of_keys.tolist()) for each in part)
    alike = torch.tensor([counts[each] - 1 for each in of_queries.tolist()], dtype=torch.int64)
    options: dict[str, Any] = {"positives": positives.to(key.device), "normalize": True, "group": world.group}
    above = mb.retrieval_ranks(query, key, **options).cpu()
    below = mb.retrieval_ranks(-query, key, **options).cpu()
    equal = sum(world.gather(len(key))) - 1 - above - below
    mine = above + (equal - alike).clamp(min=0) // 2
    ranks = torch.tensor([rank for part in world.gather(mine.tolist()) for rank in part])
    figures = {f"val/{name}_R@{k}": float((ranks < k).double().mean()) for k in RECALLS}
    return figures | {f"val/{name}_median_rank": math.floor(statistics.median(ranks.tolist())) + 1}


def _zero_shot(towers: Towers, folder: ImageFolder, config: Config, world: World) -> Figures:
    """Every image goes to the class whose prompts, on average, it is nearest to."""
    encoder = Encoder(towers, config.optimization.chunk_size, texts_only=False)
    prompts = [template.replace("{}", name) for name in folder.classnames for template in folder.templates]
    with autocast(world.device, config.optimization.precision):
        features = normalize(encoder.texts(towers.tokenizer(prompts)).float(), dim=1)
    classes = normalize(features.view(len(folder.classnames), len(folder.templates), -1).mean(1), dim=1)
    top1 = top5 = rows = skipped = 0
    for batch in _in_order(folder, len(folder), towers, config, world):
        with autocast(world.device, config.optimization.precision):
            images = normalize(encoder.images(batch).float(), dim=1)
        rows, skipped = rows + len(images), skipped + len(batch.bad)
        if len(images):
            _, nearest = mb.similarity_topk(images, classes, min(5, len(classes)), group=None)
            right = nearest.cpu() == batch.ids[:, None]
            top1, top5 = top1 + int(right[:, 0].sum()), top5 + int(right.any(1).sum())
    top1, top5, rows, skipped = map(sum, zip(*world.gather((top1, top5, rows, skipped)), strict=True))
    if rows == 0:
        raise RunFailed(f"--zeroshot-data must have images, got {skipped} that were all skipped. Look at its files.")
    figures = {"zeroshot/top1": top1 / rows, "zeroshot/top5": top5 / rows}
    return figures | {"zeroshot/samples": rows, "zeroshot/skipped_samples": skipped}
