"""Shared by several drop-ins."""

import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_log = logging.getLogger(__name__)


def all_ranks() -> dist.ProcessGroup | None:
    """The group of all ranks; None where there is one."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD if dist.get_world_size() > 1 else None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        warnings.warn(
            f"{os.environ['WORLD_SIZE']} ranks were started, but torch.distributed is not initialised: this loss has "
            "only the rows of this rank as negatives. Call torch.distributed.init_process_group.",
            stacklevel=2,
        )
    return None


def log_local_negatives(name: str, remedy: str) -> None:
    """Warn in the log of rank 0 that each rank's negatives are its own rows. `remedy`: what gathers those of all."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
        _log.warning(
            "%s: each of %d ranks uses only its own rows as negatives. %s to use those of all ranks.",
            name,
            dist.get_world_size(),
            remedy,
        )


def scale_of(number: float | Tensor) -> Tensor:
    """A scale that causes no warning below 1, for libraries where that is usual."""
    return number.reshape(1) if isinstance(number, Tensor) else torch.tensor([number], dtype=torch.float64)


def check_options(name: str, options: Iterable[str], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            help = "Pass scale=1 / temperature" if option == "temperature" else "megabatch's own losses take more"
            raise TypeError(f"{name}: options must be among {', '.join(known)}, got {option}. {help}.")


def not_importable(name: str, package: str, extra: str, error: Exception, got: str = "") -> ImportError:
    """The error to raise where `package` is missing, too old, or installed but broken."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        help = f"Run pip install 'megabatch[{extra}]'"
    else:  # an installed package that fails in its own imports
        help = "Repair the package that fails, for instance by installing builds of torch and torchvision that match"
    return ImportError(f"{name}: {package} must be importable, got {got}{type(error).__name__}: {error}. {help}.")


def as_tensor(loss: Any) -> Tensor:
    """A loss that was asked for without statistics."""
    assert isinstance(loss, Tensor)
    return loss
