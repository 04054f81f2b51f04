"""What is printed of predictions: a table, a few sentences under it, and the same as JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .formulas import OURS
from .hardware import GIB
from .prediction import NOTHING_FITS, Prediction, Run, largest_chunk

UNITS = {"M": 1024**2, "k": 1024, "K": 1024}
# Of the table, with their units.
HEAD = ["PREDICTED", "loss", "peak", "mostly", "fits", "largest batch", "limited by", "products", "wire", "loss"]
HEAD += ["step", "overlap", "bound by"]
HEAD_UNITS = ["", "GiB", "GiB", "", "", "", "", "per GPU", "GiB", "s", "s", "s", ""]


def report(run: Run, predictions: Sequence[Prediction]) -> str:
    """Everything for the terminal."""
    table = _table([HEAD, HEAD_UNITS, *map(_row, predictions)])
    own = [
        f"{one.method}'s loss beyond the features, GiB: {_listed(one.our_loss)}" for one in predictions if one.our_loss
    ]
    first = [*(one for one in predictions if one.method in OURS), *predictions][0]
    words = textwrap.fill(_sentence(run, first) + _need(predictions), 120)
    chunk = f"chunks of {run.chunk}" if run.chunk else "in one piece"
    frozen = f", {run.frozen} tower frozen" if run.frozen != "none" else ""
    title = (
        f"PREDICTED, not measured: {run.model.name} ({run.model.parameters / 1e6:.1f}M parameters, features of width "
        f"{run.model.embed_dim})\nbatch {exact(run.batch)} on {run.gpus} x {run.gpu.name}, {chunk}, {run.precision}, "
        f"{run.optimizer}, data {run.data}{frozen}"
    )
    memory = predictions[0].memory
    parts = {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "data", "activations")}
    shared = f"every method, GiB of {gib(predictions[0].usable)} per GPU: {_listed(parts)}"
    return "\n".join([title, shared, "", *table, "", *own, words])


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {gib(bytes_)}" for name, bytes_ in parts.items() if bytes_)


def _row(one: Prediction) -> list[str]:
    memory, time = one.memory, one.time
    return [
        *(one.method, gib(memory.loss), gib(memory.peak), memory.limit, "yes" if one.fits else "NO"),
        *(count(one.largest) if one.largest else "none", one.growth, f"{one.products:.3g}", gib(one.wire)),
        *map(seconds, (time.loss, time.without_overlap, time.with_overlap)),
        time.limit,
    ]


def _sentence(run: Run, one: Prediction) -> str:
    """What binds, and what to do about it."""
    takes = f"{gib(one.memory.peak)} of {gib(one.usable)} GiB, mostly {one.memory.limit}"
    largest = f"up to {count(one.largest)} would, limited by {one.growth}" if one.largest else "no batch would"
    fits = f"fits in {takes}; {largest}" if one.fits else f"does not fit ({takes}); {largest}"
    share = one.time.loss / one.time.without_overlap
    bound = f"A step is bound by {one.time.limit}; the loss is {share:.1%} of it."
    return f"{one.method}: batch {count(run.batch)} {fits}. {bound}{_advice(run, one)}"


def _need(predictions: Sequence[Prediction]) -> str:
    """Whether megabatch is needed at all, where open_clip's way is among what was asked for."""
    ours = next((one for one in predictions if one.method in OURS), None)
    other = next((one for one in predictions if one.method == "openclip"), None)
    if ours is None or other is None or not ours.fits:
        return ""
    if not other.fits:
        return f" openclip does not fit: it ends at {count(other.largest)}."
    return f" openclip fits as well, up to {count(other.largest)}: megabatch is not needed for its memory."


def _advice(run: Run, one: Prediction) -> str:
    if one.growth == "data" and run.data != "host":
        return " --data host frees the GPU of images."
    if one.growth in ("activations", NOTHING_FITS) and run.chunk_rows > 1:
        chunk = largest_chunk(run, one.method)
        return f" --chunk {chunk} fits." if chunk else " No --chunk makes it fit."
    return " --method ring has no matrix of logits." if one.growth == "loss" and one.method not in OURS else ""


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, all others to the right."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip()
        for name, *cells in rows
    ]


def gib(bytes_: float) -> str:
    value = bytes_ / GIB
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value >= 0.005 or not value else "<0.01"


def seconds(value: float) -> str:
    if value >= 10:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
    return f"{value:.2g}" if value >= 0.001 else "<0.001"


def exact(rows: int) -> str:
    """The same as `count`, but never rounded."""
    return count(rows) if any(rows % size == 0 for size in UNITS.values()) else f"{rows:,}"


def count(rows: int) -> str:
    """Rows as people write batches; above 16k rounded down to thousands."""
    units = (f"{rows // size:,}{unit}" for unit, size in UNITS.items() if rows % size == 0 or rows >= 16 * size)
    return next(units, str(rows))


def document(run: Run, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """All of it, in bytes and seconds."""
    methods = [{**asdict(one), "fits": one.fits} for one in predictions]
    for record, one in zip(methods, predictions, strict=True):
        record["memory"] |= {"peak": one.memory.peak, "limit": one.memory.limit}
        parts = ("without_overlap", "with_overlap", "limit")
        record["time"] |= {name: getattr(one.time, name) for name in parts}
    about = {"kind": "PREDICTED, not measured", "run": asdict(run), "parameters": run.model.parameters}
    return {**about, "methods": methods}
