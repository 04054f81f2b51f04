"""WebDataset's tar shards, in the layout that img2dataset writes.

The headers of every tar are read once, when the source is opened. After that any sample can be read by any process, so
which samples make a step does not depend on who reads which shard.
"""

import bisect
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from braceexpand import braceexpand
from torch import Tensor

from ..fingerprint import data_line, numbers
from .images import content_key
from .source import LARGEST_FILE, LARGEST_TEXT, BadSample, OpenFiles, Sample, Shard, Source, Strings, printable
from .tars import members

IMAGES = ("jpg", "png", "jpeg", "webp")
CAPTIONS = ("txt", "json")

_MOST_SHARDS = 10**6

# WebDataset's rule: the key ends at the first dot of the file's name.
_MEMBER = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)


class Shards(Source):
    """Samples `key.jpg` (or png, jpeg, webp) with `key.txt`, or with `key.json` that has a "caption".

    Args:
        patterns: Paths of tar files, with braces for ranges, and `::` between sources.
        factors: How often a sample of each source is drawn, relative to others, with `::` between them.

    Attributes:
        problems: What was left out when the shards were opened: reasons, and how often.
    """

    def __init__(self, patterns: str, *, factors: str | None = None) -> None:
        self._open_files = OpenFiles()
        self._paths, weights = _paths_and_weights(patterns, factors)
        with ThreadPoolExecutor(min(8, len(self._paths))) as threads:
            indices = list(threads.map(_index, self._paths))
        self.problems = sum((index.problems for index in indices), Counter())
        self._stops = torch.tensor([len(index.keys) for index in indices]).cumsum(0).tolist()
        if not self._stops[-1]:
            raise ValueError(
                f"{patterns}: must hold samples key.jpg with key.txt (or key.json), holds none: {dict(self.problems)}."
            )
        self._places = torch.cat([index.places for index in indices])
        self._keys = Strings(key for index in indices for key in index.keys)
        starts = [0, *self._stops[:-1]]
        self._shards = [Shard(*each) for each in zip(starts, self._stops, weights, strict=True)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        path = self._path(index)
        image_offset, image_size, text_offset, text_size, is_json = self._places[index].tolist()
        if image_size > LARGEST_FILE or text_size > LARGEST_TEXT:
            raise BadSample(f"image of more than {LARGEST_FILE} or text of more than {LARGEST_TEXT} bytes")
        data = self._open_files.read(path, image_offset, image_size)
        caption = _caption(self._open_files.read(path, text_offset, text_size), bool(is_json))
        return Sample(caption, content_key(data), data, rgb_first=True)

    def name(self, index: int) -> str:
        return printable(f"{self._path(index)}: {self._keys[index]}")

    @property
    def shards(self) -> Sequence[Shard]:
        return self._shards

    def fingerprint(self) -> list[str]:
        files = zip(self._paths, self._shards, strict=True)
        return [data_line(path, at.stop - at.start, numbers(self._places[at.start : at.stop])) for path, at in files]

    def _path(self, index: int) -> Path:
        return self._paths[bisect.bisect_right(self._stops, index)]


def _caption(data: bytes, is_json: bool) -> str:
    try:
        text = data.decode()
        caption = json.loads(text).get("caption") if is_json else text
    except UnicodeDecodeError:
        raise BadSample("caption is not UTF-8") from None
    except (ValueError, AttributeError, RecursionError):
        raise BadSample("json is not an object") from None
    if not isinstance(caption, str):
        raise BadSample("no caption in json")
    return caption


def _paths_and_weights(patterns: str, factors: str | None) -> tuple[list[Path], list[float]]:
    sources = patterns.split("::")
    weights = [1.0] * len(sources) if factors is None else _factors(factors)
    if len(weights) != len(sources):
        counts = f"{len(weights)} for {len(sources)}"
        raise ValueError(f"--train-data-upsampling-factors: must have one number per source, got {counts}.")
    paths: list[Path] = []
    weight_of_path: list[float] = []
    for source, weight in zip(sources, weights, strict=True):
        expanded = _expanded(source)
        paths += expanded
        weight_of_path += [weight] * len(expanded)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        help = " Stars are not expanded: write a range, like {00000..00099}.tar." if "*" in patterns else ""
        help = help or (" It is a folder: name its shards, like {00000..00099}.tar." if missing[0].is_dir() else "")
        raise ValueError(f"{missing[0]}: must be a file, but {len(missing)} of {len(paths)} shards are not.{help}")
    return paths, weight_of_path


def _factors(factors: str) -> list[float]:
    try:
        return [float(factor) for factor in factors.split("::")]
    except ValueError:
        raise ValueError(f"--train-data-upsampling-factors: must be numbers, such as 1::2, got {factors!r}.") from None


def _expanded(source: str) -> list[Path]:
    if re.match(r"\w{2,}:", source):
        raise ValueError(f"{source}: must be a local file. Copy the shards to a disk first, or mount what holds them.")
    if not source:
        raise ValueError("tar shards: must have a source before and after each ::, got none.")
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", source)
    if math.prod(abs(int(last) - int(first)) + 1 for first, last in ranges) > _MOST_SHARDS:
        raise ValueError(f"{source}: must be at most {_MOST_SHARDS} shards, got more.")
    try:
        paths = [Path(path) for path in braceexpand(source)]
    except ValueError:
        raise ValueError(f"{source}: must have a closing brace for each opening one.") from None
    compressed = [path for path in paths if path.suffix in (".gz", ".tgz", ".zst", ".bz2", ".xz")]
    if compressed:
        raise ValueError(f"{compressed[0]}: must not be compressed: samples are read from its middle. Unpack it.")
    return paths


@dataclass
class _Index:
    """What is in one tar."""

    keys: list[str] = field(default_factory=list)
    places: Tensor = field(default_factory=lambda: torch.zeros(0, 5, dtype=torch.int64))
    problems: Counter[str] = field(default_factory=Counter)


def _index(path: Path) -> _Index:
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    current: dict[str, dict[str, tuple[int, int]]] = {}
    for name, offset, size in members(path):
        member = _MEMBER.fullmatch(name)
        if member is None:
            continue
        key, suffix = member[1], member[2].lower()
        if key not in current or suffix in current[key]:  # the same key again is another sample
            current[key] = {}
            samples.append((key, current[key]))
        current[key][suffix] = offset, size
    index = _Index()
    places: list[tuple[int, ...]] = []
    for key, files in samples:
        image = next((files[suffix] for suffix in IMAGES if suffix in files), None)
        caption = next((files[suffix] for suffix in CAPTIONS if suffix in files), None)
        if image is None or caption is None:
            index.problems["no image" if image is None else "no caption"] += 1
            continue
        index.keys.append(key)
        places.append((*image, *caption, "txt" not in files))
    if places:
        index.places = torch.tensor(places, dtype=torch.int64)
    return index
