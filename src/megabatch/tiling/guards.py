"""What can only be seen by looking at the data: values that are refused, and warnings of likely mistakes.

The CPU looks at once. A GPU that works alone stops at what must be refused, as torch's own cross-entropy does, and the
numbers behind a warning are looked at by a later call: the host never waits. With a group, and on other accelerators,
it waits for what must be refused: one rank that stopped would leave the others waiting.
"""

import math
from itertools import chain
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


def scalar(x: Tensor | None, default: float, device: torch.device) -> float | Tensor:
    """A number where the host knows it, else a 0-d tensor. What is not finite there makes the loss NaN."""
    if x is None:
        return default
    return x.item() if "cpu" in (x.device.type, device.type) else x.detach().view(()).to(device, torch.float64)


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
    indices = indices.long()  # a number of keys may be too large for their dtype
    if indices.device.type == "cuda" and not group:
        torch._assert_async(((indices >= 0) & (indices < num_keys)).all(), rule)
    elif indices.numel():
        low, high = (bound.item() for bound in indices.aminmax())
        if low < 0 or high >= num_keys:
            raise ValueError(f"{rule}, got {low} to {high}.")


def check_weight(function: str, weight: Tensor, group: object = None) -> None:
    rule = f"{function}: weight must be finite and not negative"
    if weight.device.type == "cuda" and not group:
        torch._assert_async(((weight >= 0) & (weight < math.inf)).all(), rule)
    elif weight.numel():
        low, high = (bound.item() for bound in weight.aminmax())
        if not 0 <= low <= high < math.inf:
            raise ValueError(f"{rule}, got {low} to {high}. Use 0 to leave a row out.")


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
    """Bounds of the lengths of the rows of each feature input, as multiplied. Warns of rows that may have been meant to
    be normalised."""
    if options.normalize:
        return (UNIT_NORM,) * 3
    function, on_cpu = options.function, inputs.rows.device.type == "cpu"
    watched = options.normalize is None and (function, "norms") not in callers.warned
    if options.spec.epilogue == "sigmoid" and not watched:  # which has no exponentials to bound
        return (math.inf,) * 3
    waiting = (function, "norms") in _pending and not is_capturing() and not _pending[function, "norms"][1].query()
    if not on_cpu and (not watched or waiting or is_capturing() or inputs.rows.device.type != "cuda"):
        return (math.inf,) * 3
    norms = [[row_norms(x)] if x is not None and len(x) else [] for x in inputs.features]
    vectors = norms if on_cpu else [list(chain.from_iterable(norms))]
    lows, highs = zip(*(_range(function, "norms", x) for x in vectors), strict=True)
    if watched and max(1 - min(lows), max(highs) - 1) > 0.01:
        callers.warn_once(
            function,
            "norms",
            f"rows are not of unit length, but from {min(lows):.4g} to {max(highs):.4g}. Pass normalize=True for "
            "cosine similarity, or normalize=False if dot products are meant.",
        )
    return tuple(max(high, 0.0) for high in highs) if on_cpu else (math.inf,) * 3


# ---- warnings


def id_range(inputs: LossInputs, options: LossOptions) -> Range:
    """Only all ranks together know whether all ids are equal, and those of a GPU arrive when they do."""
    seen = options.group or (options.function, "ids") in callers.warned
    unknown = inputs.rows.device.type != "cpu" and (seen or is_capturing())
    if options.spec.id_rule != "mask" or unknown:
        return EMPTY_RANGE
    ids = (inputs.row_ids, inputs.column_ids, inputs.negative_ids)
    return _range(options.function, "ids", [x for x in ids if x is not None and len(x)])


def _range(function: str, name: str, vectors: list[Tensor]) -> Range:
    """Of all numbers: at once on the CPU, elsewhere that of an earlier call when it has arrived."""
    device, key = vectors[0].device.type if vectors else "", (function, name)
    if device == "cpu":
        lows, highs = zip(*(x.aminmax() for x in vectors), strict=True)
        return min(low.item() for low in lows), max(high.item() for high in highs)
    if device == "cuda" and key not in _pending:
        bounds = torch.stack([bound.double() for x in vectors for bound in x.aminmax()])
        _pending[key] = copy_to_host(torch.stack(bounds.aminmax()))
    elif device == "cuda" and _pending[key][1].query():
        low, high = _pending.pop(key)[0].tolist()
        return low, high
    return EMPTY_RANGE


def is_capturing() -> bool:
    """Into a CUDA graph, where no event may be asked for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def copy_to_host(bounds: Tensor) -> tuple[Tensor, Any]:
    """A copy that nobody waits for, and the event of its arrival."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arriving = bounds.to("cpu", non_blocking=True)
    event.record(torch.cuda.current_stream(bounds.device))
    return arriving, event
