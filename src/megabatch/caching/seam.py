"""The seam to autograd: the outputs of a chunked call, and the call again for their gradients."""

from typing import Any

import torch
from torch import Tensor


class Replay(torch.autograd.Function):
    """The seam: the outputs of a call, and the call again for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: Any, outputs: tuple[Tensor, ...], tensors: list[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x, yes in zip(outputs, call.wanted, strict=True) if not yes))
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Any = ctx.call
        if torch.is_grad_enabled() and (len(call.bounds) > 1 or call.by_side_effect):
            raise RuntimeError(
                "chunked: gradients must not be differentiated again (create_graph=True), because those of the chunks "
                "are formed one after another and keep no graph. Call the encoder without chunks, or under "
                "torch.utils.checkpoint.checkpoint(encoder, ..., use_reentrant=False) to save memory, where second "
                "derivatives are needed."
            )
        # _is_checkpoint_valid: torch has no public word for "all gradients are wanted", and its own reentrant
        # checkpoints ask the same.
        if call.by_side_effect and not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "chunked: torch.autograd.grad and backward(inputs=...) must not pass through an encoder that is "
                "sharded or has reentrant checkpoints, because its gradients are written, not returned. Call "
                "backward(), or use checkpoints with use_reentrant=False."
            )
        attached, leaves, inputs = call.backward(upstream, _unwritten(ctx))
        written = len(ctx.needs_input_grad) - 3 - len(attached) - len(leaves) - len(inputs)
        return None, None, None, *attached, *leaves, *[None] * written, *inputs


def _unwritten(ctx: Any) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "chunked: inputs must not be written to between the forward and its backward, which runs the encoder "
            f"again. Copy inputs that are reused. {error}"
        ) from None
