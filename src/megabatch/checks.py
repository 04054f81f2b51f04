"""Checks of the arguments of every public function, and the messages that refuse them.

They look at shapes, dtypes and options only, so that torch.compile can trace them; the operators check the values of
tensors. A number that the operators take as a constant is made one here: a compiler that has seen it change traces it
as a symbol, which has no digits. Types are checked by tuples: torch 2.8 cannot trace a union. The form is
`function: argument must rule, got value. What to do.`
"""

import math
import operator
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from .callers import warn_once
from .keywords import Group, LeftOut, Scalar

# K, M, G and T are powers of 1024, as in Slurm and Docker; with a B they are powers of 1000.
_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_WORDS = {
    "normalize": (True, False, None),
    "same_ids": ("mask", "positive"),
    "reduction": ("mean", "sum", "none"),
    "return_stats": (True, False),
    "grad_reduction": ("mean", "sum"),
    "exchange": ("auto", "ring", "gather"),
    "overlap": (True, False),
    "backend": ("auto", "eager", "triton"),
}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# ---- Tensors.


def features(function: str, ranks: str, **inputs: Tensor) -> None:
    """Two-dimensional floating tensors of one width, on one device, of one dtype outside of autocast."""
    first_name, first = next(iter(inputs.items()))
    for name, value in inputs.items():
        dense(function, name, value)
        if value.dim() != 2:
            help = {0: "", 1: f" Perhaps {name}[None] is meant.", 3: f" Perhaps {name}.flatten(0, 1) is meant."}
            raise ValueError(
                f"{function}: {name} must have 2 dimensions, one row per sample, got shape {tuple(value.shape)}."
                + help.get(value.dim(), f" Perhaps {name}.flatten(0, -2) is meant.")
            )
        if value.dtype not in _FLOATS:
            convert = "torch.view_as_real and .flatten(1)" if value.is_complex() else ".float()"
            raise TypeError(
                f"{function}: {name} must be floating point ({_one_of(_FLOATS)}), got {value.dtype}. "
                f"Convert it with {convert}."
            )
        if value.shape[1] == 0:
            raise ValueError(f"{function}: {name} must have at least one column, got shape {tuple(value.shape)}.")
        if value.shape[0] == 0 and not ranks and name != "negatives":
            raise ValueError(
                f"{function}: {name} must have at least one row, got shape {tuple(value.shape)}. Only a rank of a "
                "group may have none."
            )
        if value.shape[1] != first.shape[1]:
            raise ValueError(
                f"{function}: {first_name} and {name} must have the same width, got {first.shape[1]} and "
                f"{value.shape[1]}. Project one of them first."
            )
        if value.device != first.device:
            raise ValueError(
                f"{function}: {first_name} and {name} must be on the same device, got {first.device} and "
                f"{value.device}. Move one with .to()."
            )
        if value.dtype != first.dtype and not _autocasts(first.device):
            raise TypeError(
                f"{function}: {first_name} and {name} must have the same dtype, got {first.dtype} and {value.dtype}. "
                "Convert one, or run under torch.autocast."
            )
    if _lacks_float64(first.device):
        raise ValueError(
            f"{function}: {first_name} must be on a device with float64, in which sums over the batch are kept, got "
            f"{first.device}. Pass {first_name}.cpu(): gradients flow back."
        )
    if first.is_meta:
        raise ValueError(f"{function}: {first_name} must hold data, got a tensor on the meta device.")


def _lacks_float64(device: torch.device) -> bool:
    return device.type == "mps" or (device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64)


def dense(function: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        convert = {"ndarray": "torch.from_numpy", "list": "torch.as_tensor", "tuple": "torch.as_tensor"}.get(kind)
        help = f" Use {convert}({name})." if convert else ""
        raise TypeError(f"{function}: {name} must be a tensor, got {kind}.{help}")
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested one" if value.is_nested else f"{value.layout}"
        raise TypeError(f"{function}: {name} must be a dense tensor, got {kind}. Make it dense first.")


def _one_of(dtypes: tuple[torch.dtype, ...]) -> str:
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(names)} or {last}"


def vector(
    function: str, name: str, value: Tensor | None, rows_of: str, rows: Tensor, integers: bool = True, several: str = ""
) -> Tensor | None:
    """None, or one number for every row of `rows`. `several` says what to do about several for every row."""
    if value is None:
        return None
    dense(function, name, value)
    num_rows = rows.shape[0]
    if value.shape != (num_rows,):
        raise ValueError(
            f"{function}: {name} must have one entry for every row of {rows_of}, shape ({num_rows},), got "
            f"{tuple(value.shape)}.{several if value.dim() == 2 else ''}"
        )
    known = _INTEGERS if integers else _FLOATS + _INTEGERS
    if value.dtype not in known:
        kind, convert = ("integers", "long") if integers else ("real numbers", "float")
        raise TypeError(
            f"{function}: {name} must be {kind} ({_one_of(known)}), got {value.dtype}. Convert it with .{convert}()."
        )
    if value.device != rows.device:
        raise ValueError(
            f"{function}: {name} must be on the device of {rows_of}, {rows.device}, got {value.device}. "
            "Move it with .to()."
        )
    if value.requires_grad:
        raise ValueError(f"{function}: {name} must not require grad, because it gets none. Pass {name}.detach().")
    return value


def positives(function: str, value: Tensor | None, query: Tensor, key: Tensor, several: str) -> None:
    """One row of key per query, by default row i."""
    if value is None and key.shape[0] < query.shape[0]:
        raise ValueError(
            f"{function}: key must have at least as many rows as query, because row i of key belongs with query i; got "
            f"{len(key)} and {len(query)}. Pass positives to say which row belongs with which query."
        )
    several = f" For several positives per query, {several}."
    vector(function, "positives", value, "query", query, several=several)


def no_tangents(function: str, *inputs: Tensor | None) -> None:
    """Forward-mode derivatives would be dropped silently."""
    if have_tangents(*inputs):
        raise ValueError(
            f"{function}: inputs must not carry forward-mode tangents, because the loss has a backward only. Use "
            f"torch.autograd.grad, or megabatch.reference.{function}, which has both."
        )


def have_tangents(*inputs: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    unpack: Any = forward_ad.unpack_dual
    return any(x is not None and unpack(x).tangent is not None for x in inputs)


# ---- Numbers.


def as_scalar(function: str, name: str, value: Scalar | None) -> Tensor:
    """As a floating 0-d or [1] tensor; a Python number keeps all its digits."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dim() > 1:
            raise ValueError(
                f"{function}: {name} must be a scalar, 0-d or of shape [1], got shape {tuple(value.shape)}."
            )
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{function}: {name} must be a real number, got {value.dtype}. Convert it with .float().")
        if value.is_meta:
            raise ValueError(f"{function}: {name} must hold data, got a tensor on the meta device.")
        return value if value.is_floating_point() else value.double()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{function}: {name} must be a number or a tensor, got {type(value).__name__}.")
    # A product, because that is what a compiler can take another number into without compiling anew.
    return torch.ones((), dtype=torch.float64, device="cpu") * float(value)


def resolve_scale(function: str, logit_scale: Scalar | None, temperature: Scalar | None) -> Tensor:
    """The scale, from itself or from a temperature. Exactly one of them must be given."""
    if (logit_scale is None) == (temperature is None):
        both = "neither" if logit_scale is None else "both"
        raise ValueError(
            f"{function}: exactly one of logit_scale and temperature must be given, got {both}. "
            "logit_scale = 1 / temperature."
        )
    if logit_scale is not None:
        scale = as_scalar(function, "logit_scale", logit_scale)
        # A scale that was computed, or has the shape of a parameter, is trained and may well fall below 1.
        if scale.dim() == 0 and scale.is_leaf and _is_readable(scale):
            warn_scale(function, scale.item(), "logit_scale")
        return scale
    value = as_scalar(function, "temperature", temperature)
    value = value if value.dtype == torch.float64 else value.float()
    if _is_readable(value):
        check_temperature(function, value.item())
        return value.reciprocal()
    # Not looked at here: NaN has the loss refuse a temperature that is not positive and finite.
    return torch.where((value > 0) & value.isfinite(), value, math.nan).reciprocal()


def _is_readable(value: Tensor) -> bool:
    """Whether the host can look at it at once: not in an accelerator's memory, and not while something traces."""
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not is_traced and type(value) in (Tensor, torch.nn.Parameter) and value.is_cpu


def check_temperature(function: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{function}: temperature must be positive and finite, got {value}.")
    warn_scale(function, 1 / value, "temperature")


def warn_scale(function: str, scale: float, given_as: str) -> None:
    """Warn once if a scale is below 1. It was `given_as` a scale or as a temperature; the other was probably meant."""
    if torch.compiler.is_compiling() or not 0 < scale < 1:  # a warning would break the graph
        return
    number, problem = f"{scale:.4g}", "below 1 and looks like a temperature. It multiplies the logits"
    if given_as == "temperature":
        number, problem = f"{1 / scale:.4g}", "above 1 and looks like a logit_scale. It divides the logits"
    advice = f"if 1 / {number} is meant, pass {given_as}=1 / {number}."
    warn_once(function, given_as, f"{given_as}={number} is {problem}; {advice}")


# ---- Options that are no tensors.


def options(function: str, given: Mapping[str, Any], **words: tuple[object, ...]) -> dict[str, Any]:
    """The options that are words or numbers, as the tiled computation takes them. `words`: where others are known."""
    checked = {name: given[name] for name in _WORDS if name in given}
    for name, value in checked.items():
        known = words.get(name, _WORDS[name])
        # By type too: 1 is not True, and a tensor is no word at all.
        if not any(type(value) is type(word) and value == word for word in known):
            raise ValueError(f"{function}: {name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
    if "label_smoothing" in given:
        checked["label_smoothing"] = _parse_smoothing(function, given["label_smoothing"])
    checked["tile"] = _parse_tile(function, given["tile"])
    checked["memory_budget"] = parse_budget(function, given["memory_budget"])
    return checked


def _parse_smoothing(function: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{function}: label_smoothing must be a number, got {type(value).__name__}.")
    if not 0 <= value <= 1:
        raise ValueError(f"{function}: label_smoothing must be from 0 to 1, got {value}.")
    numerator, denominator = float(value).as_integer_ratio()
    return numerator / denominator


def _parse_tile(function: str, tile: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if tile is None:
        return None
    sides = tuple(tile) if isinstance(tile, (tuple, list)) else (tile, tile)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise TypeError(f"{function}: tile must be a whole number or a pair of them, got {tile!r}.")
    if min(sides) < 1:
        raise ValueError(f"{function}: tile must be at least 1, got {tile}. Leave it out to let the plan choose.")
    return operator.index(sides[0]), operator.index(sides[1])


def parse_budget(function: str, budget: int | str | None) -> int | None:
    """A number of bytes, from itself or from a size such as "512MiB" or "2G"."""
    if budget is None:
        return None
    size: int | None = None
    if isinstance(budget, str):
        text = budget.strip().upper()
        digits = text.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ ")
        unit = text[len(digits) :].strip() or "B"
        if unit in _UNITS and digits.isascii() and digits.replace(".", "", 1).isdigit():
            size = int(float(digits) * _UNITS[unit])
    elif isinstance(budget, int) and not isinstance(budget, bool):
        size = operator.index(budget)
    if size is None:
        error = ValueError if isinstance(budget, str) else TypeError
        raise error(
            f"{function}: memory_budget must be a whole number of bytes or a size like '512MiB', '2G' or '2GB', got "
            f"{budget!r}."
        )
    if size < 1:
        raise ValueError(f"{function}: memory_budget must be at least 1 byte, got {budget!r}.")
    return size


def group_name(function: str, group: Group | LeftOut | EllipsisType) -> str:
    """The name by which the group travels through an operator; "" for this process alone."""
    if group is None or isinstance(group, (LeftOut, EllipsisType)):
        if group is not None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{function}: group must be given, because torch.distributed runs with {dist.get_world_size()} ranks. "
                "Pass group=torch.distributed.group.WORLD for the rows of all ranks together, or group=None for those "
                "of this rank alone."
            )
        return ""
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{function}: group must be a DeviceMesh of one dimension, got {group.ndim}.")
        group = group.get_group()
    elsewhere: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to ranks that are not in the group
    if group == elsewhere:
        raise ValueError(
            f"{function}: group must have this rank in it, got one of other ranks. Let only those call it."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{function}: group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}.")
    return group.group_name if dist.get_world_size(group) > 1 else ""


def autocast_dtype(features: Tensor) -> str:
    """Name of the dtype in which autocast multiplies float32 features; "" if it does not."""
    if features.is_cpu or not _autocasts(features.device):
        return ""
    return str(torch.get_autocast_dtype(features.device.type)).removeprefix("torch.")


def _autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
