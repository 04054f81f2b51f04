"""What a run has left in its folder. Files that are cut off, damaged or older are read as far as they go, and `notes`
says what is missing."""

import json
import logging
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LOGGER = logging.getLogger("megabatch")
Numbers = NDArray[np.float64]
AXES = ("steps", "samples", "time")
LARGEST_STEP = 2**53
LONGEST_TEXT = 500  # characters of a setting or of a name
NAMED = 5  # samples of a reason, and steps, that are listed
LOOK = "Look in the --logs-dir of train."


class Column(NamedTuple):
    """A metric: its values, by step, in the order of steps."""

    steps: Numbers
    values: Numbers


@dataclass
class Run:
    """Attributes:
    name: That of the folder, with as much of the path before it as is needed to distinguish it from other runs.
    settings: By the name of the flag; empty where they were not recorded.
    skipped: How many samples were skipped, by reason; `skipped_names` has some of them.
    nonfinite: The first steps without a finite loss and gradient.
    """

    folder: Path
    name: str
    columns: dict[str, Column]
    settings: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_names: dict[str, list[str]] = field(default_factory=dict)
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def last(self, metric: str) -> float | None:
        """The last value, None where there is none."""
        return float(self.columns[metric].values[-1]) if metric in self.columns else None

    @cached_property
    def clock(self) -> Column | None:
        """Seconds of training until the end of each step, without evaluations. None where some are not known."""
        column = self.of_every_step("train/step_seconds")
        return None if column is None else Column(column.steps, np.nancumsum(finite(column.values)))

    def of_every_step(self, metric: str) -> Column | None:
        """None where steps lack it."""
        column, losses = self.columns.get(metric), self.columns.get("train/loss")
        whole = column is not None and (losses is None or bool(np.isin(losses.steps, column.steps).all()))
        return column if whole else None

    @property
    def seconds(self) -> float | None:
        """Of training, None where they were not recorded."""
        return None if self.clock is None else float(self.clock.values[-1])

    def axes(self, steps: Numbers, unit: float) -> dict[str, Numbers]:
        """Where these steps are on each of AXES; time in units of so many seconds."""
        samples, time = _at(self.of_every_step("train/samples"), steps), _at(self.clock, steps) / unit
        return {"steps": steps, "samples": samples, "time": time}


def finite(values: Numbers) -> Numbers:
    """NaN for what is not."""
    return np.where(np.isfinite(values), values, np.nan)


def median(values: Numbers) -> float | None:
    """Of those that are finite; None where there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _at(column: Column | None, steps: Numbers) -> Numbers:
    """The last value up to each of these steps."""
    if column is None:
        return np.full(len(steps), np.nan)
    index = np.searchsorted(column.steps, steps, side="right") - 1
    return np.where(index < 0, 0.0, column.values[index])


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Those in these folders. What is there without metrics, as a glob finds it, is left out with a warning.

    ValueError where one is not there or given twice, or none is left.
    """
    places: list[Path] = []
    for folder in folders:
        place = folder.resolve()
        if not place.exists():
            raise ValueError(f"report: RUN must be the folder of a run, got {folder}, which is not there. {LOOK}")
        if place in places:
            raise ValueError(f"report: every RUN must be given once, got {folder} several times. Leave one.")
        if (place / "metrics.jsonl").is_file():
            places.append(place)
        else:
            reason = "it has no metrics.jsonl, as of a run that never began"
            if any(place.glob("*/metrics.jsonl")):
                reason = f"it holds runs: give {folder}/*"
            _LOGGER.warning("report: %s is left out: %s", folder, reason)
    if not places:
        given = ", ".join(map(str, folders))
        raise ValueError(f"report: RUN must be a folder with a metrics.jsonl, got {given}, without. {LOOK}")
    return [read_run(place, name) for place, name in zip(places, _names(places), strict=True)]


def read_run(folder: Path, name: str) -> Run:
    unread: Counter[str] = Counter()
    found = list(_json_lines(folder / "metrics.jsonl", unread))
    lines = [line for line in found if type(line.get("step")) is int and 0 <= line["step"] < LARGEST_STEP]
    unread["metrics.jsonl"] += len(found) - len(lines)
    columns, not_numbers, long_names = _columns(lines)
    run = Run(folder, name, columns)
    for entry in _json_lines(folder / "skipped.jsonl", unread):
        reason = shortened(text_of(entry.get("reason")))
        run.skipped[reason] += 1
        if run.skipped[reason] <= NAMED:
            run.skipped_names.setdefault(reason, []).append(shortened(text_of(entry.get("name"))))
    run.nonfinite = list(islice(_json_lines(folder / "nonfinite.jsonl", unread), NAMED))
    run.notes += [f"{file}: {count} lines could not be read and are left out." for file, count in (+unread).items()]
    run.notes += [f"metrics.jsonl: {not_numbers} values are not numbers and are left out."] * (not_numbers > 0)
    run.notes += [f"metrics.jsonl: {long_names} values are left out: their names are too long."] * (long_names > 0)
    run.notes += ["metrics.jsonl has no step yet."] * (not columns)
    for metric, axis in (("train/samples", "samples"), ("train/step_seconds", "time")):
        if columns and run.of_every_step(metric) is None:
            run.notes.append(f"{metric} was not recorded at every step: nothing is drawn over {axis}.")
    run.settings = _read(run, folder / "params.yaml", _settings)
    run.environment = _read(run, folder / "environment.json", lambda text: _flat(json.loads(text)))
    return run


def _names(places: Sequence[Path]) -> list[str]:
    names = [place.name for place in places]
    for length in range(2, max(len(place.parts) for place in places) + 1):
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = [
            "/".join(place.parts[-length:]) if name in twice else name
            for name, place in zip(names, places, strict=True)
        ]
    return names


def _json_lines(path: Path, unread: Counter[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file. Lines that are none are counted in `unread`; a last line without an end is being written,
    or is what a killed run left: it counts only if it is whole."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            elif line.strip() and line.endswith(b"\n"):
                unread[path.name] += 1


def _columns(lines: Iterable[dict[str, Any]]) -> tuple[dict[str, Column], int, int]:
    """Every metric, how many values are no numbers, and how many have a name that is too long."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    not_numbers = long_names = 0
    for line in lines:
        step = line.pop("step")
        for name, value in line.items():
            if type(value) is not float:
                try:
                    value = float(value)
                except (TypeError, ValueError):
                    not_numbers += 1
                    continue
                except OverflowError:
                    value = np.inf
            if name not in found:
                if len(name) > LONGEST_TEXT:
                    long_names += 1
                    continue
                found[name] = ([], [])
            steps, values = found[name]
            steps.append(step)
            values.append(value)
    return {name: _in_order(*column) for name, column in found.items()}, not_numbers, long_names


def _in_order(steps: Sequence[int], values: Sequence[float]) -> Column:
    """By step. Of several values for one step the last counts."""
    unique, from_end = np.unique(np.array(steps, dtype=np.float64)[::-1], return_index=True)
    return Column(unique, np.array(values, dtype=np.float64)[::-1][from_end])


def _read(run: Run, path: Path, read: Callable[[str], dict[str, str]]) -> dict[str, str]:
    try:
        return read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        run.notes.append(f"There is no {path.name}.")
    except (OSError, ValueError, RecursionError) as error:
        run.notes.append(f"{path.name} could not be read: {shortened(str(error).strip())}.")
    return {}


def _settings(text: str) -> dict[str, str]:
    import yaml

    try:
        values = yaml.safe_load(text)
    except Exception as error:  # such as a KeyError for "!!bool x"
        raise ValueError(str(error)) from None
    return _flat(values)


def _flat(values: Any) -> dict[str, str]:
    """What is in sections beside what is in none."""
    if not isinstance(values, dict):
        raise ValueError("it must be made of names and values")
    flat = {}
    for name, value in values.items():
        flat.update({str(key): text_of(each) for key, each in value.items()} if isinstance(value, dict) else {})
        flat.update({} if isinstance(value, dict) else {str(name): text_of(value)})
    return flat


def text_of(value: Any) -> str:
    """Of any value; one that is made of many may refer to itself."""
    return str(value) if value is None or isinstance(value, (str, int, float)) else reprlib.repr(value)


def shortened(text: str) -> str:
    """For the page. Texts that differ mostly do so at their ends."""
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]}…{text[-half:]}"
