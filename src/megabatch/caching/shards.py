"""Modules under `fully_shard`, whose ranks gather parameters in every forward, and so must run as many.

Gradients of all chunks but the last are added up on each rank; the last one's backward finds the sum, and reduces it.
Parameters that stay gathered after a forward (`reshard_after_forward=False`) stay so from chunk to chunk.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.ranks import Ranks

_known_groups: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


class Shards:
    """The sharded modules among an encoder's. False where there are none.

    Attributes:
        groups: Names of the groups over which parameters are sharded or replicated.
        spare: How often this rank runs the encoder beyond its own chunks.
        running: How many chunks are being encoded, one inside of another.
    """

    running = 0

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before somebody imports it
        if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
            raise TypeError(
                "chunked: encoder must not be a FullyShardedDataParallel, whose parameters change place in every "
                "forward. Use torch.distributed.fsdp.fully_shard."
            )
        self._modules: list[Any] = [m for m in modules if fsdp is not None and isinstance(m, fsdp.FSDPModule)]
        self.groups = self._find_groups()
        self.spare = 0
        self.called_plainly = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    def _find_groups(self) -> list[str]:
        if any(module not in _known_groups for module in self._modules):
            for module in self._modules:
                module.reshard()  # it may be whole since its last forward
            for module in self._modules:
                _known_groups[module] = _groups_of(module)
        return list(dict.fromkeys(name for module in self._modules for name in _known_groups[module]))

    @contextmanager
    def encoding(self) -> Iterator[None]:
        Shards.running += 1
        try:
            yield
        finally:
            Shards.running -= 1

    def watch(self) -> None:
        """From now on, notice calls of the modules that are not chunked."""
        watched = {*self._modules, *(child for module in self._modules for child in module.children())}
        itself = ref(self)

        def note(*_: Any) -> None:
            shards = itself()
            if shards is not None and torch.is_grad_enabled() and not Shards.running:
                shards.called_plainly = True

        for module in watched:
            finalize(self, module.register_forward_pre_hook(note).remove)

    def check_idle(self) -> None:
        """`fully_shard` takes a forward in the middle of its own backward for a checkpoint's."""
        if self.called_plainly:
            raise RuntimeError(
                "chunked: an encoder under fully_shard must not be called in chunks and then without before the "
                "backward, got a call without. Call it by chunked everywhere in the step."
            )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Modules that keep their parameters after a forward keep them after a backward, too."""
        kept = [module for module in self._modules if not any(map(_is_sharded, _own_parameters(module)))]
        for module in kept:
            module.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            for module in kept:
                module.set_reshard_after_backward(True, recurse=False)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Without those that a sharded module below takes care of."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not hasattr(child, "set_reshard_after_backward"):
            yield from _own_parameters(child)


def _is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "device_mesh")


def _groups_of(module: nn.Module) -> list[str]:
    parameters: Any = filter(_is_sharded, module.parameters())
    meshes: Any = dict.fromkeys(parameter.device_mesh for parameter in parameters)  # in the same order on all ranks
    groups = [mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)]
    return list(dict.fromkeys(group.group_name for group in groups if dist.get_world_size(group) > 1))


def agreed(fact: Any, groups: Sequence[str], error: Exception | None, merge: Callable[[list[Any]], Any]) -> Any:
    """What the ranks of these groups make of their facts; the same error on all of them where one has an `error`."""
    for name in groups:
        try:
            ranks = Ranks("chunked", name)
            ranks.handshake({}, errors=[] if error is None else [error])
            fact = merge(ranks.all_gather_json(fact))
        except (ValueError, TypeError) as refusal:  # noqa: PERF203
            error = refusal  # and on to the next group, where others wait
    try:
        if error is not None:
            raise error
    finally:
        error = None  # its traceback holds this frame: together they would keep the encoder and its group
    return fact


def known_kinds(ranks: list[list[str]]) -> list[str]:
    """What each output is: a rank with a single row may not know, and takes the word of another."""
    return [next((kind for kind in each if kind != "either"), "either") for each in zip(*ranks, strict=True)]


def check_same_chunks(own: int, modules: Sequence[nn.Module], error: Exception | None) -> None:
    """Norms that synchronise their statistics meet in every forward. An `error` is raised on all ranks that would."""
    norms = [module for module in modules if isinstance(module, nn.SyncBatchNorm) and module.training]
    groups: Any = dict.fromkeys(norm.process_group or dist.group.WORLD for norm in norms)
    for group in (group for group in groups if group is not None and dist.get_world_size(group) > 1):
        Ranks("chunked", group.group_name).handshake(
            {"the number of chunks under SyncBatchNorm": own}, errors=[] if error is None else [error]
        )
