"""Two towers for CPUs: they learn the built-in icons in half a minute on two cores."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from .text_bytes import ByteTokenizer
from .towers import Towers


class TinyTowers(Towers):
    """A small convolutional net on grey images, and a bag of the text's byte n-grams.

    Nothing in it is random after it was made, and no sample knows of another: no dropout, no batch norm.
    """

    def __init__(self, init_logit_scale: float = 1 / 0.07, init_logit_bias: float | None = None) -> None:
        super().__init__()
        self.image_size, self.channels, self.mean, self.std = 32, 1, (0.8,), (0.35,)
        self.tokenizer = ByteTokenizer(48)
        self.image = _ConvNet(width=32, features=256)
        self.text = _NGrams(width=256, features=256)
        self.log_scale = nn.Parameter(torch.tensor(math.log(init_logit_scale)))
        self.bias = None if init_logit_bias is None else nn.Parameter(torch.tensor(float(init_logit_bias)))

    @property
    def logit_scale(self) -> nn.Parameter:
        return self.log_scale

    @property
    def logit_bias(self) -> nn.Parameter | None:
        return self.bias

    def encode_image(self, images: Tensor) -> Tensor:
        features: Tensor = self.image(images)
        return features

    def encode_text(self, tokens: Tensor) -> Tensor:
        features: Tensor = self.text(tokens)
        return features

    def image_parts(self) -> list[nn.Module]:
        return [self.image]

    def compiled_parts(self) -> list[nn.Module]:
        return [self.image, self.text]

    def checkpoint_activations(self) -> None:
        raise ValueError("--grad-checkpointing: tiny has no layers worth forming again. Lower --chunk-size instead.")


class _ConvNet(nn.Sequential):
    """Halves the image four times, and doubles the channels each time."""

    def __init__(self, width: int, features: int) -> None:
        widths = [1, width, 2 * width, 4 * width, 8 * width]
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(8, after),
                nn.GELU(),
            ]
        super().__init__(*layers, nn.Flatten(), nn.Linear(4 * widths[-1], features))


class _NGrams(nn.Module):
    """The sum of vectors of all runs of 1 to 5 bytes in a text, each looked up by its hash, and a small net on it."""

    buckets = 1 << 14

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(self.buckets, width) * 0.1)
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, features))

    def forward(self, tokens: Tensor) -> Tensor:
        hashes, valid = [], []
        run = torch.zeros_like(tokens)
        for length in range(1, 6):
            end = tokens.shape[1] - length + 1
            run = (run[:, :end] * 1_000_003 + tokens[:, length - 1 :] + length) % 2_147_483_647
            hashes.append(run % self.buckets)
            valid.append(tokens[:, length - 1 :] != ByteTokenizer.padding)
        bag, weights = torch.cat(hashes, 1), torch.cat(valid, 1).to(self.table.dtype)
        pooled = embedding_bag(bag, self.table, mode="sum", per_sample_weights=weights)
        features: Tensor = self.net(pooled)
        return features
