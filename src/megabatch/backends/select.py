"""Which backend runs a call. One asked for by name is used or refused with every reason, never replaced."""

import torch

from .eager import Eager

BACKENDS: dict[str, type[Eager]] = {"eager": Eager}
ABSENT = {"triton": "this version of megabatch has no triton backend"}


def select(function: str, name: str, device: torch.device, dtype: torch.dtype) -> type[Eager]:
    """The backend called `name`, or for "auto" the first that has no reason against the call."""
    reasons = {known: backend.reasons_against(device, dtype) for known, backend in BACKENDS.items()}
    reasons |= {absent: [reason] for absent, reason in ABSENT.items()}
    wanted = list(BACKENDS) if name == "auto" else [name]
    for candidate in wanted:
        if not reasons[candidate]:
            return BACKENDS[candidate]
    lines = [f"  {candidate}: {reason}" for candidate in wanted for reason in reasons[candidate]]
    raise ValueError(
        "\n".join(
            [
                f"{function}: backend {name!r} cannot run this call:",
                *lines,
                "Pass backend='auto' to let the library choose.",
            ]
        )
    )
