"""Two towers, by open_clip's names. Their sums are those of its docs/model_profile.csv; the split is COUNTED."""

from dataclasses import dataclass

COLOURS = 3


@dataclass(frozen=True)
class Tower:
    """A stack of transformer layers, with millions of parameters and Gflop of a forward of one sample."""

    layers: int
    width: int
    tokens: int
    mparams: float
    gflops: float

    @property
    def numbers(self) -> int:
        """What activations are in proportion to."""
        return self.layers * self.tokens * self.width


@dataclass(frozen=True)
class Model:
    """An image tower and a text tower whose features have one width."""

    name: str
    embed_dim: int
    image_size: int
    image: Tower
    text: Tower

    @property
    def towers(self) -> dict[str, Tower]:
        return {"image": self.image, "text": self.text}

    @property
    def parameters(self) -> float:
        return (self.image.mparams + self.text.mparams) * 1e6


MODELS = {
    name: Model(name, embed_dim, image_size, Tower(*image), Tower(*text))
    for name, embed_dim, image_size, image, text in (
        ("ViT-S-32", 384, 224, (12, 384, 50, 22.642, 2.285), (12, 384, 77, 40.444, 3.380)),
        ("ViT-S-16", 384, 224, (12, 384, 197, 21.814, 9.197), (12, 384, 77, 40.444, 3.380)),
        ("ViT-B-32", 512, 224, (12, 768, 50, 87.849, 8.818), (12, 512, 77, 63.428, 5.960)),
        ("ViT-B-16", 512, 224, (12, 768, 197, 86.193, 35.127), (12, 512, 77, 63.428, 5.960)),
        ("ViT-L-16", 768, 224, (24, 1024, 197, 304.089, 123.109), (12, 768, 77, 123.650, 13.300)),
        ("ViT-L-14", 768, 224, (24, 1024, 257, 303.966, 162.026), (12, 768, 77, 123.650, 13.300)),
        ("ViT-L-14-336", 768, 336, (24, 1024, 577, 304.294, 381.920), (12, 768, 77, 123.650, 13.300)),
        ("ViT-H-14", 1024, 224, (32, 1280, 257, 632.077, 334.590), (24, 1024, 77, 354.033, 47.091)),
        ("ViT-g-14", 1024, 224, (40, 1408, 257, 1012.646, 534.063), (24, 1024, 77, 354.033, 47.091)),
        ("ViT-bigG-14", 1280, 224, (48, 1664, 257, 1844.907, 967.496), (32, 1280, 77, 694.660, 97.863)),
    )
}
