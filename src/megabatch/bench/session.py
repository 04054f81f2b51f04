"""Session: one run of a benchmark, from the first line to the files it leaves.

A benchmark says what its cases are and measures them one after the other; the session prints the tables, shows how far
it is, and writes everything measured after every case, so that Ctrl-C, or whatever else ends it, leaves what there is.
"""

import argparse
import csv
import datetime
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from . import plot, report
from .bar import Bar

T = TypeVar("T")

INTERRUPTED = 130  # the shell's exit code for Ctrl-C


def add_arguments(parser: argparse.ArgumentParser, plots: bool = True) -> None:
    """The flags that all benchmarks have."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured to this file")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="the same as a table, a line per contender and case")
    if plots:
        parser.add_argument(
            "--plot", type=_png, metavar="PATH", help="draw time and memory against rows as a PNG; needs matplotlib"
        )


def positive(text: str) -> int:
    """A type of argument: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _png(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return Path(text)


class Session:
    """
    Args:
        name: Of the benchmark.
        options: The flags of `add_arguments`.
        threads: What is said of threads, where it is not torch's own number.
        memory_is: What the memory of the plot is.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, threads: str = "", memory_is: str = plot.BEYOND_INPUTS
    ) -> None:
        self.name = name
        self.files = {kind: getattr(options, kind, None) for kind in ("json", "csv", "plot")}
        self.machine = report.machine()
        self.cases: list[dict[str, Any]] = []
        self.exit_code = 0
        self._begin = datetime.datetime.now(datetime.timezone.utc)
        self._bar = Bar()
        self._written: list[Path] = []
        self._threads, self._memory_is = threads, memory_is

    def __enter__(self) -> "Session":
        """What is missing shows now, not in an hour."""
        for kind, path in self.files.items():
            if path is not None:
                self._try(kind, path)
        if self.files["plot"] and importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("--plot needs matplotlib", name="matplotlib")
        print(report.describe(self.machine, self._threads), flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._bar.hide()
        self._write()
        if self.cases and self.files["plot"]:
            self._draw(self.files["plot"])
        if self._written:
            print(f"\nwritten to {', '.join(map(str, dict.fromkeys(self._written)))}", flush=True)
        if kind is KeyboardInterrupt:
            print(f"\nstopped after {len(self.cases)} of {self._bar.cases} cases", file=sys.stderr)
            self.exit_code = INTERRUPTED
            return True
        return False

    def each(self, cases: Sequence[T], work: Sequence[float] | None = None) -> Iterator[T]:
        """One case after the other, with a bar. `work`: how long each takes, in any unit."""
        self._bar.begin(len(cases), [1.0] * len(cases) if work is None else work)
        for index, case in enumerate(cases):
            self._bar.reach(index)
            yield case
        self._bar.reach(len(cases))

    def part(self, done: float) -> None:
        """How much of the present case is done, from 0 to 1."""
        self._bar.part(done)

    def hide(self) -> None:
        """The bar, until something is shown."""
        self._bar.hide()

    def show(self, heading: str, table: str) -> None:
        self._bar.hide()
        print(f"\n{heading}\n{table}" if heading else f"\n{table}", flush=True)
        self._bar.show()

    def add(self, case: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], healthy: bool = True) -> None:
        """What was measured of a case: the case itself, and a record per contender."""
        self.cases.append({**case, "contenders": [dict(row) for row in rows]})
        if not healthy:
            self.exit_code = max(self.exit_code, 1)
        self._write()

    # ---- files

    def _try(self, kind: str, path: Path) -> None:
        """Leaves what is there as it is."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("a").close()
            if new:
                path.unlink()
        except OSError as error:
            words = f"--{kind} must be a file that can be written to, got {path}: {error.strerror}."
            print(f"{self.name}: {words}", file=sys.stderr)
            raise SystemExit(2) from None

    def _write(self) -> None:
        if not self.cases:
            return
        if self.files["json"]:
            _replace(self.files["json"], json.dumps(self.as_dict(), indent=2) + "\n")
            self._written.append(self.files["json"])
        if self.files["csv"]:
            write_csv(self.files["csv"], self.name, self.cases)
            self._written.append(self.files["csv"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "date": self._begin.isoformat(timespec="seconds"),
            "command": command_line(),
            "machine": self.machine,
            "cases": self.cases,
        }

    def _draw(self, path: Path) -> None:
        curves = plot.curves_of(self.cases)
        if not curves:
            print("\nno plot: that needs two numbers of rows or more of one contender", flush=True)
            return
        plot.draw(curves, f"megabatch bench {self.name}: {self.machine['cpu']}", path, memory_is=self._memory_is)
        self._written.append(path)


def command_line() -> str:
    """As one would type it."""
    return shlex.join(["megabatch", *sys.argv[1:]])


def write_csv(path: Path, benchmark: str, cases: Iterable[Mapping[str, Any]]) -> None:
    """A line per contender and case. A list, such as the seconds of all runs, is one cell of numbers."""
    lines = []
    for case in cases:
        about = {name: value for name, value in case.items() if name != "contenders"}
        lines += [{"benchmark": benchmark, **about, **row} for row in case["contenders"]]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value


def _replace(path: Path, text: str) -> None:
    """At once, so that no moment has half a file."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
