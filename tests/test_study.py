"""The study of batch sizes: which runs are left, the split of WordNet, and the pipeline on a grid of its own."""

import itertools
import json
import math
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml

from studies import batch_size, page, wordnet
from studies.runs import Runner, command_of
from studies.study import FURTHEST, SCORE, Job, Study, best_factor, left_of, scores, search, seed_scores

GRID: dict[str, Any] = {
    "model": "tiny",
    "width_of_grid": 2,
    "factors": [0.5, 1],
    "search": 0,
    "seeds": [1, 2],
    "datasets": {"icons": {"rate": 4e-3, "batches": [16, 64]}},
    "budgets": {"samples": {"icons": 128}},
    "rules_from": 16,
    "again": ["icons", 16],
}
CELL = Job("icons", 64, 2, 0, 0)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Study]:
    """A study with the grid above, but for some entries."""

    def study(**changes: Any) -> Study:
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump({**GRID, **changes}))
        return Study(tmp_path / "grid.yaml", tmp_path / "r.jsonl")

    return study


def found(values: dict[float, float], seed: int = 0) -> dict[Job, float]:
    return {replace(CELL, factor=factor, seed=seed): score for factor, score in values.items()}


def test_learning_rates_are_tried_first() -> None:
    assert [(job.factor, job.seed) for job in left_of(CELL, GRID, {})] == [(0.5, 0), (1, 0)]
    assert [job.factor for job in left_of(CELL, GRID, found({1: 0.2}))] == [0.5]
    assert best_factor(CELL, GRID, found({1: 0.2})) is None


@pytest.mark.parametrize(("values", "next_factor"), [({0.5: 0.1, 1: 0.2}, 2), ({0.5: 0.2, 1: 0.1}, 0.25)])
def test_the_search_goes_on_while_the_best_learning_rate_is_at_an_end(
    values: dict[float, float], next_factor: float
) -> None:
    assert left_of(CELL, GRID, found(values)) == [replace(CELL, factor=next_factor)]
    further = found({**values, next_factor: 0.15})
    assert best_factor(CELL, GRID, further) == max(values, key=lambda factor: values[factor])
    assert [job.seed for job in left_of(CELL, GRID, further)] == [1, 2]


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({0.25: 0.3, 0.5: 0.4, 1: 0.2, 2: 0.3}, [4]),
        ({0.25: 0.3, 0.5: 0.2, 1: 0.4, 2: 0.1}, [0.125]),
        ({0.25: 0.3, 0.5: 0.2, 1: 0.4, 2: 0.2, 4: 0.3}, [0.125, 8]),
        ({0.25: 0.3, 0.5: 0.4, 1: 0.1, 2: 0.15}, []),  # which is no peak: nothing was learned there
        ({0.25: 0.3, 0.5: 0.4, 1: 0.3, 2: 0.3}, []),
    ],
    ids=str,
)
def test_the_search_goes_on_where_scores_rise_again(values: dict[float, float], more: list[float]) -> None:
    assert search(CELL, GRID, found(values)) == [replace(CELL, factor=factor) for factor in more]


def test_rates_of_a_rule_do_not_end_the_search() -> None:
    values = {0.5: 0.1, 1: 0.2, 8: 0.05, 1 / math.sqrt(2): 0.9}
    assert left_of(CELL, GRID, found(values)) == [replace(CELL, factor=2)]


def test_a_variant_may_have_the_learning_rate_of_another() -> None:
    grid = {**GRID, "variants": {"kept": {"rate_of": "clip"}}}
    cell = replace(CELL, variant="kept")
    assert left_of(cell, grid, {}) == []
    done = found({0.5: 0.1, 1: 0.9, 2: 0.3})
    assert left_of(cell, grid, done) == [replace(cell, factor=1, seed=seed) for seed in (1, 2)]


def test_warm_up_is_a_share_of_the_steps_but_not_less_than_two(make: Callable[..., Study]) -> None:
    study = make(variants={"long": {"warmup": 0.25}})
    runner = Runner(study, Path())
    assert [runner.warmup(replace(CELL, steps=steps)) for steps in (4096, 64, 16, 8)] == [409, 6, 2, 2]
    assert runner.warmup(replace(CELL, steps=16, variant="long")) == 4


@pytest.mark.parametrize("sign", [1, -1])
def test_the_search_ends_somewhere(sign: int) -> None:
    better = {2.0 ** (sign * power): power / 10 + 0.2 for power in range(-1, 6)}
    assert FURTHEST in (max(better), 1 / min(better))
    assert [job.seed for job in left_of(CELL, GRID, found(better))] == [1, 2]


def test_the_seed_that_chose_the_learning_rate_is_not_in_the_mean() -> None:
    searched = found({0.5: 0.1, 1: 0.9, 2: 0.3})
    done = {**searched, **found({1: 0.4}, seed=1)}
    assert [job.seed for job in left_of(CELL, GRID, done)] == [2]
    assert seed_scores(CELL, GRID, done) == {}  # until all are done
    assert seed_scores(CELL, GRID, {**done, **found({1: 0.6}, seed=2)}) == {1: 0.4, 2: 0.6}


def test_runs_that_diverged_found_nothing() -> None:
    nan = {"job": asdict(replace(CELL, factor=1)), "figures": {SCORE: "nan"}}
    none = {"job": asdict(replace(CELL, factor=2)), "figures": {}}
    assert list(scores([nan, none, {"calibration": ["icons", 64], "step_seconds": 1.0}]).values()) == [0.0, 0.0]


def test_other_variants_and_methods_are_other_cells() -> None:
    done = found({0.5: 0.1, 1: 0.9, 2: 0.3})
    assert left_of(replace(CELL, variant="siglip"), GRID, done) != left_of(CELL, GRID, done)
    other = {replace(job, method="dense"): 1.0 for job in done}
    assert best_factor(CELL, GRID, {**done, **other}) == 1
    assert len(left_of(CELL, GRID, other)) == 2


def test_the_grid_of_the_repository_has_what_the_page_speaks_of() -> None:
    grid = yaml.safe_load((batch_size.HERE / "batch_size.yaml").read_text())
    assert len(grid["factors"]) >= 4
    assert len(grid["seeds"]) >= 5
    assert grid["search"] not in grid["seeds"]
    batches = {dataset: options["batches"] for dataset, options in grid["datasets"].items()}
    assert {name: (some[0], some[-1]) for name, some in batches.items()} == {
        "wordnet": (64, 32768),
        "icons": (64, 16384),
    }


def test_rules_for_the_learning_rate_are_run_where_the_search_was_not(make: Callable[..., Study]) -> None:
    study = make()
    start = replace(CELL, batch=16, steps=8)
    study.results += results_of(start, {0.5: 0.1, 1: 0.3, 2: 0.4, 4: 0.1}, {})
    assert study.left()[:2] == [replace(CELL, factor=2), replace(CELL, factor=1)]  # square root, fixed
    rules = study.rules("icons", scores(study.results))
    assert [study.rate(job) for job in rules["fixed"]] == [1e-3, 1e-3]
    assert [study.rate(job) for job in rules["square root"]] == [1e-3, 2e-3]


def test_a_line_that_was_cut_off_by_a_kill_is_dropped(make: Callable[..., Study], tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    study = make()
    assert study.results == [{"a": 1}]
    assert path.read_text() == '{"a": 1}\n{"b": '  # reading does not write
    study.add({"c": 3})
    study.add({"d": 4})
    assert path.read_text() == '{"a": 1}\n{"c": 3}\n{"d": 4}\n'


def test_learning_rates_follow_the_square_root_rule(make: Callable[..., Study]) -> None:
    study = make()
    assert study.rate(replace(CELL, factor=2, batch=4096)) == pytest.approx(4e-3 * 2 * 2)


def test_budgets_that_give_a_batch_the_same_steps_share_its_runs(make: Callable[..., Study]) -> None:
    study = make(budgets={"samples": {"icons": 128}, "updates": {"icons": 2}}, cut=[["updates", "icons", 16]])
    assert study.batches("samples", "icons") == [replace(CELL, batch=16, steps=8), CELL]
    assert study.batches("updates", "icons") == [CELL]
    assert study.cells() == study.batches("samples", "icons")


def test_a_share_of_the_data_is_a_file_of_its_own(make: Callable[..., Study], tmp_path: Path) -> None:
    study = make(variants={"tenth": {"batches": {"wordnet": [64]}, "share": 0.1}})
    jobs = [replace(CELL, dataset="wordnet", variant=variant) for variant in ("clip", "tenth")]
    runner = Runner(study, tmp_path)
    (tmp_path / "wordnet").mkdir()
    for name in ("train", "held_out", "share-0.1"):  # of another split
        (tmp_path / "wordnet" / f"{name}.jsonl").write_text('{"query": "old", "positive": "old"}\n')
    for job in jobs:
        runner.make_data(job)
    whole, part = ((words[1], words[3]) for words in map(runner.files, jobs))
    assert whole[1] == part[1]  # what is held out
    lines, some = (Path(path).read_text().splitlines() for path in (whole[0], part[0]))
    assert some == lines[: round(len(lines) / 10)]
    assert [len(lines), len(wordnet.read_lines(Path(whole[1])))] == [97_921, 3_883]


def test_negatives_are_mined_with_a_trained_model_or_random(
    make: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"query": f"word {number}", "positive": f"what number {number} means"} for number in range(96)]
    monkeypatch.setattr(wordnet, "split", lambda: (rows, rows[:16]))
    flags = ["--loss", "infonce"]
    variants = {kind: {"batches": {}, "flags": flags, "negatives": kind} for kind in ("mined", "random")}
    data = {"datasets": {"wordnet": {"rate": 4e-3, "batches": [16]}}, "budgets": {"samples": {"wordnet": 2048}}}
    study = make(variants=variants, factors=[1], width_of_grid=64, **data)
    runner = Runner(study, tmp_path)
    job = Job("wordnet", 16, 1, 1, 1, "mined")
    with pytest.raises(ValueError, match="which is not done"):
        runner.run(job)
    study.results += results_of(study.cell("samples", "wordnet", 1024), {1: 0.5}, {})
    for kind in ("mined", "random"):
        assert runner.run(replace(job, variant=kind))["steps"] == 1
        written = wordnet.read_lines(tmp_path / "wordnet" / f"{kind}.jsonl")
        assert [{name: row[name] for name in ("query", "positive")} for row in written] == rows
        assert all(row["negatives"][0].startswith("what") for row in written)
        assert not any(row["negatives"] == [row["positive"]] for row in written)


def test_hard_definitions_are_near_but_not_as_near_as_the_own_one(
    make: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be another right definition is left out."""
    degrees = {"query": [0.0, 90.0], "positive": [10.0, 90.0, 12.0, 40.0, 50.0, 60.0, 70.0, 80.0, 85.0, 180.0, 190.0]}
    angles = {name: torch.tensor(some).deg2rad() for name, some in degrees.items()}
    features = {name: torch.stack((some.cos(), some.sin()), 1) for name, some in angles.items()}
    features["query"] = torch.cat((features["query"], features["positive"][2:]))  # the others find their own
    rows = [{"query": f"query {row}", "positive": f"positive {row}"} for row in range(11)]

    class Model:
        def tokenizer(self, texts: list[str]) -> list[str]:
            return texts

        def encode_text(self, texts: list[str]) -> torch.Tensor:
            return torch.stack([features[name][int(row)] for name, row in map(str.split, texts)])

    data = {"datasets": {"wordnet": {"rate": 4e-3, "batches": [16]}}, "budgets": {"samples": {"wordnet": 2048}}}
    study = make(factors=[1], width_of_grid=64, **data)
    study.results += results_of(study.cell("samples", "wordnet", 1024), {1: 0.5}, {})
    monkeypatch.setattr(Runner, "run", lambda self, job, keep: None)
    monkeypatch.setattr("megabatch.load", lambda folder: Model())
    found = Runner(study, tmp_path).hard_definitions(rows)
    assert found[0] == 3  # at 12 degrees it is as near as the own one, at 10
    assert found[1] == 6  # 85 and 80 degrees are within the margin of 90, 70 is not


def test_icons_are_not_cut_in_silence(make: Callable[..., Study], tmp_path: Path) -> None:
    study = make(variants={"eighth": {"batches": {"icons": [64]}, "share": 0.125}})
    with pytest.raises(ValueError, match="eighth must be of wordnet, got icons"):
        Runner(study, tmp_path).run(replace(CELL, variant="eighth"))


def test_a_run_that_diverges_is_a_result(make: Callable[..., Study], tmp_path: Path) -> None:
    study = make(datasets={"icons": {"rate": 1e30, "batches": [64]}})
    result = Runner(study, tmp_path).run(replace(CELL, factor=1, steps=30))
    assert scores([result]) == {replace(CELL, factor=1, steps=30): 0.0}
    assert result["steps"] < 30


def test_equal_seconds_need_a_calibration(make: Callable[..., Study]) -> None:
    study = make(budgets={"seconds": {"icons": 60}})
    with pytest.raises(ValueError, match="must be calibrated first"):
        study.cell("seconds", "icons", 64)
    for seconds in (0.5, 0.4, 2.0):  # the median counts
        study.add({"calibration": ["icons", 64], "step_seconds": seconds})
    assert study.cell("seconds", "icons", 64).steps == 120


def test_the_pipeline_on_a_grid_of_its_own(
    make: Callable[..., Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate and two seeds. What is done is not done again."""
    data = {"icons": {"rate": 4e-3, "batches": [64]}}
    study = make(factors=[1], width_of_grid=64, datasets=data, rules_from=64, again=["icons", 64])
    arguments = [f"--grid={tmp_path / 'grid.yaml'}", f"--results={study.path}", f"--folder={tmp_path}"]
    first = study.left()[0]
    study.add({**Runner(study, tmp_path).run(first), "kept": True})
    assert batch_size.main(["run", *arguments]) == 0
    lines = [json.loads(line) for line in study.path.read_text().splitlines()]
    assert {Job(**line["job"]) for line in lines} == {replace(first, seed=seed) for seed in (0, 1, 2)}
    assert len(lines) == 3
    assert [line for line in lines if line.get("kept")] == lines[:1]
    assert all(line["steps"] == 2 and 0 < line["figures"][SCORE] < 1 for line in lines)
    assert all(line["command"].startswith("OMP_NUM_THREADS=1 megabatch train") for line in lines)
    assert all(line["torch"] == torch.__version__ and "commit" in line for line in lines)
    assert not any(str(tmp_path) in line["command"] for line in lines)
    capsys.readouterr()
    assert batch_size.main(["again", *arguments]) == 0
    said = capsys.readouterr().out
    assert "They agree" in said
    kept = {line["job"]["seed"]: line["figures"][SCORE] for line in lines}
    for seed in (1, 2):  # on one machine to the bit
        assert f"seed {seed}: {kept[seed]:.6f}, kept {kept[seed]:.6f}\n" in said


def test_a_cell_that_comes_out_differently_is_reported(
    make: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make(factors=[1], width_of_grid=64, seeds=[1, 2, 3, 4, 5])
    kept = (0.5, 0.49, 0.51, 0.5, 0.49, 0.5)
    for seed, score in enumerate(kept):
        study.add({"job": asdict(replace(CELL, batch=16, steps=8, factor=1, seed=seed)), "figures": {SCORE: score}})
    for apart, code in ((0.016, 0), (0.02, 1)):  # their difference has a standard deviation of 0.0053
        monkeypatch.setattr(Runner, "run", lambda self, job, apart=apart: {"figures": {SCORE: kept[job.seed] - apart}})
        assert (
            batch_size.main(["again", f"--grid={tmp_path / 'grid.yaml'}", f"--results={tmp_path / 'r.jsonl'}"]) == code
        )
    assert "FAILED" in capsys.readouterr().out


def test_the_cell_that_can_be_run_again_was_kept() -> None:
    study = page.load()
    cell = study.cell("samples", *study.grid["again"])
    assert len(seed_scores(cell, study.grid, scores(study.results))) >= 5


def test_a_run_that_fails_ends_the_study_with_its_last_words(make: Callable[..., Study], tmp_path: Path) -> None:
    study = make(model="nobody")
    with pytest.raises(RuntimeError, match="--model"):
        Runner(study, tmp_path).run(replace(CELL, factor=1))


def test_the_command_of_a_ring_has_its_ranks() -> None:
    words = ["--steps", "2"]
    assert command_of(words, 1) == ["megabatch", "train", *words]
    assert " ".join(command_of(words, 2)) == "torchrun --standalone --nproc-per-node 2 -m megabatch train --steps 2"


def test_a_run_without_a_score_is_no_run(make: Callable[..., Study], tmp_path: Path) -> None:
    study = make()
    runner = Runner(study, tmp_path)
    runner.files = lambda job: ["--train-data", "icons"]  # and nothing to evaluate on
    with pytest.raises(RuntimeError, match="must end well with a score, got exit code 0"):
        runner.run(replace(CELL, factor=1))


def test_what_runs_beside_a_run_that_fails_is_kept(make: Callable[..., Study], tmp_path: Path) -> None:
    study = make(factors=[1], width_of_grid=64)
    bad, good = (threading.Event() for _ in range(2))

    def run(job: Job) -> dict[str, Any]:
        if job.batch == 16:
            assert good.wait(60)
            bad.set()
            raise RuntimeError("fails")
        good.set()
        assert bad.wait(60)
        return {"job": asdict(job), "figures": {SCORE: 0.5}, "seconds": 1}

    runner = Runner(study, tmp_path)
    runner.run = run
    with pytest.raises(RuntimeError, match="fails"):
        batch_size.run_all(runner, 2)
    assert [line["job"]["batch"] for line in wordnet.read_lines(study.path)] == [64]


def test_a_signal_is_handled_while_a_run_goes_on(make: Callable[..., Study], tmp_path: Path) -> None:
    """Also one that does not wake the main thread."""
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())

    def run(job: Job) -> dict[str, Any]:
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert handled.wait(30)
        return {"job": asdict(job), "figures": {SCORE: 0.5}, "seconds": 1}

    runner = Runner(make(seeds=[], factors=[1], width_of_grid=64), tmp_path)
    runner.run = run
    try:
        batch_size.run_all(runner, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_results_are_added_by_one_study_at_a_time(make: Callable[..., Study]) -> None:
    study = make()
    program = "import sys; from pathlib import Path; from studies import batch_size; "
    program += "batch_size.alone(Path(sys.argv[1])); print('alone', flush=True); input()"
    command = [sys.executable, "-c", program, str(study.path)]
    first, second = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    lines = {first.stdout.readline(), second.stdout.readline()}
    assert lines == {"alone\n", ""}
    said = first.communicate("\n")[1] + second.communicate("\n")[1]
    assert "is in use by another study" in said


def test_a_study_that_is_killed_goes_on(make: Callable[..., Study], tmp_path: Path) -> None:
    """What it had started ends with it, and is run again."""
    data = {"icons": {"rate": 4e-3, "batches": [64]}}
    study = make(factors=[1], width_of_grid=64, datasets=data, rules_from=64, budgets={"samples": {"icons": 2**20}})
    command = [sys.executable, "-m", "studies.batch_size", "run", f"--grid={tmp_path / 'grid.yaml'}", "--processes=1"]
    command += [f"--results={study.path}", f"--folder={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task")
        waited(lambda: "".join(each.read_text() for each in children.glob("*/children")).strip())
        (child,) = "".join(each.read_text() for each in children.glob("*/children")).split()
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    words = Path(f"/proc/{child}/cmdline")
    waited(lambda: not words.exists() or not words.read_text())  # a process that has ended has none
    assert study.path.read_text() == ""
    make(factors=[1], width_of_grid=64, datasets=data, rules_from=64)  # of less steps
    assert subprocess.run(command, check=True, capture_output=True).returncode == 0
    assert {json.loads(line)["job"]["seed"] for line in study.path.read_text().splitlines()} == {0, 1, 2}


def waited(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def results_of(cell: Job, values: dict[float, float], seeds: dict[int, float]) -> list[dict[str, Any]]:
    best = max(values, key=lambda factor: values[factor])
    jobs = {**{replace(cell, factor=factor): score for factor, score in values.items()}}
    jobs |= {replace(cell, factor=best, seed=seed): score for seed, score in seeds.items()}
    return [
        {"job": asdict(job), "figures": {SCORE: score}, "train_loss": 1.0, "steps": 2} for job, score in jobs.items()
    ]


def test_tables_have_means_over_seeds_and_paired_tests(make: Callable[..., Study]) -> None:
    study = make(variants={"siglip": {"batches": {"icons": [64]}, "flags": ["--loss", "siglip"]}})
    rates = {0.5: 0.1, 1: 0.3, 2: 0.2}
    for cell, seeds in (
        (replace(CELL, batch=16, steps=8), {1: 0.2, 2: 0.22}),
        (CELL, {1: 0.3, 2: 0.34}),
        (replace(CELL, variant="siglip"), {1: 0.25, 2: 0.28}),
    ):
        study.results += results_of(cell, rates, seeds)
    text = page.TABLES["samples"](study)
    assert "| icons | 16 | 8 | 0.0005 | 1 | 21.0 ± 1.4 |  |" in text
    assert "| icons | 64 | 2 | 0.001 | 1 | 32.0 ± 2.8 | +11.0 (p = 0.058) |" in text
    assert page.PLOTS["siglip"](study).traces
    text = page.TABLES["siglip"](study)
    assert "| batch | steps | CLIP, % | SigLIP, % | difference |" in text
    assert "| icons | 64 | 2 | 32.0 ± 2.8 | 26.5 ± 2.1 | -5.5 (p = 0.058) |" in text
    with pytest.raises(ValueError, match=r"a block of the page must be one of samples, .*, got sample. Rename it."):
        page.written("<!-- study: sample -->\n<!-- end -->", study)
    assert page.paired({1: 0.25, 2: 0.5}, {1: 0.5, 2: 0.75}) == "+25.0"
    text = page.written("<!-- study: samples -->\nold\n<!-- end -->\n", study)
    assert "old" not in text
    assert page.written(text, study) == text


def test_a_variant_is_shown_once_both_sides_are_done(make: Callable[..., Study]) -> None:
    study = make(variants={"siglip": {"batches": {"icons": [64]}, "flags": ["--loss", "siglip"]}})
    study.results += results_of(CELL, {0.5: 0.1, 1: 0.3, 2: 0.2}, {1: 0.3, 2: 0.34})
    empty = "<!-- study: siglip -->\n<!-- end -->"
    assert page.NOT_YET in page.written(empty, study)
    study.results += results_of(replace(CELL, variant="siglip"), {0.5: 0.1, 1: 0.3, 2: 0.2}, {1: 0.25, 2: 0.28})
    assert "![CLIP and SigLIP, equal samples seen](siglip.svg)" in page.written(empty, study)


def test_negatives_are_shown_by_direction_each_beside_the_one_before(make: Callable[..., Study]) -> None:
    cell = replace(CELL, dataset="wordnet")
    variants = {name: {"batches": {"wordnet": [64]}, "rate_of": "clip"} for name in [*page.NEGATIVES][1:]}
    data = {"wordnet": {"rate": 4e-3, "batches": [64]}}
    study = make(datasets=data, budgets={"samples": {"wordnet": 128}}, variants=variants)
    assert page.negatives_table(study) == ""
    study.results += results_of(cell, {0.5: 0.1, 1: 0.3, 2: 0.2}, {})
    for number, variant in enumerate(page.NEGATIVES):
        for seed in (1, 2):
            job = replace(cell, factor=1, seed=seed, variant=variant)
            names = {
                "query_to_text": 0.2 + number * 0.01 * (1 + seed / 10),
                "text_to_query": 0.3 + (seed + number * seed) / 100,
            }
            recalls = {f"val/{name}_R@{k}": value for name, value in names.items() for k in (1, 5, 10)}
            study.results.append({"job": asdict(job), "figures": {SCORE: 0.5, **recalls}})
    rows = page.negatives_table(study).splitlines()[2:]
    assert rows[0] == "| 64 | CLIP | 20.0 ± 0.0 |  | 31.5 ± 0.7 |  |"
    assert rows[1].startswith("| 64 | one direction | 21.2 ± 0.1 | +1.2 (p = 0.028) | 33.0 ± 1.4 | +1.5 (p = ")
    assert rows[3].startswith("| 64 | + mined | 23.5 ± 0.2 | +1.2 (p = 0.028)")
    assert "64, words → definition: CLIP: 20.00 ± 0.00, one direction: 21.15" in page.description(
        page.negatives_plot(study)
    )


def test_untrained_models_are_evaluated_with_every_seed(make: Callable[..., Study], tmp_path: Path) -> None:
    study = make(untrained=2)
    jobs = [job for job in study.left() if job.factor == 0]
    assert jobs == [Job("icons", 16, 2, 0, seed) for seed in (1, 2)]
    words = Runner(study, tmp_path).words(jobs[0])
    assert words[words.index("--lr") + 1] == "0.0"
    study.add({"job": asdict(jobs[0]), "figures": {}})
    assert [job for job in study.left() if job.factor == 0] == jobs[1:]


def test_every_kept_result_is_of_the_command_that_its_job_has_now() -> None:
    """A change of the grid does not relabel it."""
    study = page.load()
    runner = Runner(study, Path("unused"))
    runner.files = lambda job: []
    for result in study.results:
        if "job" in result:
            job = Job(**result["job"])
            words = runner.words(job)
            command = result["command"]
            if "--warmup" not in command:  # of the first runs, which had the trainer's: a tenth
                place = words.index("--warmup")
                assert words[place + 1] == str(job.steps // 10)
                del words[place : place + 2]
            assert command.endswith(shlex.join(words)), job
            assert result["rate"] == study.rate(job)
            assert (f"--nproc-per-node {runner.ranks(job)} " in command) == (runner.ranks(job) > 1)


def test_the_difference_between_methods_stands_beside_that_between_seeds(
    make: Callable[..., Study], tmp_path: Path
) -> None:
    methods = {
        "dense": {"flags": ["--dense-loss"]},
        "megabatch": {},
        "ring-2": {"ranks": 2, "flags": ["--exchange", "ring"]},
    }
    study = make(exactness={"dataset": "icons", "batch": 64, "methods": methods})
    assert study.methods({}) == {}
    study.results += results_of(CELL, {0.5: 0.1, 1: 0.3, 2: 0.2}, {1: 0.21, 2: 0.22})
    assert {(job.method, job.seed) for job in study.left() if job.batch == 64} == {
        (method, seed) for method in ("dense", "ring-2") for seed in (1, 2)
    }
    for method, apart in (("dense", 0.0), ("ring-2", 0.001)):
        for seed in (1, 2):
            job = replace(CELL, factor=1, seed=seed, method=method)
            runner = Runner(study, tmp_path)
            assert runner.ranks(job) == {"dense": 1, "ring-2": 2}[method]
            words = runner.words(job)
            assert ("--dense-loss" in words, "ring" in words) == (method == "dense", method == "ring-2")
            study.results.append(
                {"job": asdict(job), "figures": {SCORE: 0.2 + seed / 100 + apart}, "train_loss": 1 + apart / 100}
            )
    assert "| ring-2 | 21.6 ± 0.7 | 0.10 | 1.0e-05 |" in page.methods_table(study)
    assert "| megabatch | 21.5 ± 0.7 | 0.00 | 0.0e+00 |" in page.methods_table(study)


def test_plots_say_what_they_show(make: Callable[..., Study]) -> None:
    """To readers who cannot see them, and to the test below."""
    study = make()
    study.results += results_of(replace(CELL, batch=16, steps=8), {0.5: 0.1, 1: 0.3, 2: 0.2}, {1: 0.2, 2: 0.22})
    study.results += results_of(CELL, {0.5: 0.2, 0.25: 0.1, 1: 0.1}, {1: 0.3, 2: 0.34})
    names = ("samples", "steps-icons", "rates-icons", "rules-icons")
    described = {name: page.description(page.PLOTS[name](study)) for name in names}
    assert described["samples"] == "icons: 16: 21.00 ± 1.41, 64: 32.00 ± 2.83"
    assert described["steps-icons"] == "batch 16: 8: 21.00 ± 1.41. batch 64: 2: 32.00 ± 2.83"
    assert described["rates-icons"].startswith("batch 16: 0.5: 10.00, 1: 30.00, 2: 20.00")
    assert "square-root rule from 16: 16: 30.00, 64: 10.00" in described["rules-icons"]
    assert "rate of 16 for all: 16: 30.00, 64: 20.00" in described["rules-icons"]


def test_the_page_shows_the_kept_results() -> None:
    """`python -m studies.page` writes its tables and plots anew."""
    study, text = page.load(), page.PAGE.read_text()
    assert page.written(text, study) == text
    assert sorted(name for _, name, _ in page.BLOCK.findall(text)) == sorted(page.PLOTS)
    drawn = {name for name, plot in page.PLOTS.items() if plot(study).traces}
    assert {path.stem for path in page.PAGE.parent.glob("*.svg")} == drawn
    for name, plot in page.PLOTS.items():
        figure, path = plot(study), page.PAGE.with_name(f"{name}.svg")
        if figure.traces:
            said = ElementTree.fromstring(path.read_text())[1].text
            assert said == page.description(figure), f"{name}.svg is of other results"


def test_plots_stay_if_others_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old.svg"
    old.touch()
    monkeypatch.setattr("tools.browser.shutil.which", lambda _: None)
    with pytest.raises(FileNotFoundError, match="browser"):
        page.save({}, tmp_path / "page.html", tmp_path)
    assert old.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--grid", "none.yaml"], "--grid must be a YAML file, got none.yaml"),
        (["status", "--results", "none.jsonl"], "--results must be a file of kept runs, got none.jsonl"),
        (["again", "--results", "none.jsonl"], "--results must be a file of kept runs, got none.jsonl"),
    ],
)
def test_files_that_are_not_there_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch_size.main(words)
    assert said in capsys.readouterr().err


def test_the_text_of_the_page_has_the_figures_of_the_results() -> None:
    study, text = page.load(), " ".join(page.PAGE.read_text().split())
    done = scores(study.results)
    runs = [result for result in study.results if "job" in result]
    assert f"The {len(runs)} runs took {sum(run['seconds'] for run in runs) / 3600:.1f} hours" in text
    *others, most = sorted(
        100 * statistics.stdev(values.values())
        for cell in study.cells()
        if (values := seed_scores(cell, study.grid, done))
    )
    assert f"{others[0]:.1f} to {others[-1]:.1f} points, and {most:.1f} once" in text
    for dataset in study.grid["datasets"]:
        means = [
            100 * statistics.mean(seed_scores(cell, study.grid, done).values())
            for cell in study.batches("samples", dataset)
        ]
        assert f"to {means[-1]:.1f} from {max(means):.1f} %" in text
        untrained = 100 * statistics.mean(done[job] for job in study.untrained(dataset))
        assert re.search(rf"Untrained: .*{dataset} {untrained:.1f} %", text, re.IGNORECASE)

    def mean(dataset: str, steps: int, batch: int) -> float:
        return 100 * statistics.mean(seed_scores(Job(dataset, batch, steps, 0, 0), study.grid, done).values())

    for dataset, batch, few, many in (
        ("icons", 4096, 32, 128),
        ("icons", 256, 512, 2048),
        ("wordnet", 16384, 8, 16),
        ("wordnet", 1024, 256, 1024),
    ):
        assert f"from {mean(dataset, few, batch):.1f} to {mean(dataset, many, batch):.1f} %" in text
    cells = sorted((cell.dataset, cell.steps, cell.batch) for cell in study.cells() if cell.variant == "clip")
    at_equal_updates = [pair for pair in itertools.pairwise(cells) if pair[0][:2] == pair[1][:2]]
    assert [large for small, large in at_equal_updates if mean(*small) > mean(*large)] == [("wordnet", 256, 4096)]
    held_out: dict[int, list[float]] = {}
    for run in runs:
        job = Job(**run["job"])
        if job == Job("wordnet", 1024, job.steps, 2, job.seed) and job.seed in study.grid["seeds"]:
            held_out.setdefault(job.steps, []).append(run["figures"]["val/loss"])
    before, after = (statistics.mean(held_out[steps]) for steps in (256, 1024))
    assert f"its held-out loss rises from {before:.1f} to {after:.1f}" in text
    by_rule = [100 * done[job] for jobs in study.rules("wordnet", done).values() for job in jobs if job.batch == 16384]
    assert "from 1,024 ends at {:.1f} %, below an untrained model, the fixed rate at {:.1f} %".format(*by_rule) in text
    losses = {Job(**run["job"]): run["train_loss"] for run in runs}
    methods = study.methods(done)
    pairs = [pair for jobs in methods.values() for pair in zip(jobs, methods["dense"], strict=True)]
    apart = max(abs(losses[job] / losses[dense] - 1) for job, dense in pairs)
    assert f"differ by at most {apart:.1e}, relative".replace("e-0", "e-") in text


def test_synsets_that_share_a_word_are_one_family() -> None:
    names = wordnet.families([["dog", "hound"], ["Hound", "chase"], ["cat"], ["chase"]])
    assert names[0] == names[1] == names[3] != names[2]


def test_no_held_out_word_was_trained_on() -> None:
    train, held_out = wordnet.split()
    words = {word.lower() for row in train for word in row["query"].split(", ")}
    assert f"{len(train):,} pairs to train on, {len(held_out):,} held out" in page.PAGE.read_text()
    assert not any(word.lower() in words for row in held_out for word in row["query"].split(", "))
    assert len({row["positive"].lower() for row in [*train, *held_out]}) == 101_804
