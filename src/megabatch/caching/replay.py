"""The chunks of one call: run one by one, and again in the backward.

Every chunk is a non-reentrant checkpoint: a part of autograd's graph that keeps no activations and runs again when its
backward comes. So everything that autograd promises holds as without chunks: each parameter's gradient arrives once and
whole, hooks and DistributedDataParallel see it layer by layer, second derivatives are right.

What is added to torch's checkpoint: random numbers of every device, buffers, sums over chunks in float32, and a
comparison of the two runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .batch import Batch
from .containers import HALVES, flatten, tensors_of
from .outputs import Outputs
from .state import State, versions
from .transfer import Transfer
from .wrappers import check_checkpoints, has_ranks

Chunk = list[Any]  # a piece of every argument


@dataclass
class Call:
    """One call of an encoder in chunks."""

    encoder: Callable[..., Any]
    batch: Batch
    device: torch.device | None
    state: State
    parameters: Sequence[Tensor]

    def __post_init__(self) -> None:
        self.outputs, self._transfer = Outputs(self.batch.sizes, self.batch.order), Transfer(self.device)

    def forward(self) -> Any:
        chunks, graded = self.batch.chunks(), torch.is_grad_enabled()
        outputs = [self._checkpointed(chunks, i) if graded else self.run(chunks, i, i + 1) for i in range(len(chunks))]
        if graded and has_ranks():
            check_checkpoints(tensors_of(outputs[0]), tensors_of(chunks[0]))
        return self.outputs.join(outputs)

    def _checkpointed(self, chunks: Sequence[Chunk], index: int) -> Any:
        """The outputs of a chunk whose activations are formed again in the backward."""
        read = [*tensors_of(chunks[index]), *self.parameters]
        state, known, again = self.state.now(), versions(read), False

        def run() -> Any:
            nonlocal again
            if not again:
                again = True
                return self.run(chunks, index, index + 1)
            check_unwritten(read, known)
            with self.state.replayed(state):
                output = self.run(chunks, index, index - 1)
            self.outputs.compare(index, tensors_of(output), self.state.autocast_enabled)
            return output

        with set_checkpoint_early_stop(False):  # all of it runs again, to be compared
            return checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    def run(self, chunks: Sequence[Chunk], index: int, following: int) -> Any:
        """The outputs of a chunk. `following`: the chunk that comes next, to be copied meanwhile."""
        leaves, build = flatten(self._transfer.fetch(chunks, index, following))
        values = [leaf.value for leaf in leaves]
        # Clones of what has a graph, because an encoder may write to an activation, and chunks are views.
        values = [x.clone() if isinstance(x, Tensor) and x.requires_grad else x for x in values]
        moved = [self._transfer.move(x) if isinstance(x, Tensor) else x for x in values]
        args, kwargs = self.batch.call(index, build(iter(moved)))
        # Weights that autocast has cast and kept would be shared by all chunks, and their gradients summed in half
        # precision.
        torch.clear_autocast_cache()
        output = self.encoder(*args, **kwargs)
        torch.clear_autocast_cache()
        return self.batch.without_padding(output, index)


def check_unwritten(tensors: Sequence[Tensor], known: Sequence[int]) -> None:
    for tensor, before in zip(tensors, known, strict=True):
        if versions([tensor]) != [before]:
            raise RuntimeError(
                "chunked: inputs and parameters must not be written to between the forward and its backward, which "
                f"runs the encoder again, got one of shape {tuple(tensor.shape)} that was. Copy inputs that are "
                "reused, and step the optimizer after the backward."
            )


class _Modules(nn.ModuleList):
    def forward(self, encoder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return encoder(*args, **kwargs)


def in_float32(encoder: Callable[..., Any], roots: Sequence[nn.Module]) -> Callable[..., Any]:
    """The encoder with bf16 and fp16 parameters that are cast from float32: their gradients are summed in float32."""
    modules = _Modules(roots)
    slots = {
        f"{path}.{name}": parameter
        for path, module in modules.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype in HALVES and parameter.requires_grad and torch.is_grad_enabled()
    }
    wide = {id(parameter): (parameter.float(), parameter.dtype) for parameter in slots.values()}

    def encode(*args: Any, **kwargs: Any) -> Any:
        narrow = {key: parameter.to(dtype) for key, (parameter, dtype) in wide.items()}
        parameters = {name: narrow[id(parameter)] for name, parameter in slots.items()}
        return functional_call(modules, parameters, (encoder, *args), kwargs, tie_weights=False)

    return encode if slots else encoder
