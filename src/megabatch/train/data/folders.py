"""Folders of images with captions beside them."""

import os
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from ..fingerprint import data_line
from .captions import IMAGE_SUFFIXES, Fields, check_first
from .images import read_file
from .source import Sample, Source, Strings, printable
from .tables import some_sizes


class CaptionedFolder(Source):
    """`folder/**/name.jpg` with `name.txt` or `name.json` beside it, sorted by path. Hidden files do not count."""

    def __init__(self, folder: str | Path, fields: Fields | None = None) -> None:
        self._folder, self._fields = Path(folder), fields or Fields()
        self._samples = Strings(self._find())
        advice = "Put a.txt or a.json beside a.jpg, or name other suffixes with --image-key and --text-key."
        if not len(self):
            raise ValueError(f"{folder}: must be a folder of images with captions, has no images. {advice}")
        check_first(self, advice)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        files = self._files(index)
        keys = (self._fields.image_key(files), self._fields.text_key(files))
        return self._fields.sample_of({key: read_file(files[key]) for key in keys})

    def name(self, index: int) -> str:
        return printable(str(self._image(index)))

    def fingerprint(self) -> list[str]:
        return [data_line(self._folder.name, len(self), bytes(self._samples), some_sizes(self._image, len(self)))]

    def _find(self) -> Iterator[str]:
        """What files of a sample share of their path, and their suffixes after zeros."""
        images, met = set(self._fields.image_keys or IMAGE_SUFFIXES), set[str]()
        for root, folders, names in os.walk(self._folder, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if os.path.realpath(root) in met:  # links may lead round in a circle
                folders.clear()
                continue
            met.add(os.path.realpath(root))
            files = sorted(os.path.splitext(name) for name in names if not name.startswith("."))
            for stem, same_stem in groupby(files, key=itemgetter(0)):
                suffixes = [suffix[1:] for _, suffix in same_stem]
                if not images.isdisjoint(map(str.lower, suffixes)):
                    yield "\0".join([os.path.relpath(os.path.join(root, stem), self._folder), *suffixes])

    def _files(self, index: int) -> dict[str, Path]:
        """Of a sample, by suffix."""
        stem, *suffixes = self._samples[index].split("\0")
        return {suffix.lower(): self._folder / f"{stem}.{suffix}" for suffix in suffixes}

    def _image(self, index: int) -> Path:
        files = self._files(index)
        return files[self._fields.image_key(files)]
