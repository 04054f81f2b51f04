"""Parquet files, and the Arrow files that `save_to_disk` of Hugging Face's datasets writes. pyarrow reads both.

A row group of a Parquet file can only be read as a whole: it is a shard, and its only block. An Arrow file is a shard,
and memory-mapped.
"""

import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import data_line
from . import storage
from .blocks import Blocks
from .captions import PAIR, Fields, check_first, pair_of
from .listing import Listed, expand
from .source import BadSample, Sample, Source, Unread, printable

LARGEST_HELD = 2**32  # bytes of row groups in a process
_ARROW_BLOCK = 64  # samples
_ERRORS = (OSError, ValueError, NotImplementedError)  # of pyarrow, about a file
_SPLIT = re.compile(r"(?:^|[/._-])(train|test|val|valid|validation|dev)(?=[/._-])")


class Parquet(Source):
    """Rows with an image and captions, named as `Fields` says, or with texts, named as in `pair_of`.

    An image is bytes, a path that starts at the folder of the first file, or a struct with bytes or path.

    Args:
        what: Files, see `expand`, or a local folder.
        factors: See `expand`.
    """

    def __init__(self, what: str, fields: Fields | None = None, *, factors: str | None = None) -> None:
        self._fields = fields or Fields()
        self._files = _files_of(what) if what.endswith("/") or Path(what).is_dir() else expand(what, factors=factors)
        first = _opened(self._files[0])
        names = first.names
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
        self.block = _ARROW_BLOCK if isinstance(first, _ArrowFile) else int(self.counts.max())
        self.weights = torch.tensor([file.weight for file in self._files])[self._groups[:, 0]]
        self._tables = Blocks(self._read_group)
        has = f"It has the columns {', '.join(map(printable, names))}."
        check_first(self, f"{has} Name those of images and captions with --image-key and --text-key.")
        self._tables = Blocks(self._read_group)  # without the rows and threads of this process

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        group = self._group(index)
        table, row = self._tables.get(group), index - int(self._ends[group] - self.counts[group])
        try:
            values = {name: table.column(name)[row].as_py() for name in self._columns}
            if self.texts_only:
                return pair_of(values, "row")
        except UnicodeDecodeError:
            raise BadSample("text is not UTF-8") from None
        except ValueError:
            raise BadSample("no pair of texts") from None
        return self._fields.sample_of_rows([values], Path(self._files[0].url).parent)

    def name(self, index: int) -> str:
        file = int(self._groups[self._group(index), 0])
        before = int(self.counts[self._groups[:, 0] < file].sum())
        return printable(f"{self._files[file].url}: row {index - before}")

    @property
    def counts(self) -> Tensor:
        return self._groups[:, 2]

    def prefetch(self, indices: Iterable[int]) -> None:
        self._tables.prefetch(dict.fromkeys(map(self._group, indices)))

    def keep(self, blocks: int) -> None:
        self._tables.most = blocks
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

    def _groups_of(self, file: Listed) -> list[tuple[int, int, int]]:
        """Number, rows, and bytes of the columns of each row group."""
        opened = _opened(file)
        if missing := set(self._columns) - set(opened.names):
            first = printable(self._files[0].url)
            raise ValueError(f"{printable(file.url)}: must have the columns of {first}, lacks {', '.join(missing)}.")
        return [(number, *group) for number, group in enumerate(opened.groups(self._columns))]

    def _group(self, index: int) -> int:
        return int(torch.searchsorted(self._ends, index, right=True))

    def _read_group(self, group: int) -> Any:
        number_of_file, number, rows, _ = self._groups[group].tolist()
        file = self._files[number_of_file]
        try:
            table = _opened(file).read(number, self._columns)
            if len(table) != rows:
                raise ValueError(f"has {len(table)} rows, had {rows} when the run began")
        except _ERRORS as error:
            raise Unread(printable(f"{file.url}, row group {number}: {str(error).strip()}")) from None
        return table


class _ArrowFile:
    """What `save_to_disk` writes: an Arrow stream."""

    def __init__(self, file: Listed) -> None:
        import pyarrow.ipc

        self._table = pyarrow.ipc.open_stream(pyarrow.memory_map(storage.local_path(file.url))).read_all()
        self.names: list[str] = self._table.schema.names

    def groups(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        return [(len(self._table), 0)]

    def read(self, number: int, columns: Sequence[str]) -> Any:
        return self._table


class _ParquetFile:
    """A file of which the footer is kept."""

    def __init__(self, file: Listed) -> None:
        self._file = file
        self._footer: Any = None
        self._footer = self._reader().metadata
        self.names: list[str] = self._footer.schema.to_arrow_schema().names

    def groups(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Rows of each row group, and bytes of the columns."""
        groups = []
        for group in map(self._footer.row_group, range(self._footer.num_row_groups)):
            chunks = map(group.column, range(group.num_columns))
            used = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
            groups.append((group.num_rows, sum(chunk.total_uncompressed_size for chunk in used)))
        return groups

    def read(self, number: int, columns: Sequence[str]) -> Any:
        return self._reader().read_row_group(number, columns, use_threads=False)

    def _reader(self) -> Any:
        """Of one thread."""
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(pyarrow.PythonFile(_Ranges(self._file), "r"), metadata=self._footer)


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
        return storage.read(self._file.url, start, self._position)


@lru_cache(maxsize=64)
def _opened(file: Listed) -> _ArrowFile | _ParquetFile:
    is_arrow = file.url.endswith(".arrow")
    if is_arrow and storage.local_path(file.url) is None:
        raise ValueError(f"{file.url}: must be local, as an Arrow file. Copy it to a disk, or write Parquet files.")
    try:
        return _ArrowFile(file) if is_arrow else _ParquetFile(file)
    except ImportError as error:
        raise ImportError(f"{file.url}: pyarrow must be importable. Run pip install 'megabatch[parquet]'.") from error
    except storage.StorageError:
        raise
    except _ERRORS as error:
        kind = "an Arrow stream of save_to_disk" if is_arrow else "a whole Parquet file"
        got = printable(str(error).strip())
        raise ValueError(f"{printable(file.url)}: must be {kind}, got: {got}. Fetch or write it anew.") from None


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
