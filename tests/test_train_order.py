"""Which samples make step t: every sample once per pass, by the seed and the step alone."""

from collections import Counter

import pytest
import torch

from megabatch.train.data import order as order_module
from megabatch.train.data.order import Order
from megabatch.train.data.source import Shard

SHARDS = [Shard(0, 5), Shard(5, 12), Shard(12, 12), Shard(12, 23)]


def rows(order: Order, steps: range, batch_size: int) -> list[tuple[int, int]]:
    stream = []
    for step in steps:
        passes, samples = order.of_step(step, batch_size)
        assert passes.dtype == samples.dtype == torch.int64
        stream += list(zip(passes.tolist(), samples.tolist(), strict=True))
    return stream


def test_every_pass_has_every_sample_once() -> None:
    stream = rows(Order(SHARDS, seed=3), range(23), 4)
    assert [number for number, _ in stream] == [number for number in range(4) for _ in range(23)]
    for number in range(4):
        assert sorted(sample for where, sample in stream if where == number) == list(range(23))


def test_passes_and_seeds_differ_in_order() -> None:
    stream = [sample for _, sample in rows(Order(SHARDS, seed=3), range(2), 23)]
    assert stream[:23] != stream[23:]
    assert stream != [sample for _, sample in rows(Order(SHARDS, seed=4), range(2), 23)]
    assert stream[:23] != sorted(stream[:23])


@pytest.mark.parametrize("resampled", [False, True])
def test_the_stream_does_not_depend_on_how_it_is_cut(resampled: bool) -> None:
    whole = rows(Order(SHARDS, seed=3, resampled=resampled), range(1), 840)
    for batch_size in (1, 7, 24, 105, 420):
        assert rows(Order(SHARDS, seed=3, resampled=resampled), range(840 // batch_size), batch_size) == whole


@pytest.mark.parametrize("resampled", [False, True])
def test_a_step_is_the_same_whatever_was_asked_before(resampled: bool) -> None:
    one = Order(SHARDS, seed=3, resampled=resampled)
    forwards = [rows(one, range(step, step + 1), 10) for step in range(30)]
    backwards = [rows(one, range(step, step + 1), 10) for step in reversed(range(30))]
    fresh = [rows(Order(SHARDS, seed=3, resampled=resampled), range(step, step + 1), 10) for step in range(30)]
    assert forwards == backwards[::-1] == fresh


def test_the_stream_is_the_same_in_every_version() -> None:
    """A run that was started with another version must go on with the same samples."""
    assert Order(SHARDS, seed=0).of_step(5, 8)[1].tolist() == [1, 18, 5, 11, 0, 22, 15, 11]
    assert Order(SHARDS, seed=0, resampled=True).of_step(5, 8)[1].tolist() == [12, 4, 13, 22, 1, 18, 20, 2]


def test_samples_are_shuffled_in_windows_of_neighbouring_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "_WINDOW", 20)
    shards = [Shard(start, start + 10) for start in range(0, 110, 10)]
    stream = [sample for _, sample in rows(Order(shards, seed=1), range(1), 110)]
    assert len(stream) == 110
    assert sorted(stream) == list(range(110))
    windows = [sorted({sample // 10 for sample in stream[start : start + 20]}) for start in range(0, 80, 20)]
    assert all(len(shards_of_window) == 2 for shards_of_window in windows)
    assert windows != [[0, 1], [2, 3], [4, 5], [6, 7]]
    first = [sample // 10 for sample in stream[:20]]
    assert first != sorted(first)  # the shards of a window are mixed
    assert len({sample // 10 for sample in stream[80:100]}) == 3  # what is left over joins the window before


def test_one_shard_is_shuffled_whole() -> None:
    size = 3 * 65_536
    samples = Order([Shard(0, size)], seed=0).of_step(0, 65_536)[1]
    assert samples.max() > 0.99 * size
    assert samples.min() < 0.01 * size
    assert abs(samples.double().mean() / size - 0.5) < 0.01


def test_a_batch_may_be_larger_than_the_set() -> None:
    passes, samples = Order([Shard(0, 10)], seed=0).of_step(2, 1000)
    assert passes.tolist() == [number for number in range(200, 300) for _ in range(10)]
    assert Counter(samples.tolist()) == dict.fromkeys(range(10), 100)


def test_resampling_meets_samples_as_often_as_their_weights_say_whatever_the_size_of_their_shard() -> None:
    shards = [Shard(0, 10, 1.0), Shard(10, 40, 2.0), Shard(40, 41, 4.0), Shard(41, 50, 0.0), Shard(50, 60, 1.0)]
    met = Counter(sample for _, sample in rows(Order(shards, seed=0, resampled=True), range(1), 60_000))
    rate = [met[sample] for sample in range(60)]
    unit = sum(rate[:10]) / 10
    assert sum(rate[50:]) / 10 == pytest.approx(unit, rel=0.1)
    assert sum(rate[10:40]) / 30 == pytest.approx(2 * unit, rel=0.1)
    assert rate[40] == pytest.approx(4 * unit, rel=0.1)
    assert sum(rate[41:50]) == 0


def test_a_resampled_pass_draws_as_many_shards_as_there_are_and_may_draw_one_twice() -> None:
    shards = [Shard(2 * start, 2 * start + 2) for start in range(50)]
    stream = rows(Order(shards, seed=0, resampled=True), range(1), 300)
    assert [number for number, _ in stream] == [number for number in range(3) for _ in range(100)]
    first = Counter(sample for number, sample in stream if number == 0)
    assert max(first.values()) > 1


def test_without_shuffling_there_is_one_pass_in_order_and_then_nothing() -> None:
    order = Order(SHARDS, seed=0, shuffle=False)
    assert rows(order, range(4), 10) == [(0, sample) for sample in range(23)]
    assert len(order.of_step(2, 10)[1]) == 3
    assert len(order.of_step(3, 10)[1]) == 0
    assert order.of_step(3, 10)[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "at least one sample"),
        ([Shard(4, 4)], "at least one sample"),
        ([Shard(0, 4, 0.0)], r"not all 0, got \[0.0\]"),
        ([Shard(0, 4, 1.0), Shard(4, 5, -2.0)], r"not negative, and not all 0, got \[-2.0, 1.0\]"),
        ([Shard(0, 4, float("nan"))], "finite"),
    ],
)
def test_shards_that_nothing_can_be_drawn_from_are_refused(shards: list[Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order(shards, seed=0)
