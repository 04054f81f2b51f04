"""Who is measured: a training step with the dense loss or with megabatch's, its batch encoded at once or in chunks."""

from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor

import megabatch

from ..loss import rivals


def dense(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """open_clip's formula, which is what most people train with."""
    return rivals.OPEN_CLIP_FORMULA["clip"](F.normalize(image, dim=1), F.normalize(text, dim=1), scale)


def ours(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return cast(Tensor, megabatch.clip_loss(image, text, scale, normalize=True))


LOSSES = {"dense": dense, "megabatch": ours}


@dataclass(frozen=True)
class Way:
    """A way to take a training step. `chunked`: the activations of one chunk are held at a time."""

    loss: str
    chunked: bool

    @property
    def name(self) -> str:
        return f"{self.loss}_{'chunked' if self.chunked else 'whole'}"

    @property
    def title(self) -> str:
        return f"{self.loss}, {'in chunks' if self.chunked else 'in one piece'}"

    @property
    def ours(self) -> bool:
        return self.loss == "megabatch"


WAYS = {way.name: way for way in (Way(loss, chunked) for chunked in (False, True) for loss in LOSSES)}
