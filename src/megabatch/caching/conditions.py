"""What must be the same when a chunk runs again: randomness, autocast, and the state that modules keep in buffers."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

States = list[Tensor]

LARGEST_STATE = 2**20  # elements of a buffer that is taken for state, and copied
_one_at_a_time = RLock()  # autograd has a thread per device, and they share the generator of the CPU


class Randomness:
    """torch's generators: of the CPU, and of all accelerators that take part."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if _has_generator(device)]

    def states(self) -> States:
        return [torch.get_rng_state(), *(_generator_of(d).get_rng_state(*_index(d)) for d in self._devices)]

    def _set(self, states: States) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            _generator_of(device).set_rng_state(state, *_index(device))

    @contextmanager
    def replayed(self, states: States | None = None) -> Iterator[None]:
        """From these states on, or from here; afterwards as if nothing had been drawn."""
        with _one_at_a_time:
            before = self.states()
            try:
                if states is not None:
                    self._set(states)
                yield
            finally:
                self._set(before)


def _has_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and hasattr(_generator_of(device), "get_rng_state")


def _generator_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # which has one alone


@dataclass(frozen=True)
class Autocast:
    """Autocast as it is now, for every kind of device that takes part."""

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> "Autocast":
        types = sorted({"cpu", *(device.type for device in devices)})
        kinds = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
            if torch.amp.is_autocast_available(kind)
        ]
        return cls(tuple(kinds), torch.is_autocast_cache_enabled())

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self.kinds:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cached))
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """For a backward, which has its dtypes from the forward."""
        with ExitStack() as stack:
            for kind, _, dtype in self.kinds:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=False))
            yield


class Buffers:
    """The buffers of an encoder's modules: which of them a forward writes to, and how they were before."""

    def __init__(self, modules: Iterable[nn.Module], copied: bool) -> None:
        self._modules = list(modules)
        self._before = [dict(module.named_buffers(recurse=False)) for module in self._modules]
        self._versions = [versions(buffers.values()) for buffers in self._before]
        self._copies = [_copies(buffers) if copied and m.training else {} for m, buffers in self._all()]
        self.written: list[nn.Module] = []

    def _all(self) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        return zip(self._modules, self._before, strict=True)

    def look(self) -> None:
        """After a forward: modules whose buffers it wrote to or replaced keep state, as BatchNorm does."""
        for (module, before), old in zip(self._all(), self._versions, strict=True):
            now = dict(module.named_buffers(recurse=False))
            if [*map(id, now.values())] != [*map(id, before.values())] or versions(now.values()) != old:
                self.written.append(module)
        kept = dict(zip(self._modules, self._copies, strict=True))
        self._modules, self._before = self.written, []
        self._copies = [kept[module] for module in self.written]

    @contextmanager
    def spared(self, rewound: bool) -> Iterator[None]:
        """What is written to these modules' buffers is forgotten. `rewound`: as they were before the forward."""
        kept = [dict(module._buffers) for module in self.written]
        for module, copies in zip(self.written, self._copies, strict=True):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = (copies.get(name, buffer) if rewound else buffer).clone()
        try:
            yield
        finally:
            for module, buffers in zip(self.written, kept, strict=True):
                module._buffers.update(buffers)


def _copies(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without those that are weights rather than state."""
    return {name: buffer.clone() for name, buffer in buffers.items() if buffer.numel() <= LARGEST_STATE}


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """torch's transformer layers take another path in eval mode where there is no graph, with other values."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Any]) -> list[int]:
    """How often each was written to; 0 for what cannot tell."""
    return [_version(tensor) if isinstance(tensor, Tensor) else 0 for tensor in tensors]
