"""What towers are worth on data they have not seen: validation loss, retrieval both ways, zero-shot classification.

Features of all held-out samples are kept, scores are not: memory grows with the samples, not with their square.
Every rank encodes its share, and every figure is that of all.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
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
from .data.prepare import Prepare
from .data.source import Source
from .encoding import Encoder, Features, make_prepare
from .objective import Objective, rows_of
from .optimization import autocast
from .towers.towers import Towers

RECALLS = (1, 5, 10)
Figures = dict[str, float]


def evaluate_all(
    towers: Towers, held_out: Source | None, classes: ImageFolder | None, config: Config, world: World
) -> Figures:
    """Of what there is to evaluate on."""
    figures = Figures()
    if held_out is not None:
        figures |= evaluate(towers, held_out, config, world)
    if classes is not None:
        figures |= classify(towers, classes, config, world)
    return figures


class NoSamples(ValueError):
    """There is nothing to evaluate on."""


@torch.no_grad()
def evaluate(towers: Towers, source: Source, config: Config, world: World) -> Figures:
    """Loss, recalls, median rank (1 is the best) over a whole source, as one batch."""
    was_training = towers.training
    towers.eval()
    try:
        features, ids, text_ids, skipped = _encode(towers, source, config, world)
        rows = int(_total(torch.tensor(len(ids)), world))
        if rows == 0:
            raise NoSamples(f"--val-data must have samples, got {skipped} that were all skipped.")
        with autocast(world.device, config.optimization.precision):
            loss, _ = Objective(replace(config.loss, dense_loss=False), world)(features._replace(negatives=None), ids)
        first, second = ("query" if source.texts_only else "image"), "text"
        figures = {"val/loss": float(loss), "val/samples": rows, "val/skipped_samples": skipped}
        texts, owners = features.second, torch.arange(len(ids))
        if features.negatives is not None:
            texts, owners = torch.cat([texts, features.negatives]), torch.cat([owners, rows_of(text_ids, ids)])
            figures["val/captions"] = int(_total(torch.tensor(len(texts)), world))
        best = _best(texts, features.first, owners)
        forth, back = (ids, ids[owners]), (ids[owners], ids)
        figures |= _retrieval(f"{first}_to_{second}", features.first, texts, best, forth, world)
        figures |= _retrieval(f"{second}_to_{first}", texts, features.first, owners, back, world)
    finally:
        towers.train(was_training)
    recalls = [value for name, value in figures.items() if "_R@" in name]
    return figures | {"val/mean_recall": sum(recalls) / len(recalls)}


def _encode(towers: Towers, source: Source, config: Config, world: World) -> tuple[Features, Tensor, Tensor, int]:
    """Of this rank's share of the source: features, where `negatives` are further captions of images, ids of rows and
    of further captions; and how many samples of all were skipped."""
    encoder = Encoder(towers, config.optimization.chunk_size, texts_only=source.texts_only)
    prepare = make_prepare(towers, config, train=False)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    captions: list[tuple[Tensor, Tensor]] = []
    skipped = 0
    for batch in _in_order(source, prepare, config, world):
        with autocast(world.device, config.optimization.precision):
            encoded = encoder(replace(batch, negatives=None) if source.texts_only else batch)
        parts.append((encoded.first.float(), encoded.second.float(), batch.ids))
        if encoded.negatives is not None and batch.negative_ids is not None:
            captions.append((encoded.negatives.float(), batch.negative_ids))
        skipped += len(batch.bad)
    first, second, ids = (torch.cat(each) for each in zip(*parts, strict=True))
    more, more_ids = (torch.cat(each) for each in zip(*captions, strict=True)) if captions else (None, ids[:0])
    features = Features(first, second, more, towers.logit_scale.exp(), towers.logit_bias)
    return features, ids, more_ids, int(_total(torch.tensor(skipped), world))


def _in_order(source: Source, prepare: Prepare, config: Config, world: World) -> Iterator[RankBatch]:
    """All of the source, every rank its share of each batch."""
    order = Order(source.counts, seed=0, batch_size=config.optimization.chunk_size * world.size, shuffle=False)
    requests = Requests(order, world.rank, world.size)
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
    keys = int(_total(torch.tensor(len(key)), world))
    equal = keys - 1 - above - below
    mine = above + (equal - alike).clamp(min=0) // 2
    ranks = torch.tensor([rank for part in world.gather(mine.tolist()) for rank in part])
    figures = {f"val/{name}_R@{k}": float((ranks < k).double().mean()) for k in RECALLS}
    return figures | {f"val/{name}_median_rank": math.floor(statistics.median(ranks.tolist())) + 1}


@torch.no_grad()
def classify(towers: Towers, folder: ImageFolder, config: Config, world: World) -> Figures:
    """Zero-shot: every image goes to the class whose prompts, on average, it is nearest to."""
    was_training = towers.training
    towers.eval()
    try:
        classes = class_features(towers, folder.classnames, folder.templates, config, world)
        hits = torch.zeros(2, dtype=torch.float64)
        rows = skipped = 0
        best = min(5, len(classes))
        encoder = Encoder(towers, config.optimization.chunk_size, texts_only=False)
        for batch in _in_order(folder, make_prepare(towers, config, train=False), config, world):
            with autocast(world.device, config.optimization.precision):
                images = normalize(encoder.images(batch).float(), dim=1)
            rows, skipped = rows + len(images), skipped + len(batch.bad)
            if len(images):
                _, nearest = mb.similarity_topk(images, classes, best, group=None)
                right = nearest.cpu() == batch.ids[:, None]
                hits += torch.tensor([right[:, 0].sum(), right.any(1).sum()], dtype=torch.float64)
    finally:
        towers.train(was_training)
    top1, top5, rows, skipped = _total(torch.tensor([*hits.tolist(), rows, skipped]), world).tolist()
    if rows == 0:
        raise NoSamples(f"--zeroshot-data must have images, got {int(skipped)} that were all skipped.")
    figures = {"zeroshot/top1": top1 / rows, "zeroshot/top5": top5 / rows}
    return figures | {"zeroshot/samples": rows, "zeroshot/skipped_samples": skipped}


def class_features(
    towers: Towers, names: Sequence[str], templates: Sequence[str], config: Config, world: World
) -> Tensor:
    """One row per class: the mean of its prompts' features, of unit length."""
    encoder = Encoder(towers, config.optimization.chunk_size, texts_only=False)
    prompts = [template.replace("{}", name) for name in names for template in templates]
    with autocast(world.device, config.optimization.precision):
        features = encoder.texts(towers.tokenizer(prompts)).float()
    return normalize(normalize(features, dim=1).view(len(names), len(templates), -1).mean(1), dim=1)


def _total(mine: Tensor, world: World) -> Tensor:
    """The sum over ranks."""
    return torch.tensor(world.gather(mine.tolist()), dtype=torch.float64).sum(0)
