"""What travels between ranks is counted: one pass forward and one back, two blocks at a time, under the arithmetic."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megabatch
from megabatch.backends.eager import Eager

from .ranks import Pool

ROWS, WIDTH = 16, 4096  # a row is wide, so that vectors are small beside it
LARGE = ROWS * WIDTH  # bytes: above all vectors, below any block


class Meter:
    """Counts what this process sends, at the process group, which all of torch.distributed goes through."""

    def __init__(self) -> None:
        self.sent = 0
        self.open: list[tuple[str, int]] = []  # messages between two ranks that are not waited for yet
        self.most_open: dict[str, int] = {"send": 0, "recv": 0}  # bytes of large ones at a time

    def is_receiving(self, least: int, most: int) -> bool:
        return any(kind == "recv" and least <= size <= most for kind, size in self.open)

    def begin(self, kind: str, size: int, work: Any) -> "MeteredWork":
        self.sent += size if kind == "send" else 0
        message = (kind, size)
        self.open.append(message)
        large = sum(size for other, size in self.open if other == kind and size >= LARGE)
        self.most_open[kind] = max(self.most_open[kind], large)
        return MeteredWork(work, lambda: self.open.remove(message))


class MeteredWork:
    """A handle that tells when it is waited for."""

    def __init__(self, work: Any, done: Callable[[], None]) -> None:
        self._work, self._done, self._waited = work, done, False

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        if not self._waited:
            self._waited = True
            self._done()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _size(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(_size(tensor) for tensor in tensors)


# What a rank of n sends in each collective, from its arguments.
COLLECTIVES: dict[str, Callable[..., int]] = {
    "allgather": lambda n, outputs, inputs, *_: (n - 1) * _size(inputs),
    "_allgather_base": lambda n, output, input, *_: (n - 1) * _size(input),
    "all_gather_single": lambda n, output, input, *_: (n - 1) * _size(input),
    "all_to_all_single": lambda n, output, input, *_: (n - 1) * _size(input) // n,
    "alltoall_base": lambda n, output, input, *_: (n - 1) * _size(input) // n,
    "alltoall": lambda n, outputs, inputs, *_: _size(inputs),
    "allreduce": lambda n, tensors, *_: 2 * (n - 1) * _size(tensors) // n,
    "broadcast": lambda n, tensors, *_: (n - 1) * _size(tensors),
    "_reduce_scatter_base": lambda n, output, input, *_: _size(input),
    "reduce_scatter": lambda n, outputs, inputs, *_: _size(inputs),
}
UNMETERED = [
    *("all_gather_single_coalesced", "allgather_coalesced", "gather"),
    *("allgather_into_tensor_coalesced", "allreduce_coalesced", "reduce", "reduce_scatter_single", "scatter"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "recv_anysource"),
]


@contextmanager
def metered(group: Any, owner: Any = dist.ProcessGroup) -> Iterator[Meter]:
    meter, n = Meter(), dist.get_world_size(group)
    names = ("send", "recv", *COLLECTIVES, *UNMETERED)  # of all versions of torch
    real = {name: getattr(owner, name) for name in names if hasattr(owner, name)}

    def message(kind: str) -> Callable[..., Any]:
        return lambda self, tensors, *args: meter.begin(kind, _size(tensors), real[kind](self, tensors, *args))

    def collective(name: str) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            meter.sent += COLLECTIVES[name](n, *args)
            return real[name](self, *args)

        return run

    def unmetered(name: str) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            raise NotImplementedError(f"{name} is sent past the meter")

        return run

    kept = {name: vars(owner).get(name) for name in real}  # a method that getattr has unbound would stay unbound
    for name in real:
        make = message if name in ("send", "recv") else collective if name in COLLECTIVES else unmetered
        setattr(owner, name, make(name))
    try:
        yield meter
    finally:
        for name, method in kept.items():
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)


# ---- the meter itself


def known_messages(rank: int, group: Any) -> list[Any]:
    n = dist.get_world_size(group)
    found: list[Any] = []
    block, coming = torch.zeros(LARGE, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)
    with metered(group) as meter:
        after, before = (rank + 1) % n, (rank - 1) % n
        operations = [dist.P2POp(dist.isend, block, after, group), dist.P2POp(dist.irecv, coming, before, group)]
        works = dist.batch_isend_irecv(operations)
        found += [meter.sent, meter.is_receiving(LARGE, LARGE), meter.is_receiving(1, LARGE - 1)]
        for work in works:
            work.wait()
        found += [meter.is_receiving(LARGE, LARGE), dict(meter.most_open)]
        mine = torch.zeros(10, dtype=torch.float64)
        dist.all_gather([torch.zeros_like(mine) for _ in range(n)], mine, group=group)
        found.append(meter.sent)
    dist.all_gather([torch.zeros_like(mine) for _ in range(n)], mine, group=group)
    return [*found, meter.sent]


def test_the_meter_counts_what_is_sent(pool: Pool) -> None:
    for answer in pool.run(3, known_messages):
        sent, receiving, small, still, most, with_gather, after = answer
        assert (sent, receiving, small, still) == (LARGE, True, False, False)
        assert most == {"send": LARGE, "recv": LARGE}
        assert with_gather == LARGE + 2 * 80
        assert after == with_gather


# ---- what a step sends


INPUTS = {
    "clip_loss": ("image_features", "text_features"),
    "siglip_loss": ("image_features", "text_features"),
    "info_nce_loss": ("query", "key"),
    "nt_xent_loss": ("view1", "view2"),
    "supcon_loss": ("features",),
}


def traffic(
    rank: int, group: Any, loss: str, dtype: torch.dtype, frozen: tuple[str, ...] = (), **options: Any
) -> dict[str, Any]:
    """Bytes that this rank sends in the forward and the backward of a step, and the most that are on their way."""
    generator = torch.Generator().manual_seed(rank)
    inputs: dict[str, Any] = {
        name: torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_(name not in frozen)
        for name in INPUTS[loss]
    }
    if loss == "supcon_loss":
        inputs["labels"] = torch.arange(ROWS) // 2
    scale = torch.tensor(5.0, requires_grad=True)
    options = {"exchange": "ring", "normalize": True, **options}
    with metered(group) as meter:
        value = getattr(megabatch, loss)(**inputs, logit_scale=scale, group=group, **options)
        forward, most_forward, meter.most_open = meter.sent, meter.most_open, {"send": 0, "recv": 0}
        value.backward()
    assert not meter.open, "every handle is waited for"
    found = {"forward": forward, "backward": meter.sent - forward}
    return found | {"most_forward": most_forward, "most_backward": meter.most_open}


def traffic_of(rank: int, group: Any, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [traffic(rank, group, **call) for call in calls]


def vectors(num_ranks: int) -> int:
    """Bytes for a few numbers per row of the batch, and for handshakes: less than any block."""
    bound = 128 * num_ranks * ROWS + 48 * 1024
    assert bound < LARGE
    return bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_step_sends_each_block_to_the_other_ranks_once(pool: Pool, num_ranks: int, dtype: torch.dtype) -> None:
    """n - 1 feature blocks in their own dtype forward, as many again and n - 1 float32 gradient blocks backward."""
    losses = ("clip_loss", "siglip_loss", "info_nce_loss")
    calls = [{"loss": loss, "dtype": dtype} for loss in losses]
    calls.append({"loss": "clip_loss", "dtype": dtype, "return_stats": False, "overlap": False})
    block, gradient = ROWS * WIDTH * dtype.itemsize, ROWS * WIDTH * 4
    for answers in pool.run(num_ranks, traffic_of, calls):
        for call, found in zip(calls, answers, strict=True):
            least, most = (num_ranks - 1) * block, (num_ranks - 1) * block + vectors(num_ranks)
            assert least <= found["forward"] <= most, call
            assert least <= found["backward"] <= most + (num_ranks - 1) * gradient, call


@pytest.mark.parametrize("loss", ["nt_xent_loss", "supcon_loss"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_symmetric_losses_need_half_a_pass(pool: Pool, num_ranks: int, loss: str) -> None:
    calls = [{"loss": loss, "dtype": dtype} for dtype in (torch.float32, torch.bfloat16)]
    blocks, sides = num_ranks // 2, len(INPUTS[loss])
    for answers in pool.run(num_ranks, traffic_of, calls):
        for call, found in zip(calls, answers, strict=True):
            block, gradient = sides * ROWS * WIDTH * call["dtype"].itemsize, sides * ROWS * WIDTH * 4
            most = blocks * block + vectors(num_ranks) * sides
            assert found["forward"] <= most, call
            assert found["backward"] <= most + blocks * gradient, call


@pytest.mark.parametrize(
    ("loss", "frozen"),
    [
        ("clip_loss", ("text_features",)),
        ("siglip_loss", ("text_features",)),
        ("info_nce_loss", ("key",)),
        ("clip_loss", ("image_features", "text_features")),
    ],
    ids=str,
)
def test_frozen_columns_send_no_gradients(pool: Pool, loss: str, frozen: tuple[str, ...]) -> None:
    call = {"loss": loss, "dtype": torch.float32, "frozen": frozen}
    block = ROWS * WIDTH * 4
    for num_ranks in (2, 4):
        for (found,) in pool.run(num_ranks, traffic_of, [call]):
            for phase in ("forward", "backward"):
                assert found[phase] <= (num_ranks - 1) * block + vectors(num_ranks), phase


def search_traffic(rank: int, group: Any) -> list[int]:
    query, key = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    found = []
    with metered(group) as meter:
        megabatch.retrieval_ranks(query, key, group=group, exchange="ring")
        found.append(meter.sent)
        megabatch.similarity_topk(query, key, 3, group=group, exchange="ring")
        found.append(meter.sent - found[0])
    return found


def test_searches_send_each_block_of_keys_to_the_other_ranks_once(pool: Pool) -> None:
    for answers in pool.run(4, search_traffic):
        for sent in answers:
            assert 3 * ROWS * WIDTH * 4 <= sent <= 3 * ROWS * WIDTH * 4 + vectors(4)


@pytest.mark.parametrize("loss", ["clip_loss", "info_nce_loss", "nt_xent_loss"])
def test_at_most_two_blocks_are_in_flight(pool: Pool, loss: str) -> None:
    """Whatever the number of ranks: one that leaves and one that comes; in the backward one of gradients each, too."""
    calls = [{"loss": loss, "dtype": torch.float32, "overlap": overlap} for overlap in (True, False)]
    block = ROWS * WIDTH * 4 * (2 if loss == "nt_xent_loss" else 1)
    for answers in pool.run(4, traffic_of, calls):
        for found in answers:
            for kind in ("send", "recv"):
                assert found["most_forward"][kind] <= block + vectors(4), kind
                assert found["most_backward"][kind] <= 2 * block + vectors(4), kind


def test_auto_gathers_while_that_fits_the_budget(pool: Pool) -> None:
    block = ROWS * WIDTH * 4
    calls = [
        {"loss": "clip_loss", "dtype": torch.float32, "exchange": "auto", "memory_budget": budget}
        for budget in (None, "1MiB")
    ]
    for gathered, passed_on in pool.run(4, traffic_of, calls):
        assert gathered["most_forward"]["recv"] == 0, "messages from one to another"
        assert gathered["forward"] <= 3 * block + vectors(4)
        assert block <= passed_on["most_forward"]["recv"] <= block + vectors(4)


# ---- the next block travels while this one is computed


def watched(rank: int, group: Any, overlap: bool, element: int = 2, tile: int = ROWS) -> dict[str, list[bool]]:
    """Whether a block was on its way to this rank, at every tile of a step: of features, which have 2 bytes an element,
    or of gradients, which have 4."""
    generator = torch.Generator().manual_seed(rank)
    sides = [torch.randn(ROWS, WIDTH, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
    least, most = ROWS * WIDTH * element, ROWS * WIDTH * (element + 1)
    seen: dict[str, list[bool]] = {"accumulate_statistics": [], "accumulate_gradients": []}
    real = {name: getattr(Eager, name) for name in seen}

    def watching(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with_gradients = ROWS * WIDTH * 4  # of the block before, which follow the features in one message
            both = element == 2 and meter.is_receiving(least + with_gradients, most + with_gradients)
            seen[name].append(meter.is_receiving(least, most) or both)
            return real[name](*args, **kwargs)

        return run

    with metered(group) as meter:
        for name in seen:
            setattr(Eager, name, watching(name))
        try:
            options = {"normalize": True, "exchange": "ring", "overlap": overlap, "tile": tile}
            loss = megabatch.clip_loss(*sides, 5.0, group=group, **options)
            loss.backward()
        finally:
            for name, function in real.items():
                setattr(Eager, name, function)
    return seen


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_next_block_travels_while_this_one_is_computed(pool: Pool, num_ranks: int) -> None:
    for seen in pool.run(num_ranks, watched, True):
        assert seen["accumulate_statistics"] == [True] * (num_ranks - 1) + [False]
        assert seen["accumulate_gradients"] == [True] * (num_ranks - 1) + [False]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_without_overlap_nothing_travels_while_a_block_is_computed(pool: Pool, num_ranks: int) -> None:
    for seen in pool.run(num_ranks, watched, False):
        assert seen["accumulate_statistics"] == seen["accumulate_gradients"] == [False] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_come_home_while_the_last_own_tiles_are_computed(pool: Pool, num_ranks: int) -> None:
    for seen in pool.run(num_ranks, watched, True, 4, ROWS // 2):
        own_tiles_at_a_time = 2  # one of two strips
        assert all(seen["accumulate_gradients"][-own_tiles_at_a_time:])
        assert not any(seen["accumulate_gradients"][:own_tiles_at_a_time])
