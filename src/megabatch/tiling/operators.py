"""The one seam to autograd and to compilers: a plain autograd.Function, and the same as an operator.

The operator serves whatever traces: torch.compile, torch.export, fake tensors. Tensors are arguments; everything else
travels in one string, a constant to a compiler. The plan is made inside, from real sizes, so that a new batch size
compiles nothing anew. Neither can be differentiated twice.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..losses.state import state_fields
from . import engine
from .gradients import Gradients
from .options import LossInputs, LossOptions, compute_dtype
from .reduce import NUM_STATS
from .saved import SavedNumbers, SavedTensors

# Requires grad and gets a zero: on several ranks every rank joins the backward that another one needs.
with torch.inference_mode(False):  # whatever mode the import happens in
    _ANCHOR = torch.zeros((), device="cpu", requires_grad=True)

_NUM_INPUTS, _NUM_SAVED = len(LossInputs._fields), len(SavedTensors._fields)


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
            value, stats, saved, ctx.numbers = engine.forward(inputs, ctx.options)
        ctx.save_for_backward(*inputs, *saved)
        if stats is not None:
            ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return value, stats, ctx.numbers.joins_backward

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream, nothing = upstreams[0], (None,) * (_NUM_INPUTS + 2)
        if upstream is None:
            return nothing
        tensors = ctx.saved_tensors
        inputs, saved = LossInputs(*tensors[:_NUM_INPUTS]), SavedTensors(*tensors[_NUM_INPUTS:])
        creates_graph = torch.is_grad_enabled()
        with torch.no_grad() if creates_graph else nullcontext(), _without_autocast(upstream):
            gradients = engine.backward(inputs, ctx.options, upstream, saved, ctx.numbers)
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
            "megabatch: the gradient of a loss cannot be differentiated again. Drop create_graph=True, or take the "
            "dense twin in megabatch.reference, which can."
        )


# ---- the same as operators

_INPUTS = (
    "Tensor rows, Tensor? columns, Tensor? negatives, Tensor scale, Tensor? bias, "
    "Tensor? row_ids, Tensor? column_ids, Tensor? negative_ids, Tensor? positives, Tensor? weight, "
    "Tensor? anchor, str options"
)
_SAVED = "Tensor state, Tensor kept, Tensor scalars, Tensor numbers"


@torch.library.custom_op(
    "megabatch::contrast",
    mutates_args=(),
    schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def contrast(*arguments: Any) -> tuple[Tensor, ...]:
    """value, stats, *SavedTensors, SavedNumbers as a tensor on the CPU."""
    *tensors, _, code = arguments
    with _without_autocast(arguments[0]):
        value, stats, saved, numbers = engine.forward(LossInputs(*tensors), LossOptions.decode(code))
    stats = value.new_zeros(NUM_STATS, dtype=torch.float64) if stats is None else stats
    return value, stats, *saved, numbers.pack()


@contrast.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _, code = arguments
    inputs, options = LossInputs(*tensors), LossOptions.decode(code)
    rows, spec = inputs.rows, options.spec
    num_rows, num_columns, num_negatives = (0 if x is None else x.shape[0] for x in inputs.features)
    num_fields = len(state_fields(spec, options.return_stats))
    num_losses = num_rows + num_columns if spec.symmetric else num_rows
    context = torch.library.get_ctx()
    double = torch.float64
    return (
        rows.new_empty((num_losses,) if options.reduction == "none" else (), dtype=compute_dtype(rows)),
        rows.new_empty(NUM_STATS, dtype=double),
        rows.new_empty((num_fields, num_rows + num_columns + num_negatives), dtype=double),
        rows.new_empty(context.new_dynamic_size(), dtype=compute_dtype(rows)),
        rows.new_empty(context.new_dynamic_size(), dtype=double),
        rows.new_empty(context.new_dynamic_size(), dtype=double, device="cpu"),
    )


@torch.library.custom_op(
    "megabatch::contrast_backward",
    mutates_args=(),
    schema=f"(Tensor upstream, {_SAVED}, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def contrast_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of the first five inputs, empty where none is needed, and of the anchor."""
    upstream, *saved, numbers = arguments[: _NUM_SAVED + 2]
    *tensors, _, code = arguments[_NUM_SAVED + 2 :]
    with _without_autocast(upstream):
        gradients = engine.backward(
            LossInputs(*tensors), LossOptions.decode(code), upstream, SavedTensors(*saved), SavedNumbers.unpack(numbers)
        )
    return _without_none(gradients, upstream)


@contrast_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _, code = arguments[_NUM_SAVED + 2 :]
    given = zip(tensors[:5], LossOptions.decode(code).needs, strict=True)
    gradients = tuple(x.new_empty(x.shape) if x is not None and need else None for x, need in given)
    return _without_none(gradients, arguments[0])


def _without_none(gradients: Gradients, like: Tensor) -> tuple[Tensor, ...]:
    """Operators cannot return None: empty tensors in its place."""
    return *(like.new_empty(0) if g is None else g for g in gradients), like.new_zeros(
        (), dtype=torch.float32, device="cpu"
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.code = inputs
    _, stats, *saved = output
    ctx.has_anchor = tensors[-1] is not None
    ctx.save_for_backward(*saved, *tensors)
    ctx.mark_non_differentiable(stats, *saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * (_NUM_INPUTS + 2)
    *gradients, anchor = contrast_backward(upstream, *ctx.saved_tensors, ctx.code)
    needs = LossOptions.decode(ctx.code).needs
    needed = [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]
    return *needed, *[None] * (_NUM_INPUTS - len(needed)), anchor if ctx.has_anchor else None, None


contrast.register_autograd(_backward, setup_context=_setup_context)
contrast_backward.register_autograd(_Refuse.backward)
