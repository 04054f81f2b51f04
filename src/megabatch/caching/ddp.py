"""DistributedDataParallel: a chunked call belongs inside of its forward, which is what it takes for a step.

There it works as any other code: each parameter's gradient arrives once, and buckets are reduced while the last chunk
runs backwards. `module=ddp` puts a call there; anything else that would go unreduced is refused.
"""

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from .modules import parameters_of
from .replay import ChunkedCall

Outputs = tuple[Tensor, ...]

# Outputs whose backward is still to come, by wrapper.
_earlier: WeakKeyDictionary[DistributedDataParallel, list[tuple[ref[ChunkedCall], list[ref[Tensor]]]]] = (
    WeakKeyDictionary()
)
_unwrapped: WeakSet[ChunkedCall] = WeakSet()  # whose parameters nobody else waited for


class _Run(nn.Module):
    """In the place of the wrapped module, for one forward."""

    def __init__(self, function: Callable[[], Outputs], module: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.named_buffers = module.named_buffers  # type: ignore[method-assign] # to be sent before the forward

    def forward(self, _: None) -> Outputs:
        return self.function()


def unwrapped(encoder: Any, module: nn.Module | None) -> tuple[Any, nn.Module | None]:
    """What to call for a chunk, and the module: not the wrapper's forward, which would take every chunk for a step."""
    if isinstance(encoder, types.MethodType) and encoder.__func__ is DistributedDataParallel.forward:
        encoder = encoder.__self__
    if isinstance(encoder, DistributedDataParallel):
        return encoder.module, encoder if module is None else module
    return encoder, module


def within_forward(ddp: DistributedDataParallel, run: Callable[[], Outputs], call: ChunkedCall) -> Outputs:
    """The outputs of `run`, which becomes a forward of the wrapper, unless that is running already."""
    if ddp in _running():
        return run()
    if ddp.mixed_precision is not None:
        raise ValueError(
            "chunked: DistributedDataParallel must have no mixed_precision, which casts parameters in its own forward, "
            f"got {ddp.mixed_precision}. Use torch.autocast."
        )
    kept = _earlier.setdefault(ddp, [])
    kept[:] = [(earlier, outputs) for earlier, outputs in kept if (c := earlier()) is not None and not c.done]
    # Where unused parameters are looked for, those that only an earlier call uses are to be waited for, too.
    earlier = [output for _, outputs in kept for each in outputs if (output := each()) is not None]
    module = ddp.module
    ddp.module = _Run(lambda: (*run(), *earlier), module)
    try:
        outputs: Outputs = ddp(None)[: -len(earlier) or None]
    finally:
        ddp.module = module
    kept.append((ref(call), [ref(output) for output in outputs]))
    return outputs


def _running() -> list[Any]:
    """The wrappers whose forward called us."""
    deepspeed: Any = sys.modules.get("deepspeed")
    kinds = (DistributedDataParallel, *([deepspeed.DeepSpeedEngine] if deepspeed is not None else []))
    frame, found = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), kinds):
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


def check_calls(encoder: Any, modules: Sequence[nn.Module], module: nn.Module | None, call: ChunkedCall) -> None:
    """Before the forward: that nobody waits in vain for a gradient of the parameters that can be seen."""
    if any(hasattr(parameter, "ds_tensor") for parameter in parameters_of(modules)):
        raise ValueError(
            "chunked: encoder must not be partitioned by DeepSpeed's ZeRO stage 3, whose ranks gather parameters in "
            "every forward, and may not have equally many chunks. Use stage 1 or 2, or "
            "torch.distributed.fsdp.fully_shard."
        )
    if not torch.is_grad_enabled() or not _has_ranks():
        return
    inner = [each for each in modules if isinstance(each, DistributedDataParallel) and each is not module]
    inside = [module, *_running()] if isinstance(module, DistributedDataParallel) else _running()
    reduced = {id(p) for ddp in inside if ddp is not None for p in ddp.parameters()}
    known = {key for other in _unwrapped for key in other.trained}
    trained = [p for p in parameters_of(modules) if p.requires_grad and id(p) not in reduced | known]
    if inner or (module is None and not call.sharded and any(map(_is_awaited, trained))):
        name = getattr(encoder, "__name__", "forward")
        raise ValueError(
            "chunked: an encoder inside DistributedDataParallel or DeepSpeed must be called by the forward of the "
            "module that is wrapped, or with module=ddp, got a call outside: its gradients would not be reduced, or "
            "once per chunk. "
            f"Write chunked(ddp.module.{name if name.isidentifier() else 'encode'}, ..., module=ddp). If nothing wraps "
            "it, and a graph of an earlier call is alive, pass the module itself, module=model."
        )
    if not inside:
        _unwrapped.add(call)


def check_seen(modules: Sequence[nn.Module], call: ChunkedCall) -> None:
    """After the forward: that all parameters it used can be seen, and have been checked."""
    if not _has_ranks() or call.sharded:
        return
    seen = {id(p) for p in parameters_of(modules)}
    hidden = [leaf for leaf in call.trained.values() if isinstance(leaf, nn.Parameter) and id(leaf) not in seen]
    if hidden:
        raise ValueError(
            "chunked: where several ranks train, encoder must be a module, a method of one, or a function that holds "
            f"it in a variable, got parameters of modules that cannot be seen ({len(hidden)}, the first of shape "
            f"{tuple(hidden[0].shape)}). Pass their module, module=model; under DistributedDataParallel, module=ddp."
        )
    if call.has_reentrant and _running():
        raise ValueError(REENTRANT)


REENTRANT = (
    "chunked: an encoder inside DistributedDataParallel or fully_shard must not have reentrant checkpoints, because "
    "their gradients would be reduced once per chunk. Checkpoint with use_reentrant=False."
)


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_awaited(parameter: Tensor) -> bool:
    """Whether somebody keeps the node that accumulates its gradient, as who reduces it does."""

    def notes() -> Any:
        return get_gradient_edge(parameter).node.metadata

    notes()["megabatch"] = True
    return bool(notes().pop("megabatch", False))
