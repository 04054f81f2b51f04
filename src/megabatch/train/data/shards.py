"""WebDataset's tar shards, in the layout that img2dataset writes: `key.jpg` with `key.txt` or `key.json`.

They are read in blocks of 64 samples, one range of bytes each. Blocks are read ahead of their use and by several
threads, and kept until all of their samples have been used.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import data_line
from . import storage
from .captions import Fields
from .index import BLOCK_SAMPLES, Index
from .source import LARGEST_FILE, BadSample, Sample, Source, Unread, printable
from .tars import BadTar, Group, Read, groups

IN_FLIGHT = 16  # requests of a process
_LARGEST_BLOCK = 2**30  # bytes to hold; of a larger one, each file is read when it is needed

Key = tuple[int, int]  # a shard, and a block of it


class Shards(Source):
    """The samples of an index. Their numbers are those of the index, whatever can be read of them."""

    block = BLOCK_SAMPLES

    def __init__(self, index: Index, fields: Fields) -> None:
        self._index, self._fields = index, fields
        self.weights = index.weights
        self._ends = index.samples.cumsum(0)
        self._blocks = _Blocks(self._read_block)
        if not len(self):
            raise ValueError("tar shards: must hold samples, such as 000.jpg with 000.txt, hold none.")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def counts(self) -> Tensor:
        return self._index.samples

    def __getitem__(self, index: int) -> Sample:
        key, number = self._place(index)
        read, found = self._blocks.get(key)
        files = found[number].files
        names = {self._fields.image_key(files), self._fields.text_key(files)}
        if any(size > LARGEST_FILE for _, size in (files[name] for name in names)):
            raise BadSample(f"file of more than {LARGEST_FILE} bytes")
        return self._fields.sample_of({name: read(files[name][0], sum(files[name])) for name in names})

    def name(self, index: int) -> str:
        key, number = self._place(index)
        found = self._blocks.peek(key)
        which = found[number].key if found is not None else f"sample {key[1] * BLOCK_SAMPLES + number}"
        return printable(f"{self._index.urls[key[0]]}: {which}")

    def prefetch(self, indices: Iterable[int]) -> None:
        self._blocks.want(dict.fromkeys(self._place(index)[0] for index in indices))

    def keep(self, blocks: int) -> None:
        self._blocks.most = blocks

    def fingerprint(self) -> list[str]:
        index = self._index
        numbers = zip(index.sizes.tolist(), index.samples.tolist(), index.digests.tolist(), strict=True)
        return [
            data_line(index.urls[shard].rpartition("/")[2], samples, digest, size=size)
            for shard, (size, samples, digest) in enumerate(numbers)
        ]

    def _place(self, index: int) -> tuple[Key, int]:
        """The block of a sample, and its number in the block."""
        shard = int(torch.searchsorted(self._ends, index, right=True))
        number = index - int(self._ends[shard] - self._index.samples[shard])
        return (shard, number // BLOCK_SAMPLES), number % BLOCK_SAMPLES

    def _read_block(self, key: Key) -> tuple[Read, list[Group]]:
        shard, number = key
        url, (start, stop) = self._index.urls[shard], self._index.block(shard, number)
        try:
            held = storage.read(url, start, stop) if stop - start <= _LARGEST_BLOCK else None

            def read(begin: int, end: int) -> bytes:
                return storage.read(url, start + begin, start + end) if held is None else held[begin:end]

            found = list(groups(read, stop - start))
        except (BadTar, OSError) as error:
            raise Unread(f"{printable(url)} from byte {start} to {stop}: {error}") from None
        expected = min(BLOCK_SAMPLES, int(self._index.samples[shard]) - number * BLOCK_SAMPLES)
        if len(found) != expected:
            raise Unread(
                f"{printable(url)} from byte {start} to {stop}: has {len(found)} samples, had {expected} when it was "
                "indexed"
            )
        return read, found


class _Blocks:
    """Blocks that are read or being read: the last `most` of them, without those whose samples were all used."""

    def __init__(self, load: Callable[[Key], tuple[Read, list[Group]]]) -> None:
        self.most, self._load = 64, load
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return {"most": self.most, "_load": self._load}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._held: OrderedDict[Key, Future[tuple[Read, list[Group]]]] = OrderedDict()
        self._used: Counter[Key] = Counter()
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def want(self, keys: Iterable[Key]) -> None:
        if self._process != os.getpid():  # threads are not forked
            self.__setstate__({})
        for key in keys:
            if key not in self._held:
                self._threads = self._threads or ThreadPoolExecutor(IN_FLIGHT)
                self._held[key] = self._threads.submit(self._load, key)
            self._held.move_to_end(key)
        while len(self._held) > self.most:
            self._drop(next(iter(self._held)))

    def get(self, key: Key) -> tuple[Read, list[Group]]:
        """For one of its samples."""
        if (last := next(reversed(self._held), None)) is not None and last != key and self._is_used(last):
            self._drop(last)  # not before: its samples can still be named
        self.want([key])
        found = self._held[key].result()
        self._used[key] += 1
        return found

    def _is_used(self, key: Key) -> bool:
        found = self.peek(key)
        return found is not None and self._used[key] >= len(found)

    def peek(self, key: Key) -> list[Group] | None:
        """Its samples, if it was read."""
        future = self._held.get(key)
        return future.result()[1] if future is not None and future.done() and not future.exception() else None

    def _drop(self, key: Key) -> None:
        self._held.pop(key).cancel()
        self._used.pop(key, None)
