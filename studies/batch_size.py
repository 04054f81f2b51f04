"""Does a larger batch help? The grid of batch_size.yaml, run by `megabatch train`.

    python -m studies.batch_size calibrate   # seconds per step of every batch, on a quiet machine
    python -m studies.batch_size run         # what is left of the grid; kill it and start it again as you like
    python -m studies.batch_size status      # what there is
    python -m studies.batch_size again       # one cell once more, compared with its kept results

Every run is one line of results/batch_size.jsonl, with its command. `python -m studies.page` makes the page from them.
"""

import argparse
import functools
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from . import wordnet
from .wordnet import read_lines, write_lines

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).parent
SCORE = "val/mean_recall"  # R@1, R@5 and R@10, both ways
FURTHEST = 32  # a learning rate so many times the rule's is not tried
CHUNK = 2048
SEEDS_APART = 4.6  # the 99.5th percentile of Student's t with 4 degrees of freedom

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


# ---- what is left to do


def scores(results: Sequence[Result]) -> dict[Job, float]:
    """By job. A run that diverged found nothing."""
    found = {}
    for result in results:
        if "job" in result:
            value = float(result["figures"].get(SCORE, 0.0))  # "nan" is a string in JSON
            found[Job(**result["job"])] = value if math.isfinite(value) else 0.0
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
    """Learning rates that are to be tried next: those of the grid, then the neighbours of the best."""
    found, ratio = tried(cell, grid, done), grid["width_of_grid"]
    factors = [factor for factor in grid["factors"] if factor not in found]
    if not factors:
        best = _best(found)
        factors = [factor for factor in (best / ratio, best * ratio) if factor not in found]
    return [replace(cell, factor=each, seed=grid["search"]) for each in factors if 1 / FURTHEST <= each <= FURTHEST]


def _best(found: dict[float, float]) -> float:
    return max(found, key=lambda factor: (found[factor], -factor))


def best_factor(cell: Job, grid: Grid, done: dict[Job, float]) -> float | None:
    """Of the learning rates, once they have all been tried; of those of another variant, where the grid says so."""
    options = grid.get("variants", {}).get(cell.variant, {})
    cell = replace(cell, variant=options.get("rate_of", cell.variant))
    return None if search(cell, grid, done) else _best(tried(cell, grid, done))


def left_of(cell: Job, grid: Grid, done: dict[Job, float]) -> list[Job]:
    """The jobs of a cell that can be said now: learning rates first, then seeds of the best."""
    factor = best_factor(cell, grid, done)
    if factor is None:
        searched = "rate_of" not in grid.get("variants", {}).get(cell.variant, {})
        return search(cell, grid, done) if searched else []
    jobs = [replace(cell, factor=factor, seed=seed) for seed in grid["seeds"]]
    return [job for job in jobs if job not in done]


def seed_scores(cell: Job, grid: Grid, done: dict[Job, float]) -> dict[int, float]:
    """Of the best learning rate, by seed. The seed that chose it is not among them."""
    factor = best_factor(cell, grid, done)
    jobs = {} if factor is None else {seed: replace(cell, factor=factor, seed=seed) for seed in grid["seeds"]}
    return {seed: done[job] for seed, job in jobs.items() if job in done}


# ---- a run


class Study:
    """A grid with its results.

    Args:
        folder: For data that is made, such as WordNet's pairs.
    """

    def __init__(self, grid: Path, results: Path, folder: Path) -> None:
        self.grid: Grid = yaml.safe_load(grid.read_text())
        self.path, self.folder = results, folder
        *lines, unfinished = (results.read_text() if results.exists() else "").split("\n")
        self.results: list[Result] = [json.loads(line) for line in lines]
        if unfinished:  # of a study that was killed
            results.write_text("".join(f"{line}\n" for line in lines))
        self._making = threading.RLock()  # of data, which a model may have to be trained for

    def add(self, result: Result) -> None:
        self.results.append(result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    # ---- what there is to do

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
        if budget == "samples":
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
            for dataset in options["datasets"]
            for batch in options["batches"]
        ]

    def cells(self) -> list[Job]:
        budgets = self.grid["budgets"].items()
        jobs = [cell for budget, datasets in budgets for dataset in datasets for cell in self.batches(budget, dataset)]
        return list(dict.fromkeys([*jobs, *(cell for cell, _ in self.variants())]))

    def methods(self, done: dict[Job, float]) -> dict[str, list[Job]]:
        """The runs of one cell's best learning rate, by how the loss is computed. Empty until that rate is known."""
        options = self.grid.get("exactness")
        cell = self.cell("samples", options["dataset"], options["batch"]) if options else None
        factor = best_factor(cell, self.grid, done) if cell else None
        if options is None or cell is None or factor is None:
            return {}
        best = replace(cell, factor=factor)
        return {
            method: [replace(best, seed=seed, method=method) for seed in self.grid["seeds"]]
            for method in options["methods"]
        }

    def rules(self, dataset: str, done: dict[Job, float]) -> dict[str, list[Job]]:
        """One run at every batch, by how its learning rate follows from the best one of `rules_from`. Empty until that
        is known."""
        start, search = self.grid.get("rules_from"), self.grid["search"]
        factor = best_factor(self.cell("samples", dataset, start), self.grid, done) if start else None
        if start is None or factor is None:
            return {}
        cells = self.batches("samples", dataset)
        return {
            "square root": [replace(cell, factor=factor, seed=search) for cell in cells],
            "fixed": [replace(cell, factor=factor * math.sqrt(start / cell.batch), seed=search) for cell in cells],
        }

    def left(self) -> list[Job]:
        done = scores(self.results)
        groups = [*self.methods(done).values()]
        groups += [jobs for dataset in self.grid["datasets"] for jobs in self.rules(dataset, done).values()]
        groups += [left_of(cell, self.grid, done) for cell in self.cells()]
        return list(dict.fromkeys(job for jobs in groups for job in jobs if job not in done))

    # ---- a run

    def rate(self, job: Job) -> float:
        rule = self.grid["datasets"][job.dataset]["rate"] * math.sqrt(job.batch / 1024)
        return float(f"{rule * job.factor:.4g}")

    def data(self, job: Job) -> list[str]:
        if job.dataset == "icons":
            return ["--train-data", "icons", "--val-data", "icons", "--val-num-samples", "100000"]
        options = self.grid.get("variants", {}).get(job.variant, {})
        with self._making:
            train, held_out = wordnet.write(self.folder / "wordnet")
            if share := options.get("share"):
                train = write_share(train, share)
            if kind := options.get("negatives"):
                train = train.with_name(f"{kind}.jsonl")
                if not train.exists():
                    write_negatives(self, train, kind)
        return ["--train-data", str(train), "--val-data", str(held_out)]

    def words(self, job: Job) -> list[str]:
        """Of `megabatch train`, without the names of folders."""
        options: dict[str, Any] = {
            "--model": self.grid["model"],
            "--global-batch-size": job.batch,
            "--chunk-size": min(CHUNK, job.batch),
            "--steps": job.steps,
            "--lr": self.rate(job),
            "--warmup": self.warmup(job),
            "--seed": job.seed,
            "--val-frequency": 0,
            "--save-frequency": 0,
            "--workers": 0,
        }
        flags = self.grid.get("variants", {}).get(job.variant, {}).get("flags", [])
        dense = ["--dense-loss"] if job.method == "dense" else []
        return [*self.data(job), *(str(word) for option in options.items() for word in option), *flags, *dense]

    def warmup(self, job: Job) -> int:
        """The same share of all steps, but two where there are few: one would be at the full rate."""
        share = self.grid.get("variants", {}).get(job.variant, {}).get("warmup", 0.1)
        return max(2, math.floor(share * job.steps))

    def ranks(self, job: Job) -> int:
        return int(self.grid["exactness"]["methods"][job.method]) if job.method != "megabatch" else 1

    def run(self, job: Job, keep: Path | None = None) -> Result:
        """Trains, and says what came out. Into the folder `keep`, or one that is removed."""
        words = self.words(job)
        with tempfile.TemporaryDirectory(prefix="megabatch-study-") as temporary:
            folder = keep or Path(temporary) / "run"
            ended, seconds = train(words, folder, self.ranks(job))
            metrics = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        steps = [line for line in metrics if "train/loss" in line]
        figures = {name: value for line in metrics[-1:] for name, value in line.items() if name.startswith("val/")}
        if ended.returncode and "steps in a row taught nothing" not in ended.stderr:
            raise RuntimeError(f"study: {job} must end well, got exit code {ended.returncode}:\n{ended.stderr[-2000:]}")
        return {
            "job": asdict(job),
            "rate": self.rate(job),
            "steps": len(steps),
            "figures": figures,
            "train_loss": steps[-1]["train/loss"] if steps else None,
            "seconds": round(seconds, 1),
            "command": shlex.join(["megabatch", "train", *(word.replace(f"{self.folder}/", "") for word in words)]),
            **versions(),
        }


def train(words: Sequence[str], folder: Path, ranks: int = 1) -> tuple[subprocess.CompletedProcess[str], float]:
    """`megabatch train`, one thread per rank."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "megabatch", "train", *words]
    command += ["--logs-dir", str(folder.parent), "--name", folder.name]
    started = time.perf_counter()
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    return ended, time.perf_counter() - started


@functools.cache
def versions() -> dict[str, str]:
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return {"commit": commit, "torch": version("torch"), "date": time.strftime("%Y-%m-%d")}


def write_share(train: Path, share: float) -> Path:
    """Of the pairs, whose order is as good as random."""
    path = train.with_name(f"share-{share}.jsonl")
    if not path.exists():
        rows = read_lines(train)
        write_lines(path, rows[: round(share * len(rows))])
    return path


def write_negatives(study: Study, path: Path, kind: str) -> None:
    """Each query with a definition that is not its own: the one that a trained model finds best, or a random one."""
    import torch

    rows = read_lines(path.with_name("train.jsonl"))
    own = torch.arange(len(rows))
    if kind == "mined":
        nearest = nearest_definitions(study, rows)
        others = torch.where(nearest[:, 0] == own, nearest[:, 1], nearest[:, 0])
    else:
        torch.manual_seed(0)
        others = (own + torch.randint(1, len(rows), (len(rows),))) % len(rows)
    negatives = ([rows[other]["positive"]] for other in others.tolist())
    write_lines(path, ({**row, "negatives": each} for row, each in zip(rows, negatives, strict=True)))


def nearest_definitions(study: Study, rows: Sequence[dict[str, str]]) -> "Tensor":
    """Two for each query, as the best model of batch 1024 finds them: `similarity_topk`."""
    import torch
    from torch.nn.functional import normalize

    import megabatch as mb

    cell = study.cell("samples", "wordnet", 1024)
    factor = best_factor(cell, study.grid, scores(study.results))
    if factor is None:
        raise ValueError("study: negatives must be mined with a model of batch 1024, which is not done. Run it first.")
    folder = study.folder / "miner"
    shutil.rmtree(folder, ignore_errors=True)  # of a study that was killed
    study.run(replace(cell, factor=factor, seed=study.grid["search"]), keep=folder)
    model = mb.load(folder)

    def encoded(key: str) -> torch.Tensor:
        texts = [row[key] for row in rows]
        parts = [model.encode_text(model.tokenizer(texts[i : i + CHUNK])) for i in range(0, len(texts), CHUNK)]
        return normalize(torch.cat(parts), dim=1)

    with torch.no_grad():
        return mb.similarity_topk(encoded("query"), encoded("positive"), 2)[1]


# ---- commands


def calibrate(study: Study, rounds: int = 5, enough: float = 30) -> None:
    """The median of the training steps of short runs at each batch: one in each round, until they have `enough` seconds
    of steps. Nothing else may run meanwhile."""
    settings = [(name, batch) for name, options in study.grid["datasets"].items() for batch in options["batches"]]
    for _ in range(rounds):
        for dataset, batch in settings:
            if sum(each["step_seconds"] * each["steps"] for each in study.calibrations(dataset, batch)) > enough:
                continue
            words = study.words(Job(dataset, batch, max(4, min(100, 32768 // batch)), 1, 0))
            with tempfile.TemporaryDirectory(prefix="megabatch-study-") as folder:
                ended, _ = train(words, Path(folder) / "run")
                if ended.returncode:
                    raise RuntimeError(f"study: calibration must end well, got:\n{ended.stderr[-2000:]}")
                lines = read_lines(Path(folder) / "run" / "metrics.jsonl")
            seconds = [line["train/step_seconds"] for line in lines if "train/step_seconds" in line][1:]
            median = statistics.median(seconds)
            study.add({"calibration": [dataset, batch], "step_seconds": median, "steps": len(seconds), **versions()})
            print(f"{dataset}, batch {batch}: {median:.4f} s", flush=True)


def run_all(study: Study, processes: int) -> None:
    running: dict[Future[Result], Job] = {}
    with ThreadPoolExecutor(processes) as pool:
        while True:
            busy = set(running.values())
            jobs = [job for job in study.left() if job not in busy]
            for job in jobs[: processes - len(running)]:
                running[pool.submit(study.run, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                result = future.result()
                study.add(result)
                score = result["figures"].get(SCORE, math.nan)
                print(f"{job}: {score:.4f}, {result['seconds']:.0f} s; {len(jobs)} known to be left", flush=True)


def again(study: Study) -> int:
    """The cell that the grid names for it, at equal samples, with one of its seeds. Another CPU rounds differently, and
    training amplifies that until runs differ as seeds do: the score must be where a run with another seed would be."""
    done, cell = scores(study.results), study.cell("samples", *study.grid["again"])
    seed, factor, kept = (
        study.grid["seeds"][0],
        best_factor(cell, study.grid, done),
        seed_scores(cell, study.grid, done),
    )
    if factor is None or seed not in kept or len(kept) < 2:
        raise ValueError(f"study: {study.path} must have two seeds of {cell}, has {len(kept)}. Run it first.")
    score = study.run(replace(cell, factor=factor, seed=seed))["figures"][SCORE]
    mean, std = statistics.mean(kept.values()), statistics.stdev(kept.values())
    farthest = SEEDS_APART * std * math.sqrt(1 + 1 / len(kept))
    same = abs(score - mean) <= farthest
    print(f"{cell.dataset}, batch {cell.batch}, {cell.steps} steps, seed {seed}: mean recall {score:.4f}.")
    print(f"Kept: {kept[seed]:.4f} with this seed, {mean:.4f} ± {std:.4f} over {len(kept)} seeds.")
    print("They agree." if same else f"FAILED: more than {farthest:.4f} away from the mean.")
    return 0 if same else 1


def status(study: Study) -> None:
    done = scores(study.results)
    for cell in study.cells():
        factor, remaining = best_factor(cell, study.grid, done), len(left_of(cell, study.grid, done))
        values = list(seed_scores(cell, study.grid, done).values())
        found = f"best factor {factor}, mean {statistics.mean(values):.4f} of {len(values)}" if values else "searching"
        print(f"{cell.variant}, {cell.dataset}, batch {cell.batch}, {cell.steps} steps: {found}, {remaining} left")
    hours = sum(result["seconds"] for result in study.results if "job" in result) / 3600
    methods = [job for jobs in study.methods(done).values() for job in jobs]
    print(
        f"methods: {sum(job not in done for job in methods)} of {len(methods)} left. {hours:.1f} hours of runs so far."
    )


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m studies.batch_size", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("calibrate", "run", "status", "again"))
    parser.add_argument("--grid", type=Path, default=HERE / "batch_size.yaml", help="default: %(default)s")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "batch_size.jsonl", help="default: %(default)s"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/study"), help="for data (default: %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="runs at a time (default: %(default)s)"
    )
    options = parser.parse_args(words)
    study = Study(options.grid, options.results, options.folder.resolve())
    if options.action == "calibrate":
        calibrate(study)
    elif options.action == "run":
        run_all(study, options.processes)
    elif options.action == "status":
        status(study)
    else:
        return again(study)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
