"""What a data source is to the rest: samples by number, each of which may turn out to be bad."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, AnyStr

import torch
from PIL import Image
from torch import Tensor

LARGEST_FILE = 2**28  # bytes of an image
LARGEST_TEXT = 2**20  # characters of a text
LARGEST_LINE = 2**26  # of a table


class BadSample(Exception):
    """A sample that cannot be used. The text is the kind of reason, the same for all samples of that kind."""


class Unread(BadSample):
    """What holds it could not be read, which is no property of the sample, and may be otherwise another time."""


@dataclass(frozen=True)
class Lost:
    """A sample that the machine failed on, and may not fail on again: a replay of its step has to leave it out too.

    Attributes:
        position: Its place in the run's stream of samples, see `Order`.
        index: Its number in the source.
    """

    position: int
    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Sample:
    """A pair: an image and its caption, or, where `image` is None, a query and its positive text.

    Attributes:
        text: The caption, or the positive.
        duplicate_key: Equal for samples that show the same image, or ask the same query.
        image: The content of its file, or an image that was drawn.
        rgb_first: See `preprocessing.Preprocessing`.
        captions: More captions of the image.
        weights: How often `text` and each of `captions` are drawn, relative to others. Default: equally often.
        negatives: Texts that do not belong with the query, though they may look as if they did.
        label: The number of the image's class, where it has one.
    """

    text: str
    duplicate_key: str
    image: bytes | Image.Image | None = None
    rgb_first: bool = False
    captions: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    query: str | None = None
    negatives: tuple[str, ...] = ()
    label: int | None = None


class Source(ABC):
    """Samples by number. What it holds can be sent to other processes."""

    texts_only = False  # query and positive, no images
    has_negatives = False  # some sample has negatives
    block = 1  # so many samples, counted from the first of a shard, are read at once
    weights: Tensor | None = None  # how often a sample of each shard is drawn, relative to others

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """Raises BadSample."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person would look for: a path, a line of a file, a key in a tar."""

    @property
    def counts(self) -> Tensor:
        """How many samples each shard has."""
        return torch.tensor([len(self)])

    def prefetch(self, indices: Iterable[int]) -> None:  # noqa: B027
        """These will be asked for soon."""

    def keep(self, blocks: int) -> None:  # noqa: B027
        """So many blocks are in use at a time."""

    @abstractmethod
    def fingerprint(self) -> list[str]:
        """What changes when the data does, a `fingerprint.data_line` per file. It must not read the samples."""


def printable(text: str) -> str:
    """Names come from files that nobody vouches for: whatever could move a terminal's cursor is escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def check_file(path: Path, largest: int | None = None) -> None:
    """Raises ValueError where this is no file to read a table from: a folder, a device or a pipe, or too large."""
    if not path.is_file():
        raise ValueError(f"{path}: must be a file, {'is something else' if path.exists() else 'and there is none'}.")
    if largest is not None and path.stat().st_size > largest:
        raise ValueError(f"{path}: must have at most {largest} bytes, has {path.stat().st_size}.")


def lines_of(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """The lines of a file, none of which may fill the memory."""
    number = 0
    while line := file.readline(LARGEST_LINE + 1):
        number += 1
        if len(line) > LARGEST_LINE:
            raise ValueError(f"{path}: line {number} must have at most {LARGEST_LINE} characters, has more.")
        yield line


class Strings:
    """Many strings in one piece of memory, which processes share and nothing counts references of."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = bytearray()
        ends = [0]
        for string in strings:
            encoded += string.encode("utf-8", "surrogatepass")
            ends.append(len(encoded))
        self._encoded = bytes(encoded)
        self._ends = torch.tensor(ends, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __bytes__(self) -> bytes:
        return self._encoded

    def __getitem__(self, index: int) -> str:
        start, stop = self._ends[index : index + 2].tolist()
        return self._encoded[start:stop].decode("utf-8", "surrogatepass")
