"""The data that a configuration names."""

from .config import Config
from .data import open_source
from .data.labelled import ImageFolder
from .data.source import Source

ICONS_HELD_OUT = 1000  # among which captions are looked for, if nothing else is said


def open_train(config: Config) -> Source:
    if config.data.train_data is None:
        raise ValueError("--train-data must be given, got none.")
    return open_source(config.data.train_data, config.data)


def open_held_out(config: Config) -> Source | None:
    what, limit = config.evaluation.val_data, config.evaluation.val_num_samples
    if what is None:
        return None
    if what == "icons" and limit is None:
        limit = ICONS_HELD_OUT
    return open_source(what, config.data, held_out=True, limit=limit)


def open_classes(config: Config) -> ImageFolder | None:
    options = config.evaluation
    if options.zeroshot_data is None:
        return None
    return ImageFolder(options.zeroshot_data, classnames=options.classnames, templates=options.templates)
