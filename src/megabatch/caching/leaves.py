"""Where the gradients of a chunk go, read off its graph, and their sums over chunks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

HALVES = (torch.float16, torch.bfloat16)


class Graph:
    """The graph of a chunk's outputs.

    Attributes:
        leaves: The tensors it ends in, by id: parameters, and other leaves that the encoder uses.
        nodes: All others.
        reentrant: A reentrant checkpoint will write to leaves of its own accord.
    """

    def __init__(self, outputs: Iterable[Tensor], stand_ins: Iterable[Tensor]) -> None:
        """Ends at the tensors that stand in for the arguments."""
        outputs, stand_ins = list(outputs), list(stand_ins)
        own, ends = {id(tensor) for tensor in stand_ins}, {tensor.grad_fn for tensor in stand_ins}
        self.leaves: dict[int, Tensor] = {id(x): x for x in outputs if x.requires_grad and x.is_leaf}
        self.nodes: set[Node] = set()
        waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen: set[Any] = {None, *ends, *waiting}
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self.leaves[id(leaf)] = leaf
                continue
            if node in ends:
                continue
            self.nodes.add(node)
            for following, _ in node.next_functions:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        for key in own:
            self.leaves.pop(key, None)

    @property
    def reentrant(self) -> bool:
        return any(node.name().startswith("CheckpointFunction") for node in self.nodes)


def check_apart(one: Graph, other: Graph) -> None:
    """Two chunks share nothing but leaves, or a gradient that came to it would be counted by neither."""
    for node in one.nodes & other.nodes:
        raise ValueError(
            "chunked: encoder must not use tensors with a gradient history outside of it, other than its arguments, "
            f"got {node.name()}. Pass the tensor as an argument, and name it in whole."
        )


class Sum:
    """The gradient of one tensor, added up over chunks: in float32 for bf16 and fp16, and rounded once."""

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

    def add_at(self, place: tuple[slice, ...] | None, gradient: Tensor | None) -> None:
        """To part of the tensor, or to all of it."""
        if place is None and gradient is not None:
            self.add(gradient)
        elif gradient is not None:
            self._value = torch.zeros_like(self.tensor, requires_grad=False) if self._value is None else self._value
            self._value[place] = gradient

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
            if has_hooks(tensor):
                stack.callback(setattr, tensor, "_backward_hooks", tensor._backward_hooks)
                tensor._backward_hooks = None
            stack.callback(tensor.register_hook(total.take).remove)
        yield


def has_hooks(tensor: Any) -> bool:
    """Which wait for the whole gradient, and expect there to be one."""
    # _backward_hooks: torch has no public way to ask for a tensor's hooks, or to pause them.
    return bool(tensor._backward_hooks)
