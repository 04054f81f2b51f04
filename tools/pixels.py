"""`python -m tools.pixels`: how far pixels are from those of open_clip and transformers, on one photograph.

Beside megabatch stands what it did at first, and what many scripts do: cut the middle square out, and resize that.
"""

import functools
import io
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from megabatch.train.preprocessing import Preprocessing, to_tensor
from megabatch.train.towers import hugging_face, open_clip

from .tables import markdown

Transform = Callable[[Image.Image], Tensor]
SHOWN = ("jpeg", "123 x 641", "224 x 224", "palette", "alpha", "sixteen bits")


@functools.cache
def files() -> dict[str, bytes]:
    """A photograph in the formats, modes and shapes that data has."""
    from sklearn.datasets import load_sample_image

    photo = Image.fromarray(load_sample_image("china.jpg"))  # 640 x 427
    grey = photo.convert("L")
    alpha = photo.copy()
    alpha.putalpha(grey.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    palette = photo.quantize(64)
    sixteen = Image.new("I;16", photo.size)
    sixteen.putdata([3 * value for value in grey.tobytes()])
    turned = Image.Exif()
    turned[0x0112] = 6
    found = {
        "jpeg": encoded(photo, "JPEG"),
        "grey": encoded(grey),
        "black and white": encoded(photo.convert("1")),
        "cmyk": encoded(photo.convert("CMYK"), "JPEG"),
        "palette": encoded(palette),
        "palette with a transparent colour": encoded(palette, transparency=3),
        "palette with transparency": encoded(palette, transparency=bytes(range(0, 256, 4))),
        "alpha": encoded(alpha),
        "grey with alpha": encoded(alpha.convert("LA")),
        "sixteen bits": encoded(sixteen),
        "turned by a camera": encoded(photo, "JPEG", exif=turned),
        "webp with alpha": encoded(alpha, "WEBP"),
        "gif": encoded(photo, "GIF"),
        "bmp": encoded(photo, "BMP"),
    }
    for size in [(123, 641), (641, 101), (225, 224), (224, 224), (50, 31), (1, 1)]:
        found["{} x {}".format(*size)] = encoded(photo.resize(size))
    return found


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def cut_then_resized(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """Bicubic whatever the model's interpolation is, with rounded grey for 16 bits."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode.startswith("I"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    side, box = min(image.size), (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.resize_mode != "squash":
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
    image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    return to_tensor(image.resize((preprocessing.size,) * 2, Image.Resampling.BICUBIC, box), 3)


def contenders() -> dict[str, tuple[Transform, Preprocessing]]:
    """What the libraries make of an image, and the same as megabatch reads it."""
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from transformers import CLIPImageProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    found: dict[str, tuple[Transform, Preprocessing]] = {}
    for name, options in {
        "open_clip": {},
        "open_clip, bilinear": {"interpolation": "bilinear"},
        "open_clip, squash": {"resize_mode": "squash"},
    }.items():
        config = PreprocessCfg(**options)
        found[name] = image_transform_v2(config, is_train=False), open_clip._preprocessing(asdict(config))
    processors = {"transformers, Pillow": CLIPImageProcessorPil, "transformers, torchvision": CLIPImageProcessor}
    for name, kind in processors.items():
        with tempfile.TemporaryDirectory() as folder:
            processor = kind()
            processor.save_pretrained(folder)
            vision = type("Vision", (), {"num_channels": 3, "image_size": 224})
            ours = hugging_face._preprocessing(folder, "clip", vision)
        found[name] = (lambda image, made=processor: made(image, return_tensors="pt")["pixel_values"][0]), ours
    return found


def differences() -> list[tuple[str, str, float, float]]:
    """Library, image, and the mean differences, of 255, of cutting first and of megabatch."""
    rows = []
    for name, (transform, preprocessing) in contenders().items():
        mean, std = (torch.tensor(each)[:, None, None] for each in (preprocessing.mean, preprocessing.std))
        for kind in SHOWN:
            image = Image.open(io.BytesIO(files()[kind]))
            theirs = transform(image).mul(std).add(mean).mul(255)
            both = cut_then_resized(image, preprocessing), preprocessing(image)
            rows.append((name, kind, *((each - theirs).abs().mean().item() for each in both)))
    return rows


def main() -> int:
    rows = differences()
    body = []
    for name in dict.fromkeys(row[0] for row in rows):
        cells = [f"{before:.1f} → {now:.1f}" for library, _, before, now in rows if library == name]
        body.append([name, *cells])
    print(markdown(["mean difference of 255", *SHOWN], body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
