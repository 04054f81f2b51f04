"""A chunked call: its forward, which keeps nothing but its outputs, and its backward, which runs every chunk again.

The gradients of all chunks are added up here and handed to autograd as one: whoever waits for a parameter's gradient
(hooks, DistributedDataParallel, `torch.autograd.grad`) sees it once and whole, as without chunks.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from . import wrappers
from .batch import Batch
from .conditions import Autocast, Buffers, Randomness, States, versions, without_fast_paths
from .outputs import Gathered, Output, tensors_of
from .trace import HALVES, Sum, Trace, Unused, collected_in

# By DistributedDataParallel: the calls whose backward is still to come.
_outstanding: WeakKeyDictionary[DistributedDataParallel, WeakSet["Call"]] = WeakKeyDictionary()


@dataclass(eq=False)
class Call:
    """One call of an encoder in chunks.

    Attributes:
        encoder: What is called for every chunk; gives the outputs to keep.
        device: Where chunks are moved to; None: nowhere.
        bounds: Of the rows of every chunk. At least one, which may be empty.
        padding: How often the encoder runs beyond that, because other ranks have more chunks.
        by_side_effect: Gradients of parameters are not collected here: the encoder's own backward writes and reduces
            them, as under `fully_shard`.
        modules: Those that the encoder is or holds, as far as they can be seen.
        quieted: Wrappers that a chunk may call, and that must not send anything for it.
        reducers: Those that reduce the gradients of what is trained here.
    """

    encoder: Callable[..., Any]
    batch: Batch
    device: torch.device | None
    bounds: list[tuple[int, int]]
    padding: int
    by_side_effect: bool
    modules: list[nn.Module]
    quieted: list[DistributedDataParallel]
    randomness: Randomness
    autocast: Autocast
    buffers: Buffers
    states: list[States] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: Trace([], [], False))
    traced: int = 0
    unused: Unused = field(default_factory=lambda: Unused([], []))
    outputs: list[Output] = field(default_factory=list)
    reducers: list[DistributedDataParallel] = field(default_factory=list)
    remembered: list[int] = field(default_factory=list)
    connected: list[ref[Tensor]] = field(default_factory=list)

    def run(self, start: int, stop: int) -> tuple[Any, list[Tensor]]:
        """The outputs for these rows, and the leaves that stand in for the differentiable inputs."""
        args, kwargs, stand_ins = self.batch.chunk(start, stop, self.device)
        # A weight that autocast has cast and kept belongs to the graph it was cast in, or to none.
        torch.clear_autocast_cache()
        with wrappers.quiet(self.quieted), without_fast_paths():
            output = self.encoder(*args, **kwargs)
        torch.clear_autocast_cache()
        return output, stand_ins

    def forward(self, gathered: Gathered) -> None:
        """Run all chunks, without a graph from the first one on that has shown where gradients go."""
        wanted = torch.is_grad_enabled()
        with ExitStack() as watching:
            for index, (start, stop) in enumerate(self.bounds):
                self.states += [self.randomness.states()] if wanted else []
                tracing = wanted and not any(self.trace.wanted)
                # Reentrant checkpoints take care of the graph themselves, and would warn of none.
                with torch.set_grad_enabled(tracing or self.trace.hides_leaves):
                    began = torch._C._autograd._get_sequence_nr()
                    output, stand_ins = self.run(start, stop)
                if tracing:
                    self.traced = index
                    self.trace = Trace.of(tensors_of(output), [*stand_ins, *self.batch.items], began)
                if tracing and any(self.trace.wanted):
                    self.unused = Unused(self.modules, self.trace.leaves)
                    watching.enter_context(self.unused.watched())
                gathered.add(output, start, stop)
                del output, stand_ins
        self.buffers.look()
        with torch.no_grad(), self.randomness.replayed(), self.buffers.spared(rewound=False):
            for _ in range(self.padding):
                self.run(*self._spare_rows())

    def _spare_rows(self) -> tuple[int, int]:
        return 0, min(2, self.batch.rows)  # a norm may want more than one

    @property
    def leaves(self) -> list[Tensor]:
        """All that is trained."""
        return [*self.trace.leaves, *self.unused.met.values(), *self.batch.items]

    def wanted(self, outputs: Sequence[Output]) -> list[bool]:
        """Which outputs get a gradient: those that had one when traced, or may have come to one in a later chunk."""
        first = self.trace.wanted or [False] * len(outputs)
        later = bool(self.unused.met)
        return [yes or (later and into.value.is_floating_point()) for yes, into in zip(first, outputs, strict=True)]

    def remember(self, outputs: list[Output]) -> None:
        """What the backward is to find as it is now."""
        self.outputs = outputs
        self.batch.check_unwritten()
        self.remembered = versions(self._read_again())

    def _read_again(self) -> list[Any]:
        return [*self.leaves, *(argument.value for argument in self.batch.arguments)]

    def connect(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the outputs their place in autograd's graph, and in the books of who reduces gradients."""
        inputs = [argument.value for argument in self.batch.differentiable]
        sources = self._asked_for() if self.by_side_effect else self.leaves
        outputs = Replay.apply(self, outputs, *sources, *inputs)  # type: ignore[no-untyped-call]
        for ddp in self.reducers:
            calls = _outstanding.setdefault(ddp, WeakSet())
            earlier = [output for call in calls for kept in call.connected if (output := kept()) is not None]
            outputs = wrappers.passed_through(ddp, outputs, earlier)
            calls.add(self)
        self.connected = [ref(output) for output in outputs]
        return outputs

    def _asked_for(self) -> list[Tensor]:
        """Stands for gradients that come by side effect, so that who asks autograd for them is heard, and refused."""
        parameters = [p for p in wrappers.parameters_of(self.modules) if p.requires_grad and not _has_hooks(p)]
        return [torch.zeros((), requires_grad=True), *parameters]

    def backward(self, upstream: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the leaves, unless they come by side effect, and of the differentiable inputs."""
        for ddp in self.reducers:
            _outstanding[ddp].discard(self)
        if self.by_side_effect:
            wrappers.check_idle(self.modules)
        self._check_unchanged()
        leaves = [] if self.by_side_effect else [Sum(leaf) for leaf in self.leaves]
        inputs = [Sum(argument.value) for argument in self.batch.differentiable]
        # Where nothing but single numbers has a gradient, the first chunk gives all of it.
        rows_count = any(
            into.rows for into, gradient in zip(self.outputs, upstream, strict=True) if gradient is not None
        )
        with self.autocast.off(), self.buffers.spared(rewound=True), collected_in(leaves):
            for index, (start, stop) in enumerate(self.bounds if rows_count else self.bounds[:1]):
                pairs, stand_ins = self._run_again(index, upstream)
                found = self._push(pairs, leaves, stand_ins)
                for argument, total, gradient in zip(self.batch.differentiable, inputs, found, strict=True):
                    if gradient is not None and argument.split:
                        total.set_rows(start, stop, gradient)
                    elif gradient is not None:
                        total.add(gradient)
            for _ in range(self.padding if rows_count else 0):
                self._push_nothing(upstream)
        for into in self.outputs:
            into.check(self._tolerance(into))
        return [total.result() for total in (*leaves, *inputs)]

    def _run_again(
        self, index: int, upstream: Sequence[Tensor | None]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """A chunk's outputs with a graph, each with the gradient that goes into it, and the stand-ins."""
        start, stop = self.bounds[index]
        with torch.enable_grad(), self.autocast.again(), self.randomness.replayed(self.states[index]):
            output, stand_ins = self.run(start, stop)
        tensors = tensors_of(output)
        self._check_trace(index, tensors, stand_ins)
        pairs = []
        for tensor, into, gradient in zip(tensors, self.outputs, upstream, strict=True):
            into.compare(tensor, start, stop)
            if gradient is not None and tensor.requires_grad and (into.rows or index == 0):
                pairs.append((tensor, into.part(gradient, start, stop)))
        return pairs, stand_ins

    def _tolerance(self, output: Output) -> float:
        """How far a replay may be from the forward: another order of sums is nearer, other random numbers farther."""
        if output.value.dtype in HALVES or any(enabled for _, enabled, _ in self.autocast.kinds):
            return 0.05
        return 1e-5 if output.value.dtype in (torch.float64, torch.complex128) else 0.01

    def _push(
        self, pairs: list[tuple[Tensor, Tensor]], leaves: list[Sum], stand_ins: list[Tensor]
    ) -> Sequence[Tensor | None]:
        """Have a chunk's graph run back, and forgotten. Returns the gradients of the stand-ins."""
        if not pairs:
            return [None] * len(stand_ins)
        outputs, gradients = zip(*pairs, strict=True)
        pairs.clear()
        if self.by_side_effect:
            torch.autograd.backward(outputs, gradients)
            return [stand_in.grad for stand_in in stand_ins]
        wanted = [*(total.tensor for total in leaves), *stand_ins]
        return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)[len(leaves) :]

    def _push_nothing(self, upstream: Sequence[Tensor | None]) -> None:
        with torch.enable_grad(), self.autocast.again(), self.randomness.replayed():
            output, _ = self.run(*self._spare_rows())
        used = [  # as by any chunk but the first
            tensor
            for tensor, into, gradient in zip(tensors_of(output), self.outputs, upstream, strict=True)
            if gradient is not None and tensor.requires_grad and into.rows
        ]
        torch.autograd.backward(used, [torch.zeros_like(tensor) for tensor in used])

    def _check_unchanged(self) -> None:
        again = self._read_again()
        for value, before, now in zip(again, self.remembered, versions(again), strict=True):
            if before != now:
                raise RuntimeError(
                    "chunked: parameters and inputs must not be written to between the forward and its backward, which "
                    f"runs the encoder again; got a tensor of shape {tuple(value.shape)} at version {now}, not "
                    f"{before}. Step the optimizer after the backward, and copy inputs that are reused."
                )

    def _check_trace(self, index: int, tensors: list[Tensor], stand_ins: list[Tensor]) -> None:
        """That gradients go where they are collected."""
        if self.by_side_effect:
            return
        again = Trace.of(tensors, [*stand_ins, *self.batch.items])
        now, then, known = ({id(x) for x in leaves} for leaves in (again.leaves, self.trace.leaves, self.leaves))
        if not now <= known or (index == self.traced and (now, again.wanted) != (then, self.trace.wanted)):
            raise RuntimeError(
                "chunked: the encoder must use the same parameters in the backward, which runs it again, as in the "
                "forward, got others. Freeze, unfreeze or replace parameters after the backward; and let parameters "
                "that only some chunks use belong to modules that are called, and that the encoder is or holds."
            )


def _has_hooks(parameter: Any) -> bool:
    """Which do not expect to be called without a gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Replay(torch.autograd.Function):
    """The seam: the outputs of a call, and the call again for their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, outputs: tuple[Tensor, ...], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        wanted = call.wanted(call.outputs)
        ctx.mark_non_differentiable(*(output for output, yes in zip(outputs, wanted, strict=True) if not yes))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call | None = ctx.call
        if call is None:
            raise RuntimeError(
                "chunked: backward must not run a second time, because the first has let go of the inputs. Pass "
                "retain_graph=True to the first."
            )
        if call.by_side_effect and not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "chunked: torch.autograd.grad and backward(inputs=...) must not pass through an encoder that is "
                "sharded or has reentrant checkpoints, because its gradients are written, not returned. Call "
                "backward(), or use checkpoints with use_reentrant=False."
            )
        gradients = call.backward(upstream)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None
        written = [None] * (len(ctx.needs_input_grad) - 2 - len(gradients))
        return None, None, *written, *gradients
