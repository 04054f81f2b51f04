"""Who is measured over ranks: megabatch in its ways, one process with the same batch, and what people run today."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import megabatch

from ..cases import Case
from ..instruments.ranks import Member
from ..loss import contenders
from ..loss.rivals import LossFunction

# More than any side of a plane, so a plane is one tile.
WHOLE = 2**30


@dataclass(frozen=True)
class Entrant:
    """Something that computes the CLIP loss of a batch spread over ranks.

    Attributes:
        make: The loss on one rank. Raises NotInstalled.
        matrices: Of logits, that all ranks together hold at their peak, about: to tell whether they would fit.
        everywhere: Every rank holds as many by itself.
        in_cells: Of each rank's rows by one rank's columns at a time, which is the n-th part.
        ours: Its result is held against the dense loss's own precision; another's need only be the same loss.
        alone: One process that holds the whole batch, with as many threads as there are ranks, or as there are cores.
    """

    name: str
    title: str
    make: Callable[[Member], LossFunction]
    matrices: float = 0
    ours: bool = False
    alone: bool = False
    everywhere: bool = False
    in_cells: bool = False

    def held(self, case: Case, size: int = 1) -> float:
        """Bytes, of `size` ranks together."""
        factor = size if self.everywhere else 1 / size if self.in_cells else 1
        return self.matrices * case.matrix_bytes * factor


def ours(member: Member, **options: Any) -> LossFunction:
    return partial(cast(LossFunction, megabatch.clip_loss), normalize=False, group=dist.group.WORLD, **options)


def ours_kept(member: Member) -> LossFunction:
    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        # This rank's rows of the matrix of logits, and some room to work in.
        logits = len(image) ** 2 * member.size * max(image.element_size(), 4)
        return ours(member, exchange="ring", memory_budget=logits + 256 * 2**20)(image, text, scale)

    return loss


def pass_per_direction(member: Member, **options: Any) -> LossFunction:
    """Images to texts and texts to images apart, each with a ring of its own, as Ring-CL and Inf-CL have it."""
    one_way = partial(
        cast(LossFunction, megabatch.info_nce_loss),
        normalize=False,
        group=dist.group.WORLD,
        exchange="ring",
        **options,
    )
    return lambda image, text, scale: (one_way(image, text, scale) + one_way(text, image, scale)) / 2


def one_process(member: Member) -> LossFunction:
    return partial(cast(LossFunction, megabatch.clip_loss), normalize=False, group=None)


def open_clip_formula(member: Member) -> LossFunction:
    return partial(_local_loss, member)


def open_clip(member: Member) -> LossFunction:
    module = contenders.package("open_clip.loss")
    # Its use of what torch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning)
    loss: LossFunction = module.ClipLoss(
        local_loss=True, gather_with_grad=True, rank=member.rank, world_size=member.size
    )
    return loss


def _local_loss(member: Member, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """open_clip's local_loss=True, gather_with_grad=True: this rank's rows of both directions, against everyone's."""
    target = torch.arange(len(image), device=image.device) + member.rank * len(image)
    per_image, per_text = scale * image @ _gather(text).T, scale * text @ _gather(image).T
    return (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2


def global_loss(member: Member) -> LossFunction:
    return _global_loss


def _global_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """CLIP's: every rank has the whole matrix of logits, all the same."""
    logits = scale * _gather(image) @ _gather(text).T
    target = torch.arange(len(logits), device=image.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def disco(member: Member) -> LossFunction:
    return partial(_disco_loss, member)


def _disco_loss(member: Member, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """DisCo-CLIP's: this rank's rows of both directions, and from them gradients for everyone's features, which are
    reduced over the ranks. They are added: the average that its code takes is too small by the number of ranks."""
    mine = member.share(member.size * len(image))
    target = torch.arange(mine.start, mine.stop, device=image.device)
    images, texts = _gather(image, _GatherAndReduce), _gather(text, _GatherAndReduce)
    per_image, per_text = scale * images[mine] @ texts.T, scale * texts[mine] @ images.T
    return (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2


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
        theirs = [part.contiguous() for part in gradient.chunk(dist.get_world_size())]
        mine = [torch.empty_like(part) for part in theirs]
        dist.all_to_all(mine, theirs)
        return torch.stack(mine).sum(0)


class _GatherAndReduce(_Gather):
    """The same, but all ranks learn the gradients of all rows, and each takes its own."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()  # in place, as its own code does: a copy is memory that it does not take
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


ENTRANTS = {
    entrant.name: entrant
    for entrant in (
        Entrant("one", "one process", one_process, ours=True, alone=True),
        Entrant("ring", "megabatch, ring", partial(ours, exchange="ring"), ours=True),
        Entrant("blocking", "megabatch, ring, no overlap", partial(ours, exchange="ring", overlap=False), ours=True),
        Entrant("gather", "megabatch, gather (tiles without ring)", partial(ours, exchange="gather"), ours=True),
        Entrant(
            "untiled",
            "ring without tiles",
            partial(ours, exchange="ring", tile=WHOLE),
            matrices=3,
            in_cells=True,
            ours=True,
        ),
        Entrant("formula", "open_clip's formula", open_clip_formula, matrices=9),
        Entrant("open_clip", "open_clip", open_clip, matrices=9),
        Entrant("global", "CLIP's global loss", global_loss, matrices=6, everywhere=True),
        Entrant("disco", "DisCo-CLIP's scheme (SUM, not its code's AVG)", disco, matrices=9),
        Entrant(
            "ring_only",
            "ring without tiles, a pass per direction",
            partial(pass_per_direction, tile=WHOLE),
            matrices=3,
            in_cells=True,
            ours=True,
        ),
        Entrant("two_walks", "ring and tiles, a pass per direction", pass_per_direction, ours=True),
        Entrant("kept", "megabatch, ring, logits kept", ours_kept, matrices=1, ours=True),
    )
}
# Who takes part in `megabatch bench ring` if nobody is named. The others stand in the tables of `paper`.
USUAL = ("one", "ring", "blocking", "gather", "untiled", "formula", "open_clip")
