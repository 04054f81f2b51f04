"""The page: page.html, filled in.

The template escapes all text. A policy in the page runs nothing but its own two scripts, and loads nothing from
anywhere.
"""

import base64
import datetime
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from .. import __version__
from . import summary
from .figures import (
    LEARNING,
    LEFT_OUT,
    MOST_METRICS,
    SPEED,
    Figure,
    Group,
    curves,
    differences,
    grouped,
    metrics_of,
    parts_of_step,
    time_unit,
)
from .runs import Run
from .summary import Table

THINNED = "Long curves are thinned: of every stretch of steps the first, last, lowest and highest value are drawn."
TIME = "Time is that of training steps, without evaluations."
BATCHES = "Loss and accuracy in a batch depend on its size: compare runs of different batches by validation."
BANDS = "Bands are the mean over the runs of a setting, plus and minus their standard deviation."


class Picture(NamedTuple):
    """`source` is an address: of data, as nothing is loaded."""

    source: str
    text: str
    right: bool


class Retrieved(NamedTuple):
    """What was found for a text, the best first."""

    text: str
    pictures: Sequence[Picture]


class NoExamples(Exception):
    """Of a run in which nothing is to be retrieved."""


class Section(NamedTuple):
    """`folded`: shown when the reader asks for it."""

    title: str
    texts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    examples: Sequence[Retrieved] = ()
    folded: bool = False


@np.errstate(all="ignore")  # of runs that diverged
def page_of(runs: Sequence[Run], examples: Sequence[Section] = ()) -> str:
    """The page of these runs, with sections of examples."""
    groups = grouped(runs)
    several = any(len(group.runs) > 1 for group in groups)
    notes = [f"{run.name}: {' '.join(run.notes)}" for run in runs if run.notes]
    more = len(metrics_of(runs)) - MOST_METRICS
    notes += [f"{more:,} more metrics are not drawn."] * (more > 0)
    sections = [Section("Last metrics", notes, [summary.last_metrics(groups)])]
    if different := summary.differing(runs):
        sections.append(Section("What differs between the runs", tables=different))
    drawn, left_out = curves(groups), summary.left_out(runs)
    for title, figures in drawn.items():
        texts = [f"{THINNED} {TIME}" + f" {BANDS}" * several] if title == next(iter(drawn)) else []
        texts += [BATCHES] * (title == LEARNING and "global_batch_size" in differences([run.settings for run in runs]))
        tables = left_out if title == LEFT_OUT else []
        texts += ["None."] if not figures and not tables else []
        parts = parts_of_step(groups) if title == SPEED else []
        sections.append(Section(title, texts, tables, [*parts, *figures]))
    if left_out and LEFT_OUT not in drawn:
        sections.append(Section(LEFT_OUT, tables=left_out))
    settings, environments = summary.common_settings(runs), summary.environments(runs)
    sections += [
        *examples,
        Section("Settings", [] if settings else ["Not recorded."], settings, folded=True),
        Section("Environment", [] if environments else ["Not recorded."], environments, folded=True),
    ]
    names = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    return render(names, sections, groups=groups if drawn else [], time=time_unit(runs)[1])


def render(title: str, sections: Sequence[Section], *, groups: Sequence[Group] = (), time: str = "seconds") -> str:
    """Any sections as a page. With `groups` it has a legend, and a switch for the x axis of curves."""
    switches = {}
    if groups:
        switches["axis"] = ("x axis", {"steps": "steps", "samples": "samples", "time": "time"})
    if any(len(group.runs) > 1 for group in groups):
        switches["view"] = ("lines", {"mean": "mean ± std", "runs": "every run"})
    switches["theme"] = ("colours", {"auto": "auto", "light": "light", "dark": "dark"})
    figures = {
        f"plot-{number}-{place}": {"traces": figure.traces, "layout": figure.layout}
        for number, section in enumerate(sections)
        for place, figure in enumerate(section.figures)
    }
    scripts = [get_plotlyjs(), _file("page.js")]
    sums = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; "
    policy += "style-src 'unsafe-inline'; img-src data: blob:; script-src"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string(_file("page.html")).render(
        title=title,
        sections=sections,
        groups=groups,
        switches=switches,
        data={"figures": figures, "axes": {"steps": "steps", "samples": "samples", "time": f"{time} of training"}},
        policy=policy + "".join(f" 'sha256-{each}'" for each in sums),
        css=Markup(_file("page.css")),
        scripts=[Markup(script) for script in scripts],
        version=__version__,
        made=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
