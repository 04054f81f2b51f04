"""Which samples make step t: a function of the seed, t and the global batch size, and of nothing else.

Neither ranks nor workers nor what was read before come into it, so a run may be cut and shared out at will. Any step is
found from its number, and nothing is kept per sample.

A shard is read in blocks of neighbouring samples. What is left at its end, less than a block, is its tail.
"""

import hashlib

import torch
from torch import Tensor

_MAX_LANES = 256
_MIN_WINDOW = 16_384  # samples
_MAX_SORTED = 2**16  # The fewer numbers, the more a Feistel network's permutations have in common.
_ROUNDS = 8


class Order:
    """An endless stream of samples, pass after pass, of which step t is the t-th batch.

    A pass has every sample once: the blocks of all shards in a random order, then their tails in a random order. It is
    cut into windows of eight batches or more, and a window into one strip per lane: whole blocks, except in the last
    windows of a pass. A strip is shuffled, and dealt out to the rows of its lane, of which each step has `lane_rows`.
    So a batch mixes blocks from everywhere, and a rank that has the same lanes in every step shares none with others.

    Args:
        counts: Number of samples of each shard. Samples are numbered through all shards.
        block: Samples in a block.
        weights: How often to draw a sample of each shard, relative to others, if `resampled`. None: all equally often.
        resampled: Blocks and tails are drawn with replacement, by their number of samples and the weight of these. A
            tail is repeated to the length of a block. A pass is then as many samples as there are, whichever they are.
        shuffle: Otherwise: one pass in order, rows too, the last batch partial, and nothing afterwards.

    Attributes:
        lane_rows: Rows of each lane in a step. A step has all rows of the first lane, then those of the next.
        window_blocks: Blocks in a window. The last windows of a pass may have more: tails are short, and the very last
            has up to half as many samples again.
    """

    def __init__(
        self,
        counts: Tensor,
        *,
        seed: int,
        batch_size: int,
        block: int = 1,
        weights: Tensor | None = None,
        resampled: bool = False,
        shuffle: bool = True,
    ) -> None:
        if not counts.any() or counts.min() < 0:
            raise ValueError(f"Order: counts must be at least 0, and not all 0, got {_range(counts)}.")
        self._counts, self._starts = counts, counts.cumsum(0) - counts
        self._share_ends = _shares(counts, weights).cumsum(0)
        self._seed, self.batch_size, self._resampled, self._shuffle = seed, batch_size, resampled, shuffle
        self._length = int(counts.sum())
        self._block = block = min(block, int(counts.max()))
        self._full_block_ends = (counts // block).cumsum(0)
        self._full_blocks = int(self._full_block_ends[-1])
        self._lanes = max(lanes for lanes in range(1, _MAX_LANES + 1) if batch_size % lanes == 0)
        self.lane_rows = batch_size // self._lanes
        blocks_of_lane = -(-max(_MIN_WINDOW, 8 * batch_size) // (self._lanes * block))
        self.window_blocks = self._lanes * blocks_of_lane
        self._window_length = self.window_blocks * block
        self._window = 0, torch.empty(0, dtype=torch.int64)  # where the last one starts, and its samples

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """The number of the pass, and the number of the sample, of each row of the global batch."""
        start, stop = step * self.batch_size, (step + 1) * self.batch_size
        if not self._shuffle:
            samples = torch.arange(start, max(start, min(stop, self._length)))
            return torch.zeros_like(samples), samples
        parts: list[Tensor] = []
        position = start
        while position < stop:
            window, samples = self._window
            if not window <= position < window + len(samples):
                window, samples = self._window = self._window_at(position)
            parts.append(samples[position - window : stop - window])
            position += len(parts[-1])
        rows = torch.stack([torch.arange(start, stop) // self._length, torch.cat(parts)])
        passes, samples = rows.view(2, self.lane_rows, self._lanes).transpose(1, 2).flatten(1)
        return passes, samples

    def _window_at(self, position: int) -> tuple[int, Tensor]:
        """Where in the stream the window of a position starts, and the samples of the window."""
        if self._resampled:
            start = position // self._window_length * self._window_length
            strips = self._drawn(start)
        else:
            number, position_in_pass = divmod(position, self._length)
            last = max(1, round(self._length / self._window_length)) - 1
            window = min(position_in_pass // self._window_length, last)
            first = window * self._window_length
            strips = self._of_pass(number, first, self._length if window == last else first + self._window_length)
            start = number * self._length + first
        # Position p belongs to lane p % lanes. Sorted by lane, and at random within each, positions meet the strips.
        positions = torch.arange(start, start + len(strips))
        keys = (positions % self._lanes << 55) | (_random(positions, _key(self._seed, "positions")) >> 8)
        samples = torch.empty_like(strips)
        samples[keys.argsort(stable=True)] = strips
        return start, samples

    def _of_pass(self, number: int, start: int, stop: int) -> Tensor:
        """The samples from `start` up to `stop` of a pass, before its windows are shuffled."""
        full = self._full_blocks * self._block
        slots = torch.arange(min(start, full) // self._block, min(stop, full) // self._block)
        blocks = _permuted(slots, self._full_blocks, _key(self._seed, "blocks", number))
        shards = torch.searchsorted(self._full_block_ends, blocks, right=True)
        blocks_in_shard = blocks - self._full_block_ends[shards] + self._counts[shards] // self._block
        samples = self._starts[shards] + blocks_in_shard * self._block
        samples = (samples[:, None] + torch.arange(self._block)).flatten()
        if stop <= full:
            return samples
        ends, shifts = self._tails_of(number)
        positions = torch.arange(max(start, full), stop) - full
        return torch.cat([samples, positions + shifts[torch.searchsorted(ends, positions, right=True)]])

    def _tails_of(self, number: int) -> tuple[Tensor, Tensor]:
        """Where each tail ends among the tails of a pass, and how far ahead of that its samples' numbers are."""
        shards = (self._counts % self._block).nonzero()[:, 0]
        shards = shards[_permuted(torch.arange(len(shards)), len(shards), _key(self._seed, "tails", number))]
        ends = (self._counts[shards] % self._block).cumsum(0)
        return ends, self._starts[shards] + self._counts[shards] - ends

    def _drawn(self, start: int) -> Tensor:
        """The samples of a resampled window, before it is shuffled."""
        slots = torch.arange(start // self._block, (start + self._window_length) // self._block)
        share = (_random(slots, _key(self._seed, "shards")) >> 10).double() / 2**53
        shards = torch.searchsorted(self._share_ends, share * self._share_ends[-1], right=True)
        drawn = _random(slots, _key(self._seed, "samples")) % self._counts[shards]
        in_block = drawn % self._block
        first = drawn - in_block
        sizes = (self._counts[shards] - first).clamp(max=self._block)
        # Starting from any sample, so that none of a block that is repeated is met more often than others.
        turns = (in_block[:, None] + torch.arange(self._block)) % sizes[:, None]
        return ((self._starts[shards] + first)[:, None] + turns).flatten()


def _shares(counts: Tensor, weights: Tensor | None) -> Tensor:
    weights = torch.ones(len(counts), dtype=torch.float64) if weights is None else weights.double()
    if len(weights) != len(counts):
        raise ValueError(f"Order: weights must be one per shard, got {len(weights)} for {len(counts)}.")
    shares = weights * counts
    if not weights.min() >= 0 or not 0 < shares.sum() < torch.inf:
        raise ValueError(
            "Order: weights must be finite, not negative, and not all 0 (shards without samples do not count), "
            f"got {_range(weights)}."
        )
    return shares


def _range(values: Tensor) -> str:
    return f"{values.min().item()} to {values.max().item()}" if len(values) else "none"


def _permuted(slots: Tensor, size: int, key: int) -> Tensor:
    """What a permutation of the numbers below `size`, drawn by the key, has in these slots."""
    if size <= _MAX_SORTED:
        return _random(torch.arange(size), key).argsort(stable=True)[slots]
    # A Feistel network permutes the numbers of 2 * half bits. Those it sends outside go through it again.
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    permuted, outside = slots.clone(), torch.arange(len(slots))
    while len(outside):
        left, right = permuted[outside] >> half, permuted[outside] & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_random((number << half) | right, key) & mask)
        permuted[outside] = (left << half) | right
        outside = outside[permuted[outside] >= size]
    return permuted


def _random(positions: Tensor, key: int) -> Tensor:
    """What SplitMix64 with this seed gives at these positions, without its highest bit."""
    bits = positions * (0x9E3779B97F4A7C15 - 2**64) + key  # Products wrap around, as they do there.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        shifted = (bits >> shift) & (2 ** (64 - shift) - 1)  # `>>` alone repeats the sign.
        bits = (bits ^ shifted) * factor
    return bits & (2**63 - 1)


def _key(*parts: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
