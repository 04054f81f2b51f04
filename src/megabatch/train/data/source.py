"""What a data source is to the rest: samples by number, each of which may turn out to be bad."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image


class BadSample(Exception):
    """A sample that cannot be used. The text is the kind of reason, the same for all samples of that kind."""


@dataclass(frozen=True)
class Sample:
    """A pair: an image and its caption, or, where `image` is None, a query and its positive text.

    Attributes:
        text: The caption, or the positive.
        image_key: What tells whether two samples show the same image, or ask the same query.
        negatives: Texts that do not belong with the query, though they may look as if they did.
    """

    text: str
    image_key: str
    image: Image.Image | None = None
    query: str | None = None
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """Samples that lie together: those with numbers from `start` up to `stop`. `weight` is how often each is drawn
    where samples are drawn with replacement, relative to others."""

    start: int
    stop: int
    weight: float = 1.0


class Source(Protocol):
    """Samples by number. What it holds can be sent to other processes."""

    texts_only: bool  # query and positive, no images

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Raises BadSample."""

    def name(self, index: int) -> str:
        """What a person would look for: a path, a line of a file, a key in a tar."""

    @property
    def shards(self) -> Sequence[Shard]: ...
