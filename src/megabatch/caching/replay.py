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
from .containers import HALF_PRECISION, Name, map_tensors, tensors_of
from .outputs import Outputs, selected
from .state import State, versions
from .transfer import Transfer
from .wrappers import check_checkpoints, has_ranks


@dataclass
class Call:
    """One call of an encoder in chunks."""

    encoder: Callable[..., Any]
    batch: Batch
    device: torch.device | None
    state: State
    parameters: Sequence[Tensor]
    select: Name | Sequence[Name] | None

    def __post_init__(self) -> None:
        self.chunks = self.batch.chunks()
        self.outputs = Outputs(self.batch.sizes, self.batch.order, self.state.autocast_enabled)
        self._transfer = Transfer(self.device)

    def forward(self) -> Any:
        if not torch.is_grad_enabled():
            return self.outputs.join([self.run(index, index + 1) for index in range(len(self.chunks))])
        outputs = [self._checkpointed(index) for index in range(len(self.chunks))]
        if has_ranks():
            check_checkpoints(tensors_of(outputs[0]), tensors_of(self.chunks[0]))
        return self.outputs.join(outputs)

    def _checkpointed(self, index: int) -> Any:
        """The outputs of a chunk whose activations are formed again in the backward."""
        read = [*tensors_of(self.chunks[index]), *self.parameters]
        state, known, again = self.state.now(), versions(read), False
        errors: list[Exception] = []

        def run() -> Any:
            nonlocal again
            if not again:
                again = True
                try:
                    return self.run(index, index + 1)
                except Exception as error:  # raised below: torch 2.8 would leave its hooks on all of autograd
                    errors.append(error)
                    return None
            check_unwritten(read, known)
            with self.state.replayed(state):
                output = self.run(index, index - 1)
            self.outputs.compare(index, tensors_of(output))
            return output

        with set_checkpoint_early_stop(False):  # all of it runs again, to be compared
            output = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        if errors:
            raise errors.pop()  # out of this frame, which its traceback holds
        check_unwritten(read, known)
        return output

    def run(self, index: int, following: int) -> Any:
        """The outputs of a chunk. `following`: the chunk that comes next, to be copied meanwhile."""
        chunk = self._transfer.fetch(self.chunks, index, following)
        # Clones of what has a graph, because an encoder may write to an activation, and chunks are views.
        moved = map_tensors(lambda x: self._transfer.move(x.clone() if x.requires_grad else x), chunk)
        args, kwargs = self.batch.call(index, moved)
        # Weights that autocast has cast and kept would be shared by all chunks, and their gradients summed in half
        # precision.
        torch.clear_autocast_cache()
        output = selected(self.encoder(*args, **kwargs), self.select)
        torch.clear_autocast_cache()
        return self.batch.without_padding(output, index)


def check_unwritten(tensors: Sequence[Tensor], known: Sequence[int]) -> None:
    for tensor, before, now in zip(tensors, known, versions(tensors), strict=True):
        if before != now:
            raise RuntimeError(
                "chunked: inputs and parameters must not be written to, by the encoder or between the forward and its "
                f"backward, which runs the encoder again, got one of shape {tuple(tensor.shape)} that was. Copy inputs "
                "first, and step the optimizer after the backward."
            )


class _Modules(nn.ModuleList):
    def forward(self, encoder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return encoder(*args, **kwargs)


def in_float32(encoder: Callable[..., Any], roots: Sequence[nn.Module]) -> Callable[..., Any]:
    """The encoder with bf16 and fp16 parameters that are cast from float32: their gradients are summed in float32."""
    modules = _Modules(roots)
    narrow = {
        f"{path}.{name}": parameter
        for path, module in modules.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype in HALF_PRECISION and parameter.requires_grad and torch.is_grad_enabled()
    }
    if not narrow:
        return encoder
    wide = {parameter: parameter.float() for parameter in narrow.values()}

    def encode(*args: Any, **kwargs: Any) -> Any:
        cast = {parameter: wide[parameter].to(parameter.dtype) for parameter in wide}
        parameters = {name: cast[parameter] for name, parameter in narrow.items()}
        return functional_call(modules, parameters, (encoder, *args), kwargs, tie_weights=False)

    return encode
