"""The demo: what each act claims is checked, and a claim that is false here fails it."""

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import demo
from tools.demo import Trained

from .ranks import PATIENCE

MIB = 2**20


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(list(words))


def trained(losses: list[float], recall: float = 0.5) -> Trained:
    held_out = {f"val/{way}_R@{k}": recall for way in demo.WAYS for k in demo.RECALLS} | {"val/loss": 1.0}
    return Trained(Path("x"), 1.0, [*({"train/loss": loss} for loss in losses), held_out])


def runs(**changes: Trained) -> dict[str, Trained]:
    return {title: changes.get(title.split()[0].strip(","), trained([3.0, 2.0, 1.0])) for title in demo.VARIANTS}


def test_curves_must_be_the_same_and_towers_must_learn():
    assert demo.differences(runs()) == demo.too_little(runs()) == []
    off = demo.differences(runs(dense=trained([3.0, 2.1, 1.0])))
    assert len(off) == 2
    assert "megabatch: the loss curve is 1.0e-01 off" in off[0]
    assert len(demo.differences(runs(dense=trained([3.0, math.nan, 1.0])))) == 3
    assert len(demo.differences(runs(dense=trained([3.0])))) == 2  # not of one length
    late = runs(dense=trained([*[1.0] * 10, 5.0]), megabatch=trained([*[1.0] * 10, 6.0]))
    assert demo.differences(late) == []  # after the first steps, roundings grow
    poor = demo.too_little(runs(dense=trained([1.0], recall=0.05)))
    assert poor[0] == "dense loss: R@10, name to icon, must be at least 0.10, got 0.050"
    assert "by chance" in demo.recalls_table(runs(), 100)
    assert "1.0e-01" in demo.curves_table(runs(dense=trained([3.0, 2.1, 1.0])))


def test_the_first_act_is_a_contest_with_what_people_have_under_a_limit(monkeypatch, tmp_path, capsys):
    assert set(demo.LOSSES) == {"formula", "compiled", "megabatch"}  # and not the dense twin, written to be read
    monkeypatch.setattr(demo, "LOSSES", ("formula", "megabatch"))
    words = ["--acts", "1", "--rows", "64", "4096", "--width", "8", "--limit", "100MiB", "--out", str(tmp_path)]
    assert demo.main(options(*words)) == 0
    out = capsys.readouterr().out
    small, large = (line for line in out.splitlines() if line.startswith("open_clip's formula"))
    assert "out of memory" in large
    assert "out of memory" not in small
    assert "largest batch: 64 rows open_clip's formula, 4,096 rows megabatch" in out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_that_breaks_fails_its_act_with_its_last_words(monkeypatch, tmp_path, capsys):
    def broken(*_: Any, **__: Any) -> Trained:
        raise demo.Broke("training ended with exit code 1. Its last words:\nNo space left on device")

    monkeypatch.setattr(demo, "train", broken)
    assert demo.main(options("--acts", "2", "3", "--quick", "--out", str(tmp_path))) == 1
    assert capsys.readouterr().out.count("FAILED: training ended with exit code 1. Its last words:") == 2


def test_a_command_that_takes_more_than_its_limit_ends(tmp_path):
    peak = tmp_path / "peak"
    code = "import sys, torch\nfrom tools import demo\nfrom megabatch import cli\n"
    code += f"cli.main = lambda: int(torch.ones({{}}).sum() == 0)\ndemo.limited({64 * MIB}, {str(peak)!r})"
    for numbers, ended in ((MIB, 0), (64 * MIB, 1)):
        command = [sys.executable, "-c", code.format(numbers)]
        run = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
        assert run.returncode == ended, run.stderr[-500:]
    assert int(peak.read_text()) > 3 * MIB


def test_the_trainer_is_run_as_people_run_it(tmp_path):
    words = [*demo.DATA, "--steps", "1", "--global-batch-size", "32", "--workers", "0"]
    words += ["--val-data", "icons", "--val-num-samples", "40"]
    found = demo.train(words, tmp_path / "logs" / "run")
    assert len(found.losses) == 1
    demo.draw_retrieved(found.folder, tmp_path / "icons.png")  # the picture of the second act
    assert (tmp_path / "icons.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(demo.Broke, match=r"(?s)ended with exit code 2.*--global-batch-size"):
        demo.train([*demo.DATA, "--global-batch-size", "0"], tmp_path / "logs" / "bad")
