"""17,000 pictures with captions that come by pip: the icons inside the fonts of the package qtawesome.

The picture is a glyph, the caption its name: "account-arrow-left-outline" reads "account arrow left outline". Fonts
repeat each other and themselves (filled, outlined, bold), so duplicates are joined, and what is held out is held out
with all its variants.

Letters, in this file: N and M icons, P pixels of an icon.
"""

import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageFont, ImageOps
from torch import Tensor

from ..fingerprint import data_line
from .source import Sample, Source

# A picture that is in several fonts has its name from the first of these. Font Awesome and Material Design are there in
# two versions: the newer comes first.
_FONTS = (
    *("materialdesignicons6", "fontawesome6-solid", "fontawesome6-regular", "fontawesome6-brands", "phosphor"),
    *("remixicon", "codicon", "elusiveicons", "materialdesignicons5"),
    *("fontawesome5-solid", "fontawesome5-regular", "fontawesome5-brands"),
)
# Words that vary an icon and make no other one of it, unless they come first: "light bulb", "square root".
_STYLES = (
    *("outline", "outlined", "fill", "filled", "solid", "line", "bold", "light", "thin", "thick", "sharp", "variant"),
    *("alt", "simple", "small", "large", "circle", "box", "square", "off", "slash", "multiple"),
)
_SIDE = 32
_HELD_OUT = 0.08  # of the stems
_SAME = 0.95  # the cosine between two pictures above which they look the same


class _Icon(NamedTuple):
    name: str  # "materialdesignicons6/account-outline"
    caption: str
    pixels: bytes


class Icons(Source):
    """Icons with their names as captions: those to train on, or those held out.

    Icons are held out by the stem of their caption, which is the caption without words of style: "account",
    "account outline" and "account box" are on one side, while "account plus" may be on the other. What looks the same
    as a held-out icon under another name is on neither. Held-out captions are all different. Either side is in an
    order as good as random, the same everywhere, so that the first thousand are a fair sample.
    """

    def __init__(self, held_out: bool) -> None:
        icons, held = _both_sides()
        self._icons = held if held_out else icons

    def __len__(self) -> int:
        return len(self._icons)

    def __getitem__(self, index: int) -> Sample:
        icon = self._icons[index]
        return Sample(icon.caption, icon.name, Image.frombytes("L", (_SIDE, _SIDE), icon.pixels))

    def name(self, index: int) -> str:
        return self._icons[index].name

    def fingerprint(self) -> list[str]:
        return [data_line("icons", len(self), *map(tuple, self._icons))]


def stem(caption: str) -> str:
    """What variants of an icon have in common: the first word of its caption, and those that are not style."""
    first, *more = caption.split()
    return "".join([first, *(word for word in more if word not in _STYLES)])


@functools.cache
def _both_sides() -> tuple[list[_Icon], list[_Icon]]:
    """To train on, and held out."""
    icons = _distinct([icon for font in _fonts() for icon in _drawn(font)])
    icons.sort(key=lambda icon: _fraction(icon.name))
    held_out = [icon for icon in icons if _fraction(stem(icon.caption)) < _HELD_OUT]
    others = [icon for icon in icons if _fraction(stem(icon.caption)) >= _HELD_OUT]
    ink = _ink(held_out)
    alike = torch.cat([_look_the_same(some, ink).any(1) for some in torch.split(_ink(others), 1024)])
    different = {icon.caption: icon for icon in held_out}
    return list(compress(others, (~alike).tolist())), list(different.values())


def _fonts() -> Iterator[Path]:
    package = importlib.util.find_spec("qtawesome")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(
            "icons: qtawesome must be installed, whose fonts hold the icons. Run pip install 'megabatch[train]'.",
            name="qtawesome",
        )
    folder = Path(package.submodule_search_locations[0]) / "fonts"
    for name in _FONTS:
        found = list(folder.glob(f"{name}-*.ttf"))
        if len(found) != 1:
            raise FileNotFoundError(f"icons: qtawesome must have one font {name}, got {len(found)} in {folder}.")
        yield found[0]


def _drawn(path: Path) -> Iterator[_Icon]:
    """All icons of a font that show something."""
    font = ImageFont.truetype(str(path), _SIDE * 7 // 8, layout_engine=ImageFont.Layout.BASIC)
    title, version = path.stem.rsplit("-", 1)
    characters = json.loads((path.parent / f"{title}-charmap-{version}.json").read_text())
    for name, code in characters.items():
        pixels = _draw(font, chr(int(code, 16)))
        if min(pixels) < 255:
            yield _Icon(f"{title.removesuffix('-webfont')}/{name}", name.replace("-", " "), pixels)


def _draw(font: ImageFont.FreeTypeFont, character: str) -> bytes:
    """Dark on light, in the middle, in the font's own size unless it is too large for that."""
    mask = font.getmask(character, mode="L")
    canvas = Image.new("L", (_SIDE, _SIDE), 255)
    if 0 not in mask.size:
        ink = Image.frombytes("L", mask.size, bytes(mask))
        if max(mask.size) > _SIDE:
            ink = ImageOps.contain(ink, (_SIDE, _SIDE))
        canvas.paste(0, ((_SIDE - ink.width) // 2, (_SIDE - ink.height) // 2), ink)
    return canvas.tobytes()


def _distinct(icons: list[_Icon]) -> list[_Icon]:
    """Without those whose picture was there before, or nearly so under the same caption."""
    ink = _ink(icons)
    seen: set[bytes] = set()
    same_caption: dict[str, list[int]] = {}
    kept = []
    for index, icon in enumerate(icons):
        before = same_caption.setdefault(icon.caption, [])
        if icon.pixels in seen or (before and _look_the_same(ink[before], ink[[index]]).any()):
            continue
        seen.add(icon.pixels)
        before.append(index)
        kept.append(icon)
    return kept


def _look_the_same(ink: Tensor, others: Tensor) -> Tensor:
    """`[N, M]`, of ink `[N, P]` and `[M, P]`."""
    lengths, other_lengths = (each.square().sum(1).sqrt() for each in (ink, others))
    return ink @ others.T > _SAME * lengths[:, None] * other_lengths


def _ink(icons: list[_Icon]) -> Tensor:
    """`[N, P]`: how dark every pixel is, in 16 steps, so that float32 holds all sums of products exactly: the number
    of threads must not decide which icons look the same."""
    pixels = torch.frombuffer(bytearray().join(icon.pixels for icon in icons), dtype=torch.uint8)
    return (255 - pixels.view(len(icons), -1)).div(16, rounding_mode="floor").float()


def _fraction(text: str) -> float:
    """A number from 0 up to 1 that is as good as random, but always the same."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
