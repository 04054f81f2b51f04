"""The page of training runs: what it shows, whatever the runs have left behind, and that a browser shows it."""

import base64
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from plotly.graph_objects import Figure as PlotlyFigure

from megabatch import cli
from megabatch.report import figures
from megabatch.report.figures import Group, curves, differences, grouped, parts_of_step, thinned, with_error_bars
from megabatch.report.page import Picture, Retrieved, Section, page_of, render
from megabatch.report.runs import read_runs
from megabatch.report.summary import last_metrics
from megabatch.train import report_command
from megabatch.train.config import Run
from megabatch.train.data.source import BadSample
from megabatch.train.encoding import Encoder
from megabatch.train.objective import Objective
from megabatch.train.report import Report
from megabatch.train.retrieved import retrieved
from studies import page as study_page
from tools.browser import Browser

from .training import steps, train, write_pairs, write_shapes

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
A4 = 703  # pixels of a line on paper, between margins of 12 mm
DOT = base64.b64encode(b"\x89PNG\r\n").decode()


def step_line(step: int, loss: Any = 2.0, **more: Any) -> dict[str, Any]:
    times = {
        "train/step_seconds": 0.5,
        "train/data_seconds": 0.1,
        "train/towers_seconds": 0.2,
        "train/loss_seconds": 0.1,
    }
    speed = {"train/samples_per_second": 512.0, "train/memory_mib": 100.0, "train/lr": 1e-3, "train/grad_norm": 1.0}
    counts = {"train/samples": 256 * step, "train/skipped_samples": 0, "train/nonfinite_steps": 0}
    return {"step": step, "train/loss": loss, "train/logit_scale": 14.3, **times, **speed, **counts, **more}


def val_line(step: int, recall: float = 0.2) -> dict[str, Any]:
    return {"step": step, "val/loss": 3.0, "val/mean_recall": recall, "val/image_to_text_R@5": recall, "val/samples": 9}


def write_run(folder: Path, lines: list[dict[str, Any]], *, seed: int = 0, lr: float = 1e-3, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = {"optimization": {"lr": lr, **settings}, "run": {"seed": seed, "name": folder.name}}
    (folder / "params.yaml").write_text(yaml.safe_dump(sections))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "commit": "abc1234"}))
    return folder


def page(*folders: Path) -> str:
    return page_of(read_runs(folders))


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def text_of(html: str) -> str:
    """Without data and scripts."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.DOTALL)


def unpacked(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype=f"<{packed['dtype']}").astype(float)


def figure_of(groups: list[Group], title: str) -> figures.Figure:
    return next(each for section in curves(groups).values() for each in section if each.title == title)


# ---- what it shows


def test_every_metric_has_its_section_and_an_unknown_one_is_shown_under_its_name(tmp_path):
    lines = [step_line(1), step_line(2, **{"train/accuracy": 0.5, "mine/temperature": 4}), val_line(2)]
    lines.append({"step": 2, "zeroshot/top1": 0.1, "val/text_to_image_median_rank": 7})
    sections = {title: [figure.title for figure in each] for title, each in drawn(write_run(tmp_path, lines)).items()}
    assert sections["Learning"] == [
        *("Training loss", "Training accuracy, in the batch", "Validation loss", "Mean recall"),
        "Zero-shot top-1 accuracy",
    ]
    assert sections["Retrieval"] == ["Recall at 5, image to text", "Median rank, text to image"]
    assert sections["Optimization"] == ["Learning rate", "Gradient norm", "Logit scale"]
    assert {"Samples per second, all ranks", "Seconds of a step in the loss", "Peak memory of rank 0, MiB"} <= set(
        sections["Speed and memory"]
    )
    assert sections["Other metrics"] == ["mine/temperature"]
    assert sections["Skipped samples and non-finite steps"] == []  # none were


def drawn(*folders: Path) -> dict[str, list[figures.Figure]]:
    return curves(grouped(read_runs(folders)))


def test_recalls_are_in_the_order_of_k(tmp_path):
    run = write_run(tmp_path, [{"step": 1, **{f"val/image_to_text_R@{k}": 0.1 for k in (10, 1, 5)}}])
    assert [figure.title[:12] for figure in drawn(run)["Retrieval"]] == ["Recall at 1,", "Recall at 5,", "Recall at 10"]


def test_a_curve_can_be_shown_over_steps_samples_and_time(tmp_path):
    run = write_run(tmp_path, [step_line(1), step_line(2), val_line(2), step_line(3)])
    groups = grouped(read_runs([run]))
    (trace,) = figure_of(groups, "Training loss").traces
    assert {axis: unpacked(x).tolist() for axis, x in trace["xs"].items()} == {
        "steps": [1, 2, 3],
        "samples": [256, 512, 768],
        "time": [0.5, 1.0, 1.5],
    }
    (trace,) = figure_of(groups, "Mean recall").traces
    assert {axis: unpacked(x).tolist() for axis, x in trace["xs"].items()} == {
        "steps": [2],
        "samples": [512],
        "time": [1.0],
    }
    assert '<input type="radio" name="axis" value="samples"' in page(run)


def test_seeds_of_one_setting_are_a_mean_with_a_band_of_its_standard_deviation(tmp_path):
    losses = {0: [4.0, 2.0], 1: [6.0, 3.0], 2: [8.0, 4.0, 5.0]}
    folders = [
        write_run(tmp_path / f"seed{seed}", [step_line(n + 1, loss) for n, loss in enumerate(each)], seed=seed)
        for seed, each in losses.items()
    ]
    folders.append(write_run(tmp_path / "other", [step_line(1, 1.0)], lr=2e-3))
    groups = grouped(read_runs(folders))
    assert [(group.label, len(group.runs)) for group in groups] == [("lr 0.001 (3 seeds)", 3), ("other", 1)]
    traces = figure_of(groups, "Training loss").traces
    assert [trace.get("view") for trace in traces] == ["runs"] * 3 + ["mean"] * 2 + [None]
    band, mean = traces[3:5]
    assert unpacked(mean["y"]).tolist() == [6.0, 3.0]
    assert unpacked(band["y"]).tolist() == [8.0, 4.0, 2.0, 4.0]  # there above, and back below
    assert unpacked(band["xs"]["steps"]).tolist() == [1, 2, 2, 1]
    text = text_of(page(*folders[:2]))
    assert "mean ± std: one setting (2 seeds)" in text
    assert "2.5000 ± 0.7071" in text


def test_a_mean_is_of_the_steps_that_all_its_runs_have(tmp_path):
    """Else it would jump where a run ends, and its time would run backwards."""
    slow = [step_line(step, 9.0, **{"train/step_seconds": 5.0}) for step in (1, 2, 3)]
    quick = [step_line(step, 1.0, **{"train/accuracy": 0.5}) for step in (1, 2, 3, 4, 5)]
    folders = [write_run(tmp_path / str(seed), lines, seed=seed) for seed, lines in enumerate((slow, quick))]
    groups = grouped(read_runs(folders))
    figure = figure_of(groups, "Training loss")
    assert unpacked(figure.traces[-1]["y"]).tolist() == [5.0] * 3
    assert unpacked(figure.traces[-1]["xs"]["time"]).tolist() == [2.75, 5.5, 8.25]
    assert figure.note.startswith("Some runs lack this, or some of its steps: means are of")
    alone = figure_of(groups, "Training accuracy, in the batch")
    assert [trace["name"] for trace in alone.traces] == ["1"]  # no mean of one
    assert "view" not in alone.traces[0]
    assert alone.note == figure.note
    *_, mean = last_metrics(groups).rows
    assert mean[5:] == ["–"] * len(mean[5:])
    assert "Runs that end at different steps have no mean." in text_of(page(*folders))
    alike = [write_run(tmp_path / f"alike{seed}", slow, seed=seed) for seed in range(2)]
    assert figure_of(grouped(read_runs(alike)), "Training loss").note == ""


def test_the_mean_of_equal_values_is_that_value_without_a_deviation(tmp_path):
    folders = [write_run(tmp_path / str(seed), [step_line(1)], seed=seed) for seed in range(3)]
    assert np.mean([14.3] * 3) != 14.3
    *_, band, mean = figure_of(grouped(read_runs(folders)), "Logit scale").traces
    assert unpacked(mean["y"]).tolist() == [14.3]
    assert unpacked(band["y"]).tolist() == [14.3, 14.3]


def test_runs_that_share_no_step_are_all_shown(tmp_path):
    runs = [
        write_run(tmp_path / str(seed), [val_line(step) for step in (seed, seed + 2)], seed=seed) for seed in (1, 2)
    ]
    traces = figure_of(grouped(read_runs(runs)), "Mean recall").traces
    assert [(trace.get("view"), unpacked(trace["xs"]["steps"]).tolist()) for trace in traces] == [
        (None, [1, 3]),
        (None, [2, 4]),
    ]


def test_a_deviation_at_a_single_step_is_a_bar(tmp_path):
    runs = [write_run(tmp_path / str(seed), [val_line(5, 0.2 + seed / 10)], seed=seed) for seed in range(3)]
    *_, line = figure_of(grouped(read_runs(runs)), "Mean recall").traces
    assert unpacked(line["error_y"]["array"]) == pytest.approx([0.1])


@pytest.mark.parametrize(
    ("value", "mode"), [(0.2, "nonnegative"), ("nan", "nonnegative"), ("-inf", "nonnegative"), (-0.1, "normal")]
)
def test_an_axis_goes_below_zero_only_for_values_that_do(tmp_path, value, mode):
    run = write_run(tmp_path, [step_line(1, value)])
    assert figure_of(grouped(read_runs([run])), "Training loss").layout["yaxis"]["rangemode"] == mode


def test_a_band_has_a_gap_where_its_mean_has_one(tmp_path):
    losses = {0: [1.0, 1.0, "nan", 1.0], 1: [3.0, 3.0, 3.0, 3.0]}
    folders = [
        write_run(tmp_path / str(seed), [step_line(n + 1, loss) for n, loss in enumerate(each)], seed=seed)
        for seed, each in losses.items()
    ]
    *_, band, _ = figure_of(grouped(read_runs(folders)), "Training loss").traces
    assert unpacked(band["xs"]["steps"]).tolist() == [1, 2, 2, 1, 3, 4, 4, 3]
    assert np.isnan(unpacked(band["y"])).tolist() == [False] * 4 + [True, False, False, True]
    assert band["fill"] == "toself"


def test_long_names_are_short_in_a_plot_and_still_different(tmp_path):
    names = [f"2026_11_18-11_{minute}_00-{model}-lr0.001-seed0" for minute in (35, 42) for model in ("ViT-B", "RN50")]
    names += [f"{names[0][:30]}-{'more-' * 9}{end}" for end in ("1-lr0.001-seed0", "2-lr0.001-seed0")]
    groups = grouped(read_runs([write_run(tmp_path / name, [step_line(1)], wd=name) for name in names]))
    for figure in (figure_of(groups, "Training loss"), *parts_of_step(groups)):
        short = figure.layout.get("yaxis", {}).get("ticktext") or [trace["name"] for trace in figure.traces]
        assert len(set(short)) == len(names)
        assert max(map(len, short)) <= 31
    names += [
        f"{model}-lr0.001-batch1024-cosine-{end}" for model in ("clip-vit-b-32", "siglip-vit-b32") for end in "ab"
    ]
    error_bars = with_error_bars("Recall", {name: [(64, 0.2, None)] for name in names}, x="batch", y="recall")
    assert len({trace["name"] for trace in error_bars.traces}) == len(names)


def test_settings_that_look_alike_have_different_labels(tmp_path):
    runs = [
        write_run(tmp_path / f"{n}-{seed}", [step_line(1)], seed=seed, train_data=f"{'x' * 400}{n}{'x' * 400}")
        for n in range(2)
        for seed in range(2)
    ]
    first, second = grouped(read_runs(runs))
    assert second.label == f"{first.label} (2)"
    (figure,) = parts_of_step([first, second])
    assert len(figure.traces[0]["x"]) == 2


def test_what_differs_between_runs_is_apart_from_what_does_not(tmp_path):
    one = write_run(tmp_path / "one", [step_line(1)], seed=1, wd=0.2)
    two = write_run(tmp_path / "two", [step_line(1)], seed=2, lr=2e-3, wd=0.2)
    text = text_of(page(one, two))
    assert "<th>run</th><th>lr</th><th>seed</th>" in text
    assert "<td>one</td><td>0.001</td><td>1</td>" in text
    assert "<td>wd</td><td>0.2</td>" in text
    assert "<td>lr</td>" not in text
    assert "<td>commit</td><td>abc1234</td>" in text
    assert "What differs" not in text_of(page(one))
    (two / "params.yaml").write_text("lr: 3")
    assert "None is the same in all runs." in text_of(page(one, two))


def test_losses_of_different_batches_are_not_to_be_compared(tmp_path):
    runs = [write_run(tmp_path / str(batch), [step_line(1)], global_batch_size=batch) for batch in (64, 128)]
    assert "compare runs of different batches by validation" in text_of(page(*runs))
    assert "compare runs of different batches by validation" not in text_of(page(runs[0]))


@pytest.mark.parametrize(("planned", "shown"), [(12, "2 of 12"), (2, "2"), (1, "2"), (None, "2"), ("9" * 5000, "2")])
def test_a_run_that_has_not_done_all_steps_says_so(tmp_path, planned, shown):
    run = write_run(tmp_path / "run", [step_line(1), step_line(2)], steps=planned)
    assert f"<td>run</td><td>{shown}</td>" in text_of(page(run))


def test_a_run_whose_settings_are_not_known_differs_in_none_of_them(tmp_path):
    one = write_run(tmp_path / "one", [step_line(1)], wd=0.2)
    two = write_run(tmp_path / "two", [step_line(1)], lr=2e-3, wd=0.2)
    (write_run(tmp_path / "older", [step_line(1)]) / "params.yaml").unlink()
    runs = read_runs([one, two, tmp_path / "older"])
    assert differences([run.settings for run in runs]) == ["lr", "name"]
    text = text_of(page_of(runs))
    assert "<th>run</th><th>lr</th>" in text
    assert "<td>wd</td><td>0.2</td>" in text


@pytest.mark.parametrize("fact", ["ranks", "threads", "device", "commit", "torch"])
def test_runs_on_other_hardware_or_of_other_code_are_no_runs_of_one_setting(tmp_path, fact):
    runs = [write_run(tmp_path / str(number), [step_line(1)], seed=number % 2) for number in range(4)]
    for number, run in enumerate(runs):
        facts = {"ranks": 1, "threads": 2, "device": "EPYC", "commit": "abc", "torch": "2.13.0"}
        facts["python"] = f"3.1{number}"
        (run / "environment.json").write_text(json.dumps(facts | {fact: 1 + number // 2}))
    assert [group.label for group in grouped(read_runs(runs))] == [f"{fact} 1 (2 seeds)", f"{fact} 2 (2 seeds)"]
    text = text_of(page(*runs))
    assert f"<th>run</th><th>{fact}</th><th>python</th>" in text
    assert "<td>3</td><td>2</td><td>3.13</td>" in text


def test_repeated_runs_of_one_seed_are_not_called_seeds(tmp_path):
    runs = [write_run(tmp_path / str(number), [step_line(1)], seed=number // 2) for number in range(3)]
    assert [group.label for group in grouped(read_runs(runs[:2]))] == ["one setting (2 runs of 1 seed)"]
    assert [group.label for group in grouped(read_runs(runs))] == ["one setting (3 runs of 2 seeds)"]


def test_a_seed_that_ended_early_does_not_cut_the_mean_of_the_others(tmp_path):
    lengths = (100, 100, 60, 3)
    folders = [
        write_run(tmp_path / str(seed), [step_line(step, float(seed)) for step in range(1, length + 1)], seed=seed)
        for seed, length in enumerate(lengths)
    ]
    figure = figure_of(grouped(read_runs(folders)), "Training loss")
    mean = figure.traces[-1]
    assert (unpacked(mean["xs"]["steps"])[-1], unpacked(mean["y"])[-1]) == (60, 1.0)
    assert figure.note.endswith("Runs that ended before half of the longest are in no mean.")
    figure = figure_of(grouped(read_runs([folders[0], folders[3]])), "Training loss")
    assert [trace.get("view") for trace in figure.traces] == [None, "runs"]


@pytest.mark.parametrize("name", ["save_frequency", "val_frequency", "val_steps"])
def test_settings_that_are_no_part_of_a_setting_are_shown_where_they_differ(tmp_path, name):
    runs = [write_run(tmp_path / str(n), [step_line(1)], **{name: n}) for n in range(2)]
    assert len(grouped(read_runs(runs))) == 1
    assert f"<th>run</th><th>{name}</th>" in text_of(page(*runs))


def test_long_settings_that_differ_are_no_runs_of_one_setting(tmp_path):
    runs = [write_run(tmp_path / str(n), [step_line(1)], train_data=f"{'shard::' * 100}{n}.tar") for n in range(2)]
    assert len(grouped(read_runs(runs))) == 2
    text = text_of(page(*runs))
    assert "shard::1.tar</td>" in text
    assert "shard::" * 100 not in text


def test_parts_of_a_step_add_up_to_it(tmp_path):
    run = write_run(tmp_path, [step_line(1), step_line(2)])
    (figure,) = parts_of_step(grouped(read_runs([run])))
    seconds = {trace["name"]: trace["x"][0] for trace in figure.traces}
    assert seconds == pytest.approx({"waiting for data": 0.1, "towers": 0.2, "loss": 0.1, "rest": 0.1})
    assert figure.note == ""
    waiting = {"train/communication_seconds": 0.05}
    run = write_run(tmp_path / "ranks", [{**step_line(1), **waiting}])
    (figure,) = parts_of_step(grouped(read_runs([run])))
    seconds = {trace["name"]: trace["x"][0] for trace in figure.traces}
    assert seconds["waiting for other ranks"] == pytest.approx(0.05)
    assert seconds["rest"] == pytest.approx(0.05)
    assert "overlaps" in figure.note


def test_runs_that_did_not_measure_the_parts_of_a_step_are_left_out_and_counted(tmp_path):
    older = [{"step": 1, "train/loss": 2.0, "train/step_seconds": 9.0}]
    runs = [
        write_run(tmp_path / str(n), lines, seed=n) for n, lines in enumerate([older, [step_line(1)], [val_line(1)]])
    ]
    (figure,) = parts_of_step(grouped(read_runs(runs)))
    seconds = {trace["name"]: trace["x"] for trace in figure.traces}
    assert seconds["rest"] == pytest.approx([0.1])
    assert figure.note == "2 of 3 runs did not measure them, and are left out."
    assert parts_of_step(grouped(read_runs(runs[:1]))) == []
    assert "train/samples was not recorded at every step: nothing is drawn over samples." in text_of(page(runs[0]))


def test_parts_of_a_step_are_of_the_steps_in_which_all_were_measured(tmp_path):
    older = {"step": 1, "train/step_seconds": 9.0, "train/data_seconds": 7.0}
    (figure,) = parts_of_step(grouped(read_runs([write_run(tmp_path, [older, step_line(2), step_line(3)])])))
    assert {trace["name"]: trace["x"][0] for trace in figure.traces}["rest"] == pytest.approx(0.1)


def test_a_time_that_was_recorded_from_some_step_on_is_not_known(tmp_path):
    lines = [{"step": step, "train/loss": 2.0} for step in (1, 2)] + [step_line(3)]
    (run,) = read_runs([write_run(tmp_path, lines)])
    assert run.seconds is None
    assert [note.partition(":")[0] for note in run.notes] == [
        "train/samples was not recorded at every step",
        "train/step_seconds was not recorded at every step",
    ]
    assert np.isnan([*run.axes(np.array([1.0, 3.0]), 1.0).values()][1:]).all()


def test_a_training_time_that_was_not_recorded_is_not_known(tmp_path):
    groups = grouped(read_runs([write_run(tmp_path, [{"step": 1, "train/loss": 2.0}])]))
    table = last_metrics(groups)
    assert table.rows[0][table.head.index("training time")] == "–"


def test_skipped_samples_and_nonfinite_steps_are_listed(tmp_path):
    run = write_run(tmp_path, [step_line(1, "nan", **{"train/nonfinite_steps": 1, "train/skipped_samples": 3})])
    skipped = [{"step": 1, "name": f"{n}.jpg", "reason": "truncated image"} for n in range(7)]
    (run / "skipped.jsonl").write_text("".join(json.dumps(each) + "\n" for each in skipped))
    (run / "nonfinite.jsonl").write_text(json.dumps({"step": 1, "train/loss": "nan", "samples": ["a"] * 9}) + "\n")
    text = text_of(page(run))
    assert "<td>truncated image</td><td>7</td><td>0.jpg, 1.jpg, 2.jpg, 3.jpg, 4.jpg</td>" in text
    assert "<td>1</td><td>nan</td><td>–</td>" in text
    assert "Not finite, and so a gap: 1 of 1 values." in text


def test_skipped_samples_are_listed_also_without_a_metric_of_them(tmp_path):
    run = write_run(tmp_path, [{"step": 1, "train/loss": 2.0}])
    (run / "skipped.jsonl").write_text(json.dumps({"name": "0.jpg", "reason": "truncated image"}) + "\n")
    text = text_of(page(run))
    assert "<h2>Skipped samples and non-finite steps</h2>" in text
    assert "<td>truncated image</td><td>1</td><td>0.jpg</td>" in text


def everything(tmp_path: Path) -> list[figures.Figure]:
    runs = [write_run(tmp_path / str(n), [step_line(1), step_line(2), val_line(2)], seed=n) for n in range(3)]
    groups = grouped(read_runs(runs))
    series = {"a": [(64, 0.1, 0.01), (256, 0.2, 0.02)], "b": [(64, 0.3, 0.1)]}
    return [
        *(figure for each in curves(groups).values() for figure in each),
        *parts_of_step(groups),
        with_error_bars("Recall", series, x="batch", y="recall"),
    ]


def test_figures_are_what_plotly_draws(tmp_path):
    """Its Python knows every attribute, and refuses others."""
    for figure in everything(tmp_path):
        for trace in figure.traces:
            plain = {name: value for name, value in trace.items() if name not in ("xs", "group", "view")}
            PlotlyFigure(data=[plain | ({"x": trace["xs"]["time"]} if "xs" in trace else {})], layout=figure.layout)


def test_error_bars_are_at_the_values_that_there_are():
    series = {"clip": [(1024, 0.4, 0.02), (64, 0.2, 0.01)]}
    figure = with_error_bars("Recall", series, x="batch", y="recall")
    (trace,) = figure.traces
    assert (trace["x"], trace["y"], trace["error_y"]["array"]) == ([64, 1024], [0.2, 0.4], [0.01, 0.02])
    assert figure.layout["xaxis"]["type"] == "log"
    assert figure.layout["xaxis"]["ticktext"] == ["64", "1,024"]
    close = with_error_bars("Recall", {"clip": [(step, 0.2, None) for step in (8, 9, 64, 95)]}, x="updates", y="recall")
    assert close.layout["xaxis"]["ticktext"] == ["8", "64"]  # the others have no room
    parts = with_error_bars("Recall", {"clip": [(step, 0.2, None) for step in (1 / 32, 0.5, 2)]}, x="rate", y="recall")
    assert parts.layout["xaxis"]["ticktext"] == ["1/32", "1/2", "2"]
    assert parts.traces[0]["marker"]["symbol"] == "circle-open"  # single values
    assert "marker" not in trace
    assert "plot-0-0" in data_of(render("A study", [Section("Recall", figures=[figure])]))["figures"]


# ---- long curves


@pytest.mark.parametrize("length", [0, 1, 40, 41, 1000, 1003])
def test_thinning_keeps_the_ends_and_every_spike(length):
    values = np.sin(np.arange(float(length)))
    spikes = {place: value for place, value in {7: 9.0, 300: -9.0, 700: 5.0, 999: 50.0}.items() if place < length}
    values[list(spikes)] = list(spikes.values())
    kept = thinned(values, 10)
    assert len(kept) <= 50
    assert set(spikes) | ({0, length - 1} if length else set()) <= set(kept.tolist())
    assert kept.tolist() == sorted(set(kept.tolist()))


def test_thinning_keeps_a_gap():
    values = np.ones(10_000)
    values[4321] = math.nan
    assert np.isnan(values[thinned(values, 10)]).any()


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> tuple[Path, float]:
    """The page of a hundred thousand steps, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("long")
    run = write_run(folder, [step_line(step, 5 / step + math.sin(step)) for step in range(1, 100_001)])
    started = time.process_time()
    assert cli.main(["report", str(run), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html", time.process_time() - started


def test_a_hundred_thousand_steps_are_fast_and_small(long):
    """Five seconds are less than eight times what Python needs to read the lines, on any machine."""
    path, seconds = long
    text = (path.parent / "metrics.jsonl").read_text()
    started = time.process_time()
    for line in text.splitlines():
        json.loads(line)
    assert seconds < 8 * (time.process_time() - started)
    assert path.stat().st_size < 8e6
    traces = data_of(path.read_text())["figures"]["plot-1-0"]["traces"]
    assert 500 < len(unpacked(traces[0]["y"])) < 5000


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_a_page_has_no_more_points_than_it_has_room_for(tmp_path, seeds):
    rows = np.random.default_rng(0).normal(size=(5, 3000, 12))
    for seed in range(seeds):
        lines = [
            {"step": n + 1, **{f"mine/{m}": value for m, value in enumerate(row)}} for n, row in enumerate(rows[seed])
        ]
        write_run(tmp_path / str(seed), lines, seed=seed)
    sections = drawn(*(tmp_path / str(seed) for seed in range(seeds)))
    points = sum(len(unpacked(trace["y"])) for each in sections.values() for figure in each for trace in figure.traces)
    assert figures.POINTS / 3 < points <= figures.POINTS


# ---- runs that nobody would wish for


def test_a_run_that_is_not_there_is_refused_by_name(tmp_path, capsys):
    run = write_run(tmp_path / "run", [step_line(1)])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report", str(run), str(tmp_path / "typo"), "-o", str(tmp_path / "report.html")])
    error = capsys.readouterr().err
    assert f"report: RUN must be the folder of a run, got {tmp_path / 'typo'}, which is not there." in error
    assert not (tmp_path / "report.html").exists()


def test_folders_of_runs_that_never_began_are_left_out_with_a_warning(tmp_path, logged):
    run = write_run(tmp_path / "run", [step_line(1)])
    (tmp_path / "refused").mkdir()
    (tmp_path / "report.html").touch()
    found = read_runs([run, tmp_path / "refused", tmp_path / "report.html"])
    assert [each.folder for each in found] == [run]
    assert [name for name in ("refused", "report.html") if any(f"{name} is left out" in line for line in logged)] == [
        "refused",
        "report.html",
    ]
    with pytest.raises(ValueError, match=r"RUN must be a folder with a metrics.jsonl, got .*refused, without\."):
        read_runs([tmp_path / "refused"])
    with pytest.raises(ValueError, match="RUN must be a folder"):
        read_runs([tmp_path])
    assert logged[-1].endswith(f"{tmp_path} is left out: it holds runs: give {tmp_path}/*")


def test_a_run_given_twice_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [step_line(1)])
    with pytest.raises(ValueError, match=r"every RUN must be given once, got .*run several times"):
        read_runs([run, tmp_path / "x" / ".." / "run"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-o", "."], "--out must be a file that ends in .html, got .. Give it such a name."),
        (["-o", "run/metrics.jsonl"], "--out must be a file that ends in .html, got run/metrics.jsonl."),
        (["-o", "no/page.html"], "--out must be in a folder that is there, got no/page.html. Make no."),
        (["--examples", "-3"], "--examples must be at least 0, got -3."),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report", str(write_run(tmp_path / "run", [step_line(1)])), *flags])
    assert f"megabatch report: error: {said}" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / place / "run", [step_line(1)]) for place in ("a", "b")]
    folders.append(write_run(tmp_path / "other", [step_line(1)]))
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run", "other"]


def test_damaged_metrics_are_read_as_far_as_they_go(tmp_path):
    run = write_run(tmp_path, [])
    long = "1" + "0" * 400
    lines = [
        '{"step": 1, "train/loss": 2.0}',
        "garbage",
        "[1, 2]",
        '{"train/loss": 1.0}',
        '{"step": "7"}',
        "",
        "[" * 10**5,
    ]
    lines += ['{"step": 2, "train/loss": NaN, "note": "<b>", "list": [1]}', '{"step": true, "train/loss": 1}']
    lines += [
        f'{{"step": 3, "train/loss": {long}}}',
        f'{{"step": {long}}}',
        '{"step": 2, "train/loss": 4.0}',
        '{"step": 4, "tr',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (found,) = read_runs([run])
    assert found.columns["train/loss"].steps.tolist() == [1, 2, 3]
    assert found.columns["train/loss"].values.tolist() == [2.0, 4.0, math.inf]
    assert found.notes[0] == "metrics.jsonl: 7 lines could not be read and are left out."
    assert found.notes[1] == "metrics.jsonl: 2 values are not numbers and are left out."
    assert "7 lines could not be read" in text_of(page(run))


def test_lines_of_every_file_that_cannot_be_read_are_counted(tmp_path, logged):
    run = write_run(tmp_path, [step_line(1)])
    (run / "skipped.jsonl").write_text('garbage\n[1]\n{"name": "a", "reason": "b"}\n{"name": "cut')
    entry = json.dumps({"step": 1}) + "\n"
    (run / "nonfinite.jsonl").write_text("garbage\n" + 5 * entry + "not read, as five are shown\n")
    (found,) = read_runs([run])
    assert found.notes == [
        "skipped.jsonl: 2 lines could not be read and are left out.",
        "nonfinite.jsonl: 1 lines could not be read and are left out.",
    ]
    assert (found.skipped, len(found.nonfinite)) == ({"b": 1}, 5)
    assert cli.main(["report", str(run), "-o", str(tmp_path / "report.html"), "--examples", "0"]) == 0
    assert logged[-1].endswith(f"report: {found.name}: {' '.join(found.notes)}")


@pytest.mark.parametrize("content", ["", "\n", '{"step": 1, "tr'])
def test_a_run_that_has_not_begun_is_a_page(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    text = text_of(page(tmp_path))
    assert "metrics.jsonl has no step yet. There is no params.yaml. There is no environment.json." in text
    assert 'name="axis"' not in text


def test_values_that_are_not_finite_are_gaps(tmp_path):
    losses = [1.0, "nan", "inf", "-inf", 1e300, 2.0]
    run = write_run(tmp_path, [step_line(n + 1, loss) for n, loss in enumerate(losses)])
    figure = figure_of(grouped(read_runs([run])), "Training loss")
    assert figure.note == "Not finite, and so a gap: 3 of 6 values."
    np.testing.assert_array_equal(unpacked(figure.traces[0]["y"]), [1.0, math.nan, math.nan, math.nan, 1e300, 2.0])


GAPS = [step_line(n + 1, loss) for n, loss in enumerate([2.0, "nan"] * 40 + [2.0] * 10)]


def test_a_value_between_two_gaps_is_a_point(tmp_path):
    (trace,) = figure_of(grouped(read_runs([write_run(tmp_path, GAPS)])), "Training loss").traces
    assert trace["mode"] == "lines+markers"
    assert unpacked(trace["marker"]["size"]).tolist() == [4, 0] * 40 + [0] * 10


@pytest.mark.parametrize("value", ["nan", "inf", 1e300, -1, True])
def test_a_run_in_which_every_value_is_strange_is_a_page(tmp_path, value):
    lines = [dict.fromkeys(step_line(1), value) | {"step": step} for step in (1, 2)]
    runs = [write_run(tmp_path / str(seed), lines, seed=seed) for seed in range(2)]
    assert "Training loss" in text_of(page(*runs))


def test_metrics_that_are_too_many_are_counted(tmp_path):
    metrics = {name.format(n): 1.0 for n in range(100) for name in ("mine/{}", "val/image_to_text_R@{}")}
    text = text_of(page(write_run(tmp_path, [{"step": 1, **metrics}])))
    assert "100 more metrics are not drawn." in text
    assert text.count("<figcaption>") == text.count("<figcaption>Recall at") == 100


def test_metrics_with_endless_names_are_counted(tmp_path):
    lines = [{**step_line(step), "val/" + "_to_" * 25_000: 1.0} for step in (1, 2)]
    text = text_of(page(write_run(tmp_path, lines)))
    assert "metrics.jsonl: 2 values are left out: their names are too long." in text
    assert "_to_" not in text


STRANGE = ["[1", "just text", "a: &a [*a]", "{1: {2: 3}}", "\x00", "a: !!bool x", "a: !!int ''", "a: !!timestamp x"]


@pytest.mark.parametrize("content", STRANGE)
def test_strange_settings_are_a_page(tmp_path, content):
    run = write_run(tmp_path, [step_line(1)])
    (run / "params.yaml").write_text(content)
    (run / "environment.json").write_text(content)
    assert "Training loss" in text_of(page(run))


def hostile(tmp_path: Path) -> str:
    lines = [step_line(1, "nan", **{EVIL: 1.0, "note": EVIL, "train/skipped_samples": 1}), step_line(2), val_line(2)]
    run = write_run(tmp_path / EVIL.replace("/", "∕"), lines, model=EVIL)
    (run / "environment.json").write_text(json.dumps({EVIL: EVIL}))
    (run / "skipped.jsonl").write_text(json.dumps({"name": EVIL, "reason": EVIL}) + "\n")
    (run / "nonfinite.jsonl").write_text(json.dumps({"step": EVIL, "train/loss": EVIL}) + "\n")
    picture = Picture(f"data:image/png;base64,{DOT}", EVIL, right=True)
    examples = Section(EVIL, [EVIL], examples=[Retrieved(EVIL, [picture])])
    return page_of([*read_runs([run]), *read_runs([write_run(tmp_path / "other", lines)])], [examples])


def test_text_of_runs_is_never_markup(tmp_path):
    html = hostile(tmp_path)
    assert html.count("<script") == 3
    assert html.count("</script>") == 3
    assert "<img src=x" not in html
    assert html.count("&lt;/script&gt;&lt;script&gt;window.evil") > 8


# ---- a run draws itself


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return str(write_shapes(tmp_path_factory.mktemp("shapes")))


FLAGS = ["--model", "tiny", "--global-batch-size", "32", "--steps", "4", "--val-steps", "2", "--workers", "0"]


def test_train_writes_the_page_at_every_evaluation_and_at_the_end(shapes, tmp_path, monkeypatch):
    written = []

    def write(folders: list[Path], path: Path, *, examples: int) -> None:
        real(folders, path, examples=examples)
        written.append((len(path.parent.joinpath("metrics.jsonl").read_text().splitlines()), examples))

    real = report_command.write_report
    monkeypatch.setattr(report_command, "write_report", write)
    run = train(tmp_path, "--train-data", shapes, "--val-data", shapes, *FLAGS, "--report")
    assert written == [(3, 0), (6, 0), (6, report_command.EXAMPLES)]
    text = text_of((run / "report.html").read_text())
    assert text.count('<figure class="found">') == report_command.EXAMPLES
    assert text.count("data:image/png;base64,") == 5 * report_command.EXAMPLES
    assert "<td>commit</td>" in text
    assert not list(run.glob("*.unfinished"))
    (parts,) = parts_of_step(grouped(read_runs([run])))
    assert [trace["name"] for trace in parts.traces] == ["waiting for data", "towers", "loss", "rest"]
    assert all(trace["x"][0] >= 0 for trace in parts.traces)


def test_examples_are_the_nearest_images_and_know_which_is_right(shapes, tmp_path):
    run = train(tmp_path, "--train-data", shapes, "--val-data", shapes, *FLAGS)
    checkpoint, found = retrieved(run, 3, 96)
    assert checkpoint == "best.pt"
    assert [text for text, _ in found] == [
        "black circle at the left",
        "black circle at the right",
        "black circle at the top",
    ]
    for text, matches in found:
        assert len({match.text for match in matches}) == 96
        assert [match.text for match in matches if match.right] == [text]


def test_a_run_without_images_says_that_there_are_no_examples(tmp_path):
    pairs = str(write_pairs(tmp_path / "pairs.jsonl"))
    run = train(tmp_path, "--train-data", pairs, "--val-data", pairs, *FLAGS, "--report")
    assert "None: the held-out data has no images." in text_of((run / "report.html").read_text())


@pytest.mark.parametrize("error", [BadSample("not a file"), RuntimeError("not enough memory"), KeyError("model")])
def test_examples_that_cannot_be_made_leave_the_page_and_say_why(tmp_path, monkeypatch, error):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("megabatch.train.retrieved.retrieved", fail)
    report_command.write_report([write_run(tmp_path / "run", [step_line(1)])], tmp_path / "report.html")
    text = text_of((tmp_path / "report.html").read_text())
    assert f"None: {type(error).__name__}: " in text
    assert "Training loss" in text


def test_a_page_says_that_only_some_settings_have_examples(tmp_path, monkeypatch):
    monkeypatch.setattr("megabatch.train.retrieved.retrieved", lambda *_: [])
    runs = [write_run(tmp_path / str(n), [step_line(1)], lr=n) for n in range(6)]
    report_command.write_report(runs, tmp_path / "report.html")
    text = text_of((tmp_path / "report.html").read_text())
    assert text.count("<h2>Retrieval examples: ") == 4
    assert "There are none of runs of 2 more settings. Draw these on a page of their own." in text
    report_command.write_report(runs[:4], tmp_path / "report.html")
    assert "more settings" not in text_of((tmp_path / "report.html").read_text())


def test_a_page_needs_no_package_of_the_trainer(tmp_path):
    """But for examples, which say what is missing."""
    packages = [package for package, extra in cli.EXTRAS.items() if extra == "train" and package != "yaml"]
    script = f"import sys; sys.modules.update(dict.fromkeys({packages})); from megabatch import cli; cli.main()"
    run = write_run(tmp_path / "run", [step_line(1)])
    words = [sys.executable, "-c", script, "report", str(run), "-o", str(tmp_path / "report.html")]
    subprocess.run(words, check=True)
    text = text_of((tmp_path / "report.html").read_text())
    assert "Training loss" in text
    assert "None: ModuleNotFoundError: " in text
    assert "Examples need megabatch[train]" in text


def test_a_page_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [step_line(1)])
    path = tmp_path / "report.html"
    path.write_text("the old page")

    def killed(*_: Any) -> None:
        raise OSError(5, "killed")

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(OSError, match="killed"):
        report_command.write_report([run], path)
    assert path.read_text() == "the old page"


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return grad


def test_seconds_of_towers_and_loss_are_those_of_both_passes(shapes, tmp_path, monkeypatch):
    objective, encode = Objective.__call__, Encoder.texts

    def slow_loss(self: Objective, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.2)
        loss, accuracy = objective(self, *args)
        return SlowBackward.apply(loss), accuracy

    def slow_texts(self: Encoder, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return SlowBackward.apply(encode(self, tokens))

    monkeypatch.setattr(Objective, "__call__", slow_loss)
    monkeypatch.setattr(Encoder, "texts", slow_texts)
    run = train(tmp_path, "--train-data", shapes, *FLAGS, "--steps", "1")
    (values,) = steps(run)
    assert values["train/loss_seconds"] >= 0.3
    assert values["train/towers_seconds"] >= 0.6
    parts = [values[f"train/{part}_seconds"] for part in ("data", "towers", "loss")]
    assert sum(parts) < values["train/step_seconds"]


def test_a_page_that_cannot_be_written_does_not_end_the_run(shapes, tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_command, "write_report", fail)
    run = train(tmp_path, "--train-data", shapes, "--val-data", shapes, *FLAGS, "--report")
    assert (run / "out.log").read_text().count("report.html was not written: OSError: [Errno 28] No space left") == 3


def test_a_page_whose_packages_are_damaged_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "megabatch.train.report_command", None)
    with Report(tmp_path, Run(report=True), total_steps=1, first_step=0) as report:
        report.validation(1, {"val/loss": 1.0})
    assert (tmp_path / "out.log").read_text().count("report.html was not written: ModuleNotFoundError: ") == 2
    assert not any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger("megabatch").handlers)


def test_without_plotly_the_flag_is_refused_at_the_start(shapes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megabatch.train.command.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        train(tmp_path, "--train-data", shapes, *FLAGS, "--report")
    assert "--report needs plotly, got none. Run pip install 'megabatch[report]'." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    try:
        chromium = Browser(tmp_path_factory.mktemp("profile"))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    yield chromium
    chromium.close()


# Pieces of text that lie over each other, or stick out of the window or of their figure.
MISPLACED = """
(() => {
  const pieces = [], faults = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement, range = document.createRange();
    if (!node.data.trim() || parent.closest("script, noscript") || !parent.checkVisibility()) continue;
    range.selectNodeContents(node);
    const inTable = parent.closest(".table"), figure = parent.closest("figure");
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      if (!inTable && (box.left < 0 || box.right > innerWidth)) faults.push(`outside: ${node.data}`);
      const frame = figure && figure.getBoundingClientRect();
      if (frame && (box.left < frame.left || box.right > frame.right || box.bottom > frame.bottom))
        faults.push(`outside of its figure: ${node.data}`);
      pieces.push([node, box]);
    }
  }
  pieces.forEach(([node, a], place) => pieces.slice(place + 1).forEach(([other, b]) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (node !== other && across > 2 && down > 4) faults.push(`${node.data} over ${other.data}`);
  }));
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page is wider than its window");
  return pieces.length ? faults : ["there is no text"];
})()
"""
EMPTY = """
[...document.querySelectorAll(".plot")]
  .filter((plot) => ![...plot.querySelectorAll(".main-svg .trace path")].some((path) => path.getTotalLength() > 0))
  .map((plot) => plot.id)
"""


def assert_shown(browser: Browser, path: Path) -> None:
    assert browser.log == []
    assert browser.requests == [path.as_uri()]
    assert browser.run("document.querySelectorAll('.plot').length") > 10
    assert browser.run(EMPTY) == []
    browser.run("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert browser.run(MISPLACED) == []


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A page of two settings, three seeds each, and a run with a long name and a metric with another."""
    folder = tmp_path_factory.mktemp("many")
    runs = []
    for lr in (1e-3, 123456.789e-8):
        for seed in range(3):
            lines = [step_line(step, 5 / step + seed / 10) for step in range(1, 200)]
            lines += [val_line(step, step / 400) for step in range(20, 200, 20)]
            name = f"2026_11_18-11_35_00-ViT-B-32-clip-b{32768}-lr{lr:g}-seed{seed}"
            runs.append(write_run(folder / name, lines, seed=seed, lr=lr, train_data="/data/" + "very-long-name" * 20))
    lines += [{"step": 199, "a-metric-without-an-end" * 8: 1.0}]
    runs.append(write_run(folder / ("a-name-without-an-end" * 8), lines, lr=1.0))
    path = folder / "report.html"
    path.write_text(page(*runs))
    return path


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_page_is_drawn_without_errors_or_a_network_and_its_text_has_room(browser, many, width, dark):
    browser.open(many, width=width, dark=dark)
    assert_shown(browser, many)
    dark_ground = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark_ground == dark


def test_a_page_on_a_phone_has_room_for_buttons_and_scrolls_under_a_finger(browser, many):
    browser.open(many, width=400, touch=True)
    assert_shown(browser, many)
    assert browser.run("getComputedStyle(document.querySelector('.modebar-group')).opacity") != "0"
    assert browser.run("document.querySelector('.plot')._fullLayout.dragmode") is False


def test_a_page_on_paper_is_complete_and_is_as_before_afterwards(browser, many):
    browser.open(many, width=A4)
    closed = "document.querySelectorAll('details:not([open])').length"
    assert browser.run(closed) == 2
    browser.send("Emulation.setEmulatedMedia", media="print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(closed) == 0
    assert_shown(browser, many)
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(closed) == 2


def test_pages_of_unusual_runs_are_drawn_without_errors(browser, long, tmp_path):
    nan = [dict.fromkeys(step_line(1), "nan") | {"step": step} for step in (1, 2)]
    pages = [long[0]]
    for name, lines in {"empty": [], "nan": nan}.items():
        pages.append(tmp_path / f"{name}.html")
        pages[-1].write_text(page(*(write_run(tmp_path / name / str(seed), lines, seed=seed) for seed in range(2))))
    for path in pages:
        browser.open(path, width=1600)
        assert browser.log == []
        assert browser.run(MISPLACED) == []
    pages[-1].write_text(page(write_run(tmp_path / "gaps", GAPS[:80])))
    browser.open(pages[-1], width=1600)
    assert browser.run(EMPTY) == []
    assert browser.run("document.querySelectorAll('.plot')[0].querySelectorAll('.trace .points path').length") == 40


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_of_the_study_is_drawn_as_well(browser, tmp_path, width):
    path = tmp_path / "study.html"
    assert len(study_page.draw(study_page.load(), path)) == len(study_page.PLOTS)
    browser.open(path, width=width)
    assert_shown(browser, path)


def test_switches_change_the_axis_the_lines_the_colours_and_what_is_hidden(browser, many):
    browser.open(many, width=1600)
    traces = "document.querySelector('.plot').data.map((trace) => trace.name).length"
    last_x = "Math.max(...document.querySelector('.plot')._fullData.at(-1).x)"
    click = "document.querySelector('input[name={}][value=\"{}\"]').click()"
    assert (browser.run(traces), browser.run(last_x)) == (5, 199)  # two means with a band each, and a run
    browser.run(click.format("axis", "samples"))
    assert browser.run(last_x) == 199 * 256
    browser.run(click.format("axis", "time"))
    assert browser.run(last_x) == pytest.approx(99.5)
    assert browser.run("document.querySelector('.plot .xtitle').textContent") == "seconds of training"
    browser.run(click.format("view", "runs"))
    assert browser.run(traces) == 7
    browser.run(click.format("group", 0))
    assert browser.run(traces) == 4
    browser.run(click.format("theme", "dark"))
    assert browser.run("getComputedStyle(document.querySelector('.plot text')).fill") == "rgb(228, 231, 234)"
    assert browser.log == []


def test_a_plot_shows_values_under_the_mouse_and_zooms(browser, many):
    browser.open(many, width=1600)
    browser.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    box = browser.run("document.querySelector('.plot .nsewdrag').getBoundingClientRect().toJSON()")
    browser.run("document.querySelector('input[name=group][value=\"2\"]').click()")
    y = box["top"] + box["height"] * 0.9  # where the curves end
    browser.mouse("mouseMoved", box["left"] + 5, y)
    browser.mouse("mouseMoved", box["left"] + box["width"] / 2, y)
    wait = "new Promise((done) => setTimeout(done, 500))"
    browser.run(wait)
    assert "±" in browser.run("document.querySelector('.plot .hoverlayer').textContent")
    browser.mouse("mousePressed", box["left"] + 20, y)
    browser.mouse("mouseMoved", box["left"] + 90, y - 60)
    browser.mouse("mouseReleased", box["left"] + 90, y - 60)
    browser.run(wait)
    low, high = browser.run("document.querySelector('.plot')._fullLayout.xaxis.range")
    assert 0 < low < high < 150
    buttons = browser.run("[...document.querySelectorAll('.modebar-btn')].map((each) => each.dataset.title)")
    assert len(set(buttons)) == 6
    assert not any("loud" in title or "hare" in title for title in buttons)  # nothing is sent anywhere
    assert browser.log == []


def test_names_are_not_connected_and_single_values_have_no_bars():
    figure = with_error_bars("Recall", {"seed 1": [("ring", 0.2, None), ("dense", 0.1, None)]}, x="method", y="recall")
    (trace,) = figure.traces
    assert (trace["mode"], trace["x"]) == ("markers", ["ring", "dense"])  # in the order given
    assert figure.layout["xaxis"]["type"] == "category"
    assert "error_y" not in trace
    assert trace["hovertemplate"].startswith("%{y:.5g} at %{x}<br>")
    assert figure.layout["yaxis"]["range"] == pytest.approx([0.095, 0.205])
    figure = with_error_bars("Recall", {"clip": [("ring", 0.2, None)]}, x="", y="")
    assert figure.layout["yaxis"]["range"] == pytest.approx([-0.8, 1.2])
    (trace,) = with_error_bars("Recall", {"clip": [("<b>ring", 0.2, 0.1)]}, x="method", y="recall").traces
    assert trace["x"] == ["&lt;b&gt;ring"]
    assert trace["hovertemplate"].startswith("%{y:.5g} ± %{customdata:.2g} at %{x}<br>")


def test_a_plot_is_a_picture_of_its_own(browser, tmp_path):
    figure = with_error_bars("Recall", {"clip": [(64, 0.2, 0.01), (256, 0.4, 0.02)]}, x="batch", y="mean recall")
    path = tmp_path / "study.html"
    path.write_text(render("A study", [Section("Recall", figures=[figure])]))
    browser.open(path, width=1600)
    words = {"title": "Recall & batch", "description": "Larger is better."}
    picture = browser.svg("plot-0-0", **words)
    assert browser.svg("plot-0-0", **words) == picture
    root = ElementTree.fromstring(picture)
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    assert root.get("viewBox") == "0 0 720 400"
    assert [child.tag for child in root[:3]] == [f"{svg}title", f"{svg}desc", f"{svg}rect"]
    assert {"64", "256", "batch", "mean recall"} <= {text.text for text in root.iter(f"{svg}text")}
    assert len(root.findall(f".//{svg}path[@class='yerror']")) == 2


def test_a_hostile_page_is_drawn_and_runs_nothing_of_it(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(hostile(tmp_path))
    browser.open(path, width=400)
    assert browser.run("window.evil") is None
    assert browser.run(EMPTY) == []
    assert browser.requests == [path.as_uri()]
    assert browser.log == []


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ("read -r -d '' message <&3", ConnectionError, "must answer, has ended instead"),
        ("exec sleep 600", TimeoutError, "must answer in 2 s"),
    ],
)
def test_a_browser_that_does_not_start_is_an_error_and_leaves_no_process(tmp_path, monkeypatch, program, error, said):
    path = tmp_path / "browser"
    path.write_text(f"#!/bin/bash\necho $$ > {tmp_path / 'pid'}\n{program}\n")
    path.chmod(0o755)
    monkeypatch.setattr("tools.browser.PROGRAMS", [str(path)])
    monkeypatch.setattr("tools.browser.PATIENCE", 2.0)
    with pytest.raises(error, match=said):
        Browser(tmp_path / "profile")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_browser_finds_what_is_wrong(browser, tmp_path):
    """The tests above can fail."""
    path = tmp_path / "wrong.html"
    path.write_text(
        "<html data-drawn=true><body><p>one<p style='margin-top:-2em'>two</p><p style='width:2000px'>wide</p>"
        "<p style='margin-left:1990px'>far</p><img src='http://127.0.0.1:9/x.png'><script>throw Error('bad')</script>"
    )
    browser.open(path, width=400)
    browser.run("new Promise((done) => setTimeout(done, 300))")
    faults = browser.run(MISPLACED)
    assert {"one over two", "outside: far", "the page is wider than its window"} <= set(faults)
    assert any("bad" in line for line in browser.log)
    assert "http://127.0.0.1:9/x.png" in browser.requests
