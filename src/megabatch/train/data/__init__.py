"""Where samples come from, which of them make step t, and how they become tensors.

`source.py` says what a source is; `shards.py` (tars), `tables.py` (CSV), `pairs.py` (JSONL) and `icons.py` are sources,
`labelled.py` has images with classes. `order.py` decides which samples make a step, `prepare.py` (with `images.py`)
makes tensors of them, and `loader.py` does so ahead of time, in other processes.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .labelled import TEMPLATES as TEMPLATES
from .labelled import ImageFolder as ImageFolder
from .labelled import read_templates as read_templates
from .loader import Batch as Batch
from .loader import batches as batches
from .order import Order as Order
from .pairs import TextPairs as TextPairs
from .prepare import Piece as Piece
from .prepare import Prepare as Prepare
from .shards import Shards as Shards
from .source import BadSample as BadSample
from .source import Sample as Sample
from .source import Shard as Shard
from .source import Source as Source
from .tables import Table as Table

KINDS = ("webdataset", "csv", "jsonl", "icons")


def open_source(
    what: str,
    *,
    kind: str = "auto",
    resampled: bool = False,
    factors: str | None = None,
    separator: str = "\t",
    image_key: str = "filepath",
    caption_key: str = "title",
    held_out: bool = False,
    limit: int | None = None,
    image_size: int | None = None,
) -> Source:
    """What `--train-data` or `--val-data` names.

    Args:
        kind: `--dataset-type`; "auto" goes by the name.
        held_out: The part of icons that is not trained on.
        limit: Take the first so many samples.
        image_size: Of the images that the tower takes: larger JPEGs are decoded at twice that size, if not at their
            own. Default: always at their own.
    """
    kind = _recognised(what) if kind == "auto" else kind
    if kind not in KINDS:
        raise ValueError(f"--dataset-type: must be auto or one of {', '.join(KINDS)}, got {kind!r}.")
    if factors is not None and not resampled:
        raise ValueError(
            "--train-data-upsampling-factors: must come with --dataset-resampled, because otherwise each sample is met "
            "once per pass."
        )
    if resampled and kind != "webdataset":
        raise ValueError(f"--dataset-resampled: must come with tar shards, which it draws, got {what!r} ({kind}).")
    at_least = None if image_size is None else 2 * image_size
    source: Source
    if kind == "icons":
        from .icons import Icons

        source = Icons(held_out=held_out)
    elif kind == "csv":
        source = Table(what, separator=separator, image_key=image_key, caption_key=caption_key, at_least=at_least)
    elif kind == "jsonl":
        source = TextPairs(what)
    else:
        source = Shards(what, factors=factors, at_least=at_least)
    return source if limit is None else First(source, limit)


class First:
    """The first samples of a source."""

    def __init__(self, source: Source, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"First: limit must be at least 1, got {limit}.")
        self._source = source
        self._length = min(limit, len(source))
        self.texts_only, self.has_negatives = source.texts_only, source.has_negatives
        self.problems = Counter[str](getattr(source, "problems", {}))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._source[index]

    def name(self, index: int) -> str:
        return self._source.name(index)

    @property
    def shards(self) -> Sequence[Shard]:
        shards = (replace(shard, stop=min(shard.stop, self._length)) for shard in self._source.shards)
        return [shard for shard in shards if shard.start < shard.stop]


def kind_of(what: str) -> str | None:
    """The kind of data that a name tells, or None."""
    if what == "icons":
        return "icons"
    if re.search(r"\.tar|\.tgz|[{}]|::", what):
        return "webdataset"
    if what.endswith(".jsonl"):
        return "jsonl"
    return "csv" if what.endswith((".csv", ".tsv")) else None


def _recognised(what: str) -> str:
    if kind := kind_of(what):
        return kind
    raise ValueError(
        f"{what}: must be icons, or end in .csv, .tsv, .jsonl or .tar (braces for ranges, :: between sources), because "
        f"--dataset-type is auto. If its name is right, say --dataset-type {' or '.join(KINDS)}."
    )
