"""Where samples come from, which of them make step t, and how they become tensors.

`source.py` says what a source is. Sources are `shards.py` (with `tars.py` and `index.py`), `parquet.py`, `tables.py`,
`folders.py` and `icons.py`; `labelled.py` has images with classes. `listing.py` finds files, `storage.py` reads them
wherever they are, `blocks.py` does so ahead of time, and `captions.py` knows what of a record is what. `order.py`
decides which samples make a step, `prepare.py` (with `images.py` and the towers' preprocessing) makes tensors of them,
and `loader.py` does so ahead of time, in other processes.
"""

import logging
import re
import time
from pathlib import Path

import torch

from ...distributed.world import World
from ..config import KINDS, Config, Data
from . import index
from .captions import Fields, check_first
from .folders import CaptionedFolder
from .icons import Icons
from .index import Index
from .labelled import ImageFolder
from .listing import expand
from .parquet import Parquet
from .shards import Shards
from .source import Source
from .tables import Table, coco_records, csv_records

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


def open_train(config: Config, world: World | None = None) -> Source:
    if config.data.train_data is None:
        raise ValueError("--train-data must be given, got none.")
    return open_source(config.data.train_data, config.data, world=world)


def open_held_out(config: Config, world: World | None = None) -> Source | None:
    what = config.evaluation.val_data
    return None if what is None else open_source(what, config.data, held_out=True, world=world)


def open_classes(config: Config) -> ImageFolder | None:
    options = config.evaluation
    if options.zeroshot_data is None:
        return None
    return ImageFolder(options.zeroshot_data, classnames=options.classnames, templates=options.templates)


def open_source(
    what: str, options: Data | None = None, *, held_out: bool = False, world: World | None = None
) -> Source:
    """What `--train-data` or `--val-data` names.

    Args:
        options: Of the command line; those of drawing shards are for what is trained on.
        held_out: Not trained on: of icons, another part; of other data, the kind that its name says, if it says one.
        world: The ranks that open it together.
    """
    options, world = options or Data(), world or World(torch.device("cpu"))
    kind = options.dataset_type
    kinds = {_recognised(each, "webdataset") for each in what.split("::")} if "::" in what else set()
    if kinds and kinds not in ({"webdataset"}, {"parquet"}):
        raise ValueError(
            f"{what}: sources joined by :: must all be tar shards, or all Parquet files, got "
            f"{', '.join(sorted(kinds))}. Convert them to one format."
        )
    if kind == "auto" or (held_out and what != options.train_data):
        kind = _recognised(what, kind)
    if not held_out:
        _check_flags(what, kind, options)
    factors = options.train_data_upsampling_factors if options.dataset_resampled and not held_out else None
    fields, several_captions = Fields.of_flags(options), held_out or options.captions == "all"
    source: Source
    match kind:
        case "icons":
            source = Icons(held_out=held_out)
        case "csv":
            columns = (options.csv_separator, options.csv_img_key, options.csv_caption_key)
            records = coco_records(Path(what)) if what.endswith(".json") else csv_records(Path(what), *columns)
            source = Table(what, records=records, per_image=several_captions)
        case "jsonl":
            source = Table(what, fields, per_image=several_captions)
        case "parquet":
            source = world.from_first(lambda: Parquet(what, fields, factors=factors))
        case "folder":
            source = CaptionedFolder(what, fields)
        case _:
            source = _open_shards(what, options, fields, factors, world)
    source.has_negatives |= several_captions and not source.texts_only  # further captions come where negatives do
    return source


def _check_flags(what: str, kind: str, options: Data) -> None:
    if options.dataset_resampled and kind not in ("webdataset", "parquet"):
        raise ValueError(
            f"--dataset-resampled: must come with tar shards or Parquet files, which it draws, got {what!r} ({kind})."
        )
    if kind in ("csv", "icons") and (options.image_key or options.text_key or options.json_text_key):
        raise ValueError(
            f"--image-key, --text-key and --json-text-key: must come with tars, folders, JSONL or Parquet files, got "
            f"{what!r} ({kind}). Columns of a CSV file are --csv-img-key and --csv-caption-key."
        )


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


def _recognised(what: str, kind: str) -> str:
    """The kind of data, by its name; else `kind`, unless that is "auto"."""
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
