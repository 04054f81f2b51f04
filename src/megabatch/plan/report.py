"""What is printed of predictions: an answer, then a table; and the same as JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from .formulas import OURS, Run
from .hardware import GIB
from .prediction import Prediction, with_largest_chunk

UNITS = {"M": 1024**2, "k": 1024, "K": 1024}
HEAD = ["PREDICTED", "fits", "loss GiB", "peak GiB", "mostly", "largest", "limited by", "products"]
HEAD += ["wire GiB", "loss s", "step s", "bound by"]


def report(run: Run, predictions: Sequence[Prediction]) -> str:
    """Everything for the terminal; what fits comes first."""
    ranked = sorted(predictions, key=lambda one: not one.fits)
    chunk = "in one piece" if run.in_one_piece else f"chunks of {run.chunk}"
    frozen = f", {run.frozen} tower frozen" if run.frozen != "none" else ""
    title = (
        f"PREDICTED, not measured: {run.model.name} ({run.model.parameters / 1e6:.1f}M parameters, features of width "
        f"{run.model.embed_dim})\nbatch {run.batch:,} on {run.gpus} x {run.gpu.name}, {chunk}, {run.precision}, "
        f"{run.optimizer}, data {run.data}{frozen}"
    )
    parts = {name: size for name, size in ranked[0].memory.items() if name not in ("features", "loss")}
    shared = f"every method, GiB of {gib(run.usable)} per GPU: {_listed(parts)}"
    own = [f"{one.method}'s loss beyond the features, GiB: {_listed(one.our_loss)}" for one in ranked if one.our_loss]
    answer = textwrap.fill(_answer(run, leading(ranked)) + _need(ranked), 120)
    return "\n".join([title, "", answer, "", *_table([HEAD, *map(_row, ranked)]), "", shared, *own])


def leading(predictions: Sequence[Prediction]) -> Prediction:
    """The first of ours, if there is one."""
    return next((one for one in predictions if one.method in OURS), predictions[0])


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)


def _row(one: Prediction) -> list[str]:
    return [
        *(one.method, "yes" if one.fits else "NO", gib(one.memory["loss"]), gib(one.peak), one.mostly),
        *(count(one.largest) if one.largest else "none", one.limited_by, f"{one.products:.3g}", gib(one.wire)),
        *(f"{one.time['loss']:,.2f}", f"{one.step:,.2f}", one.bound_by),
    ]


def _answer(run: Run, one: Prediction) -> str:
    """Whether it fits, what limits it, and what to do about it."""
    takes = f"{gib(one.peak)} of {gib(run.usable)} GiB, mostly {one.mostly}"
    largest = f"up to {count(one.largest)} would, limited by {one.limited_by}" if one.largest else "no batch would"
    verdict = f"fits in {takes}; {largest}" if one.fits else f"does not fit ({takes}); {largest}"
    bound = f"A step is bound by {one.bound_by}; the loss is {one.time['loss'] / sum(one.time.values()):.1%} of it."
    return f"{one.method}: batch {count(run.batch)} {verdict}.{_advice(run, one)} {bound}"


def _advice(run: Run, one: Prediction) -> str:
    if one.fits:
        return " --data host frees the GPU of images." if one.limited_by == "data" else ""
    for data, flags in ((run.data, ""), ("host", "--data host ")):
        if found := with_largest_chunk(replace(run, data=data), one.method):
            return f" It fits with {flags}--chunk {found.chunk_rows}."
    return " No --chunk makes it fit: use more GPUs."


def _need(predictions: Sequence[Prediction]) -> str:
    """Whether megabatch is needed at all, where open_clip's way is among what was asked for."""
    other = next((one for one in predictions if one.method == "openclip"), None)
    if other is None or not leading(predictions).fits or leading(predictions) is other:
        return ""
    if not other.fits:
        return f" openclip does not fit: it ends at {count(other.largest)}."
    return f" openclip fits as well, up to {count(other.largest)}: megabatch is not needed for its memory."


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, all others to the right."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip()
        for name, *cells in rows
    ]


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def count(rows: int) -> str:
    """Rows as people write batches; above 16k rounded down to thousands."""
    units = (f"{rows // size:,}{unit}" for unit, size in UNITS.items() if rows % size == 0 or rows >= 16 * size)
    return next(units, str(rows))


def document(run: Run, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """All of it, in bytes and seconds."""
    about = {"kind": "PREDICTED, not measured", "run": asdict(run), "parameters": run.model.parameters}
    return {**about, "methods": [asdict(one) for one in predictions]}
