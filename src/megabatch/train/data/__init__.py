"""Where samples come from, which of them make step t, and how they become tensors.

`source.py` says what a source is. Sources are `shards.py` (with `tars.py` and `index.py`), `parquet.py`, `tables.py`,
`pairs.py`, `folders.py` and `icons.py`; `labelled.py` has images with classes. `listing.py` finds files, `storage.py`
reads them wherever they are, `captions.py` knows what of a sample is what. `order.py` decides which samples make a
step, `prepare.py` (with `images.py` and the towers' preprocessing) makes tensors of them, and `loader.py` does so ahead
of time, in other processes.
"""

import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ...distributed.world import World
from ..config import KINDS, Config, Data
from . import index
from .captions import Fields, check_first
from .folders import CaptionedFolder
from .index import Index
from .labelled import ImageFolder
from .listing import expand
from .shards import Shards
from .source import Sample, Source
from .tables import Table, open_lines

_LOGGER = logging.getLogger("megabatch")

# What names end in, or folders have in them.
SUFFIXES = {
    r"tar|tgz": "webdataset",
    r"parquet|arrow": "parquet",
    r"jsonl": "jsonl",
    r"csv|tsv|json": "csv",
    r"ya?ml|txt": "webdataset",
}
FOLDERS = {"*.tar": "webdataset", "**/*.parquet": "parquet", "**/*.arrow": "parquet"}
ICONS_HELD_OUT = 1000  # among which captions are looked for, if nothing else is said


def open_train(config: Config, world: World | None = None) -> Source:
    if config.data.train_data is None:
        raise ValueError("--train-data must be given, got none.")
    return open_source(config.data.train_data, config.data, world=world)


def open_held_out(config: Config, world: World | None = None) -> Source | None:
    what, limit = config.evaluation.val_data, config.evaluation.val_num_samples
    if what == "icons" and limit is None:
        limit = ICONS_HELD_OUT
    return None if what is None else open_source(what, config.data, held_out=True, limit=limit, world=world)


def open_classes(config: Config) -> ImageFolder | None:
    options = config.evaluation
    if options.zeroshot_data is None:
        return None
    return ImageFolder(options.zeroshot_data, classnames=options.classnames, templates=options.templates)


def open_source(
    what: str,
    options: Data | None = None,
    *,
    held_out: bool = False,
    limit: int | None = None,
    world: World | None = None,
) -> Source:
    """What `--train-data` or `--val-data` names.

    Args:
        options: Of the command line; those of drawing shards are for what is trained on.
        held_out: Not trained on: of icons, another part; of other data, the kind that its name says, if it says one.
        limit: Take the first so many samples.
        world: The ranks that open it together.
    """
    options = options or Data()
    kind = options.dataset_type
    if kind == "auto" or (held_out and what != options.train_data):
        kind = _recognised(what, kind)
    resampled, factors = options.dataset_resampled and not held_out, options.train_data_upsampling_factors
    if resampled and kind not in ("webdataset", "parquet"):
        raise ValueError(
            f"--dataset-resampled: must come with tar shards or Parquet files, which it draws, got {what!r} ({kind})."
        )
    if kind in ("csv", "icons") and not held_out and (options.image_key or options.text_key or options.json_text_key):
        raise ValueError(
            f"--image-key, --text-key and --json-text-key: must come with tars, folders, JSONL or Parquet files, got "
            f"{what!r} ({kind}). Columns of a CSV file are --csv-img-key and --csv-caption-key."
        )
    fields = Fields.of_flags(
        options.image_key, options.text_key, options.json_text_key, _numbers(options.json_text_key_probs)
    )
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
            per_image=held_out or options.captions == "all",
        )
    elif kind == "jsonl":
        source = open_lines(what, fields, per_image=held_out or options.captions == "all")
    elif kind == "parquet":
        from .parquet import Parquet

        source = Parquet(what, fields, factors=factors if resampled else None)
    elif kind == "folder":
        source = CaptionedFolder(what, fields)
    else:
        source = _open_shards(
            what, options, fields, factors if resampled else None, world or World(torch.device("cpu"))
        )
    if not source.texts_only and (
        options.captions == "all" or (held_out and kind in ("webdataset", "parquet", "folder"))
    ):
        source.has_negatives = True  # further captions come where negatives do
    return source if limit is None else Limited(source, limit)


def _open_shards(what: str, options: Data, fields: Fields, factors: str | None, world: World) -> Shards:
    def make() -> Index:
        started = time.perf_counter()
        shards = expand(what, factors=factors, skip_missing=options.skip_bad_shards)
        scanned = 0

        def told(done: int, total: int) -> None:
            nonlocal scanned
            scanned = total

        found = index.make(shards, skip_bad=options.skip_bad_shards, told=told)
        if scanned:
            _LOGGER.info("data: indexed %d shards in %.1f s", scanned, time.perf_counter() - started)
        check_first(Shards(found, fields), "Name what to read with --image-key, --text-key or --json-text-key.")
        return found

    return Shards(index.shared(world, make), fields)


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(word) for word in re.split(r"[\s;,]+", text)] if text else []
    except ValueError:
        raise ValueError(f"--json-text-key-probs: must be numbers, such as 0.7;0.3, got {text!r}.") from None


class Limited(Source):
    """The first samples of a source."""

    def __init__(self, source: Source, limit: int) -> None:
        self._source = source
        self._length = min(limit, len(source))
        self.texts_only, self.has_negatives = source.texts_only, source.has_negatives
        self.block, self.weights = source.block, source.weights

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._source[index]

    def name(self, index: int) -> str:
        return self._source.name(index)

    @property
    def counts(self) -> Tensor:
        counts = self._source.counts
        before = counts.cumsum(0) - counts
        return counts.minimum((self._length - before).clamp(min=0))

    def prefetch(self, indices: Iterable[int]) -> None:
        self._source.prefetch(indices)

    def keep(self, blocks: int) -> None:
        self._source.keep(blocks)

    def fingerprint(self) -> list[str]:
        return self._source.fingerprint()


def _recognised(what: str, kind: str) -> str:
    """The kind of data that a name tells, or else `kind`, unless that is "auto"."""
    if what == "icons":
        return "icons"
    for suffixes, found in SUFFIXES.items():
        if re.search(rf"\.({suffixes})\b", what):
            return found
    if Path(what).is_dir():
        return next((found for pattern, found in FOLDERS.items() if next(Path(what).glob(pattern), None)), "folder")
    if what.endswith("/") or re.search(r"[{}]|::", what) or what.startswith(("pipe:", "@")):
        return "webdataset"
    if kind != "auto":
        return kind
    raise ValueError(
        f"{what}: must be icons, a folder, or end in .tar, .parquet, .csv, .tsv, .json or .jsonl (braces or * for "
        f"several, :: between sources), because --dataset-type is auto. If its name is right, give --dataset-type: "
        f"{', '.join(KINDS)}."
    )
