"""The operators: the one seam to autograd, to torch.compile and to everything that traces.

Tensors are arguments; everything else travels in one string, a constant to a compiler. Plans are made inside, from
real sizes, so that a new batch size compiles nothing anew; outputs whose size the plan decides are of unknown size to a
tracer. The backward is an operator of its own, and has no backward. On several ranks an anchor, which requires grad and
gets none, has every rank take part in the backward that another one needs.
"""

from typing import Any

import torch
from torch import Tensor

from ..losses.state import remembered
from . import engine
from .call import Call, Inputs

_INPUTS = (
    "Tensor first, Tensor? second, Tensor? extra, Tensor scale, Tensor? bias, "
    "Tensor? first_ids, Tensor? second_ids, Tensor? extra_ids, Tensor? positives, Tensor? weight, "
    "Tensor? anchor, str call"
)
_OUTPUTS = "Tensor rows, Tensor columns, Tensor scalars, Tensor kept"


@torch.library.custom_op(
    "megabatch::contrast", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def contrast(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, its statistics, and what the backward needs: `engine.Outputs`."""
    *tensors, _, code = arguments
    inputs = Inputs(*tensors)
    with torch.autocast(inputs.first.device.type, enabled=False):
        return engine.forward(inputs, Call.decode(code)).as_tuple()


@contrast.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *tensors, _, code = arguments
    inputs, call = Inputs(*tensors), Call.decode(code)
    first, spec = inputs.first, call.spec
    compute = torch.float64 if first.dtype == torch.float64 else torch.float32
    num_rows = first.shape[0]
    if spec.symmetric and inputs.second is not None:
        num_rows = num_rows + inputs.second.shape[0]
    fields = len(remembered(spec))
    kept = torch.library.get_ctx().new_dynamic_size()
    outputs = engine.Outputs(
        value=first.new_empty((num_rows,) if call.reduction == "none" else (), dtype=compute),
        stats=first.new_empty(engine.NUM_STATS, dtype=torch.float64),
        rows=first.new_empty((fields, num_rows) if fields else (0, 0), dtype=torch.float64),
        columns=first.new_empty((fields, num_rows) if spec.columns else (0, 0), dtype=torch.float64),
        scalars=first.new_empty(engine.NUM_SCALARS, dtype=torch.float64),
        kept=first.new_empty(kept, dtype=compute),
    )
    return outputs.as_tuple()


@torch.library.custom_op(
    "megabatch::contrast_backward",
    mutates_args=(),
    schema=f"(Tensor upstream, {_OUTPUTS}, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def contrast_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of first, second, extra, scale and bias; empty where none is needed."""
    upstream, rows, columns, scalars, kept, *tensors, _, code = arguments
    inputs = Inputs(*tensors)
    outputs = engine.Outputs(upstream, upstream, rows, columns, scalars, kept)
    with torch.autocast(upstream.device.type, enabled=False):
        return engine.backward(inputs, Call.decode(code), upstream, outputs).as_tuple(inputs.first)


@contrast_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *tensors, _, code = arguments[5:]
    inputs = Inputs(*tensors)
    given = zip(inputs[:5], Call.decode(code).needs, strict=True)
    gradients = engine.Gradients(*(x.new_empty(x.shape) if x is not None and need else None for x, need in given))
    return gradients.as_tuple(inputs.first)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.call = inputs
    _, *rest = output
    ctx.save_for_backward(*rest[1:], *tensors)
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    needs = Call.decode(ctx.call).needs
    if upstream is None:
        return (None,) * 12
    gradients = contrast_backward(upstream, *ctx.saved_tensors, ctx.call)
    return *(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), *[None] * 7


def _refuse(ctx: Any, *upstream: Tensor) -> None:
    raise RuntimeError(
        "megabatch: the gradient of a loss cannot be differentiated again. Drop create_graph=True, or take the dense "
        "twin in megabatch.reference, which can."
    )


contrast.register_autograd(_backward, setup_context=_setup_context)
contrast_backward.register_autograd(_refuse)
