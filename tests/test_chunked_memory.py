"""`chunked` holds the activations of one chunk: what autograd keeps, what lives how long, what a real process takes."""

import functools
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megabatch import chunked

from .encoders import Mlp, contrast, make_encoder, make_inputs
from .test_chunked_ranks import Live
from .test_memory import LargestTensor

MIB = 2**20


def peak_of_step(kind: str, rows: int, chunk_size: int | None, towers: int = 1) -> int:
    """The most bytes that tensors held at a time during a step."""
    torch.manual_seed(0)
    models, inputs = [make_encoder(kind) for _ in range(towers)], make_inputs(kind, rows)
    with Live() as live:
        encode = [m if chunk_size is None else functools.partial(chunked, m, chunk_size=chunk_size) for m in models]
        torch.stack([each(*inputs) for each in encode]).sum().backward()
    return live.peak


def slack(kind: str, rows: int, chunk_size: int, towers: int = 1) -> int:
    """The inputs; gradients of a chunk beside their sums; outputs of all rows four times; 5 KiB of random state."""
    inputs = sum(x.untyped_storage().nbytes() for x in make_inputs(kind, rows))
    parameters = sum(p.numel() * 8 for p in make_encoder(kind).parameters())
    return inputs + towers * (2 * parameters + 4 * rows * 5 * 8 + rows // chunk_size * 5120)


@pytest.mark.parametrize("kind", ["vit", "text"])
def test_peak_of_a_step_is_that_of_one_chunk(kind: str) -> None:
    assert peak_of_step(kind, 512, 64) <= peak_of_step(kind, 64, None) + slack(kind, 512, 64)


def test_meter_sees_the_activations_of_the_batch_in_one_piece() -> None:
    assert peak_of_step("vit", 512, None) >= 6 * peak_of_step("vit", 64, None)


def test_the_forward_leaves_no_activations() -> None:
    model, inputs = make_encoder("vit"), make_inputs("vit", 64)
    made: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        if module is not model:
            module.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    model.register_forward_hook(lambda module, args, output: output.clone())  # or the last layer's is the output
    features = chunked(model, *inputs, chunk_size=8)
    assert features.requires_grad
    assert len(made) > 8 * 10
    assert not any(tensor() is not None for tensor in made)


def test_two_towers_hold_one_chunk_of_one_of_them() -> None:
    assert peak_of_step("vit", 512, 64, towers=2) <= peak_of_step("vit", 64, None) + slack("vit", 512, 64, towers=2)


class Tokens(nn.Module):
    """As sentence encoders do: returns far more than is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = self.inner(x)[:, None].expand(-1, 100, -1) * 2
        return {"tokens": tokens, "features": tokens.mean(1)}


def largest_of_step(select: str | None) -> int:
    model, x = Tokens(), torch.randn(64, 4)
    with LargestTensor() as largest:
        out = chunked(model, x, chunk_size=8, select=select)
        (out if select else out["features"]).sum().backward()
    return largest.numel


def test_outputs_that_are_not_selected_are_not_kept() -> None:
    assert largest_of_step("features") == 8 * 100 * 4


def test_meter_sees_outputs_that_are_kept() -> None:
    assert largest_of_step(None) >= 64 * 100 * 4


def test_a_chunk_is_gone_before_the_next_begins() -> None:
    model = Tokens()
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def encode(x: Tensor) -> dict[str, Tensor]:
        counts.append(sum(tensor() is not None for tensor in alive))
        out = model(x)
        alive.append(weakref.ref(out["tokens"]))
        return out

    chunked(encode, torch.randn(64, 4), chunk_size=8, select="features").sum().backward()
    assert counts == [0] * 16


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backwards", [0, 1, 2])
def test_all_is_freed_with_the_output_and_needs_no_collector(backwards: int) -> None:
    model, x = Mlp().double(), torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    features = chunked(model, x, chunk_size=4)
    loss = contrast(features)
    watched = [weakref.ref(x), weakref.ref(features), weakref.ref(model)]
    for i in range(backwards):
        loss.backward(retain_graph=i + 1 < backwards)
    del model, x, features, loss
    assert [ref() for ref in watched] == [None] * 3


@pytest.mark.usefixtures("no_collector")
def test_inputs_are_let_go_with_the_graph() -> None:
    """After the backward, as torch lets go of what it has saved, though the features live on."""
    model, x = Mlp().double(), torch.randn(13, 6, dtype=torch.float64)
    features = chunked(model, x, chunk_size=4)
    watched = weakref.ref(x)
    del x
    assert watched() is not None
    contrast(features).backward()
    assert watched() is None
    with pytest.raises(RuntimeError, match="second time"):
        features.sum().backward()


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_of_a_call_that_has_no_backward() -> None:
    model, x = Mlp().requires_grad_(False), torch.randn(13, 6)
    features = chunked(model, x, chunk_size=4)
    watched = weakref.ref(x)
    del x
    assert watched() is None
    assert features.shape == (13, 5)


MEASURE = """
import sys
import torch
from torch import nn
from megabatch import chunked

rows, chunk_size, whole = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "whole"
torch.set_num_threads(1)

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

class Vit(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(torch.randn(16, width))
        layer = lambda: nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

def to_float(images):
    return images.float() / 127.5 - 1

def step(images, chunk_size):
    if whole:
        features = model(to_float(images))
    else:
        features = chunked(model, images, chunk_size=chunk_size, transform=to_float)
    features.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

model = Vit()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step(torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8), 2)  # what torch loads on first use
images = torch.empty(rows, 3, 16, 16, dtype=torch.uint8).random_(256)
before, peak_before = memory("VmRSS"), memory("VmHWM")
step(images, chunk_size)
assert memory("VmHWM") > peak_before, "the process had been larger before the step: its peak says nothing"
print(memory("VmHWM") - before)
"""


@functools.cache
def beyond_data(rows: int, chunk_size: int, how: str) -> int:
    """Peak resident memory of a real process over a training step, in bytes, beyond what it had with its data."""
    # VmHWM, not getrusage: that counts what the parent had when it started the process.
    # And pieces of 64 KiB or more go back to the system when they are freed, or the heap's holes are what is measured.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(rows), str(chunk_size), how],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_a_real_process_trains_at_16384_in_the_memory_of_256() -> None:
    """Slack: the features of the batch and two gradients of their size, 1 MiB each, 3 MiB for the allocator, and 0.25
    MiB for the graph of each of 64 chunks, which keeps no activations."""
    in_chunks, one_chunk = beyond_data(16384, 256, "chunked"), beyond_data(256, 256, "whole")
    assert one_chunk >= 12 * MIB  # or activations are not what is measured
    assert in_chunks <= one_chunk + (6 + 16) * MIB


def test_meter_sees_a_real_process_in_one_piece() -> None:
    """Of 1,024 rows only: of 16,384 it would take 16 times as much."""
    assert beyond_data(1024, 1024, "whole") >= 3 * beyond_data(256, 256, "whole")
