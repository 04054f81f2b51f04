"""What several drop-ins need."""

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_ranks() -> dist.ProcessGroup | None:
    """The group of all ranks; None where there is one."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD if dist.get_world_size() > 1 else None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        warnings.warn(
            f"The rows of all ranks were asked for, and {os.environ['WORLD_SIZE']} were started, but torch.distributed "
            "is not initialised: these are the rows of this rank alone. Call torch.distributed.init_process_group.",
            stacklevel=2,
        )
    return None


def scale_of(number: float | Tensor) -> Tensor:
    """For tools where a number below 1 is a scale as any other. Numbers and 0-d tensors would be warned of."""
    return number.reshape(1) if isinstance(number, Tensor) else torch.tensor([number], dtype=torch.float64)


def check_options(name: str, options: Iterable[str], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            help = "Pass scale=1 / temperature" if option == "temperature" else "megabatch's own losses have more"
            raise TypeError(f"{name}: options must be among {', '.join(known)}, got {option}. {help}.")


def not_importable(name: str, package: str, extra: str, error: ImportError, got: str = "") -> ImportError:
    """What to say where `package` is missing, too old, or broken."""
    return ImportError(
        f"{name}: {package} must be importable, got {got}{type(error).__name__}: {error}. "
        f"Run pip install 'megabatch[{extra}]'."
    )


def as_tensor(loss: Any) -> Tensor:
    """A loss that was asked for without statistics."""
    assert isinstance(loss, Tensor)
    return loss
