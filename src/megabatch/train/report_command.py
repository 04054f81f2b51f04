"""`megabatch report`: the page of one or more runs, and what `megabatch train --report` writes."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from ..report.figures import grouped
from ..report.page import NoExamples, Section, page_of
from ..report.runs import Run, read_runs
from .checkpoint import atomically
from .config import said
from .flags import usage_errors

DESCRIPTION = """\
Draws training runs as one HTML file that opens from disk without a network: loss, accuracy, recall and zero-shot over
steps, samples and time, speed and memory, settings and what differs, skipped samples, retrieval examples, environment.
    megabatch report logs/first -o report.html
    megabatch report logs/*-seed?                  # seeds of one setting: mean and standard deviation
"""

EXAMPLES = 8
MOST_SETTINGS = 4  # that examples are made of
NEEDED = "Examples need megabatch[train], the model's packages, a checkpoint of the run, and its held-out images."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="page to write")
    parser.add_argument("--examples", type=int, default=EXAMPLES, metavar="N", help="retrieval examples; 0: none")


def main(options: argparse.Namespace) -> int:
    with usage_errors("report"):
        if options.out.suffix not in (".html", ".htm") or options.out.is_dir():
            raise ValueError(f"--out must be a file that ends in .html, got {options.out}. Give it such a name.")
        if not options.out.parent.is_dir():
            raise ValueError(f"--out must be in a folder that is there, got {options.out}. Make {options.out.parent}.")
        if options.examples < 0:
            raise ValueError(f"--examples must be at least 0, got {options.examples}. Give 0 for none.")
        for run in write_report(options.runs, options.out, examples=options.examples):
            if run.notes:
                logging.getLogger("megabatch").warning("report: %s: %s", run.name, " ".join(run.notes))
        print(options.out)
    return 0


def write_report(folders: Sequence[Path], path: Path, *, examples: int = EXAMPLES) -> list[Run]:
    """Of the runs that it returns. At once: at `path` is the old page or the new one."""
    runs = read_runs(folders)
    groups = grouped(runs) if examples else []
    sections = [_examples(group.runs[0], examples) for group in groups[:MOST_SETTINGS]]
    if more := len(groups[MOST_SETTINGS:]):
        text = f"There are none of runs of {more} more settings. Draw these on a page of their own."
        sections.append(Section("More retrieval examples", [text]))
    page = page_of(runs, sections).encode("utf-8", "backslashreplace")
    atomically(path, lambda file: file.write(page))
    return runs


def _examples(run: Run, count: int) -> Section:
    title = f"Retrieval examples: {run.name}"
    try:
        from .retrieved import AMONG, retrieved  # which needs megabatch[train], and the page does not

        checkpoint, found = retrieved(run.folder, count)
    except NoExamples as error:
        return Section(title, [f"None: {error}"])
    except Exception as error:  # weights and data may have moved, packages be missing, memory be full
        return Section(title, [f"None: {said(error)}. {NEEDED}"])
    text = f"The nearest to a text of the first held-out images, {AMONG} at most, by {checkpoint}; the best first, "
    text += "the right one framed."
    return Section(title, [text], examples=found)
