"""`megabatch train` for real, in small: one and the same run however it is cut, and what it does about trouble."""

import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from megabatch import callers, cli
from megabatch.train import checkpoint, control, loop
from megabatch.train.costs import flops_per_sample, peak_flops
from megabatch.train.encoding import Encoder
from megabatch.train.objective import Objective
from megabatch.train.towers import Towers
from megabatch.train.towers.tiny import TinyTowers

from .ranks import run_apart
from .shims import import_torchvision
from .training import evaluations, losses, steps, train, write_pairs, write_shapes

QUICK = ["--global-batch-size", "32", "--chunk-size", "32", "--workers", "0", "--steps", "6", "--lr", "1e-3"]
QUICK += ["--warmup", "2"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return str(write_shapes(tmp_path_factory.mktemp("shapes")))


@pytest.fixture(scope="module")
def plain(shapes, tmp_path_factory):
    """A run that others are held against."""
    return train(tmp_path_factory.mktemp("plain"), "--train-data", shapes, *QUICK)


def train_on_a_rank(rank: int, group: object, folder: Path, words: list[str]) -> None:
    raise SystemExit(cli.main(words))


def train_on_ranks(ranks: int, folder: Path, *flags: str, name: str = "run", codes: int = 0) -> Path:
    words = ["train", "--logs", str(folder), "--name", name, *flags]
    ended = run_apart(ranks, train_on_a_rank, folder, words)
    assert ended == [codes] * ranks
    return folder / name


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(max((run / "checkpoints").glob("step_*.pt")))["state_dict"]


def moved_parts(run: Path) -> set[str]:
    """Parts of `tiny` that are not as they were at the start."""
    torch.manual_seed(0)
    start = TinyTowers(1 / 0.07, None).state_dict()
    return {name.split(".")[0] for name, value in weights(run).items() if not torch.equal(value, start[name])}


# ---- one and the same run


@pytest.mark.parametrize(
    "flags", [["--workers", "2"], ["--chunk-size", "7"], ["--dense-loss"], ["--memory-budget", "1MiB"]], ids=" ".join
)
def test_workers_chunks_and_the_way_of_the_loss_do_not_change_the_run(shapes, plain, tmp_path, flags):
    run = train(tmp_path, "--train-data", shapes, *QUICK, *flags)
    exact = flags[0] == "--workers"
    assert losses(run) == pytest.approx(losses(plain), abs=0 if exact else 1e-5, rel=0)
    assert losses(plain)[0] > losses(plain)[-1]


def test_ranks_do_not_change_the_run(shapes, plain, tmp_path):
    """Of 32 rows three ranks have 10, 11 and 11."""
    run = train_on_ranks(3, tmp_path, "--train-data", shapes, *QUICK, "--chunk-size", "4")
    assert losses(run) == pytest.approx(losses(plain), abs=1e-5, rel=0)
    for name in ("train/accuracy", "train/grad_norm", "train/logit_scale", "train/lr"):
        assert [line[name] for line in steps(run)] == pytest.approx([line[name] for line in steps(plain)], rel=1e-4)
    assert [line["train/samples"] for line in steps(run)] == [32 * step for step in range(1, 7)]


def test_another_seed_is_another_run(shapes, plain, tmp_path):
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--seed", "1")
    assert losses(run)[0] != pytest.approx(losses(plain)[0], abs=1e-3)


def test_a_batch_may_be_larger_than_the_data(shapes, tmp_path):
    """96 samples: a sample that comes twice is no negative of itself."""
    flags = ["--train-data", shapes, "--global-batch-size", "192", "--chunk-size", "64", "--steps", "1"]
    masked = train(tmp_path, *flags, "--workers", "0", name="masked")
    counted = train(tmp_path, *flags, "--workers", "0", "--duplicates", "none", name="counted")
    assert 1e-3 < losses(counted)[0] - losses(masked)[0] < math.log(2)
    assert "they come 2.0 times in a step" in (masked / "out.log").read_text()


# ---- it learns


def test_it_learns_and_says_so(shapes, tmp_path):
    flags = ["--train-data", shapes, "--val-data", shapes, "--global-batch-size", "48", "--steps", "40", "--lr", "2e-3"]
    run = train(tmp_path, *flags, "--workers", "0", "--chunk-size", "48", "--val-steps", "20", "--crop-scale", "1")
    before, after = evaluations(run)
    assert (before["step"], after["step"]) == (20, 40)
    assert after["val/image_to_text_R@5"] > 0.9
    assert after["val/text_to_image_median_rank"] <= 2
    assert after["val/loss"] < before["val/loss"] < math.log(96)
    assert losses(run)[-1] < 1
    assert (run / "checkpoints" / "best.pt").exists()


@pytest.mark.parametrize("loss", ["siglip", "infonce"])
def test_every_loss_learns(shapes, tmp_path, loss):
    flags = ["--train-data", shapes, "--global-batch-size", "96", "--steps", "15", "--lr", "2e-3", "--workers", "0"]
    run = train(tmp_path, *flags, "--loss", loss, "--chunk-size", "96")
    dense = train(tmp_path, *flags, "--loss", loss, "--chunk-size", "96", "--dense-loss", "--steps", "3", name="dense")
    assert losses(run)[-1] < 0.8 * losses(run)[0]
    assert losses(dense)[0] == pytest.approx(losses(run)[0], abs=1e-5)


@pytest.mark.parametrize(("precision", "slack"), [("amp_bf16", 0.05), ("amp", 0.01)])
def test_half_precision_trains_as_float32_does(shapes, plain, tmp_path, precision, slack):
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--precision", precision)
    assert losses(run) == pytest.approx(losses(plain), abs=slack)
    assert losses(run) != losses(plain)
    assert all(value.dtype == torch.float32 for value in weights(run).values() if value.is_floating_point())


@pytest.mark.parametrize(("flags", "precision"), [([], "highest"), (["--tf32"], "high")])
def test_products_are_tf32_only_where_asked(shapes, tmp_path, request, flags, precision):
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    train(tmp_path, "--train-data", shapes, *QUICK, "--steps", "1", *flags)
    assert torch.get_float32_matmul_precision() == precision


def test_texts_train_a_text_tower_alone(tmp_path):
    pairs = str(write_pairs(tmp_path / "pairs.jsonl"))
    flags = ["--train-data", pairs, "--val-data", pairs, "--global-batch-size", "64", "--workers", "0", "--lr", "3e-3"]
    run = train(tmp_path, *flags, "--steps", "15")
    assert losses(run)[-1] < 0.5 * losses(run)[0]
    assert "val/query_to_text_R@1" in evaluations(run)[0]
    assert moved_parts(run) >= {"text"}
    assert "image" not in moved_parts(run)


def test_hard_negatives_are_columns_for_all(tmp_path):
    plain_pairs = str(write_pairs(tmp_path / "plain.jsonl"))
    hard = str(write_pairs(tmp_path / "hard.jsonl", negatives=2))
    flags = ["--loss", "infonce", "--global-batch-size", "64", "--workers", "0", "--steps", "2"]
    without = losses(train(tmp_path, "--train-data", plain_pairs, *flags, name="without"))
    together = losses(train(tmp_path, "--train-data", hard, *flags, name="with"))
    assert together[0] > without[0] + 0.3
    over_ranks = losses(train_on_ranks(2, tmp_path, "--train-data", hard, *flags, name="ranks"))
    assert over_ranks == pytest.approx(together, abs=1e-5)


def test_negatives_need_infonce(tmp_path, capsys):
    hard = str(write_pairs(tmp_path / "hard.jsonl", negatives=2))
    with pytest.raises(SystemExit):
        train(tmp_path, "--train-data", hard, *QUICK)
    assert "--loss must be infonce where samples have negatives, got clip" in capsys.readouterr().err


def test_the_dense_loss_is_for_one_process(shapes, tmp_path):
    train_on_ranks(2, tmp_path, "--train-data", shapes, *QUICK, "--dense-loss", codes=2)


def test_a_locked_image_tower_stays_as_it_was(shapes, tmp_path):
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--lock-image", "--steps", "2")
    assert moved_parts(run) >= {"text"}
    assert "image" not in moved_parts(run)


def test_small_trains_with_checkpointed_activations_as_without(shapes, tmp_path):
    flags = ["--train-data", shapes, *QUICK, "--model", "small", "--steps", "2", "--global-batch-size", "8"]
    plain = train(tmp_path, *flags, "--force-image-size", "32", name="plain")
    again = train(tmp_path, *flags, "--force-image-size", "32", "--grad-checkpointing", name="again")
    assert losses(again) == pytest.approx(losses(plain), abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*script_method.*")  # torch's own
def test_compiled_towers_train_as_plain_ones(tmp_path):
    flags = ["--train-data", str(write_pairs(tmp_path / "pairs.jsonl")), *QUICK, "--steps", "3"]  # one tower, for time
    plain = train(tmp_path, *flags, name="plain")
    torch._dynamo.reset()
    compiled = train(tmp_path, *flags, "--torchcompile", name="compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert losses(compiled) == pytest.approx(losses(plain), abs=1e-4)


# ---- limits


def test_the_scale_is_clamped(shapes, tmp_path):
    flags = ["--train-data", shapes, *QUICK, "--init-logit-scale", "2", "--lr", "1e-2"]
    free = train(tmp_path, *flags, name="free")
    clamped = train(tmp_path, *flags, "--max-logit-scale", "2.01", name="clamped")
    scales = [line["train/logit_scale"] for line in steps(clamped)]
    assert max(line["train/logit_scale"] for line in steps(free)) > 2.02
    assert max(scales) == pytest.approx(2.01, rel=1e-6)


def test_gradients_are_clipped(shapes, plain, tmp_path):
    """Adam forgets the size of gradients unless they are far below eps."""
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--grad-clip-norm", "1e-9")
    assert steps(run)[0]["train/grad_norm"] == steps(plain)[0]["train/grad_norm"]
    assert losses(run)[0] == losses(plain)[0]
    moved = abs(losses(run)[1] - losses(run)[0])
    assert moved != abs(losses(plain)[1] - losses(plain)[0])


# ---- trouble


@pytest.fixture
def bad_shapes(tmp_path):
    table = write_shapes(tmp_path / "bad")
    truncated, other = (table.parent / f"{name}-circle-left.png" for name in ("black", "grey"))
    truncated.write_bytes(truncated.read_bytes()[:90])
    other.write_bytes(b"MZ not an image")
    return str(table)


def test_bad_samples_are_skipped_counted_and_named(bad_shapes, tmp_path):
    flags = ["--train-data", bad_shapes, "--global-batch-size", "48", "--workers", "0", "--steps", "2"]
    run = train(tmp_path, *flags)
    assert steps(run)[-1]["train/skipped_samples"] == 2
    assert steps(run)[-1]["train/samples"] == 94
    log = (run / "out.log").read_text()
    assert "black-circle-left.png (truncated image)" in log
    assert "grey-circle-left.png (not an image (JPEG, PNG, WEBP, GIF, BMP))" in log
    assert log.count("(truncated image)") == 1
    assert "bad samples were skipped 2 times in all" in log
    over_ranks = train_on_ranks(2, tmp_path, *flags, name="ranks")
    assert losses(over_ranks) == pytest.approx(losses(run), abs=1e-5)
    assert steps(over_ranks)[-1]["train/skipped_samples"] == 2


def poisoned_encode(self, images):
    """Not a number where the whole image is of one shade, which none of the shapes is."""
    features = self.image(images)
    flat = images.flatten(1).amax(1) == images.flatten(1).amin(1)
    return features.masked_fill(flat[:, None], math.nan)


@pytest.fixture
def poisoned(tmp_path):
    """One sample of 96 makes the towers below give no number."""
    table = write_shapes(tmp_path / "poisoned")
    Image.new("L", (32, 32), 255).save(table.parent / "grey-square-top.png")
    return str(table)


def train_poisoned(rank, group, folder, words):
    TinyTowers.encode_image = poisoned_encode
    raise SystemExit(cli.main(words))


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_named(poisoned, tmp_path):
    flags = ["--train-data", poisoned, "--logs", str(tmp_path), "--global-batch-size", "32", "--steps", "6"]
    words = ["train", *flags, "--name", "run", "--workers", "0", "--lr", "1e-3", "--save-steps", "1", "--keep", "0"]
    assert run_apart(2, train_poisoned, tmp_path, words) == [0, 0]
    run = tmp_path / "run"
    bad = [line["step"] for line in steps(run) if not math.isfinite(line["train/loss"])]
    assert len(bad) == 2  # 6 steps of 32 are two passes
    assert steps(run)[-1]["train/nonfinite_steps"] == 2
    named = [json.loads(line) for line in (run / "nonfinite.jsonl").read_text().splitlines()]
    assert [line["step"] for line in named] == bad
    assert all(any("grey-square-top.png" in name for name in line["samples"]) for line in named)
    assert all(len(line["samples"]) == 32 for line in named)
    scales = {line["step"]: line["train/logit_scale"] for line in steps(run)}  # before each step
    for step in range(1, 6):
        assert (scales[step + 1] == scales[step]) == (step in bad)
    assert all(value.isfinite().all() for value in weights(run).values())


def test_it_gives_up_after_too_many_in_a_row(shapes, tmp_path, capsys):
    run = train(
        tmp_path, "--train-data", shapes, *QUICK, "--lr", "1e30", "--warmup", "0", "--max-nonfinite", "3", code=1
    )
    assert len(steps(run)) <= 5
    assert [math.isfinite(value) for value in losses(run)[-3:]] == [False] * 3
    assert "3 steps in a row taught nothing" in (run / "out.log").read_text()


def test_samples_that_cannot_be_read_at_all_are_not_called_divergence(shapes, tmp_path):
    table = write_shapes(tmp_path / "bad")
    for image in table.parent.glob("*.png"):
        image.write_bytes(b"nothing")
    flags = ["--train-data", str(table), "--val-data", str(table), *QUICK, "--max-nonfinite", "3", "--val-steps", "100"]
    run = train(tmp_path, *flags, code=1)
    log = (run / "out.log").read_text()
    assert "none of its samples could be read" in log
    assert "If those could not be read, look at the data" in log
    assert not (run / "checkpoints").exists()


class WithBatchNorm(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower, self.norm = tower, nn.BatchNorm2d(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.tower(self.norm(images))


def test_a_step_that_is_not_finite_leaves_running_statistics_as_they_were(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(callers, "warned", set())
    original = TinyTowers.__init__

    def init(self, *args):
        original(self, *args)
        self.image = WithBatchNorm(self.image)

    def pixels(self, images):
        return Towers.pixels(self, images) * (math.nan if len(images) == 32 and next(calls) == 2 else 1)

    calls = itertools.count()
    monkeypatch.setattr(TinyTowers, "__init__", init)
    monkeypatch.setattr(TinyTowers, "pixels", pixels)
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--save-steps", "1", "--keep", "0")
    assert [math.isfinite(value) for value in losses(run)] == [True, True, False, True, True, True]
    before, after = (
        checkpoint.load(run / "checkpoints" / f"step_0000000{step}.pt")["state_dict"]["image.norm.running_mean"]
        for step in (2, 4)
    )
    assert before.isfinite().all()
    assert after.isfinite().all()
    assert not (run / "checkpoints" / "step_00000003.pt").exists()  # of a step that was not finite


def test_batch_norm_is_warned_of(shapes, tmp_path, monkeypatch):
    original = TinyTowers.__init__

    def init(self, *args):
        original(self, *args)
        self.image = WithBatchNorm(self.image)

    monkeypatch.setattr(TinyTowers, "__init__", init)
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--steps", "1", name="whole")
    assert "batch norms" not in (run / "out.log").read_text()
    with pytest.warns(UserWarning, match="BatchNorm"):
        run = train(tmp_path, "--train-data", shapes, *QUICK, "--steps", "1", "--chunk-size", "16", name="chunks")
    assert "the run depends on the number of ranks and on --chunk-size" in (run / "out.log").read_text()


def test_steps_that_are_not_finite_do_not_push_out_checkpoints(shapes, tmp_path):
    flags = ["--lr", "1e30", "--warmup", "0", "--max-nonfinite", "4", "--save-steps", "1", "--keep", "1"]
    run = train(tmp_path, "--train-data", shapes, *QUICK, *flags, "--steps", "9", code=1)
    finite = sum(math.isfinite(value) for value in losses(run))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{finite:08d}.pt"]


def test_any_seed_will_do(shapes, tmp_path):
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--steps", "1", "--seed", str(2**63 - 1))
    assert math.isfinite(losses(run)[0])


def test_an_evaluation_that_fails_loses_no_training(shapes, tmp_path):
    table = write_shapes(tmp_path / "bad")
    for image in table.parent.glob("*.png"):
        image.write_bytes(b"nothing")
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--val-data", str(table), "--steps", "2", code=1)
    assert "--val-data must have samples, got 96 that were all skipped" in (run / "out.log").read_text()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002.pt"]


def test_what_towers_log_is_in_the_log(shapes, tmp_path):
    run = train(tmp_path, "--train-data", shapes, *QUICK, "--steps", "1", "--lock-image")
    assert "the image tower of tiny has random weights" in (run / "out.log").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "foo"], "--device must be auto, cpu or cuda, got 'foo'"),
        (["--global-batch-size", "1e12"], "--global-batch-size: must be a whole number"),
        (["--global-batch-size", str(10**12)], "--global-batch-size must leave room for two batches in memory, got 10"),
        (["--steps", str(10**30)], "--steps: must be a whole number"),
        (["--workers", str(10**6)], "--workers: must be a whole number, at least 0 and at most 1024"),
        (["--model", "small", "--force-image-size", str(10**6)], "--force-image-size: must be a whole number"),
        (["--device", "cuda"], "torch finds no CUDA device"),
        (["--memory-budget", "5XB"], "memory_budget must be"),
        (["--init-logit-scale", "0.5"], "at least 1"),
        (["--resume", "latest", "--name", "x", "--logs", "FILE"], "Not a directory"),
        (["--logs", "FILE"], "Not a directory"),
        (["--model", "ViT-B-32x"], "ViT-B-32"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_mistakes_are_named_in_one_line(shapes, tmp_path, capsys, flags, message):
    if flags[-1] == "FILE":
        (tmp_path / "file").touch()
        flags = [*flags[:-1], str(tmp_path / "file")]
    import_torchvision()
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--train-data", shapes, *QUICK, "--logs", str(tmp_path), *flags])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
    assert "Traceback" not in said


def test_fp16_finds_its_scale_again(shapes, tmp_path, monkeypatch):
    """The first scale is far too high: steps are skipped until it has come down, and then it trains."""

    def too_high(device: torch.device, precision: str) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, init_scale=2.0**24)

    monkeypatch.setattr(loop.optimization, "make_scaler", too_high)
    run = train(
        tmp_path, "--train-data", shapes, *QUICK, "--precision", "amp", "--steps", "25", "--max-nonfinite", "20"
    )
    skipped = steps(run)[-1]["train/nonfinite_steps"]
    assert 2 < skipped < 20
    assert all(math.isfinite(value) for value in losses(run))
    assert losses(run)[-1] < losses(run)[0]


def train_and_count(rank: int, group: object, folder: Path, words: list[str]) -> None:
    """Collectives that the trainer itself asks for, by step, in a file; not those of the loss and of DDP."""
    asked: list[tuple[int, str]] = []
    trainers: list[loop.Trainer] = []
    names = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_reduce", "barrier")
    names += ("broadcast", "broadcast_object_list", "gather", "new_group", "reduce", "scatter")

    def counted(name, original):
        def call(*args, **kwargs):
            caller = sys._getframe(1).f_globals["__name__"]
            if caller.startswith("megabatch.train") or caller == "megabatch.distributed.world":
                asked.append((trainers[0].progress.step if trainers else -1, name))
            return original(*args, **kwargs)

        return call

    for name in names:
        if hasattr(torch.distributed, name):
            setattr(torch.distributed, name, counted(name, getattr(torch.distributed, name)))
    control._all_gather_single = counted("all_gather_single", control._all_gather_single)
    original = loop.Trainer.run

    def run(self, report):
        trainers.append(self)
        return original(self, report)

    loop.Trainer.run = run
    code = cli.main(words)
    (folder / f"asked-{rank}").write_text(json.dumps(asked))
    raise SystemExit(code)


def test_ranks_exchange_one_small_tensor_per_step(shapes, tmp_path):
    words = ["train", "--train-data", shapes, *QUICK, "--logs", str(tmp_path), "--name", "x", "--save-steps", "2"]
    assert run_apart(2, train_and_count, tmp_path, words) == [0, 0]
    for rank in range(2):
        asked = json.loads((tmp_path / f"asked-{rank}").read_text())
        assert [each for each in asked if each[0] >= 0] == [[step, "all_gather_single"] for step in range(6)]
        assert [-1, "new_group"] not in asked


def train_and_count_messages(rank: int, group: object, folder: Path, words: list[str]) -> None:
    """Those from one rank to another, in a file."""
    sent, original = itertools.count(), torch.distributed.batch_isend_irecv
    torch.distributed.batch_isend_irecv = lambda operations: (next(sent), original(operations))[1]
    code = cli.main(words)
    (folder / f"messages-{rank}").write_text(str(next(sent)))
    raise SystemExit(code)


@pytest.mark.parametrize(("flags", "rings"), [([], False), (["--exchange", "ring"], True)], ids=str)
def test_ranks_exchange_blocks_as_the_flag_says(shapes, tmp_path, flags, rings):
    words = ["train", "--train-data", shapes, *QUICK, "--steps", "1", "--logs", str(tmp_path), "--name", "x", *flags]
    assert run_apart(2, train_and_count_messages, tmp_path, words) == [0, 0]
    for rank in range(2):
        assert (int((tmp_path / f"messages-{rank}").read_text()) > 0) == rings


def train_and_disagree(rank: int, group: object, folder: Path, words: list[str]) -> None:
    """As a faulty device would: rank 1 finds the third gradient not to be finite."""
    if rank == 1:
        calls, original = itertools.count(), loop.optimization.is_finite
        loop.optimization.is_finite = lambda values: next(calls) not in (4, 5) and original(values)
    try:
        cli.main(words)
    except RuntimeError as error:
        (folder / f"said-{rank}").write_text(str(error))
        raise SystemExit(7) from None


def train_on_a_slow_rank(rank: int, group: object, folder: Path, words: list[str]) -> None:
    """Every rank is slow, and rank 1 is later than rank 0 for the loss, and with the gradients of its towers."""
    objective, encode = Objective.__call__, Encoder.texts

    def slow_loss(self: Objective, *args: Any) -> Any:
        time.sleep(0.4 + rank)
        return objective(self, *args)

    def slow_texts(self: Encoder, tokens: torch.Tensor) -> torch.Tensor:
        features = encode(self, tokens)
        features.register_hook(lambda _: time.sleep(0.4 + 1.4 * rank))
        return features

    Objective.__call__, Encoder.texts = slow_loss, slow_texts
    train_on_a_rank(rank, group, folder, words)


def test_waiting_for_other_ranks_is_measured_apart(shapes, tmp_path):
    words = ["train", "--logs", str(tmp_path), "--name", "run", "--train-data", shapes, *QUICK, "--steps", "1"]
    assert run_apart(2, train_on_a_slow_rank, tmp_path, words) == [0, 0]
    (values,) = steps(tmp_path / "run")
    parts = {part: values[f"train/{part}_seconds"] for part in ("data", "towers", "loss", "communication")}
    assert parts["loss"] >= 0.4
    assert parts["towers"] >= 0.4
    assert parts["communication"] > 1.7  # for both: 1.0 + 1.4, less what rank 0 is late by chance
    assert sum(parts.values()) < values["train/step_seconds"]


def test_ranks_that_disagree_on_a_step_end_the_run(shapes, tmp_path):
    """With a learning rate of 0, or the loss would notice that their scales differ."""
    words = ["train", "--train-data", shapes, *QUICK, "--logs", str(tmp_path), "--name", "x", "--lr", "0"]
    assert run_apart(2, train_and_disagree, tmp_path, words) == [7, 7]
    for rank in range(2):
        said = (tmp_path / f"said-{rank}").read_text()
        assert "step 3 must be finite on all ranks or on none, got 1 of 2 on which it was not" in said


@pytest.mark.filterwarnings("ignore:.*script_method.*")  # torch's own
def test_skipped_samples_do_not_compile_anew(tmp_path):
    """Of 64 pairs, in two steps, some have no text."""
    pairs = [json.loads(line) for line in write_pairs(tmp_path / "pairs.jsonl").read_text().splitlines()]
    for number in (3, 17, 40, 41, 42):
        pairs[number]["positive"] = " "
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        run = train(tmp_path, "--train-data", str(tmp_path / "pairs.jsonl"), *QUICK, "--steps", "4", "--torchcompile")
    assert len({line["train/samples"] for line in steps(run)}) == 4
    assert steps(run)[-1]["train/skipped_samples"] == 10


def test_ranks_that_see_different_data_are_told(shapes, tmp_path):
    """Rank 1 lacks the last samples."""
    (tmp_path / "store").mkdir()
    codes = run_apart(2, train_on_different_data, tmp_path / "store", shapes)
    assert codes == [2, 2]
    said = [(tmp_path / "store" / f"said-{rank}").read_text() for rank in range(2)]
    assert "the number of samples must be the same on every rank, got 96 on rank 0 and 90 on rank 1" in said[0]
    assert "got 90 on rank 1 and 96 on rank 0" in said[1]


def train_on_different_data(rank: int, group: object, folder: Path, shapes: str) -> None:
    lines = Path(shapes).read_text().splitlines(keepends=True)
    own = folder / str(rank)
    own.mkdir()
    for image in Path(shapes).parent.glob("*.png"):
        (own / image.name).symlink_to(image)
    (own / "shapes.csv").write_text("".join(lines if rank == 0 else lines[:91]))
    os.chdir(own)
    with open(folder / f"said-{rank}", "w") as sys.stderr:
        raise SystemExit(
            cli.main(["train", "--train-data", "shapes.csv", *QUICK, "--logs", str(folder), "--name", "x"])
        )


@pytest.mark.parametrize("locked", [False, True])
def test_the_work_of_a_sample_is_counted(locked):
    towers = TinyTowers()
    if locked:
        towers.lock_image()
    convolutions = 16 * 16 * 16 * 9 + 8 * 8 * 32 * 16 * 9 + 4 * 4 * 64 * 32 * 9
    image, text = 2 * (convolutions + 64 * 4 * 4 * 128), 2 * (256 * 512 + 512 * 128)
    assert flops_per_sample(towers, texts_only=False) == (1 if locked else 3) * image + 3 * text
    assert flops_per_sample(towers, texts_only=True) == 6 * text


def test_the_peak_is_that_of_the_data_sheet(monkeypatch):
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA GeForce RTX 4090": 165.2e12, "Some GPU": None}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), "bf16") == peak
    assert peak_flops(torch.device("cpu"), "bf16") is None
