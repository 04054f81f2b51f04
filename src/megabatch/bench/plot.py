"""Plots: time and memory against the number of rows, on logarithmic axes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# (rows, seconds, peak bytes) of a contender, by the title that the legend shows.
Curves = dict[str, list[tuple[int, float | None, int | None]]]

OURS = {"color": "#004b7c", "marker": "o", "linestyle": "-"}
# Okabe and Ito's colours, which colour-blind readers can distinguish; markers and dashes help in print.
OTHERS: tuple[dict[str, Any], ...] = (
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "D", "linestyle": (0, (5, 1))},
    {"color": "#e69f00", "marker": "v", "linestyle": (0, (3, 1, 1, 1))},
    {"color": "#56b4e9", "marker": "P", "linestyle": (0, (1, 1))},
    {"color": "#5c5c5c", "marker": "X", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#000000", "marker": "*", "linestyle": (0, (2, 2))},
)


def curves_of(cases: Iterable[Mapping[str, Any]]) -> dict[str, Curves]:
    """The measured points, by what the cases differ in beside the rows. No curve has one point alone."""
    cases = [case for case in cases if isinstance(case.get("rows"), int)]
    found: dict[str, Curves] = {}
    for case in cases:
        curves = found.setdefault(_kind(case, cases), {})
        for row in case["contenders"]:
            if row.get("median") is not None or row.get("peak_bytes") is not None:
                point = (case["rows"], row.get("median"), row.get("peak_bytes"))
                curves.setdefault(row["title"], []).append(point)
    drawn = {
        kind: {title: points for title, points in curves.items() if len({rows for rows, _, _ in points}) > 1}
        for kind, curves in found.items()
    }
    return {kind: curves for kind, curves in drawn.items() if curves}


def _kind(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> str:
    """What distinguishes this case from others, without its rows."""
    fields = [name for name, value in case.items() if isinstance(value, (str, int, float)) and name != "rows"]
    differing = [name for name in fields if len({str(other.get(name)) for other in cases}) > 1]
    return ", ".join(f"{name} {case[name]}" for name in differing)


def draw(panels: Mapping[str, Curves], title: str, path: Path, limit_bytes: int | None = None) -> None:
    """A line of two plots for each of the panels: time, and memory. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(len(panels), 2, figsize=(12, 4.8 * len(panels)), layout="constrained", squeeze=False)
    figure.suptitle(title)
    for (name, curves), (time, memory) in zip(panels.items(), axes, strict=True):
        looks = styles(list(curves))
        for label, points in curves.items():
            for plot, values in (
                (time, [(rows, seconds) for rows, seconds, _ in points]),
                (memory, [(rows, None if peak is None else peak / 2**20) for rows, _, peak in points]),
            ):
                known = [(rows, value) for rows, value in values if value]
                if known:
                    plot.plot(*zip(*known, strict=True), label=label, **looks[label])
        if limit_bytes is not None:
            memory.axhline(limit_bytes / 2**20, color="0.4", linestyle=":", label="limit of the process")
        ticks = sorted({rows for points in curves.values() for rows, _, _ in points})
        for plot, label in ((time, "seconds per step, median"), (memory, "peak beyond inputs and gradients, MiB")):
            plot.set(xscale="log", yscale="log", xlabel="rows of the batch, N", ylabel=label, title=name)
            plot.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
            plot.xaxis.set_minor_locator(NullLocator())
            plot.grid(True, color="0.9")
            if plot.get_legend_handles_labels()[0]:
                plot.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """megabatch, the first of its kind, has a colour of its own; the others take turns, and once they are used up have
    another filling of the marker."""
    ours = next((label for label in labels if label.startswith("megabatch")), None)
    others = [label for label in labels if label != ours]
    fillings: tuple[dict[str, Any], ...] = ({}, {"markerfacecolor": "white", "linewidth": 0.8}, {"fillstyle": "left"})
    looks = {
        label: OTHERS[place % len(OTHERS)] | fillings[place // len(OTHERS) % len(fillings)]
        for place, label in enumerate(others)
    }
    return looks | ({} if ours is None else {ours: OURS})
