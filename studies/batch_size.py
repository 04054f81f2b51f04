"""Does a larger batch help? The grid of batch_size.yaml, run by `megabatch train`.

    python -m studies.batch_size calibrate   # seconds per step of every batch, on a quiet machine
    python -m studies.batch_size run         # what is left of the grid; end it and start it again as you like
    python -m studies.batch_size status      # what there is
    python -m studies.batch_size again       # one cell once more, compared with its kept results

Every run is one line of results/batch_size.jsonl, with its command. `python -m studies.page` makes the page from them.
"""

import argparse
import fcntl
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from scipy.stats import t as students_t

from . import runs
from .runs import FACTS, Runner
from .study import Job, Study, best_factor, left_of, score_of, scores, seed_scores
from .wordnet import read_lines

HERE = Path(__file__).parent
GRID, RESULTS = HERE / "batch_size.yaml", HERE / "results" / "batch_size.jsonl"


def calibrate(runner: Runner, rounds: int = 5, enough: float = 30) -> None:
    """The median of the training steps of short runs at each batch: one in each round, until they have `enough` seconds
    of steps. Nothing else may run meanwhile."""
    study = runner.study
    if all(study.calibrations(dataset, batch) for dataset, batch in study.settings()):
        raise ValueError(
            f"study: {study.path} is calibrated. Other seconds would make other steps, and kept runs of equal seconds "
            "would no longer count. Take those lines and the calibrations out of it first."
        )
    for _ in range(rounds):
        for dataset, batch in study.settings():
            if sum(each["step_seconds"] * each["steps"] for each in study.calibrations(dataset, batch)) > enough:
                continue
            with tempfile.TemporaryDirectory(prefix="megabatch-study-") as folder:
                kept = Path(folder) / "run"
                result = runner.run(Job(dataset, batch, max(4, min(100, 32768 // batch)), 1, 0), keep=kept)
                lines = read_lines(kept / "metrics.jsonl")
            seconds = [line["train/step_seconds"] for line in lines if "train/step_seconds" in line][1:]
            median = statistics.median(seconds)
            made = {name: result[name] for name in ("command", *FACTS, "date")}
            study.add({"calibration": [dataset, batch], "step_seconds": median, "steps": len(seconds), **made})
            print(f"{dataset}, batch {batch}: {median:.4f} s", flush=True)


def run_all(runner: Runner, processes: int) -> None:
    """An error ends it when the runs beside it are done, and kept."""
    study = runner.study
    running: dict[Future[None], Job] = {}

    def run(job: Job) -> None:
        result = runner.run(job)
        study.add(result)
        print(f"{job}: {score_of(result):.4f}, {result['seconds']:.0f} s", flush=True)

    with ThreadPoolExecutor(processes) as pool:
        while True:
            jobs = [job for job in study.left() if job not in running.values()]
            running |= {pool.submit(run, job): job for job in jobs[: processes - len(running)]}
            if not running:
                return
            ended: set[Future[None]] = set()
            while not ended:  # a signal that comes just before the main thread waits is handled when it wakes up
                ended = wait(running, timeout=1, return_when=FIRST_COMPLETED).done
            for future in ended:
                running.pop(future)
                future.result()


def again(runner: Runner, processes: int) -> int:
    """The cell that the grid names for it, at equal samples, with all of its seeds. Another CPU rounds differently, and
    training may amplify that until runs differ as seeds do: the mean must be where that of other seeds would be."""
    study = runner.study
    done, cell = scores(study.results), study.cell("samples", *study.grid["again"])
    factor, kept = best_factor(cell, study.grid, done), seed_scores(cell, study.grid, done)
    if factor is None or not kept:
        raise ValueError(f"study: {study.path} must have all seeds of {cell}, and has not. Run it first.")
    with ThreadPoolExecutor(processes) as pool:
        results = pool.map(lambda seed: runner.run(replace(cell, factor=factor, seed=seed)), kept)
        found = dict(zip(kept, map(score_of, results), strict=True))
    print(f"{cell.dataset}, batch {cell.batch}, {cell.steps} steps: mean recall")
    for seed in kept:
        print(f"seed {seed}: {found[seed]:.6f}, kept {kept[seed]:.6f}")
    means = [statistics.mean(values.values()) for values in (found, kept)]
    deviations, count = [statistics.stdev(values.values()) for values in (found, kept)], len(kept)
    farthest = float(students_t.ppf(0.995, 2 * (count - 1))) * math.hypot(*deviations) / math.sqrt(count)
    same = abs(means[0] - means[1]) <= farthest
    print(f"mean: {means[0]:.4f} ± {deviations[0]:.4f}, kept {means[1]:.4f} ± {deviations[1]:.4f}")
    print("They agree." if same else f"FAILED: the means must be within {farthest:.4f} of each other.")
    return 0 if same else 1


def status(study: Study) -> None:
    done = scores(study.results)
    print("Mean recall, in %, of all seeds at the best learning rate, which is a factor times the square-root rule.")
    for cell in study.cells():
        factor, remaining = best_factor(cell, study.grid, done), len(left_of(cell, study.grid, done))
        values = list(seed_scores(cell, study.grid, done).values())
        found = f"{100 * statistics.mean(values):.1f}, factor {factor:g}" if values else f"runs left: {remaining}"
        if not values and not remaining:
            found = f"waits for the learning rate of {study.options(cell.variant)['rate_of']}"
        print(f"{cell.variant}, {cell.dataset}, batch {cell.batch}, {cell.steps} steps: {found}")
    hours = sum(result["seconds"] for result in study.results if "job" in result) / 3600
    print(f"{len(study.left())} runs are known to be left; {hours:.1f} hours of runs so far.")


def alone(results: Path) -> None:
    """No other process adds to these results, and what this one has started ends with it, unless it is SIGKILLed."""

    def end(*_: object) -> None:
        runs.starting.acquire()  # and never released: no run starts any more
        for process, folder in list(runs.running.items()):
            process.kill()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    results.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(results, os.O_RDWR | os.O_CREAT)  # until this process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"study: {results} is in use by another study. Wait for it or end it.") from None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m studies.batch_size", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("calibrate", "run", "status", "again"))
    parser.add_argument("--grid", type=Path, default=GRID, help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("build/study"), help="for data (default: %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="runs at a time (default: %(default)s)"
    )
    options = parser.parse_args(words)
    if not options.grid.is_file():
        parser.error(f"--grid must be a YAML file, got {options.grid}, which is not there. See {GRID.name}.")
    if options.action in ("status", "again") and not options.results.is_file():
        parser.error(
            f"--results must be a file of kept runs, got {options.results}, which is not there. Run them first."
        )
    if options.action in ("calibrate", "run"):
        alone(options.results)
    study = Study(options.grid, options.results)
    runner = Runner(study, options.folder.resolve())
    if options.action == "calibrate":
        calibrate(runner)
    elif options.action == "run":
        run_all(runner, options.processes)
    elif options.action == "status":
        status(study)
    else:
        return again(runner, options.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
