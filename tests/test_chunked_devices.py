"""`chunked` on accelerators, as far as it can be told without one: copies ahead of time, and random states.

Tensors on "cuda" are fake; a module stands in for torch.cuda that writes down what is asked of it, in order.
"""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megabatch.caching.batch import Batch
from megabatch.caching.state import State
from megabatch.caching.transfer import Transfer


class Device:
    """What torch.cuda is asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.states = {0: torch.tensor([3], dtype=torch.uint8), 1: torch.tensor([5], dtype=torch.uint8)}

    def is_available(self) -> bool:
        return False

    def Stream(self, device: Any) -> "Device":
        return self

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.log.append("on the side")
        yield
        self.log.append("back")

    def record_event(self) -> str:
        return "copied"

    def current_stream(self, device: Any) -> "Device":
        return self

    def wait_event(self, event: str) -> None:
        self.log.append(f"wait until {event}")

    def get_rng_state(self, *device: torch.device) -> Tensor:
        return self.states[device[0].index or 0 if device else 0].clone()

    def set_rng_state(self, state: Tensor, *device: torch.device) -> None:
        self.states[device[0].index or 0 if device else 0] = state


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: device.log.append("kept for use"))
    return device


@pytest.mark.parametrize("pinned", [True, False])
def test_the_next_chunk_is_copied_from_pinned_memory_while_this_one_computes(
    device: Device, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: pinned)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: device.log.append("pinned") or self)

    def watched(self: Tensor, where: torch.device, non_blocking: bool = False) -> Tensor:
        device.log.append(f"copy of {len(self)} rows, {'' if non_blocking else 'not '}behind")
        return torch.empty(self.shape, device=where)  # a copy would ask for the device itself

    with FakeTensorMode(allow_non_fake_inputs=True):
        monkeypatch.setattr(Tensor, "to", watched)
        batch = Batch((torch.zeros(5, 3),), {}, ["x"], (), {}, None)
        batch.cut(2, pad=False, required=False)
        transfer, chunks = Transfer(torch.device("cuda")), batch.chunks()
        for index in range(3):
            (piece,) = transfer.fetch(chunks, index, index + 1)
            assert piece.device.type == "cuda"
            device.log.append(f"encode {index}")
    copies = [["on the side", *([] if pinned else ["pinned"]), f"copy of {n} rows, behind", "back"] for n in (2, 2, 1)]
    ready = ["wait until copied"]
    wanted = [*copies[0], *ready, *copies[1], "encode 0", *ready, *copies[2], "encode 1", *ready, "encode 2"]
    assert [line for line in device.log if line != "kept for use"] == wanted


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_random_states_of_accelerators_are_replayed_and_put_back(device: Device, kind: str) -> None:
    devices = [torch.device("cpu"), torch.device(kind, 0), *([torch.device(kind, 1)] if kind != "mps" else [])]
    state = State(devices, [])
    before = state.now()
    assert len(before[0]) == len(devices)
    first = torch.rand(2)
    device.states = {index: state + 1 for index, state in device.states.items()}
    later, _ = state.now()
    with state.replayed(before):
        assert all(torch.equal(a, b) for a, b in zip(state.now()[0], before[0], strict=True))
        assert torch.equal(torch.rand(2), first)
    assert all(torch.equal(a, b) for a, b in zip(state.now()[0], later, strict=True))
