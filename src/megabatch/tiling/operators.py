"""The one seam to autograd and to compilers: a plain autograd.Function, and the same as an operator.

The operator serves whatever traces: torch.compile, torch.export, fake tensors. Tensors are arguments; everything else
travels in one string, a constant to a compiler. The plan is made inside, from real sizes, so that a new batch size
compiles nothing anew. Neither can be differentiated twice.
"""

import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..losses.state import has_column_statistics, state_fields
from . import engine
from .engine import Saved
from .options import LossInputs, LossOptions, compute_dtype
from .results import NUM_STATS, Gradients

# Requires grad, so that on several ranks every rank joins the backward that another one needs.
with torch.inference_mode(False):  # whatever mode the import happens in
    _ANCHOR = torch.zeros((), device="cpu", requires_grad=True)

_NUM_INPUTS, _NUM_SAVED = len(LossInputs._fields), 5  # tensors


def contrastive_loss(inputs: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor | None]:
    """The loss and, where they are asked for, its statistics."""
    anchor = _ANCHOR if options.group else None
    if _is_traced(inputs.rows):
        value, stats, *_ = contrast(*inputs, anchor, options.encode())
        return value, stats
    value, stats, joins_backward = _ContrastiveLoss.apply(*inputs, anchor, options)  # type: ignore[no-untyped-call]
    return value if joins_backward else value.detach(), stats


def _is_traced(features: Tensor) -> bool:
    """By a compiler, by fake or other special tensors, or by torch.func."""
    special = type(features) not in (Tensor, torch.nn.Parameter)
    return torch.compiler.is_compiling() or special or torch._C._are_functorch_transforms_active()


def _without_autocast(features: Tensor) -> AbstractContextManager[Any]:
    device = features.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


class _ContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None, bool]:
        *tensors, _, ctx.options = arguments
        inputs = LossInputs(*tensors)
        with _without_autocast(inputs.rows):
            value, stats, saved = engine.forward(inputs, ctx.options)
        ctx.save_for_backward(*inputs, *saved[:_NUM_SAVED])
        ctx.facts = saved[_NUM_SAVED:]
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return value, stats, saved.joins_backward

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> Gradients:
        upstream, nothing = upstreams[0], (None,) * (_NUM_INPUTS + 2)
        if upstream is None:
            return nothing
        tensors = ctx.saved_tensors
        inputs, saved = LossInputs(*tensors[:_NUM_INPUTS]), Saved(*tensors[_NUM_INPUTS:], *ctx.facts)
        creates_graph = torch.is_grad_enabled()
        with torch.no_grad(), _without_autocast(upstream):
            gradients = engine.backward(inputs, ctx.options, upstream, saved)
        if creates_graph:
            leaves = [x for x in (upstream, *inputs) if x is not None and x.requires_grad]
            refuse: Any = _Refuse.apply
            gradients = tuple(None if g is None else refuse(g, *leaves) for g in gradients)
        return *gradients, *nothing[len(gradients) :]


class _Refuse(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *leaves: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> None:
        raise RuntimeError(
            "megabatch: the gradient of a loss cannot be differentiated again. Drop create_graph=True, or use "
            "megabatch.reference, which supports it."
        )


# ---- the same as operators

# They make a small CPU tensor: a compiler keeps them out of its CUDA graphs. Without a compiler, `torch.cuda.graph`
# captures the loss of one rank like any other function.
_TAGS = [tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None]
_INPUTS = ", ".join(f"Tensor? {name}" for name in (*LossInputs._fields, "anchor")) + ", str options"
_SAVED = ", ".join(f"Tensor {name}" for name in (*Saved._fields[:_NUM_SAVED], "facts"))
_TENSORS = {number: f"({', '.join(['Tensor'] * number)})" for number in (6, 3 + _NUM_SAVED)}


@torch.library.custom_op(
    "megabatch::contrast", mutates_args=(), schema=f"({_INPUTS}) -> {_TENSORS[3 + _NUM_SAVED]}", tags=_TAGS
)
def contrast(*arguments: Any) -> tuple[Tensor, ...]:
    """value, stats and Saved: its tensors, and the rest as bytes on the CPU."""
    *tensors, _, code = arguments
    with _without_autocast(arguments[0]):
        value, stats, saved = engine.forward(LossInputs(*tensors), LossOptions.decode(code))
    stats = value.new_zeros(NUM_STATS, dtype=torch.float64) if stats is None else stats
    facts = torch.frombuffer(bytearray(pickle.dumps(saved[_NUM_SAVED:])), dtype=torch.uint8)
    kept_tensors: Any = saved[:_NUM_SAVED]
    return value, stats, *kept_tensors, facts


@contrast.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _, code = arguments
    inputs, options = LossInputs(*tensors), LossOptions.decode(code)
    lengths = [0 if x is None else x.shape[0] for x in inputs.features]
    num_losses = sum(lengths[:2]) if options.spec.symmetric else lengths[0]
    num_fields = len(state_fields(options.spec, options.return_stats))
    columns = sum(lengths) if has_column_statistics(options.spec, options.return_stats) else num_losses
    dynamic = torch.library.get_ctx().new_dynamic_size
    dtype, double, rows = compute_dtype(inputs.rows), torch.float64, inputs.rows
    return (
        rows.new_empty((num_losses,) if options.reduction == "none" else (), dtype=dtype),
        rows.new_empty(NUM_STATS, dtype=double),
        rows.new_empty((num_fields, dynamic() if options.group else columns), dtype=double),
        rows.new_empty(dynamic(), dtype=dtype),
        rows.new_empty(dynamic(), dtype=torch.uint8),
        rows.new_empty(dynamic(), dtype=double),
        rows.new_empty(dynamic(), dtype=double),
        rows.new_empty(dynamic(), dtype=torch.uint8, device="cpu"),
    )


@torch.library.custom_op(
    "megabatch::contrast_backward",
    mutates_args=(),
    schema=f"(Tensor upstream, {_SAVED}, {_INPUTS}) -> {_TENSORS[6]}",
    tags=_TAGS,
)
def contrast_backward(upstream: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of the first five inputs, empty where none is needed, and of the anchor."""
    facts, *tensors, _, code = arguments[_NUM_SAVED:]
    saved = Saved(*arguments[:_NUM_SAVED], *pickle.loads(bytes(facts.tolist())))
    with _without_autocast(upstream):
        gradients = engine.backward(LossInputs(*tensors), LossOptions.decode(code), upstream, saved)
    return *(upstream.new_empty(0) if g is None else g for g in gradients), torch.zeros((), device="cpu")


@contrast_backward.register_fake
def _(upstream: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _, *tensors, _, code = arguments[_NUM_SAVED:]
    needed = zip(tensors, LossOptions.decode(code).needs, strict=False)
    gradients = (x.new_empty(x.shape) if x is not None and need else upstream.new_empty(0) for x, need in needed)
    return *gradients, torch.zeros((), device="cpu")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.code = inputs
    _, stats, *saved = output
    ctx.save_for_backward(*saved, *tensors)
    ctx.mark_non_differentiable(stats, *saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: None) -> Gradients:
    nothing = (None,) * (_NUM_INPUTS + 2)
    if upstream is None:
        return nothing
    options, tensors = LossOptions.decode(ctx.code), ctx.saved_tensors
    *gradients, anchor = contrast_backward(upstream, *tensors, ctx.code)
    needed = [gradient if need else None for gradient, need in zip(gradients, options.needs, strict=True)]
    return *needed, *nothing[len(needed) + 2 :], anchor if options.group else None, None


contrast.register_autograd(_backward, setup_context=_setup_context)
contrast_backward.register_autograd(_Refuse.backward)


@contrast.register_vmap
def _(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Batch by batch, as vmap does of itself where there is no rule; newer versions of torch warn of that."""
    given = ([x] * info.batch_size if dim is None else x.unbind(dim) for x, dim in zip(arguments, dims, strict=True))
    results = zip(*(contrast(*batch) for batch in zip(*given, strict=True)), strict=True)
    stacked = tuple(map(torch.stack, results))
    return stacked, (0,) * len(stacked)
