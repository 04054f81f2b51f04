"""`megabatch report`: the page of one or more runs, and what `megabatch train --report` writes."""

import argparse
import base64
import io
from collections.abc import Sequence
from pathlib import Path

from ..report.figures import grouped
from ..report.page import Picture, Retrieved, Section, page_of
from ..report.runs import Run, read_runs
from .checkpoint import atomically
from .flags import usage_errors
from .retrieved import AMONG, Match, retrieved

DESCRIPTION = """\
Draws training runs as one HTML file that opens from disk without a network: loss, accuracy, recall and zero-shot over
steps, samples and time, speed and memory, settings and what differs, skipped samples, retrieval examples, environment.
    megabatch report logs/first -o report.html
    megabatch report logs/*-seed?                  # seeds of one setting: mean and standard deviation
"""

EXAMPLES = 8
MOST_SETTINGS = 4  # that examples are made of
SIDE = 64  # pixels of an example


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="page to write")
    parser.add_argument("--examples", type=int, default=EXAMPLES, metavar="N", help="retrieval examples; 0: none")


def main(options: argparse.Namespace) -> int:
    with usage_errors("report"):
        if options.out.is_dir():
            raise ValueError(f"--out must be a file, got the folder {options.out}. Name a file in it.")
        write_report(options.runs, options.out, examples=options.examples)
        print(options.out)
    return 0


def write_report(folders: Sequence[Path], path: Path, *, examples: int = EXAMPLES) -> None:
    """At once: at `path` is the old page or the new one."""
    runs = read_runs(folders)
    sections = [_examples(group.runs[0], examples) for group in grouped(runs)[:MOST_SETTINGS]] if examples > 0 else []
    page = page_of(runs, sections).encode("utf-8", "backslashreplace")
    atomically(path, lambda file: file.write(page))


def _examples(run: Run, count: int) -> Section:
    title = f"Retrieval examples: {run.name}"
    try:
        found = retrieved(run.folder, count)
    except (ValueError, OSError, ImportError) as error:  # the page says it: data and weights may have moved
        return Section(title, [f"None: {error}"])
    text = f"The nearest to a text of the first held-out images, {AMONG} at most; the best first, the right one framed."
    return Section(title, [text], examples=[Retrieved(query, [*map(_picture, best)]) for query, best in found])


def _picture(match: Match) -> Picture:
    image = match.image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    image.save(file := io.BytesIO(), "PNG")
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(source, match.text, match.right)
