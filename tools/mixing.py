"""`python -m tools.mixing`: how well batches mix the samples of 1,000 shards of 1,000, beside WebDataset's buffer.

Of one pass: the mean number of shards in a batch, and the share of neighbours in a shard that meet in a batch.
"""

import random
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megabatch.train.data.index import BLOCK_SAMPLES
from megabatch.train.data.order import Order

SHARDS, SIZE = 1000, 1000
LENGTH = SHARDS * SIZE
WORKERS, BUFFER, INITIAL = 4, 5000, 1000  # OpenCLIP's


def mixing(batches: Iterable[Tensor]) -> tuple[float, float]:
    """Shards per batch, and the share of neighbours in one batch. `batches` have numbers of samples."""
    batch_of, shards = torch.full((LENGTH,), -1), []
    for number, samples in enumerate(batches):
        batch_of[samples] = number
        shards.append(len((samples // SIZE).unique()))
    one, following = batch_of.view(SHARDS, SIZE)[:, :-1], batch_of.view(SHARDS, SIZE)[:, 1:]
    both = (one >= 0) & (following >= 0)
    return sum(shards) / len(shards), (one == following)[both].double().mean().item()


def ours(batch_size: int) -> Iterator[Tensor]:
    order = Order(torch.full((SHARDS,), SIZE), seed=0, batch_size=batch_size, block=BLOCK_SAMPLES)
    return (order.of_step(step)[1] for step in range(LENGTH // batch_size))


def webdataset(batch_size: int) -> Iterator[Tensor]:
    """On one rank: each worker makes whole batches of its shards, and drops what is left over."""
    from webdataset.filters import shuffle

    order = random.Random(0).sample(range(SHARDS), SHARDS)
    for worker in range(WORKERS):
        samples = (shard * SIZE + number for shard in order[worker::WORKERS] for number in range(SIZE))
        stream = torch.tensor(list(shuffle(BUFFER, initial=INITIAL, seed=worker)(samples)))
        yield from stream[: len(stream) // batch_size * batch_size].split(batch_size)


def perfect(batch_size: int) -> Iterator[Tensor]:
    permuted = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    return iter(permuted[: LENGTH // batch_size * batch_size].split(batch_size))


if __name__ == "__main__":
    for rows in (256, 4096):
        for make in (ours, webdataset, perfect):
            in_batch, meeting = mixing(make(rows))
            print(f"N={rows:<6} {make.__name__:12} {in_batch:7.1f} shards per batch, {meeting:8.3%} of neighbours meet")
