"""Folders of images with captions beside them."""

import os
from collections.abc import Iterator
from pathlib import Path

from ..fingerprint import data_line
from .captions import Fields, check_first
from .images import read_file
from .source import BadSample, Sample, Source, Strings, printable
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
        stem, suffixes = self._stem_and_suffixes(index)
        keys = (self._fields.image_key(suffixes), self._fields.text_key(suffixes))
        return self._fields.sample_of({key: read_file(self._folder / f"{stem}.{suffixes[key]}") for key in keys})

    def name(self, index: int) -> str:
        return printable(str(self._image(index)))

    def fingerprint(self) -> list[str]:
        return [data_line(self._folder.name, len(self), bytes(self._samples), some_sizes(self._image, len(self)))]

    def _find(self) -> Iterator[str]:
        """What files of a sample share of their path, and their suffixes after zeros."""
        met: set[str] = set()
        for root, folders, names in os.walk(self._folder, followlinks=True):
            if os.path.realpath(root) in met:  # links may lead round in a circle
                folders.clear()
                continue
            met.add(os.path.realpath(root))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            samples: dict[str, list[str]] = {}
            for name in sorted(name for name in names if not name.startswith(".")):
                stem, suffix = os.path.splitext(os.path.relpath(os.path.join(root, name), self._folder))
                samples.setdefault(stem, []).append(suffix[1:])
            for stem, suffixes in samples.items():
                try:
                    self._fields.image_key([suffix.lower() for suffix in suffixes])
                except BadSample:
                    continue
                yield "\0".join([stem, *suffixes])

    def _stem_and_suffixes(self, index: int) -> tuple[str, dict[str, str]]:
        stem, *suffixes = self._samples[index].split("\0")
        return stem, {suffix.lower(): suffix for suffix in suffixes}

    def _image(self, index: int) -> Path:
        stem, suffixes = self._stem_and_suffixes(index)
        return self._folder / f"{stem}.{suffixes[self._fields.image_key(suffixes)]}"
