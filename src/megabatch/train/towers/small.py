"""`small`: a plain vision transformer and a text transformer on UTF-8 bytes. Nothing is downloaded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..preprocessing import Preprocessing
from .text_bytes import ByteTokenizer
from .towers import BuiltInTowers

PATCH, WIDTH, DEPTH, HEADS, EMBEDDING = 8, 256, 6, 4, 256
BYTES = 128


class SmallTowers(BuiltInTowers):
    """Two transformers of one shape, about 10 million parameters together.

    Args:
        init_logit_scale: 1/temperature at the start.
        init_logit_bias: Of the logits at the start. `None`: there is no bias.
        image_size: A multiple of 8, the side of a patch. `None`: 64.
    """

    def __init__(
        self, init_logit_scale: float, init_logit_bias: float | None = None, *, image_size: int | None = None
    ) -> None:
        super().__init__(init_logit_scale, init_logit_bias)
        size = 64 if image_size is None else image_size
        if size < PATCH or size % PATCH:
            raise ValueError(f"SmallTowers: image_size must be a multiple of {PATCH}, the patch, got {image_size}.")
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
        x = self.trunk(self.bytes(tokens) + self.positions, real[:, None, None, :])
        mean = (x * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
        return self.projection(mean)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Blocks, and a norm after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointed = False

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, seen, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, seen)
        return self.norm(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then two layers for each position by itself, both on normed input and added to what was."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        # No bias: that of a key adds the same to all logits of a softmax, so no gradient ever moves it.
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.hidden_norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.output = nn.Linear(4 * WIDTH, WIDTH)
        # What is added 2 * DEPTH times starts small enough for the sum to keep the size of the first term.
        for layer, gain in [
            (self.query_key_value, 1.0),
            (self.attended, (2 * DEPTH) ** -0.5),
            (self.hidden, 1.0),
            (self.output, (2 * DEPTH) ** -0.5),
        ]:
            nn.init.normal_(layer.weight, std=gain * layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        query, key, value = (
            self.query_key_value(self.attention_norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        x = x + self.attended(attended.transpose(1, 2).flatten(2))
        return x + self.output(F.gelu(self.hidden(self.hidden_norm(x))))  # type: ignore[no-any-return]
