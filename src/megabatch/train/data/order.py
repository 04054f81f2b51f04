"""Which samples make step t: a function of the seed, t and the global batch size, and of nothing else.

Neither ranks nor workers nor what was read before come into it, so a run may be cut and shared out at will.
"""

import bisect
import hashlib
import itertools
import math
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from .source import Shard

_WINDOW = 65_536


class Order:
    """An endless stream of samples, pass after pass, of which step t is the t-th batch.

    A pass takes the shards in an order of its own, cuts them into windows of neighbours with at least 65,536 samples,
    and shuffles the samples of each window, so that a step reads from a few shards.

    Args:
        resampled: A pass draws as many shards as there are, with replacement, by their weights. All samples of a drawn
            shard follow, so a sample is met as often as its shard's weight says, however large its shard.
        shuffle: Otherwise: one pass in order, the last batch partial, and nothing afterwards.
    """

    def __init__(self, shards: Sequence[Shard], *, seed: int, resampled: bool = False, shuffle: bool = True) -> None:
        self._shards = [shard for shard in shards if shard.stop > shard.start]
        self._seed, self._resampled, self._shuffle = seed, resampled, shuffle
        weights = [shard.weight for shard in self._shards]
        if not weights:
            raise ValueError("Order: shards must hold at least one sample, got none.")
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(f"Order: weights must be finite, not negative, and not all 0, got {sorted(set(weights))}.")
        self._length = sum(shard.stop - shard.start for shard in self._shards)
        self._starts = [0]  # where each pass starts in a resampled stream, as far as known
        self._pass: tuple[int, _Pass] | None = None
        self._window: tuple[tuple[int, int], Tensor] | None = None

    def of_step(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """The number of the pass, and the number of the sample, of each row of the global batch."""
        position, end = step * batch_size, (step + 1) * batch_size
        if not self._shuffle:
            end = min(end, self._length)
        passes: list[Tensor] = []
        samples: list[Tensor] = []
        while position < end:
            number, position_in_pass = self._find(position)
            window, offset = self._pass_of(number).find(position_in_pass)
            taken = self._samples_of(number, window)[offset : offset + end - position]
            passes.append(torch.full_like(taken, number))
            samples.append(taken)
            position += len(taken)
        if not samples:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        return torch.cat(passes), torch.cat(samples)

    def _find(self, position: int) -> tuple[int, int]:
        """The pass of a position in the stream, and the position in the pass."""
        if not self._resampled:
            return divmod(position, self._length)
        while self._starts[-1] <= position:
            self._starts.append(self._starts[-1] + self._pass_of(len(self._starts) - 1).length)
        number = bisect.bisect_right(self._starts, position) - 1
        return number, position - self._starts[number]

    def _pass_of(self, number: int) -> "_Pass":
        if self._pass is None or self._pass[0] != number:
            self._pass = number, _Pass(self._shards_of(number))
        return self._pass[1]

    def _shards_of(self, number: int) -> list[Shard]:
        if not self._shuffle:
            return self._shards
        random = Random(f"{self._seed}/{number}/shards")
        if self._resampled:
            return random.choices(self._shards, [shard.weight for shard in self._shards], k=len(self._shards))
        return random.sample(self._shards, len(self._shards))

    def _samples_of(self, number: int, window: int) -> Tensor:
        if self._window is None or self._window[0] != (number, window):
            shards = self._pass_of(number).windows[window]
            samples = torch.cat([torch.arange(shard.start, shard.stop) for shard in shards])
            if self._shuffle:
                text = f"{self._seed}/{number}/{window}/samples"
                seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
                samples = samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))]
            self._window = (number, window), samples
        return self._window[1]


class _Pass:
    """The windows of one pass, and where each starts."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.windows: list[list[Shard]] = [[]]
        lengths = [0]
        for shard in shards:
            if lengths[-1] >= _WINDOW:
                self.windows.append([])
                lengths.append(0)
            self.windows[-1].append(shard)
            lengths[-1] += shard.stop - shard.start
        if len(lengths) > 1 and lengths[-1] < _WINDOW:
            rest, length = self.windows.pop(), lengths.pop()
            self.windows[-1] += rest
            lengths[-1] += length
        self._starts = [0, *itertools.accumulate(lengths)]
        self.length = self._starts[-1]

    def find(self, position: int) -> tuple[int, int]:
        """The window of a position in this pass, and the position in the window."""
        window = bisect.bisect_right(self._starts, position) - 1
        return window, position - self._starts[window]
