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
from .containers import flatten, tensors_of
from .replay import Call, Chunk, check_unwritten
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
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before somebody imports it
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
        """Of a chunk. Until the last, gradients are kept unreduced, and parameters gathered that stay so."""
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
        chunks, graded = self.batch.chunks(), torch.is_grad_enabled()
        outputs: list[Any] = []
        states = []
        for index in range(len(chunks)):
            states.append(self.state.now())
            with saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):  # a graph without activations
                outputs.append(self._encode(chunks, index))
        with torch.no_grad(), self.state.replayed(self.state.now()):
            for _ in range(self.spare):
                self._encode(chunks, 0)
        return self.outputs.join(self._connect(outputs, chunks, states) if graded else outputs)

    def _connect(self, outputs: list[Any], chunks: list[Chunk], states: list[Any]) -> list[Any]:
        """The outputs with this call in place of their graphs."""
        inputs = {id(x): x for x in tensors_of(chunks) if x.requires_grad}
        # Parameters are inputs, so that whoever asks autograd for their gradients gets an error.
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        tensors, (leaves, build) = tensors_of(outputs), flatten(outputs)
        if not any(x.requires_grad for x in tensors):
            return outputs
        self.shards.watch()
        apply: Any = Replay.apply
        connected = iter(apply(self, chunks, states, tensors, *inputs.values(), *trained))
        return list(build(iter([next(connected) if isinstance(x.value, Tensor) else x.value for x in leaves])))

    def _encode(self, chunks: Sequence[Chunk], index: int) -> Any:
        with self.shards.encoding():
            return self.run(chunks, index, index + 1)

    def backward(
        self, chunks: list[Chunk], states: Sequence[Any], upstream: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of the inputs; those of the parameters are written."""
        if self.shards.called_plainly:
            # fully_shard takes a forward in the middle of its own backward for a checkpoint's.
            raise RuntimeError(
                "chunked: an encoder under fully_shard must not be called in chunks and then without before the "
                "backward, got a call without. Call it by chunked everywhere in the step."
            )
        last, width = len(chunks) - 1, len(upstream) // len(chunks)
        parts = [upstream[i * width : (i + 1) * width] for i in range(len(chunks))]
        used = [gradient is not None for gradient in parts[last]]  # by every chunk, so that all do the same
        totals: dict[int, Tensor] = {}  # gradients of inputs
        try:
            for index in range(last):
                self._replay(chunks, states, index, parts[index], used, totals)
            for _ in range(self.spare):
                self._replay(chunks, states, 0, [None] * width, used, totals, is_spare=True)
            self._replay(chunks, states, last, parts[last], used, totals)
        finally:
            self.shards.prepare_backward(is_last=True)
        self.outputs.check(self.state.autocast_enabled)
        return [totals.get(key) for key in {id(x): x for x in tensors_of(chunks) if x.requires_grad}]

    def _replay(
        self,
        chunks: Sequence[Chunk],
        states: Sequence[Any],
        index: int,
        upstream: Sequence[Tensor | None],
        used: Sequence[bool],
        totals: dict[int, Tensor],
        is_spare: bool = False,
    ) -> None:
        """Run a chunk again, and its backward; where it got no gradient, with zeros."""
        self.shards.prepare_backward(is_last=index == len(chunks) - 1 and not is_spare)
        leaves, build = flatten(chunks[index])
        pieces = [leaf.value for leaf in leaves]
        values = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x for x in pieces]
        with torch.enable_grad(), self.state.replayed(states[index]):
            outputs = tensors_of(self._encode([*chunks[:index], build(iter(values)), *chunks[index + 1 :]], index))
        if not is_spare:
            self.outputs.compare(index, outputs, self.state.autocast_enabled)
        both = zip(outputs, upstream, used, strict=True)
        pairs = [(x, torch.zeros_like(x) if g is None else g) for x, g, yes in both if yes and x.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))  # type: ignore[arg-type]
        for piece, value in zip(pieces, values, strict=True):
            if piece is not value and value.grad is not None:
                known = totals.get(id(piece))
                totals[id(piece)] = value.grad if known is None else known + value.grad


class Replay(torch.autograd.Function):
    """The outputs of all chunks, and the chunks again for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, chunks: list[Chunk], states: list[Any], outputs: list[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.chunks, ctx.states = call, chunks, states
        ctx.versions = versions(tensors_of(chunks))
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
        check_unwritten(tensors_of(ctx.chunks), ctx.versions)
        found = ctx.call.backward(ctx.chunks, ctx.states, upstream)
        return None, None, None, None, *found, *[None] * (len(ctx.needs_input_grad) - 4 - len(found))


def agree_on_chunks(plan: Callable[[], Batch], shards: Shards, modules: Sequence[nn.Module]) -> tuple[Batch, int]:
    """The batch, and how many chunks every rank runs.

    What is wrong with the arguments of one rank is raised on all that would wait for it.
    """
    norms = [module for module in modules if isinstance(module, nn.SyncBatchNorm) and module.training]
    synced: Any = dict.fromkeys(norm.process_group or dist.group.WORLD for norm in norms)
    groups = [(group.group_name, True) for group in synced if group is not None and dist.get_world_size(group) > 1]
    error: Exception | None = None
    try:
        batch = plan()
        most = own = len(batch.sizes)
    except (ValueError, TypeError) as refusal:
        error, most, own = refusal, 0, 0
    for name, equal in (*groups, *((name, False) for name in shards.groups)):
        same = {"the number of chunks under SyncBatchNorm": own} if equal else {}
        try:
            found = Ranks("chunked", name).handshake(same, [most], [] if error is None else [error])
            most = int(max(count for (count,) in found))
        except (ValueError, TypeError) as refusal:
            error = refusal  # and on to the next group, where others wait
    try:
        if error is not None:
            raise error
    finally:
        error = None  # its traceback holds this frame: together they would keep the encoder and its group
    return batch, most
