"""A run that was killed, or asked to leave, goes on as if nothing had been: to the bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from megabatch import cli
from megabatch.train import checkpoint, evaluate, loop
from megabatch.train.report import Report, read_metrics

from .ranks import new_process, run_apart
from .training import evaluations, losses, steps, train, write_shapes

STEPS = 8
FLAGS = ["--global-batch-size", "16", "--chunk-size", "8", "--workers", "0", "--steps", str(STEPS), "--lr", "1e-3"]
FLAGS += ["--val-num-samples", "20", "--save-steps", "2", "--val-steps", "4", "--keep", "2", "--name", "run"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return str(write_shapes(tmp_path_factory.mktemp("shapes")))


def words_for(shapes: str, logs: Path, *more: str) -> list[str]:
    return ["train", "--train-data", shapes, "--val-data", shapes, "--logs", str(logs), *FLAGS, *more]


@pytest.fixture(scope="module")
def uninterrupted(shapes, tmp_path_factory):
    logs = tmp_path_factory.mktemp("whole")
    assert cli.main(words_for(shapes, logs)) == 0
    return logs / "run"


def same_but_for_time(run: Path) -> list[dict[str, float]]:
    """What the metrics say, without what the clock and the memory say."""
    clocks = {"train/step_seconds", "train/data_seconds", "train/samples_per_second", "train/memory_mib"}
    lines = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in clocks} for line in lines]


def final_state(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / "checkpoints" / f"step_{STEPS:08d}.pt")["state_dict"]


def assert_same_run(run: Path, whole: Path) -> None:
    assert same_but_for_time(run) == same_but_for_time(whole)
    ended, expected = final_state(run), final_state(whole)
    assert all(torch.equal(ended[name], expected[name]) for name in expected)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        path.name for path in (whole / "checkpoints").iterdir()
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingFile:
    """Half of what is written reaches it."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        self.file.write(bytes(data)[: len(data) // 2])
        self.file.flush()
        die()

    def flush(self):
        pass


def run_until_killed(words: list[str], where: str, count: int) -> None:
    """`megabatch train`, killed when it gets to this place for the count-th time."""
    torch.set_num_threads(1)
    passed = [0]

    def dying(original, after: bool = False):
        def call(*args, **kwargs):
            passed[0] += 1
            if passed[0] == count and not after:
                die()
            result = original(*args, **kwargs)
            if passed[0] == count:
                die()
            return result

        return call

    if where == "half way through a checkpoint":
        original = torch.save

        def save(state, file):
            passed[0] += 1
            original(state, DyingFile(file) if passed[0] == count else file)

        torch.save = save
    elif where == "before a checkpoint has its name":
        checkpoint.os.replace = dying(os.replace)
    elif where == "after a checkpoint has its name":
        checkpoint.os.replace = dying(os.replace, after=True)
    elif where == "in the backward":
        loop.torch.autograd.backward = dying(torch.autograd.backward)
    elif where == "after a line of metrics":
        Report.step = dying(Report.step, after=True)
    elif where == "in an evaluation":
        evaluate._retrieval = dying(evaluate._retrieval)
    raise SystemExit(cli.main(words))


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("half way through a checkpoint", 1),
        ("half way through a checkpoint", 2),
        ("before a checkpoint has its name", 4),
        ("after a checkpoint has its name", 3),
        ("in the backward", 6),
        ("after a line of metrics", 5),
        ("in an evaluation", 2),
    ],
)
def test_a_run_killed_anywhere_goes_on_to_the_bit(shapes, uninterrupted, tmp_path, where, count):
    killed = new_process(run_until_killed, words_for(shapes, tmp_path), where, count)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert len(steps(tmp_path / "run")) < STEPS
    assert cli.main(words_for(shapes, tmp_path, "--resume", "latest")) == 0
    assert_same_run(tmp_path / "run", uninterrupted)


def killed_on_ranks(rank, group, folder, words, count):
    if rank == 1:
        run_until_killed(words, "in the backward", count)
    raise SystemExit(cli.main(words))


def on_a_rank(rank, group, folder, words):
    raise SystemExit(cli.main(words))


def test_ranks_of_which_one_was_killed_go_on_to_the_bit(shapes, tmp_path):
    def run(name, function, *more, resume=()):
        words = words_for(shapes, tmp_path, "--name", name, *resume)
        folder = tmp_path / f"store-{name}-{len(resume)}"
        folder.mkdir()
        return run_apart(2, function, folder, words, *more, group_timeout=15, deadline=60)

    assert run("whole", on_a_rank) == [0, 0]
    codes = run("killed", killed_on_ranks, 6)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    assert run("killed", on_a_rank, resume=("--resume", "latest")) == [0, 0]
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_asked_to_leave_saves_and_leaves(shapes, tmp_path, number, code):
    flags = ["--steps", "400", "--save-steps", "400", "--val-steps", "400", "--workers", "1"]
    words = words_for(shapes, tmp_path, *flags)
    process = subprocess.Popen([sys.executable, "-m", "megabatch", *words], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(30) == code
    done = len(steps(tmp_path / "run"))
    saved = list((tmp_path / "run" / "checkpoints").glob("step_*.pt"))
    assert [path.name for path in saved] == [f"step_{done:08d}.pt"]
    assert f"{signal.Signals(number).name}: left after step {done}, saved" in (tmp_path / "run" / "out.log").read_text()


def test_the_settings_of_a_resumed_run_are_its_own_but_for_what_is_given(shapes, uninterrupted, tmp_path):
    run = train(tmp_path, "--train-data", shapes, *FLAGS[:-2], "--steps", "2")
    assert cli.main(["train", "--logs", str(tmp_path), "--name", "run", "--resume", "latest", "--steps", "4"]) == 0
    assert len(steps(run)) == 4
    params = yaml.safe_load((run / "params.yaml").read_text())
    assert params["optimization"]["steps"] == 4
    assert params["optimization"]["global_batch_size"] == 16
    assert "--steps was 2, now it is 4" in (run / "out.log").read_text()


def test_a_checkpoint_can_be_named_and_taken_to_another_run(shapes, uninterrupted, tmp_path):
    path = str(uninterrupted / "checkpoints" / "step_00000006.pt")
    assert cli.main(["train", "--logs", str(tmp_path), "--name", "other", "--resume", path]) == 0
    assert losses(tmp_path / "other") == losses(uninterrupted)[6:]


def test_latest_of_a_run_that_has_not_begun_begins_it(shapes, uninterrupted, tmp_path):
    assert cli.main(words_for(shapes, tmp_path, "--resume", "latest")) == 0
    assert losses(tmp_path / "run") == losses(uninterrupted)


def test_the_name_of_a_run_that_is_there_is_refused(shapes, uninterrupted, capsys):
    with pytest.raises(SystemExit):
        cli.main(words_for(shapes, uninterrupted.parent))
    assert "--name must be that of a new run, got run" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(shapes, uninterrupted, tmp_path, capsys):
    path = str(uninterrupted / "checkpoints" / "best.pt")
    with pytest.raises(SystemExit):
        cli.main(["train", "--logs", str(tmp_path), "--name", "other", "--resume", path, "--model", "small"])
    assert "must fit --model small" in capsys.readouterr().err


def test_a_run_that_is_done_is_left_as_it_is(shapes, uninterrupted):
    before = same_but_for_time(uninterrupted)
    assert cli.main(["train", "--logs", str(uninterrupted.parent), "--name", "run", "--resume", "latest"]) == 0
    assert same_but_for_time(uninterrupted) == before
    assert len(evaluations(uninterrupted)) == 2
