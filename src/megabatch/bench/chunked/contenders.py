"""Who trains towers chunk by chunk: megabatch, other packages, the bare computation, and the step without chunks."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import megabatch

from ..loss.contenders import NotInstalled, package, sentence_transformers_losses
from .towers import Side, Task, Tower

# Forward and backward of a task; leaves the gradients in its parameters and returns the loss.
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Cacher:
    """A way to do a training step.

    Attributes:
        make: The step for a task, in chunks of so many rows. Raises NotInstalled.
        package: By the name pip knows.
        tasks: Those it can do.
        ours: Its gradients are held against the precision of the step without chunks.
        whole: Holds the activations of the whole batch.
    """

    name: str
    title: str
    make: Callable[[Task, int], Step]
    package: str = "megabatch"
    tasks: tuple[str, ...] = ("pairs", "towers", "vision")
    ours: bool = False
    whole: bool = False


def ours(task: Task, chunk: int) -> Step:
    def step() -> Tensor:
        features = [
            megabatch.chunked(side.encoder, side.inputs, chunk_size=chunk, transform=side.prepare)
            for side in task.sides
        ]
        return _descend(task, features)

    return step


def plain(task: Task, chunk: int) -> Step:
    return lambda: _descend(task, [side.encode(side.inputs) for side in task.sides])


def floor(task: Task, chunk: int) -> Step:
    """Forward, the loss, forward and backward, over the same chunks by hand, and nothing else."""

    def step() -> Tensor:
        with torch.no_grad():
            features = [torch.cat([side.encode(x) for x in torch.split(side.inputs, chunk)]) for side in task.sides]
        loss = _descend(task, [x.requires_grad_() for x in features])
        for side, whole in zip(task.sides, features, strict=True):
            assert whole.grad is not None
            pieces = (torch.split(rows, chunk) for rows in (side.inputs, whole.grad))
            for inputs, gradient in zip(*pieces, strict=True):
                torch.autograd.backward(side.encode(inputs), gradient)
        return loss

    return step


def grad_cache(task: Task, chunk: int) -> Step:
    """Around the loss that the others have: it takes any."""
    cache = _grad_cache_module().GradCache([_prepared(side) for side in task.sides], chunk, task.loss)

    def step() -> Tensor:
        loss: Tensor = cache(*(side.inputs for side in task.sides))
        return loss

    return step


def sentence_transformers(task: Task, chunk: int) -> Step:
    """With the loss that is built into it."""
    kind = sentence_transformers_losses().CachedMultipleNegativesRankingLoss
    tower = task.sides[0].encoder
    criterion = kind(nn.Sequential(_Sentences(tower)), scale=task.scale.item(), mini_batch_size=chunk)

    def step() -> Tensor:
        loss: Tensor = criterion([{"input_ids": side.inputs} for side in task.sides], None)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def _descend(task: Task, features: list[Tensor]) -> Tensor:
    loss = task.loss(*features)
    torch.autograd.backward(loss)
    return loss.detach()


class _Prepared(nn.Module):
    """For who knows of no function to apply to a chunk."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side

    def forward(self, inputs: Tensor) -> Tensor:
        return self.side.encode(inputs)


def _prepared(side: Side) -> nn.Module:
    return side.encoder if side.prepare is None else _Prepared(side)


class _Sentences(nn.Module):
    """A tower as the first of a SentenceTransformer's modules."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.tower(features["input_ids"])}


def _grad_cache_module() -> Any:
    """On PyPI it is installed by one name and imports itself by another."""
    with contextlib.suppress(NotInstalled):
        return package("grad_cache")
    found = package("gradcache")
    sys.modules["grad_cache"] = found
    sys.modules["grad_cache.context_managers"] = importlib.import_module("gradcache.context_managers")
    return importlib.reload(found)


CACHERS = {
    cacher.name: cacher
    for cacher in (
        Cacher("megabatch", "megabatch.chunked", ours, ours=True),
        Cacher("floor", "forward + forward + backward, the limit", floor),
        Cacher("grad_cache", "GradCache", grad_cache, "GradCache"),
        Cacher(
            "sentence_transformers",
            "sentence-transformers CachedMultipleNegativesRankingLoss",
            sentence_transformers,
            "sentence-transformers",
            tasks=("pairs",),
        ),
        Cacher("plain", "in one piece", plain, whole=True),
    )
}
