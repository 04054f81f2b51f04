"""What is trained: two towers by name, a batch made in memory, and a step of it whose parts are clocked."""

import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import megabatch

from ...train.config import Model, Optimization
from ...train.optimization import make_optimizer
from ...train.towers import Towers, make_towers
from ..loss.contenders import NotInstalled, package
from .contenders import LOSSES, Way

PARTS = ("encoder", "loss", "optimizer")
SEED = 0
CAPTION_BYTES = 20  # of which the letters are twice as many


def towers_of(model: str) -> Towers:
    """As `megabatch train` makes them, with the same random weights every time. ValueError or ImportError where there
    are none by this name."""
    if model not in ("tiny", "small"):
        with contextlib.suppress(NotInstalled):
            package("torchvision")  # first, by a way that forgives what its compiled part lacks
    logging.disable(logging.WARNING)  # that weights are random, which every process would say again
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return make_towers(Model(model=model), loss="clip")
    finally:
        logging.disable(logging.NOTSET)


@dataclass
class Training:
    """Towers in training, their optimizer, and a batch: images of bytes, and tokens."""

    towers: Towers
    optimizer: torch.optim.Optimizer
    images: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, model: str, rows: int, *, dropout: bool = False) -> "Training":
        """The same every time, in every process. A learning rate of 0 keeps it the same from step to step."""
        towers = towers_of(model).train(dropout)
        optimizer = make_optimizer(towers.named_parameters(), Optimization(lr=0.0))
        chance = torch.Generator().manual_seed(SEED)
        shape = (rows, towers.preprocessing.channels, towers.preprocessing.size, towers.preprocessing.size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=chance)
        letters = random.Random(SEED)
        return cls(
            towers, optimizer, images, towers.tokenizer([letters.randbytes(CAPTION_BYTES).hex() for _ in range(rows)])
        )

    def first(self, rows: int) -> "Training":
        """Of the same towers, on so many rows."""
        return Training(self.towers, self.optimizer, self.images[:rows], self.tokens[:rows])

    @property
    def width(self) -> int:
        """Of the features."""
        with torch.no_grad():
            return self.towers.encode_text(self.tokens[:1]).shape[1]

    @property
    def input_bytes(self) -> int:
        return self.images.nbytes + self.tokens.nbytes

    @property
    def held_bytes(self) -> int:
        """Of weights, what the optimizer keeps of them, and the batch."""
        states = (x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
        return self.input_bytes + sum(x.nbytes for x in (*self.towers.parameters(), *states))

    def encode(self, chunk: int | None) -> tuple[Tensor, Tensor]:
        """Features of images and of texts, in chunks of so many rows, or at once."""
        towers = self.towers
        if chunk is None:
            return towers.encode_image(towers.pixels(self.images)), towers.encode_text(self.tokens)
        image = megabatch.chunked(towers.encode_image, self.images, chunk_size=chunk, transform=towers.pixels)
        return image, megabatch.chunked(towers.encode_text, self.tokens, chunk_size=chunk)


class Stopwatch:
    """Seconds of each of the parts since the start, of which every lap ends one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def start(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._last = self._clock()

    def lap(self, part: str) -> None:
        now = self._clock()
        self.parts[part] += now - self._last
        self._last = now


class _Seam(torch.autograd.Function):
    """Changes nothing. Its backward comes when the loss's is over and that of the encoders has not begun."""

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], None], *features: Tensor) -> tuple[Tensor, ...]:
        ctx.reached = reached
        return tuple(x.view_as(x) for x in features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.reached()
        return None, *gradients


class Step:
    """One training step each time it is called; `runs` has the parts of each."""

    def __init__(self, training: Training, way: Way, chunk: int, watch: Stopwatch | None = None) -> None:
        self.training, self.loss = training, LOSSES[way.loss]
        self.chunk = chunk if way.chunked else None
        self.runs: list[dict[str, float]] = []
        self._watch = watch or Stopwatch()

    def __call__(self) -> Tensor:
        training, watch = self.training, self._watch
        watch.start()
        training.optimizer.zero_grad()
        watch.lap("optimizer")
        features = (*training.encode(self.chunk), training.towers.logit_scale.exp())
        watch.lap("encoder")
        loss = self.loss(*_Seam.apply(lambda: watch.lap("loss"), *features))  # type: ignore[no-untyped-call]
        torch.autograd.backward(loss)
        watch.lap("encoder")
        training.optimizer.step()
        watch.lap("optimizer")
        self.runs.append(watch.parts)
        return loss.detach()
