"""What `megabatch plan` predicts for our own loss is what a step of it takes, to the bytes that matter."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import megabatch
from megabatch.backends import workspace
from megabatch.backends.eager import Eager
from megabatch.bench.measure import PeakMemory
from megabatch.plan.our_loss import OurLoss

from .ranks import Pool
from .test_ranks_traffic import metered

MIB = 2**20


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes of tensors that were there at a time, beyond those before, as torch's allocator reports them."""
    workspace.empty_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "SMALLEST_HUGE", math.inf)  # huge pages are not of torch's allocator
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes.sort(key=itemgetter(0))
    return max(accumulate(change for _, change in changes))


def features(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, width), dim=1).to(dtype).requires_grad_()


def measured(rows: int, width: int, dtype: torch.dtype, **options: Any) -> int:
    """Beyond the features, of a step whose gradients stay."""
    image, text, scale = features(rows, width, dtype), features(rows, width, dtype), torch.tensor(10.0)
    scale.requires_grad_()
    return peak_bytes(lambda: megabatch.clip_loss(image, text, scale, normalize=False, **options).backward())


def predicted(rows: int, width: int, dtype: torch.dtype, ranks: int = 1, **options: Any) -> OurLoss:
    exchange, budget = options.get("exchange", "ring"), options.get("memory_budget")
    return OurLoss(rows, width, ranks, exchange, dtype.itemsize, 4, Eager, budget, threads=1)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def assert_near(parts: dict[str, float], took: int, in_flight: float = 0.0) -> None:
    """Within 5 % of all, and within 10 % of what is neither features nor gradients. What is `in_flight`, a thread of
    gloo may let go of a little later."""
    whole, rest = sum(parts.values()), took - parts["gradients"]
    assert 0.95 * took - in_flight <= whole <= 1.05 * took, (parts, took)
    assert 0.9 * rest - in_flight <= whole - parts["gradients"] <= 1.1 * rest, (parts, took)


def test_the_meter_sees_what_is_there_at_a_time() -> None:
    def step() -> None:
        one, two = torch.zeros(MIB), torch.zeros(2 * MIB)
        del one, two
        torch.zeros(2 * MIB)

    assert peak_bytes(step) == 12 * MIB


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "options"),
    [
        (2048, 64, torch.float32, {}),
        (3000, 64, torch.float32, {}),
        (2048, 512, torch.float32, {}),
        (2000, 100, torch.bfloat16, {}),
        (2048, 512, torch.bfloat16, {}),
        (2048, 256, torch.float32, {"memory_budget": 24 * MIB}),  # some logits are kept
        (2048, 256, torch.bfloat16, {"memory_budget": 64 * MIB}),  # all
    ],
)
def test_predicted_bytes_are_those_of_a_step(
    rows: int, width: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    with one_thread():
        took = measured(rows, width, dtype, **options)
    assert_near(predicted(rows, width, dtype, **options).parts, took)


ON_RANKS = [
    (1024, 64, torch.float32, {}),
    (768, 256, torch.bfloat16, {}),
    (1024, 128, torch.float32, {"memory_budget": 8 * MIB}),
]


def on_a_rank(rank: int, group: dist.ProcessGroup, exchange: str) -> list[int]:
    return [measured(*case, group=group, exchange=exchange, **options) for *case, options in ON_RANKS]


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_predicted_bytes_are_those_of_a_step_over_ranks(pool: Pool, ranks: int, exchange: str) -> None:
    for took in pool.run(ranks, on_a_rank, exchange):
        for (*case, options), bytes_ in zip(ON_RANKS, took, strict=True):
            rows, width, _ = case
            gradients = ranks * rows * width * 4 if exchange == "gather" else 0  # of all columns, in one message
            assert_near(predicted(*case, ranks, exchange=exchange, **options).parts, bytes_, gradients)


def test_predicted_bytes_are_those_that_a_process_takes() -> None:
    """Resident memory, within 10 %: pages are whole, and libraries have buffers of their own."""
    rows, width = 2048, 512
    image, text = (features(rows, width, torch.float32) for _ in range(2))
    scale = torch.tensor(10.0, requires_grad=True)
    with one_thread():
        for _ in range(2):  # whatever a library keeps, it has after the first
            image.grad = text.grad = None
            workspace.empty_cache()
            with PeakMemory(torch.device("cpu")) as meter:
                megabatch.clip_loss(image, text, scale, normalize=False).backward()
    parts = predicted(rows, width, torch.float32).parts
    assert sum(parts.values()) == pytest.approx(meter.bytes, rel=0.1)


def sent_by_a_rank(rank: int, group: dist.ProcessGroup, rows: int, width: int, exchange: str) -> int:
    image, text = (features(rows, width, torch.bfloat16) for _ in range(2))
    with metered(group) as meter:
        megabatch.clip_loss(image, text, 10.0, normalize=False, group=group, exchange=exchange).backward()
    return meter.sent


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_predicted_bytes_on_the_wire_are_those_that_a_rank_sends(pool: Pool, exchange: str) -> None:
    """Beside the handshakes."""
    rows, width = 256, 512
    wire = predicted(rows, width, torch.bfloat16, 3, exchange=exchange).wire
    for sent in pool.run(3, sent_by_a_rank, rows, width, exchange):
        assert wire == pytest.approx(sent, rel=0.02)
