"""What can only be seen by looking at the data: values that are refused, and warnings of likely mistakes.

The CPU looks at once. An accelerator computes the numbers behind a warning, and a later call looks at them when they
have arrived: the host never waits for it.
"""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .options import LossInputs, LossOptions, compute_dtype

LARGEST_INVERSE_NORM = 1e12  # as torch.nn.functional.normalize
UNIT_NORM = 1.001  # no normalised row is longer, whatever it was rounded to
MANY_ROWS = 8  # fewer may have one id by chance

_warned: set[tuple[str, str]] = set()  # functions, and what they have warned of
_pending: dict[tuple[str, str], tuple[Tensor, Any]] = {}  # likewise: a range, and the event of its arrival


def check_values(inputs: LossInputs, options: LossOptions, scale: float, bias: float) -> None:
    function = options.function
    if not math.isfinite(scale):
        raise ValueError(
            f"{function}: logit_scale (1 / temperature) must be finite, got {scale}. Clamp it, as CLIP does "
            "at 100; a temperature must be positive."
        )
    if not math.isfinite(bias):
        raise ValueError(f"{function}: logit_bias must be finite, got {bias}.")
    if inputs.weight is not None and len(inputs.weight):
        low, high = _range([inputs.weight])
        if not 0 <= low <= high < math.inf:
            raise ValueError(
                f"{function}: weight must be finite and not negative, got {low} to {high}. Use 0 to leave a row out."
            )
    if inputs.positives is not None and inputs.columns is not None:
        check_indices(function, "positives", inputs.positives, len(inputs.columns))


def check_indices(function: str, name: str, indices: Tensor, num_keys: int) -> None:
    if indices.numel():
        low, high = (bound.item() for bound in indices.aminmax())
        if low < 0 or high >= num_keys:
            raise ValueError(f"{function}: {name} must be rows of key, 0 to {num_keys - 1}, got {low} to {high}.")


# ---- lengths of rows


class Norms(NamedTuple):
    """Of the rows of each feature input: 1 / length where rows are normalised, and a bound of their lengths."""

    inverse: tuple[Tensor | None, ...] = (None, None, None)
    largest: tuple[float, ...] = (math.inf, math.inf, math.inf)


def measure_norms(inputs: LossInputs, options: LossOptions) -> Norms:
    """Warns of likely mistakes on the way."""
    watched = options.normalize is None and (options.function, "norms") not in _warned
    if not options.group and (ids := watched_ids(inputs, options)):  # with a group, in the handshake
        _watch(options.function, "ids", ids)
    if options.normalize:
        norms = (None if x is None else inverse_norms(row_norms(x)) for x in inputs.features)
        return Norms(tuple(norms), (UNIT_NORM,) * 3)
    if inputs.rows.device.type == "cpu":
        ranges = [_range([row_norms(x)]) if x is not None and len(x) else None for x in inputs.features]
        lows, highs = zip(*filter(None, ranges), strict=True) if any(ranges) else ((1.0,), (1.0,))
        if watched:
            warn_of_range(options.function, "norms", min(lows), max(highs))
        return Norms(largest=tuple(bounds[1] if bounds else 0.0 for bounds in ranges))
    if watched:
        _watch(options.function, "norms", [row_norms(x) for x in inputs.features if x is not None and len(x)])
    return Norms()


def inverse_norms(norms: Tensor) -> Tensor:
    """What makes every row one of unit length."""
    return norms.reciprocal().clamp_max_(LARGEST_INVERSE_NORM)


def row_norms(features: Tensor) -> Tensor:
    dtype = compute_dtype(features)
    if features.dtype == dtype:
        norms: Tensor = torch.linalg.vector_norm(features, dim=1)
        return norms
    strips = torch.split(features, strip_height(features))
    return torch.cat([torch.linalg.vector_norm(x.to(dtype), dim=1) for x in strips])


def strip_height(features: Tensor) -> int:
    """Rows at a time where features are read outside of tiles: about 1 MiB in float32."""
    return max(1, 2**18 // features.shape[1])


# ---- warnings


def watched_ids(inputs: LossInputs, options: LossOptions) -> list[Tensor]:
    """The ids whose equality would leave nothing to learn from, unless that has been said."""
    few = not options.group and len(inputs.rows) < MANY_ROWS
    unmasked = inputs.negatives is not None and inputs.negative_ids is None
    if options.spec.id_rule != "mask" or few or unmasked or (options.function, "ids") in _warned:
        return []
    return [x for x in (inputs.row_ids, inputs.column_ids, inputs.negative_ids) if x is not None and len(x)]


def id_range(inputs: LossInputs, options: LossOptions) -> tuple[float, float] | None:
    """For the handshake: only all ranks together know whether all ids are equal."""
    ids = watched_ids(inputs, options) if options.group and inputs.rows.device.type == "cpu" else []
    return _range(ids) if ids else None


def _range(vectors: list[Tensor]) -> tuple[float, float]:
    """The smallest and the largest of all numbers, on the CPU."""
    lows, highs = zip(*(x.aminmax() for x in vectors), strict=True)
    return min(low.item() for low in lows), max(high.item() for high in highs)


def _watch(function: str, name: str, vectors: list[Tensor]) -> None:
    """Warn of a range that looks like a mistake: at once on the CPU, elsewhere when it has arrived, in a later call."""
    device = vectors[0].device.type if vectors else ""
    if device == "cpu":
        warn_of_range(function, name, *_range(vectors))
    elif device == "cuda" and (function, name) not in _pending:
        bounds = torch.stack([bound.double() for x in vectors for bound in x.aminmax()])
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arriving = torch.stack(bounds.aminmax()).to("cpu", non_blocking=True)
        event.record()
        _pending[function, name] = arriving, event
    elif device == "cuda" and _pending[function, name][1].query():
        warn_of_range(function, name, *_pending.pop((function, name))[0].tolist())


def warn_of_range(function: str, name: str, low: float, high: float) -> None:
    if name == "norms" and max(abs(low - 1), abs(high - 1)) > 0.01:
        message = (
            f"{function}: rows are not of unit length, but from {low:.4g} to {high:.4g}. Pass normalize=True for "
            "cosine similarity, or normalize=False if dot products are meant."
        )
    elif name == "ids" and low == high:
        message = (
            f"{function}: all ids are equal ({low:.0f}), so every pair but a row and its own positive is masked, and "
            'the loss is 0. Pass ids that tell rows apart, or same_ids="positive".'
        )
    else:
        return
    _warned.add((function, name))
    warnings.warn(message, stacklevel=2)
