"""Who is asked for gradients over ranks: megabatch, and other packages' losses in their own settings for ranks."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megabatch

from ..cases import LOSSES
from ..instruments.ranks import Member
from ..loss.contenders import package, sentence_transformers_losses


class CannotRun(Exception):
    """The package is here, but this machine lacks something; the text says what."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of the batch: its rows, which begin with row `start` of all."""

    features: tuple[Tensor, ...]
    labels: Tensor | None
    scale: Tensor
    bias: Tensor | None
    start: int

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """In the order in which our losses take them."""
        return tuple(x for x in (*self.features, self.labels, self.scale, self.bias) if x is not None)


RankLoss = Callable[[Part], Tensor]


@dataclass(frozen=True)
class Peer:
    """A loss in one of its settings.

    Attributes:
        package: By the name pip knows.
        loss: Which of our five it is.
        make: The loss on one rank. Raises NotInstalled or CannotRun.
        trainer: What is done with gradients over ranks: "mean", as DDP does, or "sum".
        ours: Must be right.
    """

    title: str
    package: str
    loss: str
    make: Callable[[Member], RankLoss]
    trainer: str = "mean"
    ours: bool = False


def megabatch_loss(loss: str, trainer: str, member: Member) -> RankLoss:
    function = getattr(megabatch, LOSSES[loss].function)
    options = {"normalize": False, "group": dist.group.WORLD, "grad_reduction": trainer}
    return lambda part: function(*part.arguments, **options)


def open_clip_loss(local_loss: bool, gather_with_grad: bool, member: Member) -> RankLoss:
    loss = package("open_clip.loss").ClipLoss(
        local_loss=local_loss, gather_with_grad=gather_with_grad, rank=member.rank, world_size=member.size
    )
    return lambda part: loss(*part.arguments)


def open_clip_siglip(dist_impl: str, member: Member) -> RankLoss:
    module = package("open_clip.loss")
    loss = module.SigLipLoss(rank=member.rank, world_size=member.size, dist_impl=dist_impl)
    return lambda part: loss(*part.arguments)


def sentence_transformers_loss(loss: str, member: Member) -> RankLoss:
    module = sentence_transformers_losses()
    directions = ("query_to_doc", "doc_to_query") if loss == "clip" else ("query_to_doc",)
    criterion = module.MultipleNegativesRankingLoss(
        torch.nn.Identity(),
        scale=LOSSES[loss].scale,
        gather_across_devices=True,
        directions=directions,
        partition_mode="per_direction",
    )
    return lambda part: criterion.compute_loss_from_embeddings(list(part.features), None)


def metric_learning_loss(loss: str, efficient: bool, member: Member) -> RankLoss:
    losses = package("pytorch_metric_learning.losses")
    kind = losses.SupConLoss if loss == "supcon" else losses.NTXentLoss
    wrapper = package("pytorch_metric_learning.utils.distributed").DistributedLossWrapper
    criterion = wrapper(kind(temperature=1 / LOSSES[loss].scale), efficient=efficient)

    def rank_loss(part: Part) -> Tensor:
        labels = part.labels
        if labels is None:  # rows of one view and of the other belong together
            labels = (torch.arange(len(part.features[0])) + part.start).repeat(len(part.features))
        value: Tensor = criterion(torch.cat(part.features), labels)
        return value

    return rank_loss


def lightly_loss(member: Member) -> RankLoss:
    criterion = package("lightly.loss").NTXentLoss(temperature=1 / LOSSES["nt_xent"].scale, gather_distributed=True)
    return lambda part: criterion(*part.features)


def grad_cache_loss(member: Member) -> RankLoss:
    criterion = package("gradcache.loss").DistributedContrastiveLoss()
    return lambda part: criterion(part.scale * part.features[0], part.features[1])


def inf_cl_loss(member: Member) -> RankLoss:
    """Its ring in plain torch: the one with kernels needs CUDA."""
    try:
        ring = package("inf_cl").cal_ring_loss
    except ImportError as error:
        raise CannotRun(f"needs {error.name}") from None

    def rank_loss(part: Part) -> Tensor:
        one, other = part.features
        options = {"scale": part.scale, "head_dim": one.shape[1]}
        value: Tensor = (ring(one, other, **options) + ring(other, one, **options)) / 2
        return value

    return rank_loss


def quiet(make: Callable[[Member], RankLoss], member: Member) -> RankLoss:
    """Others use what torch deprecates, and say so on every rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    return make(member)


def _open_clip_title(local_loss: bool, gather_with_grad: bool) -> str:
    return f"open_clip ClipLoss, local_loss={local_loss}, gather_with_grad={gather_with_grad}"


def _peer(title: str, package: str, loss: str, make: Callable[..., RankLoss], *settings: Any) -> Peer:
    return Peer(title, package, loss, partial(quiet, partial(make, *settings)))


def _ours(loss: str, trainer: str) -> Peer:
    title = f"megabatch {LOSSES[loss].function}" + (', grad_reduction="sum"' if trainer == "sum" else "")
    return Peer(title, "megabatch", loss, partial(megabatch_loss, loss, trainer), trainer, ours=True)


_YES_NO = (False, True)

PEERS = [
    *(_ours(loss, trainer) for trainer in ("mean", "sum") for loss in LOSSES),
    *(
        _peer(_open_clip_title(local, grad), "open_clip_torch", "clip", open_clip_loss, local, grad)
        for local in _YES_NO
        for grad in _YES_NO
    ),
    *(
        _peer(f"open_clip SigLipLoss, dist_impl={way}", "open_clip_torch", "siglip", open_clip_siglip, way)
        for way in ("bidir", "shift", "reduce", "gather")
    ),
    *(
        _peer(
            f"sentence-transformers MultipleNegativesRankingLoss, {ways}, gather_across_devices",
            "sentence-transformers",
            loss,
            sentence_transformers_loss,
            loss,
        )
        for loss, ways in (("info_nce", "one direction"), ("clip", "both directions"))
    ),
    *(
        _peer(
            f"pytorch-metric-learning {kind}, DistributedLossWrapper(efficient={efficient})",
            "pytorch-metric-learning",
            loss,
            metric_learning_loss,
            loss,
            efficient,
        )
        for loss, kind in (("nt_xent", "NTXentLoss"), ("supcon", "SupConLoss"))
        for efficient in _YES_NO
    ),
    _peer("lightly NTXentLoss, gather_distributed", "lightly", "nt_xent", lightly_loss),
    _peer("GradCache DistributedContrastiveLoss", "GradCache", "info_nce", grad_cache_loss),
    _peer("inf_cl cal_ring_loss, both directions", "inf_cl", "clip", inf_cl_loss),
]
PACKAGES = list(dict.fromkeys(peer.package for peer in PEERS))
