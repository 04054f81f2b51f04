"""inf_cl's three losses, on any device.

    - from inf_cl import cal_inf_loss
    + from megabatch.integrations.inf_cl import cal_inf_loss

inf_cl itself is not needed. Any width and any number of rows work, on one process or several, and ranks may hold
different numbers of rows. Averaged by DDP, the gradient of `scale` is that of one process with all rows; inf_cl's is
larger by a factor of the number of ranks.
"""

import torch.distributed as dist
from torch import Tensor

import megabatch as mb

from .common import all_ranks, as_tensor, scale_of

__all__ = ["cal_flash_loss", "cal_inf_loss", "cal_ring_loss"]


def __dir__() -> list[str]:
    return __all__


def cal_inf_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: float | Tensor | None = None, head_dim: int = 256
) -> Tensor:
    """InfoNCE from `q` to the `k` of all ranks, the mean over the rows of all ranks.

    Equals, up to rounding, with every rank's rows in `q` and `k`,

        cross_entropy(scale * q @ k.T, labels)

    The value is the same on every rank. inf_cl returns the part of this rank's rows; their mean is this value.

    Args:
        q: `[N, D]`, as given: nothing is normalised.
        k: `[M, D]`, M at least N unless `labels` is given.
        labels: `[N]` integers: the row of this rank's `k` that belongs with each row of `q`. Default: row i with row i.
        scale: Logits are multiplied by it; a float, 0-d or shape-[1] tensor. None: 1.
        head_dim: Accepted; it has no effect.

    Returns:
        The loss, 0-d: float64 for float64 features, else float32.
    """
    return _info_nce(q, k, labels, scale, "mean", all_ranks())


def cal_ring_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: float | Tensor | None = None, head_dim: int = 256
) -> Tensor:
    """The same as `cal_inf_loss`. In inf_cl the two differ only in how they are computed."""
    return cal_inf_loss(q, k, labels, scale, head_dim)


def cal_flash_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: float | Tensor | None = None, head_dim: int = 256
) -> Tensor:
    """InfoNCE from `q` to the `k` of this process alone, `[N]`: `cross_entropy(…, reduction="none")`.

    Arguments as for `cal_inf_loss`.
    """
    return _info_nce(q, k, labels, scale, "none", None)


def _info_nce(
    q: Tensor,
    k: Tensor,
    labels: Tensor | None,
    scale: float | Tensor | None,
    reduction: str,
    group: dist.ProcessGroup | None,
) -> Tensor:
    scale = scale_of(1.0 if scale is None else scale)
    loss = mb.info_nce_loss(q, k, scale, positives=labels, normalize=False, reduction=reduction, group=group)
    return as_tensor(loss)
