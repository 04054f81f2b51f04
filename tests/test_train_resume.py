"""A run that was killed, or asked to leave, goes on as if nothing had been: to the bit."""

import faulthandler
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.functional import dropout

from megabatch import cli
from megabatch.bench.data import serving
from megabatch.train import checkpoint, evaluate, loop, signals
from megabatch.train.data import open_source
from megabatch.train.data.order import Order
from megabatch.train.data.tables import Table
from megabatch.train.report import Report, read_metrics
from megabatch.train.towers.tiny import TinyTowers

from .ranks import PATIENCE, new_process, run_apart
from .training import evaluations, losses, steps, train, write_shapes

STEPS = 8
FLAGS = ["--global-batch-size", "16", "--chunk-size", "8", "--workers", "0", "--steps", str(STEPS), "--lr", "1e-3"]
FLAGS += ["--val-num-samples", "20", "--save-steps", "2", "--val-steps", "4", "--keep", "2", "--name", "run"]


pytestmark = pytest.mark.usefixtures("one_thread")


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
    clocks |= {"train/tflops_per_second", "train/mfu", "train/towers_seconds", "train/loss_seconds"}
    clocks |= {"train/communication_seconds"}
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
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has workers
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
        ("before a checkpoint has its name", 5),
        ("after a checkpoint has its name", 4),
        ("in the backward", 6),
        ("after a line of metrics", 5),
        ("in an evaluation", 2),
    ],
)
def test_a_run_killed_anywhere_goes_on_to_the_bit(shapes, uninterrupted, tmp_path, where, count):
    killed = new_process(run_until_killed, words_for(shapes, tmp_path), where, count)
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL
    assert len(steps(tmp_path / "run")) < STEPS
    assert cli.main(words_for(shapes, tmp_path, "--resume", "latest")) == 0
    assert_same_run(tmp_path / "run", uninterrupted)


def test_the_best_has_its_name_before_the_run_may_be_killed(shapes, tmp_path):
    """With a learning rate of 0 the first evaluation stays the best."""
    words = words_for(shapes, tmp_path, "--lr", "0")
    killed = new_process(
        run_until_killed, words, "after a checkpoint has its name", 4
    )  # data, params, step 2, and one of step 4
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL
    assert cli.main([*words, "--resume", "latest"]) == 0
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "best.pt")["global_step"] == 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The shapes, in two tars."""
    folder = tmp_path_factory.mktemp("shards")
    write_shapes(folder / "shapes")
    images = sorted((folder / "shapes").glob("*.png"))
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for image in images[number::2]:
                tar.add(image, image.name)
                caption = image.stem.replace("-", " ").encode()
                member = tarfile.TarInfo(f"{image.stem}.txt")
                member.size = len(caption)
                tar.addfile(member, io.BytesIO(caption))
    return f"{folder}/{{0..1}}.tar"


def test_drawn_shards_workers_and_fp16_go_on_to_the_bit_too(shards, tmp_path):
    more = ["--dataset-resampled", "--workers", "2", "--precision", "amp", "--val-steps", "100", "--steps", "6"]
    words = words_for(shards, tmp_path, *more)
    assert cli.main([*words, "--name", "whole"]) == 0
    assert cli.main([*words, "--name", "parts", "--steps", "4", "--lr-scheduler", "const"]) == 0
    again = ["train", "--logs", str(tmp_path), "--name", "parts", "--resume", "latest", "--steps", "6"]
    assert cli.main([*words, "--name", "constant", "--lr-scheduler", "const"]) == 0
    assert cli.main(again) == 0
    parts, constant = tmp_path / "parts", tmp_path / "constant"
    assert losses(parts) == losses(constant)
    scaler = [checkpoint.load(run / "checkpoints" / "step_00000006.pt")["scaler"] for run in (parts, constant)]
    assert scaler[0] == scaler[1]


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("place", ["disk", "http"])
def test_tars_on_a_disk_or_a_server_go_on_to_the_bit(shards, tmp_path, monkeypatch, place, workers):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, _, pattern = shards.rpartition("/")
    more = ["--val-steps", "100", "--steps", "6", "--workers", workers]
    assert cli.main(words_for(shards, tmp_path, *more, "--name", "whole")) == 0
    with serving(Path(folder), latency=1) if place == "http" else nullcontext(folder) as base:
        words = words_for(f"{base}/{pattern}", tmp_path, *more)
        killed = new_process(run_until_killed, words, "in the backward", 5)
        killed.join(PATIENCE)
        assert killed.exitcode == -signal.SIGKILL
        assert cli.main([*words, "--resume", "latest"]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_ranks_that_read_from_a_server_go_on_to_the_bit(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, _, pattern = shards.rpartition("/")
    more = ["--val-steps", "100", "--steps", "6"]
    with serving(Path(folder), latency=1) as base:
        for name, function, count, codes in (
            ("whole", on_a_rank, (), [0, 0]),
            ("run", killed_on_ranks, (5,), [1, -signal.SIGKILL]),
            ("run", on_a_rank, (), [0, 0]),
        ):
            words = words_for(f"{base}/{pattern}", tmp_path, *more, "--name", name)
            words += ["--resume", "latest"] if (tmp_path / name).exists() else []
            store = Path(tempfile.mkdtemp(dir=tmp_path))
            ended = run_apart(2, function, store, words, *count)
            assert [code and codes[rank] for rank, code in enumerate(ended)] == codes
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_towers_that_draw_random_numbers_go_on_to_the_bit(shapes, tmp_path, monkeypatch):
    encode = TinyTowers.encode_image
    monkeypatch.setattr(TinyTowers, "encode_image", lambda self, images: dropout(encode(self, images), 0.5))
    words = words_for(shapes, tmp_path, "--val-steps", "100", "--lr-scheduler", "const", "--warmup", "0")
    assert cli.main([*words, "--steps", "4", "--name", "whole"]) == 0
    assert cli.main([*words, "--steps", "2", "--name", "parts"]) == 0
    assert cli.main([*words, "--steps", "4", "--name", "parts", "--resume", "latest"]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_settings_of_the_optimizer_that_are_given_anew_count(shapes, uninterrupted, tmp_path):
    path = str(uninterrupted / "checkpoints" / "step_00000006.pt")
    words = ["train", "--logs", str(tmp_path), "--name", "other", "--resume", path, "--wd", "0.05", "--beta2", "0.5"]
    assert cli.main(words) == 0
    plain, decaying = checkpoint.load(tmp_path / "other" / "checkpoints" / "step_00000008.pt")["optimizer"][
        "param_groups"
    ]
    assert (plain["weight_decay"], decaying["weight_decay"]) == (0, 0.05)
    assert plain["betas"] == decaying["betas"] == (0.9, 0.5)


def test_an_older_checkpoint_begins_another_run(shapes, uninterrupted, capsys):
    before = same_but_for_time(uninterrupted)
    older = uninterrupted / "checkpoints" / "step_00000006.pt"
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", str(older)])
    assert "--resume must be the latest checkpoint of a run that goes on, step_00000008.pt" in capsys.readouterr().err
    assert same_but_for_time(uninterrupted) == before


def test_a_checkpoint_does_not_go_on_in_the_folder_of_another_run(shapes, uninterrupted, tmp_path, capsys):
    victim = train(tmp_path, "--train-data", shapes, *FLAGS[:-2], "--steps", "2", name="victim")
    before = {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}
    path = str(uninterrupted / "checkpoints" / "best.pt")
    with pytest.raises(SystemExit):
        cli.main(["train", "--logs", str(tmp_path), "--name", "victim", "--resume", path])
    assert "--name must be that of a new run, got victim" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_is_in_no_run_needs_a_name(uninterrupted, tmp_path, capsys):
    (tmp_path / "copy.pt").write_bytes((uninterrupted / "checkpoints" / "best.pt").read_bytes())
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", str(tmp_path / "copy.pt")])
    assert "copy.pt must come with --name" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy.pt"]


def test_a_run_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--logs", str(tmp_path), "--name", "fisrt", "--resume", "latest"])
    assert f"--resume latest must find a run, got none at {tmp_path / 'fisrt'}" in capsys.readouterr().err


def test_settings_of_a_resumed_run_taken_elsewhere_start_anew(shapes, uninterrupted, tmp_path):
    path = str(uninterrupted / "checkpoints" / "step_00000006.pt")
    assert cli.main(["train", "--logs", str(tmp_path), "--name", "second", "--resume", path]) == 0
    params = str(tmp_path / "second" / "params.yaml")
    assert cli.main(["train", "--config", params, "--name", "third"]) == 0
    assert losses(tmp_path / "third") == losses(uninterrupted)


def leave_before_the_evaluation(words: list[str]) -> None:
    """SIGTERM comes in the last step, and is heard in it."""
    torch.set_num_threads(1)
    original = loop.Trainer._step

    def step(self, encoder, batch, asked):
        return original(self, encoder, batch, signal.SIGTERM if batch.step == STEPS - 1 else asked)

    loop.Trainer._step = step
    raise SystemExit(cli.main(words))


def test_an_evaluation_that_a_signal_left_out_is_made_up_for(shapes, uninterrupted, tmp_path):
    asked = new_process(leave_before_the_evaluation, words_for(shapes, tmp_path))
    asked.join(PATIENCE)
    assert asked.exitcode == 75
    assert len(evaluations(tmp_path / "run")) == 1
    assert cli.main(words_for(shapes, tmp_path, "--resume", "latest")) == 0
    assert_same_run(tmp_path / "run", uninterrupted)


def asked_on_ranks(rank, group, folder, words):
    """Each rank gets SIGTERM twice, as from a scheduler and from torchrun, while a step is under way."""
    original = loop.Trainer._descend

    def descend(self, encoder, batch):
        if batch.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, encoder, batch)

    loop.Trainer._descend = descend
    raise SystemExit(cli.main(words))


def test_ranks_that_are_asked_twice_save_and_leave(shapes, tmp_path):
    words = words_for(shapes, tmp_path, "--save-steps", "100", "--val-steps", "100")
    assert run_apart(2, asked_on_ranks, tmp_path, words) == [75, 75]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004.pt"]


def test_a_second_ctrl_c_ends_a_run_at_once(monkeypatch):
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0.2)
    with signals.leaving_when_asked() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # handed on by torchrun
        assert asked == [signal.SIGINT] * 2
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


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
        return run_apart(2, function, folder, words, *more)

    assert run("whole", on_a_rank) == [0, 0]
    codes = run("killed", killed_on_ranks, 6)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    assert run("killed", on_a_rank, resume=("--resume", "latest")) == [0, 0]
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def deadly_sample(shapes: str) -> str:
    """One of the fifth step of words_for, and of no later one."""
    source = open_source(shapes)
    order = Order(source.counts, seed=0, batch_size=16)
    rows = [set(order.of_step(step)[1].tolist()) for step in range(STEPS)]
    return Path(source.name(max(rows[4] - rows[5] - rows[6] - rows[7]))).name  # the first are evaluated


def make_deadly(sample: str) -> None:
    """In this process: who reads that sample dies, as of a bug in a decoder."""
    original = Table.__getitem__

    def read(self, index):
        if self.name(index).endswith(sample):
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        return original(self, index)

    Table.__getitem__ = read  # type: ignore[method-assign]


def run_with_deadly_sample(words: list[str], sample: str, killed_at: int) -> None:
    make_deadly(sample)
    run_until_killed(words, "after a line of metrics", killed_at)


def skipped(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "skipped.jsonl").read_text().splitlines()]


def test_a_sample_that_killed_its_worker_is_left_out_of_a_replay(shapes, uninterrupted, tmp_path):
    """The replay could read it: of the fifth step, which was not saved."""
    sample, workers = deadly_sample(shapes), ["--workers", "2", "--val-steps", "100"]
    for name, killed_at in (("whole", 0), ("parts", 6)):
        process = new_process(
            run_with_deadly_sample, words_for(shapes, tmp_path, *workers, "--name", name), sample, killed_at
        )
        process.join(PATIENCE)
        assert process.exitcode == (-signal.SIGKILL if killed_at else 0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (entry,) = skipped(whole)
    assert entry["name"] == str(Path(shapes).parent / sample)
    assert entry["reason"] == "its worker was killed by SIGSEGV"
    assert entry["step"] == 5
    log = (whole / "out.log").read_text()
    assert f"step 5: skipped bad samples: {entry['name']} (its worker was killed by SIGSEGV)" in log
    assert skipped(parts) == [entry]
    with (parts / "skipped.jsonl").open("a") as file:
        file.write('{"step": 6, "name": "of which a killed ru')
    assert cli.main(words_for(shapes, tmp_path, *workers, "--name", "parts", "--resume", "latest")) == 0
    assert_same_run(parts, whole)
    assert [line["train/skipped_samples"] for line in steps(parts)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert losses(parts)[:4] == losses(uninterrupted)[:4]
    assert losses(parts)[4] != losses(uninterrupted)[4]


def deadly_on_ranks(rank, group, folder, words, sample):
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has workers
    make_deadly(sample)
    raise SystemExit(cli.main(words))


def test_every_rank_s_lost_samples_are_in_one_list(shapes, tmp_path):
    sample = deadly_sample(shapes)
    words = words_for(shapes, tmp_path, "--workers", "1", "--val-steps", "100", "--steps", "5")
    assert run_apart(2, deadly_on_ranks, tmp_path, words, sample) == [0, 0]
    assert [(entry["step"], Path(str(entry["name"])).name) for entry in skipped(tmp_path / "run")] == [(5, sample)]
    assert steps(tmp_path / "run")[-1]["train/samples"] == 5 * 16 - 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_run_that_is_asked_to_leave_saves_and_leaves(shapes, tmp_path, number, code):
    flags = ["--steps", "400", "--save-steps", "400", "--val-steps", "400", "--workers", "1"]
    words = words_for(shapes, tmp_path, *flags)
    process = subprocess.Popen(
        [sys.executable, "-m", "megabatch", *words], stderr=subprocess.DEVNULL, start_new_session=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, number)  # as schedulers and terminals do: its workers get it too
    assert process.wait(PATIENCE) == code
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
    assert "must fit --model small, got ValueError: another number of parameters" in capsys.readouterr().err


def test_a_run_that_is_done_is_left_as_it_is(shapes, uninterrupted):
    before = same_but_for_time(uninterrupted)
    assert cli.main(["train", "--logs", str(uninterrupted.parent), "--name", "run", "--resume", "latest"]) == 0
    assert same_but_for_time(uninterrupted) == before
    assert len(evaluations(uninterrupted)) == 2
    assert f"all {STEPS} steps are done" in (uninterrupted / "out.log").read_text()
