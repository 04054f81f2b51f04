"""What is trained when encoders are measured: a vision transformer and a text transformer, in plain torch, with random
weights; and the tasks made of them.

Letters, in this file: N rows, T tokens, W width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch
from megabatch import reference

from ..cases import Case

HEADS = 4
CHANNELS = 3

# The name of a task, and the loss it is trained by.
TASKS = {"pairs": "info_nce", "towers": "clip", "vision": "clip"}


@dataclass(frozen=True)
class Shape:
    """Of both towers; features are as wide as they are."""

    width: int = 128
    layers: int = 4
    image: int = 64
    patch: int = 8
    context: int = 32
    vocabulary: int = 8192
    dropout: float = 0.0


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, W] to the same."""
        query, key, value = self.query_key_value(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value)
        x = x + self.dropout(self.attended(heads.transpose(1, 2).flatten(2)))
        output: Tensor = x + self.dropout(self.perceptron(x))
        return output


class Tower(nn.Module):
    """Tokens, blocks, their mean, a projection."""

    def __init__(self, shape: Shape, embed: nn.Module, tokens: int) -> None:
        super().__init__()
        self.embed = embed
        self.position = nn.Parameter(0.02 * torch.randn(tokens, shape.width))
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.project = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Features, [N, W]."""
        pooled = self.norm(self.blocks(self.embed(inputs) + self.position)).mean(dim=1)
        features: Tensor = self.project(pooled)
        return features


class Patches(nn.Module):
    """Float images, [N, channels, side, side], to a token per patch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.cut = nn.Conv2d(CHANNELS, shape.width, shape.patch, stride=shape.patch)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.cut(images).flatten(2).transpose(1, 2)
        return patches


def image_tower(shape: Shape) -> Tower:
    return Tower(shape, Patches(shape), (shape.image // shape.patch) ** 2)


def text_tower(shape: Shape) -> Tower:
    return Tower(shape, nn.Embedding(shape.vocabulary, shape.width), shape.context)


def to_floats(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """From bytes, to between -1 and 1."""
    return images.to(dtype).div_(127.5).sub_(1)


@dataclass
class Side:
    """An encoder and its part of the batch, which `prepare`, if there is one, makes into what the encoder takes."""

    encoder: Tower
    inputs: Tensor
    prepare: Callable[[Tensor], Tensor] | None = None

    def encode(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.encoder(inputs if self.prepare is None else self.prepare(inputs))
        return features


@dataclass
class Task:
    """A batch to train on: the sides to encode, and the loss of their features."""

    sides: list[Side]
    scale: Tensor
    criterion: Callable[..., Any]
    given: tuple[Tensor, ...] = ()

    def loss(self, *features: Tensor) -> Tensor:
        value: Tensor = self.criterion(*features, *self.given, self.scale, normalize=True)
        return value

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each once, by name; a tower may stand on two sides."""
        towers = {id(side.encoder): side.encoder for side in self.sides}
        for index, tower in enumerate(towers.values(), start=1):
            yield from ((f"{name} of tower {index}", parameter) for name, parameter in tower.named_parameters())
        if self.scale.requires_grad:
            yield "the scale", self.scale

    def clear(self) -> None:
        for _, parameter in self.parameters():
            parameter.grad = None

    @property
    def input_bytes(self) -> int:
        return sum(x.nbytes for x in (*(side.inputs for side in self.sides), *self.given))


@dataclass(frozen=True)
class Encoding:
    """What is measured: a task, its rows, and how many of them are encoded at a time."""

    task: str
    rows: int
    chunk: int
    shape: Shape = Shape()

    @property
    def case(self) -> Case:
        """As the loss sees it."""
        return Case(TASKS[self.task], self.rows, self.shape.width)

    def with_rows(self, rows: int, chunk: int) -> "Encoding":
        return replace(self, rows=rows, chunk=chunk)

    def without_dropout(self) -> "Encoding":
        return replace(self, shape=replace(self.shape, dropout=0.0))

    def make(self, dtype: torch.dtype = torch.float32, dense: bool = False) -> Task:
        """The same weights and inputs every time, in every process; `dense`: trained by the loss's dense twin."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.rows * 31 + self.shape.width)
            sides, given = _SIDES[self.task](self, dtype)
        for side in sides:
            side.encoder.to(dtype)
        scale = torch.tensor(self.case.kind.scale, dtype=dtype, requires_grad=self.task != "pairs")
        criterion = getattr(reference if dense else megabatch, self.case.kind.function)
        return Task(sides, scale, criterion, tuple(x.to(dtype) for x in given))

    def __str__(self) -> str:
        shape = self.shape
        what = {
            "pairs": "anchors and positives through one text tower",
            "towers": "an image tower and a text tower",
            "vision": "an image tower, text features given",
        }
        sizes = f"W={shape.width}, {shape.layers} layers"
        return f"{what[self.task]}, {self.case.kind.function}, N={self.rows} in chunks of {self.chunk}, {sizes}"


def _texts(encoding: Encoding) -> Tensor:
    return torch.randint(encoding.shape.vocabulary, (encoding.rows, encoding.shape.context))


def _images(encoding: Encoding) -> Tensor:
    side = encoding.shape.image
    return torch.randint(256, (encoding.rows, CHANNELS, side, side), dtype=torch.uint8)


def _pairs(encoding: Encoding, dtype: torch.dtype) -> tuple[list[Side], tuple[Tensor, ...]]:
    tower = text_tower(encoding.shape)
    return [Side(tower, _texts(encoding)) for _ in range(2)], ()


def _towers(encoding: Encoding, dtype: torch.dtype) -> tuple[list[Side], tuple[Tensor, ...]]:
    images, _ = _vision(encoding, dtype)
    return [*images, Side(text_tower(encoding.shape), _texts(encoding))], ()


def _vision(encoding: Encoding, dtype: torch.dtype) -> tuple[list[Side], tuple[Tensor, ...]]:
    side = Side(image_tower(encoding.shape), _images(encoding), partial(to_floats, dtype=dtype))
    return [side], (torch.randn(encoding.rows, encoding.shape.width),)


_SIDES = {"pairs": _pairs, "towers": _towers, "vision": _vision}
