"""The modules that an encoder is or uses, and DistributedDataParallel or DeepSpeed around them.

A chunked call inside the forward of what is wrapped needs nothing more: to the wrapper it is ordinary code.
`module=ddp` makes a call such a forward. Any other call whose gradients would not be reduced is refused.
"""

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Private names by which torch knows a compiled function, module, or module that was compiled in place. There is no
# public way to ask.
COMPILED = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")


def modules_of(value: Any, depth: int = 3) -> list[nn.Module]:
    """A module, that of a method, and those that a partial, a function's variables, a list or an object holds."""
    if isinstance(value, nn.Module):
        return [value]
    if depth == 0 or isinstance(value, type | types.ModuleType | Tensor):
        return []
    if isinstance(value, types.MethodType):
        held = [value.__self__]
    elif isinstance(value, partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        held = _variables(value)
    elif isinstance(value, dict | list | tuple):
        held = [item for item in (value.values() if isinstance(value, dict) else value) if isinstance(item, nn.Module)]
    else:
        held = [item for item in getattr(value, "__dict__", {}).values() if isinstance(item, nn.Module | dict | list)]
    return list(dict.fromkeys(module for item in held for module in modules_of(item, depth - 1)))


def _variables(function: types.FunctionType) -> list[Any]:
    inner = [value for name in (COMPILED[0], "__wrapped__") if (value := vars(function).get(name)) is not None]
    if inner or (function.__module__ or "").split(".")[0] == "torch":
        return inner
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # one of them has no value yet
        return []
    return [*variables.nonlocals.values(), *variables.globals.values()]


def is_compiled(encoder: Any, modules: Sequence[nn.Module]) -> bool:
    return any(getattr(thing, name, None) is not None for thing in (encoder, *modules) for name in COMPILED)


def unwrapped(encoder: Any, module: nn.Module | None) -> tuple[Any, nn.Module | None]:
    """What to call for a chunk, and `module`: not the wrapper's forward, which would take every chunk for a step."""
    if isinstance(encoder, types.MethodType) and encoder.__func__ is DistributedDataParallel.forward:
        encoder = encoder.__self__
    if isinstance(encoder, DistributedDataParallel):
        return encoder.module, encoder if module is None else module
    return encoder, module


def check_wrapper(encoder: Any, modules: Sequence[nn.Module], module: nn.Module | None) -> None:
    """Refuse a call whose gradients would not be reduced once per step, where several ranks train."""
    parameters = [parameter for each in modules for parameter in each.parameters(recurse=False)]
    if any(hasattr(parameter, "ds_tensor") for parameter in parameters):
        raise ValueError(
            "chunked: encoder must not be partitioned by DeepSpeed's ZeRO stage 3, which needs equally many forwards "
            "on all ranks. Use stage 1 or 2, or torch.distributed.fsdp.fully_shard."
        )
    if not torch.is_grad_enabled() or not has_ranks():
        return
    running = _running()
    reduced = {id(parameter) for wrapper in running for parameter in wrapper.parameters()}
    is_hidden = not modules and not running  # the encoder's parameters, if it has any
    is_outside = is_hidden or any(p.requires_grad and id(p) not in reduced for p in parameters)
    if any(isinstance(each, DistributedDataParallel) for each in modules) or (module is None and is_outside):
        name = getattr(encoder, "__name__", "forward")
        raise ValueError(
            "chunked: where several ranks train, the call must be in the forward of the module that "
            "DistributedDataParallel or DeepSpeed wraps, got one outside: its gradients would not be reduced, or once "
            f"per chunk. Write chunked(ddp.module.{name if name.isidentifier() else 'encode'}, ..., module=ddp). If "
            "you reduce gradients yourself, write module=model."
        )


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_checkpoints(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Reentrant checkpoints have a backward of their own in every chunk, which a wrapper takes for the step's."""
    waiting: list[Any] = [x.grad_fn for x in outputs]
    seen: set[Any] = {None, *(x.grad_fn for x in inputs)}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            raise ValueError(
                "chunked: where several ranks train, encoder must not have reentrant checkpoints, because their "
                "gradients would be reduced once per chunk. Checkpoint with use_reentrant=False."
            )
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)


def _running() -> list[Any]:
    """The wrappers whose forward called us. Neither of them has a public way to ask."""
    deepspeed: Any = sys.modules.get("deepspeed")
    kinds = (DistributedDataParallel, *([deepspeed.DeepSpeedEngine] if deepspeed is not None else []))
    frame, found = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), kinds):
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


class _Run(nn.Module):
    """In the place of the wrapped module, for one forward."""

    def __init__(self, function: Callable[[], Any], module: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.named_buffers = module.named_buffers  # type: ignore[method-assign] # to be sent before the forward

    def forward(self, _: None) -> Any:
        return self.function()


def within_forward(ddp: DistributedDataParallel, run: Callable[[], Any], named: bool) -> Any:
    """Call `run` as a forward of the wrapper, unless that is running already. `named`: by `module=ddp`."""
    if ddp in _running():
        return run()
    if ddp.mixed_precision is not None:
        raise ValueError(
            "chunked: DistributedDataParallel must have no mixed_precision, which casts parameters in its own forward, "
            f"got {ddp.mixed_precision}. Use torch.autocast."
        )
    if named and ddp.find_unused_parameters:
        raise ValueError(
            "chunked: module=ddp must not be a DistributedDataParallel with find_unused_parameters=True, to which "
            "all that this call does not use is unused. Call chunked in the forward of the module that is wrapped."
        )
    module = ddp.module
    ddp.module = _Run(run, module)
    try:
        return ddp(None)
    finally:
        ddp.module = module
