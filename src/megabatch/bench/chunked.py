"""`megabatch bench chunked`: what encoding in chunks costs, and the memory it takes."""

import argparse
import importlib
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import megabatch
from megabatch import reference

from ..distributed.world import World
from . import flags
from .cases import LOSSES, InChunks, Results, Step, Work, average, on_ranks, results
from .contenders import Contender, NotInstalled, package
from .loss import hold
from .processes import runner
from .results import table

DESCRIPTION = """\
A training step of transformers with random weights whose batch is encoded chunk by chunk: megabatch.chunked, other
packages that do so, the same chunks by hand (a forward without a graph, the loss, a second forward and the backward),
and the batch in one piece. pairs: two texts through one tower, InfoNCE; texts: the same, in lengths of real texts;
towers: images and texts, CLIP; vision: images against given text features, CLIP. Verified and timed as in `bench loss`;
memory is beyond parameters, their gradients and the batch. What does not fit is listed as out of memory.
"""
HEADS, CHANNELS, PADDING = 4, 3, 0
TASKS = {"pairs": "info_nce", "texts": "info_nce", "towers": "clip", "vision": "clip"}
TEXTS_CONTEXT = 128
RATIOS = {"/ by hand": "by_hand"}


@dataclass(frozen=True)
class Shape:
    """Of all towers; features are as wide as they are."""

    width: int = 128
    layers: int = 4
    image: int = 64
    patch: int = 8
    context: int = 32
    vocabulary: int = 8192


class Tower(nn.Module):
    """[N, channels, side, side] floats or [N, tokens] integers, 0 for padding, to features [N, width]."""

    def __init__(self, shape: Shape, images: bool) -> None:
        super().__init__()
        tokens = (shape.image // shape.patch) ** 2 if images else shape.context
        self.embed: nn.Module = (
            nn.Conv2d(CHANNELS, shape.width, shape.patch, stride=shape.patch)
            if images
            else nn.Embedding(shape.vocabulary, shape.width)
        )
        self.images = images
        self.position = nn.Parameter(0.02 * torch.randn(tokens, shape.width))
        layer = nn.TransformerEncoderLayer(
            shape.width, HEADS, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, shape.layers, nn.LayerNorm(shape.width), enable_nested_tensor=False)
        self.project = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs).flatten(2).transpose(1, 2) if self.images else self.embed(inputs)
        padding = None if self.images else inputs == PADDING
        encoded = self.blocks(tokens + self.position[: tokens.shape[1]], src_key_padding_mask=padding)
        if padding is None:
            mean = encoded.mean(dim=1)
        else:
            mean = encoded.masked_fill(padding[:, :, None], 0).sum(dim=1) / (~padding).sum(dim=1, keepdim=True)
        features: Tensor = self.project(mean)
        return features

    def prepare(self, inputs: Tensor) -> Tensor:
        """Images are held as bytes, and made floats as they are encoded."""
        return inputs.to(self.position.dtype).div(127.5).sub(1) if self.images else inputs


@cache
def docstring_lengths() -> list[int]:
    """Words of the docstrings of torch's public functions and classes: real texts that every machine has."""
    modules = (torch, torch.nn.functional, torch.Tensor, torch.nn, torch.linalg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names
        public = [getattr(module, name) for module in modules for name in dir(module) if not name.startswith("_")]
    return sorted(len(one.__doc__.split()) for one in public if callable(one) and isinstance(one.__doc__, str))


def cut_to_real_lengths(texts: Tensor) -> Tensor:
    """As a tokenizer pads a batch: to its longest text."""
    known = torch.tensor(docstring_lengths())
    lengths = known[torch.randint(len(known), (len(texts), 1))].clamp(1, texts.shape[1])
    return texts.masked_fill(torch.arange(texts.shape[1]) >= lengths, PADDING)[:, : lengths.max()]


@dataclass
class Task(Work):
    """A batch to train on: towers, what each encodes, and the loss of their features."""

    sides: list[tuple[Tower, Tensor]]
    given: tuple[Tensor, ...]
    scale: Tensor
    criterion: Callable[..., Tensor]
    chunk: int
    world: World

    def loss(self, *features: Tensor) -> Tensor:
        return self.criterion(*features, *self.given, self.scale, normalize=True, group=self.world.group)

    def descend(self, features: list[Tensor]) -> Tensor:
        loss = self.loss(*features)
        torch.autograd.backward(loss)
        return loss.detach()

    def step(self, function: Callable[[], Tensor]) -> Step:
        def step() -> Tensor:
            loss = function()
            average(self.leaves().values(), self.world)
            return loss

        return step

    def leaves(self) -> dict[str, Tensor]:
        towers = dict.fromkeys(tower for tower, _ in self.sides)  # one may stand on two sides
        named = {
            f"{name} of tower {index}": parameter
            for index, tower in enumerate(towers, start=1)
            for name, parameter in tower.named_parameters()
        }
        return named | ({"the scale": self.scale} if self.scale.requires_grad else {})


@dataclass(frozen=True)
class Encoding(InChunks):
    """What is measured: a task, its rows, and how many of them are encoded at a time."""

    task: str
    rows: int
    chunk: int
    shape: Shape = Shape()
    device: str = "cpu"
    ranks: int = 1

    @property
    def scale(self) -> float:
        return LOSSES[TASKS[self.task]].scale

    def work(self, world: World) -> Task:
        return self._task(world, torch.float32, megabatch)

    def expected(self, normalizes: bool = False, exact: bool = True) -> Results:
        """Of a step in one piece through the dense loss."""
        world = World(torch.device(self.device))
        task = self._task(world, torch.float64 if exact else torch.float32, reference)
        return results(plain(task), task)

    def _task(self, world: World, dtype: torch.dtype, library: Any) -> Task:
        """The same weights and inputs every time, in every process."""
        shape, loss = self.shape, LOSSES[TASKS[self.task]]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.rows * 31 + shape.width)
            towers = {"text": Tower(shape, images=False), "image": Tower(shape, images=True)}
            texts = [torch.randint(1, shape.vocabulary, (self.rows, shape.context)) for _ in range(2)]
            images = torch.randint(256, (self.rows, CHANNELS, shape.image, shape.image), dtype=torch.uint8)
            features = torch.randn(self.rows, shape.width)
            if self.task == "texts":
                texts = [cut_to_real_lengths(x) for x in texts]
        pair = [("text", texts[0]), ("text", texts[1])]
        sides = {"pairs": pair, "texts": pair, "towers": [("image", images), pair[0]], "vision": [("image", images)]}
        mine = self.share(world)
        given = (features[mine].to(world.device, dtype),) if self.task == "vision" else ()
        for tower in towers.values():
            tower.to(world.device, dtype)
        scale = torch.tensor(loss.scale, dtype=dtype, device=world.device, requires_grad=loss.name == "clip")
        placed = [(towers[name], inputs[mine].to(world.device)) for name, inputs in sides[self.task]]
        return Task(placed, given, scale, getattr(library, loss.function), self.chunk, world)

    def __str__(self) -> str:
        return f"{self.task}: {TASKS[self.task]}_loss, N={self.rows} in chunks of {self.chunk}{on_ranks(self.ranks)}"


# ---- who


def ours(task: Task) -> Step:
    encode = partial(megabatch.chunked, chunk_size=task.chunk)
    return task.step(
        lambda: task.descend([encode(tower, x, transform=tower.prepare, module=tower) for tower, x in task.sides])
    )


def by_tokens(task: Task) -> Step:
    """As many tokens in the largest chunk as chunks of rows have, padding included."""

    def encode(tower: Tower, texts: Tensor) -> Any:
        return megabatch.chunked(
            lambda texts, attention_mask: tower(texts),  # the tower masks padding by itself
            texts,
            attention_mask=texts != PADDING,
            chunk_tokens=task.chunk * texts.shape[1],
            module=tower,
        )

    return task.step(lambda: task.descend([encode(*side) for side in task.sides]))


def plain(task: Task) -> Step:
    return task.step(lambda: task.descend([tower(tower.prepare(x)) for tower, x in task.sides]))


def by_hand(task: Task) -> Step:
    """Forward, the loss, forward and backward, over the same chunks, and nothing else."""

    def step() -> Tensor:
        with torch.no_grad():
            features = [
                torch.cat([tower(tower.prepare(x)) for x in torch.split(inputs, task.chunk)])
                for tower, inputs in task.sides
            ]
        loss = task.descend([x.requires_grad_() for x in features])
        for (tower, inputs), whole in zip(task.sides, features, strict=True):
            assert whole.grad is not None
            pieces = (torch.split(rows, task.chunk) for rows in (inputs, whole.grad))
            for x, gradient in zip(*pieces, strict=True):
                torch.autograd.backward(tower(tower.prepare(x)), gradient)
        return loss

    return task.step(step)


class _Prepared(nn.Module):
    """For packages that apply no function to a chunk."""

    def __init__(self, tower: Tower, key: str | None = None) -> None:
        super().__init__()
        self.tower, self.key = tower, key

    def forward(self, inputs: Any) -> Any:
        if self.key is None:
            return self.tower(self.tower.prepare(inputs))
        return {"sentence_embedding": self.tower(inputs[self.key])}


def grad_cache(task: Task) -> Step:
    """Around the loss that the others have: it takes any."""
    cache = _grad_cache_module().GradCache([_Prepared(tower) for tower, _ in task.sides], task.chunk, task.loss)
    return task.step(lambda: cache(*(inputs for _, inputs in task.sides)))


def _grad_cache_module() -> Any:
    """On PyPI it is installed by one name and imports itself by another."""
    with suppress(NotInstalled):
        return package("grad_cache")
    found = package("gradcache")
    sys.modules["grad_cache"] = found
    sys.modules["grad_cache.context_managers"] = importlib.import_module("gradcache.context_managers")
    return importlib.reload(found)


def sentence_transformers(task: Task) -> Step:
    """With the loss that is built into it."""
    kind = package("sentence_transformers.sentence_transformer.losses").CachedMultipleNegativesRankingLoss
    tower = nn.Sequential(_Prepared(task.sides[0][0], "input_ids"))
    criterion = kind(tower, scale=task.scale.item(), mini_batch_size=task.chunk)

    def step() -> Tensor:
        loss: Tensor = criterion([{"input_ids": inputs} for _, inputs in task.sides], None)
        torch.autograd.backward(loss)
        return loss.detach()

    return task.step(step)


ALL = tuple(TASKS)
CONTENDERS = {
    one.name: one
    for one in (
        Contender("megabatch", "megabatch.chunked", ours, ALL, "both", ours=True),
        Contender("tokens", "megabatch.chunked, chunk_tokens", by_tokens, ("texts",), "both", ours=True),
        Contender("by_hand", "forward, forward and backward by hand", by_hand, ALL, "both"),
        Contender("grad_cache", "GradCache", grad_cache, ALL, package="GradCache"),
        Contender(
            "sentence_transformers",
            "sentence-transformers CachedMultipleNegativesRankingLoss",
            sentence_transformers,
            ("pairs", "texts"),
            package="sentence-transformers",
        ),
        Contender("plain", "in one piece", plain, ALL, "both"),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["pairs", "towers"], help="what is trained")
    flags.add_rows(parser, [1024], chunk=64)
    words = {"width": "width of towers and features", "layers": "layers of a tower", "patch": "side of a patch"}
    words |= {"image": "side of an image, in pixels", "vocabulary": "different tokens"}
    words["context"] = f"tokens of a text, at most (default: {Shape.context}; texts: {TEXTS_CONTEXT})"
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=flags.positive, default=default, metavar="N", help=words[name])
    parser.set_defaults(context=None)
    flags.add_contest(parser, CONTENDERS)
    flags.add_files(parser)


def main(options: argparse.Namespace) -> int:
    flags.shrink(options, rows=[96], chunk=32, width=16, layers=1, image=16, context=8, vocabulary=64)
    shape = Shape(**{name: getattr(options, name) or default for name, default in asdict(Shape()).items()})
    if shape.width % HEADS or shape.image % shape.patch:
        got = f"{shape.width}, {shape.image} and {shape.patch}"
        print(f"chunked: --width must be a multiple of {HEADS}, --image of --patch, got {got}.", file=sys.stderr)
        return 2
    shapes = {"texts": replace(shape, context=options.context or TEXTS_CONTEXT)}
    with runner(options.device) as where:
        cases = [
            Encoding(task, rows, options.chunk, shapes.get(task, shape), where.device, where.world.size)
            for task, rows in itertools.product(options.tasks, options.rows)
        ]
        return hold("chunked", options, where, cases, lambda _, rows: table(rows, RATIOS), entrants, base="by_hand")


def entrants(case: Encoding, names: Sequence[str]) -> list[Contender]:
    return [CONTENDERS[name] for name in names if CONTENDERS[name].takes_part(case.task, case.ranks, case.device)]
