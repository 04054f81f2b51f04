"""lightly's NTXentLoss, in linear memory.

    - from lightly.loss import NTXentLoss
    + from megabatch.integrations.lightly import NTXentLoss

lightly itself is needed for its memory bank only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import megabatch as mb

from .common import all_ranks, as_tensor, check_options, log_local_negatives, not_importable

__all__ = ["NTXentLoss"]

_OPTIONS = ("memory_budget", "backend", "tile", "exchange", "overlap", "grad_reduction", "label_smoothing", "reduction")


def __dir__() -> list[str]:
    return __all__


class NTXentLoss(nn.Module):
    """`lightly.loss.NTXentLoss` without the matrices of similarities: the same arguments, values and gradients.

    Without a memory bank it equals `megabatch.nt_xent_loss(out0, out1, temperature=temperature, normalize=True)`,
    SimCLR's loss. With one it is MoCo's: every row of `out0` has its row of `out1` as the positive and the bank alone
    as negatives, not the other rows.

    With `gather_distributed` the value is that of all ranks' rows, the same on every rank (lightly returns the part of
    its own rows). The gradient averaged by DDP is the same as lightly's, and ranks may hold different numbers of rows.
    Without it, each rank's negatives are its own rows, or its own bank, as in lightly; a warning in the log says so.
    With a bank the loss is that of this rank's rows.

    Args:
        temperature: Similarities are divided by it; a negative one works as in lightly. Read in every call, so it may
            be changed, or be a tensor, which gets its gradient.
        memory_bank_size: 0, or (number of rows, width) of lightly's bank of earlier `out1`, kept in `memory_bank`. Only
            a bank needs lightly to be installed.
        gather_distributed: Whether the rows of all ranks are one batch; with a bank, whether it takes those of all.
        options: Of `megabatch.nt_xent_loss`: memory_budget, backend, tile, exchange, overlap, grad_reduction,
            label_smoothing, reduction.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options("NTXentLoss", options, _OPTIONS)
        if -1e-8 < temperature < 1e-8:
            raise ValueError(
                f"NTXentLoss: temperature must be 1e-8 or more in size, because similarities are divided by it, got "
                f"{temperature}. Pass 0.1, or 0.5 as SimCLR does."
            )
        self.memory_bank = None if memory_bank_size == 0 else _bank(memory_bank_size, gather_distributed)
        self.temperature = temperature
        self.gather_distributed = gather_distributed
        self.options = options
        self._has_logged = False

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """The loss of two views' projections, `[N, D]` each, which need not be normalised."""
        # Not `temperature=`, which must be positive.
        scale = torch.ones(1, dtype=torch.float64) / self.temperature
        if not self.gather_distributed and not self._has_logged:
            log_local_negatives("NTXentLoss", "Pass gather_distributed=True")
            self._has_logged = True
        negatives = None
        if self.memory_bank is not None:
            out0, out1 = normalize(out0, dim=1), normalize(out1, dim=1)
            out1, negatives = self.memory_bank(out1, update=out0.requires_grad)
        if negatives is None:
            ranks = all_ranks() if self.gather_distributed else None
            loss = mb.nt_xent_loss(out0, out1, scale, normalize=True, group=ranks, **self.options)
        else:
            # One id for all: no row is a negative of another. The bank's have none, and are negatives of every row.
            ids = torch.zeros(len(out0), dtype=torch.long, device=out0.device)
            loss = mb.info_nce_loss(
                out0,
                out1,
                scale,
                negatives=negatives.T.to(out0),
                query_ids=ids,
                key_ids=ids,
                normalize=False,
                group=None,
                **self.options,
            )
        return as_tensor(loss)

    def extra_repr(self) -> str:
        own = {"temperature": self.temperature, "gather_distributed": self.gather_distributed, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in own.items())


def _bank(size: int | Sequence[int], gather_distributed: bool) -> Any:
    try:
        from lightly.models.modules.memory_bank import MemoryBankModule
    except ImportError as error:
        got = f"memory_bank_size={size}, which is lightly's own, and "
        raise not_importable("NTXentLoss", "lightly", "lightly", error, got) from error
    return MemoryBankModule(size=size, gather_distributed=gather_distributed)
