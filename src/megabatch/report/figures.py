"""Figures as plotly draws them: data and layout, as plain values. Colours of text and lines are the page's (page.js).

A curve of many steps is thinned: of every stretch its first, last, lowest and highest value stay, and one that is not
finite, so that no spike and no gap is lost.
"""

import base64
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .runs import AXES, Column, Numbers, Run, finite, median

POINTS = 60_000  # on a page, at most; but every curve has some
STRETCHES = (10, 500)  # of a curve: at least, at most
MOST_OTHERS = 40  # metrics that are not known here
# Okabe and Ito's colours, which colour-blind readers can distinguish, as far as they can be seen on light and dark.
COLOURS = ("#2583c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fc1", "#7f8489")
DASHES = ("solid", "dash", "dot", "dashdot")
PARTS = {"data": "waiting for data", "towers": "towers", "loss": "loss", "communication": "waiting for other ranks"}
REST = "rest"
NOT_APART = "Parts were not measured in all of these runs; rest has what was not."
OVERLAPS = "Communication that overlaps with towers or loss is no waiting, and in their seconds."
HOVER = "%{y:.5g} at %{x:,.6~g}<br>%{fullData.name}<extra></extra>"
MEAN_HOVER = "%{y:.5g} ± %{customdata:.2g}"
FEW = 50  # points, which are marked
ROOM = 1.9  # ratio of neighbouring ticks on a logarithmic axis, at least
# Settings in which runs of one setting may differ.
OWN = {"seed", "name", "logs", "resume", "allow_changed_data", "save_frequency", "save_steps", "keep", "report"}
OWN |= {"report_to", "wandb_project_name", "log_every_n_steps"}

Trace = dict[str, Any]

SPEED, LEFT_OUT, OTHERS = "Speed and memory", "Skipped samples and non-finite steps", "Other metrics"
# Sections of the page, and the metrics that belong there, with their titles.
METRICS = (
    ("Learning", r"train/loss", "Training loss"),
    ("Learning", r"train/accuracy", "Training accuracy, in the batch"),
    ("Learning", r"val/loss", "Validation loss"),
    ("Learning", r"val/mean_recall", "Mean recall"),
    ("Learning", r"zeroshot/top(\d+)", r"Zero-shot top-\1 accuracy"),
    ("Retrieval", r"val/(\w+)_to_(\w+)_R@(\d+)", r"Recall at \3, \1 to \2"),
    ("Retrieval", r"val/(\w+)_to_(\w+)_median_rank", r"Median rank, \1 to \2"),
    ("Optimization", r"train/lr", "Learning rate"),
    ("Optimization", r"train/grad_norm", "Gradient norm"),
    ("Optimization", r"train/logit_scale", "Logit scale"),
    (SPEED, r"train/samples_per_second", "Samples per second, all ranks"),
    (SPEED, r"train/step_seconds", "Seconds per step"),
    (SPEED, r"train/data_seconds", "Seconds of a step waiting for data"),
    (SPEED, r"train/towers_seconds", "Seconds of a step in the towers"),
    (SPEED, r"train/loss_seconds", "Seconds of a step in the loss"),
    (SPEED, r"train/communication_seconds", "Seconds of a step waiting for other ranks"),
    (SPEED, r"train/tflops_per_second", "TFLOP/s per rank"),
    (SPEED, r"train/mfu", "Model FLOPs utilization"),
    (SPEED, r"train/memory_mib", "Peak memory, MiB"),
    (LEFT_OUT, r"(train|val|zeroshot)/skipped_samples", r"Skipped samples, \1"),
    (LEFT_OUT, r"train/nonfinite_steps", "Non-finite steps"),
    ("", r"train/epoch|train/samples|val/samples|val/captions|zeroshot/samples", ""),  # are not drawn
)


@dataclass(frozen=True)
class Figure:
    """`traces` and `layout` are plotly's. Besides, a trace may have `xs`, its x on each axis that the page can switch
    to; `group`, the number of the legend's entry that hides it; `view`, "mean" or "runs", with which it is shown."""

    title: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Group:
    """Runs of one setting, which differ in their seed. A colour of the page."""

    label: str
    runs: list[Run]
    style: dict[str, Any]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs whose settings are the same but for OWN."""
    found: dict[object, list[Run]] = {}
    for run in runs:
        setting = tuple(sorted((name, value) for name, value in run.settings.items() if name not in OWN))
        found.setdefault(setting or run.name, []).append(run)
    differing = [name for name in differences([group[0] for group in found.values()]) if name not in OWN]
    return [Group(_label(group, differing), group, _style(number)) for number, group in enumerate(found.values())]


def _style(number: int) -> Trace:
    return {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def _label(runs: Sequence[Run], differing: Sequence[str]) -> str:
    if len(runs) == 1:
        return runs[0].name
    setting = ", ".join(f"{name} {runs[0].settings.get(name)}" for name in differing)
    seeds = len({run.settings.get("seed") for run in runs})
    return f"{setting or 'one setting'} ({len(runs)} {'seeds' if seeds == len(runs) else 'runs'})"


def differences(runs: Sequence[Run]) -> list[str]:
    """Settings that are not the same in all of these runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({run.settings.get(name) for run in runs}) > 1]


def time_unit(runs: Iterable[Run]) -> tuple[float, str]:
    """In seconds, for an axis that shows all of these runs."""
    longest = max((run.seconds for run in runs), default=0)
    return (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")


# ---- curves


def curves(groups: Sequence[Group]) -> dict[str, list[Figure]]:
    """A figure for every metric, by section."""
    runs = [run for group in groups for run in group.runs]
    metrics, (unit, _) = metrics_of(runs), time_unit(runs)
    count = sum(metric in run.columns for run in runs for metric in metrics)
    stretches = int(np.clip(POINTS / 4 / max(count, 1), *STRETCHES))
    sections: dict[str, list[Figure]] = {}
    for metric, (section, title) in metrics.items():
        traces = [trace for n, group in enumerate(groups) for trace in _traces(group, n, metric, unit, stretches)]
        values = np.concatenate([run.columns[metric].values for run in runs if metric in run.columns])
        bad = int((~np.isfinite(values)).sum())
        note = f"Not finite, and so a gap: {bad} of {len(values)} values." if bad else ""
        figures = sections.setdefault(section, [])
        if section != LEFT_OUT or values.any():
            layout = {"yaxis": {"rangemode": "tozero"}} if section == LEFT_OUT else {}
            figures.append(Figure(title, traces, layout, note))
    return sections


def metrics_of(runs: Iterable[Run], most_others: int | None = MOST_OTHERS) -> dict[str, tuple[str, str]]:
    """The metrics that are drawn of these runs, each with its section and title, in the order of the page."""
    names = {metric for run in runs for metric in run.columns}
    left = sorted(names, key=lambda name: [part.zfill(9) for part in re.split(r"(\d+)", name)])  # @5 before @10
    found: dict[str, tuple[str, str]] = {}
    for section, pattern, title in METRICS:
        found |= {name: (section, re.sub(pattern, title, name)) for name in left if re.fullmatch(pattern, name)}
    others = [name for name in left if name not in found][:most_others]
    return {name: place for name, place in found.items() if place[0]} | {name: (OTHERS, name) for name in others}


def _traces(group: Group, number: int, metric: str, unit: float, stretches: int) -> Iterator[Trace]:
    runs = [run for run in group.runs if metric in run.columns]
    columns = [Column(each.steps, finite(each.values)) for each in (run.columns[metric] for run in runs)]
    axes = [run.axes(column.steps, unit) for run, column in zip(runs, columns, strict=True)]
    several = len(group.runs) > 1
    for run, column, places in zip(runs, columns, axes, strict=True):
        kept = thinned(column.values, stretches)
        shown = {"name": _name(run.name), "group": number, **({"view": "runs"} if several else {})}
        yield {**shown, **_line(column.values, places, kept, {**group.style, "width": 1 if several else 1.6})}
    if not several or not runs:
        return
    steps = np.unique(np.concatenate([column.steps for column in columns]))
    mean, deviation = _mean(steps, columns)
    places = {
        axis: _mean(steps, [Column(column.steps, each[axis]) for column, each in zip(columns, axes, strict=True)])[0]
        for axis in AXES
    }
    kept = thinned(mean, stretches)
    shown = {"name": _name(group.label), "group": number, "view": "mean"}
    within = kept[np.isfinite(deviation[kept] + mean[kept])]
    edge = {"color": group.style["color"], "width": 0}
    for side, more in ((-1, {}), (1, {"fill": "tonexty", "fillcolor": group.style["color"] + "33"})):
        band = _line(mean + side * deviation, places, within, edge)
        yield {**shown, **band, "mode": "lines", "hoverinfo": "skip", "hovertemplate": None, **more}
    spread = {"customdata": packed(deviation[kept]), "hovertemplate": HOVER.replace("%{y:.5g}", MEAN_HOVER)}
    yield {**shown, **_line(mean, places, kept, {**group.style, "width": 2}), **spread}


def _line(values: Numbers, places: Mapping[str, Numbers], kept: NDArray[np.intp], line: Trace) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(values) <= FEW else "lines",
        "y": packed(values[kept]),
        "xs": {axis: packed(place[kept]) for axis, place in places.items()},
        "line": line,
        "marker": {"size": 4},
        "hovertemplate": HOVER,
    }


def _mean(steps: Numbers, columns: Sequence[Column]) -> tuple[Numbers, Numbers]:
    """Over the columns that have a value for the step, and the standard deviation where there are two of them. One that
    is not finite makes a gap."""
    values, there = np.zeros((2, len(columns), len(steps)))
    for row, column in enumerate(columns):
        place = np.searchsorted(steps, column.steps)
        values[row, place], there[row, place] = column.values, 1
    count = there.sum(0)
    mean = values.sum(0) / count
    squares = (there * (values - mean) ** 2).sum(0)
    return mean, np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)


def thinned(values: Numbers, stretches: int) -> NDArray[np.intp]:
    """The places of the values that are kept."""
    length = len(values)
    width = -(-length // stretches)
    if width <= 4:
        return np.arange(length)
    starts = np.arange(0, length, width)
    table = np.full((len(starts), width), np.nan)
    table.ravel()[:length] = values
    bad = np.isnan(table)
    bad.ravel()[length:] = False
    kept = [starts, np.minimum(starts + width, length) - 1, starts + bad.argmax(1)]
    kept += [starts + np.where(np.isnan(table), math.inf, sign * table).argmin(1) for sign in (1, -1)]
    return np.unique(np.concatenate(kept))


def packed(values: Numbers) -> dict[str, str]:
    """As plotly reads it: exact, and shorter than in digits."""
    whole = bool((np.abs(values) < 2**31).all() and (values == np.floor(values)).all())
    kind = "i4" if whole else "f8"
    return {"dtype": kind, "bdata": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}


# ---- other figures


def parts_of_step(groups: Sequence[Group]) -> list[Figure]:
    """A bar for each group, of the median seconds of each part of a step; none where none was measured."""
    seconds: dict[str, dict[str, float | None]] = {title: {} for title in (*PARTS.values(), REST)}
    for group in groups:
        found: dict[str, list[Numbers]] = {}
        for run in group.runs:
            if "train/step_seconds" in run.columns:
                steps, rest = run.columns["train/step_seconds"]
                for part, title in PARTS.items():
                    if (column := run.columns.get(f"train/{part}_seconds")) is not None:
                        values = np.interp(steps, *column)
                        found.setdefault(title, []).append(values)
                        rest = rest - values
                found.setdefault(REST, []).append(rest)
        for title, each in found.items():
            seconds[title][group.label] = median(np.concatenate(each))
    labels = [_name(label) for label in seconds[REST]]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "x": [medians.get(label) for label in seconds[REST]],
            "y": list(range(len(labels))),
            "marker": {"color": colour},
            "hovertemplate": f"%{{x:.4g}} s<br>{title}<extra></extra>",
        }
        for (title, medians), colour in zip(seconds.items(), COLOURS, strict=False)
        if medians
    ]
    apart = all(label in seconds["towers"] for label in seconds[REST])
    note = (OVERLAPS if seconds[PARTS["communication"]] else "") if apart else NOT_APART
    layout = {"barmode": "stack", "showlegend": True, "height": 120 + 28 * len(labels)}
    groups_axis = {"autorange": "reversed", "tickvals": list(range(len(labels))), "ticktext": labels}
    layout |= {"xaxis": {"title": {"text": "seconds"}}, "yaxis": groups_axis}
    return [Figure("Parts of a step, medians", traces, layout, note, wide=True)] if traces else []


def with_error_bars(
    title: str,
    series: Mapping[str, Sequence[tuple[float | str, float, float | None]]],
    *,
    x: str,
    y: str,
    note: str = "",
) -> Figure:
    """Means with their standard deviations over a logarithmic x axis whose ticks are the values that there are, but for
    those that have no room beside another, or over names, which no line connects.

    Args:
        series: By its name, (x, mean, standard deviation) of every point. No deviation: one value, not a mean.
        x, y: What the axes show.
    """
    named = any(isinstance(point[0], str) for points in series.values() for point in points)
    traces: list[Trace] = []
    for number, (name, points) in enumerate(series.items()):
        ordered = points if named else sorted(points, key=lambda point: point[0])
        places, means, deviations = (list(column) for column in zip(*ordered, strict=True))
        trace: Trace = {"type": "scatter", "name": _name(name), "x": places, "y": means, "line": _style(number)}
        trace |= {"mode": "markers" if named else "lines+markers", "hovertemplate": HOVER}
        if None not in deviations:
            trace["error_y"] = {"type": "data", "array": deviations, "thickness": 1.2, "width": 4}
            trace |= {"customdata": deviations, "hovertemplate": HOVER.replace("%{y:.5g}", MEAN_HOVER)}
        traces.append(trace)
    axis: Trace = {"title": {"text": x}}
    if named:
        axis |= {"type": "category", "tickangle": -90}
    else:
        ticks: list[Any] = []
        for place in sorted({point[0] for points in series.values() for point in points}):
            if not ticks or place >= ROOM * ticks[-1]:
                ticks.append(place)
        texts = [f"1/{1 / tick:g}" if tick < 1 and (1 / tick).is_integer() else f"{tick:,.10g}" for tick in ticks]
        axis |= {"type": "log", "tickvals": ticks, "ticktext": texts}
    layout = {"showlegend": True, "height": 320, "xaxis": axis, "yaxis": {"title": {"text": y}}}
    return Figure(title, traces, layout, note)


def _name(text: str) -> str:
    """For a plot: not too long for a phone, and without the markup that plotly would see."""
    return escape(text if len(text) <= 29 else f"{text[:14]}…{text[-14:]}", quote=False)
