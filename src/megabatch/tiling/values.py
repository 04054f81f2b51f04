"""What can only be seen by looking at the data: values that are refused, and the lengths of rows."""

import math
import warnings

import torch
from torch import Tensor

from .call import Call, Inputs

LONGEST_INVERSE = 1e12  # of a row's length, as torch.nn.functional.normalize
_SEEN: set[str] = set()  # functions whose first batch was looked at


def check_values(inputs: Inputs, call: Call, scale: float, bias: float) -> None:
    function = call.function
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
    if inputs.positives is not None and inputs.second is not None:
        check_positives(function, inputs.positives, len(inputs.second))


def check_positives(function: str, positives: Tensor, num_keys: int) -> None:
    if positives.numel():
        low, high = (bound.item() for bound in positives.aminmax())
        if low < 0 or high >= num_keys:
            raise ValueError(f"{function}: positives must be rows of key, 0 to {num_keys - 1}, got {low} to {high}.")


def warn_of_lengths(inputs: Inputs, call: Call) -> None:
    """Once per function, at its first batch: were unit lengths forgotten?"""
    features = [x for x in inputs[:3] if x is not None and len(x)]
    if call.normalize is not None or call.function in _SEEN or not features:
        return
    _SEEN.add(call.function)
    low, high = (bound.item() for bound in torch.cat([lengths(x) for x in features]).aminmax())
    if max(abs(low - 1), abs(high - 1)) > 0.01:
        warnings.warn(
            f"{call.function}: the rows of the first batch are not of unit length, but from {low:.4g} to {high:.4g}. "
            "Pass normalize=True for cosine similarity, or normalize=False if dot products are meant.",
            stacklevel=2,
        )


def lengths(features: Tensor) -> Tensor:
    compute = compute_dtype(features)
    strips = torch.split(features, strip_height(features))
    return torch.cat([torch.linalg.vector_norm(x.to(compute), dim=1) for x in strips])


def inverse_lengths(features: Tensor) -> Tensor:
    """What makes every row one of unit length."""
    return lengths(features).reciprocal_().clamp_max_(LONGEST_INVERSE)


def strip_height(features: Tensor) -> int:
    """Rows at a time where features are read outside of tiles: about 1 MiB in float32."""
    return max(1, 2**18 // features.shape[1])


def compute_dtype(features: Tensor) -> torch.dtype:
    """Of logits, slopes and sums of gradients."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32
