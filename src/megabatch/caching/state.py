"""What must be the same when a chunk runs again: random numbers, autocast, and the buffers of modules."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_STATE = 2**20  # elements of a buffer that may be state, and is copied before the forward
_one_at_a_time = RLock()  # autograd has a thread per device, and they share the generator of the CPU

Snapshot = dict[nn.Module, dict[str, Tensor]]


class State:
    """Of torch's default generators, of autocast, and of the buffers of these modules."""

    def __init__(self, devices: Iterable[torch.device], modules: Sequence[nn.Module]) -> None:
        self._accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        names = {"cpu", *(device.type for device in self._accelerators)}
        self._autocast = [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in sorted(names)
            if torch.amp.is_autocast_available(name)
        ]
        self.autocast_enabled = any(enabled for _, enabled, _ in self._autocast)
        self._cached = torch.is_autocast_cache_enabled()
        self._before = [(module, _buffers(module)) for module in modules]
        self._versions = [versions(buffers.values()) for _, buffers in self._before]
        self._initial: Snapshot = {
            module: {name: b.clone() for name, b in buffers.items() if b.numel() <= LARGEST_STATE}
            for module, buffers in self._before
            if torch.is_grad_enabled() and module.training
        }

    def now(self) -> tuple[list[Tensor], Snapshot]:
        """Of generators, and of the buffers that have been written to."""
        buffers = {module: {name: b.clone() for name, b in _buffers(module).items()} for module in self.written()}
        return self._random_states(), buffers

    @contextmanager
    def replayed(self, state: tuple[list[Tensor], Snapshot]) -> Iterator[None]:
        """As it was then, under the autocast of the forward; afterwards as if nothing had been drawn or written."""
        random, buffers = state
        with _one_at_a_time, ExitStack() as stack:
            for name, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=self._cached))
            stack.callback(self._set_random, self._random_states())
            self._set_random(random)
            for module in self.written():
                start = buffers.get(module) or self._initial.get(module, {})
                for name, buffer in _buffers(module).items():
                    stack.callback(setattr, module, name, buffer)
                    setattr(module, name, start.get(name, buffer).clone())
            yield

    def written(self) -> list[nn.Module]:
        """The modules whose buffers the forward has written to or replaced, as BatchNorm does."""
        found = []
        for (module, before), old in zip(self._before, self._versions, strict=True):
            now = _buffers(module)
            if [*map(id, now.values())] != [*map(id, before.values())] or versions(now.values()) != old:
                found.append(module)
        return found

    def _random_states(self) -> list[Tensor]:
        accelerators = [torch.get_device_module(d).get_rng_state(*_index(d)) for d in self._accelerators]
        return [torch.get_rng_state(), *accelerators]

    def _set_random(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._accelerators, states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS has a single generator


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def versions(tensors: Iterable[Any]) -> list[int]:
    """How often each was written to; 0 where that is not known."""
    # _version: torch has no public name for the counter that its own checks of saved tensors use.
    return [x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in tensors]
