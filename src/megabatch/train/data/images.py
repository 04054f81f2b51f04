"""Images of files that nobody vouches for, and the part of them that is shown to a tower.

Sizes and crops are OpenCLIP's, and so is what it ignores: the orientation that a camera wrote down, and transparency.
"""

import errno
import hashlib
import io
import math
import warnings
from pathlib import Path
from random import Random

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from .source import BadSample

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
NOT_AN_IMAGE = f"not an image ({', '.join(FORMATS)})"
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_LOWEST_RATIO, _HIGHEST_RATIO = 3 / 4, 4 / 3


def read_file(path: Path) -> bytes:
    """What a sample may lack is its file. An error of the disk is no property of the sample."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise BadSample("no such file") from None
    except IsADirectoryError:
        raise BadSample(NOT_AN_IMAGE) from None
    except PermissionError:
        raise BadSample("file may not be read") from None
    except ValueError:  # a byte of zeros
        raise BadSample("not a path") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise BadSample("not a path") from None
        raise


def image_key(data: bytes) -> str:
    """The same for the same bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decode(data: bytes, at_least: int | None = None) -> Image.Image:
    """The image, grey ("L") or "RGB".

    Args:
        at_least: A large JPEG may be decoded at an eighth, a quarter or half of its size, which takes less time, as
            long as no side becomes shorter than this. Default: its own size.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bad metadata and the like, once per image and worker
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)  # the header: type and size
        except UnidentifiedImageError:
            raise BadSample(NOT_AN_IMAGE) from None
        except _BOMB:
            raise BadSample("decompression bomb") from None
        except Exception:  # Pillow raises what its parsers happen to trip over
            raise BadSample("broken image") from None
        try:
            if at_least is not None:
                image.draft(None, (at_least, at_least))
            image.load()
            if image.mode == "P" and "transparency" in image.info:
                image = image.convert("RGBA")
            if image.mode.startswith("I"):  # 16 bits a pixel, of which convert would take what is above 8 for white
                image = image.point(lambda value: value * (1 / 256)).convert("L")
            return image if image.mode in ("L", "RGB") else image.convert("RGB")
        except _BOMB:
            raise BadSample("decompression bomb") from None
        except Exception as error:
            raise BadSample("truncated image" if "truncated" in str(error).lower() else "broken image") from None


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The largest square in the middle, `size` pixels wide."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return _resized(image, size, (left, top, left + side, top + side))


def squash(image: Image.Image, size: int) -> Image.Image:
    """The whole image, `size` pixels wide and high."""
    return _resized(image, size, (0, 0, image.width, image.height))


def random_crop(image: Image.Image, size: int, scale: float, random: Random) -> Image.Image:
    """A random part with at least `scale` of the image's area and sides of up to 3:4, as a square of side `size`."""
    for _ in range(10):
        area = image.width * image.height * random.uniform(scale, 1)
        ratio = math.exp(random.uniform(math.log(_LOWEST_RATIO), math.log(_HIGHEST_RATIO)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= image.width and 0 < height <= image.height:
            left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
            return _resized(image, size, (left, top, left + width, top + height))
    # Too long or too flat to find such a part: the largest one in the middle.
    width = min(image.width, max(1, round(image.height * _HIGHEST_RATIO)))
    height = min(image.height, max(1, round(image.width / _LOWEST_RATIO)))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return _resized(image, size, (left, top, left + width, top + height))


def to_tensor(image: Image.Image, channels: int) -> Tensor:
    """uint8 `[channels, height, width]`."""
    pixels = bytearray(image.convert("L" if channels == 1 else "RGB").tobytes())
    flat = torch.frombuffer(pixels, dtype=torch.uint8)
    return flat.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()


def _resized(image: Image.Image, size: int, box: tuple[float, float, float, float]) -> Image.Image:
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)
