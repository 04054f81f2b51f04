"""A run of a benchmark from first line to last file: tables, JSON, CSV, plots, the bar, and what Ctrl-C leaves."""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.bench import plot
from megabatch.bench.bar import Bar, Estimate, clock, work
from megabatch.bench.cases import Case
from megabatch.bench.chunked.contenders import CACHERS
from megabatch.bench.command import COMMANDS
from megabatch.bench.gradients.contenders import PEERS
from megabatch.bench.loss import trial
from megabatch.bench.loss.contenders import CONTENDERS
from megabatch.bench.registry import REGISTRY
from megabatch.bench.results import Row, over, row_of
from megabatch.bench.ring.contenders import ENTRANTS
from megabatch.bench.session import Session

from .benchmarks import main
from .ranks import PATIENCE

MIB = 2**20
SUFFIX = {"plot": "png"}


def options(folder: Path, *kinds: str) -> argparse.Namespace:
    return argparse.Namespace(**{kind: folder / "new" / f"out.{SUFFIX.get(kind, kind)}" for kind in kinds})


def records(rows: int) -> list[dict[str, Any]]:
    """Time grows with the square, dense memory too."""
    ours = Row("megabatch", "megabatch", peak_bytes=MIB, seconds=[rows**2 * 2e-9, rows**2 * 4e-9])
    dense = Row("dense", "dense", peak_bytes=rows**2 * 16, seconds=[rows**2 * 5e-9])
    return [ours.record(), dense.record(), Row("other", "other", status="not installed").record()]


def test_everything_measured_is_in_the_json_and_in_the_csv(tmp_path, capsys):
    with Session("tried", options(tmp_path, "json", "csv")) as run:
        for rows in run.each([64, 128]):
            run.show(f"N={rows}", "a table")
            run.add({"rows": rows, "loss": "clip"}, records(rows))
    assert run.exit_code == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "\nN=64\na table\n" in out
    written = json.loads((tmp_path / "new/out.json").read_text())
    assert [case["rows"] for case in written["cases"]] == [64, 128]
    assert written["benchmark"] == "tried"
    assert written["machine"]["torch"] == torch.__version__
    assert written["date"].endswith("+00:00")
    ours = written["cases"][0]["contenders"][0]
    assert ours["best"] == min(ours["seconds"]) < ours["mean"]
    assert ours["deviation"] > 0
    with (tmp_path / "new/out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["rows"], line["name"]) for line in lines] == [
        (rows, name) for rows in ("64", "128") for name in ("megabatch", "dense", "other")
    ]
    assert [float(x) for x in lines[0]["seconds"].split()] == ours["seconds"]
    assert float(lines[0]["best"]) == ours["best"]
    assert (lines[2]["best"], lines[2]["status"]) == ("", "not installed")


def test_ctrl_c_leaves_the_results_so_far(tmp_path, capsys):
    with Session("tried", options(tmp_path, "json", "csv", "plot")) as run:
        for rows in run.each([64, 128, 256]):
            if rows == 256:
                raise KeyboardInterrupt
            run.add({"rows": rows}, records(rows))
    assert run.exit_code == 130
    captured = capsys.readouterr()
    assert "stopped after 2 of 3 cases" in captured.err
    assert "out.json" in captured.out.splitlines()[-1]
    assert len(json.loads((tmp_path / "new/out.json").read_text())["cases"]) == 2
    assert (tmp_path / "new/out.csv").read_text().count("\n") == 7
    assert (tmp_path / "new/out.png").read_bytes().startswith(b"\x89PNG")


def test_a_kill_leaves_what_was_written_after_the_last_case(tmp_path):
    class Killed(BaseException):
        pass

    def killed() -> None:
        with Session("tried", options(tmp_path, "json")) as run:
            run.add({"rows": 64}, records(64))
            assert len(json.loads((tmp_path / "new/out.json").read_text())["cases"]) == 1
            raise Killed

    with pytest.raises(Killed):
        killed()


def test_what_is_not_healthy_decides_the_exit_code(tmp_path):
    with Session("tried", options(tmp_path)) as run:
        run.add({}, [], healthy=False)
        run.add({}, [])
    assert run.exit_code == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="1"):
        main(["loss", "--rows", "8", "--plot", str(tmp_path / "x.png")])
    assert "matplotlib is not installed: pip install 'megabatch[bench]'" in capsys.readouterr().err


def test_a_plot_is_a_png(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["loss", "--plot", str(tmp_path / "x.txt")])
    assert "--plot: must end in .png, got" in capsys.readouterr().err


@pytest.mark.usefixtures("inline")
def test_a_benchmark_draws_its_points(tmp_path, capsys):
    path = tmp_path / "plot.png"
    small = [
        "--width",
        "8",
        "--repeats",
        "1",
        "--seconds",
        "0",
        "--losses",
        "clip",
        "--contenders",
        "megabatch",
        "dense",
    ]
    assert main(["loss", "--rows", "16", "32", *small, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["loss", "--rows", "16", *small, "--plot", str(tmp_path / "none.png")]) == 0
    assert "no plot: that needs two numbers of rows" in capsys.readouterr().out


# ---- plots


def test_exponents_are_those_of_the_powers():
    assert plot.exponent([(n, 3 * n**2) for n in (16, 32, 64, 128)]) == pytest.approx(2)
    assert plot.exponent([(n, 5.0) for n in (16, 32)]) == pytest.approx(0)
    assert plot.exponent([(2, 1), (4, 3), (8, 4)]) == pytest.approx(1.0)
    assert plot.exponent([(16, 1.0)]) is None
    assert plot.exponent([(16, 1.0), (16, 2.0)]) is None


def test_the_legend_tells_the_exponents_and_every_curve_its_own_look(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn: list[dict[str, Any]] = []
    original = Axes.plot

    def noted(self: Axes, *args: Any, **style: Any) -> Any:
        drawn.append({"points": list(zip(*args, strict=True)), **style})
        return original(self, *args, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    cases = [{"rows": rows, "loss": "clip", "contenders": records(rows)} for rows in (64, 128, 256)]
    plot.draw(plot.curves_of(cases), "title", tmp_path / "x.png")
    labels = [curve["label"] for curve in drawn]
    assert labels == ["megabatch: N^2.00", "megabatch: N^0.00", "dense: N^2.00", "dense: N^2.00"]
    assert [rows for rows, _ in drawn[0]["points"]] == [64, 128, 256]
    looks = [*plot.OTHERS, plot.OURS]
    for part in ("color", "marker", "linestyle"):
        assert len({str(look[part]) for look in looks}) == len(looks)


def test_cases_that_differ_in_more_than_rows_have_plots_of_their_own():
    cases = [
        {"rows": rows, "loss": loss, "width": 8, "contenders": records(rows)}
        for loss in ("clip", "siglip")
        for rows in (64, 128)
    ]
    curves = plot.curves_of(cases)
    assert list(curves) == ["loss clip", "loss siglip"]
    assert list(curves["loss clip"]) == ["megabatch", "dense"]
    assert plot.curves_of(cases[:1]) == {}


# ---- the bar


def test_the_time_left_follows_from_the_share_that_is_done():
    estimate = Estimate(now=100.0)
    assert estimate.left(now=105.0) is None
    estimate.reach(0.25, now=110.0)
    assert estimate.left(now=110.0) == pytest.approx(30)
    assert estimate.left(now=115.0) == pytest.approx(25)
    assert estimate.left(now=500.0) == 0
    assert (clock(65.2), clock(3723.0)) == ("1:05", "1:02:03")


def test_a_case_counts_for_the_work_it_is(monkeypatch):
    bar = Bar()
    bar.begin(3, [1.0, 3.0, 4.0])
    shares = []
    monkeypatch.setattr(bar, "_show", shares.append)
    bar.reach(0)
    bar.reach(1)
    bar.part(0.5)
    bar.reach(2)
    bar.reach(3)
    assert shares == [0.0, 0.125, 0.3125, 0.5, 1.0]


def test_on_a_terminal_there_is_a_bar_with_the_time_left(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Session("tried", options(tmp_path)) as run:
        for rows in run.each([1, 2]):
            run.part(0.5)
            run.show("", f"table {rows}")
    captured = capsys.readouterr()
    assert "case 1 of 2" in captured.err
    assert "left" in captured.err
    assert "table" not in captured.err
    assert "table 1" in captured.out


# ---- what is known of a contender


def test_rows_know_their_figures_and_lose_them_when_they_are_wrong():
    row = Row("a", "A", peak_bytes=1, sent_bytes=2.0, error=0.1, seconds=[2.0, 4.0])
    assert (row.best, row.mean, row.deviation) == (2.0, 3.0, pytest.approx(2**0.5))
    assert over(row, Row("b", "B", seconds=[8.0])) == 0.25
    assert over(row, None) is None
    assert row_of([row], "a") is row
    assert row_of([row], "b") is None
    row.convict("off")
    assert (row.status, row.note, row.peak_bytes, row.sent_bytes, row.error, row.best) == ("wrong", "off", *[None] * 4)


@pytest.mark.parametrize("name", ["megabatch", "dense", "lightly"])
def test_the_error_is_that_of_the_loss_and_its_gradients_against_float64(name, tmp_path):
    case = Case("nt_xent", 40, 8)
    contender = CONTENDERS[name]
    path = trial.Truths(case, tmp_path).path(contender.normalizes)
    row = trial.examine(case, Row(name, ""), path)
    assert row.status == "ok"
    assert row.error is not None
    assert 1e-9 < row.error < 2e-6
    truth = torch.load(path)
    assert row.error == pytest.approx(trial.error(trial.results(contender.make(case), case.inputs()), truth), rel=0.5)
    spoiled = {key: value * (1.001 if "features 2" in key else 1) for key, value in truth.items()}
    assert trial.error(spoiled, truth) == pytest.approx(1e-3)


def test_every_benchmark_is_listed_with_help(capsys):
    assert main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, (_, summary) in COMMANDS.items():
        assert f"{name} {summary}" in out


def test_every_contender_of_every_benchmark_is_in_the_registry(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    known = {("loss", name) for name in CONTENDERS} | {("ring", name) for name in ENTRANTS}
    known |= {("chunked", name) for name in CACHERS} | {("gradients", peer.title) for peer in PEERS}
    assert known <= {(benchmark, name) for benchmark, entries in REGISTRY.items() for name in entries}
    assert set(REGISTRY) <= set(COMMANDS)
    assert all(name in out for _, name in known)
    assert main(["list", "ring"]) == 0
    assert "open_clip SigLipLoss" not in capsys.readouterr().out
    assert main(["list", "rnig"]) == 2
    assert "list: benchmark must be one of loss, peers" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"demo", "list"}))
def test_every_benchmark_writes_what_it_has_measured(name):
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[name][0]).add_arguments(parser)
    flags = set(parser._option_string_actions)
    assert {"--json", "--csv"} <= flags
    assert ("--plot" in flags) == (name not in {"chunked", "gradients", "kernels"})  # which have no rows to draw


@pytest.mark.parametrize("flag", ["--rows", "--width", "--ranks", "--repeats"])
@pytest.mark.parametrize("number", ["0", "-1", "1.5", "x"])
def test_numbers_that_count_are_whole_and_positive(flag, number, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ring", flag, number])
    assert f"{flag}: must be a whole number from 1 on, got '{number}'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["json", "csv", "plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(kind, tmp_path, capsys):
    folder = tmp_path / "a.png"
    folder.mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["loss", "--rows", "8", f"--{kind}", str(folder)])
    assert (
        f"loss: --{kind} must be a file that can be written to, got {folder}: Is a directory."
        in capsys.readouterr().err
    )


def test_only_what_was_written_is_said_to_be(tmp_path, capsys):
    old = tmp_path / "old.json"
    old.write_text("old")
    with Session("tried", argparse.Namespace(json=old)) as run:
        for _ in run.each([1]):
            raise KeyboardInterrupt
    assert "written to" not in capsys.readouterr().out
    assert old.read_text() == "old"
    with Session("tried", options(tmp_path, "json", "csv", "plot")):
        pass
    assert list((tmp_path / "new").iterdir()) == []


def test_a_device_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["loss", "--device", "cuda"]) == 2
    assert "loss: --device must be one that torch sees, got 'cuda'." in capsys.readouterr().err


def test_ctrl_c_reaches_one_process_and_ends_all(tmp_path):
    """As a terminal sends it: to all processes of the group."""
    path = tmp_path / "out.json"
    words = ["loss", "--rows", "16", "8192", "--losses", "clip", "--contenders", "megabatch", "--seconds", "60"]
    command = [sys.executable, "-m", "megabatch", "bench", *words, "--json", str(path)]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert bench.stdout is not None
    while "clip_loss, N=16," not in bench.stdout.readline():
        assert bench.poll() is None
    time.sleep(1.0)
    os.killpg(bench.pid, signal.SIGINT)
    out, err = bench.communicate(timeout=PATIENCE)
    assert bench.returncode == 130
    assert err.split() == ["stopped", "after", "1", "of", "2", "cases"]
    assert f"written to {path}" in out
    assert [case["rows"] for case in json.loads(path.read_text())["cases"]] == [16]


def test_more_curves_than_looks_still_look_different():
    curves = {f"curve {i}": [] for i in range(14)}
    looks = [str(sorted(style.items(), key=str)) for style in plot._styles(curves).values()]
    assert len(set(looks)) == 14


def test_starting_processes_is_work_too():
    assert work(2, 0) > 0
    assert work(0, 2e12) > 10 * work(1, 0)
    assert work(5, 1e10) == pytest.approx(work(5, 0) + work(0, 1e10))
