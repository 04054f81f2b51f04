"""Images of files that nobody vouches for."""

import errno
import hashlib
import io
import os
import stat
import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from .source import LARGEST_FILE, BadSample
from .storage import retried

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
NOT_AN_IMAGE = f"not an image ({', '.join(FORMATS)})"
_OF_THE_NAME = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)


def read_file(path: Path) -> bytes:
    """What a sample may lack is its file. A disk that fails is asked again, and is no property of the sample."""
    return retried(str(path), lambda: _read(path))


def _read(path: Path) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe or a device could wait for ever, or do worse
            raise BadSample("not a file")
        if found.st_size > LARGEST_FILE:
            raise BadSample(f"file of more than {LARGEST_FILE} bytes")
        with path.open("rb") as file:
            return file.read(found.st_size)
    except ValueError:  # a byte of zeros
        raise BadSample("not a path") from None
    except OSError as error:
        if error.errno not in _OF_THE_NAME:
            raise
        raise BadSample(os.strerror(error.errno).lower()) from None


def content_key(data: bytes) -> str:
    """The same for the same bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decode(data: bytes, max_pixels: int = 0) -> Image.Image:
    """The image as its file has it: in its own mode, and not turned by what a camera wrote down of its orientation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bad metadata and the like, once per image and worker
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)  # the header: type and size
            if 0 < max_pixels < image.width * image.height:
                raise BadSample(f"image of more than {max_pixels} pixels")
            image.load()
        except BadSample:
            raise
        except UnidentifiedImageError:
            raise BadSample(NOT_AN_IMAGE) from None
        except _BOMB:
            raise BadSample("decompression bomb") from None
        except Exception as error:  # Pillow raises what its parsers happen to trip over
            raise BadSample("truncated image" if "truncated" in str(error).lower() else "broken image") from None
        return image
