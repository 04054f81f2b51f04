"""Image and text encoders, chosen by name: built in, open_clip's, or of a folder in Hugging Face's layout."""

import logging
import math
from pathlib import Path

import torch

from ..config import Model
from .towers import Tokenizer, Towers

__all__ = ["Tokenizer", "Towers", "has_weights", "make_towers"]

BUILT_IN = ("tiny", "small")

_log = logging.getLogger(__name__)


def make_towers(model: Model, *, loss: str, init_logit_scale: float | None = None) -> Towers:
    """The towers that `model` names, ready to train with `loss`: "clip", "siglip" or "infonce".

    Random weights come from torch's generator alone: the caller sets torch.manual_seed.

    Args:
        init_logit_scale: 1/temperature. `None` leaves pretrained towers theirs, and starts others as the loss's paper.
    """
    scale, bias = (10.0, -10.0) if loss == "siglip" else (1 / 0.07, None)
    is_folder, size = Path(model.model).is_dir(), model.force_image_size
    towers: Towers
    if model.pretrained is not None and (is_folder or model.model in BUILT_IN):
        raise ValueError(
            f"--pretrained: must be left out with --model {model.model}, which is not open_clip's, got "
            f"{model.pretrained!r}."
        )
    if model.model == "tiny":
        from .tiny import TinyTowers

        towers = TinyTowers(scale, bias)
    elif model.model == "small":
        from .small import SmallTowers

        towers = SmallTowers(scale, bias, image_size=size)
    elif is_folder:
        from .hugging_face import HuggingFaceTowers

        towers = HuggingFaceTowers(model.model)
    else:
        from .open_clip import OpenClipTowers

        towers = OpenClipTowers(model.model, scale, bias, pretrained=model.pretrained, force_image_size=size)
    if size not in (None, towers.preprocessing.size):
        raise ValueError(
            f"--force-image-size: must be {towers.preprocessing.size} for --model {model.model}, got {size}."
        )
    if init_logit_scale is not None:
        with torch.no_grad():
            towers.logit_scale.fill_(math.log(init_logit_scale))
    if loss == "siglip" and towers.logit_bias is None:
        raise ValueError(
            f"--loss: must be clip or infonce, because --model {model.model} has no logit_bias, got siglip. "
            "Take a SigLIP model, or a CLIP model of open_clip, which is given a bias."
        )
    if loss == "infonce" and towers.logit_bias is not None:
        towers.logit_bias.requires_grad_(False)
        _log.info("--loss infonce has no bias: the logit_bias of %s is not trained.", model.model)
    if model.lock_image:
        towers.lock_image()
        if not has_weights(model):
            _log.warning("--lock-image: the image tower of %s has random weights, which stay as they are.", model.model)
    if model.grad_checkpointing:
        towers.checkpoint_activations()
    return towers.train()


def has_weights(model: Model) -> bool:
    """Whether its towers start from trained weights."""
    stored = Path(model.model).is_dir() or model.model.startswith(("local-dir:", "hf-hub:"))
    return model.model not in BUILT_IN and (stored or model.pretrained is not None)
