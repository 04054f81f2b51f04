"""Tables of image files and captions: OpenCLIP's CSV and TSV files, and COCO's annotations."""

import csv
import difflib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..fingerprint import data_line
from .images import content_key, read_file
from .source import LARGEST_LINE, BadSample, Sample, Source, Strings, check_file, lines_of, printable

_LARGEST_JSON = 2**31  # bytes: it is read as a whole
_LOOKED_AT = 1000  # rows, to find where relative paths start
_ASKED = 100  # images, for their sizes


class Table(Source):
    """A file with a header line, a column of paths and a column of captions.

    Relative paths start at the file's own folder or, where no image is found there, at the current folder, as
    OpenCLIP's do: one or the other for the whole file. A file whose name ends in .json is one of COCO's: "images" with
    id and file_name, "annotations" with image_id and caption.

    Args:
        per_image: Rows that name the same file are one sample, with several captions. Otherwise each is a sample.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        separator: str = "\t",
        image_key: str = "filepath",
        caption_key: str = "title",
        per_image: bool = False,
    ) -> None:
        self._path = Path(path)
        is_coco = self._path.suffix == ".json"
        rows = _coco_rows(self._path) if is_coco else _rows(self._path, separator, image_key, caption_key)
        samples: dict[Any, list[str]] = {}
        for number, (file, caption) in enumerate(rows):
            samples.setdefault(file if per_image else (number, file), []).append(caption)
        files = [key if per_image else key[1] for key in samples]
        captions = [caption for group in samples.values() for caption in group]
        if not files:
            raise ValueError(f"{path}: must have rows below its header, has none.")
        self._folder = _folder(self._path, files)
        self._files, self._captions = Strings(files), Strings(captions)
        self.has_negatives = len(captions) > len(files)  # further captions come where negatives do
        self._starts = torch.tensor([0, *itertools.accumulate(map(len, samples.values()))])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        if not self._files[index]:
            raise BadSample("no such file")
        data = read_file(self._folder / self._files[index])
        start, stop = self._starts[index : index + 2].tolist()
        first, *others = (self._captions[number] for number in range(start, stop))
        return Sample(first, content_key(data), data, captions=tuple(others))

    def name(self, index: int) -> str:
        return printable(str(self._folder / self._files[index]))

    def fingerprint(self) -> list[str]:
        """With the sizes of some of the images: all would take long to ask for."""
        some = [self._folder / self._files[index] for index in range(0, len(self), -(-len(self) // _ASKED))]
        sizes = [path.stat().st_size if path.is_file() else None for path in some]
        return [data_line(self._path, len(self), bytes(self._files), bytes(self._captions), sizes)]


def _coco_rows(path: Path) -> Iterator[tuple[str, str]]:
    check_file(path, _LARGEST_JSON)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {image["id"]: image["file_name"] for image in content["images"]}
        rows = [(files[each["image_id"]], each["caption"]) for each in content["annotations"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: must be a file of COCO's captions, with images and annotations, got {type(error).__name__}: "
            f"{error}."
        ) from None
    if not all(isinstance(text, str) for row in rows for text in row):
        raise ValueError(f"{path}: must have texts as file_name and caption, has others.")
    return iter(rows)


def _rows(path: Path, separator: str, image_key: str, caption_key: str) -> Iterator[tuple[str, str]]:
    check_file(path)
    csv.field_size_limit(LARGEST_LINE)  # a long caption is no mistake of the file
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(lines_of(file, path), delimiter=separator, strict=True)
        try:
            header = next(reader, None)
            if not header:
                raise ValueError(f"{path}: must start with a line of column names, is empty there.")
            image_column = _column(path, header, image_key, "--csv-img-key", separator)
            caption_column = _column(path, header, caption_key, "--csv-caption-key", separator)
            for row in reader:
                if row and len(row) != len(header):
                    fields = f"{len(header)} fields, as its header has, got {len(row)}"
                    raise ValueError(f"{path}: line {reader.line_num} must have {fields}.")
                if row:
                    yield row[image_column], row[caption_column]
        except csv.Error as error:
            raise ValueError(
                f"{path}: line {reader.line_num} must be quoted as CSV is, got: {error}. Put a field with "
                'separators or quotes in it in quotes, with "" for each quote.'
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: must be UTF-8, is not after line {reader.line_num} ({error.reason}). Convert it with iconv."
            ) from None


def _column(path: Path, header: list[str], key: str, flag: str, separator: str) -> int:
    if header.count(key) == 1:
        return header.index(key)
    if key in header:
        raise ValueError(f"{path}: must have one column {key!r}, has {header.count(key)}. Rename all but one.")
    if len(header) == 1:
        help = f"It has one column, {header[0]!r}: --csv-separator may not be {separator!r}."
    else:
        nearest = difflib.get_close_matches(key, header, n=1, cutoff=0)
        help = f"It has {', '.join(map(repr, header))}. Perhaps {flag} {nearest[0] if nearest else header[0]} is meant."
    raise ValueError(f"{path}: must have a column {key!r} ({flag}). {help}")


def _folder(path: Path, files: list[str]) -> Path:
    """Where relative paths start."""
    own, current = path.absolute().parent, Path.cwd()
    for file in files[:_LOOKED_AT]:
        if not file:
            continue
        in_own, in_current = own / file, current / file
        if in_own.exists() and in_current.exists() and not in_own.samefile(in_current):
            raise ValueError(
                f"{path}: {file!r} is ambiguous, there is {in_own} and {in_current}. "
                "Write absolute paths, or start from another folder."
            )
        if in_own.exists():
            return own
        if in_current.exists():
            return current
    looked = f"{own} or {current}" if own != current else str(own)
    raise ValueError(
        f"{path}: must name image files, but none of its first {min(len(files), _LOOKED_AT)} is there, such as "
        f"{files[0]!r}. Relative paths were looked for in {looked}."
    )
