"""Load models that `megabatch train` has trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .train.towers import Towers


def load(path: str | Path, *, device: torch.device | str = "cpu") -> Towers:
    """Load the towers of a training run, in eval mode.

        towers = megabatch.load("logs/first")
        images = torch.stack([towers.preprocess(Image.open("cat.jpg"))])
        image_features = normalize(towers.encode_image(images), dim=1)
        text_features = normalize(towers.encode_text(towers.tokenizer(["a cat", "a dog"])), dim=1)

    Args:
        path: A run's folder (its best checkpoint, or else its latest), or a checkpoint.
        device: Device of the weights. `preprocess` and `tokenizer` return CPU tensors: move them there.

    Returns:
        A module with `encode_image`, `encode_text`, `preprocess`, `tokenizer`, `logit_scale` (its logarithm) and
        `logit_bias`; `model` is the open_clip or transformers model itself. Features are not normalised.
    """
    try:
        from .train.loading import load_towers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"load: {error.name} must be installed, got none. Run pip install 'megabatch[train]'.", name=error.name
        ) from error
    return load_towers(Path(path), torch.device(device))
