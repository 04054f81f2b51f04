"""From an image to the pixels that a model was trained on.

Equal to what open_clip's image_transform and transformers' image processors make of the same image, bit for bit where
they resize with Pillow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # towers can do without it
    from PIL import Image

INTERPOLATIONS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}  # Pillow's numbers
LARGEST = 2**26  # pixels of a resized image
CHOICES = {
    "interpolation": tuple(INTERPOLATIONS),
    "resize_mode": ("shortest", "longest", "squash", "none"),
    "convention": ("open_clip", "transformers"),
}
_LOWEST_RATIO, _HIGHEST_RATIO = 3 / 4, 4 / 3


@dataclass(frozen=True)
class Preprocessing:
    """What a model wants done to its images. It is part of the model, and of its checkpoints.

    Attributes:
        size: Side of the square that the model takes, in pixels.
        mean, std: Per channel, of pixels between 0 and 1. One channel: images are grey.
        interpolation: One of `INTERPOLATIONS`.
        resize_mode: The side that gets `resize_to` pixels, "shortest" or "longest", the other one in proportion;
            "squash" gives them to both. What is beyond `size` is cut off, what is missing is filled.
        resize_to: None: `size`.
        fill_color: Of what is missing.
        convention: Where the libraries differ. "open_clip" resizes an image in the mode of its file and then converts
            it, which drops transparency; half a pixel of a margin goes to the even side. "transformers" first puts the
            image on white; half a pixel goes to the right.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    resize_to: int | None = None
    fill_color: int = 0
    convention: str = "open_clip"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"preprocessing: {name} must be one of {', '.join(choices)}, got {value!r}.")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(
                "preprocessing: mean and std must have one number per channel, 1 or 3, got "
                f"{len(self.mean)} and {len(self.std)}."
            )

    @property
    def channels(self) -> int:
        return len(self.mean)

    def __call__(
        self, image: Image.Image, *, rgb_first: bool = False, crop_scale: float = 1.0, random: Random | None = None
    ) -> Tensor:
        """uint8 `[channels, size, size]`.

        Args:
            rgb_first: OpenCLIP converts images of tar shards and of class folders before it resizes them.
            crop_scale: With `random`: a random part of at least this share of the area, instead of the middle.
        """
        if self.convention == "transformers":
            image = _on_white(image)
        elif rgb_first and image.mode != "L":  # grey is the same first and last
            image = image.convert("RGB")
        if random is None:
            image = self._cropped(self._resized(image))
        else:
            part = image.crop(random_box(image.size, crop_scale, random))
            image = part.resize((self.size, self.size), INTERPOLATIONS[self.interpolation])
        return to_tensor(image, self.channels)

    def _resized(self, image: Image.Image) -> Image.Image:
        if self.resize_mode == "none":
            return image
        side = self.resize_to or self.size
        (short, long), upright = sorted(image.size), image.width <= image.height
        if self.resize_mode == "squash":
            width = height = side
        elif self.resize_mode == "shortest":
            rest = int(side * long / short)
            width, height = (side, rest) if upright else (rest, side)
        else:
            width, height = (max(1, round(each / (long / side))) for each in image.size)
        if width * height > LARGEST:
            raise ValueError(f"preprocessing: image must be less long, got {image.width} x {image.height} pixels.")
        return image.resize((width, height), INTERPOLATIONS[self.interpolation])

    def _cropped(self, image: Image.Image) -> Image.Image:
        """The middle. Sides that are too short are filled up first."""
        from PIL import ImageOps

        missing = [max(0, self.size - each) for each in image.size]
        if any(missing):
            # transformers pads before by what remains, open_clip after.
            before = [-(-each // 2) if self.convention == "transformers" else each // 2 for each in missing]
            after = [each - left for each, left in zip(missing, before, strict=True)]
            bands = len(image.getbands())
            fill = self.fill_color if bands == 1 else (self.fill_color,) * bands
            image = ImageOps.expand(image, (before[0], before[1], after[0], after[1]), fill)
        beyond = [each - self.size for each in image.size]
        left, top = (each // 2 if self.convention == "transformers" else round(each / 2) for each in beyond)
        return image.crop((left, top, left + self.size, top + self.size))


def random_box(size: tuple[int, int], scale: float, random: Random) -> tuple[int, int, int, int]:
    """A random part of an image with at least `scale` of its area and sides of up to 3:4."""
    image_width, image_height = size
    for _ in range(10):
        area = image_width * image_height * random.uniform(scale, 1)
        ratio = math.exp(random.uniform(math.log(_LOWEST_RATIO), math.log(_HIGHEST_RATIO)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= image_width and 0 < height <= image_height:
            left, top = random.randint(0, image_width - width), random.randint(0, image_height - height)
            return left, top, left + width, top + height
    # Too long or too flat to find such a part: the largest one in the middle.
    width = min(image_width, max(1, round(image_height * _HIGHEST_RATIO)))
    height = min(image_height, max(1, round(image_width / _LOWEST_RATIO)))
    left, top = (image_width - width) // 2, (image_height - height) // 2
    return left, top, left + width, top + height


def to_tensor(image: Image.Image, channels: int) -> Tensor:
    """uint8 `[channels, height, width]`."""
    pixels = bytearray(image.convert("L" if channels == 1 else "RGB").tobytes())
    flat = torch.frombuffer(pixels, dtype=torch.uint8)
    return flat.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()


def _on_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "L" else image.convert("RGB")
