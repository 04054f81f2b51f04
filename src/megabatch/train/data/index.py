"""The index of tar shards: where every 64th sample starts. It is made once and memory-mapped from then on.

A folder has one index file, `megabatch.index`, of all its shards that were ever asked for: 4 bytes per 64 samples, and
a line of text and three numbers per shard. It lies beside the shards or, where it cannot, in a cache folder. Nothing is
kept per sample or per key: the part of a shard that is read is parsed again.
"""

import base64
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...distributed.world import World
from ..checkpoint import atomically
from . import storage
from .listing import Listed
from .source import Strings, printable
from .tars import BLOCK, BadTar, groups

BLOCK_SAMPLES = 64
NAME = "megabatch.index"

_MAGIC = b"megabatch index 1\n"
_PART = 2**24  # bytes of a remote shard that are read at once when it is scanned
_END = 20_480  # bytes, at most, after the last sample of a tar: zeros, up to a whole record
_FEW = 4  # shards that are not worth processes
_NAMED = 20  # bad shards in an error
_LOGGER = logging.getLogger("megabatch")


class Entry(NamedTuple):
    """A shard in an index.

    Attributes:
        tag: Of the file: of a copy it may be another.
        digest: Of names, places and sizes of all that is in it.
        offsets: Of every 64th sample, in units of 512 bytes.
    """

    name: str
    tag: str
    size: int
    samples: int
    digest: int
    offsets: "np.ndarray[Any, np.dtype[np.uint32]]"


class IndexFile:
    """An index file, memory-mapped: what is not asked for is not read.

    Attributes:
        stamp: Another for another content.
        sizes, samples, digests: Of each shard.
        starts: Which of `offsets` is its first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
        end = content[:4096].tobytes().find(b"\n", len(_MAGIC)) + 1
        if content[: len(_MAGIC)].tobytes() != _MAGIC or not end:
            raise ValueError(f"{path}: must be an index of megabatch, is something else. Remove it.")
        header = json.loads(content[len(_MAGIC) : end].tobytes())
        self.stamp, shards, text = str(header["stamp"]), int(header["shards"]), int(header["text"])
        start = _aligned(end + text)
        if len(content) != start + 24 * shards + 4 * header["blocks"]:
            raise ValueError(f"{path}: must be a whole index, is a part of one. Remove it.")
        self._text = content[end : end + text]
        numbers = content[start : start + 24 * shards].view(np.int64).reshape(3, shards)
        self.sizes, self.samples, self.digests = numbers
        self.offsets = content[start + 24 * shards :].view(np.uint32)
        blocks = -(-self.samples // BLOCK_SAMPLES)
        self.starts = np.cumsum(blocks) - blocks

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return IndexFile, (self.path,)

    def names_and_tags(self) -> list[list[str]]:
        found: list[list[str]] = json.loads(self._text.tobytes())
        return found

    def entries(self) -> Iterator[Entry]:
        for row, (name, tag) in enumerate(self.names_and_tags()):
            samples, start = int(self.samples[row]), int(self.starts[row])
            offsets = self.offsets[start : start + -(-samples // BLOCK_SAMPLES)]
            yield Entry(name, tag, int(self.sizes[row]), samples, int(self.digests[row]), offsets)


def _aligned(position: int) -> int:
    return -(-position // 8) * 8


def write(path: Path, entries: Sequence[Entry]) -> IndexFile:
    text = json.dumps([(entry.name, entry.tag) for entry in entries]).encode()
    numbers = np.array([(entry.size, entry.samples, entry.digest) for entry in entries], dtype=np.int64).T
    offsets = np.concatenate([np.zeros(0, np.uint32), *(entry.offsets for entry in entries)]).astype(np.uint32)
    stamp = hashlib.blake2b(text + numbers.tobytes() + offsets.tobytes(), digest_size=16).hexdigest()
    header = {"stamp": stamp, "shards": len(entries), "blocks": len(offsets), "text": len(text)}
    head = _MAGIC + json.dumps(header).encode() + b"\n" + text
    return _write(path, head.ljust(_aligned(len(head)), b"\0") + numbers.tobytes() + offsets.tobytes())


def _write(path: Path, content: bytes) -> IndexFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomically(path, lambda file: file.write(content))
    return IndexFile(path)


@dataclass
class Index:
    """The shards of a run, in its order.

    Attributes:
        urls: Where each is.
        weights: How often each is drawn, relative to others.
        sizes, samples, digests: Of each, see `Entry`.
        file_of, first: In which of `files` its offsets are, and which of them is its first.
    """

    urls: Strings
    weights: Tensor
    sizes: Tensor
    samples: Tensor
    digests: Tensor
    file_of: Tensor
    first: Tensor
    files: list[IndexFile]

    def block(self, shard: int, number: int) -> tuple[int, int]:
        """Where in a shard the samples from 64 * number on begin and end, in bytes."""
        offsets, at = self.files[int(self.file_of[shard])].offsets, int(self.first[shard]) + number
        is_last = (number + 1) * BLOCK_SAMPLES >= int(self.samples[shard])
        return int(offsets[at]) * BLOCK, int(self.sizes[shard]) if is_last else int(offsets[at + 1]) * BLOCK


def shared(world: World, make: Callable[[], Index]) -> Index:
    """The index that rank 0 makes. Ranks that do not see its files are sent them, and keep them in a cache folder."""
    index, error = None, None
    try:
        index = make() if world.rank == 0 else None
    except (ValueError, OSError) as caught:
        error = caught
    if (error := world.broadcast(error)) is not None:
        raise error
    files = world.broadcast([(file.path, file.stamp) for file in index.files] if index is not None else None)
    mine = [_opened(path, stamp) or _opened(_copy(stamp), stamp) for path, stamp in files]
    everyones = world.gather([file is None for file in mine])
    for number, (path, stamp) in enumerate(files):
        if any(lacking[number] for lacking in everyones):
            content: bytes = world.broadcast(path.read_bytes() if world.rank == 0 else None)
            if mine[number] is None:
                mine[number] = _write(_copy(stamp), content)
    found: Index = world.broadcast(replace(index, files=[]) if index is not None else None)
    return replace(found, files=[file for file in mine if file is not None])


def _opened(path: Path, stamp: str) -> IndexFile | None:
    try:
        file = IndexFile(path)
    except (OSError, ValueError):
        return None
    return file if file.stamp == stamp else None


def _copy(stamp: str) -> Path:
    return cache_folder() / f"{stamp}.index"


# ---- making it

Told = Callable[[int, int], None]  # how many shards were read through, of how many that must be


def make(shards: Sequence[Listed], *, skip_bad: bool = False, told: Told = lambda done, total: None) -> Index:
    """From the index files there are. Shards that these lack, or know another size or tag of, are read through.

    Args:
        skip_bad: Leave out shards that cannot be read. Otherwise they are an error, which names them all.
    """
    by_folder: dict[str, list[Listed]] = {}
    for shard in shards:
        by_folder.setdefault(_folder_of(shard), []).append(shard)
    folders = {url: _Folder(url, group) for url, group in by_folder.items()}
    done, total, bad = 0, sum(len(folder.missing) for folder in folders.values()), list[str]()
    for folder in folders.values():
        for error in folder.scan():
            done += 1
            told(done, total)
            bad += [error] if error else []
    if bad and not skip_bad:
        shown = "".join(f"\n  {line}" for line in sorted(bad)[:_NAMED])
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise ValueError(
            f"{len(bad)} of {len(shards)} shards must be whole, uncompressed tars, and are not:{shown}{more}\n"
            "Fetch or write them anew, or go on without them: --skip-bad-shards."
        )
    for line in bad:
        _LOGGER.warning("data: left out %s", line)
    files, kept = [folder.file for folder in folders.values()], list[tuple[Listed, int, int]]()
    numbers = {url: number for number, url in enumerate(folders)}
    for shard in shards:
        url, name = os.path.split(shard.url)
        row = folders[url].rows.get(name)
        kept += [] if row is None else [(shard, numbers[url], row)]
    file_of, rows = torch.tensor([place for _, *place in kept], dtype=torch.int64).view(-1, 2).T.contiguous()
    columns = torch.empty(4, len(kept), dtype=torch.int64)
    for number, file in enumerate(files):
        mine = (file_of == number).nonzero()[:, 0]
        table = np.stack([file.sizes, file.samples, file.digests, file.starts])
        columns[:, mine] = torch.from_numpy(table[:, rows[mine].numpy()])
    sizes, samples, digests, first = columns
    weights = torch.tensor([shard.weight for shard, _, _ in kept], dtype=torch.float64)
    return Index(Strings(shard.url for shard, _, _ in kept), weights, sizes, samples, digests, file_of, first, files)


def _folder_of(shard: Listed) -> str:
    return os.path.dirname(shard.url)


def _name_of(shard: Listed) -> str:
    return os.path.basename(shard.url)


class _Folder:
    """The shards of one folder. `rows` are those that its index has, by name; `missing` those to read through."""

    def __init__(self, url: str, shards: Sequence[Listed]) -> None:
        self._path = _index_path(url)
        self._journal = self._path.with_name(self._path.name + ".partial")
        tags, sizes = self._open(), self.file.sizes.tolist()
        self.missing: list[Listed] = []
        for shard in shards:
            row = self.rows.get(_name_of(shard))
            if row is None or (sizes[row], tags[row]) != (shard.size, shard.tag):
                self.missing.append(shard)

    def _open(self) -> list[str]:
        """The tags of the shards that it has."""
        self.file = IndexFile(self._path) if self._path.exists() else write(self._path, [])
        known = self.file.names_and_tags()
        self.rows = {name: row for row, (name, _) in enumerate(known)}
        return [tag for _, tag in known]

    def scan(self) -> Iterator[str | None]:
        """Reads all through that is missing. Of each: what is wrong with it, or None.

        What was read through is in a journal until the index is written, so a scan that was killed goes on.
        """
        if not self.missing:
            return
        done = {entry.name: entry for entry in _read_journal(self._journal)}
        current = {_name_of(shard): (shard.tag, shard.size) for shard in self.missing}
        done = {name: entry for name, entry in done.items() if current.get(name) == entry[1:3]}
        yield from [None] * len(done)
        left = [shard for shard in self.missing if _name_of(shard) not in done]
        with self._journal.open("a") as journal:
            for shard, found in zip(left, _scanned(left), strict=True):
                if isinstance(found, str):
                    yield f"{printable(shard.url)}: {found}"
                    continue
                done[found.name] = found
                offsets = base64.b64encode(found.offsets.tobytes()).decode()
                journal.write(json.dumps([*found[:-1], offsets]) + "\n")
                journal.flush()
                yield None
        bad = {_name_of(shard) for shard in self.missing} - done.keys()
        kept = [entry for entry in self.file.entries() if entry.name not in done.keys() | bad]
        write(self._path, [*kept, *done.values()])
        self._journal.unlink(missing_ok=True)
        self._open()


def _read_journal(path: Path) -> Iterator[Entry]:
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):  # the last line of a process that was killed
            name, tag, size, samples, digest, offsets = json.loads(line)
            yield Entry(name, tag, size, samples, digest, np.frombuffer(base64.b64decode(offsets), np.uint32))


def _index_path(folder: str) -> Path:
    """Beside the shards if they are on a disk that can be written to, or that has an index already."""
    if "://" not in folder:
        folder = os.path.abspath(folder)
        beside = Path(folder) / NAME
        if beside.exists() or os.access(beside.parent, os.W_OK):
            return beside
    return cache_folder() / f"{hashlib.blake2b(folder.encode(), digest_size=16).hexdigest()}.index"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"


# ---- reading a shard through


def _scanned(shards: Sequence[Listed]) -> Iterator[Entry | str]:
    """Of each shard, its entry or what is wrong with it. In processes: headers are parsed in Python."""
    if len(shards) <= _FEW:
        yield from map(scan, shards)
        return
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = ProcessPoolExecutor(
        min(len(shards), os.cpu_count() or 1), mp_context=context, initializer=_end_with, initargs=(os.getpid(),)
    )
    with processes:
        yield from processes.map(scan, shards)


def _end_with(parent: int) -> None:
    """The processes of a pool wait for ever for work of one that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def scan(shard: Listed) -> Entry | str:
    content = hashlib.blake2b(digest_size=7)
    try:
        starts = _of_energon(shard)
        for group in groups(_reader(shard), shard.size) if not starts else ():
            starts.append(group.start)
            content.update(repr(group).encode(errors="surrogateescape"))
        expected = _of_img2dataset(shard)
    except BadTar as error:
        return f"it has {error}"
    except OSError as error:
        return str(error)
    if not starts:
        return "it has no samples"
    if expected not in (None, len(starts)):
        return f"it has {len(starts)} samples where img2dataset counted {expected}"
    if any(start % BLOCK or start // BLOCK >= 2**32 for start in starts):
        return "it has samples beyond 2 TiB, or where no header can be"
    offsets = (np.array(starts, dtype=np.int64) // BLOCK).astype(np.uint32)
    content.update(offsets.tobytes())
    digest = int.from_bytes(content.digest(), "big")
    return Entry(_name_of(shard), shard.tag, shard.size, len(starts), digest, offsets[::BLOCK_SAMPLES])


def _reader(shard: Listed) -> Callable[[int, int], bytes]:
    if "://" not in shard.url:
        return lambda start, stop: storage.read(shard.url, start, stop)
    part, held = 0, b""

    def read(start: int, stop: int) -> bytes:
        nonlocal part, held
        if not part <= start <= stop <= part + len(held):
            part, held = start, storage.read(shard.url, start, min(max(start + _PART, stop), shard.size))
        return held[start - part : stop - part]

    return read


def _of_energon(shard: Listed) -> list[int]:
    """Where samples start, by Energon's file beside the shard; nothing where there is none, or one of another tar."""
    try:
        found: list[int] = np.frombuffer(storage.read_all(f"{shard.url}.idx"), np.uint64).tolist()
    except (OSError, ValueError):
        return []
    fits = len(found) > 1 and found == sorted(found) and found[-1] <= shard.size <= found[-1] + _END
    return found[:-1] if fits else []


def _of_img2dataset(shard: Listed) -> int | None:
    """How many samples it has written, by its file beside the shard."""
    try:
        found = json.loads(storage.read_all(f"{shard.url.removesuffix('.tar')}_stats.json"))["successes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None
