"""`small`: a plain vision transformer and a text transformer on UTF-8 bytes. Nothing is downloaded."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..preprocessing import Preprocessing
from .text_bytes import ByteTokenizer
from .towers import BuiltInTowers

PATCH, WIDTH, DEPTH, HEADS, EMBEDDING = 8, 256, 6, 4, 256
BYTES = 128


class SmallTowers(BuiltInTowers):
    """Two transformers of one shape, about 10 million parameters together. Images have 64 pixels a side by default."""

    def __init__(
        self, init_logit_scale: float, init_logit_bias: float | None = None, *, image_size: int | None = None
    ) -> None:
        super().__init__(init_logit_scale, init_logit_bias)
        size = 64 if image_size is None else image_size
        if size < PATCH or size % PATCH:
            raise ValueError(
                f"--force-image-size: must be a multiple of {PATCH}, the patch of small, got {image_size}."
            )
        self.tokenizer = ByteTokenizer(BYTES)
        self.preprocessing = Preprocessing(size, mean=(0.5,) * 3, std=(0.5,) * 3)
        self.image = ImageTransformer(size)
        self.text = TextTransformer()

    def checkpoint_activations(self) -> None:
        for part in self.modules():
            if isinstance(part, Transformer):
                part.checkpointed = True


class ImageTransformer(nn.Module):
    """The mean over patches that have looked at each other."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((image_size // PATCH) ** 2, WIDTH))
        self.trunk = Transformer()
        self.projection = nn.Linear(WIDTH, EMBEDDING, bias=False)
        nn.init.normal_(self.patches.weight, std=(3 * PATCH * PATCH) ** -0.5)
        nn.init.normal_(self.projection.weight, std=WIDTH**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.projection(self.trunk(x, None).mean(1))  # type: ignore[no-any-return]


class TextTransformer(nn.Module):
    """The mean over bytes that have looked at each other; padding is neither looked at nor in the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(ByteTokenizer.vocabulary, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(BYTES, WIDTH))
        self.trunk = Transformer()
        self.projection = nn.Linear(WIDTH, EMBEDDING, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.1)
        nn.init.normal_(self.projection.weight, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != ByteTokenizer.padding
        x = self.trunk(self.bytes(tokens) + self.positions, ~real)
        mean = (x * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
        return self.projection(mean)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Pre-norm blocks without biases, and a norm after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True, bias=False
            )
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointed = False

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, None, padding, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, None, padding)
        return self.norm(x)  # type: ignore[no-any-return]
