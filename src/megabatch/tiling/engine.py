"""The forward and the backward of a call on plain tensors: below autograd, above the tiles."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import workspace
from ..losses.state import OWN_MAX, State
from .call import Call, largest
from .handshake import GroupInfo, Handshake
from .options import LossInputs, LossOptions
from .plan import Plan
from .results import Gradients, as_inputs, finish_gradients, reduce_losses, rescaled


class Saved(NamedTuple):
    """What a forward leaves for its backward: tensors on the device, and the rest on the host.

    Attributes:
        state: The statistics of the rows and then, unless they are the same, of the columns.
        kept: The logits that the plan keeps or, after one pass, the gradients of the features.
        gathered: The columns of all ranks, if they were gathered, as they travelled.
        weights: Of the rows of all ranks, if they were gathered.
        scalars: After one pass the gradients of scale and bias; else what the mean divides by, and the largest weight,
            unless the host knows both.
        shift: Of all logits, or OWN_MAX.
        forward_number: Of the forward among the handshakes of its group.
        joins_backward: Some rank needs a gradient.
        info: What the ranks brought to the forward. Not the handshake: a group must not live as long as the loss.
    """

    state: Tensor
    kept: Tensor
    gathered: Tensor
    weights: Tensor
    scalars: Tensor
    plan: Plan
    shift: float
    forward_number: int
    joins_backward: bool
    info: GroupInfo


def forward(inputs: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor | None, Saved]:
    """The loss, its statistics, and what the backward needs: the gradients themselves, where the plan says so."""
    handshake = Handshake.of_forward(inputs, options)
    call = Call(inputs, options, handshake)
    plan, spec, layout = call.plan, call.spec, call.layout
    result = None
    while result is None:
        state = call.attach_state()
        if plan.one_pass:
            kept, scalars = _one_pass(call, state)
        else:
            kept = workspace.allocate(plan.kept * plan.slot_size, layout.dtype, layout.device)
            for tile, slot in call.tiles(kept):
                call.backend.accumulate_statistics(tile, slot)
            if options.group:
                call.all_reduce(state)
        result = reduce_losses(call, state)
        if result is None:  # one shift for all logits was too much for one of the rows
            gathered = call.gathered
            del call, layout, kept, state
            call = Call(inputs, options, handshake, plan, OWN_MAX, gathered)
            layout = call.layout
    value, stats, denominator = result
    if not plan.one_pass:
        scalars = _as_tensor([denominator, call.largest_weight], like=state.table)
        if not spec.has_targets:
            state.fill_empty_rows()
    number, joins_backward = call.ranks.num_handshakes, any(handshake.needs)
    weights = call.weights if inputs.weight is not None and options.group else state.table.new_empty(0)
    tensors = state.table, kept, call.gathered, weights, scalars
    saved = Saved(*tensors, plan, call.shift, number, joins_backward, handshake.info)
    return value, stats, saved


def _one_pass(call: Call, state: State) -> tuple[Tensor, Tensor]:
    """Gradients in the forward: those of a tile as soon as its rows are complete, with its logits in memory. Returns
    those of the features, in one tensor, and those of scale and bias."""
    layout, spec, backend = call.layout, call.spec, call.backend
    sizes = [block.features.numel() for block in call.needing]
    gradients = torch.empty(sum(sizes), dtype=layout.dtype, device=layout.device)
    for block, part in zip(call.needing, torch.split(gradients, sizes), strict=True):
        block.new_grad(part)
    call.attach_row_grads(state, call.largest_weight)
    size = call.plan.slot_size
    memory = workspace.buffer("slots", call.plan.kept * size, layout.dtype, layout.device)
    for strip in layout.strips(call.plan.rows, call.plan.columns):
        # A pair of a sigmoid loss is complete at once, a row of a softmax at the end of its strip.
        for tiles in [[tile] for tile in strip] if spec.epilogue == "sigmoid" else [strip]:
            slots = list(zip(tiles, torch.split(memory[: len(tiles) * size], size), strict=True))
            for tile, slot in slots:
                backend.accumulate_statistics(tile, slot)
            for tile, slot in slots:
                backend.accumulate_gradients(tile, slot)
    denominator = layout.num_losses if call.inputs.weight is None else call.weights.sum()
    return gradients, finish_gradients(call, 1.0, denominator, call.largest_weight)


def _as_tensor(numbers: list[Tensor | float], like: Tensor) -> Tensor:
    """Empty where the host knows all of them."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return like.new_empty(0)
    return torch.stack([x if isinstance(x, Tensor) else like.new_full((), x) for x in numbers])


def backward(inputs: LossInputs, options: LossOptions, upstream: Tensor, saved: Saved) -> Gradients:
    """The gradient of every input that needs one."""
    if saved.plan.one_pass:
        return rescaled(inputs, options, upstream, saved.kept, saved.scalars)
    handshake = Handshake.of_backward(inputs, options, saved.info, upstream, saved.forward_number)
    call = Call(inputs, options, handshake, saved.plan, saved.shift, saved.gathered, saved.weights)
    layout, state = call.layout, call.attach_state(saved.state)
    call.attach_factors(state)
    denominator, largest_row_grad = saved.scalars.unbind() if len(saved.scalars) else (layout.num_losses, 1.0)
    factor: Tensor | float = 1.0
    of_rows = layout.all_rows(upstream.double()) if options.reduction == "none" else None
    if of_rows is not None:
        largest_row_grad = largest(of_rows * call.weights)
    else:
        factor = upstream.item() if layout.device.type == "cpu" else upstream
    call.attach_row_grads(state, largest_row_grad, of_rows)
    call.attach_grads()
    needs_scalars = handshake.needs.scale or handshake.needs.bias
    for tile, slot in call.tiles(saved.kept, collects_grads=True):
        # On other ranks' account this one meets tiles on which no gradient depends.
        if tile.rows.grad is not None or tile.columns.grad is not None or needs_scalars:
            call.backend.accumulate_gradients(tile, slot)
    scalars = finish_gradients(call, factor, denominator, largest_row_grad)
    features = [block.grad for block in call.needing if block.grad is not None]
    return as_inputs(inputs, options, features, scalars)
