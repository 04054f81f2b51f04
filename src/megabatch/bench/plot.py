"""Plots: time and memory against the number of rows, on logarithmic axes, with the exponents that fit the points."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """One contender at one size. `killed`: why there is no time and no memory to tell."""

    rows: int
    seconds: float | None = None
    peak_bytes: int | None = None
    killed: str = ""


# By the name that the legend shows.
Curves = dict[str, list[Point]]

BEYOND_INPUTS = "peak memory beyond inputs and gradients"
OURS = {"color": "#004b7c", "marker": "o", "linestyle": "-"}
# Okabe and Ito's colours, which the colour-blind tell apart; markers and dashes also tell them apart in print.
OTHERS: tuple[dict[str, Any], ...] = (
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "D", "linestyle": (0, (5, 1))},
    {"color": "#e69f00", "marker": "v", "linestyle": (0, (3, 1, 1, 1))},
    {"color": "#56b4e9", "marker": "P", "linestyle": (0, (1, 1))},
    {"color": "#5c5c5c", "marker": "X", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#000000", "marker": "*", "linestyle": (0, (2, 2))},
)


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """k of the y = a·xᵏ that is nearest to the points, by least squares of the logarithms; None where x is all one."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return slope


def curves_of(cases: Iterable[Mapping[str, Any]]) -> dict[str, Curves]:
    """The measured points of a session, by what its cases differ in beside the rows. No curve has one point alone."""
    cases = [case for case in cases if isinstance(case.get("rows"), int)]
    found: dict[str, Curves] = {}
    for case in cases:
        curves = found.setdefault(_kind(case, cases), {})
        for row in case["contenders"]:
            if row.get("best") is not None or row.get("peak_bytes") is not None:
                curves.setdefault(row["title"], []).append(Point(case["rows"], row.get("best"), row.get("peak_bytes")))
    drawn = {
        kind: {title: points for title, points in curves.items() if len({point.rows for point in points}) > 1}
        for kind, curves in found.items()
    }
    return {kind: curves for kind, curves in drawn.items() if curves}


def _kind(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> str:
    """What tells this case from others, its rows apart."""
    fields = [name for name, value in case.items() if isinstance(value, (str, int, float)) and name != "rows"]
    differing = [name for name in fields if len({str(other.get(name)) for other in cases}) > 1]
    return ", ".join(f"{name} {case[name]}" for name in differing)


def draw(
    panels: Mapping[str, Curves],
    title: str,
    path: Path,
    limit_bytes: int | None = None,
    memory_is: str = BEYOND_INPUTS,
) -> None:
    """A line of two plots for each of the panels: time, and memory. Needs matplotlib.

    Where a contender was killed there is a cross, on its line drawn on; `limit_bytes` is what it was allowed, and
    `memory_is` says what is counted.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(panels), 2, figsize=(12, 4.8 * len(panels)), layout="constrained", squeeze=False)
    figure.suptitle(title)
    for (name, curves), (time, memory) in zip(panels.items(), axes, strict=True):
        styles = _styles(curves)
        for label, points in curves.items():
            _curve(time, label, points, styles[label], {p.rows: p.seconds for p in points if not p.killed})
            _curve(
                memory, label, points, styles[label], {p.rows: _mebibytes(p.peak_bytes) for p in points if not p.killed}
            )
        if limit_bytes is not None:
            memory.axhline(limit_bytes / 2**20, color="0.4", linestyle=":", label="limit of the process")
        rows = sorted({point.rows for points in curves.values() for point in points})
        _finish(time, rows, "seconds per step, forward and backward", name)
        _finish(memory, rows, f"{memory_is}, MiB", name)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _mebibytes(value: int | None) -> float | None:
    return None if value is None else value / 2**20


def _styles(curves: Curves) -> dict[str, dict[str, Any]]:
    """megabatch, the first of its kind, has a colour of its own; the others take turns."""
    ours = next((label for label in curves if label.startswith("megabatch")), None)
    others = [label for label in curves if label != ours]
    styles = {label: _look(index) for index, label in enumerate(others)}
    return styles | ({} if ours is None else {ours: OURS})


def _look(index: int) -> dict[str, Any]:
    """One of OTHERS; each time they are used up, with another filling of the marker and another thickness of line."""
    turn, place = divmod(index, len(OTHERS))
    fillings: tuple[dict[str, Any], ...] = ({}, {"markerfacecolor": "white", "linewidth": 0.8}, {"fillstyle": "left"})
    return OTHERS[place] | fillings[turn % len(fillings)]


def _finish(axes: Any, rows: list[int], label: str, name: str) -> None:
    from matplotlib.ticker import NullLocator

    axes.set(xscale="log", yscale="log", xlabel="rows of the batch, N", ylabel=label, title=name)
    axes.set_xticks(rows, [f"{n:,}" for n in rows], rotation=30)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, color="0.9")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _curve(
    axes: Any, label: str, points: list[Point], style: dict[str, Any], values: Mapping[int, float | None]
) -> None:
    known = {rows: value for rows, value in values.items() if value is not None and value > 0}
    if not known:
        return
    grows = exponent(list(known.items()))
    named = label if grows is None else f"{label}: N^{grows:.2f}"
    axes.plot(known.keys(), known.values(), label=named, **style)
    end = points[-1]
    if end.killed:
        last_rows, last_value = list(known.items())[-1]
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
