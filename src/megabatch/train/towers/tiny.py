"""Two towers for CPUs: they learn the built-in icons in half a minute on two cores."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from ..preprocessing import Preprocessing
from .text_bytes import ByteTokenizer
from .towers import BuiltInTowers

_FEATURES = 128


class TinyTowers(BuiltInTowers):
    """A small convolutional net on grey images, and a net on the sum of a text's n-grams of bytes.

    Nothing in it is random once it is made, and no sample knows of another: no dropout, no batch norm.
    """

    def __init__(self, init_logit_scale: float = 1 / 0.07, init_logit_bias: float | None = None) -> None:
        super().__init__(init_logit_scale, init_logit_bias)
        self.preprocessing = Preprocessing(32, mean=(0.8,), std=(0.35,))
        self.tokenizer = ByteTokenizer(64)
        self.image = _ConvNet()
        self.text = _NGrams()

    def checkpoint_activations(self) -> None:
        raise ValueError("--grad-checkpointing: must be left out with --model tiny. Take a smaller --chunk-size.")


class _ConvNet(nn.Module):
    """Halves the image three times."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 64)):
            # No bias: the norm has one.
            convolution = nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(8, after), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, _FEATURES))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images)
        return features


class _NGrams(nn.Module):
    """Every run of 1 to 5 bytes has a vector, which it shares with a few others that have the same hash. A text is the
    sum of its runs' vectors, through two layers."""

    BUCKETS, WIDTH, LONGEST = 2**14, 256, 5

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(0.1 * torch.randn(self.BUCKETS, self.WIDTH))
        self.layers = nn.Sequential(
            nn.LayerNorm(self.WIDTH), nn.Linear(self.WIDTH, 512), nn.GELU(), nn.Linear(512, _FEATURES)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hashes, are_text = [], []
        run = torch.zeros_like(tokens)
        for length in range(1, self.LONGEST + 1):
            last = tokens[:, length - 1 :]
            # A prime below 2**31, so that the product stays below 2**63.
            run = (run[:, : last.shape[1]] * 1_000_003 + last + length) % 2_147_483_647
            hashes.append(run % self.BUCKETS)
            are_text.append(last != ByteTokenizer.padding)
        weights = torch.cat(are_text, 1).to(self.vectors.dtype)
        summed = embedding_bag(torch.cat(hashes, 1), self.vectors, mode="sum", per_sample_weights=weights)
        features: Tensor = self.layers(summed)
        return features
