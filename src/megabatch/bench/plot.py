"""Plots: time and memory against the number of rows, on logarithmic axes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# (rows, seconds, peak bytes) of a contender, by the title that the legend shows.
Curves = dict[str, list[tuple[int, float | None, int | None]]]

OURS = {"color": "#004b7c", "marker": "o", "linewidth": 2.5}
# Of the others: a palette of matplotlib's that colour-blind readers can distinguish; markers and dashes help in print.
PALETTE, MARKERS, DASHES = "tableau-colorblind10", "s^DvPX*", ("--", "-.", ":")


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


def draw(panels: Mapping[str, Curves], title: str, path: Path) -> None:
    """A line of two plots for each of the panels: time, and memory. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(len(panels), 2, figsize=(12, 4.8 * len(panels)), layout="constrained", squeeze=False)
    figure.suptitle(title)
    labels = ("seconds per step, median", "peak beyond inputs and gradients, MiB")
    for (name, curves), plots in zip(panels.items(), axes, strict=True):
        looks = styles(list(curves))
        ticks = sorted({rows for points in curves.values() for rows, _, _ in points})
        for which, (plot, label) in enumerate(zip(plots, labels, strict=True)):
            for curve, points in curves.items():
                known = [(rows, value / (1, 2**20)[which]) for rows, *values in points if (value := values[which])]
                if known:
                    plot.plot(*zip(*known, strict=True), label=curve, **looks[curve])
            plot.set(xscale="log", yscale="log", xlabel="rows of the batch, N", ylabel=label, title=name)
            plot.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
            plot.xaxis.set_minor_locator(NullLocator())
            plot.grid(True, color="0.9")
            if plot.get_legend_handles_labels()[0]:
                plot.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """megabatch, the first of its kind, has a look of its own."""
    from matplotlib import style

    colours = style.library[PALETTE]["axes.prop_cycle"].by_key()["color"]
    ours = next((label for label in labels if label.startswith("megabatch")), None)
    looks = {
        label: {"color": colours[i % len(colours)], "marker": MARKERS[i % len(MARKERS)], "linestyle": DASHES[i % 3]}
        for i, label in enumerate(label for label in labels if label != ours)
    }
    return looks | ({} if ours is None else {ours: OURS})
