"""WebDataset's tar shards, in the layout that img2dataset writes: `key.jpg` with `key.txt` or `key.json`.

They are read in blocks of 64 samples, one range of bytes each.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..fingerprint import data_line
from . import storage
from .blocks import Blocks
from .captions import Fields
from .index import BLOCK_SAMPLES, Index
from .source import LARGEST_FILE, BadSample, Sample, Source, Unread, printable
from .tars import BadTar, Group, Read, groups

_LARGEST_BLOCK = 2**30  # bytes to hold; of a larger one, each file is read when it is needed

Key = tuple[int, int]  # a shard, and a block of it


class Shards(Source):
    """The samples of an index. Their numbers are those of the index, whatever can be read of them."""

    block = BLOCK_SAMPLES

    def __init__(self, index: Index, fields: Fields) -> None:
        self._index, self._fields = index, fields
        self.weights = index.weights
        self._ends = index.samples.cumsum(0)
        self._blocks = Blocks(self._read_block)
        if not len(self):
            raise ValueError("tar shards: must hold samples, such as 000.jpg with 000.txt, hold none.")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def counts(self) -> Tensor:
        return self._index.samples

    def __getitem__(self, index: int) -> Sample:
        key, number = self._place(index)
        block = self._blocks.get(key)
        files = block.groups[number].files
        names = {self._fields.image_key(files), self._fields.text_key(files)}
        if any(size > LARGEST_FILE for _, size in (files[name] for name in names)):
            raise BadSample(f"file of more than {LARGEST_FILE} bytes")
        return self._fields.sample_of({name: block.read(files[name][0], sum(files[name])) for name in names})

    def name(self, index: int) -> str:
        key, number = self._place(index)
        block = self._blocks.peek(key)
        which = block.groups[number].key if block is not None else f"sample {key[1] * BLOCK_SAMPLES + number}"
        return printable(f"{self._index.urls[key[0]]}: {which}")

    def prefetch(self, indices: Iterable[int]) -> None:
        self._blocks.prefetch(dict.fromkeys(self._place(index)[0] for index in indices))

    def keep(self, blocks: int) -> None:
        self._blocks.most = blocks

    def fingerprint(self) -> list[str]:
        return [
            data_line(self._index.urls[shard].rpartition("/")[2], samples, digest, size=size)
            for shard, (size, samples, digest, *_) in enumerate(self._index.table.tolist())
        ]

    def _place(self, index: int) -> tuple[Key, int]:
        """The block of a sample, and its number in the block."""
        shard = int(torch.searchsorted(self._ends, index, right=True))
        number = index - int(self._ends[shard] - self._index.samples[shard])
        return (shard, number // BLOCK_SAMPLES), number % BLOCK_SAMPLES

    def _read_block(self, key: Key) -> "_Block":
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
        return _Block(read, found)


@dataclass(frozen=True)
class _Block:
    read: Read
    groups: list[Group]

    def __len__(self) -> int:
        return len(self.groups)
