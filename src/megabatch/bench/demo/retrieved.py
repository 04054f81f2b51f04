"""The picture of the demo: names that the towers have never seen, and the icons they find for each."""

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import normalize

import megabatch as mb

from ...train import checkpoint
from ...train.checkpoint import Checkpoints
from ...train.config import Config, from_mapping
from ...train.data.icons import Icons
from ...train.datasets import open_held_out
from ...train.encoding import Encoder, make_prepare
from ...train.towers import Towers, make_towers

NAMES, FOUND = 12, 5
SIDE, CELL, TEXT_WIDTH, MARGIN, HEAD = 56, 76, 290, 16, 62
INK, FAINT, FRAME = (20, 20, 20), (110, 110, 110), (0, 75, 160)  # a blue that everybody tells from black and grey


def draw_retrieved(run: Path, path: Path) -> None:
    """The first dozen of the held-out names, which are in random order, with what the run's last towers find."""
    towers, config = _load(run)
    images, texts = _features(towers, config)
    _, nearest = mb.similarity_topk(texts[:NAMES], images, FOUND)
    places = mb.retrieval_ranks(texts, images)[:NAMES] + 1
    _draw(nearest.tolist(), places.tolist(), len(images)).save(path)


def _load(run: Path) -> tuple[Towers, Config]:
    latest = Checkpoints(run / "checkpoints", keep=0).latest()
    if latest is None:
        raise ValueError(f"draw_retrieved: {run} must have a checkpoint, got none.")
    state = checkpoint.load(latest)
    config = from_mapping(state["megabatch"]["config"])
    towers = make_towers(config.model, loss=config.loss.loss, init_logit_scale=None)
    towers.model.load_state_dict(state["state_dict"])
    return towers.eval(), config


@torch.no_grad()
def _features(towers: Towers, config: Config) -> tuple[Tensor, Tensor]:
    """Of held-out images and of their names, of unit length."""
    source = open_held_out(config)
    if source is None:
        raise ValueError("draw_retrieved: the run must have had --val-data, got none.")
    everything = range(len(source))
    batch = make_prepare(towers, config, train=False)(source, [0] * len(source), everything)
    encoder = Encoder(towers, config.optimization.chunk_size, texts_only=False)
    return normalize(encoder.images(batch.first), dim=1), normalize(encoder.texts(batch.second), dim=1)


def _draw(nearest: list[list[int]], places: list[int], among: int) -> Image.Image:
    icons = Icons(held_out=True)
    right = MARGIN + TEXT_WIDTH + FOUND * CELL  # where the column of right answers begins
    canvas = Image.new("RGB", (right + 150, HEAD + len(nearest) * CELL + MARGIN), "white")
    pen, large, small = ImageDraw.Draw(canvas), ImageFont.load_default(18), ImageFont.load_default(14)
    title = f"the first {FOUND} of {among:,} icons, none of them seen before"
    pen.text((MARGIN, 20), "held-out name", FAINT, small)
    pen.text((MARGIN + TEXT_WIDTH, 20), title, FAINT, small)
    pen.text((right + 20, 20), "right one, and place", FAINT, small)
    for row, (found, place) in enumerate(zip(nearest, places, strict=True)):
        top = HEAD + row * CELL
        pen.text((MARGIN, top + CELL // 2), _short(icons[row].text, large), INK, large, anchor="lm")
        for column, index in enumerate(found):
            left = MARGIN + TEXT_WIDTH + column * CELL
            _paste(canvas, icons, index, left, top)
            if index == row:
                pen.rectangle((left + 2, top + 2, left + CELL - 3, top + CELL - 3), outline=FRAME, width=4)
        _paste(canvas, icons, row, right + 20, top)
        pen.text(
            (right + 20 + CELL, top + CELL // 2), f"{place:,}.", FRAME if row in found else FAINT, small, anchor="lm"
        )
    return canvas


def _paste(canvas: Image.Image, icons: Icons, index: int, left: int, top: int) -> None:
    inset = (CELL - SIDE) // 2
    canvas.paste(icons.picture(index, SIDE), (left + inset, top + inset))


def _short(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """As much of it as there is room for."""
    shown = text
    while font.getlength(shown) > TEXT_WIDTH - MARGIN:
        shown = shown.rstrip("…")[:-1].rstrip() + "…"
    return shown
