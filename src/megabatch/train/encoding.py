"""A batch through the towers: features, in the memory of one chunk."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb

from ..distributed.world import World
from .config import Config
from .data.loader import RankBatch
from .data.prepare import Prepare
from .feature_cache import FeatureCache
from .towers.towers import Towers


class Features(NamedTuple):
    """What a loss needs of the towers. Not normalised.

    Attributes:
        first: Of images, or of queries.
        second: Of texts.
        negatives: Of texts that belong with none.
    """

    first: Tensor
    second: Tensor
    negatives: Tensor | None
    logit_scale: Tensor
    logit_bias: Tensor | None


class Encoder(nn.Module):
    """Both towers in one forward, so that DistributedDataParallel sees every parameter used once."""

    def __init__(self, towers: Towers, chunk_size: int, *, texts_only: bool) -> None:
        super().__init__()
        self.towers, self.chunk_size, self.texts_only = towers, chunk_size, texts_only

    def forward(self, batch: RankBatch) -> Features:
        towers, rows = self.towers, len(batch.ids)
        first = self.texts(batch.first)[:rows] if self.texts_only else self.images(batch)
        second = self.texts(batch.second)[:rows]
        negatives = None if batch.negatives is None else self.texts(batch.negatives)
        return Features(first, second, negatives, towers.logit_scale.exp(), towers.logit_bias)

    def images(self, batch: RankBatch) -> Tensor:
        """Features of all images, of which a cache may have some."""
        if batch.known is None or batch.features is None:
            return self._encode_images(batch.first)[: len(batch.ids)]
        known = batch.features.to(self.towers.logit_scale.device, non_blocking=True)
        if not len(batch.first):
            return known
        features = known.new_empty(len(batch.ids), known.shape[1])
        features[batch.known.to(known.device)] = known
        features[~batch.known.to(known.device)] = self._encode_images(batch.first)
        return features

    def _encode_images(self, images: Tensor) -> Tensor:
        locked = self.towers.image_is_locked
        with torch.set_grad_enabled(torch.is_grad_enabled() and not locked):
            return self._in_chunks(self.towers.encode_image, images, self.towers.pixels, one_shape=locked)

    def texts(self, tokens: Tensor) -> Tensor:
        return self._in_chunks(self.towers.encode_text, tokens)

    def _in_chunks(
        self,
        encoder: Callable[[Tensor], Tensor],
        rows: Tensor,
        transform: Callable[[Tensor], Tensor] | None = None,
        one_shape: bool = False,
    ) -> Tensor:
        """`one_shape`: of all products, so that a feature does not depend on how many others are encoded beside it."""
        device = self.towers.logit_scale.device
        if len(rows) <= self.chunk_size and not one_shape:  # no need to form anything twice
            rows = rows.to(device, non_blocking=True)
            return encoder(rows if transform is None else transform(rows))
        options: dict[str, Any] = {"chunk_size": self.chunk_size, "transform": transform, "pad_last": one_shape or None}
        return cast(Tensor, mb.chunked(encoder, rows, device=device, **options))


def make_encoder(
    towers: Towers, config: Config, world: World, gradients_ready: Callable[[], None], *, texts_only: bool
) -> nn.Module:
    """To train with: compiled where that is asked for, with gradients that all ranks share. On several of them
    `gradients_ready` is called in the backward, the last time when this rank has all of its own."""
    options = config.optimization
    rows = min(options.chunk_size, -(-options.global_batch_size // world.size))
    encoder = Encoder(towers, rows, texts_only=texts_only)
    if config.model.torchcompile:
        for part in towers.compiled_parts():
            part.compile()
    if world.group is None:
        return encoder

    def all_reduce(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        gradients_ready()
        return allreduce_hook(group, bucket)

    parallel = DistributedDataParallel(encoder, gradient_as_bucket_view=True)
    parallel.register_comm_hook(world.group, all_reduce)
    return parallel


def make_prepare(towers: Towers, config: Config, *, train: bool, cache: FeatureCache | None = None) -> Prepare:
    """Samples to what these towers take."""
    return Prepare(
        towers.tokenizer,
        towers.preprocessing,
        crop_scale=config.data.crop_scale,
        seed=config.run.seed,
        duplicates=config.loss.duplicates if config.data.captions == "one" else "image",
        max_pixels=config.data.max_image_pixels,
        train=train,
        cache=cache,
    )
