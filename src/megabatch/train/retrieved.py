"""Examples of what a run has learned: held-out texts, and the images that its towers find for them."""

import base64
import io
from pathlib import Path

import torch

import megabatch as mb

from ..report.page import NoExamples, Picture, Retrieved
from .data import open_held_out
from .data.images import decode
from .data.source import Sample
from .encoding import make_prepare
from .loading import config_of, load_checkpoint, restored_towers

AMONG = 200  # held-out images, the first, are searched: they are encoded on the CPU
AT_A_TIME = 64
SIDE = 64  # pixels of an example


@torch.no_grad()
def retrieved(run: Path, texts: int, matches: int = 5, among: int = AMONG) -> tuple[str, list[Retrieved]]:
    """The name of the checkpoint, and the first held-out texts, each with the images nearest to it, the best first.

    NoExamples where nothing is held out, or no images; ValueError where there is no checkpoint, or none can be read.
    """
    path, state = load_checkpoint(run)
    config = config_of(path, state)
    source = open_held_out(config)
    if source is None or source.texts_only:
        raise NoExamples("the held-out data has no images." if source else "the run has no held-out data.")
    towers = restored_towers(config, path, state).eval()
    prepare = make_prepare(towers, config, train=False)
    pieces = {index: prepare(source, [0], [index]) for index in range(min(len(source), among))}
    kept = [index for index, piece in pieces.items() if len(piece.ids)]
    if not kept:
        raise ValueError(f"--val-data must have samples that can be read, got none in {config.evaluation.val_data}.")
    pixels = torch.cat([pieces[index].first for index in kept])
    images = torch.cat([towers.encode_image(towers.pixels(some)) for some in torch.split(pixels, AT_A_TIME)])
    queries = towers.encode_text(torch.cat([pieces[index].second[:1] for index in kept[:texts]]))
    _, nearest = mb.similarity_topk(queries, images, min(matches, len(kept)), normalize=True, group=None)
    found = [[kept[row] for row in rows] for rows in nearest.tolist()]
    ids = {index: pieces[index].ids[0] for index in kept}
    return path.name, [
        Retrieved(source[index].text, [_picture(source[each], bool(ids[each] == ids[index])) for each in best])
        for index, best in zip(kept, found, strict=False)
    ]


def _picture(sample: Sample, right: bool) -> Picture:
    assert sample.image is not None
    image = decode(sample.image) if isinstance(sample.image, bytes) else sample.image
    image = image.convert("RGBA")
    image.thumbnail((SIDE, SIDE))
    image.save(file := io.BytesIO(), "PNG")
    address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(address, sample.text, right)
