"""The loss of a batch over all ranks, from the features of this one."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import megabatch as mb
from megabatch import reference

from ..distributed.world import World
from .config import Loss
from .encoding import Features


class Objective:
    """`loss, accuracy = objective(features, ids, negative_ids)`: of the whole batch, the same on every rank."""

    def __init__(
        self, options: Loss, world: World, *, has_negatives: bool = False, several_captions: bool = False
    ) -> None:
        if options.dense_loss and world.size > 1:
            raise ValueError(f"train: --dense-loss must run in one process, got {world.size} ranks. Leave it out.")
        if has_negatives and options.loss != "infonce":
            raise ValueError(
                f"train: --loss must be infonce where samples have negatives, got {options.loss}. Pass --loss infonce, "
                "or leave the negatives out of the data."
            )
        if has_negatives and options.duplicates == "image":
            raise ValueError("train: --duplicates must be caption or none where samples have negatives, got image.")
        self.options, self.world, self.several_captions = options, world, several_captions
        self.losses: ModuleType = reference if options.dense_loss else mb
        self.shared: dict[str, Any] = {"normalize": True, "return_stats": True, "group": world.group}
        self.shared["exchange"] = options.exchange
        if several_captions:
            self.shared["same_ids"] = "positive"
        if options.memory_budget is not None:
            self.shared["memory_budget"] = options.memory_budget
            one = torch.ones(1, 1)
            mb.clip_loss(one, one, 1.0, memory_budget=options.memory_budget, group=None)  # says what is wrong with it

    def __call__(self, features: Features, ids: Tensor, negative_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        first, second, negatives, scale, bias = features
        if self.several_captions and negatives is not None and negative_ids is not None:
            # Every caption is a row of its own, with its image; captions of one image are positives of each other.
            first = torch.cat([first, first[rows_of(negative_ids, ids).to(first.device)]])
            second, negatives = torch.cat([second, negatives]), None
            ids = torch.cat([ids, negative_ids])
        same = None if self.options.duplicates == "none" else ids.to(first.device)
        if self.options.loss == "clip":
            loss, stats = self.losses.clip_loss(first, second, scale, logit_bias=bias, ids=same, **self.shared)
        elif self.options.loss == "siglip":
            loss, stats = self.losses.siglip_loss(first, second, scale, bias, ids=same, **self.shared)
        else:
            others = None if same is None or negative_ids is None else negative_ids.to(first.device)
            ids_of = {"query_ids": same, "key_ids": same, "negative_ids": others}
            loss, stats = self.losses.info_nce_loss(first, second, scale, negatives=negatives, **ids_of, **self.shared)
        return loss, stats["accuracy"]


def rows_of(some: Tensor, ids: Tensor) -> Tensor:
    """The row of each of some ids."""
    order = ids.argsort()
    return order[torch.searchsorted(ids[order], some)]
