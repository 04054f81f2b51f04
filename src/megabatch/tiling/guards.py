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
_pending: dict[str, tuple[list[str], Tensor, Any]] = {}  # by function: names, numbers, and the event of their arrival


class Norms(NamedTuple):
    """Of the rows of each feature input: 1 / length where rows are normalised, and a bound of their lengths."""

    inverse: tuple[Tensor | None, ...]
    largest: tuple[float, ...]


def check_values(inputs: LossInputs, options: LossOptions, scale: float, bias: float) -> None:
    function = options.function
    if not math.isfinite(scale):
        raise ValueError(
            f"{function}: logit_scale (1 / temperature) must be finite, got {scale}. Clamp it, as CLIP does "
            "at 100; a temperature must be positive."
        )
    if not math.isfinite(bias):
        raise ValueError(f"{function}: logit_bias must be finite, got {bias}.")
    if inputs.weight is not None and inputs.weight.numel():
        low, high = (bound.item() for bound in inputs.weight.aminmax())
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


def measure_norms(inputs: LossInputs, options: LossOptions) -> Norms:
    """What the layout must know of the lengths of rows. Warns of likely mistakes on the way."""
    watched = options.normalize is None and (options.function, "norms") not in _warned
    # The bound saves a look at every tile, if it costs less. An accelerator has no use for it.
    num_rows, num_columns = len(inputs.rows), len(inputs.rows if inputs.columns is None else inputs.columns)
    on_cpu = inputs.rows.device.type == "cpu"
    bounded = on_cpu and num_rows * num_columns >= (num_rows + num_columns) * inputs.rows.shape[1]
    norms: list[Tensor | None] = [None] * 3
    if options.normalize or watched or bounded:
        norms = [None if x is None else row_norms(x) for x in inputs.features]
    found = [x for x in norms if x is not None and len(x)]
    _warn_of_mistakes(inputs, options, found if watched else [])
    if options.normalize:
        return Norms(tuple(None if x is None else inverse_norms(x) for x in norms), (UNIT_NORM,) * 3)
    largest = [x.amax().item() if x is not None and len(x) and on_cpu else math.inf for x in norms]
    return Norms((None, None, None), tuple(largest))


def row_norms(features: Tensor) -> Tensor:
    dtype = compute_dtype(features)
    if features.dtype == dtype:
        norms: Tensor = torch.linalg.vector_norm(features, dim=1)
        return norms
    strips = torch.split(features, strip_height(features))
    return torch.cat([torch.linalg.vector_norm(x.to(dtype), dim=1) for x in strips])


def inverse_norms(norms: Tensor) -> Tensor:
    """What makes every row one of unit length."""
    return norms.reciprocal().clamp_max_(LARGEST_INVERSE_NORM)


def strip_height(features: Tensor) -> int:
    """Rows at a time where features are read outside of tiles: about 1 MiB in float32."""
    return max(1, 2**18 // features.shape[1])


# ---- warnings


def _warn_of_mistakes(inputs: LossInputs, options: LossOptions, norms: list[Tensor]) -> None:
    """At once on the CPU; elsewhere when the numbers have arrived, in a later call of the same function."""
    function, device = options.function, inputs.rows.device.type
    bounds: dict[str, tuple[Tensor, Tensor]] = {}
    if norms:
        bounds["norms"] = _bounds(norms)
    if not options.group and (ids := watched_ids(inputs, options)):  # with a group, in the handshake
        bounds["ids"] = _bounds(ids)
    if device == "cpu":
        for name, (low, high) in bounds.items():
            warn_of_bounds(function, name, low.item(), high.item())
        return
    if function in _pending and _pending[function][2].query():
        names, numbers, _ = _pending.pop(function)
        for name, (low, high) in zip(names, numbers.view(-1, 2).tolist(), strict=True):
            warn_of_bounds(function, name, low, high)
    if bounds and function not in _pending and device == "cuda":
        numbers = torch.stack([bound for pair in bounds.values() for bound in pair]).to("cpu", non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        _pending[function] = list(bounds), numbers, event


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
    low, high = _bounds(ids) if ids else (None, None)
    return None if low is None or high is None else (low.item(), high.item())


def _bounds(vectors: list[Tensor]) -> tuple[Tensor, Tensor]:
    low, high = torch.stack([bound.double() for x in vectors for bound in x.aminmax()]).aminmax()
    return low, high


def warn_of_bounds(function: str, name: str, low: float, high: float) -> None:
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
