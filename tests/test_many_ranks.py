"""What one rank of very many exchanges, by a process group that only pretends: it counts, and nobody answers."""

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabatch.distributed.ranks import Ranks, refuse_together

COUNT = """
import collections, json, os, sys
import torch, torch._dynamo, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
import megabatch

for case in json.loads(sys.argv[1]):  # each in a process that has loaded all it needs and done nothing with it
    child = os.fork()
    if child == 0:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{case} failed")
else:
    sys.exit()
size, exchange, loss, rows = case
dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())

class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function).rpartition(".")[0]] += 1
        return function(*args, **(kwargs or {}))

def step():
    features = [torch.randn(rows, 8).requires_grad_() for _ in range(2)]
    scale = torch.tensor(1.5, requires_grad=True)
    keywords = {"group": dist.group.WORLD, "exchange": exchange, "normalize": True}
    getattr(megabatch, loss)(*features, scale, **keywords).backward()

step()
with Operators() as operators:
    step()
counts = operators.counts
sent = {name.removeprefix("c10d."): count for name, count in counts.items() if name.startswith("c10d.")}
messages = sent.pop("send", 0)
assert sent.pop("recv_", 0) == messages
others = counts.total() - sum(count for name, count in counts.items() if name.startswith("c10d."))
print(json.dumps({"collectives": sent, "messages": messages, "operators": others}))
"""


CASES = [(size, "gather", loss, 16) for loss in ("clip_loss", "siglip_loss") for size in (64, 512)]
CASES += [(4, "gather", "clip_loss", 256), (3, "ring", "clip_loss", 16), (64, "ring", "clip_loss", 16)]
CASES += [(64, "ring", "nt_xent_loss", 16)]
Counted = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def counted() -> Counted:
    """Of the second step of one rank."""
    command = [sys.executable, "-W", "ignore", "-c", COUNT, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))
    return lambda size, exchange, loss="clip_loss", rows=16: found[size, exchange, loss, rows]


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_a_gathered_step_is_five_collectives_on_any_number_of_ranks(loss: str, counted: Counted) -> None:
    """The handshake, the columns, the sums of statistics; in the backward a handshake and the sums of gradients."""
    few, many = (counted(size, "gather", loss) for size in (64, 512))
    for found in (few, many):
        assert sum(found["collectives"].values()) == 5
        assert found["messages"] == 0
    # 32 times the columns of 2 ranks are 16 tiles of 512 instead of 2.
    assert many["operators"] <= few["operators"] + 14 * 80


def test_operators_of_a_gathered_step_go_by_tiles_and_not_by_ranks(counted: Counted) -> None:
    few, many = counted(4, "gather", rows=256), counted(64, "gather", rows=16)  # as many columns
    assert many["operators"] <= few["operators"]


@pytest.mark.parametrize("size", [3, 64])
def test_messages_of_a_ring(size: int, counted: Counted) -> None:
    """Forward and backward: a block of features to every other rank; in the backward with the gradients of the one
    before, and two more messages that bring the last of them home."""
    found = counted(size, "ring")
    assert found["messages"] == (size - 1) + (size + 1)
    assert sum(found["collectives"].values()) == 4  # two handshakes, the sums of statistics, those of the scale


def test_a_symmetric_loss_meets_half_of_the_ranks(counted: Counted) -> None:
    assert counted(64, "ring", "nt_xent_loss")["messages"] == 32 + (32 + 2)


@pytest.mark.parametrize(
    ("kinds", "mine", "features", "bound", "place"),
    [
        (["cpu"], "cpu", "cpu", None, "cpu"),
        (["cpu", "cuda"], "cpu", "cuda:2", None, "cpu"),  # a handshake goes beside the GPU
        (["cpu", "cuda"], "cuda:2", "cuda:2", None, "cuda:2"),  # sums stay where they are
        (["cuda"], "cpu", "cuda:2", None, "cuda:2"),
        (["cuda"], "cpu", None, "cuda:3", "cuda:3"),  # of a rank that refuses its input
        (["cuda"], "cpu", "cpu", "cuda:3", "cuda:3"),  # because it is on the CPU
    ],
)
def test_where_a_vector_is_sent_from(
    kinds: list[str],
    mine: str,
    features: str | None,
    bound: str | None,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks("f", device=None if features is None else torch.device(features))
    monkeypatch.setattr(ranks, "group", SimpleNamespace(bound_device_id=None if bound is None else torch.device(bound)))
    monkeypatch.setattr(ranks, "_device_types", lambda: kinds)
    assert ranks._place(torch.device(mine)) == torch.device(place)


def test_a_refusal_is_sent_from_the_device_of_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a group of NCCL alone, a rank that sent from another GPU would leave the others waiting."""
    seen: list[object] = []
    monkeypatch.setattr(Ranks, "__init__", lambda self, *names, device=None: seen.append(device))
    monkeypatch.setattr(Ranks, "handshake", lambda self, same, errors: None)
    with pytest.raises(ValueError, match="wrong"), refuse_together("f", "a group", torch.empty(2, device="meta")):
        raise ValueError("wrong")
    assert seen == [torch.device("meta")]
