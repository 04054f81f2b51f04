"""`python -m studies.page`: the tables and plots of docs/studies/batch-size.md, from the kept results.

They stand between `<!-- study: NAME -->` and `<!-- end -->`. Plots are drawn by the code of `megabatch report`, as
build/study/batch-size.html and, by Chromium, as one SVG each. A test fails if tables or plots are of other results.
"""

import argparse
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from scipy.stats import ttest_rel

from megabatch.report.figures import Figure, with_error_bars
from megabatch.report.page import Section, render
from tools.browser import Browser
from tools.tables import markdown

from .batch_size import GRID, HERE, RESULTS
from .study import Job, Study, best_factor, by_job, score_of, scores, seed_scores, tried

PAGE = HERE.parent / "docs" / "studies" / "batch-size.md"
BLOCK = re.compile(r"(<!-- study: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BUDGETS = {
    "samples": "samples seen",
    "more-samples": "samples seen",
    "updates": "updates",
    "more-updates": "updates",
    "most-updates": "updates",
    "seconds": "seconds of training",
}
VARIANTS = {
    "siglip": "CLIP and SigLIP",
    "duplicates-kept": "Duplicates masked or not",
    "eighth": "All pairs and an eighth of them",
    "scale-50": "Logit scales that start at 14.3 and at 50",
    "long-warm-up": "Warm-up of a tenth and of a quarter",
}
NAMES = {
    "clip": "CLIP",
    "siglip": "SigLIP",
    "duplicates-kept": "duplicates not masked",
    "eighth": "an eighth",
    "scale-50": "scale starts at 50",
    "long-warm-up": "warm-up over a quarter",
}
# Each is compared with the one before.
NEGATIVES = {
    "clip": "CLIP",
    "one-direction": "one direction",
    "random-negatives": "+ random",
    "mined-negatives": "+ mined",
}
DIRECTIONS = {"query_to_text": "words → definition", "text_to_query": "definition → words"}
BATCH, RECALL = "batch", "mean recall, %"
NOT_YET = "Not run yet."

Points = list[tuple[float | str, float, float | None]]  # x, mean, standard deviation


def load() -> Study:
    return Study(GRID, RESULTS)


def points(cells: Sequence[Job], study: Study, x: Callable[[Job], int] = lambda cell: cell.batch) -> Points:
    """Of the cells that are done, in percent."""
    done = scores(study.results)
    found = [(cell, list(seed_scores(cell, study.grid, done).values())) for cell in cells]
    return [
        (x(cell), 100 * statistics.mean(values), 100 * statistics.stdev(values)) for cell, values in found if values
    ]


def plot(title: str, series: dict[str, Points], x: str = BATCH, note: str = "") -> Figure:
    return with_error_bars(title, {name: some for name, some in series.items() if some}, x=x, y=RECALL, note=note)


# ---- plots


def budget_plot(budget: str) -> Callable[[Study], Figure]:
    def figure(study: Study) -> Figure:
        datasets = study.grid["budgets"].get(budget, {})
        title = f"Equal {BUDGETS[budget]}: {', '.join(f'{amount:,} ({name})' for name, amount in datasets.items())}"
        return plot(title, {dataset: points(study.batches(budget, dataset), study) for dataset in datasets})

    return figure


def steps_plot(dataset: str) -> Callable[[Study], Figure]:
    """The cells of all budgets, so that updates and batch can be told apart."""

    def figure(study: Study) -> Figure:
        cells = [cell for cell in study.cells() if (cell.dataset, cell.variant) == (dataset, "clip")]
        series = {
            f"batch {batch:,}": points([cell for cell in cells if cell.batch == batch], study, lambda cell: cell.steps)
            for batch in study.grid["datasets"][dataset]["batches"]
        }
        return plot(f"Updates, {dataset}, all budgets", series, "updates")

    return figure


def rates_plot(dataset: str) -> Callable[[Study], Figure]:
    """One run for each rate."""

    def figure(study: Study) -> Figure:
        done = scores(study.results)
        series = {
            f"batch {cell.batch:,}": [
                (factor, 100 * score, None) for factor, score in tried(cell, study.grid, done).items()
            ]
            for cell in study.batches("samples", dataset)
        }
        title = f"Learning rates, {dataset}, equal samples seen"
        note = f"One run for each point, with seed {study.grid['search']}."
        return plot(title, series, "learning rate / square-root rule", note)

    return figure


def rules_plot(dataset: str) -> Callable[[Study], Figure]:
    """The best rate of each batch, beside rules that start from the best rate of one batch."""

    def figure(study: Study) -> Figure:
        done, start = scores(study.results), f"{study.grid['rules_from']:,}"
        series = {"best rate of each batch": points(study.batches("samples", dataset), study)}
        names = {"square root": f"square-root rule from {start}", "fixed": f"rate of {start} for all"}
        for rule, jobs in study.rules(dataset, done).items():
            series[names[rule]] = [(job.batch, 100 * done[job], None) for job in jobs if job in done]
        first, *_, last = study.grid["seeds"]
        note = f"The best rate has seeds {first} to {last}, a rule one run with seed {study.grid['search']}."
        return plot(f"Rules for the learning rate, {dataset}, equal samples seen", series, note=note)

    return figure


def variants_plot(title: str, variant: str) -> Callable[[Study], Figure]:
    def figure(study: Study) -> Figure:
        series: dict[str, Points] = {}
        for pair in study.variants():
            both = points([*reversed(pair)], study)
            if pair[0].variant == variant and len(both) == 2:
                for each, point in zip(reversed(pair), both, strict=True):
                    series.setdefault(f"{each.dataset}, {NAMES[each.variant]}", []).append(point)
        return plot(f"{title}, equal samples seen", series)

    return figure


def methods_plot(study: Study) -> Figure:
    done = scores(study.results)
    series: dict[str, Points] = {}
    for method, jobs in study.methods(done).items():
        if all(job in done for job in jobs):
            for job in jobs:
                series.setdefault(f"seed {job.seed}", []).append((method, 100 * done[job], None))
    return plot("One setting, the loss computed in several ways", series, x="")


def negatives_plot(study: Study) -> Figure:
    """Directions apart: a loss of one direction trains the other one less."""
    series: dict[str, Points] = {}
    for batch, variant, values in negatives(study):
        for direction, name in DIRECTIONS.items():
            some = [100 * value for value in values[direction].values()]
            series.setdefault(f"{batch:,}, {name}", []).append(
                (NEGATIVES[variant], statistics.mean(some), statistics.stdev(some))
            )
    return plot("One direction, and negatives, by direction of retrieval", series, x="")


def negatives(study: Study) -> Iterator[tuple[int, str, dict[str, dict[int, float]]]]:
    """Batch and variant of what was done, with the recall by direction and seed."""
    done, results = scores(study.results), by_job(study.results)
    for batch in study.options("one-direction").get("batches", {}).get("wordnet", []):
        for variant in NEGATIVES:
            cell = study.cell("samples", "wordnet", batch, variant)
            factor = best_factor(cell, study.grid, done)
            if factor is not None and (seeds := seed_scores(cell, study.grid, done)):
                runs = {seed: results[replace(cell, factor=factor, seed=seed)] for seed in seeds}
                apart = {
                    direction: {seed: score_of(run, direction) for seed, run in runs.items()}
                    for direction in DIRECTIONS
                }
                yield batch, variant, apart


DATASETS = ("wordnet", "icons")
PLOTS: dict[str, Callable[[Study], Figure]] = {
    **{budget: budget_plot(budget) for budget in BUDGETS},
    **{f"steps-{dataset}": steps_plot(dataset) for dataset in DATASETS},
    **{f"rates-{dataset}": rates_plot(dataset) for dataset in DATASETS},
    **{f"rules-{dataset}": rules_plot(dataset) for dataset in DATASETS},
    **{variant: variants_plot(title, variant) for variant, title in VARIANTS.items()},
    "negatives": negatives_plot,
    "exactness": methods_plot,
}


def description(figure: Figure) -> str:
    """Its values, for readers who cannot see it. A test compares them with the kept results."""
    lines = []
    for trace in figure.traces:
        deviations = trace.get("customdata") or [None] * len(trace["x"])
        texts = [
            f"{x if isinstance(x, str) else f'{x:,.10g}'}: {y:.2f}"
            + ("" if deviation is None else f" ± {deviation:.2f}")
            for x, y, deviation in zip(trace["x"], trace["y"], deviations, strict=True)
        ]
        lines.append(f"{trace['name']}: " + ", ".join(texts))
    return ". ".join(lines)


# ---- tables


def batches_table(budget: str) -> Callable[[Study], str]:
    """Mean and standard deviation over seeds, and the paired test against the batch before."""

    def table(study: Study) -> str:
        done = scores(study.results)
        body = []
        for dataset in study.grid["budgets"].get(budget, {}):
            before: dict[int, float] = {}
            for cell in study.batches(budget, dataset):
                found, factor = seed_scores(cell, study.grid, done), best_factor(cell, study.grid, done)
                if factor is not None and found:
                    rate = study.rate(replace(cell, factor=factor))
                    row = [f"{cell.batch:,}", f"{cell.steps:,}", f"{rate:.2g}", f"{factor:g}", spread(found)]
                    body.append([dataset, *row, paired(before, found)])
                before = found
        return table_of(["", BATCH, "steps", "best lr", "× rule", RECALL, "change from the smaller batch"], body)

    return table


def variants_table(variant: str) -> Callable[[Study], str]:
    """Beside what it varies: the same dataset, batch and seeds."""

    def table(study: Study) -> str:
        done = scores(study.results)
        head: list[str] = []
        body = []
        for cell, against in study.variants():
            found, base = (seed_scores(each, study.grid, done) for each in (cell, against))
            if cell.variant == variant and found and base:
                head = ["", BATCH, "steps", f"{NAMES[against.variant]}, %", f"{NAMES[variant]}, %", "difference"]
                row = [cell.dataset, f"{cell.batch:,}", f"{cell.steps:,}"]
                body.append([*row, spread(base), spread(found), paired(base, found)])
        return table_of(head, body)

    return table


def negatives_table(study: Study) -> str:
    """Each beside the one before at the same batch."""
    body = []
    before: dict[str, dict[int, float]] = {}
    for batch, variant, values in negatives(study):
        if variant == "clip":
            before = {direction: {} for direction in DIRECTIONS}
        row = [f"{batch:,}", NEGATIVES[variant]]
        for direction, found in values.items():
            row += [spread(found), paired(before[direction], found)]
        body.append(row)
        before = values
    head = [BATCH, "loss and negatives"]
    for name in DIRECTIONS.values():
        head += [f"{name}, %", "change"]
    return table_of(head, body)


def methods_table(study: Study) -> str:
    """The difference between methods, beside that between seeds."""
    done = scores(study.results)
    losses = {job: result["train_loss"] for job, result in by_job(study.results).items()}
    methods = study.methods(done)
    body = []
    for method, jobs in methods.items():
        pairs = [pair for pair in zip(jobs, methods["dense"], strict=True) if all(job in done for job in pair)]
        if len(pairs) == len(jobs):
            apart = 100 * max(abs(done[job] - done[dense]) for job, dense in pairs)
            of_loss = max(abs(losses[job] / losses[dense] - 1) for job, dense in pairs)
            scores_of_seeds = {job.seed: done[job] for job, _ in pairs}
            body.append([method, spread(scores_of_seeds), f"{apart:.2f}", f"{of_loss:.1e}"])
    head = ["", RECALL, "largest difference to dense, same seed", "of the last training loss, relative"]
    return table_of(head, body)


def table_of(head: list[str], body: list[list[str]]) -> str:
    return markdown(head, body) if body else ""


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
    apart = round(100 * (statistics.mean(second) - statistics.mean(first)), 1) + 0.0  # -0.0 is 0.0
    if len({one - other for one, other in zip(first, second, strict=True)}) == 1:
        return f"{apart:+.1f}"  # there is no test of equal differences
    return f"{apart:+.1f} (p = {float(ttest_rel(first, second).pvalue):.2g})"


TABLES: dict[str, Callable[[Study], str]] = {
    **{budget: batches_table(budget) for budget in BUDGETS},
    **{variant: variants_table(variant) for variant in VARIANTS},
    "negatives": negatives_table,
    "exactness": methods_table,
}


# ---- the page


def written(page: str, study: Study) -> str:
    def block(name: str) -> str:
        if name not in PLOTS:
            raise ValueError(f"study: a block of the page must be one of {', '.join(PLOTS)}, got {name}. Rename it.")
        figure = PLOTS[name](study)
        if not figure.traces:
            return NOT_YET
        table = TABLES[name](study) if name in TABLES else ""
        return "\n\n".join(part for part in (f"![{figure.title}]({name}.svg)", figure.note, table) if part)

    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}\n{found[3]}", page)


def draw(study: Study, html: Path) -> dict[str, Figure]:
    """All plots that have points, as a page of `megabatch report`."""
    figures = {name: figure for name, make in PLOTS.items() if (figure := make(study)).traces}
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(render("Does a larger batch help?", [Section("Plots", figures=list(figures.values()))]))
    return figures


def save(figures: dict[str, Figure], html: Path, pictures: Path) -> None:
    """The plots of that page, as an SVG each, and no others."""
    with tempfile.TemporaryDirectory() as profile, closing(Browser(Path(profile))) as browser:
        browser.open(html, width=1600)
        for place, (name, figure) in enumerate(figures.items()):
            svg = browser.svg(f"plot-0-{place}", title=figure.title, description=description(figure))
            (pictures / f"{name}.svg").write_text(svg)
    for old in pictures.glob("*.svg"):
        if old.stem not in figures:
            old.unlink()


def main() -> None:
    argparse.ArgumentParser("python -m studies.page", description=__doc__).parse_args()
    study = load()
    html = HERE.parent / "build" / "study" / "batch-size.html"
    page = written(PAGE.read_text(), study)
    save(draw(study, html), html, PAGE.parent)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
