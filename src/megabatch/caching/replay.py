"""A chunked call: its forward, which keeps nothing but its outputs, and its backward, which runs every chunk again.

The last chunk stays part of the caller's graph, without its activations: once the gradients of all others have been
added up, it runs again and backwards in the caller's own backward. So whoever waits for a parameter's gradient (hooks,
DistributedDataParallel, `torch.autograd.grad`) sees it once and whole, layer by layer, as without chunks.

Two kinds of encoder write gradients in a backward of their own, and have that of the last chunk here: modules under
`fully_shard` reduce what they find after it, and reentrant checkpoints write in every chunk.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .batch import Batch, StandIn
from .leaves import HALVES, Graph, Sum, check_apart, collected_in, has_hooks
from .nested import tensors_of
from .outputs import Gathered, Output
from .seam import Replay
from .shards import Shards
from .state import Autocast, Buffers, Randomness, versions
from .transfer import Transfer


class ChunkedCall:
    """One call of an encoder in chunks.

    Attributes:
        bounds: Of the rows of every chunk. At least one, which may be empty.
        trained: All leaves that chunks use, by id.
        leaves: Those of chunks whose graph is not the caller's.
        wanted: For every output, whether it has a gradient.
        reentrant: There are reentrant checkpoints.
    """

    def __init__(
        self,
        encoder: Callable[..., Any],
        batch: Batch,
        bounds: list[tuple[int, int]],
        place: torch.device | None,
        devices: Sequence[torch.device],
        buffers: Buffers,
        shards: Shards,
    ) -> None:
        self._encoder, self._batch, self.bounds = encoder, batch, bounds
        self._transfer, self._buffers, self._shards = Transfer(place), buffers, shards
        self._randomness, self._autocast = Randomness(devices), Autocast(devices)
        self._states: list[list[Tensor]] = []
        self._used: list[tuple[set[int], list[bool]]] = []  # by every chunk: leaves, and which outputs have a gradient
        self._outputs: list[Output] = []
        self.leaves: dict[int, Tensor] = {}
        self.trained: dict[int, Tensor] = {}
        self.reentrant = self.has_reentrant = self.done = False

    @property
    def by_side_effect(self) -> bool:
        return self.reentrant or bool(self._shards)

    @property
    def sharded(self) -> bool:
        return bool(self._shards)

    @property
    def wanted(self) -> list[bool]:
        return [any(each) for each in zip(*(wanted for _, wanted in self._used), strict=True)]

    # ---- forward

    def forward(self, gathered: Gathered) -> list[Tensor]:
        """Run all chunks. Returns the outputs of the last one that are part of the caller's graph."""
        attached: list[Tensor] = []
        first: Graph | None = None
        graded, last = torch.is_grad_enabled(), len(self.bounds) - 1
        for index in range(last + 1):
            attach = graded and index == last and not self.by_side_effect
            self._states += [self._randomness.states()] if graded else []
            output, ends = self._attach(index) if attach else self._run_without_graph(index)
            tensors = tensors_of(output)
            if graded:
                graph = Graph(tensors, ends)
                self.trained |= graph.leaves
                self._used.append((set(graph.leaves), [tensor.requires_grad for tensor in tensors]))
                attached = [tensor for tensor in tensors if tensor.requires_grad] if attach else []
                self.has_reentrant |= graph.reentrant
                if not attach:
                    self.leaves |= graph.leaves
                    self.reentrant = self.has_reentrant
                if first is not None:
                    check_apart(first, graph)
                first = graph if index == 0 else None
                del graph
            gathered.add(output, *self.bounds[index])
            del output, ends, tensors
        with torch.no_grad(), self._randomness.replayed(), self._buffers.spared(self._buffers.now()):
            for _ in range(self._shards.spare):
                self._run_spare(self._batch)
        return attached

    def _run_without_graph(self, index: int) -> tuple[Any, list[Tensor]]:
        """With one to be looked at, if gradients are wanted, that holds no activations."""
        with saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
            output, stand_ins = self._run(self._batch, index)
        return output, [stand_in.leaf for stand_in in stand_ins]

    def _attach(self, index: int) -> tuple[Any, list[Tensor]]:
        """The last chunk: its graph is the caller's, and its activations are formed again in the backward."""
        batch, state, ran = copy.copy(self._batch), self._buffers.now(), False
        ends = [batch.tensors()[i] for i in batch.differentiable]

        def run() -> Any:
            nonlocal ran
            if not ran:
                ran = True
                return self._run(batch, index, attached=True)[0]
            with self._again(index), self._buffers.spared(state):
                output, _ = self._run(batch, index, attached=True)
            self._compare(index, tensors_of(output), ends)
            self._check_outputs()
            return output

        with set_checkpoint_early_stop(False):  # all of it runs again, to be compared
            return checkpoint(run, use_reentrant=False, preserve_rng_state=False), ends

    def _run(self, batch: Batch, index: int, attached: bool = False) -> tuple[Any, list[StandIn]]:
        """The outputs of a chunk, and the leaves that stand in for the differentiable inputs."""
        pieces = self._transfer.fetch(index, lambda i: batch.pieces(*self.bounds[i]), len(self.bounds) - 1)
        args, kwargs, stand_ins = batch.chunk(pieces, self.bounds[index], self._transfer, attached)
        # A weight that autocast has cast and kept belongs to the graph it was cast in, or to none.
        torch.clear_autocast_cache()
        with self._shards.encoding():
            output = self._encoder(*args, **kwargs)
        torch.clear_autocast_cache()
        return batch.without_padding(output, *self.bounds[index]), stand_ins

    def _run_spare(self, batch: Batch) -> list[Tensor]:
        """For the sake of ranks with more chunks."""
        bounds = 0, min(2, batch.rows)  # a norm may want more than one
        args, kwargs, _ = batch.chunk(batch.pieces(*bounds), bounds, self._transfer, attached=False)
        with self._shards.encoding():
            return tensors_of(self._encoder(*args, **kwargs))

    def connect(
        self, outputs: tuple[Tensor, ...], attached: list[Tensor], gathered: Gathered, parameters: Sequence[Tensor]
    ) -> Any:
        """The outputs with their place in autograd's graph.

        `parameters`: Of the encoder's modules. Where gradients are written, who asks autograd for them is to be heard,
        and refused.
        """
        self._batch.check_unwritten()
        self._outputs, self._versions = gathered.outputs, versions(self.trained.values())
        tensors = self._batch.tensors()
        inputs = [tensors[i] for i in self._batch.differentiable]
        # The tensors are kept by the graph, and go with it.
        self._batch = self._batch.with_tensors([tensor.new_empty(0) for tensor in tensors])
        sources = list(self.leaves.values())
        self._shards.watch()
        if self.by_side_effect:
            sources = [
                torch.zeros((), requires_grad=True),
                *(p for p in parameters if p.requires_grad and not has_hooks(p)),
            ]
        return Replay.apply(self, outputs, tensors, *attached, *sources, *inputs)  # type: ignore[no-untyped-call]

    # ---- backward

    @contextmanager
    def _again(self, index: int | None) -> Iterator[None]:
        states = None if index is None else self._states[index]
        with torch.enable_grad(), self._autocast.again(), self._randomness.replayed(states):
            yield

    def backward(
        self, upstream: Sequence[Tensor | None], tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """The gradients of the last chunk's outputs, of the leaves, and of the differentiable inputs."""
        self.done = True
        self._shards.check_idle()
        self._check_unchanged()
        batch, last = self._batch.with_tensors(tensors), len(self.bounds) - 1
        leaves = [Sum(leaf) for leaf in self.leaves.values()]
        inputs = [Sum(tensor) for tensor in tensors]
        # Where nothing but single numbers has a gradient, the last chunk gives all of it.
        needed = any(g is not None and into.rows for into, g in zip(self._outputs, upstream, strict=True))
        with self._autocast.again(on=False), self._buffers.spared():
            with collected_in([] if self.reentrant else leaves), self._shards.gathered():
                for index in range(last if needed else 0):
                    self._replay(batch, index, upstream, leaves, inputs)
                for _ in range(self._shards.spare if needed else 0):
                    self._replay_spare(batch, upstream, leaves)
            if self.by_side_effect:
                self._replay(batch, last, upstream, leaves, inputs)
                self._check_outputs()
        found = [inputs[i].result() for i in batch.differentiable]
        if self.by_side_effect:
            return [], [], found
        start, stop = self.bounds[last]
        attached = [
            None if gradient is None else into.part(gradient, start, stop)
            for gradient, into, yes in zip(upstream, self._outputs, self._used[last][1], strict=True)
            if yes
        ]
        if all(gradient is None for gradient in attached):
            self._check_outputs()
        return attached, [leaf.result() for leaf in leaves], found

    def _replay(
        self,
        batch: Batch,
        index: int,
        upstream: Sequence[Tensor | None],
        leaves: Sequence[Sum],
        inputs: Sequence[Sum],
    ) -> None:
        """Run a chunk again, and backwards."""
        (start, stop), last = self.bounds[index], index == len(self.bounds) - 1
        with self._again(index):
            output, stand_ins = self._run(batch, index)
        tensors = tensors_of(output)
        self._compare(index, tensors, [stand_in.leaf for stand_in in stand_ins])
        pairs = [
            (tensor, into.part(gradient, start, stop))
            for tensor, into, gradient in zip(tensors, self._outputs, upstream, strict=True)
            if gradient is not None and tensor.requires_grad and (into.rows or last)
        ]
        del output, tensors
        if last:  # what the others have given arrives with its own
            pairs += [(leaf.tensor, total) for leaf in leaves if (total := leaf.result()) is not None]
        if not pairs:
            return
        roots, gradients = zip(*pairs, strict=True)
        pairs.clear()
        if last or self.reentrant:
            torch.autograd.backward(roots, gradients)
            found: Sequence[Tensor | None] = [stand_in.leaf.grad for stand_in in stand_ins]
        else:
            asked = [*(leaf.tensor for leaf in leaves), *(stand_in.leaf for stand_in in stand_ins)]
            found = torch.autograd.grad(roots, asked, gradients, allow_unused=True)[len(leaves) :]
        for (i, place, _), gradient in zip(stand_ins, found, strict=True):
            inputs[i].add_at(place, gradient)

    def _replay_spare(self, batch: Batch, upstream: Sequence[Tensor | None], leaves: Sequence[Sum]) -> None:
        with self._again(None):
            outputs = self._run_spare(batch)
        used = [  # as by any chunk but the last
            tensor
            for tensor, into, gradient in zip(outputs, self._outputs, upstream, strict=True)
            if gradient is not None and tensor.requires_grad and into.rows
        ]
        nothing = [torch.zeros_like(tensor) for tensor in used]
        torch.autograd.grad(used, [leaf.tensor for leaf in leaves], nothing, allow_unused=True)

    # ---- what must be the same

    def _compare(self, index: int, tensors: list[Tensor], ends: Sequence[Tensor]) -> None:
        """That gradients go where they did, and note how far the outputs are from the forward's."""
        now = set(Graph(tensors, ends).leaves), [tensor.requires_grad for tensor in tensors]
        if now != self._used[index]:
            raise RuntimeError(
                "chunked: the encoder must use the same parameters in the backward, which runs it again, as in the "
                "forward, got others. Freeze, unfreeze or replace parameters after the backward."
            )
        for tensor, into in zip(tensors, self._outputs, strict=True):
            into.compare(tensor, *self.bounds[index])

    def _check_outputs(self) -> None:
        """How far a replay may be from the forward: another order of sums is nearer, other random numbers farther."""
        for into in self._outputs:
            exact = into.value.dtype in (torch.float64, torch.complex128)
            coarse = into.value.dtype in HALVES or self._autocast.enabled
            into.check(0.05 if coarse else 1e-5 if exact else 0.01)

    def _check_unchanged(self) -> None:
        for leaf, before in zip(self.trained.values(), self._versions, strict=True):
            if versions([leaf]) != [before]:
                raise RuntimeError(
                    "chunked: parameters must not be written to between the forward and its backward, which runs the "
                    f"encoder again; got one of shape {tuple(leaf.shape)} that was. Step the optimizer after the "
                    "backward."
                )
