"""Which samples make step t: every sample once per pass, by the seed, the step and the global batch size alone."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabatch.train.data.order import Order, _permuted, _random
from tools.mixing import mixing, ours

COUNTS = torch.tensor([5, 7, 0, 11])
EVEN = torch.full((64,), 1003)  # With blocks of 64: 15 full ones each, and a tail of 43. No number of steps is a pass.


def rows(order: Order, steps: range) -> tuple[Tensor, Tensor]:
    of_steps = [order.of_step(step) for step in steps]
    assert all(passes.dtype == samples.dtype == torch.int64 for passes, samples in of_steps)
    return torch.cat([passes for passes, _ in of_steps]), torch.cat([samples for _, samples in of_steps])


def stream(order: Order, steps: range) -> list[int]:
    return rows(order, steps)[1].tolist()


@pytest.mark.parametrize(
    ("counts", "block", "batch_size"),
    [
        pytest.param(COUNTS, 1, 4, id="blocks of one"),
        pytest.param(COUNTS, 3, 4, id="tails"),
        pytest.param(COUNTS, 7, 6, id="tails alone in some shards"),
        pytest.param(COUNTS, 100, 6, id="block larger than shards"),
        pytest.param(torch.tensor([1]), 1, 3, id="one sample"),
        pytest.param(torch.tensor([0, 3]), 2, 512, id="fewer samples than lanes, many passes in a step"),
        pytest.param(torch.arange(400), 64, 256, id="several windows"),
        pytest.param(torch.arange(400), 64, 257, id="one lane"),
        pytest.param(torch.arange(400), 300, 4096, id="mostly tails"),
        pytest.param(torch.tensor([16_384]), 64, 256, id="one window exactly"),
        pytest.param(torch.tensor([24_576, 0]), 64, 256, id="one and a half windows"),
        pytest.param(torch.full((70_000,), 3), 2, 1000, id="more blocks, and tails, than are sorted"),
    ],
)
def test_every_pass_has_every_sample_once(counts: Tensor, block: int, batch_size: int) -> None:
    length = int(counts.sum())
    order = Order(counts, seed=3, batch_size=batch_size, block=block)
    passes, samples = rows(order, range(-(-3 * length // batch_size)))
    assert len(passes) == len(samples) >= 3 * length
    for number in range(3):
        assert torch.equal(samples[passes == number].sort().values, torch.arange(length))


def test_a_step_never_has_rows_of_a_pass_before_the_last_has_ended() -> None:
    order = Order(EVEN, seed=0, batch_size=256, block=64)
    for step in (0, 249, 250, 251, 500, 501):
        passes = order.of_step(step)[0]
        planned = torch.arange(step * 256, step * 256 + 256) // 64_192
        assert torch.equal(passes.sort().values, planned)


def test_passes_and_seeds_differ_in_order() -> None:
    first, second = (stream(Order(COUNTS, seed=3, batch_size=23), range(step, step + 1)) for step in (0, 1))
    assert first != second
    assert first != stream(Order(COUNTS, seed=4, batch_size=23), range(1))
    assert first != sorted(first)


@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize(("counts", "block", "steps"), [(COUNTS, 3, 30), (EVEN, 64, 80)])
def test_a_step_is_the_same_whatever_was_asked_before(counts: Tensor, block: int, steps: int, resampled: bool) -> None:
    def make() -> Order:
        return Order(counts, seed=3, batch_size=1000, block=block, resampled=resampled)

    one = make()
    forwards = [stream(one, range(step, step + 1)) for step in range(steps)]
    backwards = [stream(one, range(step, step + 1)) for step in reversed(range(steps))]
    fresh = [stream(make(), range(step, step + 1)) for step in range(steps)]
    assert forwards == backwards[::-1] == fresh


def test_the_stream_is_the_same_in_every_version() -> None:
    """A run that was started with another version must go on with the same samples."""
    assert stream(Order(COUNTS, seed=0, batch_size=8, block=3), range(5, 6)) == [12, 7, 20, 2, 9, 17, 21, 4]
    assert stream(Order(COUNTS, seed=0, batch_size=8, block=3, resampled=True), range(5, 6)) == [
        4,
        21,
        20,
        16,
        5,
        4,
        16,
        10,
    ]
    many = Order(torch.full((70_000,), 3), seed=0, batch_size=4, block=3)
    assert stream(many, range(5, 7)) == [190405, 209251, 35879, 181586, 178957, 119369, 143532, 35960]


def test_random_numbers_are_those_of_splitmix64() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert _random(torch.arange(1, 6), 1234567).tolist() == [number % 2**63 for number in published]


@pytest.mark.parametrize("batch_size", [1, 7, 256, 257, 1000, 4096, 65_536])
@pytest.mark.parametrize("block", [1, 64, 100, 20_000])
def test_lanes_divide_a_batch_and_a_window_is_the_smallest_of_eight_batches(batch_size: int, block: int) -> None:
    order = Order(torch.tensor([10**6, 10]), seed=0, batch_size=batch_size, block=block)
    lanes, remainder = divmod(batch_size, order.lane_rows)
    assert remainder == 0
    assert lanes <= 256
    assert not any(batch_size % more == 0 for more in range(lanes + 1, 257))
    smallest = max(16_384, 8 * batch_size)
    assert order.window_blocks % lanes == 0
    assert order.window_blocks * block >= smallest > (order.window_blocks - lanes) * block


def test_a_block_has_no_more_samples_than_the_largest_shard() -> None:
    one, other = (Order(COUNTS, seed=0, batch_size=4, block=block) for block in (11, 1000))
    assert one.window_blocks == other.window_blocks
    assert stream(one, range(12)) == stream(other, range(12))


@pytest.mark.parametrize("block", [16, 64])
def test_a_lane_has_blocks_of_its_own_and_the_same_number_of_rows_in_every_step(block: int) -> None:
    counts = torch.full((64,), 1024)  # four windows without a rest
    order = Order(counts, seed=5, batch_size=512, block=block)
    assert (order.lane_rows, order.window_blocks) == (2, 16_384 // block)
    for window in range(8):
        samples = rows(order, range(32 * window, 32 * window + 32))[1].view(32, 256, 2)
        blocks = [set(lane.flatten().tolist()) for lane in (samples // block).unbind(1)]
        assert all(len(of_lane) == 64 // block for of_lane in blocks)
        assert len(set().union(*blocks)) == order.window_blocks


@pytest.mark.parametrize("ranks", [2, 8, 256])
def test_a_block_of_a_whole_window_is_read_by_one_rank(ranks: int) -> None:
    order = Order(EVEN, seed=5, batch_size=512, block=64)
    passes, samples = rows(order, range(2 * 64_192 // 512))
    rank = torch.arange(512).repeat(len(samples) // 512) * ranks // 512
    shards, in_shard = samples // 1003, samples % 1003
    block = shards * 16 + in_shard // 64
    for number in range(2):
        touched = torch.zeros(64 * 16, ranks, dtype=torch.bool)
        touched[block[passes == number], rank[passes == number]] = True
        read_by = touched.sum(1)
        assert (read_by == 1).sum() >= 3 * order.window_blocks  # of four windows, the last has the tails
        assert read_by.max() <= 2 + 64 // (512 // ranks)


def chi_square(observed: Tensor, freedom: int) -> None:
    """Counts with equal expectations vary as chance would have it. Six standard deviations: one in a billion."""
    expected = observed.sum().item() / observed.numel()
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    assert abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [2**16, 2**16 + 1, 2**18, 300_000])
@pytest.mark.parametrize("key", [0, 1, -(2**63)])
def test_a_permutation_is_as_even_as_a_random_one(size: int, key: int) -> None:
    permuted = _permuted(torch.arange(size), size, key)
    assert torch.equal(permuted.sort().values, torch.arange(size))
    where = torch.arange(size) * 16 // size * 16 + permuted * 16 // size
    chi_square(where.bincount(minlength=256), 15 * 15)
    for distance in (1, 2, 256, 512):
        steps = (permuted[distance:] - permuted[:-distance]) % size
        chi_square((steps * 256 // size).bincount(minlength=256), 255)
    other = (permuted - _permuted(torch.arange(size), size, key + 1)) % size
    chi_square((other * 256 // size).bincount(minlength=256), 255)


@pytest.mark.parametrize("size", [10**9, 2**40 + 1])
def test_some_slots_of_a_huge_permutation_are_as_even_as_random_numbers(size: int) -> None:
    permuted = _permuted(torch.arange(size - 200_000, size), size, 7)
    assert len(permuted.unique()) == len(permuted)
    assert permuted.min() >= 0
    assert permuted.max() < size
    chi_square((permuted * 256 // size).bincount(minlength=256), 255)


@pytest.mark.parametrize("resampled", [False, True])
def test_a_strip_is_shuffled(resampled: bool) -> None:
    counts = torch.full((256,), 1024)
    order = Order(counts, seed=0, batch_size=256, block=64, resampled=resampled)  # a window is 64 steps
    samples = rows(order, range(1024))[1].view(16, 64, 256)
    step, in_block = torch.arange(64)[:, None].expand_as(samples), samples % 64
    chi_square((step * 64 + in_block).flatten().bincount(minlength=4096), 63 * 63)
    follows = (samples[:, 1:] - samples[:, :-1]) % 64
    chi_square(follows.flatten().bincount(minlength=64)[1:], 62)


def test_what_is_left_after_the_last_whole_window_is_mixed_with_it() -> None:
    order = Order(torch.tensor([16_384 + 64]), seed=0, batch_size=256, block=64)  # a window, and a block more
    passes, samples = order.of_step(64)
    assert len((samples[passes == 0] // 64).unique()) > 32


def test_tails_come_in_an_order_of_their_own_in_every_pass() -> None:
    order = Order(torch.tensor([65] + [64] * 1023), seed=0, batch_size=256, block=65)  # all but one are tails
    shards_of_pass = []
    for first_step in (0, 257):
        samples = rows(order, range(first_step, first_step + 60))[1]  # the first window is a quarter of the shards
        shards_of_pass.append(((samples - 1).clamp(min=0) // 64).unique())
        chi_square((shards_of_pass[-1] * 8 // 1024).bincount(minlength=8), 7)
    met_again = torch.isin(*shards_of_pass).sum()
    assert abs(met_again - 64) < 6 * math.sqrt(64)


def test_resampling_meets_samples_as_often_as_their_weights_say_whatever_the_size_of_their_shard() -> None:
    counts = torch.tensor([10, 31, 1, 9, 0, 11])
    weights = torch.tensor([1.0, 2.0, 4.0, 0.0, 7.0, 1.0])
    order = Order(counts, seed=0, batch_size=60_000, block=4, weights=weights, resampled=True)
    met = rows(order, range(10))[1].bincount(minlength=62)
    share = weights.double().repeat_interleave(counts) / (weights * counts).sum()
    expected = share * 600_000
    # A draw brings a sample at most four times, in the tail of one: the variance is at most four times the mean.
    assert ((met - expected).abs() <= 6 * (4 * expected).sqrt()).all()


def test_a_resampled_pass_is_as_many_samples_as_there_are_and_may_have_one_twice() -> None:
    passes, samples = rows(Order(torch.full((50,), 2), seed=0, batch_size=300, block=2, resampled=True), range(1))
    assert passes.bincount().tolist() == [100, 100, 100]
    assert samples[passes == 0].bincount().max() > 1


def test_without_shuffling_there_is_one_pass_in_order_and_then_nothing() -> None:
    order = Order(COUNTS, seed=0, batch_size=10, block=3, shuffle=False)
    passes, samples = rows(order, range(4))
    assert samples.tolist() == list(range(23))
    assert passes.tolist() == [0] * 23
    assert [len(order.of_step(step)[1]) for step in range(4)] == [10, 10, 3, 0]


_HUGE = """
import resource, torch
from megabatch.train.data.order import Order

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

order = Order(torch.tensor([40_000]), seed=0, batch_size=4096, block=64)
order.of_step(0)
before = peak()
counts = 10_000 + torch.arange(200_000) % 100
for resampled in (False, True):
    order = Order(counts, seed=0, batch_size=4096, block=64, resampled=resampled)
    last = int(counts.sum()) // 4096
    for step in (0, last // 2, last, 100 * last):
        assert len(order.of_step(step)[1].unique()) >= 0.99 * 4096
print(peak() - before)
"""


def test_two_billion_samples_in_200_000_shards_take_little_memory() -> None:
    run = subprocess.run([sys.executable, "-c", _HUGE], capture_output=True, text=True, timeout=600, check=True)
    assert int(run.stdout) < 100e6


@pytest.mark.parametrize(
    ("counts", "weights", "message"),
    [
        ([], None, "counts must be at least 0, and not all 0, got none"),
        ([0, 0], None, "counts .* got 0 to 0"),
        ([3, -1], None, "counts .* got -1 to 3"),
        ([4], [0.0], "weights must be finite, not negative, and not all 0 .* got 0.0 to 0.0"),
        ([4, 0], [0.0, 1.0], "shards without samples do not count"),
        ([4, 1], [1.0, -2.0], "weights .* got -2.0 to 1.0"),
        ([4], [float("nan")], "weights must be finite"),
        ([4], [float("inf")], "weights must be finite"),
        ([4, 1], [1.0], "weights must be one per shard, got 1 for 2"),
    ],
)
def test_what_nothing_can_be_drawn_from_is_refused(
    counts: list[int], weights: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"Order: .*{message}"):
        Order(
            torch.tensor(counts, dtype=torch.int64),
            seed=0,
            batch_size=2,
            weights=None if weights is None else torch.tensor(weights),
        )


def test_the_page_says_how_well_batches_mix() -> None:
    page = " ".join((Path(__file__).parent.parent / "docs" / "data.md").read_text().replace(" %", "%").split())
    shards, meeting = mixing(ours(4096))
    assert f"a batch of 4,096 has samples of {shards:.0f} shards and {meeting:.1%} of neighbouring samples" in page
