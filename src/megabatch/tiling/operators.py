"""The operators: the one seam to autograd, to torch.compile and to everything that traces.

Tensors are arguments; everything else travels in one string, a constant to a compiler. Plans are made inside, from
real sizes, so that a new batch size compiles nothing anew; outputs whose size the plan decides are of unknown size to a
tracer. The backward is an operator of its own, and has no backward.
"""

from typing import Any

import torch
from torch import Tensor

from . import engine
from .call import Call, Inputs


@torch.library.custom_op("megabatch::contrast", mutates_args=())
def contrast(
    first: Tensor,
    second: Tensor | None,
    extra: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    first_ids: Tensor | None,
    second_ids: Tensor | None,
    extra_ids: Tensor | None,
    positives: Tensor | None,
    weight: Tensor | None,
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, its statistics, and what the backward needs: `engine.Outputs`."""
    inputs = Inputs(first, second, extra, scale, bias, first_ids, second_ids, extra_ids, positives, weight)
    with torch.autocast(first.device.type, enabled=False):
        return engine.forward(inputs, Call.decode(call)).as_tuple()


@contrast.register_fake
def _(
    first: Tensor,
    second: Tensor | None,
    extra: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    first_ids: Tensor | None,
    second_ids: Tensor | None,
    extra_ids: Tensor | None,
    positives: Tensor | None,
    weight: Tensor | None,
    code: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call.decode(code)
    compute = torch.float64 if first.dtype == torch.float64 else torch.float32
    num_rows = first.shape[0]
    if call.spec.symmetric and second is not None:
        num_rows = num_rows + second.shape[0]
    fields = len(engine.remembered_fields(call.spec))
    kept = torch.library.get_ctx().new_dynamic_size()
    outputs = engine.Outputs(
        value=first.new_empty((num_rows,) if call.reduction == "none" else (), dtype=compute),
        stats=first.new_empty(engine.NUM_STATS, dtype=torch.float64),
        rows=first.new_empty((fields, num_rows) if fields else (0, 0), dtype=torch.float64),
        columns=first.new_empty((fields, num_rows) if call.spec.columns else (0, 0), dtype=torch.float64),
        scalars=first.new_empty(6, dtype=torch.float64),
        kept=first.new_empty(kept, dtype=compute),
    )
    return outputs.as_tuple()


@torch.library.custom_op("megabatch::contrast_backward", mutates_args=())
def contrast_backward(
    upstream: Tensor,
    rows: Tensor,
    columns: Tensor,
    scalars: Tensor,
    kept: Tensor,
    first: Tensor,
    second: Tensor | None,
    extra: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    first_ids: Tensor | None,
    second_ids: Tensor | None,
    extra_ids: Tensor | None,
    positives: Tensor | None,
    weight: Tensor | None,
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of first, second, extra, scale and bias; empty where none is needed."""
    inputs = Inputs(first, second, extra, scale, bias, first_ids, second_ids, extra_ids, positives, weight)
    outputs = engine.Outputs(upstream, upstream, rows, columns, scalars, kept)
    with torch.autocast(first.device.type, enabled=False):
        gradients = engine.backward(inputs, Call.decode(call), upstream, outputs)
    return gradients.as_tuple(first)


@contrast_backward.register_fake
def _(
    upstream: Tensor,
    rows: Tensor,
    columns: Tensor,
    scalars: Tensor,
    kept: Tensor,
    first: Tensor,
    second: Tensor | None,
    extra: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    first_ids: Tensor | None,
    second_ids: Tensor | None,
    extra_ids: Tensor | None,
    positives: Tensor | None,
    weight: Tensor | None,
    code: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs = Call.decode(code).needs
    inputs = (first, second, extra, scale, bias)
    gradients = [
        x.new_empty(x.shape) if x is not None and need else None for x, need in zip(inputs, needs, strict=True)
    ]
    return engine.Gradients(*gradients).as_tuple(first)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.call = inputs
    _, *rest = output
    ctx.save_for_backward(*rest[1:], *tensors)
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    needs = Call.decode(ctx.call).needs
    if upstream is None:
        return (None,) * 11
    gradients = contrast_backward(upstream, *ctx.saved_tensors, ctx.call)
    return *(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), *[None] * 6


def _refuse(ctx: Any, *upstream: Tensor) -> None:
    raise RuntimeError(
        "megabatch: the gradient of a loss cannot be differentiated again. Drop create_graph=True, or take the dense "
        "twin in megabatch.reference, which can."
    )


contrast.register_autograd(_backward, setup_context=_setup_context)
contrast_backward.register_autograd(_refuse)
