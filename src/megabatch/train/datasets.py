"""The data that a configuration names, for towers that take images of `image_size`."""

from .config import Config
from .data import kind_of, open_source
from .data.labelled import ImageFolder
from .data.source import Source

ICONS_HELD_OUT = 1000  # among which captions are looked for, if nothing else is said


def open_train(config: Config, image_size: int) -> Source:
    data = config.data
    if data.train_data is None:
        raise ValueError("--train-data must be given, got none.")
    return _open(
        config,
        data.train_data,
        image_size,
        resampled=data.dataset_resampled,
        factors=data.train_data_upsampling_factors,
        held_out=False,
    )


def open_held_out(config: Config, image_size: int) -> Source | None:
    what, limit = config.evaluation.val_data, config.evaluation.val_num_samples
    if what is None:
        return None
    if what == "icons" and limit is None:
        limit = ICONS_HELD_OUT
    return _open(config, what, image_size, held_out=True, limit=limit)


def open_classes(config: Config, image_size: int) -> ImageFolder | None:
    options = config.evaluation
    if options.zeroshot_data is None:
        return None
    return ImageFolder(
        options.zeroshot_data, classnames=options.classnames, templates=options.templates, at_least=2 * image_size
    )


def _open(
    config: Config,
    what: str,
    image_size: int,
    *,
    held_out: bool,
    resampled: bool = False,
    factors: str | None = None,
    limit: int | None = None,
) -> Source:
    data = config.data
    kind = data.dataset_type
    # --dataset-type is that of the training data. What is held out may be of another kind, if its name says so.
    if held_out and what != data.train_data:
        kind = kind_of(what) or kind
    return open_source(
        what,
        kind=kind,
        resampled=resampled,
        factors=factors,
        separator=data.csv_separator,
        image_key=data.csv_img_key,
        caption_key=data.csv_caption_key,
        held_out=held_out,
        limit=limit,
        image_size=image_size,
    )
