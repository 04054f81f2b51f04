"""Tables of the page: every cell is text, which page.py escapes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .figures import NONE, Group, differences
from .runs import Run, median, shortened, text_of

MOST_REASONS = 20  # of a run
# Of the last step or evaluation: metric, heading, format.
METRICS = (
    ("train/loss", "training loss", ".4f"),
    ("train/accuracy", "training accuracy", ".4f"),
    ("val/loss", "validation loss", ".4f"),
    ("val/mean_recall", "mean recall", ".4f"),
    ("zeroshot/top1", "zero-shot top-1", ".4f"),
    ("train/memory_mib", "memory of rank 0, MiB", ",.0f"),
    ("train/skipped_samples", "skipped samples", ",.0f"),
    ("train/nonfinite_steps", "non-finite steps", ",.0f"),
)


class Table(NamedTuple):
    """`note` stands above it."""

    head: Sequence[str]
    rows: list[list[str]]
    note: str = ""


def last_metrics(groups: Sequence[Group]) -> Table:
    """A row for each run, and one for the mean of several."""
    runs = [run for group in groups for run in group.runs]
    shown = [metric for metric in METRICS if any(metric[0] in run.columns for run in runs)]
    head = ["run", "steps", "samples", "training time", "samples/s", *(heading for _, heading, _ in shown)]
    rows = []
    for group in groups:
        for run in group.runs:
            speed = run.columns.get("train/samples_per_second")
            samples_per_second = None if speed is None else median(speed.values)
            steps = max((column.steps[-1] for column in run.columns.values()), default=0)
            counts = [
                f"{steps:,.0f}{_of_planned(run, steps)}",
                number(run.last("train/samples"), ",.0f"),
                duration(run.seconds),
            ]
            values = [number(run.last(metric), how) for metric, _, how in shown]
            rows.append([run.name, *counts, number(samples_per_second, ",.0f"), *values])
        if len(group.runs) > 1:
            spreads = [_spread(group.runs, metric, how) for metric, _, how in shown]
            rows.append([f"mean ± std: {group.label}", *[""] * 4, *spreads])
    note = "Of the last step and the last evaluation; samples/s is the median over steps."
    return Table(head, rows, note + " Runs that end at different steps have no mean." * (len(rows) > len(runs)))


def _of_planned(run: Run, steps: float) -> str:
    """Where the run has not done all, or ended early."""
    planned = run.settings.get("steps", "")
    known = planned.isdecimal() and len(planned) < 16
    return f" of {int(planned):,}" if known and int(planned) > steps else ""


def _spread(runs: Sequence[Run], metric: str, how: str) -> str:
    columns = [run.columns[metric] for run in runs if metric in run.columns]
    if len(columns) < len(runs) or len({column.steps[-1] for column in columns}) > 1:
        return NONE
    last = [column.values[-1] for column in columns]
    return f"{number(float(np.mean(last)), how)} ± {number(float(np.std(last, ddof=1)), how)}"


def differing(runs: Sequence[Run]) -> list[Table]:
    """Settings, and facts of the environment."""
    tables = []
    for facts in ([run.settings for run in runs], [run.environment for run in runs]):
        if names := [name for name in differences(facts) if name != "name"]:
            rows = [
                [run.name, *(shortened(each.get(name, NONE)) for name in names)]
                for run, each in zip(runs, facts, strict=True)
            ]
            tables.append(Table(["run", *names], rows))
    return tables


def common_settings(runs: Sequence[Run]) -> list[Table]:
    different = differences([run.settings for run in runs])
    settings = next((run.settings for run in runs if run.settings), {})
    rows = [[name, shortened(value)] for name, value in settings.items() if name not in different]
    note = "Those that are the same in all runs." if rows else "None is the same in all runs."
    return [Table(["setting", "value"], rows, note)] if settings else []


def environments(runs: Sequence[Run]) -> list[Table]:
    """Each once, after the runs that had it."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        if run.environment:
            found.setdefault(tuple(run.environment.items()), []).append(run.name)
    return [
        Table(["", "value"], [[name, shortened(value)] for name, value in facts], ", ".join(names))
        for facts, names in found.items()
    ]


def left_out(runs: Sequence[Run]) -> list[Table]:
    """Samples and steps."""
    samples = [
        [run.name, reason, f"{count:,}", ", ".join(run.skipped_names[reason])]
        for run in runs
        for reason, count in run.skipped.most_common(MOST_REASONS)
    ]
    others = sum(max(0, len(run.skipped) - MOST_REASONS) for run in runs)
    more = f" {others:,} rarer reasons are not shown." if others else ""
    steps = [
        [run.name, *(shortened(text_of(entry.get(name, NONE))) for name in ("step", "train/loss", "train/grad_norm"))]
        for run in runs
        for entry in run.nonfinite
    ]
    tables = [
        Table(
            ["run", "reason", "samples", "the first"], samples, f"Skipped samples, each once: see skipped.jsonl.{more}"
        ),
        Table(["run", "step", "loss", "gradient norm"], steps, "The first non-finite steps: see nonfinite.jsonl."),
    ]
    return [table for table in tables if table.rows]


def number(value: float | None, how: str) -> str:
    return NONE if value is None else format(value, how)


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return NONE
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min" if minutes else f"{seconds:.1f} s"
