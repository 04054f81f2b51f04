"""The demo: three acts played small, and what must make it fail."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from megabatch.bench import plot
from megabatch.bench.demo import big_step, growing, learning, retrieved, trainings
from megabatch.bench.demo.learning import DENSE, OURS, RING
from megabatch.bench.demo.trainings import Broke, Trained
from megabatch.train.data import icons

from .benchmarks import main
from .ranks import PATIENCE

TITLES = (DENSE, OURS, RING)

MIB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole demo, small, in a process of its own; and where its pictures are."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "tmp").mkdir()
    command = [sys.executable, "-m", "megabatch", "bench", "demo", "--quick", "--out", str(folder / "new" / "demo.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True), folder


@pytest.fixture
def trained(tmp_path):
    """A run that never was, with these losses, and this recall everywhere."""

    def make(losses: list[float], recall: float = 0.5) -> Trained:
        steps = [{"step": number, "train/loss": loss, "train/step_seconds": 0.5} for number, loss in enumerate(losses)]
        recalls = {f"val/{way}_R@{k}": recall for way in learning.WAYS for k in learning.RECALLS}
        return Trained(tmp_path, 1.0, [*steps, {"step": len(losses), "val/loss": 1.0, **recalls}])

    return make


def outcome(runs: dict[str, Trained], tmp_path, monkeypatch) -> int:
    """The exit code of the second act with these runs."""
    monkeypatch.setattr(trainings, "train", lambda flags, folder, *, title, ranks: runs[title])
    monkeypatch.setattr(learning, "draw_retrieved", lambda run, path: None)
    monkeypatch.setattr(icons, "_both_sides", lambda: ([], []))
    return main(["demo", "--acts", "2", "--out", str(tmp_path)])


# ---- played


def test_the_quick_demo_plays_three_acts_and_passes(played):
    run, _ = played
    assert run.returncode == 0, run.stdout + run.stderr
    headings = [line for line in run.stdout.splitlines() if line.startswith("Act ")]
    assert [line[:6] for line in headings] == ["Act 1:", "Act 2:", "Act 3:"]
    assert "FAILED" not in run.stdout
    assert "no claim that larger batches are better" in run.stdout


def test_the_first_act_shows_dense_killed_and_megabatch_going_on(played):
    run, folder = played
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("4096 ")]
    assert "killed: out of memory" in line
    assert run.stdout.count("killed:") == 1
    assert "largest batch: 1024 rows dense, 4096 rows with megabatch" in run.stdout
    assert (folder / "new" / "demo.png").read_bytes().startswith(PNG)


def test_the_second_act_trains_three_times_with_one_curve(played):
    run, _ = played
    table = run.stdout.partition("how far it ever is")[2].partition("All are within 1e-05")[0].splitlines()
    found = [(title, line) for title in TITLES for line in table if line.startswith(f"{title}  ")]
    rows = {title: line.removeprefix(title).split()[2:] for title, line in found}
    losses = [float(row[0]) for row in rows.values()]
    assert len(losses) == 3
    assert max(losses) - min(losses) < 1e-5
    assert all(float(apart) <= 1e-5 for row in rows.values() for apart in row[1:])
    assert [len(row) for row in rows.values()] == [1, 3, 3]
    assert "by chance" in run.stdout


def test_the_picture_has_a_dozen_names_with_five_icons_each(played):
    run, folder = played
    path = folder / "new" / "demo-icons.png"
    assert f"picture: {path}" in run.stdout
    with Image.open(path) as opened:
        picture = opened.convert("L")
    cell, icons = retrieved.CELL, retrieved.MARGIN + retrieved.TEXT_WIDTH
    for top in range(retrieved.HEAD, retrieved.HEAD + 12 * cell, cell):
        for left in (retrieved.MARGIN, *range(icons, icons + 5 * cell, cell)):
            assert picture.crop((left, top, left + cell, top + cell)).getextrema()[0] < 128, (top, left)


def test_the_third_act_tells_memory_and_repeated_samples(played):
    run, _ = played
    act = run.stdout.partition("Act 3")[2]
    assert "4,096" in act
    assert "64.0 MiB" in act  # the dense matrix
    (peak,) = [line for line in act.splitlines() if line.startswith("peak memory")]
    assert 100 < float(peak.split()[2].replace(",", "")) < 700


def test_nothing_is_left_behind(played):
    _, folder = played
    assert [path.name for path in (folder / "tmp").iterdir() if "inductor" not in path.name] == []  # torch's own cache
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["demo-icons.png", "demo.png"]


# ---- the limit


def test_under_the_same_limit_the_dense_loss_dies_and_ours_does_not(tmp_path):
    data = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"query": f"question {number}", "positive": f"answer {number}"}) for number in range(64)]
    data.write_text("\n".join(lines))
    plan = replace(big_step.QUICK, batch=4096, chunk=512)
    run, peak = big_step.step_once(plan, 320, tmp_path / "ours" / "run", "--train-data", str(data))
    assert run.metrics[0]["train/samples"] == 4096
    assert peak > 50 * MIB
    with pytest.raises(Broke, match="allocate memory"):
        big_step.step_once(plan, 320, tmp_path / "dense" / "run", "--train-data", str(data), "--dense-loss")


# ---- what makes it fail


def test_equal_curves_and_good_recalls_pass(trained, tmp_path, monkeypatch, capsys):
    run = trained([3.0, 2.0, 1.0])
    assert outcome({DENSE: run, OURS: run, RING: run}, tmp_path, monkeypatch) == 0
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.parametrize("last", [1.0 + 2e-5, float("nan")])
def test_a_curve_that_differs_fails_the_demo(last, trained, tmp_path, monkeypatch, capsys):
    run, other = trained([3.0, 2.0, 1.0]), trained([3.0, 2.0, last])
    assert outcome({DENSE: run, OURS: run, RING: other}, tmp_path, monkeypatch) == 1
    out = capsys.readouterr().out
    assert f"FAILED: {RING}: the loss curve is NOT within 1e-05" in out
    assert out.count("FAILED") == 1


def test_a_curve_that_ends_early_fails_the_demo(trained, tmp_path, monkeypatch, capsys):
    run, other = trained([3.0, 2.0, 1.0]), trained([3.0, 2.0])
    assert outcome({DENSE: run, OURS: other, RING: run}, tmp_path, monkeypatch) == 1
    assert f"FAILED: {OURS}: the loss curve is NOT within 1e-05" in capsys.readouterr().out


def test_curves_may_drift_apart_after_ten_steps(trained, tmp_path, monkeypatch, capsys):
    run, other = trained([1.0] * 11), trained([1.0] * 10 + [1.5])
    assert outcome({DENSE: run, OURS: run, RING: other}, tmp_path, monkeypatch) == 0
    assert "5.0e-01" in capsys.readouterr().out


@pytest.mark.parametrize("recall", [0.099, float("nan")])
def test_a_run_that_has_not_learned_fails_the_demo(recall, trained, tmp_path, monkeypatch, capsys):
    good, bad = trained([1.0]), trained([1.0], recall)
    assert outcome({DENSE: good, OURS: good, RING: bad}, tmp_path, monkeypatch) == 1
    out = capsys.readouterr().out
    assert f"FAILED: {RING}: R@10, name to icon, must be at least 0.10" in out
    assert f"FAILED: {RING}: R@10, icon to name, must be at least 0.10" in out


def test_a_run_that_breaks_fails_the_demo_with_its_last_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learning, "DATA", ["--train-data", "nowhere.csv"])
    monkeypatch.setattr(icons, "_both_sides", lambda: ([], []))
    assert main(["demo", "--acts", "2", "--quick", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"FAILED: {DENSE}: ended with exit code" in out
    assert "nowhere.csv" in out


def test_ranks_that_are_interrupted_leave_no_process(tmp_path):
    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(3.0, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        trainings.train([*learning.DATA, "--steps", "1000000"], tmp_path / "run", title="endless", ranks=2)
    assert [path for path in Path("/proc").glob("[0-9]*") if _speaks_of(path, tmp_path)] == []


def test_a_demo_that_is_terminated_leaves_nothing(tmp_path):
    command = [
        sys.executable,
        "-m",
        "megabatch",
        "bench",
        "demo",
        "--quick",
        "--acts",
        "3",
        "--out",
        str(tmp_path / "a.png"),
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("megabatch-demo-*/big-step/run/terminal.log")):
        assert demo.poll() is None
        time.sleep(0.1)
    demo.terminate()
    assert demo.wait(PATIENCE) == 128 + signal.SIGTERM
    assert list(tmp_path.glob("megabatch-demo-*")) == []
    assert [path for path in Path("/proc").glob("[0-9]*") if _speaks_of(path, tmp_path)] == []


def _speaks_of(process: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in (process / "cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return False


# ---- what is missing


@pytest.mark.usefixtures("inline")
def test_the_first_act_without_matplotlib_says_how_to_install_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(growing, "step_within", lambda limit, name, case: plot.Point(case.rows, 1.0, MIB))
    assert main(["demo", "--quick", "--acts", "1", "--out", str(tmp_path)]) == 0
    assert "pip install 'megabatch[bench]'" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_other_acts_without_their_extra_say_how_to_install_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "qtawesome" else object())
    assert main(["demo", "--quick", "--acts", "2", "3", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    for act in (2, 3):
        assert f"Act {act} cannot be played: qtawesome not installed: pip install 'megabatch[train]'" in out


@pytest.mark.usefixtures("inline")
def test_the_first_act_ends_one_size_after_a_death(monkeypatch, tmp_path, capsys):
    def point(limit: int, name: str, case) -> plot.Point:
        return plot.Point(case.rows, 1.0, MIB, killed="out of memory" if name == "dense" and case.rows > 20 else "")

    monkeypatch.setattr(growing, "step_within", point)
    sizes = ["10", "20", "30", "40", "50"]
    assert main(["demo", "--acts", "1", "--rows", *sizes, "--out", str(tmp_path / "plot.png")]) == 0
    out = capsys.readouterr().out
    assert "largest batch: 20 rows dense, 40 rows with megabatch" in out
