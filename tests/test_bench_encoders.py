"""Benchmarks that train encoders: in chunks, and as a whole step with an optimizer."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import megabatch
from megabatch.bench import chunked, measure, step, trial
from megabatch.bench.cases import results
from megabatch.bench.chunked import Encoding, Shape
from megabatch.bench.contenders import CONTENDERS as LOSSES
from megabatch.bench.contenders import NotInstalled
from megabatch.bench.results import Row
from megabatch.bench.step import Setting
from megabatch.distributed.world import World

from .benchmarks import main

CPU = torch.device("cpu")
HERE = World(CPU)
SHAPE = Shape(width=16, layers=1, image=16, context=8, vocabulary=64)


@pytest.mark.parametrize("task", chunked.TASKS)
def test_every_way_to_encode_in_chunks_gives_the_same_gradients(task):
    case = Encoding(task, 96, 32, SHAPE).few()
    assert (case.rows, case.chunk) == (40, 16)  # ragged
    for contender in chunked.entrants(case, list(chunked.CONTENDERS)):
        work = case.work(HERE)
        try:
            made = contender.make(work)
        except (NotInstalled, ImportError, RuntimeError):
            assert contender.package
            continue
        assert trial.fault(case, contender, [results(made, work)]) == "", contender.name


def test_texts_have_lengths_of_real_texts_up_to_the_context():
    case = Encoding("texts", 200, 32, replace(SHAPE, context=128))
    for (_, texts), (_, again) in zip(case.work(HERE).sides, case.work(HERE).sides, strict=True):
        lengths = texts.ne(chunked.PADDING).sum(1)
        assert torch.equal(texts, again)
        assert lengths.min() > 0
        assert lengths.max() == texts.shape[1] <= 128
        assert lengths.float().mean() < 100
        assert all(row[:length].ne(chunked.PADDING).all() for row, length in zip(texts, lengths, strict=True))


def test_chunk_tokens_encodes_fewer_tokens_in_chunks_that_are_no_larger():
    work = Encoding("texts", 200, 32, replace(SHAPE, context=128)).work(HERE)
    tower, texts = work.sides[0]
    sizes: list[int] = []
    tower.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    chunked.ours(work)()
    padded, largest = sum(sizes), max(sizes)
    assert largest == 32 * texts.shape[1]
    sizes.clear()
    chunked.by_tokens(work)()
    assert max(sizes) <= largest
    assert sum(sizes) < 0.75 * padded


def test_padding_that_is_cut_off_changes_no_feature():
    torch.manual_seed(0)
    tower = chunked.Tower(SHAPE, images=False).double()
    texts = torch.randint(1, SHAPE.vocabulary, (4, SHAPE.context))
    texts[:, 5:] = chunked.PADDING
    torch.testing.assert_close(tower(texts), tower(texts[:, :5]))


def test_texts_are_longer_by_default(monkeypatch):
    shapes: dict[str, Shape] = {}

    def hold(name: str, options: Any, where: Any, cases: Any, *_: Any, **__: Any) -> int:
        shapes.update({case.task: case.shape for case in cases})
        return 0

    monkeypatch.setattr(chunked, "hold", hold)
    assert main(["chunked", "--tasks", "pairs", "texts"]) == 0
    assert {task: shape.context for task, shape in shapes.items()} == {"pairs": 32, "texts": 128}
    assert main(["chunked", "--tasks", "pairs", "texts", "--context", "16"]) == 0
    assert {task: shape.context for task, shape in shapes.items()} == {"pairs": 16, "texts": 16}


@pytest.mark.usefixtures("inline")
def test_a_wrong_gradient_in_chunks_gets_no_figures_for_anyone(monkeypatch, tmp_path):
    right = megabatch.chunked

    def weaker(*args: Any, **options: Any) -> Any:
        features = right(*args, **options)
        return 0.99 * features + 0.01 * features.detach()

    monkeypatch.setattr(megabatch, "chunked", weaker)
    path = tmp_path / "out.json"
    words = ["--tasks", "vision", "--contenders", "megabatch", "by_hand", "--json", str(path)]
    assert main(["chunked", "--quick", *words]) == 1
    (case,) = json.loads(path.read_text())["cases"]
    assert {row["name"]: row["status"] for row in case["contenders"]} == {"megabatch": "wrong", "by_hand": "ok"}
    assert all(row["seconds"] == [] for row in case["contenders"])


def test_chunked_writes_time_and_memory(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["--tasks", "pairs", "--contenders", "megabatch", "by_hand", "plain", "--json", str(path)]
    assert main(["chunked", "--quick", *words]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    rows = {row["name"]: row for row in case["contenders"]}
    assert rows["plain"]["peak_bytes"] > rows["megabatch"]["peak_bytes"] > 0
    assert rows["megabatch"]["over_by_hand"] is not None
    assert "/ by hand" in capsys.readouterr().out


def test_chunked_refuses_shapes_that_do_not_fit(capsys):
    assert main(["chunked", "--width", "30"]) == 2
    assert "chunked: --width must be a multiple of 4, --image of --patch, got 30, 64 and 8." in capsys.readouterr().err


# ---- a whole step


def test_all_steps_have_one_loss_and_one_gradient(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    setting = Setting("tiny", 96, 32).few()
    for contender in step.entrants(setting, list(step.CONTENDERS)):
        work = setting.work(HERE)
        before = [parameter.detach().clone() for parameter in work.towers.parameters()]
        assert trial.fault(setting, contender, [results(contender.make(work), work)]) == "", contender.name
        assert all(torch.equal(a, b) for a, b in zip(before, work.towers.parameters(), strict=True))
    assert len(step.entrants(replace(setting, chunk=setting.rows), list(step.CONTENDERS))) == 4


def test_the_parts_of_a_step_are_told_apart_by_the_profiler(monkeypatch):
    """The loss, its backward included, and nothing of the encoders."""
    slow = LOSSES["by_hand"].make

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            for _ in range(300):
                torch.ones(100, 100).exp()
            return gradient

    def make(work: Any) -> Any:
        function = slow(work)
        return lambda *given: Slow.apply(function(*given))

    work = Setting("tiny", 16, 16).work(HERE)
    plain = measure.ranges(step.step(work, "by_hand", chunked=False), CPU, step.PARTS)
    monkeypatch.setitem(LOSSES, "by_hand", replace(LOSSES["by_hand"], make=make))
    found = measure.ranges(step.step(work, "by_hand", chunked=False), CPU, step.PARTS)
    assert set(found) == set(step.PARTS)
    assert all(seconds > 0 for seconds in plain.values())
    assert found["loss"] / sum(found.values()) > plain["loss"] / sum(plain.values())


def test_step_prints_a_verdict_that_includes_the_compiled_dense_loss(tmp_path, capsys):
    path = tmp_path / "out.json"
    names = ["megabatch_whole", "by_hand_whole", "megabatch_chunked", "by_hand_chunked"]
    assert main(["step", "--quick", "--contenders", *names, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "In one piece, the best dense step over megabatch's:" in out
    assert "In chunks, the best dense step over megabatch's:" in out
    small, large = json.loads(path.read_text())["cases"]
    assert [row["name"] for row in small["contenders"]] == names[:2]  # a batch of one chunk
    assert all(row["parts"]["loss"] > 0 for row in large["contenders"])
    assert "compiled_whole" in step.CONTENDERS
    assert "compiled_chunked" in step.CONTENDERS


def row(loss: str, seconds: float | None, peak: int | None, status: str = "ok") -> Row:
    return Row(f"{loss}_whole", loss, status, peak_bytes=peak, seconds=[] if seconds is None else [seconds] * 3)


def test_the_verdict_is_against_the_best_dense_step():
    ours, slow, compiled = row("megabatch", 1.0, 100), row("formula", 2.0, 400), row("compiled", 1.05, 105)
    assert "Up to N=64 a dense loss will do." in step.verdict({64: [ours, slow, compiled]}, chunked=False)
    assert "From N=64 on megabatch matters." in step.verdict({64: [ours, slow]}, chunked=False)
    words = step.verdict({64: [ours, compiled], 128: [ours, row("formula", None, None, "out of memory")]}, False)
    assert "N=64: 1.05 times the time, 1.05 times the memory" in words
    assert "N=128: no dense step ran" in words
    assert "From N=128 on megabatch matters." in words
    again = step.verdict({64: [ours, slow], 128: [ours, compiled]}, chunked=False)
    assert "Up to N=128 a dense loss will do." in again
    assert step.verdict({64: [row("megabatch", None, None, "failed")]}, chunked=False) == ""


def test_a_model_that_cannot_be_made_is_refused_with_its_reason(capsys):
    assert main(["step", "--model", "no-such-model"]) == 2
    assert "step: " in capsys.readouterr().err
