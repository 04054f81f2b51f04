"""`megabatch bench step`: the share of a training step that the loss takes, and when it matters which loss it is."""

import argparse
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

import megabatch

from ..distributed.world import World
from ..train.config import Model, Optimization
from ..train.optimization import make_optimizer
from ..train.towers import Towers, make_towers
from . import flags, measure
from .cases import Case, InChunks, Results, Step, Work, average, on_ranks, results
from .contenders import CONTENDERS as LOSS_CONTENDERS
from .contenders import Contender
from .loss import hold
from .processes import runner
from .results import Row, Table, over, row_of, table

DESCRIPTION = """\
A whole training step (encoders, CLIP's loss, AdamW) of towers that `megabatch train` builds, at growing batch, with
megabatch's loss, the dense one by hand, torch.compile of it and open_clip's formula; the batch encoded in one piece and
in chunks (megabatch.chunked). Data are random and in memory, the learning rate is 0. Verified and timed as in
`bench loss`; one run under torch.profiler measures the share of the loss. Verdict: megabatch matters where the best
dense step takes 1.1 times the time or the memory of megabatch's, or runs out of memory.
"""
SEED, CAPTION_BYTES = 0, 20
PARTS = ("encoders", "loss", "optimizer")
LOSSES = ("megabatch", "by_hand", "compiled", "formula")
WORTH = 1.1  # so much more time or memory of a step is worth a change


def towers_of(model: str) -> Towers:
    """As `megabatch train` makes them, with the same random weights every time. ValueError or ImportError where there
    are none by this name."""
    logging.disable(logging.WARNING)  # that weights are random, which every process would say again
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return make_towers(Model(model=model), loss="clip").eval()  # without dropout: results are compared
    finally:
        logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class Setting(InChunks):
    """What is measured: towers by name, the rows of a batch, and how many of them a chunk has."""

    model: str
    rows: int
    chunk: int
    device: str = "cpu"
    ranks: int = 1
    scale = 1 / 0.07

    def work(self, world: World, dtype: torch.dtype = torch.float32) -> "Training":
        """The same every time, in every process. A learning rate of 0 keeps it the same from step to step."""
        towers = towers_of(self.model).to(world.device, dtype)
        chance, letters = torch.Generator().manual_seed(SEED), random.Random(SEED)
        pixels = towers.preprocessing
        shape = (self.rows, pixels.channels, pixels.size, pixels.size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=chance)
        tokens = towers.tokenizer([letters.randbytes(CAPTION_BYTES).hex() for _ in range(self.rows)])
        placed = [x[self.share(world)].to(world.device) for x in (images, tokens)]
        optimizer = make_optimizer(towers.named_parameters(), Optimization(lr=0.0))
        return Training(self, world, towers, optimizer, *placed)

    def expected(self, normalizes: bool = False, exact: bool = True) -> Results:
        """Of a step in one piece through the dense loss."""
        work = self.work(World(torch.device(self.device)), torch.float64 if exact else torch.float32)
        return results(step(work, "by_hand", chunked=False), work)

    def __str__(self) -> str:
        return f"{self.model}, N={self.rows}, chunks of {self.chunk}{on_ranks(self.ranks)}"


@dataclass
class Training(Work):
    """Towers in training, their optimizer, and a batch: images of bytes, and tokens."""

    setting: Setting
    world: World
    towers: Towers
    optimizer: torch.optim.Optimizer
    images: Tensor
    tokens: Tensor

    def leaves(self) -> dict[str, Tensor]:
        return dict(self.towers.named_parameters())

    def encode(self, chunk: int | None) -> list[Tensor]:
        """Features of images and of texts, in chunks of `chunk` rows, or at once."""
        dtype = self.towers.logit_scale.dtype

        def pixels(images: Tensor) -> Tensor:
            return self.towers.pixels(images).to(dtype)

        if chunk is None:
            return [self.towers.encode_image(pixels(self.images)), self.towers.encode_text(self.tokens)]
        options: dict[str, Any] = {"chunk_size": chunk, "module": self.towers}
        image = megabatch.chunked(self.towers.encode_image, self.images, transform=pixels, **options)
        return [image, megabatch.chunked(self.towers.encode_text, self.tokens, **options)]


def step(training: Training, loss: str, chunked: bool) -> Step:
    setting, world = training.setting, training.world
    case = Case("clip", setting.rows, 1, device=setting.device, ranks=setting.ranks)
    # A contender of `bench loss` makes a step of its function; here it gives the function itself.
    bare_work = SimpleNamespace(case=case, world=world, step=lambda function: function)
    function: Callable[..., Tensor] = LOSS_CONTENDERS[loss].make(bare_work)  # type: ignore[assignment]

    def take() -> Tensor:
        with record_function("encoders"):
            features = training.encode(setting.chunk if chunked else None)
            scale = training.towers.logit_scale.exp()
        # Cut where the encoders end, so that the backward of the loss is over before theirs begins.
        leaves = [x.detach().requires_grad_() for x in (*features, scale)]
        with record_function("loss"):
            value = function(F.normalize(leaves[0], dim=1), F.normalize(leaves[1], dim=1), leaves[2])
            torch.autograd.backward(value)
        with record_function("encoders"):
            torch.autograd.backward([*features, scale], [x.grad for x in leaves])
        with record_function("optimizer"):
            average(training.towers.parameters(), world)
            training.optimizer.step()
        return value.detach()

    return take


CONTENDERS = {
    one.name: one
    for one in (
        Contender(
            f"{loss}_{'chunked' if chunked else 'whole'}",
            f"{LOSS_CONTENDERS[loss].title}, {'in chunks' if chunked else 'in one piece'}",
            partial(step, loss=loss, chunked=chunked),
            on="both",
            ours=loss == "megabatch",
            compiles=loss == "compiled",
        )
        for chunked, loss in product((False, True), LOSSES)
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", help="towers: tiny, small, or a model of open_clip by name")
    flags.add_rows(parser, [256, 1024, 4096, 16384], chunk=256)
    flags.add_contest(parser, CONTENDERS)
    flags.add_files(parser)


def main(options: argparse.Namespace) -> int:
    flags.shrink(options, model="tiny", rows=[32, 96], chunk=32)
    try:
        count = sum(parameter.numel() for parameter in towers_of(options.model).parameters())
    except (ValueError, ImportError, RuntimeError) as refusal:
        print(f"step: {refusal}", file=sys.stderr)
        return 2
    measured: dict[int, list[Row]] = {}
    with runner(options.device) as where:
        settings = [
            Setting(options.model, rows, options.chunk, where.device, where.world.size) for rows in sorted(options.rows)
        ]

        def shown(setting: Setting, rows: list[Row]) -> Table:
            measured[setting.rows] = rows
            shares = {f"{part}, %": partial(share_of, part) for part in PARTS}
            return table(rows, {"/ in one piece": "megabatch_whole", "/ in chunks": "megabatch_chunked"}, shares)

        if where.speaks:
            print(f"{options.model}: {count / 1e6:.1f} million parameters")
        parts = partial(measure.ranges, names=PARTS)
        code = hold("step", options, where, settings, shown, entrants, parts, base="megabatch_whole")
        if where.speaks:
            print(*(f"\n{words}" for chunked in (False, True) if (words := verdict(measured, chunked))), sep="")
    return code


def entrants(setting: Setting, names: Sequence[str]) -> list[Contender]:
    """A batch of one chunk is not encoded in chunks."""
    return [CONTENDERS[name] for name in names if setting.rows > setting.chunk or name.endswith("whole")]


def share_of(part: str, row: Row) -> str:
    whole = sum(row.parts.values())
    return f"{100 * row.parts[part] / whole:.0f}" if whole else "-"


# ---- the verdict


def verdict(measured: Mapping[int, Sequence[Row]], chunked: bool) -> str:
    """From what was measured and nothing else; "" where nothing was."""
    suffix = "chunked" if chunked else "whole"
    lines, smallest, largest = [], None, 0
    for size, rows in sorted(measured.items()):
        ours = row_of(rows, f"megabatch_{suffix}")
        if ours is None or not ours.seconds:
            continue
        dense = [row for row in rows if row.name.endswith(suffix) and row is not ours]
        time, memory = best_time(dense, ours), best_memory(dense, ours)
        words = "-" if time is None else f"{time:.2f} times the time"
        words += f", {'n/a' if memory is None else f'{memory:.2f}'} times the memory"
        lines.append(f"  N={size}: {words if time or memory else 'no dense step ran'}")
        matters = all(row.status != "ok" for row in dense) or max(time or 0, memory or 0) >= WORTH
        smallest, largest = (smallest or size) if matters else None, size
    if not lines:
        return ""
    heading = f"{'In chunks' if chunked else 'In one piece'}, the best dense step over megabatch's:"
    where = f"From N={smallest} on megabatch matters." if smallest else f"Up to N={largest} a dense loss will do."
    return "\n".join([heading, *lines, where])


def best_time(dense: Sequence[Row], ours: Row) -> float | None:
    return min((ratio.median for row in dense if (ratio := over(row, ours))), default=None)


def best_memory(dense: Sequence[Row], ours: Row) -> float | None:
    peaks = [row.peak_bytes for row in dense if row.peak_bytes is not None]
    return min(peaks) / ours.peak_bytes if peaks and ours.peak_bytes else None
