"""`python -m studies.page`: the tables and plots of docs/studies/batch-size.md, from the kept results.

Tables stand between `<!-- study: NAME -->` and `<!-- end -->`; a test fails if one differs from the results.
"""

import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scipy.stats import ttest_rel

from tools.tables import markdown

from .batch_size import HERE, Job, Study, best_factor, cells, scores, seed_scores, tried

PAGE = HERE.parent / "docs" / "studies" / "batch-size.md"
BLOCK = re.compile(r"(<!-- study: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BUDGETS = {"samples": "samples seen", "updates": "updates", "seconds": "seconds"}


def load(results: Path = HERE / "results" / "batch_size.jsonl", grid: Path = HERE / "batch_size.yaml") -> Study:
    return Study(grid, results, Path("build/study").resolve())


# ---- tables


def batches_table(study: Study) -> str:
    """Mean and standard deviation over seeds, and the paired test against the batch before."""
    done = scores(study.results)
    body = []
    for budget, title in BUDGETS.items():
        for dataset in study.grid["datasets"]:
            before: dict[int, float] = {}
            for cell in (cell for cell in cells(study.grid) if (cell.budget, cell.dataset) == (budget, dataset)):
                if cell.variant != "clip":
                    continue
                found = seed_scores(cell, study.grid, done)
                factor = best_factor(cell, study.grid, done)
                if len(found) == len(study.grid["seeds"]) and factor is not None:
                    job = replace(cell, factor=factor)
                    steps, rate = study.steps(job), study.rate(job)
                    row = [f"{cell.batch:,}", f"{steps:,}", f"{rate:.2g}", f"{factor:g}", spread(found)]
                    body.append([f"{dataset}, equal {title}", *row, paired(before, found)])
                before = found
    return markdown(
        ["", "batch", "steps", "best lr", "of the rule", "mean recall, %", "against the batch before"], body
    )


def rates_table(study: Study) -> str:
    """Mean recall of one seed at every learning rate, at equal samples."""
    done = scores(study.results)
    mine = [cell for cell in cells(study.grid) if (cell.budget, cell.variant) == ("samples", "clip")]
    found = {cell: tried(cell, study.grid, done) for cell in mine}
    factors = sorted({factor for by_factor in found.values() for factor in by_factor})
    body = []
    for cell, by_factor in found.items():
        if len(by_factor) < len(study.grid["factors"]):
            continue
        best = max(by_factor.values())
        texts = [percent(by_factor[factor]) if factor in by_factor else "" for factor in factors]
        bold = [f"**{text}**" if by_factor.get(f) == best else text for f, text in zip(factors, texts, strict=True)]
        body.append([f"{cell.dataset}, {cell.batch:,}", *bold])
    return markdown(["dataset, batch", *(f"{factor:g} ×" for factor in factors)], body)


def variants_table(study: Study) -> str:
    """Each beside what it varies: the same dataset, batch and seeds."""
    done = scores(study.results)
    body = []
    for cell in (cell for cell in cells(study.grid) if cell.variant != "clip"):
        baseline = replace(cell, variant=study.grid["variants"][cell.variant].get("against", "clip"))
        found, base = (seed_scores(each, study.grid, done) for each in (cell, baseline))
        if len(found) > 1 and len(base) > 1:
            names = [f"{cell.dataset}, {cell.batch:,}", cell.variant, spread(found)]
            body.append([*names, baseline.variant, spread(base), paired(base, found)])
    return markdown(["dataset, batch", "", "mean recall, %", "against", "mean recall, %", "difference"], body)


def exactness_table(study: Study) -> str:
    """The difference between methods, beside that between seeds."""
    done = {job: score for job, score in scores(study.results).items() if job.budget == "steps"}
    losses = {Job(**result["job"]): result["train_loss"] for result in study.results if "job" in result}
    methods = list(dict.fromkeys(job.method for job in done))
    body = []
    for method in methods:
        mine = {job.seed: score for job, score in done.items() if job.method == method}
        dense = {job.seed: score for job, score in done.items() if job.method == "dense"}
        apart = [abs(mine[seed] - dense[seed]) for seed in mine if seed in dense]
        same = [replace(job, method="dense") for job in done if job.method == method]
        of_loss = [abs(losses[replace(job, method=method)] - losses[job]) for job in same if job in losses]
        if len(mine) > 1 and apart:
            body.append([method, spread(mine), f"{100 * max(apart):.2f}", f"{max(of_loss):.1e}"])
    head = ["", "mean recall, % (seeds)", "largest difference to dense, same seed", "of the last training loss"]
    return markdown(head, body)


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def spread(values: dict[int, float]) -> str:
    return f"{percent(statistics.mean(values.values()))} ± {percent(statistics.stdev(values.values()))}"


def paired(before: dict[int, float], after: dict[int, float]) -> str:
    """The mean difference over seeds that both have, and the probability of one as large by chance."""
    seeds = sorted(before.keys() & after.keys())
    if len(seeds) < 2:
        return ""
    first, second = [before[seed] for seed in seeds], [after[seed] for seed in seeds]
    apart = 100 * (statistics.mean(second) - statistics.mean(first))
    probability = float(ttest_rel(first, second).pvalue)
    return f"{apart:+.1f} (p = {probability:.2g})"


TABLES: dict[str, Callable[[Study], str]] = {
    "batches": batches_table,
    "rates": rates_table,
    "variants": variants_table,
    "exactness": exactness_table,
}


def written(page: str, study: Study) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]](study)}\n{found[3]}", page)


def main(_: Sequence[str]) -> int:
    PAGE.write_text(written(PAGE.read_text(), load()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
