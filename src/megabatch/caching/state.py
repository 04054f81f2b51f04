"""What must be the same when a chunk runs again: random numbers, autocast, and what modules keep in buffers."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_STATE = 2**20  # elements of a buffer that is taken for state, and copied
_one_at_a_time = RLock()  # autograd has a thread per device, and they share the generator of the CPU


class Randomness:
    """torch's default generators: of the CPU, and of the accelerators that take part."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]

    def states(self) -> list[Tensor]:
        accelerators = [torch.get_device_module(d).get_rng_state(*_index(d)) for d in self._devices]
        return [torch.get_rng_state(), *accelerators]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, *_index(device))

    @contextmanager
    def replayed(self, states: list[Tensor] | None = None) -> Iterator[None]:
        """From these states on, or from here; afterwards as if nothing had been drawn."""
        with _one_at_a_time:
            before = self.states()
            try:
                if states is not None:
                    self._set(states)
                yield
            finally:
                self._set(before)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS has a single generator


class Autocast:
    """Autocast as it is now, for every kind of device that takes part."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        kinds = sorted({"cpu", *(device.type for device in devices)})
        self._kinds = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self.enabled = any(enabled for _, enabled, _ in self._kinds)

    @contextmanager
    def again(self, on: bool = True) -> Iterator[None]:
        """As it was; or off, for a backward, which has its dtypes from the forward."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._kinds:
                enabled = enabled and on
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cached))
            yield


State = dict[nn.Module, dict[str, Tensor]]


class Buffers:
    """The buffers of an encoder's modules: which of them a forward writes to, and how they were before.

    Attributes:
        written: The modules whose buffers a forward has written to or replaced, as BatchNorm does.
    """

    def __init__(self, modules: Sequence[nn.Module], copied: bool) -> None:
        self._before = [(module, _buffers(module)) for module in modules]
        self._versions = [versions(buffers.values()) for _, buffers in self._before]
        self._initial: State = {
            module: {name: b.clone() for name, b in buffers.items() if b.numel() <= LARGEST_STATE}
            for module, buffers in self._before
            if copied and module.training
        }
        self.written: list[nn.Module] = []

    def look(self) -> None:
        """After a forward."""
        self.written = []
        for (module, before), old in zip(self._before, self._versions, strict=True):
            now = _buffers(module)
            if [*map(id, now.values())] != [*map(id, before.values())] or versions(now.values()) != old:
                self.written.append(module)

    def now(self) -> State:
        self.look()
        return {module: {name: b.clone() for name, b in _buffers(module).items()} for module in self.written}

    @contextmanager
    def spared(self, state: State | None = None) -> Iterator[None]:
        """From this state on, or from before the forward; what is written to buffers is forgotten afterwards."""
        kept = [(module, _buffers(module)) for module in self.written]
        for module, buffers in kept:
            start = (state or {}).get(module) or self._initial.get(module, {})
            for name, buffer in buffers.items():
                setattr(module, name, start.get(name, buffer).clone())
        try:
            yield
        finally:
            for module, buffers in kept:
                for name, buffer in buffers.items():
                    setattr(module, name, buffer)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def versions(tensors: Iterable[Any]) -> list[int]:
    """How often each was written to; 0 for what cannot tell."""
    # _version: torch has no public name for the counter that its own checks of saved tensors use.
    return [x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in tensors]
