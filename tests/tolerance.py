"""How far apart two right results may be: what `megabatch.tolerance` says, and the error of logits."""

import math

import torch

from megabatch.tolerance import HALF_PRECISION, eps, slack, summed_in

__all__ = ["HALF_PRECISION", "eps", "logit_error", "slack", "summed_in"]


def logit_error(width: int, logits: float, dtype: torch.dtype = torch.float32) -> float:
    """Of the largest logit, a product of rows of this width. Its roundings go either way: they add up as their root."""
    return eps(dtype) * max(1.0, math.sqrt(width) / 2) * max(1.0, logits)
