"""Small runs of the trainer for the tests: drawn shapes with captions, and what a run has recorded."""

import json
from itertools import product
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from megabatch import cli
from megabatch.train.report import read_metrics

SHAPES = ("circle", "square", "triangle", "cross")
SHADES = {"black": 0, "dark": 60, "grey": 120, "bright": 190}
PLACES = {"left": (2, 9), "right": (16, 9), "top": (9, 2), "bottom": (9, 16), "middle": (9, 9), "corner": (2, 2)}


def draw_shape(shape: str, shade: str, place: str) -> Image.Image:
    image = Image.new("L", (32, 32), 255)
    draw, (x, y), fill = ImageDraw.Draw(image), PLACES[place], SHADES[shade]
    match shape:
        case "circle":
            draw.ellipse((x, y, x + 13, y + 13), fill=fill)
        case "square":
            draw.rectangle((x, y, x + 13, y + 13), fill=fill)
        case "triangle":
            draw.polygon([(x, y + 13), (x + 13, y + 13), (x + 6, y)], fill=fill)
        case "cross":
            draw.line((x, y, x + 13, y + 13), fill=fill, width=4)
            draw.line((x + 13, y, x, y + 13), fill=fill, width=4)
    return image


def write_shapes(folder: Path) -> Path:
    """96 images and shapes.csv, as OpenCLIP has it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["filepath\ttitle"]
    for shape, shade, place in product(SHAPES, SHADES, PLACES):
        name = f"{shade}-{shape}-{place}.png"
        draw_shape(shape, shade, place).save(folder / name)
        rows.append(f"{name}\t{shade} {shape} at the {place}")
    path = folder / "shapes.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def write_pairs(path: Path, count: int = 64, negatives: int = 0) -> Path:
    """Text pairs as JSONL: a sum and its words."""
    lines = []
    for number in range(count):
        pair: dict[str, Any] = {"query": f"{number} and one", "positive": f"the number {number + 1}"}
        if negatives:
            pair["negatives"] = [f"the number {number + 10 + each}" for each in range(negatives)]
        lines.append(json.dumps(pair))
    path.write_text("\n".join(lines) + "\n")
    return path


def train(folder: Path, *flags: str, name: str = "run", code: int = 0) -> Path:
    """`megabatch train` in this process. The run's folder."""
    words = ["train", "--logs", str(folder), "--name", name, *flags]
    assert cli.main(words) == code
    return folder / name


def losses(run: Path) -> list[float]:
    """Of every step, exact."""
    return [line["train/loss"] for line in steps(run)]


def steps(run: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]


def evaluations(run: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if "train/loss" not in line]
