"""The benchmark of a whole training step: its parts are the step, its four ways are one computation, and its verdict
says what was measured."""

import gc
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import megabatch
from megabatch.bench.instruments import measure
from megabatch.bench.step import command
from megabatch.bench.step import trial as step_trial
from megabatch.bench.step.contenders import WAYS
from megabatch.bench.step.training import PARTS, Step, Stopwatch, Training
from megabatch.bench.step.trial import Room, Setting, StepRow
from megabatch.bench.step.verdict import pairs, percent, verdict
from megabatch.train.towers.tiny import _NGrams

from .benchmarks import main

GIB = 2**30


@pytest.fixture
def inline(inline: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also, the malloc of this process stays as it is; and what the tests have loaded is not searched for garbage."""
    monkeypatch.setattr(measure, "return_freed_memory", lambda: None)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _few_parameters() -> Iterator[None]:
    """Towers that are tinier than tiny: what an optimizer does to many parameters takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_NGrams, "BUCKETS", 64)
        yield


@pytest.fixture(scope="module")
def training(_few_parameters: None) -> Training:
    return Training.of("tiny", 20)


def cases_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["cases"])


# ---- the parts of a step


class Work:
    """A clock that goes on by what is done: so much for each call of the named parts."""

    def __init__(self, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for owner, name, seconds in (
            (training.towers, "encode_image", 1),
            (training.towers, "encode_text", 10),
            (megabatch, "clip_loss", 100),
            (training.optimizer, "step", 1000),
        ):
            self._patch(monkeypatch, owner, name, seconds)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            self.now += seconds
            output = function(*args, **options)
            if name != "step" and output.requires_grad:
                output.register_hook(lambda gradient: self._pass(2 * seconds))
            return output

        monkeypatch.setattr(owner, name, slow)

    def _pass(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("way", ["megabatch_whole", "megabatch_chunked"])
def test_forward_and_backward_of_the_loss_are_told_from_those_of_the_encoders(way, monkeypatch):
    training = Training.of("tiny", 20)
    work = Work(training, monkeypatch)
    step = Step(training, WAYS[way], chunk=10, watch=Stopwatch(lambda: work.now))
    step()
    # A backward is two forwards; in chunks, two, there is one more forward before it.
    encoder = 33 if way == "megabatch_whole" else 2 * (11 + 33)
    assert step.runs == [{"encoder": encoder, "loss": 300, "optimizer": 1000}]


def test_the_parts_add_up_to_the_step(training):
    ticks = count(step=0.5)
    step = Step(training, WAYS["dense_whole"], chunk=10, watch=Stopwatch(lambda: next(ticks)))
    step()
    assert sum(step.runs[0].values()) == next(ticks) - 0.5  # from the first look at the clock to the last


def test_parts_that_are_not_the_step_are_refused():
    parts = {"encoder": [1.0, 1.0], "loss": [0.5, 0.5], "optimizer": [0.5, 0.5]}
    step_trial.check_sum("dense_whole", [99.0, 2.01], parts)  # once, something else came between
    for seconds in ([2.2, 2.2], [1.9, 2.0]):
        with pytest.raises(RuntimeError, match=r"the parts of dense_whole make up (91|105)% of its step"):
            step_trial.check_sum("dense_whole", seconds, parts)


def test_steps_leave_the_weights_as_they_were(training):
    before = [parameter.clone() for parameter in training.towers.parameters()]
    Step(training, WAYS["megabatch_chunked"], chunk=8)()
    assert all(map(torch.equal, before, training.towers.parameters()))


def test_no_two_rows_of_a_batch_are_alike(training):
    assert len(training.images.unique(dim=0)) == len(training.tokens.unique(dim=0)) == 20


# ---- right first


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_have_one_loss_and_one_gradient(way, training):
    assert step_trial.fault(WAYS[way], training) == ""


def spoiled(monkeypatch: pytest.MonkeyPatch, from_rows: int) -> None:
    right = megabatch.clip_loss

    def wrong(image: Any, *args: Any, **options: Any) -> Any:
        return right(image, *args, **options) * (1.01 if len(image) >= from_rows else 1)

    monkeypatch.setattr(megabatch, "clip_loss", wrong)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("from_rows", [1, 48])
def test_a_wrong_loss_gets_no_figures(from_rows, monkeypatch, tmp_path, capsys):
    """Be it wrong at once, or only at the full size."""
    spoiled(monkeypatch, from_rows)
    monkeypatch.setattr(step_trial, "judge", lambda model: Room(0, 0, 0, 0, 128))
    path = tmp_path / "out.json"
    options = ["--rows", "48", "--chunk", "24", "--repeats", "1", "--seconds", "0"]
    assert main(["step", *options, "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"WRONG: at N={20 if from_rows == 1 else 48} the loss is " in out
    assert "In one piece, " not in out
    (case,) = cases_of(path)
    for row in case["contenders"]:
        assert row["status"] == ("wrong" if row["name"].startswith("megabatch") else "ok")
        assert row["best"] is None
        assert row["parts"] == {}
        for figure in ("peak_bytes", "loss_bytes", "value", "length"):
            assert (row[figure] is None) == (row["status"] == "wrong")


# ---- what would not fit


def test_needed_memory_grows_with_what_is_held():
    room = Room(fixed=7, per_row=1000, per_input=1, matrices=4.5, width=128)
    matrices = 4.5 * 4 * 512**2
    assert room.needed(WAYS["megabatch_whole"], 512, 64) == 512 + 7 + 512_000
    assert room.needed(WAYS["dense_whole"], 512, 64) == 512 + 7 + 512_000 + matrices
    assert room.needed(WAYS["megabatch_chunked"], 512, 64) == 512 + 7 + 64_000
    assert room.needed(WAYS["dense_chunked"], 512, 64) == 512 + matrices
    assert room.needed(WAYS["dense_chunked"], 512, 512) == 512 + matrices
    assert room.needed(WAYS["megabatch_chunked"], 32, 64) == 32 + 7 + 32_000


@pytest.mark.usefixtures("inline")
def test_what_would_not_fit_is_not_run_and_its_figure_is_marked(monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(step_trial, "examine", lambda setting, row: ran.append(row.name) or row)
    monkeypatch.setattr(step_trial, "hold_together", lambda rows, setting: None)
    monkeypatch.setattr(step_trial, "bytes_of_loss", lambda loss, case: 1)
    monkeypatch.setattr(step_trial, "race", lambda setting, names, *_: ({n: [1.0] for n in names}, {}))
    room = Room(0, per_row=GIB / 1024, per_input=0, matrices=5, width=128)
    rows = step_trial.contest(Setting("tiny", 4096, 256), room, limit=GIB, repeats=1, seconds=0)
    assert ran == ["dense_chunked", "megabatch_chunked"]
    for row in rows[:2]:
        assert (row.status, row.peak_bytes, row.seconds) == ("would not fit", None, [])
    assert rows[1].note == "about 4.00 GiB, extrapolated"
    assert rows[1].extrapolated_bytes == 4 * GIB


# ---- the verdict


def row(way: str, loss: float = 0.0, rest: float = 1.0, peak: int = 100, status: str = "ok") -> StepRow:
    own = StepRow(way, WAYS[way].title, status)
    if status == "ok":
        own.seconds, own.parts = [loss + rest], {"encoder": [rest], "loss": [loss], "optimizer": [0.0]}
        own.held_bytes, own.peak_bytes, own.loss_bytes = 40, peak - 40, 10
    return own


def measured(*dense: StepRow) -> dict[int, list[StepRow]]:
    """One batch after the other, each twice the one before, and a loss of ours that takes a tenth of the step."""
    ours = [row("megabatch_whole", 0.1, 0.9) for _ in dense]
    others = [row(way, status="not run") for way in ("dense_chunked", "megabatch_chunked")]
    return {64 * 2**i: [its, own, *others] for i, (its, own) in enumerate(zip(dense, ours, strict=True))}


def test_the_verdict_names_the_shares_and_the_batch_from_which_it_matters():
    found = measured(
        row("dense_whole", 0.9, 0.9),
        row("dense_whole", 0.1, 0.9),
        row("dense_whole", 0.1, 0.9, peak=111),
        row("dense_whole", 0.21, 0.9),
        row("dense_whole", status="would not fit"),
    )
    text = " ".join(verdict(found, chunked=False).split())
    assert "10 % of the time and 10 % of the memory at N=64 (dense: 50 % of the time and 10 % of the memory)" in text
    assert "10 % of the time and 10 % of the memory at N=1024 (dense: does not fit)" in text
    assert "takes 1.80 times the time and 1.00 times the memory at N=64, 1.11 times the time" in text
    assert text.endswith("From N=256 on megabatch matters.")  # not from 64, because of 128
    assert verdict(found, chunked=True) == ""


def test_what_is_held_before_a_step_is_memory_too():
    found = measured(row("dense_whole", 0.1, 0.9, peak=120))
    for own in found[64]:
        own.held_bytes = 10_000
    text = " ".join(verdict(found, chunked=False).split())
    assert "1.00 times the time and 1.00 times the memory at N=64" in text
    assert text.endswith("the dense loss will do.")


@pytest.mark.parametrize("dense", [row("dense_whole", 0.1, 9.0), row("dense_whole", 0.0, 0.9, peak=50)])
def test_where_megabatch_gains_nothing_the_verdict_says_so(dense):
    """Noise in the encoders is no gain."""
    text = verdict(measured(dense), chunked=False)
    assert " ".join(text.split()).endswith("Up to N=64 the dense loss will do.")
    before = verdict(measured(row("dense_whole", 9.0), dense), chunked=False)
    assert " ".join(before.split()).endswith("At N=128 the dense loss will do.")


def test_who_did_not_run_for_other_reasons_is_not_said_not_to_fit():
    found = measured(row("dense_whole", status="failed"))
    (pair,) = pairs(found, chunked=False)
    assert not pair.matters
    assert pair.shares.endswith("at N=64")


def test_small_shares_have_a_decimal():
    assert [percent(x) for x in (0.0012, 0.0994, 0.0996, 0.384, None)] == ["0.1 %", "9.9 %", "10 %", "38 %", "-"]


# ---- the command


@pytest.mark.usefixtures("inline")
def test_step_prints_tables_and_a_verdict_and_writes_json(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["step", "--quick", "--markdown", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| dense, in one piece | " in out
    assert "In chunks, megabatch's loss takes of a step " in out
    small, large = cases_of(path)
    assert [row["status"] for row in small["contenders"]] == ["ok", "ok", "not run", "not run"]
    assert large["rows"] == 96
    assert large["width"] == 128
    for row in large["contenders"]:
        assert row["status"] == "ok", row["note"]
        assert list(row["parts"]) == list(PARTS)
        for whole, *parts in zip(row["seconds"], *row["parts"].values(), strict=True):
            assert 0 < sum(parts) <= whole
        assert 0 < row["time_share"] < 1
        assert row["peak_bytes"] is not None
        assert row["loss_bytes"] is not None


def test_a_model_that_cannot_be_made_is_refused_with_its_reason(monkeypatch, capsys):
    def refuse(model: str) -> Any:
        raise ValueError(f"--model: must be known, got {model!r}.")

    monkeypatch.setattr(command, "towers_of", refuse)
    assert main(["step", "--model", "tinny"]) == 2
    assert capsys.readouterr().err == "step: --model: must be known, got 'tinny'.\n"


@pytest.mark.parametrize(
    ("flag", "words"), [("--limit", "must be above 0, got 0"), ("--chunk", "must be a whole number from 1 on, got '0'")]
)
def test_numbers_that_make_no_sense_are_refused(flag, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["step", flag, "0"])
    assert words in capsys.readouterr().err
