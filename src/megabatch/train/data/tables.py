"""Files with a record per line: JSON lines, CSV and TSV files as OpenCLIP has them, and COCO's annotations."""

import csv
import difflib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..fingerprint import data_line
from . import storage
from .captions import Fields, pair_of
from .source import LARGEST_LINE, Sample, Source, check_file, lines_of, printable

_LARGEST_JSON = 2**31  # bytes: it is read as a whole
_LOOKED_AT = 1000  # records, to find where relative paths start
_ASKED = 100  # images, for their sizes

Record = dict[str, Any]


class Table(Source):
    """JSON objects with the path of an image and captions, or with texts as `pair_of` has them: all as the first.

    All are checked when the file is opened. What is kept of JSON lines is where each begins. Relative paths start at
    the file's own folder or, where no image is found there, at the current folder, as OpenCLIP's do: one or the other
    for the whole file.

    Args:
        fields: Names of images and captions.
        records: Of a file that has no JSON lines, see `csv_records` and `coco_records`. They are kept as JSON lines.
        per_image: Records that name the same file are one sample, with several captions. Otherwise each is a sample.
    """

    def __init__(
        self,
        path: str | Path,
        fields: Fields | None = None,
        *,
        records: Iterable[Record] | None = None,
        per_image: bool = False,
    ) -> None:
        self._path, self._fields = Path(path), fields or Fields()
        check_file(self._path)
        places, images, held = array("q"), list[str](), bytearray()
        self._checksum, stop = 0, 0
        converted = ((json.dumps(record).encode(), record) for record in records or ())
        for number, (line, record) in enumerate(_json_lines(self._path) if records is None else converted, start=1):
            self._checksum = zlib.crc32(line, self._checksum)
            start, stop = stop, stop + len(line)
            if record is None:
                continue
            where = f"{path}: line {number}"
            if not places:
                self.texts_only = record.keys().isdisjoint(self._fields.columns[0])
            if self.texts_only:
                self.has_negatives |= bool(pair_of(record, where).negatives)
            else:
                image = self._image(record, where)
                if per_image or len(images) < _LOOKED_AT:
                    images.append(image)
            places.extend((start, stop, number))
            held += b"" if records is None else line
        if not places:
            raise ValueError(f"{path}: must have a record per line, has none.")
        self._folder = Path() if self.texts_only else _image_folder(self._path, images[:_LOOKED_AT])
        self._held = bytes(held)
        sample_of_record = torch.arange(len(places) // 3)
        if per_image and not self.texts_only:
            samples = {image: number for number, image in enumerate(dict.fromkeys(images))}
            sample_of_record = torch.tensor([samples[image] for image in images])
        self._places = torch.frombuffer(places, dtype=torch.int64).view(-1, 3)[sample_of_record.argsort(stable=True)]
        self._ends = sample_of_record.bincount().cumsum(0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        records = self._records(index)
        if self.texts_only:
            return pair_of(records[0], self.name(index))
        # OpenCLIP converts images of tars before it resizes them, and those of tables afterwards.
        return replace(self._fields.sample_of_rows(records, self._folder), rgb_first=False)

    def name(self, index: int) -> str:
        if self.texts_only:
            return f"{self._path}: line {int(self._places[index, 2])}"
        return printable(str(self._file(index)))

    def fingerprint(self) -> list[str]:
        """With the sizes of some of the images: all would take long to ask for."""
        sizes = [] if self.texts_only else some_sizes(self._file, len(self))
        return [data_line(self._path, len(self), self._checksum, sizes)]

    def _records(self, index: int) -> list[Record]:
        records = []
        for start, stop, number in self._places[self._ends[index - 1] if index else 0 : self._ends[index]].tolist():
            line = self._held[start:stop] or storage.read(str(self._path), start, stop)
            records.append(_json_object(line, f"{self._path}: line {number}"))
        return records

    def _file(self, index: int) -> Path:
        return self._folder / (self._fields.image_of(self._records(index)[0]) or "")

    def _image(self, record: Record, where: str) -> str:
        images, captions = self._fields.columns
        image = self._fields.image_of(record)
        keys = record.keys()
        if keys.isdisjoint(images) or keys.isdisjoint(captions) or not isinstance(image, str | None):
            raise ValueError(
                f"{where} must have the path of an image ({', '.join(images)}) and a caption ({', '.join(captions)}), "
                f"has {', '.join(record)}. Name them with --image-key and --text-key."
            )
        return image or ""


def _json_lines(path: Path) -> Iterator[tuple[bytes, Record | None]]:
    """The lines, with what is in those that are not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            yield line, _json_object(line, f"{path}: line {number}") if line.strip() else None


def _json_object(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a JSON object, got {line[:40]!r}: {error}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object, got {line[:40]!r}.")
    return record


def coco_records(path: Path) -> Iterator[Record]:
    """Of "images" with id and file_name, and "annotations" with image_id and caption."""
    check_file(path, _LARGEST_JSON)
    try:
        content = json.loads(path.read_bytes())
        files = {image["id"]: os.fspath(image["file_name"]) for image in content["images"]}
        yield from [{"image": files[each["image_id"]], "caption": each["caption"]} for each in content["annotations"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        words = "must be a file of COCO's captions, with images and annotations"
        raise ValueError(f"{path}: {words}, got {type(error).__name__}: {error}.") from None


def csv_records(
    path: Path, separator: str = "\t", image_key: str = "filepath", caption_key: str = "title"
) -> Iterator[Record]:
    """Of a file with a header line, a column of paths and a column of captions."""
    csv.field_size_limit(LARGEST_LINE)  # a long caption is no mistake of the file
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(lines_of(file, path), delimiter=separator, strict=True)
        try:
            header = next(reader, None)
            if not header:
                raise ValueError(f"{path}: must start with a line of column names, is empty there.")
            for key, flag in ((image_key, "--csv-img-key"), (caption_key, "--csv-caption-key")):
                if header.count(key) != 1:
                    raise ValueError(f"{path}: {_wrong_column(header, key, flag, separator)}")
            image, caption = header.index(image_key), header.index(caption_key)
            for row in reader:
                if row and len(row) != len(header):
                    got = f"{len(header)} fields, as its header has, got {len(row)}"
                    raise ValueError(f"{path}: line {reader.line_num} must have {got}.")
                if row:
                    yield {"image": row[image], "caption": row[caption]}
        except csv.Error as error:
            raise ValueError(
                f"{path}: line {reader.line_num} must be quoted as CSV is, got: {error}. Put a field with "
                'separators or quotes in it in quotes, with "" for each quote.'
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: must be UTF-8, is not after line {reader.line_num} ({error.reason}). Convert it with iconv."
            ) from None


def _wrong_column(header: list[str], key: str, flag: str, separator: str) -> str:
    if key in header:
        return f"must have one column {key!r}, has {header.count(key)}. Rename all but one."
    rule = f"must have a column {key!r} ({flag})."
    if len(header) == 1:
        return f"{rule} It has one column, {header[0]!r}: --csv-separator may not be {separator!r}."
    (nearest,) = difflib.get_close_matches(key, header, n=1, cutoff=0)
    return f"{rule} It has {', '.join(map(repr, header))}. Perhaps {flag} {nearest} is meant."


def some_sizes(file: Callable[[int], Path], count: int) -> list[int | None]:
    """Sizes of some of so many files, None of those that are not there."""
    some = (file(index) for index in range(0, count, -(-count // _ASKED)))
    return [path.stat().st_size if path.is_file() else None for path in some]


def _image_folder(path: Path, files: list[str]) -> Path:
    """Where the relative paths of a file start."""
    own, current = path.absolute().parent, Path.cwd()
    files = list(filter(None, files))
    for file in files:
        found = [folder for folder in (own, current) if (folder / file).exists()]
        if found and not (found[0] / file).samefile(found[-1] / file):
            places = f"there is {own / file} and {current / file}"
            raise ValueError(
                f"{path}: {file!r} is ambiguous, {places}. Write absolute paths, or start from another folder."
            )
        if found:
            return found[0]
    looked = f"{own} or {current}" if own != current else str(own)
    raise ValueError(
        f"{path}: must name image files, but none of its first {len(files)} is there, such as {(files or [''])[0]!r}. "
        f"Relative paths were looked for in {looked}."
    )
