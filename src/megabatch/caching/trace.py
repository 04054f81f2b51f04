"""Where the gradients of a chunk go, read off its graph."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Trace:
    """The leaves that the graph of some outputs ends in.

    Attributes:
        leaves: All that is trained: parameters, and other leaves that the encoder uses.
        wanted: For every output, whether it has a gradient.
        hides_leaves: Part of the graph (a reentrant checkpoint) will write to leaves of its own accord.
    """

    leaves: list[Tensor]
    wanted: list[bool]
    hides_leaves: bool

    @classmethod
    def of(cls, outputs: Sequence[Tensor], stand_ins: Sequence[Tensor], began: int = 0) -> "Trace":
        """Without the leaves that stand in for inputs. No node may be older than the number `began`."""
        own = {id(stand_in) for stand_in in stand_ins}
        ends = {stand_in.grad_fn for stand_in in stand_ins}
        leaves: dict[int, Tensor] = {
            id(output): output for output in outputs if output.requires_grad and output.is_leaf
        }
        hides_leaves = False
        waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if node in ends:
                continue
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves[id(leaf)] = leaf
                continue
            if node._sequence_nr() < began:
                raise ValueError(
                    "chunked: encoder must not use tensors with a gradient history outside of it, other than its "
                    f"arguments, got {node.name()}. Pass the tensor as an argument, and name it in whole."
                )
            hides_leaves |= node.name().startswith("CheckpointFunction")
            following = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
            seen |= following
            waiting += following
        trained = [leaf for key, leaf in leaves.items() if key not in own]
        return cls(trained, [output.requires_grad for output in outputs], hides_leaves)


class Unused:
    """Parameters of an encoder that its first chunk did not use, and those among them that a later chunk comes to.

    Layers are dropped at random, experts chosen by the data: the modules whose parameters these are tell when they run.
    """

    def __init__(self, modules: Sequence[nn.Module], used: Sequence[Tensor]) -> None:
        self._modules = modules
        seen = {id(p): p for module in self._modules for p in module._parameters.values() if p is not None}
        known = {id(leaf) for leaf in used}
        self._unused = {key: p for key, p in seen.items() if p.requires_grad and key not in known}
        self.met: dict[int, Tensor] = {}
        self.all_seen = known <= set(seen)  # so that there are no parameters but those of these modules

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._modules:
                if any(id(parameter) in self._unused for parameter in module._parameters.values()):
                    stack.callback(module.register_forward_pre_hook(self._meet).remove)
            yield

    def _meet(self, module: nn.Module, _: Any) -> None:
        self.met |= {id(p): p for p in module._parameters.values() if p is not None and id(p) in self._unused}


class Sum:
    """The gradient of one tensor, added up over chunks: in float32 for halves, and rounded once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._dtype = torch.float32 if tensor.dtype in HALVES else tensor.dtype
        self._value: Tensor | None = None
        self._nothing: Tensor | None = None  # in place of a gradient that was taken

    def add(self, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:
            self._value = gradient if self._value is None else self._value + gradient
        elif self._value is None:
            # A copy, laid out as the tensor: what arrives may be part of something else.
            self._value = torch.empty_like(self.tensor, dtype=self._dtype, requires_grad=False).copy_(gradient)
        else:
            self._value += gradient

    def set_rows(self, start: int, stop: int, gradient: Tensor) -> None:
        if self._value is None:
            self._value = torch.zeros_like(self.tensor, requires_grad=False)
        self._value[start:stop] = gradient

    def take(self, gradient: Tensor | None) -> Tensor | None:
        """As a hook: so that a chunk's gradient of one layer is gone before that of the next comes."""
        if gradient is None:
            return None
        self.add(gradient)
        if self._nothing is None and type(gradient) is Tensor and gradient.layout == torch.strided:
            self._nothing = gradient.new_zeros(()).expand_as(gradient)
        return self._nothing

    def result(self) -> Tensor | None:
        return None if self._value is None else self._value.to(self.tensor.dtype)


@contextmanager
def collected_in(sums: Sequence[Sum]) -> Iterator[None]:
    """Gradients that arrive at the tensors go into the sums. Hooks that others have put there wait for the whole."""
    with ExitStack() as stack:
        for total in sums:
            tensor: Any = total.tensor
            if not tensor.requires_grad:
                continue
            stack.callback(setattr, tensor, "_backward_hooks", tensor._backward_hooks)
            tensor._backward_hooks = None
            stack.callback(tensor.register_hook(total.take).remove)
        yield
