"""What two towers are to the rest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ..config import said
from ..preprocessing import Preprocessing

if TYPE_CHECKING:
    from PIL import Image

Tokenizer = Callable[[Sequence[str]], Tensor]  # [n, length] integers; can be sent to other processes


class Towers(nn.Module, ABC):
    """An image and a text encoder with one space in common, and the scale (and bias) of its logits.

    Attributes:
        preprocessing: What is done to images before they are encoded.
        tokenizer: Texts to tokens.
        logit_scale: The logarithm of 1/temperature.
        model: The module whose state is saved: this one, or the one of another library that it wraps.
    """

    preprocessing: Preprocessing
    tokenizer: Tokenizer
    logit_scale: nn.Parameter
    logit_bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.image_is_locked = False

    @property
    def model(self) -> nn.Module:
        return self

    @abstractmethod
    def encode_image(self, images: Tensor) -> Tensor:
        """Features, not normalised, of float images `[n, channels, size, size]`, as `preprocess` makes them."""

    @abstractmethod
    def encode_text(self, tokens: Tensor) -> Tensor:
        """Features, not normalised, of tokens `[n, length]`."""

    @abstractmethod
    def image_parts(self) -> list[nn.Module]:
        """The modules of the image tower, its projection included."""

    @abstractmethod
    def compiled_parts(self) -> list[nn.Module]:
        """The modules that torch.compile is worth its while for: one per tower."""

    @abstractmethod
    def checkpoint_activations(self) -> None:
        """Form activations again in the backward instead of keeping them. ValueError where the towers cannot."""

    def preprocess(self, image: Image.Image) -> Tensor:
        """Float `[channels, size, size]` of an image as Pillow opens it."""
        return self.pixels(self.preprocessing(image))

    def pixels(self, images: Tensor) -> Tensor:
        """Float images as encode_image takes them, of uint8 ones: `(images / 255 - mean) / std`."""
        if images.dtype != torch.uint8:
            raise TypeError(
                f"pixels: images must be torch.uint8, from 0 to 255, got {images.dtype}. Pass what preprocessing makes."
            )
        mean, std = (_per_channel(each, images.device) for each in (self.preprocessing.mean, self.preprocessing.std))
        return images.float().div_(255).sub_(mean).div_(std)

    def export(self, folder: Path) -> None:
        """Write a folder that the library of the model loads. ValueError where it is of none."""
        raise ValueError(
            "export: the model must be open_clip's or Hugging Face's, got one of ours. Use megabatch.load."
        )

    def lock_image(self) -> None:
        """LiT: the image tower stays as it is, its projection and the statistics of its norms included."""
        self.image_is_locked = True
        for part in self.image_parts():
            part.requires_grad_(False)
            part.eval()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.image_is_locked:
            for part in self.image_parts():
                part.eval()
        return self


class BuiltInTowers(Towers):
    """Two modules of ours, `image` and `text`, which are set by who inherits, and a scale (and bias) beside them."""

    image: nn.Module
    text: nn.Module

    def __init__(self, init_logit_scale: float, init_logit_bias: float | None) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(init_logit_scale)))
        self.logit_bias = None if init_logit_bias is None else nn.Parameter(torch.tensor(float(init_logit_bias)))

    def encode_image(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.image(images))

    def encode_text(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.text(tokens))

    def image_parts(self) -> list[nn.Module]:
        return [self.image]

    def compiled_parts(self) -> list[nn.Module]:
        return [self.image, self.text]


class WrappedTowers(Towers):
    """Those of a model of another library, whose state keeps its own names."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip, self.logit_scale, self.logit_bias = clip, clip.logit_scale, getattr(clip, "logit_bias", None)

    @property
    def model(self) -> nn.Module:
        return cast(nn.Module, self.clip)


@lru_cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None, None]


def import_library(name: str, *, extra: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # the last: torchvision beside a torch that is not its own
        absent = isinstance(error, ModuleNotFoundError) and "." not in (error.name or ".")
        advice = f"Run pip install 'megabatch[{extra}]'" if absent else "It is installed: mend what fails in it"
        raise ImportError(
            f"--model: {name} must be importable, got {said(error)}. {advice}, or take --model tiny or small, "
            "which need nothing."
        ) from error
