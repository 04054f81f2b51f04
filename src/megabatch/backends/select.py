"""Which backend runs a call. One asked for by name is used or refused with every reason, never replaced."""

import torch

from .backend import Backend
from .eager import Eager
from .triton_backend import Triton

BACKENDS: dict[str, type[Backend]] = {"triton": Triton, "eager": Eager}


def select(function: str, name: str, device: torch.device, dtype: torch.dtype) -> type[Backend]:
    """The backend called `name`, or for "auto" the fastest that has no reason against the call."""
    if name == "auto":
        return Triton if Triton.suits(device) and not Triton.reasons_against(device, dtype) else Eager
    if reasons := BACKENDS[name].reasons_against(device, dtype):
        lines = "".join(f"  {reason}.\n" for reason in reasons)
        advice = "Pass backend='auto' to let the library choose."
        raise ValueError(f"{function}: backend {name!r} cannot run this call:\n{lines}{advice}")
    return BACKENDS[name]
