"""The one definition of "exact", shared by the tests, `megabatch check` and the benchmarks: how far apart two right
results may be. Roundings of their dtype, of what they are the sum of, and of the logits.

No number here was observed on a machine. A BLAS, a vector unit or a thread more adds up in another order, and may.
"""

import torch

HALF_PRECISION = (torch.bfloat16, torch.float16)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """What a loss of features of this dtype is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def slack(dtype: torch.dtype, largest: float, natural: float = 0.0, logits: float = 1.0) -> float:
    """What a result may be off by on top of the dense loss's own error in this dtype.

    Args:
        dtype: Of the result.
        largest: Its largest entry. It is rounded a few times on its way: in the logit, the exponential, the sum and the
            division.
        natural: The size of what it is the sum of, where that cancels: 1 for a loss, scale / rows for the gradient of a
            feature. Positives and negatives are rounded before they are added.
        logits: The largest. A rounding of it moves every probability by that share, and each side has its own.
    """
    unit = eps(summed_in(dtype))
    rounded = (4 + logits) * largest + 2 * natural
    # dlogits in bf16/fp16, which are rounded or cut off, and a gradient in bf16/fp16.
    half = 1.5 * eps(dtype) * largest if dtype in HALF_PRECISION else 0.0
    return unit * rounded + half


# The same loss, though perhaps computed from bf16/fp16 logits: what other packages must reach, relative to the largest
# entry.
SAME_LOSS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
