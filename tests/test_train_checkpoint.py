"""Checkpoints: whole or not there, nothing unpickled, the last few and the best."""

import io
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch

from megabatch.train import checkpoint
from megabatch.train.checkpoint import Checkpoints, atomically, load

from .ranks import new_process


def state(step: int, value: float = 0.0) -> checkpoint.State:
    return {"global_step": step, "state_dict": {"w": torch.full((3,), value)}, "megabatch": {"config": {}}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_few_are_kept_and_the_best_beside_them(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3, 10):
        checkpoints.write(state(step), is_best=step == 1, for_open_clip=False)
    assert names(checkpoints.folder) == ["best.pt", "step_00000003.pt", "step_00000010.pt"]
    assert load(checkpoints.folder / "best.pt")["global_step"] == 1
    assert checkpoints.latest() == checkpoints.folder / "step_00000010.pt"


def test_keep_0_keeps_all(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    for step in range(5):
        checkpoints.write(state(step), is_best=False, for_open_clip=False)
    assert len(list(checkpoints)) == 5


def test_the_latest_is_by_number_not_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    for step in (99_999_999, 100_000_000):
        checkpoints.write(state(step), is_best=False, for_open_clip=False)
    assert checkpoints.latest() == tmp_path / "step_100000000.pt"


def test_there_is_no_latest_in_an_empty_or_missing_folder(tmp_path):
    assert Checkpoints(tmp_path, keep=1).latest() is None
    assert Checkpoints(tmp_path / "none", keep=1).latest() is None


def test_open_clip_finds_its_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.write(state(step, step), is_best=False, for_open_clip=True)
    assert names(tmp_path) == ["epoch_latest.pt", "step_00000002.pt"]
    assert load(tmp_path / "epoch_latest.pt")["global_step"] == 2


def test_file_systems_without_hard_links_get_a_copy(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    Checkpoints(tmp_path, keep=1).write(state(7), is_best=True, for_open_clip=False)
    assert load(tmp_path / "best.pt")["global_step"] == 7


def write_for_ever(path: str) -> None:
    number = 0
    while True:
        number += 1
        atomically(Path(path), lambda file, n=number: torch.save({"n": torch.full((200_000,), n)}, file))


def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path):
    path = tmp_path / "file.pt"
    for delay in (0.0, 0.003, 0.007, 0.011, 0.02):
        writer = new_process(write_for_ever, str(path))
        while not path.exists():
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        values = torch.load(path, weights_only=True)["n"]
        assert (values == values[0]).all()


def test_two_processes_that_write_one_file_do_not_mix(tmp_path, monkeypatch):
    path = tmp_path / "report.html"

    def write(file):
        file.write(b"one")
        with monkeypatch.context() as other:
            other.setattr(checkpoint.os, "getpid", lambda: -1)
            atomically(path, lambda file: file.write(b"the other"))

    atomically(path, write)
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["report.html"]


def test_what_a_killed_run_was_writing_is_not_a_checkpoint_and_is_cleared(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.write(state(1), is_best=False, for_open_clip=False)
    (tmp_path / "step_00000002.pt.unfinished").write_bytes(b"half")
    assert [path.name for path in checkpoints] == ["step_00000001.pt"]
    checkpoint.clear_unfinished(tmp_path)
    assert names(tmp_path) == ["step_00000001.pt"]


class Harmful:
    def __reduce__(self):
        return (os.mkdir, ("harmed",))


def test_nothing_is_unpickled_but_tensors_and_plain_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"megabatch": Harmful()}, tmp_path / "harmful.pt")
    with pytest.raises(ValueError, match=r"harmful\.pt must be a file that megabatch wrote"):
        load(tmp_path / "harmful.pt")
    assert names(tmp_path) == ["harmful.pt"]
    torch.load(tmp_path / "harmful.pt", weights_only=False)  # the bait works
    assert "harmed" in names(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", pickle.dumps([1, 2])])
def test_another_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.pt must be a file that megabatch wrote"):
        load(tmp_path / "x.pt")


def test_weights_of_others_are_refused_by_name(tmp_path):
    buffer = io.BytesIO()
    torch.save({"state_dict": {}}, buffer)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="--pretrained"):
        load(tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"there must be a file .*y\.pt, got none"):
        load(tmp_path / "y.pt")
