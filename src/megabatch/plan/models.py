"""Two towers by their dimensions: how many parameters they have, and what a forward of one pair costs.

Names are open_clip's. Both towers are plain transformers; the image tower has a class token and multiplies its patches
by one matrix.
"""

from dataclasses import dataclass

COLOURS = 3


@dataclass(frozen=True)
class Layers:
    """A stack of transformer layers over so many tokens."""

    layers: int
    width: int
    tokens: int
    mlp_ratio: float = 4.0

    @property
    def parameters(self) -> int:
        """Four projections of the attention, two of the MLP, two norms; all with biases."""
        width, hidden = self.width, int(self.width * self.mlp_ratio)
        return self.layers * (4 * (width**2 + width) + 2 * width * hidden + hidden + width + 4 * width)

    @property
    def flops(self) -> float:
        """Of a forward of one sample: the projections, then each token with each other, twice."""
        projections = self.tokens * (8 * self.width**2 + 4 * self.width * int(self.width * self.mlp_ratio))
        return self.layers * (projections + 4 * self.tokens**2 * self.width)

    @property
    def numbers(self) -> int:
        """Tokens by width by layers: what activations are in proportion to."""
        return self.layers * self.tokens * self.width


@dataclass(frozen=True)
class Model:
    """An image tower and a text tower whose features have one width."""

    name: str
    embed_dim: int
    image_layers: int
    image_width: int
    patch_size: int
    text_layers: int
    text_width: int
    image_size: int = 224
    text_length: int = 77
    vocabulary: int = 49408
    mlp_ratio: float = 4.0  # of the image tower

    @property
    def image(self) -> Layers:
        return Layers(self.image_layers, self.image_width, self.patches + 1, self.mlp_ratio)

    @property
    def text(self) -> Layers:
        return Layers(self.text_layers, self.text_width, self.text_length)

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def image_parameters(self) -> int:
        """The layers, the patches' matrix, class token, positions, two norms, and the projection to the features."""
        beside = COLOURS * self.patch_size**2 + 1 + self.image.tokens + 4 + self.embed_dim
        return self.image.parameters + beside * self.image_width

    @property
    def text_parameters(self) -> int:
        """The layers, the vocabulary, positions, a norm, and the projection to the features."""
        return self.text.parameters + (self.vocabulary + self.text_length + 2 + self.embed_dim) * self.text_width

    @property
    def parameters(self) -> int:
        """With the logit scale."""
        return self.image_parameters + self.text_parameters + 1

    @property
    def image_flops(self) -> float:
        """Of a forward of one image."""
        patches = 2 * self.patches * COLOURS * self.patch_size**2 * self.image_width
        return self.image.flops + patches + 2 * self.image_width * self.embed_dim

    @property
    def text_flops(self) -> float:
        return self.text.flops + 2 * self.text_width * self.embed_dim


MODELS = {
    model.name: model
    for model in (
        Model("ViT-S-32", 384, 12, 384, 32, 12, 384),
        Model("ViT-S-16", 384, 12, 384, 16, 12, 384),
        Model("ViT-B-32", 512, 12, 768, 32, 12, 512),
        Model("ViT-B-16", 512, 12, 768, 16, 12, 512),
        Model("ViT-L-16", 768, 24, 1024, 16, 12, 768),
        Model("ViT-L-14", 768, 24, 1024, 14, 12, 768),
        Model("ViT-L-14-336", 768, 24, 1024, 14, 12, 768, image_size=336),
        Model("ViT-H-14", 1024, 32, 1280, 14, 24, 1024),
        Model("ViT-g-14", 1024, 40, 1408, 14, 24, 1024, mlp_ratio=4.3637),
        Model("ViT-bigG-14", 1280, 48, 1664, 14, 32, 1280, mlp_ratio=4.9231),
    )
}
