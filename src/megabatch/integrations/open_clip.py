"""The losses of open_clip 3 and 4, and its training program with them.

    from megabatch.integrations.open_clip import ClipLoss                     # was: from open_clip import ClipLoss
    CLIPTask(model, loss=ClipLoss(rank=rank, world_size=world_size))          # open_clip 4
    torchrun --nproc-per-node 8 -m megabatch.integrations.open_clip …         # was: … -m open_clip_train.main …

Same arguments, same values, linear memory. On several ranks the value is that of all their rows, and the gradient that
of one process with all rows: what open_clip gives with local_loss=True and gather_with_grad=True. Its default, both
False, divides the encoders' gradient by the number of ranks.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabatch as mb

from .common import not_importable

__all__ = ["ClipLoss", "CoCaLoss", "SigLipLoss", "create_loss", "install", "main"]

_log = logging.getLogger(__name__)


def __dir__() -> list[str]:
    return __all__


class _Ranked(nn.Module):
    """A loss that takes `rank` and `world_size`, as open_clip's do."""

    options: dict[str, Any]
    _found = False  # whether the group in the options is the one of all ranks, found here

    def _take(self, rank: int, world_size: int, **unused: object) -> None:
        """Keep the ranks, and log once which arguments have no effect."""
        name = type(self).__name__
        given = [argument for argument, value in unused.items() if value]
        if rank == 0 and world_size > 1 and unused.get("gather_with_grad") is False:
            _log.warning(
                "%s: gradients are always exact here. open_clip's are smaller without gather_with_grad, by a factor of "
                "%d with its defaults. Check learning rate and gradient clipping if you tuned them with open_clip's "
                "loss.",
                name,
                world_size,
            )
        elif rank == 0 and given:
            _log.info(
                "%s: ignored here: %s. The gradient is always exact, and the value is that of all ranks.",
                name,
                ", ".join(given),
            )
        self.rank, self.world_size = rank, world_size
        vars(self).update(unused)
        if dist.is_initialized():
            self._find_ranks()
        self.register_forward_pre_hook(_find_ranks_of)  # there may be others by then

    def _find_ranks(self) -> None:
        if self.options.get("group", ...) is not ...:
            return
        name, size = type(self).__name__, dist.get_world_size() if dist.is_initialized() else 1
        if self.world_size > 1 and not dist.is_initialized():
            raise ValueError(
                f"{name}: world_size must be that of torch.distributed, which is not initialised, got "
                f"{self.world_size}. Call torch.distributed.init_process_group before the first step."
            )
        if self.world_size != size:
            raise ValueError(
                f"{name}: world_size must be that of torch.distributed, {size}, got {self.world_size}. Pass "
                "world_size=torch.distributed.get_world_size() and the rank for the rows of all ranks together, or "
                "group=None for those of this rank alone."
            )
        if size > 1 and self.rank != dist.get_rank():
            raise ValueError(
                f"{name}: rank must be that of torch.distributed, {dist.get_rank()}, got {self.rank}. Pass "
                "rank=torch.distributed.get_rank()."
            )
        if size > 1:
            self.options["group"], self._found = dist.group.WORLD, True

    def __getstate__(self) -> dict[str, Any]:
        """Without the group of all ranks, which cannot be copied; the copy finds it again."""
        options = {name: value for name, value in self.options.items() if name != "group" or not self._found}
        return {**vars(self), "options": options, "_found": False}

    def get_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: there is no matrix of logits."""
        raise NotImplementedError(
            f"{type(self).__name__}: get_logits and get_ground_truth must not be called, because there is no matrix of "
            "logits. Use open_clip's own loss, or megabatch.similarity_topk for the largest of each row."
        )

    get_ground_truth = get_logits


def _find_ranks_of(loss: _Ranked, _: object) -> None:
    loss._find_ranks()


class ClipLoss(mb.ClipLoss, _Ranked):
    """`open_clip.ClipLoss`, over `megabatch.clip_loss`. Owns no scale: forward takes it.

    Args:
        local_loss, gather_with_grad, cache_labels: Accepted; they have no effect.
        rank, world_size: Those of torch.distributed, whose ranks' rows together make the batch. Others are an error,
            here if it is initialised already, else in forward.
        use_horovod: Not supported; True is an error.
        options: Of `megabatch.ClipLoss`, for instance `memory_budget`. `normalize` is False unless given. With `group`,
            that group's ranks make the batch (None: this one alone), and `rank` and `world_size` are ignored.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(init_logit_scale=None, **{"normalize": False, **options})
        if use_horovod:
            raise ValueError(
                f"{type(self).__name__}: use_horovod must be False, because ranks use torch.distributed, got "
                f"{use_horovod}. Start them with torchrun."
            )
        self.use_horovod = use_horovod
        self._take(
            rank, world_size, local_loss=local_loss, gather_with_grad=gather_with_grad, cache_labels=cache_labels
        )


class SigLipLoss(mb.SigLipLoss, _Ranked):
    """`open_clip.SigLipLoss`, over `megabatch.siglip_loss`. Owns no scale and no bias: forward takes them.

    Args:
        cache_labels, dist_impl, chunk_size: Accepted; they have no effect.
        rank, world_size, options: As for `ClipLoss`.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(init_logit_scale=None, **{"normalize": False, **options})
        if dist_impl and dist_impl not in ("bidir", "shift", "reduce", "gather"):
            raise ValueError(
                f"{type(self).__name__}: dist_impl must be one of 'bidir', 'shift', 'reduce', 'gather', got "
                f"{dist_impl!r}. Leave it out, and use `exchange` to choose how ranks communicate."
            )
        self._take(rank, world_size, cache_labels=cache_labels, dist_impl=dist_impl, chunk_size=chunk_size)


class CoCaLoss(ClipLoss):
    """`open_clip.CoCaLoss`: `ClipLoss`, and the cross entropy of captions, of this rank's rows as in the original.

    Args:
        caption_loss_weight, clip_loss_weight: Factors of the two losses.
        pad_id: Label that is ignored in captions.
        options: The other arguments of `ClipLoss`.
    """

    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, **options)
        self.caption_loss_weight, self.clip_loss_weight = caption_loss_weight, clip_loss_weight
        self.caption_loss = nn.CrossEntropyLoss(ignore_index=pad_id)

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: float | Tensor,
        output_dict: bool = False,
    ) -> Any:
        """The contrastive and the caption loss, or a dict of them with `output_dict`."""
        contrastive = torch.tensor(0, device=logits.device)
        if self.clip_loss_weight:
            contrastive = self.clip_loss_weight * super().forward(image_features, text_features, logit_scale)
        caption = self.caption_loss_weight * self.caption_loss(logits.transpose(1, 2), labels)
        return {"contrastive_loss": contrastive, "caption_loss": caption} if output_dict else (contrastive, caption)


def create_loss(args: Any) -> ClipLoss | SigLipLoss:
    """`open_clip.create_loss`: the loss for the parsed arguments of open_clip_train."""
    _check_arguments(args.distill, args)
    ranks = {"rank": args.rank, "world_size": args.world_size}
    if "coca" not in args.model.lower() and args.siglip:
        return SigLipLoss(dist_impl=args.loss_dist_impl, **ranks)
    ways = {"local_loss": args.local_loss, "gather_with_grad": args.gather_with_grad, **ranks}
    if "coca" in args.model.lower():
        return CoCaLoss(args.coca_caption_loss_weight, args.coca_contrastive_loss_weight, **ways)
    return ClipLoss(**ways)


def _check_arguments(distill: object, args: Any) -> None:
    if distill:
        raise ValueError(
            "create_loss: --distill-model must be left out, because megabatch has no distillation loss. Run "
            "open_clip_train.main for it."
        )
    if getattr(args, "horovod", False):
        raise ValueError(
            "create_loss: --horovod must be left out, because ranks communicate through torch.distributed. Start them "
            "with torchrun."
        )


def _create_task(original: Callable[..., Any], args: Any, *models: Any, **more: Any) -> Any:
    """`open_clip.create_task` of open_clip 4, with the loss replaced."""
    _check_arguments(args.distill, args)
    task, loss = original(args, *models, **more), create_loss(args)
    if type(task.loss).__name__ != type(loss).__name__:
        raise ValueError(
            f"create_task: --model must be one that is trained with ClipLoss, SigLipLoss or CoCaLoss, got "
            f"{args.model!r}, which is trained with {type(task.loss).__name__}. Run open_clip_train.main for it."
        )
    task.loss = loss
    return task


def install() -> ExitStack:
    """Make open_clip and open_clip_train use the losses of this module.

    Replaces `create_loss`, and the `create_task` of open_clip 4, in the modules that look them up. Lasts until the end
    of the program, or, used as a context manager or with `.close()` of the returned object, until then. Code that has
    imported one of the two by name before keeps the original.
    """
    modules = [_imported("open_clip"), _imported("open_clip.factory")]
    with suppress(ModuleNotFoundError):  # it needs more packages than open_clip does
        modules.append(import_module("open_clip_train.main"))
    undo = ExitStack()
    for module in modules:
        factories = ("create_loss", "create_task")
        found = {name: getattr(module, name) for name in factories if hasattr(module, name)}
        if not found:
            undo.close()
            raise ImportError(
                f"install: open_clip must be version 3 or 4, whose {module.__name__} has create_loss or create_task, "
                f"got {modules[0].__version__}. Construct ClipLoss or SigLipLoss of this module yourself."
            )
        for name, original in found.items():
            if original is create_loss or getattr(original, "func", None) is _create_task:
                continue  # installed already
            undo.callback(setattr, module, name, original)
            setattr(module, name, create_loss if name == "create_loss" else partial(_create_task, original))
    return undo


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises the latter
        raise not_importable("megabatch.integrations.open_clip", name, "open_clip", error) from error


def main() -> None:
    """Run open_clip_train.main with the command line's arguments and the losses of this module."""
    program = _imported("open_clip_train.main")
    args = _imported("open_clip_train.params").parse_args(sys.argv[1:])
    _check_arguments(args.distill_model, args)  # before anything is downloaded or built
    with install():
        program.main(sys.argv[1:])


if __name__ == "__main__":
    main()
