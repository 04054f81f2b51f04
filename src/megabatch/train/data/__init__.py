"""Where samples come from, which of them make step t, and how they become tensors.

`source.py` says what a source is; `shards.py` (tars), `tables.py` (CSV), `pairs.py` (JSONL) and `icons.py` are sources,
`labelled.py` has images with classes. `order.py` decides which samples make a step, `prepare.py` (with `images.py` and
the towers' preprocessing) makes tensors of them, and `loader.py` does so ahead of time, in other processes.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from ..config import Config, Data
from .labelled import ImageFolder
from .pairs import TextPairs
from .shards import Shards
from .source import Sample, Shard, Source
from .tables import Table

ICONS_HELD_OUT = 1000  # among which captions are looked for, if nothing else is said


def open_train(config: Config) -> Source:
    if config.data.train_data is None:
        raise ValueError("--train-data must be given, got none.")
    return open_source(config.data.train_data, config.data)


def open_held_out(config: Config) -> Source | None:
    what, limit = config.evaluation.val_data, config.evaluation.val_num_samples
    if what == "icons" and limit is None:
        limit = ICONS_HELD_OUT
    return None if what is None else open_source(what, config.data, held_out=True, limit=limit)


def open_classes(config: Config) -> ImageFolder | None:
    options = config.evaluation
    if options.zeroshot_data is None:
        return None
    return ImageFolder(options.zeroshot_data, classnames=options.classnames, templates=options.templates)


def open_source(what: str, options: Data | None = None, *, held_out: bool = False, limit: int | None = None) -> Source:
    """What `--train-data` or `--val-data` names.

    Args:
        options: Of the command line; those of drawing shards are for what is trained on.
        held_out: Not trained on: of icons, another part; of other data, the kind that its name says, if it says one.
        limit: Take the first so many samples.
    """
    options = options or Data()
    kind = options.dataset_type
    if kind == "auto" or (held_out and what != options.train_data):
        kind = _recognised(what, kind)
    resampled, factors = options.dataset_resampled and not held_out, options.train_data_upsampling_factors
    if resampled and kind != "webdataset":
        raise ValueError(f"--dataset-resampled: must come with tar shards, which it draws, got {what!r} ({kind}).")
    source: Source
    if kind == "icons":
        from .icons import Icons

        source = Icons(held_out=held_out)
    elif kind == "csv":
        source = Table(
            what,
            separator=options.csv_separator,
            image_key=options.csv_img_key,
            caption_key=options.csv_caption_key,
            per_image=held_out,
        )
    elif kind == "jsonl":
        source = TextPairs(what)
    else:
        source = Shards(what, factors=factors if resampled else None)
    return source if limit is None else Limited(source, limit)


class Limited(Source):
    """The first samples of a source."""

    def __init__(self, source: Source, limit: int) -> None:
        self._source = source
        self._length = min(limit, len(source))
        self.texts_only, self.has_negatives = source.texts_only, source.has_negatives
        self.problems = source.problems

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

    def fingerprint(self) -> list[str]:
        return self._source.fingerprint()


def _recognised(what: str, kind: str) -> str:
    """The kind of data that a name tells, or else `kind`, unless that is "auto"."""
    if what == "icons":
        return "icons"
    if re.search(r"\.tar|\.tgz|[{}]|::", what):
        return "webdataset"
    if what.endswith(".jsonl"):
        return "jsonl"
    if what.endswith((".csv", ".tsv", ".json")):
        return "csv"
    if kind != "auto":
        return kind
    raise ValueError(
        f"{what}: must be icons, or end in .csv, .tsv, .json, .jsonl or .tar (braces for ranges, :: between sources), "
        "because --dataset-type is auto. If its name is right, say --dataset-type webdataset, csv, jsonl or icons."
    )
