"""Figures as plotly draws them: data and layout, as plain values. Colours of text and lines are the page's (page.js).

A curve of many steps is thinned: of every stretch its first, last, lowest and highest value stay, and one that is not
finite, so that no spike and no gap is lost.
"""

import base64
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from html import escape
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .runs import AXES, Column, Numbers, Run, finite, median, shortened

POINTS = 60_000  # on a page, at most; but every curve has some
STRETCHES = (10, 500)  # of a curve: at least, at most
MOST_METRICS = 100
LONGEST_NAME = 29  # characters, in a plot on a phone
# Okabe and Ito's colours, which colour-blind readers can distinguish, as far as they can be seen on light and dark.
COLOURS = ("#2583c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fc1", "#7f8489")
DASHES = ("solid", "dash", "dot", "dashdot")
PARTS = {"data": "waiting for data", "towers": "towers", "loss": "loss", "communication": "waiting for other ranks"}
REST = "rest"
NONE = "–"
UNEQUAL = "Some runs lack this, or some of its steps: means are of the runs that have it, at the steps that they share."
EARLY = "Runs that ended before half of the longest are in no mean."
OVERLAPS = "Communication that overlaps with towers or loss is no waiting, and in their seconds."
HOVER = "%{y:.5g} at %{x:,.12~g}<br>%{fullData.name}<extra></extra>"
MEAN_HOVER = "%{y:.5g} ± %{customdata:.2g}"
FEW = 50  # points, which are marked
TICK_RATIO = 1.9  # of neighbouring ticks on a logarithmic axis, at least
# Names of settings in which runs of one setting may differ, and of the environment, in which they may not.
NOT_COMPARED = {"seed", "name", "logs", "resume", "allow_changed_data", "save_frequency", "save_steps", "keep"}
NOT_COMPARED |= {"report", "report_to", "wandb_project_name", "log_every_n_steps", "val_frequency", "val_steps"}
ALIKE = {"ranks", "threads", "device", "commit", "megabatch", "torch", "cuda"}

Trace = dict[str, Any]
Places = NDArray[np.intp]  # of a column

LEARNING, SPEED, OTHERS = "Learning", "Speed and memory", "Other metrics"
LEFT_OUT = "Skipped samples and non-finite steps"
# Sections of the page, and the metrics that belong there, with their titles.
METRICS = (
    (LEARNING, r"train/loss", "Training loss"),
    (LEARNING, r"train/accuracy", "Training accuracy, in the batch"),
    (LEARNING, r"val/loss", "Validation loss"),
    (LEARNING, r"val/mean_recall", "Mean recall"),
    (LEARNING, r"zeroshot/top(\d+)", r"Zero-shot top-\1 accuracy"),
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
    (SPEED, r"train/memory_mib", "Peak memory of rank 0, MiB"),
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
    """Runs of one setting, on the same hardware and with the same code, which differ in their seed. A colour of the
    page. Labels are unique."""

    label: str
    runs: list[Run]
    style: dict[str, Any]


def grouped(runs: Sequence[Run]) -> list[Group]:
    found: dict[object, list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(sorted(_setting(run).items())) or run.name, []).append(run)
    differing = differences([_setting(group[0]) for group in found.values()])
    labels = _unique([_label(group, differing) for group in found.values()])
    return [Group(labels[number], group, _style(number)) for number, group in enumerate(found.values())]


def _setting(run: Run) -> dict[str, str]:
    """What runs of one setting have in common. Empty where the settings are not known."""
    settings = {name: value for name, value in run.settings.items() if name not in NOT_COMPARED}
    return settings and settings | {name: value for name, value in run.environment.items() if name in ALIKE}


def _style(number: int) -> Trace:
    return {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def _label(runs: Sequence[Run], differing: Sequence[str]) -> str:
    if len(runs) == 1:
        return runs[0].name
    values = _setting(runs[0])
    setting = ", ".join(f"{name} {shortened(values.get(name, NONE))}" for name in differing)
    seeds = len({run.settings.get("seed") for run in runs})
    return f"{setting or 'one setting'} ({f'{len(runs)} runs of ' * (seeds < len(runs))}{count_of(seeds, 'seed')})"


def count_of(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def differences(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of what is not the same in all of these, of each of which all or nothing is known."""
    known = [each for each in facts if each]
    names = dict.fromkeys(name for each in known for name in each)
    return [name for name in names if len({each.get(name) for each in known}) > 1]


def time_unit(runs: Iterable[Run]) -> tuple[float, str]:
    """In seconds, for an axis that shows all of these runs."""
    longest = max((run.seconds or 0.0 for run in runs), default=0.0)
    return (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")


# ---- curves


def curves(groups: Sequence[Group]) -> dict[str, list[Figure]]:
    """A figure for every metric, by section."""
    runs = [run for group in groups for run in group.runs]
    metrics, (unit, _) = dict(islice(metrics_of(runs).items(), MOST_METRICS)), time_unit(runs)
    # Lines of points: a mean is one more, and its band two.
    count = sum(metric in run.columns for run in runs for metric in metrics)
    count += 3 * len(metrics) * sum(len(group.runs) > 1 for group in groups)
    stretches = int(np.clip(POINTS / 5 / max(count, 1), *STRETCHES))
    names = _short([*(run.name for run in runs), *(group.label for group in groups)])
    sections: dict[str, list[Figure]] = {}
    for metric, (section, title) in metrics.items():
        figures = sections.setdefault(section, [])
        values = np.concatenate([run.columns[metric].values for run in runs if metric in run.columns])
        if section == LEFT_OUT and not values.any():
            continue
        each = (_traces(group, n, metric, names, unit, stretches) for n, group in enumerate(groups))
        bad = int((~np.isfinite(values)).sum())
        notes = [f"Not finite, and so a gap: {bad} of {len(values)} values."] * (bad > 0)
        having = [[run for run in group.runs if metric in run.columns] for group in groups]
        means = [_of_means(each, metric) for each in having]
        notes += [UNEQUAL] * any(_unequal(group.runs, metric) for group in groups)
        notes += [EARLY] * any(len(some) < len(each) for some, each in zip(means, having, strict=True))
        lowest = "tozero" if section == LEFT_OUT else "normal" if (finite(values) < 0).any() else "nonnegative"
        layout = {"yaxis": {"rangemode": lowest}}
        figures.append(Figure(title, [*chain(*each)], layout, " ".join(notes)))
    return sections


def metrics_of(runs: Iterable[Run]) -> dict[str, tuple[str, str]]:
    """The metrics of these runs, each with its section and title, in the order of the page. Not all may be drawn."""
    names = {metric for run in runs for metric in run.columns}
    left = sorted(names, key=lambda name: [part.zfill(9) for part in re.split(r"(\d+)", name)])  # @5 before @10
    found: dict[str, tuple[str, str]] = {}
    for section, pattern, title in METRICS:
        found |= {name: (section, re.sub(pattern, title, name)) for name in left if re.fullmatch(pattern, name)}
    others = {name: (OTHERS, name) for name in left if name not in found}
    return {name: place for name, place in found.items() if place[0]} | others


def _unequal(runs: Sequence[Run], metric: str) -> bool:
    """Whether they have it at different steps, or not all of them have it."""
    return len({run.columns[metric].steps.tobytes() if metric in run.columns else b"" for run in runs}) > 1


def _of_means(runs: Sequence[Run], metric: str) -> list[Run]:
    """Those that came far enough: of the others a mean would have few steps."""
    last = [float(run.columns[metric].steps[-1]) for run in runs]
    return [run for run, step in zip(runs, last, strict=True) if step >= max(last) / 2]


def _traces(
    group: Group, number: int, metric: str, names: Mapping[str, str], unit: float, stretches: int
) -> Iterator[Trace]:
    runs = [run for run in group.runs if metric in run.columns]
    if not runs:
        return
    columns = {run.name: Column(each.steps, finite(each.values)) for run in runs for each in (run.columns[metric],)}
    averaged = _of_means(runs, metric)
    steps, values = _shared([columns[run.name] for run in averaged])
    averaged = averaged if len(steps) else []  # and every run is shown
    for run in runs:
        column, alone = columns[run.name], averaged in ([], [run])
        kept = thinned(column.values, stretches)
        shown = {"name": names[run.name], "group": number, **({} if alone else {"view": "runs"})}
        style = {**group.style, "width": 1.6 if alone else 1}
        yield {**shown, **_line(column.values, run.axes(column.steps, unit), kept, style)}
    if len(averaged) < 2:
        return
    apart = values - values[0]  # exactly 0 where all are the same, whose mean may be rounded
    mean, deviation = values[0] + apart.mean(0), apart.std(0, ddof=1)
    axes = [run.axes(steps, unit) for run in averaged]
    places = {axis: np.mean([each[axis] for each in axes], 0) for axis in AXES}
    kept = thinned(mean, stretches)
    shown = {"name": names[group.label], "group": number, "view": "mean"}
    yield {**shown, **_band(mean, deviation, places, kept, group.style["color"])}
    spread: Trace = {"customdata": packed(deviation[kept]), "hovertemplate": HOVER.replace("%{y:.5g}", MEAN_HOVER)}
    if len(steps) == 1:  # of which no band can be seen
        spread["error_y"] = {"type": "data", "array": packed(deviation)}
    yield {**shown, **_line(mean, places, kept, {**group.style, "width": 2}), **spread}


def _shared(columns: Sequence[Column]) -> tuple[Numbers, Numbers]:
    """The steps that all of these have, and their values there, a row each."""
    steps = reduce(np.intersect1d, (column.steps for column in columns))
    return steps, np.array([column.values[np.searchsorted(column.steps, steps)] for column in columns])


def _band(mean: Numbers, deviation: Numbers, places: Mapping[str, Numbers], kept: Places, colour: str) -> Trace:
    """Every stretch between two gaps is a shape of its own: there along the upper edge, and back along the lower."""
    stretches = np.split(kept, np.flatnonzero(~np.isfinite(mean[kept] + deviation[kept])))  # a gap begins a stretch
    around = np.concatenate([np.append(each, each[::-1]) for each in stretches])
    sides = np.concatenate([np.repeat((1, -1), len(each)) for each in stretches])
    edge = finite(mean[around] + sides * deviation[around])
    places = {axis: place[around] for axis, place in places.items()}
    fill = {"mode": "lines", "fill": "toself", "fillcolor": colour + "33", "hoverinfo": "skip", "hovertemplate": None}
    return {**_line(edge, places, np.arange(len(edge)), {"width": 0}), **fill}


def _line(values: Numbers, places: Mapping[str, Numbers], kept: Places, line: Trace) -> Trace:
    y = values[kept]
    gaps = np.isnan(np.concatenate(([np.nan], y, [np.nan])))
    alone = ~gaps[1:-1] & gaps[:-2] & gaps[2:]  # a value between two gaps, through which no line goes
    few = len(values) <= FEW
    return {
        "type": "scatter",
        "mode": "lines+markers" if few or alone.any() else "lines",
        "y": packed(y),
        "xs": {axis: packed(place[kept]) for axis, place in places.items()},
        "line": line,
        "marker": {"size": packed(np.where(alone, 4.0, 0.0)) if alone.any() and not few else 4},
        "hovertemplate": HOVER,
    }


def thinned(values: Numbers, stretches: int) -> Places:
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
    """A bar for each group, of the median seconds of each part of a step, in the runs that measured them."""
    measured = [[seconds for run in group.runs if (seconds := _seconds(run)).size] for group in groups]
    bars = {group.label: np.concatenate(each, 1) for group, each in zip(groups, measured, strict=True) if each}
    medians = [[*map(median, (*rows[1:], rows[0] - rows[1:].sum(0)))] for rows in bars.values()]
    names = _short(bars)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "x": x,
            "y": list(range(len(bars))),
            "marker": {"color": colour},
            "hovertemplate": f"%{{x:.4g}} s<br>{title}<extra></extra>",
        }
        for title, x, colour in zip((*PARTS.values(), REST), zip(*medians, strict=True), COLOURS, strict=False)
        if any(x)
    ]
    runs, known = (sum(map(len, each)) for each in ([group.runs for group in groups], measured))
    notes = [OVERLAPS] * any(trace["name"] == PARTS["communication"] for trace in traces)
    notes += [f"{runs - known} of {runs} runs did not measure them, and are left out."] * (runs > known)
    # On a phone the legend has a line for each part.
    layout = {"barmode": "stack", "showlegend": True, "height": 200 + 28 * len(bars)}
    ticks = {"tickvals": list(range(len(bars))), "ticktext": [names[label] for label in bars]}
    layout |= {"xaxis": {"title": {"text": "seconds"}}, "yaxis": {"autorange": "reversed", **ticks}}
    return [Figure("Parts of a step, medians", traces, layout, " ".join(notes), wide=True)] if traces else []


def _seconds(run: Run) -> Numbers:
    """Of a step, and of each of PARTS, a row each, for the steps of which all were measured."""
    nothing = Column(np.empty(0), np.empty(0))
    step, *parts, waiting = (run.columns.get(f"train/{part}_seconds", nothing) for part in ("step", *PARTS))
    if waiting is nothing:  # one rank waits for no others
        waiting = Column(step.steps, np.zeros(len(step.steps)))
    return _shared([step, *parts, waiting])[1]


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
    names, hover = _short(series), HOVER.replace("%{x:,.12~g}", "%{x}") if named else HOVER
    traces: list[Trace] = []
    for number, (name, points) in enumerate(series.items()):
        ordered = points if named else sorted(points, key=lambda point: point[0])
        places, means, deviations = (list(column) for column in zip(*ordered, strict=True))
        places = [escape(place, quote=False) if isinstance(place, str) else place for place in places]
        trace: Trace = {"type": "scatter", "name": names[name], "x": places, "y": means, "line": _style(number)}
        trace |= {"mode": "markers" if named else "lines+markers", "hovertemplate": hover}
        if not named and None in deviations:
            trace["marker"] = {"symbol": "circle-open"}
        if None not in deviations:
            trace["error_y"] = {"type": "data", "array": deviations, "thickness": 1.2, "width": 4}
            trace |= {"customdata": deviations, "hovertemplate": hover.replace("%{y:.5g}", MEAN_HOVER)}
        traces.append(trace)
    axis: Trace = {"title": {"text": x}}
    if named:
        axis |= {"type": "category", "tickangle": -90}
    else:
        ticks: list[Any] = []
        for place in sorted({point[0] for points in series.values() for point in points}):
            if not ticks or place >= TICK_RATIO * ticks[-1]:
                ticks.append(place)
        texts = [f"1/{1 / tick:g}" if tick < 1 and (1 / tick).is_integer() else f"{tick:,.10g}" for tick in ticks]
        axis |= {"type": "log", "tickvals": ticks, "ticktext": texts}
    layout: Trace = {"showlegend": True, "height": 320, "xaxis": axis, "yaxis": {"title": {"text": y}}}
    if named:  # beside each other at a name, where plotly would begin at 0
        layout |= {"scattermode": "group", "scattergap": 0.4}
        ends = [mean + side * (std or 0.0) for points in series.values() for _, mean, std in points for side in (1, -1)]
        if ends := [end for end in ends if math.isfinite(end)]:
            room = 0.05 * (max(ends) - min(ends)) or 1.0
            layout["yaxis"]["range"] = [min(ends) - room, max(ends) + room]
    return Figure(title, traces, layout, note)


def _short(texts: Iterable[str]) -> dict[str, str]:
    """For a plot: not too long for a phone, still different, and without the markup that plotly would see."""
    whole = list(dict.fromkeys(texts))
    cut = _cut(whole)
    names = _unique([cut[text] for text in whole])
    return {text: escape(name, quote=False) for text, name in zip(whole, names, strict=True)}


def _cut(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for text in texts:
        found.setdefault(text if len(text) <= LONGEST_NAME else f"{text[:14]}…{text[-14:]}", []).append(text)
    cut = {same[0]: short for short, same in found.items()}
    for same in found.values():
        if len(same) > 1:  # what all of them begin with says nothing
            letters = zip(*same, strict=False)
            start = next((place for place, each in enumerate(letters) if len(set(each)) > 1), min(map(len, same)))
            ends = _cut([text[start:] for text in same])
            cut |= {text: f"…{ends[text[start:]]}" for text in same}
    return cut


def _unique(texts: Iterable[str]) -> list[str]:
    """One that is taken gets a number."""
    found: dict[str, None] = {}
    for text in texts:
        name, number = text, 1
        while name in found:
            number += 1
            name = f"{text} ({number})"
        found[name] = None
    return list(found)
