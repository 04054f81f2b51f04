"""Parquet files, and the Arrow files that `save_to_disk` of Hugging Face's datasets writes. pyarrow reads both.

A row group of a Parquet file can only be read as a whole: it is a shard, and its only block. An Arrow file is a shard,
and memory-mapped.
"""

import json
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import data_line
from . import storage
from .captions import Fields, check_first
from .images import read_file
from .listing import Listed, expand
from .pairs import PAIR, pair_of
from .source import BadSample, Sample, Source, Unread, printable

LARGEST_HELD = 2**32  # bytes of row groups in a process
_ARROW_BLOCK = 64  # samples
_ERRORS = (OSError, ValueError, NotImplementedError)  # of pyarrow, about a file
_SPLIT = re.compile(r"(?:^|[/._-])(train|test|val|valid|validation|dev)(?=[/._-])")


class Parquet(Source):
    """Rows with an image and captions, named as `Fields` says, or with texts, named as in `TextPairs`.

    An image is bytes, a path that starts at the folder of the first file, or a struct with bytes or path.

    Args:
        what: Files, see `expand`, or a local folder.
        factors: See `expand`.
    """

    def __init__(self, what: str, fields: Fields | None = None, *, factors: str | None = None) -> None:
        self._fields = fields or Fields()
        self._files = _files_of(what) if what.endswith("/") or Path(what).is_dir() else expand(what, factors=factors)
        names = _names(self._files[0])
        images, captions = self._fields.columns
        self.texts_only = set(images).isdisjoint(names)
        used = list(filter(PAIR.fullmatch, names)) if self.texts_only else {*images, *captions}
        self._columns = [name for name in names if name in used]
        self.has_negatives = any(name.startswith("neg") for name in self._columns)
        with ThreadPoolExecutor(16) as threads:
            groups_of_files = threads.map(self._groups_of, self._files)
            groups = [(file, *group) for file, groups in enumerate(groups_of_files) for group in groups]
        self._groups = torch.tensor(groups, dtype=torch.int64).view(-1, 4)  # file, number in the file, rows, bytes
        self._ends = self.counts.cumsum(0)
        if not self.counts.any():
            raise ValueError(f"{what}: must have rows, has none.")
        self.block = _ARROW_BLOCK if _is_arrow(self._files[0]) else int(self.counts.max())
        self.weights = torch.tensor([file.weight for file in self._files])[self._groups[:, 0]]
        self._most, self._tables = 8, OrderedDict[int, Any]()
        has = f"It has the columns {', '.join(map(printable, names))}."
        check_first(self, f"{has} Name those of images and captions with --image-key and --text-key.")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        group = self._group(index)
        table, row = self._table(group), index - int(self._ends[group] - self.counts[group])
        try:
            values = {name: table.column(name)[row].as_py() for name in self._columns}
            if self.texts_only:
                return pair_of(values, "row")
        except UnicodeDecodeError:
            raise BadSample("text is not UTF-8") from None
        except ValueError:
            raise BadSample("no pair of texts") from None
        images, captions = self._fields.columns
        image = next((values[name] for name in images if values.get(name)), None)
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if isinstance(image, str):
            image = read_file(Path(self._files[0].url).parent / image)
        if not isinstance(image, bytes):
            raise BadSample("no image")
        return self._fields.captioned(image, values, captions, "no caption")

    def name(self, index: int) -> str:
        file = int(self._groups[self._group(index), 0])
        before = int(self.counts[self._groups[:, 0] < file].sum())
        return printable(f"{self._files[file].url}: row {index - before}")

    @property
    def counts(self) -> Tensor:
        return self._groups[:, 2]

    def keep(self, blocks: int) -> None:
        self._most = blocks
        held, largest = min(blocks, len(self._groups)), int(self._groups[:, 3].max())
        if held * largest > LARGEST_HELD:
            file = self._files[int(self._groups[self._groups[:, 3].argmax(), 0])]
            raise ValueError(
                f"{printable(file.url)}: must have smaller row groups: a process holds {held} at a time, and the "
                f"largest has {largest} bytes. Use more --workers, or write the file anew, with "
                "pyarrow.parquet.write_table(..., row_group_size=100)."
            )

    def fingerprint(self) -> list[str]:
        groups = [self._groups[self._groups[:, 0] == number, 1:] for number in range(len(self._files))]
        return [
            data_line(file.url.rpartition("/")[2], int(each[:, 1].sum()), each.tolist(), size=file.size)
            for file, each in zip(self._files, groups, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": OrderedDict()}

    def _groups_of(self, file: Listed) -> list[tuple[int, int, int]]:
        """Number, rows, and bytes of the columns of each row group."""
        if missing := set(self._columns) - set(_names(file)):
            first = printable(self._files[0].url)
            raise ValueError(f"{printable(file.url)}: must have the columns of {first}, lacks {', '.join(missing)}.")
        if _is_arrow(file):
            return [(0, len(_opened(file)), 0)]
        metadata = _opened(file).metadata
        paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
        columns = [number for number, path in enumerate(paths) if path.partition(".")[0] in self._columns]
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [sum(group.column(column).total_uncompressed_size for column in columns) for group in groups]
        return [(number, group.num_rows, sizes[number]) for number, group in enumerate(groups)]

    def _group(self, index: int) -> int:
        return int(torch.searchsorted(self._ends, index, right=True))

    def _table(self, group: int) -> Any:
        """The rows of a row group. Why it could not be read is kept as well, so that it is asked for once."""
        if group not in self._tables:
            while len(self._tables) >= self._most:
                self._tables.popitem(last=False)
            file, number, *_ = self._groups[group].tolist()
            try:
                opened = _opened(self._files[file])
                is_table = _is_arrow(self._files[file])
                table = opened if is_table else opened.read_row_group(number, self._columns, use_threads=False)
            except _ERRORS as error:
                table = printable(f"{self._files[file].url}, row group {number}: {str(error).strip()}")
            self._tables[group] = table
        self._tables.move_to_end(group)
        if isinstance(self._tables[group], str):
            raise Unread(self._tables[group])
        return self._tables[group]


class _Ranges:
    """A file for pyarrow. Each of its reads is one of storage's."""

    closed = False

    def __init__(self, file: Listed) -> None:
        self._file, self._position = file, 0

    def seek(self, offset: int, whence: int = 0) -> None:
        self._position = offset + (0, self._position, self._file.size)[whence]

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        start, self._position = self._position, min(self._position + size, self._file.size)
        return storage.read(self._file.url, start, self._position) if start < self._position else b""


def _is_arrow(file: Listed) -> bool:
    return file.url.endswith(".arrow")


@lru_cache(maxsize=64)
def _opened(file: Listed) -> Any:
    """A ParquetFile, which has read its footer, or the table of an Arrow file."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{file.url}: pyarrow must be importable. Run pip install 'megabatch[parquet]'.") from error
    path = storage.local_path(file.url)
    if _is_arrow(file) and path is None:
        raise ValueError(f"{file.url}: must be local, as an Arrow file. Copy it to a disk, or write Parquet files.")
    try:
        if not _is_arrow(file):
            return pyarrow.parquet.ParquetFile(pyarrow.PythonFile(_Ranges(file), "r"))
        return pyarrow.ipc.open_stream(pyarrow.memory_map(path)).read_all()
    except storage.StorageError:
        raise
    except _ERRORS as error:
        kind = "an Arrow stream of save_to_disk" if _is_arrow(file) else "a whole Parquet file"
        got = printable(str(error).strip())
        raise ValueError(f"{printable(file.url)}: must be {kind}, got: {got}. Fetch or write it anew.") from None


def _names(file: Listed) -> list[str]:
    opened = _opened(file)
    return list((opened.schema if _is_arrow(file) else opened.schema_arrow).names)


def _files_of(folder: str) -> list[Listed]:
    saved = Path(folder) / "state.json"  # by save_to_disk
    if saved.is_file():
        paths = [saved.parent / file["filename"] for file in json.loads(saved.read_text())["_data_files"]]
        return [Listed(str(path), 1.0, path.stat().st_size, "") for path in paths]
    splits = sorted(path.parent.name for path in Path(folder).glob("*/state.json"))
    files = [] if splits else expand(f"{folder.rstrip('/')}/**/*.parquet")
    splits += sorted({match[1] for file in files if (match := _SPLIT.search(file.url.removeprefix(folder)))})
    if not files or len(splits) > 1:
        raise ValueError(f"{folder}: must be one split, holds {', '.join(splits)}. Name the files or folder of one.")
    return files
