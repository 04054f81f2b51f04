"""Session: one run of a benchmark, from the first line to the files it leaves.

A benchmark says what its cases are and measures them one after the other; the session prints tables, shows how far it
is, and writes everything measured after every case, so that Ctrl-C, or whatever else ends it, leaves what there is.
Under torchrun rank 0 prints and writes.
"""

import argparse
import csv
import datetime
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..machine import describe, machine
from . import plot, report
from .processes import Runner

INTERRUPTED = 130  # the shell's exit code for Ctrl-C


class Session:
    """`steps`: calls of `reached` until it is done; `packages`: whose versions are printed."""

    def __init__(
        self, name: str, options: argparse.Namespace, runner: Runner, steps: int, packages: Sequence[str] = ()
    ) -> None:
        self.name, self.runner, self._steps = name, runner, steps
        self.files = {kind: getattr(options, kind, None) for kind in ("json", "csv", "plot")}
        self.machine = machine(runner.world, packages)
        self.cases: list[dict[str, Any]] = []
        self.exit_code = 0
        self._begin = datetime.datetime.now(datetime.timezone.utc)
        self._progress: Any = None
        self._written: list[Path] = []

    def __enter__(self) -> "Session":
        """What is missing shows now, not in an hour."""
        for kind, path in self.files.items():
            if path is not None and self.runner.speaks:
                try_file(self.name, kind, path)
        if self.files["plot"] and importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("--plot needs matplotlib", name="matplotlib")
        self.say(describe(self.machine))
        if self.runner.speaks and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            self._progress = _progress()
            self._task = self._progress.add_task(self.name, total=self._steps)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._progress is not None:
            self._progress.stop()
        self._write()
        if self.cases and self.files["plot"] and self.runner.speaks:
            self._draw(self.files["plot"])
        if self._written:
            self.say(f"\nwritten to {', '.join(map(str, dict.fromkeys(self._written)))}")
        if kind is KeyboardInterrupt:
            print(f"\nstopped after {len(self.cases)} cases", file=sys.stderr)
            self.exit_code = INTERRUPTED
            return True
        return False

    def reached(self) -> None:
        """One step more is done."""
        if self._progress is not None:
            self._progress.advance(self._task)

    def say(self, text: str) -> None:
        if self.runner.speaks:
            print(text, flush=True)

    def show(self, heading: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
        self.say(f"\n{heading}\n\n{report.table(head, body)}")

    def add(self, case: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], healthy: bool = True) -> None:
        """What was measured of a case: the case itself, and a record per contender."""
        self.cases.append({**case, "contenders": [dict(row) for row in rows]})
        if not healthy:
            self.exit_code = max(self.exit_code, 1)
        self._write()

    # ---- files

    def _write(self) -> None:
        if not self.cases or not self.runner.speaks:
            return
        if self.files["json"]:
            part = self.files["json"].with_name(f"{self.files['json'].name}.part")
            part.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
            part.replace(self.files["json"])  # at once, so that no moment has half a file
            self._written.append(self.files["json"])
        if self.files["csv"]:
            write_csv(self.files["csv"], self.cases)
            self._written.append(self.files["csv"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "date": self._begin.isoformat(timespec="seconds"),
            "command": shlex.join(["megabatch", *sys.argv[1:]]),
            "machine": self.machine,
            "cases": self.cases,
        }

    def _draw(self, path: Path) -> None:
        curves = plot.curves_of(self.cases)
        if not curves:
            print("\nno plot: that needs two numbers of rows or more of one contender", flush=True)
            return
        plot.draw(curves, f"megabatch bench {self.name}: {self.machine['device']}", path)
        self._written.append(path)


def try_file(command: str, flag: str, path: Path) -> None:
    """Ends the command where the file cannot be written. Leaves what is there as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        words = f"--{flag} must be a file that can be written to, got {path}: {error.strerror}."
        print(f"{command}: {words}", file=sys.stderr)
        raise SystemExit(2) from None


def write_csv(path: Path, cases: Iterable[Mapping[str, Any]]) -> None:
    """A line per contender and case. A list, such as the seconds of all runs, is one cell of numbers."""
    lines = []
    for case in cases:
        about = {name: value for name, value in case.items() if name != "contenders"}
        lines += [{**about, **row} for row in case["contenders"]]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value


def _progress() -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        refresh_per_second=1,  # leave the cores to what is measured
    )
