"""Which backend runs a call. One asked for by name is used or refused with every reason, never replaced."""

import torch

from .backend import Backend
from .eager import Eager
from .triton_backend import Triton

BACKENDS: dict[str, type[Backend]] = {"triton": Triton, "eager": Eager}


def select(function: str, name: str, device: torch.device, dtype: torch.dtype) -> type[Backend]:
    """The backend called `name`, or for "auto" the fastest that has no reason against the call."""
    wanted = [name] if name != "auto" else [known for known, backend in BACKENDS.items() if backend.suits(device)]
    reasons: list[str] = []
    for candidate in wanted:
        against = BACKENDS[candidate].reasons_against(device, dtype)
        if not against:
            return BACKENDS[candidate]
        reasons += against
    lines = [f"  {reason}." for reason in reasons]
    raise ValueError(
        "\n".join(
            [
                f"{function}: backend {name!r} cannot run this call:",
                *lines,
                "Pass backend='auto' to let the library choose.",
            ]
        )
    )
