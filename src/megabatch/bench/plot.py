"""The plot of the demo: time and memory against the number of rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """One contender at one size. `killed`: why there is no time and no memory to tell."""

    rows: int
    seconds: float = 0.0
    peak_bytes: int = 0
    killed: str = ""


Curves = dict[str, list[Point]]

# Colours that differ in brightness too, so that they do on paper.
STYLE: dict[str, dict[str, Any]] = {
    "dense": {"label": "dense loss", "color": "#d55e00", "marker": "s", "linestyle": "--"},
    "megabatch": {"label": "megabatch", "color": "#004b7c", "marker": "o", "linestyle": "-"},
}


def draw(curves: Curves, limit_bytes: int, title: str, path: Path) -> None:
    """Both axes logarithmic; a cross where a contender was killed, on its line drawn on. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    for name, points in curves.items():
        _curve(time, points, STYLE[name], {p.rows: p.seconds for p in points if not p.killed})
        _curve(memory, points, STYLE[name], {p.rows: p.peak_bytes / 2**20 for p in points if not p.killed})
    memory.axhline(limit_bytes / 2**20, color="0.4", linestyle=":", label="limit of the process")
    rows = sorted({point.rows for points in curves.values() for point in points})
    for axes, label in (
        (time, "seconds per step, forward and backward"),
        (memory, "peak memory beyond inputs and gradients, MiB"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="rows of the batch", ylabel=label)
        axes.set_xticks(rows, [f"{n:,}" for n in rows], rotation=30)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(True, color="0.9")
        axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _curve(axes: Any, points: list[Point], style: dict[str, Any], values: dict[int, float]) -> None:
    axes.plot(values.keys(), values.values(), **style)
    end = points[-1]
    if end.killed and values:
        last_rows, last_value = list(values.items())[-1]
        # There is nothing measured here. Both grow with the square of the rows.
        value = last_value * (end.rows / last_rows) ** 2
        axes.plot([last_rows, end.rows], [last_value, value], color=style["color"], linestyle=":")
        axes.plot([end.rows], [value], color=style["color"], marker="x", markersize=10, markeredgewidth=2)
        axes.annotate(
            "killed\n(extrapolated)",
            (end.rows, value),
            (8, 0),
            textcoords="offset points",
            color=style["color"],
            va="center",
        )
