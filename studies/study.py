"""What there is to run: a grid, the results so far, and what is left of it. Nothing here runs or writes, but for `add`.

A cell is a setting that is compared. Its learning rates are tried with one seed, and the best is run with the others.
"""

import json
import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

SCORE = "val/mean_recall"  # R@1, R@5 and R@10, both ways
FURTHEST = 32  # a learning rate more times the rule's, or less than one such part of it, is not tried

Grid = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A run. Results are found by these values, so budgets that give a batch the same number of steps share them."""

    dataset: str
    batch: int
    steps: int
    factor: float
    seed: int
    variant: str = "clip"
    method: str = "megabatch"


def by_job(results: Sequence[Result]) -> dict[Job, Result]:
    return {Job(**result["job"]): result for result in results if "job" in result}


def scores(results: Sequence[Result]) -> dict[Job, float]:
    return {job: score_of(result) for job, result in by_job(results).items()}


def score_of(result: Result, direction: str = "") -> float:
    """Of both directions, or of one, such as "query_to_text". 0 for a run that diverged."""
    if not result["figures"]:
        return 0.0
    names = [f"val/{direction}_R@{k}" for k in (1, 5, 10)] if direction else [SCORE]
    value = statistics.mean(float(result["figures"][name]) for name in names)  # "nan" is a string in JSON
    return value if math.isfinite(value) else 0.0


def options_of(variant: str, grid: Grid) -> dict[str, Any]:
    """Empty for the loss that all are compared with."""
    found: dict[str, Any] = grid.get("variants", {}).get(variant, {})
    return found


def tried(cell: Job, grid: Grid, done: dict[Job, float]) -> dict[float, float]:
    """Scores of the learning rates of a cell's search, by factor. A rule may have had others."""
    found = {
        job.factor: score
        for job, score in done.items()
        if replace(job, factor=0, seed=0) == cell and job.seed == grid["search"]
    }
    away = {factor: math.log(factor / grid["factors"][0], grid["width_of_grid"]) for factor in found}
    return {factor: score for factor, score in sorted(found.items()) if abs(away[factor] - round(away[factor])) < 1e-6}


def search(cell: Job, grid: Grid, done: dict[Job, float]) -> list[Job]:
    """Learning rates that are to be tried next: those of the grid, then the neighbours of the best, and of an end
    towards which scores rise again. With less than half of the best it is no peak: nothing was learned there."""
    found, ratio = tried(cell, grid, done), grid["width_of_grid"]
    factors = {factor for factor in grid["factors"] if factor not in found}
    if not factors:
        best, order = _best(found), list(found)
        ends = [pair for pair in (order[:2], order[:-3:-1]) if len(pair) == 2]
        peaks = {best, *(end for end, inner in ends if found[end] > max(found[inner], found[best] / 2))}
        factors = {factor for peak in peaks for factor in (peak / ratio, peak * ratio)} - found.keys()
    allowed = sorted(each for each in factors if 1 / FURTHEST <= each <= FURTHEST)
    return [replace(cell, factor=each, seed=grid["search"]) for each in allowed]


def _best(found: dict[float, float]) -> float:
    return max(found, key=lambda factor: (found[factor], -factor))


def best_factor(cell: Job, grid: Grid, done: dict[Job, float]) -> float | None:
    """Of the learning rates, once they have all been tried; of those of another variant, where the grid says so."""
    cell = replace(cell, variant=options_of(cell.variant, grid).get("rate_of", cell.variant))
    return None if search(cell, grid, done) else _best(tried(cell, grid, done))


def left_of(cell: Job, grid: Grid, done: dict[Job, float]) -> list[Job]:
    """The jobs of a cell that can be said now: learning rates first, then seeds of the best."""
    factor = best_factor(cell, grid, done)
    if factor is None:
        return [] if "rate_of" in options_of(cell.variant, grid) else search(cell, grid, done)
    jobs = [replace(cell, factor=factor, seed=seed) for seed in grid["seeds"]]
    return [job for job in jobs if job not in done]


def seed_scores(cell: Job, grid: Grid, done: dict[Job, float]) -> dict[int, float]:
    """Of the best learning rate, by seed; none until all are done. The seed that chose it is not among them."""
    factor = best_factor(cell, grid, done)
    if factor is None or left_of(cell, grid, done):
        return {}
    return {seed: done[replace(cell, factor=factor, seed=seed)] for seed in grid["seeds"]}


class Study:
    """A grid with its results."""

    def __init__(self, grid: Path, results: Path) -> None:
        self.grid: Grid = yaml.safe_load(grid.read_text())
        self.path = results
        text = results.read_text() if results.exists() else ""
        self.results: list[Result] = [json.loads(line) for line in text.split("\n")[:-1]]
        self._adding = threading.Lock()

    def add(self, result: Result) -> None:
        """To the file, behind its last whole line: a study that was killed may have left a part of one."""
        with self._adding:
            self.results.append(result)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                file.write(json.dumps(result).encode() + b"\n")

    def options(self, variant: str) -> dict[str, Any]:
        return options_of(variant, self.grid)

    def method(self, job: Job) -> dict[str, Any]:
        """Ranks and flags, by which the loss is computed in another way."""
        found: dict[str, Any] = self.grid.get("exactness", {}).get("methods", {}).get(job.method, {})
        return found

    def settings(self) -> list[tuple[str, int]]:
        """Every dataset with each of its batches."""
        return [(name, batch) for name, options in self.grid["datasets"].items() for batch in options["batches"]]

    def calibrations(self, dataset: str, batch: int) -> list[Result]:
        return [result for result in self.results if result.get("calibration") == [dataset, batch]]

    def step_seconds(self, dataset: str, batch: int) -> float:
        found = [float(result["step_seconds"]) for result in self.calibrations(dataset, batch)]
        if not found:
            raise ValueError(f"study: {dataset} at batch {batch} must be calibrated first, and is not. Run calibrate.")
        return statistics.median(found)

    def cell(self, budget: str, dataset: str, batch: int, variant: str = "clip") -> Job:
        """A setting that is compared, whatever its learning rate and seed: those are 0."""
        amount = self.grid["budgets"][budget][dataset]
        if budget.endswith("samples"):
            amount /= batch
        elif budget == "seconds":
            amount /= self.step_seconds(dataset, batch)
        return Job(dataset, batch, max(1, round(amount)), 0, 0, variant)

    def batches(self, budget: str, dataset: str) -> list[Job]:
        """Cells in which only the batch differs, and what follows from the budget."""
        cut = self.grid.get("cut", [])
        sizes = self.grid["datasets"][dataset]["batches"]
        return [self.cell(budget, dataset, batch) for batch in sizes if [budget, dataset, batch] not in cut]

    def variants(self) -> list[tuple[Job, Job]]:
        """Each cell, and the one that it is compared with."""
        return [
            (self.cell("samples", dataset, batch, variant), self.cell("samples", dataset, batch, against))
            for variant, options in self.grid.get("variants", {}).items()
            for against in (options.get("against", "clip"),)
            for dataset, batches in options["batches"].items()
            for batch in batches
        ]

    def cells(self) -> list[Job]:
        budgets = self.grid["budgets"].items()
        jobs = [cell for budget, datasets in budgets for dataset in datasets for cell in self.batches(budget, dataset)]
        return list(dict.fromkeys([*jobs, *(cell for cell, _ in self.variants())]))

    def methods(self, done: dict[Job, float]) -> dict[str, list[Job]]:
        """The runs of one cell's best learning rate, by how the loss is computed. Empty until that rate is known."""
        if (options := self.grid.get("exactness")) is None:
            return {}
        cell = self.cell("samples", options["dataset"], options["batch"])
        factor = best_factor(cell, self.grid, done)
        if factor is None:
            return {}
        return {
            method: [replace(cell, factor=factor, seed=seed, method=method) for seed in self.grid["seeds"]]
            for method in options["methods"]
        }

    def rules(self, dataset: str, done: dict[Job, float]) -> dict[str, list[Job]]:
        """One run at every batch, by how its learning rate follows from the best one of `rules_from`. Empty until that
        is known."""
        if (start := self.grid.get("rules_from")) is None:
            return {}
        factor = best_factor(self.cell("samples", dataset, start), self.grid, done)
        if factor is None:
            return {}
        cells, search = self.batches("samples", dataset), self.grid["search"]
        return {
            "square root": [replace(cell, factor=factor, seed=search) for cell in cells],
            "fixed": [replace(cell, factor=factor * math.sqrt(start / cell.batch), seed=search) for cell in cells],
        }

    def untrained(self, dataset: str) -> list[Job]:
        """A model with every seed, after steps at a learning rate of 0: where training starts."""
        batch = self.grid["datasets"][dataset]["batches"][0]
        return [Job(dataset, batch, self.grid["untrained"], 0, seed) for seed in self.grid["seeds"]]

    def left(self) -> list[Job]:
        done = scores(self.results)
        groups = [*self.methods(done).values()]
        groups += [jobs for dataset in self.grid["datasets"] for jobs in self.rules(dataset, done).values()]
        groups += [self.untrained(dataset) for dataset in self.grid["datasets"] if "untrained" in self.grid]
        groups += [left_of(cell, self.grid, done) for cell in self.cells()]
        return list(dict.fromkeys(job for jobs in groups for job in jobs if job not in done))

    def rate(self, job: Job) -> float:
        rule = self.grid["datasets"][job.dataset]["rate"] * math.sqrt(job.batch / 1024)
        return float(f"{rule * job.factor:.4g}")
