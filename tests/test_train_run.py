"""What happens to a run when the world is not as it was: other processes, other data, damaged files, full disks."""

import io
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megabatch import cli
from megabatch.distributed.world import World
from megabatch.train import checkpoint, eval_command, loop, run_folder
from megabatch.train.checkpoint import Checkpoints
from megabatch.train.data import open_source
from megabatch.train.loading import config_of
from megabatch.train.report import Report
from megabatch.train.run_folder import locked
from megabatch.train.skipped import SkipList

from .ranks import PATIENCE, new_process
from .training import losses, steps, train, write_pairs, write_shapes

ALONE = World(torch.device("cpu"))
FLAGS = ["--global-batch-size", "16", "--chunk-size", "8", "--workers", "0", "--lr", "1e-3", "--lr-scheduler", "const"]
FLAGS += ["--save-steps", "1", "--keep", "0"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return str(write_shapes(tmp_path_factory.mktemp("shapes")))


@pytest.fixture(scope="module")
def three_steps(shapes, tmp_path_factory):
    return train(tmp_path_factory.mktemp("logs"), "--train-data", shapes, *FLAGS, "--steps", "3")


@pytest.fixture
def run(three_steps, tmp_path):
    """A copy of a run of three steps, of which nothing is shared."""
    return Path(shutil.copytree(three_steps, tmp_path / "logs" / "run"))


def resume(run: Path, *more: str) -> int:
    return cli.main(["train", "--logs", str(run.parent), "--name", run.name, "--resume", "latest", *more])


def refused(capsys, *words: str) -> str:
    """The one line that the command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        cli.main(list(words))
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


# ---- one run per folder


def hold(folder: str, rank: int, ready: str, seconds: float) -> None:
    with locked(Path(folder), World(torch.device("cpu"), rank), waits=False):
        Path(ready).touch()
        time.sleep(seconds)


def holder(run: Path, rank: int = 0, seconds: float = PATIENCE):
    ready = run.parent / "ready"
    process = new_process(hold, str(run), rank, str(ready), seconds)
    while not ready.exists():
        assert process.is_alive()
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_any_rank_of_a_run_still_holds_is_refused_by_name(run, capsys, monkeypatch, rank):
    monkeypatch.setattr(run_folder, "PATIENCE", 0.5)
    with locked(run, ALONE, waits=False):
        pass  # rank 0 has left its name
    process = holder(run, rank)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    name = ["--logs", str(run.parent), "--name", "run"]
    said = refused(capsys, "train", *name, "--resume", "latest", "--steps", "4")
    pid = process.pid if rank == 0 else os.getpid()
    assert f"got {run}, which pid {pid} on {socket.gethostname()} runs" in said
    assert f"waiting up to 0 s for pid {pid}" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"} == before
    process.kill()
    process.join()
    assert resume(run, "--steps", "4") == 0


def test_a_new_run_does_not_wait_for_a_folder(shapes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: pytest.fail("waited"))
    with locked(tmp_path / "run", ALONE, waits=False):
        said = refused(capsys, "train", "--train-data", shapes, "--logs", str(tmp_path), "--name", "run", *FLAGS)
    assert f"which pid {os.getpid()} on" in said


def test_a_resume_waits_for_ranks_that_are_still_dying(run, capsys):
    process = holder(run, seconds=1.0)
    assert resume(run, "--steps", "4") == 0
    assert f"waiting up to 60 s for pid {process.pid}" in capsys.readouterr().err


def test_data_workers_hold_the_folder_with_their_run(run):
    with locked(run, ALONE, waits=False):
        worker = os.fork()
        if worker == 0:
            time.sleep(PATIENCE)
            os._exit(0)
    with pytest.raises(ValueError, match="which pid"), locked(run, ALONE, waits=False):
        pass
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    with locked(run, ALONE, waits=False):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    with locked(tmp_path, ALONE, waits=False):
        assert "Function not implemented: nothing keeps a second run out of this folder" in caplog.text


@pytest.mark.parametrize("name", ["../up", ".", "..", "a/b", "/tmp/x", "\x1b[31mred"])
def test_a_name_is_that_of_one_folder(shapes, tmp_path, capsys, name):
    logs = tmp_path / "logs"
    said = refused(capsys, "train", "--train-data", shapes, "--logs", str(logs), "--name", name, *FLAGS)
    assert f"--name must be the name of one folder inside --logs, got {name!r}" in said
    assert not list(tmp_path.iterdir())


# ---- started by srun, and again by torchrun


def test_tasks_of_srun_are_ranks_of_one_run(shapes, tmp_path):
    """In the environment that srun gives them, on a node that is this one."""
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost"}
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    words = ["train", "--train-data", shapes, "--logs", str(tmp_path), "--name", "run", *FLAGS, "--steps", "2"]
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "megabatch", *words],
            env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [task.wait(PATIENCE) for task in tasks] == [0, 0]
    assert "ranks: 2" in (tmp_path / "run" / "out.log").read_text()
    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2]


def has_slurm() -> bool:
    """A cluster that answers; Debian's slurmctld and slurmd on one machine will do."""
    return bool(shutil.which("sinfo")) and subprocess.run(["sinfo"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not has_slurm(), reason="needs SLURM")
def test_a_run_of_srun_saves_and_leaves_when_its_time_runs_out(shapes, tmp_path):
    words = ["train", "--train-data", shapes, "--logs", str(tmp_path), "--name", "run", "--resume", "latest", *FLAGS]
    tasks = ["srun", "-n", "2", "--overcommit", sys.executable, "-m", "megabatch", *words, "--save-steps", "1000000"]
    srun = subprocess.Popen([*tasks, "--steps", "1000000"], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert srun.poll() is None
        time.sleep(0.1)
    srun.send_signal(signal.SIGUSR1)  # handed on to its tasks, as `sbatch --signal=USR1@120` does
    assert srun.wait(PATIENCE) == 75
    left = len(steps(tmp_path / "run"))
    assert "ranks: 2" in (tmp_path / "run" / "out.log").read_text()
    assert f"SIGUSR1: left after step {left}, saved." in (tmp_path / "run" / "out.log").read_text()
    again = [*tasks, "--steps", str(left + 2)]
    assert subprocess.run(again, check=False, timeout=PATIENCE, stderr=subprocess.DEVNULL).returncode == 0
    assert [line["step"] for line in steps(tmp_path / "run")] == [*range(1, left + 3)]


RESTARTED = """
import os, signal, sys, time
from megabatch import cli
from megabatch.train import loop
if os.environ["RANK"] == "1":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        descend = loop.Trainer._descend
        def dying(self, encoder, batch):
            if batch.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return descend(self, encoder, batch)
        loop.Trainer._descend = dying
    else:
        time.sleep(3)  # rank 0 must not meet the address of the one that died
raise SystemExit(cli.main(sys.argv[1:]))
"""


def test_torchrun_restarts_after_a_killed_rank(shapes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    words = ["train", "--train-data", shapes, "--logs-dir", str(tmp_path), *FLAGS, "--steps", "4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    again = [*torchrun, "--max-restarts", "1", str(script), *words, "--name", "killed", "--resume", "latest"]
    whole = [*torchrun, "--standalone", "-m", "megabatch", *words, "--name", "whole"]
    how = {"stderr": subprocess.PIPE, "text": True, "timeout": PATIENCE}
    with ThreadPoolExecutor() as pool:
        for ended in pool.map(lambda command: subprocess.run(command, check=False, **how), (again, whole)):
            assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_ranks_end_with_a_torchrun_that_was_killed(shapes, tmp_path, monkeypatch):
    """Otherwise they would train on, and the run that comes next would wait for its folder."""
    monkeypatch.setattr(run_folder, "PATIENCE", 60.0)
    words = ["train", "--train-data", shapes, "--logs-dir", str(tmp_path), "--name", "run", *FLAGS]
    words += ["--steps", "1000000", "--save-steps", "1000000"]
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "megabatch", *words],
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert torchrun.poll() is None
        time.sleep(0.1)
    ranks = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    assert len(ranks) == 2
    torchrun.kill()
    torchrun.wait()
    try:
        with locked(tmp_path / "run", ALONE, waits=True):
            pass
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int(rank), signal.SIGKILL)


# ---- the data


def write_shard(path: Path, images: list[Path]) -> None:
    with tarfile.open(path, "w") as tar:
        for image in images:
            tar.add(image, image.name)
            member = tarfile.TarInfo(f"{image.stem}.txt")
            caption = image.stem.encode()
            member.size = len(caption)
            tar.addfile(member, io.BytesIO(caption))


@pytest.fixture
def shards(shapes, tmp_path):
    """Two tars of 32 pictures, and a run on them."""
    images = sorted(Path(shapes).parent.glob("*.png"))
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        write_shard(folder / f"{number}.tar", images[number::3])
    (folder / "2.tar").rename(folder / "other.tar")
    return folder


@pytest.mark.parametrize("change", ["replaced", "shortened", "added"])
def test_a_resume_on_other_shards_is_refused_unless_allowed(shapes, shards, tmp_path, capsys, change):
    pattern = f"{shards}/{{0..1}}.tar"
    run = train(tmp_path / "logs", "--train-data", pattern, *FLAGS, "--steps", "2")
    assert (shards / "1.tar").stat().st_size == (shards / "other.tar").stat().st_size  # tars are padded
    more = []
    if change == "replaced":
        (shards / "other.tar").replace(shards / "1.tar")
    elif change == "shortened":
        write_shard(shards / "1.tar", sorted(Path(shapes).parent.glob("*.png"))[1::3][:-1])
    else:
        (shards / "other.tar").rename(shards / "2.tar")
        more = ["--train-data", f"{shards}/{{0..2}}.tar"]
    before = (run / "params.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes()
    words = ["train", "--logs", str(run.parent), "--name", "run", "--resume", "latest", "--steps", "3", *more]
    said = refused(capsys, *words)
    assert "must find the data that it was trained on, got other data: of --train-data" in said
    assert ("2.tar: " if change == "added" else "1.tar: ") in said
    assert before == ((run / "params.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes())
    assert cli.main([*words, "--allow-changed-data"]) == 0
    assert len(steps(run)) == 3
    assert resume(run, "--steps", "4") == 0  # it is this run's data now
    write_shard(shards / "0.tar", sorted(Path(shapes).parent.glob("*.png"))[:3])
    latest = str(run / "checkpoints" / "step_00000004.pt")
    assert "got other data" in refused(capsys, "train", "--resume", latest)  # what was allowed is not allowed again


def test_data_that_was_moved_is_the_same_data(shards, tmp_path):
    run = train(tmp_path / "logs", "--train-data", f"{shards}/{{0..1}}.tar", *FLAGS, "--steps", "2")
    shards.rename(tmp_path / "moved")
    assert resume(run, "--steps", "3", "--train-data", f"{tmp_path}/moved/{{0..1}}.tar") == 0
    assert len(steps(run)) == 3


def test_a_run_is_resumed_from_any_folder(shapes, three_steps, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(shapes).parent)
    shutil.rmtree("logs", ignore_errors=True)
    assert cli.main(["train", "--train-data", "shapes.csv", "--name", "run", *FLAGS, "--steps", "2"]) == 0
    logs = Path("logs").absolute()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.csv").write_text("filepath\ttitle\nblack-cross-left.png\tother data\n")
    assert cli.main(["train", "--logs", str(logs), "--name", "run", "--resume", "latest", "--steps", "3"]) == 0
    assert losses(logs / "run") == losses(three_steps)
    shutil.rmtree(logs)


def test_every_source_notices_what_changes(shapes, tmp_path):
    folder = write_shapes(tmp_path / "shapes").parent
    table, pairs = folder / "shapes.csv", write_pairs(tmp_path / "pairs.jsonl")

    def fingerprint(path: Path) -> list[str]:
        return open_source(str(path)).fingerprint()

    whole = fingerprint(table)
    assert whole == fingerprint(table) == fingerprint(Path(shapes))
    text = table.read_text()
    table.write_text(text.replace("black circle at the left", "white circle at the left"))
    assert fingerprint(table) != whole
    table.write_text(text)
    shutil.copy(folder / "dark-cross-top.png", folder / "black-circle-left.png")
    assert fingerprint(table) != whole
    lines = pairs.read_text().splitlines(keepends=True)
    whole = fingerprint(pairs)
    pairs.write_text("".join([*lines[1:], lines[0].replace("one", "1")]))
    assert fingerprint(pairs) != whole
    icons = open_source("icons").fingerprint()
    assert icons == open_source("icons").fingerprint() != open_source("icons", held_out=True).fingerprint()


# ---- checkpoints


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_latest_skips_a_damaged_checkpoint_and_says_so(run, three_steps):
    flip_a_bit(run / "checkpoints" / "step_00000003.pt")
    torch.load(run / "checkpoints" / "step_00000003.pt", weights_only=True)  # to torch it is a checkpoint
    assert resume(run) == 0
    said = (run / "out.log").read_text()
    assert "step_00000003.pt must be a file that megabatch wrote, got one that is damaged" in said
    assert "It is kept as step_00000003.pt.damaged" in said
    assert "resumed from step_00000002.pt" in said
    assert losses(run) == losses(three_steps)
    assert checkpoint.load(run / "checkpoints" / "step_00000003.pt")["global_step"] == 3


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(run):
    flip_a_bit(run / "checkpoints" / "step_00000003.pt")
    (run / "checkpoints" / "step_00000003.pt").rename(run / "checkpoints" / "step_00000009.pt")
    assert resume(run, "--keep", "1") == 0
    assert [path.name for path in Checkpoints(run / "checkpoints", 0)] == ["step_00000003.pt"]


def test_the_advice_about_a_damaged_checkpoint_works(run, capsys):
    path = run / "checkpoints" / "step_00000003.pt"
    flip_a_bit(path)
    said = refused(capsys, "train", "--resume", str(path))
    assert "Take another checkpoint; train --resume latest takes the newest whole one." in said
    older = str(run / "checkpoints" / "step_00000002.pt")
    assert "Give a new --name" in refused(capsys, "train", "--resume", older)
    assert cli.main(["train", "--resume", older, "--logs", str(run.parent), "--name", "new"]) == 0
    assert resume(run) == 0


def test_a_run_all_of_whose_checkpoints_are_damaged_does_not_begin_again(run, capsys):
    for path in Checkpoints(run / "checkpoints", 0):
        flip_a_bit(path)
    for _ in range(2):
        said = refused(capsys, "train", "--logs", str(run.parent), "--name", "run", "--resume", "latest")
        assert "got damaged ones: step_00000003.pt, step_00000002.pt, step_00000001.pt" in said
    assert len(steps(run)) == 3


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_is_read_once(run, monkeypatch, named):
    read = []
    original = torch.load
    monkeypatch.setattr(torch, "load", lambda path, **options: (read.append(path), original(path, **options))[1])
    path = run / "checkpoints" / "step_00000003.pt"
    words = ["--resume", str(path)] if named else ["--resume", "latest", "--logs", str(run.parent), "--name", "run"]
    assert cli.main(["train", *words, "--steps", "4"]) == 0
    assert read == [path]


def test_a_restored_run_does_not_depend_on_the_file_any_more(run):
    path = run / "checkpoints" / "step_00000003.pt"
    expected = torch.load(path, weights_only=True)
    state = checkpoint.load(path)
    trainer = loop.Trainer(config_of(path, state), ALONE, run, (path, state))
    path.write_bytes(bytes(path.stat().st_size))  # into the same file
    assert all(
        torch.equal(value, expected["optimizer"]["state"][number][name])
        for number, values in trainer.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    )
    weights = trainer.towers.model.state_dict()
    assert all(torch.equal(value, expected["state_dict"][name]) for name, value in weights.items())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("harm", ["flipped", "cut"])
def test_a_harmed_file_is_refused_or_has_what_was_written(three_steps, tmp_path, harm, share):
    whole = three_steps / "checkpoints" / "step_00000003.pt"
    content, expected = bytearray(whole.read_bytes()), checkpoint.load(whole)["state_dict"]
    for offset in range(40):
        place = min(int(share * len(content)) + offset * 7, len(content) - 1 - offset)
        harmed = bytearray(content) if harm == "flipped" else content[:place]
        if harm == "flipped":
            harmed[place] ^= 1 << offset % 8
        (tmp_path / "x.pt").write_bytes(harmed)
        state = expected
        with suppress(ValueError):
            state = checkpoint.load(tmp_path / "x.pt")["state_dict"]
        assert all(torch.equal(value, state[name]) for name, value in expected.items())


def without(*keys: str):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        del state[keys[-1]]

    return change


def replaced(value: object, *keys: str):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


MALFORMED = {
    **{key: without(key) for key in ("state_dict", "megabatch")},
    **{key: without("megabatch", key) for key in ("config", "preprocessing")},
    "no mean": without("megabatch", "preprocessing", "mean"),
    "a list": replaced([1], "megabatch"),
    "no section": replaced({"data": 3}, "megabatch", "config"),
    "no number": replaced({"data": {"workers": "four"}}, "megabatch", "config"),
    "no pixels": replaced({"size": 3}, "megabatch", "preprocessing"),
    "no name": replaced({1: torch.zeros(3)}, "state_dict"),
    "no tensor": replaced({"x": "y"}, "state_dict"),
}
UNTRAINABLE = {
    **{key: without("megabatch", key) for key in ("progress", "figures", "data", "ranks")},
    "no optimizer": without("optimizer"),
    "no groups": without("optimizer", "param_groups"),
    "what pace": replaced({"step": 3, "pace": 4}, "megabatch", "progress"),
    "no group": replaced([3], "optimizer", "param_groups"),
    "no moments": replaced({}, "optimizer", "state"),
    "no step": replaced({0: {"step": 3}}, "optimizer", "state"),
    "too large": replaced({0: {"exp_avg": torch.zeros(1).expand(10**12)}}, "optimizer", "state"),
    "no files": replaced({"train": 3}, "megabatch", "data"),
}


@pytest.mark.parametrize("name", [*MALFORMED, *UNTRAINABLE])
def test_a_malformed_checkpoint_is_refused_by_name(run, capsys, name):
    path = run / "checkpoints" / "step_00000003.pt"
    state = torch.load(path, weights_only=True)
    {**MALFORMED, **UNTRAINABLE}[name](state)
    path.unlink()
    torch.save(state, path)
    assert "step_00000003.pt" in refused(capsys, "train", "--resume", str(path))
    if name in MALFORMED:
        assert "step_00000003.pt" in refused(capsys, "eval", "--checkpoint", str(path), "--val-data", "icons")


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    with pytest.raises(ValueError, match=r"x\.pt must be a file that megabatch wrote"):
        checkpoint.load(tmp_path / "x.pt")
    os.mkfifo(tmp_path / "y.pt")
    with pytest.raises(ValueError, match=r"there must be a file .*y\.pt"):
        checkpoint.load(tmp_path / "y.pt")


# ---- a full disk


def fill_the_disk(words: list[str], what: str) -> None:
    """For files of this process, after the first step: a limit of their size fails as a full disk does."""
    torch.set_num_threads(1)
    original = Report.step

    def step(self, number, values):
        if number == 2:
            limit = 2**20 if what == "checkpoint" else self._metrics.stat().st_size + 20
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        original(self, number, values)

    Report.step = step
    raise SystemExit(cli.main(words))


@pytest.mark.parametrize(("what", "name"), [("checkpoint", "step_00000002.pt"), ("metrics", "metrics.jsonl")])
def test_a_full_disk_is_told_in_a_line_and_loses_nothing(shapes, three_steps, tmp_path, what, name):
    words = ["train", "--train-data", shapes, "--logs", str(tmp_path), "--name", "run", *FLAGS, "--steps", "3"]
    program = f"from {__name__} import fill_the_disk; fill_the_disk({words!r}, {what!r})"
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=PATIENCE, stderr=subprocess.PIPE, text=True
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert f"File too large: '{tmp_path}/run" in ended.stderr
    assert f"{name}'. What was saved before is whole: make room, then go on with --resume latest." in ended.stderr
    run = tmp_path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000001.pt"]
    assert resume(run) == 0
    assert losses(run) == losses(three_steps)


def fill_the_disk_before_the_list(words: list[str]) -> None:
    original = SkipList.write_new

    def write_new(self, world):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        return original(self, world)

    SkipList.write_new = write_new
    raise SystemExit(cli.main(words))


def test_a_full_disk_is_told_in_a_line_where_skipped_samples_are_listed(tmp_path):
    shapes = write_shapes(tmp_path / "shapes")
    next(shapes.parent.glob("*.png")).write_bytes(b"no image")
    words = ["train", "--train-data", str(shapes), "--logs", str(tmp_path), "--name", "run", *FLAGS, "--steps", "6"]
    program = f"from {__name__} import fill_the_disk_before_the_list as fill; fill({words!r})"
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=PATIENCE, stderr=subprocess.PIPE, text=True
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "skipped.jsonl'. What was saved before is whole: make room" in ended.stderr


# ---- signals


def signalled(words: list[str], number: int, said: str) -> None:
    """The signal comes as soon as the data is opened, and in eval while it is read."""
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    module, name = (loop, "open_train") if words[0] == "train" else (eval_command, "evaluate")
    original = getattr(module, name)

    def call(*args, **kwargs):
        os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(module, name, call)
    raise SystemExit(cli.main(words))


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("train", signal.SIGINT, 130),
        ("train", signal.SIGTERM, 75),
        ("train", signal.SIGUSR1, 75),
        ("eval", signal.SIGINT, 130),
    ],
)
def test_a_signal_before_the_first_step_or_in_eval_is_quiet(shapes, three_steps, tmp_path, command, number, code):
    words = {
        "train": ["--train-data", shapes, "--logs", str(tmp_path), "--name", "run", *FLAGS],
        "eval": ["--checkpoint", str(three_steps), "--val-data", shapes],
    }
    process = new_process(signalled, [command, *words[command]], number, str(tmp_path / "said"))
    process.join(PATIENCE)
    assert process.exitcode == code
    assert (tmp_path / "said").read_text() == ""
    assert not (tmp_path / "run" / "params.yaml").exists()
