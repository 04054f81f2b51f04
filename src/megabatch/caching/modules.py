"""The modules that a callable is or holds, as far as they can be seen; `module=` names those that cannot."""

import inspect
import types
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

# Private names by which torch knows a compiled function, module, or module that was compiled in place. There is no
# public way to ask.
COMPILED = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")


def modules_of(*things: Any) -> list[nn.Module]:
    """All modules below these, each once."""
    roots = [module for thing in things for module in _held_by(thing, depth=3)]
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Of these modules alone, each once."""
    return list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))


def is_compiled(encoder: Any, modules: Iterable[nn.Module]) -> bool:
    return any(getattr(thing, name, None) is not None for thing in (encoder, *modules) for name in COMPILED)


def uncompiled(encoder: Any) -> Any:
    return getattr(encoder, "_orig_mod", encoder)


def _held_by(value: Any, depth: int) -> list[nn.Module]:
    """A module itself; that of a method; and what a partial, a function's variables, a list or an object holds."""
    if isinstance(value, nn.Module):
        return [value]
    if depth == 0 or value is None or isinstance(value, type | types.ModuleType | Tensor):
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
    return [module for item in held for module in _held_by(item, depth - 1)]


def _variables(function: types.FunctionType) -> list[Any]:
    if COMPILED[0] in vars(function):
        return [getattr(function, COMPILED[0])]
    if function.__module__ is not None and function.__module__.split(".")[0] == "torch":
        return [inspect.unwrap(function)] if hasattr(function, "__wrapped__") else []
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # one of them has no value yet
        return []
    wrapped = [function.__wrapped__] if hasattr(function, "__wrapped__") else []
    return [*wrapped, *variables.nonlocals.values(), *variables.globals.values()]
