"""Memory is linear in the batch: the largest tensor ever made, what autograd keeps, and what a real process takes."""

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megabatch
from megabatch import reference
from megabatch.backends import workspace
from megabatch.backends.eager import Eager
from megabatch.losses.block import Block, Tile
from megabatch.tiling.call import Call

from .test_losses import LOSSES, make_inputs

MIB = 2**20


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any tensor's memory had while the mode was on."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


def saved_bytes(step: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward, each piece of memory once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = step()
    assert value.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("num_rows", [128, 256])
@pytest.mark.parametrize("loss", LOSSES)
def test_never_allocates_more_than_a_strip(loss: str, num_rows: int, normalized: bool) -> None:
    inputs = make_inputs(loss, num_rows, 8, torch.float32)
    with LargestTensor() as largest:
        getattr(megabatch, loss)(**inputs, normalize=normalized, tile=16, memory_budget="24KiB").backward()
    # A strip of 16 rows that InfoNCE completes at once, the features themselves, of both sides in one, or the budget.
    assert largest.numel <= 24 * 2 * num_rows


def test_dense_twin_does_allocate_the_full_matrix() -> None:
    """The meter must be able to fail, or the test above proves nothing."""
    with LargestTensor() as largest:
        reference.clip_loss(**make_inputs("clip_loss", 256, 8, torch.float32), normalize=False).backward()
    assert largest.numel >= 256 * 256


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", LOSSES)
def test_saves_for_backward_only_what_grows_with_the_batch(loss: str, reduction: str) -> None:
    sizes, budget = [], 2**16
    for num_rows in (300, 600):
        inputs = make_inputs(loss, num_rows, 8, torch.float32)
        options = {"normalize": False, "reduction": reduction, "tile": 16, "memory_budget": budget}
        sizes.append(saved_bytes(lambda: getattr(megabatch, loss)(**inputs, **options).sum()))  # noqa: B023
        features = sum(x.numel() for x in inputs.values() if x.dim() == 2)
        # The features, a float32 copy of their gradients where one pass does it all, a few vectors, and kept logits.
        assert sizes[-1] <= 2 * 4 * features + 64 * num_rows + 4096 + budget
    assert sizes[1] <= 2.05 * sizes[0]


def test_meter_sees_what_the_dense_twin_saves() -> None:
    sizes = []
    for num_rows in (300, 600):
        inputs = make_inputs("clip_loss", num_rows, 8, torch.float32)
        sizes.append(saved_bytes(lambda: reference.clip_loss(**inputs, normalize=False)))  # noqa: B023
    assert sizes[1] >= 3.5 * sizes[0]


def test_a_raised_budget_keeps_logits_and_not_more() -> None:
    inputs = make_inputs("clip_loss", 300, 8, torch.float32)
    one_tile = 2 * 100 * 100 * 4  # and nothing to spare
    without = saved_bytes(lambda: megabatch.clip_loss(**inputs, normalize=False, tile=100, memory_budget=one_tile))
    for budget in (2**18, 2**20):
        kept = saved_bytes(lambda: megabatch.clip_loss(**inputs, normalize=False, tile=100, memory_budget=budget))  # noqa: B023
        assert without < kept <= without + budget
    assert kept >= without + 300 * 300 * 4


def test_logits_are_kept_by_default() -> None:
    inputs = make_inputs("clip_loss", 300, 8, torch.float32)
    one_tile = 2 * 100 * 100 * 4
    without = saved_bytes(lambda: megabatch.clip_loss(**inputs, normalize=False, tile=100, memory_budget=one_tile))
    assert saved_bytes(lambda: megabatch.clip_loss(**inputs, normalize=False)) >= without + 300 * 300 * 4


MEASURE = """
import sys
import torch
import megabatch

function, num_rows, width, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
options = {"memory_budget": sys.argv[5]} if len(sys.argv) > 5 else {}

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def features(rows):
    x = torch.empty(rows, width, dtype=dtype)
    for part in x.split(1024):
        part.copy_(torch.nn.functional.normalize(torch.randn(part.shape), dim=1))
    return x.requires_grad_()

def step(image, text):
    scale = torch.tensor(50.0, requires_grad=True)
    arguments = [image, text, scale] + ([torch.tensor(-10.0)] if function == "siglip_loss" else [])
    getattr(megabatch, function)(*arguments, normalize=False, **options).backward()

step(features(64), features(64))
image, text = features(num_rows), features(num_rows)
before, peak_before = memory("VmRSS"), memory("VmHWM")
step(image, text)
gradients = image.grad.numel() * image.grad.element_size() * 2
print(memory("VmHWM") - before - gradients, memory("VmHWM") - peak_before)
"""


def beyond_inputs_and_gradients(function: str, num_rows: int, width: int, *budget: str) -> int:
    """Peak resident memory of a real process over one step, in bytes, less its inputs and gradients."""
    command = [sys.executable, "-c", MEASURE, function, str(num_rows), str(width), "float32", *budget]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    bytes_used, beyond_earlier_peak = map(int, done.stdout.split())
    assert beyond_earlier_peak > 0, "the process had been larger before the step, so its peak says nothing of the step"
    return bytes_used


def test_a_real_process_at_32768_rows() -> None:
    """The dense loss holds at least three matrices of 4 GiB here, and a copy of the features of one side is 16 MiB."""
    assert beyond_inputs_and_gradients("clip_loss", 32768, 128, "48MiB") <= 26 * MIB


@pytest.mark.parametrize("num_rows", [8192, 16384])
def test_a_real_process_with_the_default_budget(num_rows: int) -> None:
    """Logits are 256 MiB and 1 GiB here: nearly all, and about a quarter, are kept."""
    assert 200 * MIB <= beyond_inputs_and_gradients("clip_loss", num_rows, 64) <= 300 * MIB


def test_doubling_the_batch_adds_only_vectors() -> None:
    small, large = (beyond_inputs_and_gradients("clip_loss", num_rows, 32, "16MiB") for num_rows in (5120, 10240))
    assert large - small <= 5120 * 2 * 64 + 4 * MIB


@pytest.mark.parametrize("function", ["siglip_loss", "info_nce_loss", "nt_xent_loss"])
def test_other_losses_of_a_real_process(function: str) -> None:
    num_rows, width = 8192, 64
    forward_gradients = 0 if function == "nt_xent_loss" else 2 * num_rows * width * 4
    assert beyond_inputs_and_gradients(function, num_rows, width) <= 300 * MIB + forward_gradients
    assert beyond_inputs_and_gradients(function, num_rows, width, "32MiB") <= 48 * MIB + forward_gradients


def test_meter_sees_the_dense_loss() -> None:
    dense = MEASURE.replace("getattr(megabatch, function)", "__import__('megabatch.reference').reference.clip_loss")
    command = [sys.executable, "-c", dense, "clip_loss", "4096", "32", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) >= 2 * 4096 * 4096 * 4


def test_retrieval_of_100000_pairs_runs_in_linear_memory() -> None:
    """The matrix of scores would take 40 GB."""
    # VmHWM, not getrusage: that counts what the parent had when it started the process.
    script = """
import torch, megabatch

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

keys = torch.nn.functional.normalize(torch.randn(100_000, 32), dim=1)
queries = torch.nn.functional.normalize(keys + 0.2 * torch.randn(100_000, 32), dim=1)
before, peak_before = memory("VmRSS"), memory("VmHWM")
ranks = megabatch.retrieval_ranks(queries, keys, memory_budget="32MiB")
after = memory("VmHWM")
assert after > peak_before, "the process had been larger before the call: its peak says nothing"
print(*[(ranks < k).float().mean().item() for k in (1, 5, 10)], after - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, fifth, tenth, kibibytes = map(float, done.stdout.split())
    assert 0 < first < fifth < tenth < 1
    assert 16 * 1024 <= kibibytes <= 64 * 1024


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made while the mode was on held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                storage = leaf.untyped_storage()
                self.live[storage.data_ptr()] = (weakref.ref(leaf), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if entry[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "mask": {"same_ids": "mask"},
    "positive": {"same_ids": "positive"},
    "positive, smoothing": {"same_ids": "positive", "label_smoothing": 0.1},
    "normalize": {"normalize": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss", "nt_xent_loss"])
def test_what_is_held_stays_within_the_budget(loss: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside gradients and a few vectors. Tiles are large here, so that an extra one would show."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # one takes smaller tiles
    keywords = {"normalize": False, **OPTIONS[options]}
    if loss == "siglip_loss":
        keywords.pop("label_smoothing", None)
    num_rows, width, budget = 700, 8, 2 * MIB
    if "same_ids" in keywords:
        keywords["ids"] = torch.randint(200, (num_rows,))
    inputs = make_inputs(loss, num_rows, width, torch.float32)
    with LiveBytes() as live:
        getattr(megabatch, loss)(**inputs, **keywords, memory_budget=budget).backward()
    assert live.peak > budget / 4, "the meter saw nothing"
    assert live.peak <= budget + 4 * 2 * num_rows * width * 4 + 2 * num_rows * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_leaves_nothing_for_the_garbage_collector(loss: str, dtype: torch.dtype) -> None:
    """Objects that hold each other would hold tensors as large as the features until it comes by."""
    inputs = make_inputs(loss, 64, 8, torch.float32)
    inputs = {name: x.detach().to(dtype).requires_grad_() if x.dim() == 2 else x for name, x in inputs.items()}
    gc.collect()
    gc.disable()
    try:
        getattr(megabatch, loss)(**inputs, normalize=True, tile=32).backward()
        left = [type(x).__name__ for x in gc.get_objects() if type(x) in (Block, Tile, Call, Eager)]
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("options", [{"memory_budget": 100}, {"weight": torch.tensor([-1.0] * 64)}], ids=str)
def test_a_refused_call_holds_no_features(options: dict[str, Any]) -> None:
    """An exception whose frames hold it would keep them until the next collection."""
    inputs = make_inputs("clip_loss", 64, 8, torch.float32)
    held = [weakref.ref(x) for x in inputs.values() if isinstance(x, torch.Tensor)]
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            megabatch.clip_loss(**inputs, **options, normalize=False)
        del inputs
        assert [found() for found in held] == [None] * len(held)
    finally:
        gc.enable()


def test_small_calls_use_their_memory_again() -> None:
    inputs = make_inputs("clip_loss", 64, 8, torch.float32)
    megabatch.clip_loss(**inputs, normalize=False).backward()
    first = workspace.buffer("scratch", 64 * 64, torch.float32, torch.device("cpu")).data_ptr()
    megabatch.clip_loss(**inputs, normalize=False).backward()
    assert workspace.buffer("scratch", 64 * 64, torch.float32, torch.device("cpu")).data_ptr() == first


def test_emptying_the_cache_releases_the_buffers_of_all_threads() -> None:
    released: list[weakref.ref[Tensor]] = []
    filled, done = threading.Event(), threading.Event()

    def call() -> None:
        released.append(weakref.ref(workspace.buffer("test", 64, torch.float32, torch.device("cpu"))))

    def work() -> None:
        call()
        filled.set()
        done.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    filled.wait(60)
    call()
    held = [ref() is not None for ref in released]
    megabatch.empty_cache()
    gone = [ref() is None for ref in released]
    done.set()
    thread.join()
    assert held == gone == [True, True]


def test_memory_of_inference_mode_serves_training_too() -> None:
    inputs = make_inputs("clip_loss", 64, 8, torch.float32)
    with torch.inference_mode():
        megabatch.clip_loss(**inputs, normalize=False)
    megabatch.clip_loss(**inputs, normalize=False).backward()


def test_large_buffers_are_not_kept() -> None:
    size = workspace.LARGEST_CACHED // 4 + 1
    first, second = (workspace.buffer("test", size, torch.float32, torch.device("cpu")) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
