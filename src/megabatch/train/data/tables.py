"""Tables of image files and captions: OpenCLIP's CSV and TSV files, COCO's annotations, and JSON lines."""

import csv
import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from ..fingerprint import data_line
from .captions import Fields, texts_of
from .images import content_key, read_file
from .pairs import TextPairs, json_object
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
        fields: The file has a JSON object per line, with the path of an image and a caption, or a list of captions,
            under these names.
        per_image: Rows that name the same file are one sample, with several captions. Otherwise each is a sample.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        separator: str = "\t",
        image_key: str = "filepath",
        caption_key: str = "title",
        fields: Fields | None = None,
        per_image: bool = False,
    ) -> None:
        self._path = Path(path)
        if self._path.suffix == ".json":
            rows = _coco_rows(self._path)
        elif fields is not None:
            rows = _json_rows(self._path, fields)
        else:
            rows = _rows(self._path, separator, image_key, caption_key)
        self._rows = Strings(itertools.chain.from_iterable(rows))  # file, caption, file, caption, ...
        count = len(self._rows) // 2
        if not count:
            raise ValueError(f"{path}: must have rows below its header, has none.")
        self._folder = image_folder(self._path, (self._rows[2 * row] for row in range(count)))
        sample_of_row = torch.arange(count)
        if per_image:
            samples: dict[str, int] = {}
            for row in range(count):
                sample_of_row[row] = samples.setdefault(self._rows[2 * row], len(samples))
        self._row_of_caption = sample_of_row.argsort(stable=True)
        self._ends = sample_of_row.bincount().cumsum(0)
        self.has_negatives = len(self) < count  # further captions come where negatives do

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        rows = self._rows_of(index)
        if not self._rows[2 * rows[0]]:
            raise BadSample("no such file")
        data = read_file(self._file(index))
        first, *others = (self._rows[2 * row + 1] for row in rows)
        return Sample(first, content_key(data), data, captions=tuple(others))

    def name(self, index: int) -> str:
        return printable(str(self._file(index)))

    def fingerprint(self) -> list[str]:
        """With the sizes of some of the images: all would take long to ask for."""
        return [data_line(self._path, len(self), bytes(self._rows), some_sizes(self._file, len(self)))]

    def _rows_of(self, index: int) -> list[int]:
        start = int(self._ends[index - 1]) if index else 0
        return self._row_of_caption[start : int(self._ends[index])].tolist()

    def _file(self, index: int) -> Path:
        return self._folder / self._rows[2 * self._rows_of(index)[0]]


def some_sizes(file: Callable[[int], Path], count: int) -> list[int | None]:
    """Sizes of some of so many files, None of those that are not there."""
    some = (file(index) for index in range(0, count, -(-count // _ASKED)))
    return [path.stat().st_size if path.is_file() else None for path in some]


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


def open_lines(path: str | Path, fields: Fields, *, per_image: bool) -> Source:
    """Images or pairs of texts, as the first line has them."""
    check_file(Path(path))
    with Path(path).open("rb") as file:
        line = next(filter(bytes.strip, lines_of(file, Path(path))), b"{}")
    if set(fields.columns[0]).isdisjoint(json_object(line, f"{path}: the first line")):
        return TextPairs(path)
    if fields.probs:
        raise ValueError(f"--json-text-key-probs: must come with tars, image folders or Parquet files, got {path}.")
    return Table(path, fields=fields, per_image=per_image)


def _json_rows(path: Path, fields: Fields) -> Iterator[tuple[str, str]]:
    images, captions = fields.columns
    check_file(path)
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            if not line.strip():
                continue
            values = json_object(line, f"{path}: line {number}")
            image = next((values[key] for key in images if isinstance(values.get(key), str)), None)
            if image is None or set(captions).isdisjoint(values):
                raise ValueError(
                    f"{path}: line {number} must have the path of an image ({', '.join(images)}) and a caption "
                    f"({', '.join(captions)}), has {', '.join(values)}. Name them with --image-key and --text-key."
                )
            yield from ((image, text) for text in texts_of(values, captions) or [""])


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


def image_folder(path: Path, files: Iterable[str]) -> Path:
    """Where the relative paths of a file start."""
    own, current = path.absolute().parent, Path.cwd()
    looked_at = [file for file in itertools.islice(files, _LOOKED_AT) if file]
    for file in looked_at:
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
        f"{path}: must name image files, but none of its first {len(looked_at)} is there, such as "
        f"{(looked_at or [''])[0]!r}. Relative paths were looked for in {looked}."
    )
