"""Calls that the sections for a GPU make: every loss with one option at a time, forward and backward apart."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megabatch

from .cases import Case
from .exactness import leaves

ROWS, WIDTH, TILE = 293, 72, 160

DEFAULT, PLAIN, SCALE = "default", "plain", "scale with a gradient"
# What each option gives beside features and scale, and what it passes.
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    DEFAULT: ((), {"normalize": None}),
    PLAIN: ((), {}),
    "normalize": ((), {"normalize": True}),
    "ids mask": (("ids",), {"same_ids": "mask"}),
    "ids positive": (("ids",), {"same_ids": "positive"}),
    "weight": (("weight",), {}),
    "label_smoothing": ((), {"label_smoothing": 0.1}),
    "return_stats": ((), {"return_stats": True}),
    "positives": (("positives",), {}),
    "negatives": (("negatives",), {}),
    "reduction none": ((), {"reduction": "none"}),
    "bfloat16": ((), {}),
    "float16": ((), {}),
    SCALE: ((), {}),
}
HALF = ("bfloat16", "float16")
ONLY = {"positives": ("info_nce_loss",), "negatives": ("info_nce_loss",)}
NEVER = {"ids mask": ("supcon_loss",), "ids positive": ("supcon_loss",), "label_smoothing": ("siglip_loss",)}


@dataclass(frozen=True)
class Call:
    """One call of a loss. Scale and bias are numbers unless the option says that they have gradients."""

    loss: str
    option: str
    backend: str
    dtype: str = "float32"
    rows: int = ROWS
    width: int = WIDTH
    more: dict[str, Any] = field(default_factory=lambda: {"tile": TILE})

    def __str__(self) -> str:
        return f"{self.loss}, {self.option}, {self.backend}"

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Copies of their own, each time of the same numbers."""
        gives, _ = OPTIONS[self.option]
        case = Case(self.loss, self.option, self.rows, self.width, gives)
        kind: torch.dtype = getattr(torch, self.dtype)
        scalars = leaves(case.scalars(kind), device)
        (share,) = case.shares(1, kind)
        numbers = scalars if self.option == SCALE else {name: x.item() for name, x in scalars.items()}
        return {**leaves(share, device), **numbers}

    def other(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Other numbers of the same shapes: every other row of one side turns to one row of the other side."""
        sides = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.dim() == 2]
        changed = inputs[sides[0]].detach().clone()
        changed[::2] += inputs[sides[-1]].detach()[0]
        return inputs | {sides[0]: torch.nn.functional.normalize(changed, dim=1).requires_grad_()}

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """The loss, as one number."""
        _, options = OPTIONS[self.option]
        options = {"normalize": False, **options, **self.more, "backend": self.backend, "group": None}
        returned = getattr(megabatch, self.loss)(**inputs, **options)
        value: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return value.sum() if value.dim() else value


def leaves_of(inputs: dict[str, Any]) -> list[Tensor]:
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


def options_of(loss: str) -> Iterator[str]:
    for option in OPTIONS:
        if loss in ONLY.get(option, (loss,)) and loss not in NEVER.get(option, ()):
            yield option


def calls(
    losses: Iterable[str], backends: Iterable[str], dtypes: Iterable[str], options: Iterable[str] = OPTIONS
) -> list[Call]:
    """Every loss with every option that it has, in the first of the dtypes or the one that the option names."""
    dtypes, backends, options = list(dtypes), list(backends), list(options)
    return [
        Call(loss, option, backend, option if option in HALF else dtypes[0])
        for loss in losses
        for backend in backends
        for option in options_of(loss)
        if option in options and (option not in HALF or option in dtypes)
    ]
