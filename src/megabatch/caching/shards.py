"""Modules under `fully_shard`, whose ranks gather parameters in every forward, so that all must run as many.

They reduce gradients at the end of a backward, so a call has a backward of its own: gradients of all chunks but the
last are added up on each rank, and the backward of the last chunk finds the sum and reduces it. Parameters that stay
gathered after a forward (`reshard_after_forward=False`) stay so from chunk to chunk.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..distributed.ranks import Ranks
from .batch import Batch
from .containers import map_tensors, tensors_of
from .replay import Call, check_unwritten
from .state import versions

_known_groups: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


class Shards:
    """The sharded modules among these. False where there are none.

    Attributes:
        groups: Names of the groups over which parameters are sharded or replicated.
        running: How many chunks are being encoded, one inside of another.
    """

    running = 0

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # None: nothing is sharded
        if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
            raise TypeError(
                "chunked: encoder must not be a FullyShardedDataParallel, whose parameters change place in every "
                "forward. Use torch.distributed.fsdp.fully_shard."
            )
        self._modules: list[Any] = [m for m in modules if fsdp is not None and isinstance(m, fsdp.FSDPModule)]
        if any(module not in _known_groups for module in self._modules):
            for module in self._modules:
                module.reshard()  # parameters may be whole since the last forward, and do not know their mesh then
            _known_groups.update({module: _groups_of(module) for module in self._modules})
        self.groups = list(dict.fromkeys(name for module in self._modules for name in _known_groups[module]))
        self.called_plainly = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        Shards.running += 1
        try:
            yield
        finally:
            Shards.running -= 1

    def watch(self) -> None:
        """From now on, notice calls of the modules that are not chunked."""
        itself = ref(self)

        def note(*_: Any) -> None:
            shards = itself()
            if shards is not None and torch.is_grad_enabled() and not Shards.running:
                shards.called_plainly = True

        for watched in {*self._modules, *(child for module in self._modules for child in module.children())}:
            finalize(self, watched.register_forward_pre_hook(note).remove)

    def prepare_backward(self, is_last: bool) -> None:
        """Until the last chunk, gradients are not reduced, and parameters that are gathered stay so."""
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            if not any(map(_is_sharded, _own_parameters(module))):
                module.set_reshard_after_backward(is_last, recurse=False)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Without those of sharded modules inside."""
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


@dataclass
class ShardedCall(Call):
    """A call whose backward runs all chunks at once.

    Attributes:
        spare: How often this rank runs the encoder beyond its own chunks, because others have more.
    """

    shards: Shards
    spare: int

    def forward(self) -> Any:
        inputs = {id(x): x for x in tensors_of(self.chunks) if x.requires_grad and torch.is_grad_enabled()}
        # The backward of a chunk ends in these, which collect the gradients of the inputs.
        self._leaves = {key: x.detach().requires_grad_() for key, x in inputs.items()}
        self.chunks = map_tensors(lambda x: self._leaves.get(id(x), x), self.chunks)
        read = tensors_of(self.chunks)
        self._versions, self._states, outputs = versions(read), [], []
        with self.shards.encoding():
            for index in range(len(self.chunks)):
                self._states.append(self.state.now())
                with saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):  # a graph without activations
                    outputs.append(self.run(index, index + 1))
            with torch.no_grad(), self.state.replayed(self.state.now()):
                for _ in range(self.spare):
                    self.run(0, 0)
        check_unwritten(read, self._versions)
        tensors = tensors_of(outputs)
        if any(x.requires_grad for x in tensors):
            self.shards.watch()
            # Parameters are inputs, so that torch.autograd.grad by them is refused.
            trained = [parameter for parameter in self.parameters if parameter.requires_grad]
            apply: Any = Replay.apply
            connected = iter(apply(self, tensors, *inputs.values(), *trained))
            outputs = map_tensors(lambda _: next(connected), outputs)
        return self.outputs.join(outputs)

    def backward(self, upstream: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs; those of the parameters are written."""
        check_unwritten(tensors_of(self.chunks), self._versions)
        if self.shards.called_plainly:
            # fully_shard takes a forward in the middle of its own backward for a checkpoint's.
            raise RuntimeError(
                "chunked: an encoder under fully_shard must not be called in chunks and then without before the "
                "backward, got a call without. Call it by chunked everywhere in the step."
            )
        last, width = len(self.chunks) - 1, len(upstream) // len(self.chunks)
        parts = [list(upstream[i * width : (i + 1) * width]) for i in range(len(self.chunks))]
        used = [gradient is not None for gradient in parts[last]]  # in every chunk, so that all do the same
        try:
            with self.shards.encoding():
                self.shards.prepare_backward(is_last=False)
                for index in range(last):
                    self._replay(index, parts[index], used)
                for _ in range(self.spare):
                    self._replay(0, [None] * width, used)
                self.shards.prepare_backward(is_last=True)
                self._replay(last, parts[last], used)
            self.outputs.check()
            return [leaf.grad for leaf in self._leaves.values()]
        finally:
            self.shards.prepare_backward(is_last=True)
            for leaf in self._leaves.values():
                leaf.grad = None

    def _replay(self, index: int, upstream: Sequence[Tensor | None], used: Sequence[bool]) -> None:
        """Run a chunk again, and its backward; where it got no gradient, with zeros."""
        with torch.enable_grad(), self.state.replayed(self._states[index]):
            outputs = tensors_of(self.run(index, index + 1))
        self.outputs.compare(index, outputs)
        triples = zip(outputs, upstream, used, strict=True)
        pairs = [(x, torch.zeros_like(x) if g is None else g) for x, g, yes in triples if yes and x.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))  # type: ignore[arg-type]


class Replay(torch.autograd.Function):
    """The outputs of all chunks, and the chunks again for their gradients."""

    @staticmethod
    def forward(ctx: Any, call: ShardedCall, outputs: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        detached = tuple(x.detach() for x in outputs)
        ctx.mark_non_differentiable(*(y for x, y in zip(outputs, detached, strict=True) if not x.requires_grad))
        return detached

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked: gradients of an encoder under fully_shard must not be differentiated again "
                "(create_graph=True), because they are reduced as they are formed. Call the encoder without chunks "
                "where second derivatives are needed."
            )
        # _is_checkpoint_valid: torch has no public word for "all gradients are wanted". Its reentrant checkpoints ask
        # the same.
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "chunked: torch.autograd.grad and backward(inputs=...) must not pass through an encoder under "
                "fully_shard, because its gradients are written, not returned. Call backward()."
            )
        found = ctx.call.backward(upstream)
        return None, None, *found, *[None] * (len(ctx.needs_input_grad) - 2 - len(found))


def agree_on_chunks(plan: Callable[[], Batch], shards: Shards, modules: Sequence[nn.Module]) -> tuple[Batch, int]:
    """The batch, and how many chunks every rank runs.

    What is wrong with the arguments of one rank is raised on all that would wait for it.
    """
    norms = [module for module in modules if isinstance(module, nn.SyncBatchNorm) and module.training]
    synced: Any = dict.fromkeys(norm.process_group or dist.group.WORLD for norm in norms)
    names = [group.group_name for group in synced if group is not None and dist.get_world_size(group) > 1]
    errors: list[Exception] = []
    try:
        batch = plan()
        most = own = len(batch.sizes)
    except (ValueError, TypeError) as error:
        errors, most, own = [error], 0, 0
    for name in (*names, *shards.groups):
        same = {"the number of chunks under SyncBatchNorm": own} if name in names else {}
        try:
            found = Ranks("chunked", name).handshake(same, [most], errors)
            most = int(max(count for (count,) in found))
        except (ValueError, TypeError) as error:
            errors = [error]  # and on to the next group, where others wait
    if errors:
        raise errors.pop()  # out of this frame, which its traceback holds
    return batch, most
