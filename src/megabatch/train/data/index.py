"""The index of tar shards: where every 64th sample starts. It is made once and memory-mapped from then on.

It is a folder, `megabatch.index`, beside the shards or, where it cannot be, in a cache folder. Who reads shards through
adds two files to it: `ID.jsonl`, a line per shard, and `ID.offsets`, 4 bytes per 64 samples. Nobody else writes to
them, and they only grow: a scan may be killed at any time, and what it has done counts. Nothing is kept per sample or
per key: the part of a shard that is read is parsed again.
"""

import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...distributed.processes import end_with
from ...distributed.world import World
from . import storage
from .listing import Listed
from .source import Strings, printable
from .tars import BLOCK, BadTar, groups
from .workers import CONTEXT

BLOCK_SAMPLES = 64
NAME = "megabatch.index"

# Bytes of a shard that are read at once when it is scanned: of a local one little beyond a header.
_PART, _LOCAL_PART = 2**24, 2**16
_END = 20_480  # bytes, at most, after the last sample of a tar: zeros, up to a whole record
_FEW = 4  # shards that are not worth processes
_NAMED = 20  # bad shards in an error
_LOGGER = logging.getLogger("megabatch")

Offsets = np.ndarray[Any, np.dtype[np.uint32]]  # of every 64th sample of a shard, in units of 512 bytes
Told = Callable[[int, int], None]  # how many shards were read through, of how many that must be


class Entry(NamedTuple):
    """What an index knows of a shard: how many samples it has, a digest of names, places and sizes of all that is in
    it, and where in which file its offsets start."""

    samples: int
    digest: int
    file: Path
    first: int


@dataclass
class Index:
    """The shards of a run, in its order.

    Attributes:
        urls: Where each is.
        weights: How often each is drawn, relative to others.
        table: `[shards, 5]`: size, samples, digest, in which of `files` its offsets are, and which is its first.
    """

    urls: Strings
    weights: Tensor
    table: Tensor
    files: list[Path]

    @property
    def samples(self) -> Tensor:
        return self.table[:, 1]

    def block(self, shard: int, number: int) -> tuple[int, int]:
        """Where in a shard the samples from 64 * number on begin and end, in bytes."""
        size, samples, _, file, first = self.table[shard].tolist()
        at, is_last = first + number, (number + 1) * BLOCK_SAMPLES >= samples
        offsets = _mapped(self.files[file])
        if len(offsets) <= (at if is_last else at + 1):  # it has grown since
            _mapped.cache_clear()
            offsets = _mapped(self.files[file])
        return int(offsets[at]) * BLOCK, size if is_last else int(offsets[at + 1]) * BLOCK


@cache
def _mapped(file: Path) -> Offsets:
    return np.memmap(file, np.uint32, mode="r", shape=file.stat().st_size // 4)


def shared(world: World, make: Callable[[], Index]) -> Index:
    """The index that rank 0 makes. Ranks that do not see its files are sent them, and keep them in a cache folder."""
    made = world.from_first(make)
    for number, file in enumerate(made.files):
        size, copy = world.broadcast(file.stat().st_size if world.rank == 0 else 0), cache_folder() / file.name
        mine = next((path for path in (file, copy) if _has(path, size)), None)
        if any(world.gather(mine is None)):
            content: bytes = world.broadcast(file.read_bytes() if world.rank == 0 else None)
            if mine is None:
                copy.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as unfinished:
                    unfinished.write(content)
                os.replace(unfinished.name, copy)
        made.files[number] = mine or copy
    return made


def _has(file: Path, size: int) -> bool:
    """Names are never used again, so a file of this size is the one that is meant."""
    return file.exists() and file.stat().st_size >= size


def make(shards: Sequence[Listed], *, skip_bad: bool = False, told: Told = lambda done, total: None) -> Index:
    """Of what is known, and of what is not: shards that are new, or have another size or tag, are read through.

    Args:
        skip_bad: Leave out shards that cannot be read. Otherwise they are an error, which names them all.
    """
    keys = list(map(_key, shards))
    places = {folder: _places(folder) for folder in {folder for folder, *_ in keys}}
    known = {key: entry for folder in places for place in places[folder] for key, entry in _known(folder, place)}
    ours = {folder: place / f"{uuid.uuid4().hex}.offsets" for folder, (place, *_) in places.items()}
    missing = {key: shard for key, shard in zip(keys, shards, strict=True) if key not in known}
    bad: list[str] = []
    for done, (key, found) in enumerate(zip(missing, _scanned(list(missing.values())), strict=True), start=1):
        if isinstance(found, str):
            bad.append(f"{printable(missing[key].url)}: {found}")
        else:
            known[key] = _added(ours[key[0]], key, *found)
        told(done, len(missing))
    if bad and not skip_bad:
        shown = "".join(f"\n  {line}" for line in sorted(bad)[:_NAMED])
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise ValueError(
            f"{len(bad)} of {len(shards)} shards must be whole, uncompressed tars, and are not:{shown}{more}\n"
            "Fetch or write them anew, or go on without them: --skip-bad-shards."
        )
    for line in bad:
        _LOGGER.warning("data: left out %s", line)
    kept = [(shard, known[key]) for key, shard in zip(keys, shards, strict=True) if key in known]
    numbers = {file: number for number, file in enumerate(dict.fromkeys(entry.file for _, entry in kept))}
    rows = [(shard.size, entry.samples, entry.digest, numbers[entry.file], entry.first) for shard, entry in kept]
    weights = torch.tensor([shard.weight for shard, _ in kept], dtype=torch.float64)
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 5)
    return Index(Strings(shard.url for shard, _ in kept), weights, table, list(numbers))


Key = tuple[str, str, int, str]  # a shard, by its folder, name, size and tag


def _key(shard: Listed) -> Key:
    return *os.path.split(shard.url), shard.size, shard.tag


def _places(folder: str) -> list[Path]:
    """Where the index of a folder may be. The first is where it is written."""
    if "://" in folder:
        return [_cached(folder)]
    folder = os.path.abspath(folder)
    beside, cached = Path(folder) / NAME, _cached(folder)
    return [beside, cached] if os.access(beside if beside.exists() else folder, os.W_OK) else [cached, beside]


def _cached(folder: str) -> Path:
    return cache_folder() / f"{hashlib.blake2b(folder.encode(), digest_size=16).hexdigest()}.index"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"


def _known(folder: str, place: Path) -> Iterator[tuple[Key, Entry]]:
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place}: must be an index of megabatch, is something else. Remove it.")
    for lines in place.glob("*.jsonl"):
        file = lines.with_suffix(".offsets")
        length = file.stat().st_size // 4 if file.exists() else 0
        with lines.open(errors="replace") as stream, suppress(ValueError, TypeError):  # where a scan was killed
            for name, size, tag, samples, digest, first in map(json.loads, stream):
                if first + -(-samples // BLOCK_SAMPLES) <= length:
                    yield (folder, name, size, tag), Entry(samples, digest, file, first)


def _added(file: Path, key: Key, samples: int, digest: int, offsets: Offsets) -> Entry:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        first = stream.tell() // 4
        stream.write(offsets.tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    with file.with_suffix(".jsonl").open("a") as lines:
        lines.write(json.dumps([*key[1:], samples, digest, first]) + "\n")
    return Entry(samples, digest, file, first)


# ---- reading a shard through

Scanned = tuple[int, int, Offsets]  # samples, digest and offsets


def _scanned(shards: Sequence[Listed]) -> Iterator[Scanned | str]:
    """Of each shard, or what is wrong with it. In processes: headers are parsed in Python."""
    if len(shards) <= _FEW:
        yield from map(scan, shards)
        return
    count = min(len(shards), os.cpu_count() or 1)
    with ProcessPoolExecutor(count, CONTEXT, initializer=end_with, initargs=(os.getpid(),)) as processes:
        yield from processes.map(scan, shards)


def scan(shard: Listed) -> Scanned | str:
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
    return len(starts), int.from_bytes(content.digest(), "big"), offsets[::BLOCK_SAMPLES]


def _reader(shard: Listed) -> Callable[[int, int], bytes]:
    size = _LOCAL_PART if storage.local_path(shard.url) is not None else _PART
    part, held = 0, b""

    def read(start: int, stop: int) -> bytes:
        nonlocal part, held
        if not part <= start <= stop <= part + len(held):
            part, held = start, storage.read(shard.url, start, min(max(start + size, stop), shard.size))
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
