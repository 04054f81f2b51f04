"""What can only be seen by looking at the data: values that are refused, and warnings of likely mistakes.

The CPU looks at once. A GPU that works alone stops at what must be refused, as torch's own cross-entropy does, and the
numbers behind a warning are looked at by a later call: the host never waits. With a group, and on other accelerators,
it waits for what must be refused: one rank that stopped would leave the others waiting.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import callers
from .options import LossInputs, LossOptions, compute_dtype

LARGEST_INVERSE_NORM = 1e12  # as torch.nn.functional.normalize
UNIT_NORM = 1.001  # no normalised row is longer, whatever it was rounded to
EMPTY_RANGE = (math.inf, -math.inf)

Range = tuple[float, float]  # smallest and largest

_pending: dict[tuple[str, str], tuple[Tensor, Any]] = {}  # by function and kind: a range, and the event of its arrival


# ---- values


def scalar(x: Tensor | None, default: float, features: Tensor) -> float | Tensor:
    """A number where the host knows it, else a 0-d tensor beside the features. What is not finite there makes the loss
    NaN."""
    if x is None:
        return default
    if "cpu" in (x.device.type, features.device.type):
        return x.item()
    return x.detach().view(()).to(features.device, compute_dtype(features))


def check_scalars(function: str, scale: float | Tensor, bias: float | Tensor) -> None:
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(
            f"{function}: logit_scale (1 / temperature) must be finite, got {scale}. Clamp it, as CLIP does "
            "at 100; a temperature must be positive."
        )
    if isinstance(bias, float) and not math.isfinite(bias):
        raise ValueError(f"{function}: logit_bias must be finite, got {bias}.")


def check_indices(function: str, name: str, indices: Tensor, num_keys: int, group: object = None) -> None:
    rule = f"{function}: {name} must be rows of key, 0 to {num_keys - 1}"
    _check_range(rule, indices.long(), num_keys, group)  # their own dtype may have no such number


def check_weight(function: str, weight: Tensor, group: object = None) -> None:
    rule = f"{function}: weight must be finite and not negative"
    _check_range(rule, weight, math.inf, group, " Use 0 to leave a row out.")


def _check_range(rule: str, values: Tensor, end: float, group: object, advice: str = "") -> None:
    """From 0 to below the end."""
    if values.device.type == "cuda" and not group:
        torch._assert_async(((values >= 0) & (values < end)).all(), rule)
    elif values.numel():
        least, most = (bound.item() for bound in values.aminmax())
        if not 0 <= least <= most < end:
            raise ValueError(f"{rule}, got {least} to {most}.{advice}")


def check_alike(holds: Tensor, rule: str, found: str = "") -> None:
    """What all ranks compute alike: all stop, or raise, together."""
    if holds.device.type == "cuda":
        torch._assert_async(holds, rule)
    elif not holds.item():
        raise ValueError(f"{rule}{found}.")


# ---- lengths of rows


def row_norms(features: Tensor) -> Tensor:
    dtype = compute_dtype(features)
    if features.dtype == dtype:
        norms: Tensor = torch.linalg.vector_norm(features, dim=1)
        return norms
    strips = torch.split(features, strip_height(features))
    return torch.cat([torch.linalg.vector_norm(x.to(dtype), dim=1) for x in strips])


def inverse_norms(features: Tensor) -> Tensor:
    """What makes every row one of unit length."""
    return row_norms(features).reciprocal().clamp_max_(LARGEST_INVERSE_NORM)


def strip_height(features: Tensor) -> int:
    """Rows at a time where features are read outside of tiles: in float32 about 1 MiB, on accelerators 64 MiB."""
    return max(1, (2**18 if features.device.type == "cpu" else 2**24) // features.shape[1])


def max_norms(inputs: LossInputs, options: LossOptions) -> tuple[float, ...]:
    """Bounds of the lengths of the rows of each feature input, as multiplied; inf where the host does not know. Warns
    of rows that may have been meant to be normalised."""
    if options.normalize:
        return (UNIT_NORM,) * 3
    function, device = options.function, inputs.rows.device.type
    bounds: tuple[float, ...] = (math.inf,) * 3
    watched = options.normalize is None and (function, "norms") not in callers.warned
    features = [x for x in inputs.features if x is not None and len(x)]
    low, high = EMPTY_RANGE
    if device == "cpu" and (watched or options.spec.epilogue != "sigmoid"):  # which has no exponentials to bound
        norms = [None if x is None or not len(x) else row_norms(x) for x in inputs.features]
        ranges = [EMPTY_RANGE if x is None else _range(x) for x in norms]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        bounds = tuple(max(high, 0.0) for _, high in ranges)
    elif device == "cuda" and watched:
        low, high = _late_range((function, "norms"), lambda: [row_norms(x) for x in features])
    if watched and max(1 - low, high - 1) > 0.01:
        callers.warn_once(
            function,
            "norms",
            f"rows are not of unit length, but from {low:.4g} to {high:.4g}. Pass normalize=True for cosine "
            "similarity, or normalize=False if dot products are meant.",
        )
    return bounds


# ---- warnings


def id_range(inputs: LossInputs, options: LossOptions) -> Range:
    """Only all ranks together know whether all ids are equal, and those of a GPU arrive when they do."""
    device = inputs.rows.device.type
    ids = [x for x in (inputs.row_ids, inputs.column_ids, inputs.negative_ids) if x is not None and len(x)]
    if options.spec.id_rule != "mask" or not ids:
        return EMPTY_RANGE
    if device == "cpu":
        lows, highs = zip(*map(_range, ids), strict=True)
        return min(lows), max(highs)
    if device == "cuda" and not options.group and (options.function, "ids") not in callers.warned:
        return _late_range((options.function, "ids"), lambda: ids)
    return EMPTY_RANGE


def _range(numbers: Tensor) -> Range:
    low, high = numbers.aminmax()
    return low.item(), high.item()


def _late_range(key: tuple[str, str], vectors: Callable[[], list[Tensor]]) -> Range:
    """Of all numbers of an earlier call on a GPU when they have arrived, so that the host does not wait. Else
    those of this call are sent, unless others are on their way."""
    if is_capturing():
        return EMPTY_RANGE
    pending = _pending.get(key)
    if pending is None and (found := vectors()):
        bounds = torch.stack([bound.double() for x in found for bound in x.aminmax()])
        _pending[key] = copy_to_host(torch.stack(bounds.aminmax()))
    elif pending is not None and pending[1].query():
        _pending.pop(key, None)  # unless another thread did
        low, high = pending[0].tolist()
        return low, high
    return EMPTY_RANGE


def is_capturing() -> bool:
    """Into a CUDA graph, where no event may be asked for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def copy_to_host(bounds: Tensor) -> tuple[Tensor, Any]:
    """A copy without waiting, and the event of its arrival."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arriving = bounds.to("cpu", non_blocking=True)
    event.record(torch.cuda.current_stream(bounds.device))
    return arriving, event
