"""`megabatch check`: what it prints and writes, and that it detects a library that is wrong."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch
from megabatch import reference
from megabatch.bench import report
from megabatch.bench.cases import Case
from megabatch.bench.command import COMMANDS as BENCHMARKS
from megabatch.bench.contenders import CONTENDERS, Contender
from megabatch.check import command, gpu
from megabatch.check.cases import LOSSES, cases
from megabatch.check.command import SECTIONS, Check
from megabatch.check.exactness import ALL_ALIKE, TWICE, Comparison
from megabatch.check.gpu import FAILED, HALF, NOT_RUN, OK, OPTIONS, PLAIN, SCALE, Call, Finding, calls, raised
from megabatch.check.report import DENSE, status, summary
from megabatch.cli import COMMANDS, main

from .interpreter import spare_repeated_patches
from .ranks import PATIENCE, Pool
from .test_structure import HEAVY, loaded_by

QUICK = ["check", "--device", "cpu", "--quick", "--backend", "eager"]
FLOAT = [*QUICK, "--dtype", "float32", "--only"]
TINY_SPEED = [
    "check",
    "--device",
    "cpu",
    "--backend",
    "eager",
    "--dtype",
    "float32",
    "--rows",
    "128",
    "--width",
    "16",
    "--only",
]


def run(*words: str, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-m", *launcher) if launcher else ()), "-m", "megabatch", *words]
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=known | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"} | environment,
    )


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


def printed_document(text: str) -> dict[str, Any]:
    (line,) = [line for line in text.splitlines() if line.startswith("{")]
    document: dict[str, Any] = json.loads(line)
    return document


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The verdict of a run that must fail."""
    assert main(list(words)) == 1
    verdict = last_line(capsys.readouterr().out)
    assert verdict.startswith("megabatch check: FAILED - ")
    return verdict


# ---- a right library


def test_every_loss_and_dtype_is_checked_and_one_document_says_so(tmp_path: Path) -> None:
    path = tmp_path / "new" / "check.json"
    ended = run("check", "--device", "cpu", "--quick", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    document = json.loads(path.read_text())
    assert last_line(ended.stdout) == f"megabatch check: {document['verdict']}"
    comparisons = document["comparisons"]
    assert document["verdict"].startswith(f"OK - {len(comparisons)} comparisons, ")
    assert {found["function"] for found in comparisons} == {*LOSSES, "retrieval_ranks", "similarity_topk"}
    for function in LOSSES:
        mine = [found for found in comparisons if found["function"] == function]
        assert {found["dtype"] for found in mine} == {"float32", "bfloat16", "float16", "float64"}
        assert {"loss", "gradient of logit_scale", "statistic accuracy", TWICE} <= {found["result"] for found in mine}
    assert all(found["ok"] and found["error"] <= found["allowed"] for found in comparisons)
    assert sum(group["comparisons"] for group in document["exactness"]) == len(comparisons)
    assert document["machine"]["ranks"] == 1
    assert document["machine"]["torch"] == torch.__version__
    assert "torchrun --nproc-per-node 4 -m megabatch check" in ended.stdout
    text = path.read_text()
    assert not [word for word in (os.uname().nodename, str(Path.home()), str(tmp_path)) if word in text]


def test_without_a_path_the_document_is_printed_before_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLOAT, "siglip_loss", "retrieval_ranks"]) == 0
    out = capsys.readouterr().out
    document = printed_document(out)
    assert [group["function"] for group in document["exactness"]] == ["siglip_loss", "retrieval_ranks"]
    assert document["failed"] == []
    assert last_line(out) == f"megabatch check: {document['verdict']}"


def test_the_full_list_of_cases_is_right_too(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    words = ["check", "--device", "cpu", "--backend", "eager", "--skip-speed", "--dtype", "float32", "bfloat16"]
    assert main([*words, "--only", "clip_loss", "info_nce_loss", "supcon_loss", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    for loss in ("clip_loss", "info_nce_loss", "supcon_loss"):
        checked = {found["case"] for found in document["comparisons"] if found["function"] == loss}
        assert checked == {case.title for case in cases(loss, quick=False)}
    assert document["speed"] == []


# ---- a wrong library


def test_a_tolerance_that_cannot_fail_fails() -> None:
    def found(error: float | None, allowed: float) -> Comparison:
        return Comparison("clip_loss", "plain", "float32", "eager", "loss", error, allowed)

    assert found(1.0, 1.0).ok
    assert not found(1.0, 0.9).ok
    assert not found(1.0, math.inf).ok
    assert not found(1.0, math.nan).ok
    assert not found(None, 1.0).ok


def times(factor: float, of: str = "clip_loss") -> Callable[..., Any]:
    """The loss, a little off."""
    right = getattr(megabatch, of)
    return lambda *args, **options: _apply(right(*args, **options), lambda value: factor * value)


def _apply(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(result[0]), result[1]) if isinstance(result, tuple) else change(result)


def with_inputs(change: Callable[[dict[str, Any]], dict[str, Any]], of: str = "clip_loss") -> Callable[..., Any]:
    """The loss of something else than was given."""
    right = getattr(megabatch, of)
    return lambda **options: right(**(options | change(options)))


def weaker(share: float, name: str, of: str = "clip_loss") -> Callable[..., Any]:
    """The same loss; one gradient is too small."""
    return with_inputs(lambda given: {name: given[name] * (1 - share) + given[name].detach() * share}, of)


def wavering() -> Callable[..., Any]:
    """Every other call is off by one bit or so, which no tolerance sees."""
    right, calls = megabatch.clip_loss, count()
    return lambda *args, **options: _apply(right(*args, **options), lambda x: x * (1 + 1.2e-7 * (next(calls) % 2)))


def raising(*_: object, **options: Any) -> None:
    if options.get("reduction") == "none":
        raise RuntimeError("kernel\nexploded")
    return right_clip_loss(**options)


right_clip_loss: Any = megabatch.clip_loss


def wrong_accuracy(**options: Any) -> Any:
    value = right_clip_loss(**options)
    return (value[0], value[1] | {"accuracy": value[1]["accuracy"] + 0.01}) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (lambda: times(1 + 1e-5), "clip_loss (plain, float32, eager, one process, rank 0) loss: off by"),
        (lambda: times(float("nan")), "loss: is not finite"),
        (lambda: weaker(1e-4, "logit_scale"), "gradient of logit_scale: off by"),
        (lambda: weaker(1e-4, "text_features"), "gradient of text_features: off by"),
        (lambda: weaker(1.0, "image_features"), "gradient of image_features: off by"),
        (lambda: with_inputs(lambda given: {"image_features": given["image_features"].detach()}), "got nothing"),
        (lambda: with_inputs(lambda given: {"ids": None}), "(ids masked, smoothing, weights, float32"),
        (lambda: with_inputs(lambda given: {"same_ids": "mask"}), "(ids positive, per row, normalised, float32"),
        (lambda: with_inputs(lambda given: {"weight": None}), "(ids masked, smoothing, weights, float32"),
        (lambda: with_inputs(lambda given: {"label_smoothing": 0.0}), "(ids masked, smoothing, weights, float32"),
        (lambda: with_inputs(lambda given: {"normalize": False}), "(ids positive, per row, normalised, float32"),
        (lambda: with_inputs(lambda given: {"reduction": "mean"}), "instead of shape (33,)"),
        (wavering, f"{TWICE}: loss"),
        (lambda: raising, "the call: raised RuntimeError: kernel exploded"),
        (lambda: wrong_accuracy, "statistic accuracy: off by"),
    ],
)
def test_a_wrong_loss_is_found_and_named(
    broken: Callable[[], Any], found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(megabatch, "clip_loss", broken())
    assert found in failure(capsys, *FLOAT, "clip_loss")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_found_wrong_in_every_dtype(
    loss: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(megabatch, loss, weaker(1e-4, "logit_scale", of=loss))
    verdict = failure(capsys, *QUICK, "--dtype", dtype, "--only", loss)
    assert f"first: {loss} (" in verdict
    assert "gradient of logit_scale: off by" in verdict
    rows = {"supcon_loss": "features", "info_nce_loss": "key", "nt_xent_loss": "view2"}.get(loss, "text_features")
    monkeypatch.undo()
    monkeypatch.setattr(megabatch, loss, weaker(0.05, rows, of=loss))
    assert f"gradient of {rows}: off by" in failure(capsys, *QUICK, "--dtype", dtype, "--only", loss)


def test_wrong_retrieval_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, topk = megabatch.retrieval_ranks, megabatch.similarity_topk
    monkeypatch.setattr(megabatch, "retrieval_ranks", lambda *args, **options: ranks(*args, **options) + 1)
    assert "retrieval_ranks (whole numbers, float32" in failure(capsys, *FLOAT, "retrieval_ranks")

    def repeated(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        values, indices = topk(*args, **options)
        return values, indices[:, :1].expand_as(indices)

    monkeypatch.setattr(megabatch, "similarity_topk", repeated)
    assert "similarity_topk (whole numbers, float32" in failure(capsys, *FLOAT, "similarity_topk")


def test_what_fails_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(megabatch, "clip_loss", raising)
    assert main([*FLOAT, "clip_loss", "siglip_loss"]) == 1
    out = capsys.readouterr().out
    document = printed_document(out)
    clip, siglip = document["exactness"]
    assert clip["failed"] == 1
    assert clip["comparisons"] > 20
    assert siglip["failed"] == 0
    (wrong,) = document["failed"]
    assert wrong["note"] == "raised RuntimeError: kernel exploded"
    assert last_line(out).startswith(f"megabatch check: FAILED - 1 of {clip['comparisons'] + siglip['comparisons']} ")


# ---- what cannot run, and what is asked for wrongly


def test_a_backend_asked_for_by_name_that_cannot_run_fails_with_its_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise ValueError(f"clip_loss: backend {options['backend']!r} cannot run this call:\n  triton: no such GPU")

    monkeypatch.setattr(megabatch, "clip_loss", refuse)
    words = ["check", "--device", "cpu", "--quick", "--only", "siglip_loss"]
    verdict = failure(capsys, *words, "--backend", "triton")
    assert verdict.endswith("backend 'triton' cannot run this call: triton: no such GPU")
    assert "nothing could be checked" in failure(capsys, *words)  # none asked for by name


def test_a_backend_is_refused_with_the_reasons_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    features = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="cannot run this call") as refused:
        megabatch.clip_loss(features, features, 2.0, backend="triton")
    verdict = failure(capsys, *QUICK, "--only", "clip_loss", "--dtype", "float64", "--backend", "triton")
    assert verdict.endswith(" ".join(str(refused.value).split()))


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main([*FLOAT, "clip_loss", "--json", str(tmp_path / "file" / "check.json")]) == 2
    assert "--json must be a path that can be written to, got" in last_line(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--device", "tpu"], "argument --device: must be one of auto, cpu, cuda, got 'tpu'"),
        (["check", "--rows", "0"], "argument --rows: must be a whole number from 1 on, got '0'"),
        (["check", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["chekc"], "invalid choice: 'chekc'"),
    ],
)
def test_usage_errors_exit_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--device", "cuda"])
    assert ended.value.code == 2
    assert "must be a device of this machine, got 'cuda'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        main(["check"])
    assert "got 1 for rank 1. Use torchrun --nproc-per-node 1." in capsys.readouterr().err


# ---- ranks


def test_ranks_of_torchrun_check_together_and_one_speaks(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    launcher = ("torch.distributed.run", "--nproc-per-node", "2")
    functions = ("clip_loss", "info_nce_loss", "nt_xent_loss", "similarity_topk")
    words = ("--device", "cpu", "--quick", "--dtype", "bfloat16", "--json", str(path), "--only", *functions)
    ended = run("check", *words, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads(path.read_text())
    assert document["machine"]["ranks"] == 2
    assert document["machine"]["group"] == "gloo"
    for function in functions:
        ways = {found["way"] for found in document["comparisons"] if found["function"] == function}
        assert ways >= {"eager, one process", "eager, ring", "eager, gather"}
    assert ALL_ALIKE in {found["result"] for found in document["comparisons"]}
    assert "2 ranks over gloo" in ended.stdout
    assert ended.stdout.count("megabatch check: OK") == 1
    assert last_line(ended.stdout) == f"megabatch check: {document['verdict']}"


def check_with_one_bad_rank(rank: int, group: Any, bad: int, fault: str) -> tuple[int, str]:
    right = megabatch.clip_loss
    # On all ranks, which must make a call from the same line: by nothing where it is right.
    share = {"value": 1e-4, "bit": 1.2e-7}[fault] if rank == bad else 0.0
    megabatch.clip_loss = lambda **options: _apply(right(**options), lambda value: value + share * value.detach())
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = main([*FLOAT, "clip_loss"])
    finally:
        megabatch.clip_loss = right
    return code, printed.getvalue()


def test_one_wrong_rank_fails_all_and_is_named(pool: Pool) -> None:
    answers = pool.run(4, check_with_one_bad_rank, 2, "value")
    assert [code for code, _ in answers] == [1, 1, 1, 1]
    assert [bool(text) for _, text in answers] == [True, False, False, False]
    verdict = last_line(answers[0][1])
    assert "FAILED" in verdict
    assert "rank 2) loss: off by" in verdict
    answers = pool.run(4, check_with_one_bad_rank, 1, "bit")
    assert [code for code, _ in answers] == [1, 1, 1, 1]
    assert f"{ALL_ALIKE}: ranks got" in last_line(answers[0][1])


def check_with_a_rank_that_raises_late(rank: int, group: Any) -> tuple[int, str]:
    right, calls = megabatch.retrieval_ranks, count()

    def late(*args: Any, **options: Any) -> Tensor:
        found = right(*args, **options)
        if rank == 2 and options["group"] is not None and next(calls) % 2:
            raise RuntimeError("too late")
        return found

    printed = io.StringIO()
    try:
        megabatch.retrieval_ranks = late  # on all ranks: they compare the lines that call it
        with contextlib.redirect_stdout(printed):
            code = main([*FLOAT, "retrieval_ranks", "similarity_topk"])
    finally:
        megabatch.retrieval_ranks = right
    return code, printed.getvalue()


def test_a_call_that_raises_on_one_rank_is_the_last_one_over_ranks(pool: Pool) -> None:
    answers = pool.run(4, check_with_a_rank_that_raises_late)
    assert [code for code, _ in answers] == [1, 1, 1, 1]
    text = answers[0][1]
    assert last_line(text).endswith("the call: rank 2 raised RuntimeError: too late")
    assert "no other over ranks was checked" in text
    ways = [(group["function"], group["way"]) for group in printed_document(text)["exactness"]]
    assert ways == [
        ("retrieval_ranks", "eager, one process"),
        ("retrieval_ranks", "eager, ring"),
        ("similarity_topk", "eager, one process"),
    ]


def check_speed_over_ranks(rank: int, group: Any) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([*TINY_SPEED, "clip_loss", "siglip_loss"])
    return code, printed.getvalue()


def test_ranks_are_measured_against_the_dense_loss_over_ranks(pool: Pool) -> None:
    (code, text), *others = pool.run(4, check_speed_over_ranks)
    assert code == 0, text
    assert all(other == (0, "") for other in others)
    clip, siglip = printed_document(text)["speed"]
    assert (clip["ranks"], siglip["loss"]) == (4, "siglip")
    rows = {row["name"]: row for row in clip["contenders"]}
    assert [*rows][:4] == ["ring", "gather", DENSE, "by_hand"]
    for name in ("ring", "gather", DENSE, "by_hand"):
        assert rows[name]["status"] == "ok", name
        assert rows[name]["median"] > 0
        assert rows[name]["peak_bytes"] is not None


# ---- speed


def test_speed_and_memory_are_held_against_the_dense_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY_SPEED, "clip_loss", "supcon_loss"]) == 0
    out = capsys.readouterr().out
    document = printed_document(out)
    assert [contest["loss"] for contest in document["speed"]] == ["clip"]
    for contest in document["speed"]:
        rows = {row["name"]: row for row in contest["contenders"]}
        assert rows["eager"]["median"] > 0
        assert rows["formula"]["median"] > 0
        assert rows["eager"]["peak_bytes"] is not None
    assert "times as fast as dense" in last_line(out)


@pytest.mark.usefixtures("inline")
def test_ours_wrong_in_the_speed_table_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = CONTENDERS["by_hand"].make
    wrong = Contender("eager", "megabatch, eager", lambda work: lambda: 1.01 * right(work)(), ours=True)
    monkeypatch.setitem(CONTENDERS, "eager", wrong)
    verdict = failure(capsys, *TINY_SPEED, "siglip_loss")
    assert "FAILED - speed, siglip_loss, N=128" in verdict


@pytest.mark.usefixtures("inline")
def test_another_that_runs_out_of_memory_is_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(work: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setitem(CONTENDERS, DENSE, Contender(DENSE, "dense", full))
    assert main([*TINY_SPEED, "clip_loss"]) == 0
    out = capsys.readouterr().out
    assert last_line(out).endswith("clip_loss, N=128, D=16, float32: dense out of memory")


def test_no_speed_is_measured_where_results_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(megabatch, "clip_loss", times(1.01))
    assert main([*TINY_SPEED, "clip_loss"]) == 1
    assert printed_document(capsys.readouterr().out)["speed"] == []


# ---- kernels without a GPU


def test_kernels_of_other_losses_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    spare_repeated_patches()
    words = ["check", "--device", "cpu", "--backend", "triton", "--dtype", "bfloat16", "--only"]
    assert main([*words, "info_nce_loss", "supcon_loss"]) == 0
    ways = [(group["function"], group["way"]) for group in printed_document(capsys.readouterr().out)["exactness"]]
    assert ways == [("info_nce_loss", "triton, one process"), ("supcon_loss", "triton, one process")]


def test_kernels_are_checked_by_the_interpreter() -> None:
    pytest.importorskip("triton")
    words = ("check", "--device", "cpu", "--backend", "triton", "--dtype", "float32", "--only", "clip_loss")
    ended = run(*words, TRITON_INTERPRET="1", PYTHONWARNINGS="default")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = printed_document(ended.stdout)
    assert document["machine"]["triton_interpreted"]
    assert [group["way"] for group in document["exactness"]] == ["triton, one process"]
    assert document["speed"] == []
    assert "no speed is measured: kernels are interpreted" in ended.stdout
    assert last_line(ended.stdout).startswith("megabatch check: OK")


# ---- sections for a GPU, without one

CPU = torch.device("cpu")
GRAPHS = ["clip_loss, plain, eager, CUDA graph", "clip_loss, plain, eager, reduce-overhead"]


def test_without_a_gpu_its_sections_are_reported_as_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLOAT, "clip_loss"]) == 0
    out = capsys.readouterr().out
    document = printed_document(out)
    assert tuple(document["sections"]) == SECTIONS
    for name, section in document["sections"].items():
        assert f"{name}: not run: no CUDA device" in out.splitlines()
        assert section == {
            "status": "not run",
            "examined": 0,
            "failed": 0,
            "results": [{"name": "all", "status": "not run", "note": "no CUDA device"}],
        }
    assert last_line(out).endswith("; not run: host reads, launches, graphs (no CUDA device)")


@pytest.mark.parametrize(
    ("device", "quick", "size", "losses", "able", "reason"),
    [
        ("cuda", False, 1, ["clip_loss"], ["eager"], ""),
        ("cpu", False, 1, ["clip_loss"], ["eager"], "no CUDA device"),
        ("cuda", True, 1, ["clip_loss"], ["eager"], "--quick"),
        ("cuda", False, 2, ["clip_loss"], ["eager"], "several ranks, and it takes one process: megabatch check"),
        ("cuda", False, 1, [], ["eager"], "no loss among --only"),
        ("cuda", False, 1, ["clip_loss"], [], "no backend can run"),
    ],
)
def test_sections_for_a_gpu_run_on_one_gpu_in_one_process(
    device: str, quick: bool, size: int, losses: list[str], able: list[str], reason: str
) -> None:
    world, options = SimpleNamespace(device=torch.device(device), size=size), SimpleNamespace(quick=quick)
    assert Check._why_not(SimpleNamespace(world=world, options=options, losses=losses), able) == reason


def test_every_loss_is_called_with_every_option_that_it_has() -> None:
    asked = [(call.loss, call.option, call.dtype) for call in calls(LOSSES, ["eager"], ["float32", *HALF])]
    assert len(set(asked)) == len(asked) == 5 * len(OPTIONS) - 4 - 4 - 2 - 1  # positives, negatives; ids; smoothing
    assert {option for loss, option, _ in asked if loss == "info_nce_loss"} == {*OPTIONS}
    assert {dtype for _, option, dtype in asked if option in HALF} == {*HALF}
    assert {option for _, option, _ in asked} & {*HALF} == {*HALF}
    assert not [call for call in calls(LOSSES, ["eager"], ["float32"]) if call.option in HALF]


# What a loss must be given where the option is named; the others are dtypes and kinds of the scale.
GIVEN = {
    "default": ("normalize", None),
    "plain": ("normalize", False),
    "normalize": ("normalize", True),
    "ids mask": ("same_ids", "mask"),
    "ids positive": ("same_ids", "positive"),
    "label_smoothing": ("label_smoothing", 0.1),
    "return_stats": ("return_stats", True),
    "reduction none": ("reduction", "none"),
}


@pytest.mark.parametrize("call", calls(LOSSES, ["eager"], ["float32", *HALF]), ids=str)
def test_every_call_gives_its_option_and_notices_other_numbers(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that silently dropped its option, or numbers that give the same result, would examine nothing."""
    right, seen = getattr(megabatch, call.loss), {}

    def spy(**given: Any) -> Any:
        seen.update(given)
        return right(**given)

    monkeypatch.setattr(megabatch, call.loss, spy)
    first = call.inputs(CPU)
    value = call.forward(first)
    name, word = GIVEN.get(call.option, ("normalize", False))
    assert seen[name] == word
    tensors = {"ids mask": "ids", "ids positive": "ids", "weight": "weight", "positives": "positives"}
    tensor = (tensors | {"negatives": "negatives"}).get(call.option)
    if tensor:
        assert isinstance(seen["query_ids" if (tensor, call.loss) == ("ids", "info_nce_loss") else tensor], Tensor)
    assert isinstance(seen["logit_scale"], Tensor) == (call.option == SCALE)
    features = [x for x in first.values() if isinstance(x, Tensor) and x.dim() == 2]
    assert {str(x.dtype) for x in features} == {f"torch.{call.dtype}"}
    others = call.other(first)
    assert (call.forward(others) - value).abs() > 1e-3 * value.abs()
    shapes = [[(name, getattr(x, "shape", None)) for name, x in given.items()] for given in (first, others)]
    assert shapes[0] == shapes[1]


# ---- host reads


class Reads(TorchDispatchMode):
    """What torch does on a GPU, on the CPU: raises or warns where a number is read."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if self.mode == "error":
                raise RuntimeError(gpu.SYNCHRONIZING)
            warnings.warn(gpu.SYNCHRONIZING, stacklevel=2)
        return func(*args, **(kwargs or {}))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream * float(upstream.item() == upstream.item())


def dense(**given: Any) -> Any:
    """Which reads nothing."""
    options = {name: x for name, x in given.items() if name not in ("tile", "backend", "memory_budget")}
    return reference.clip_loss(**options)


def read_in_the_forward(**given: Any) -> Any:
    value = dense(**given)
    return value * float(value.item() != 0)


def read_in_the_backward(**given: Any) -> Any:
    return ReadsTwice.apply(dense(**given))


@pytest.mark.parametrize(
    ("loss", "reads"), [(dense, 0), (read_in_the_forward, 1), (read_in_the_backward, 2)], ids=["none", "one", "two"]
)
def test_host_reads_are_counted_and_their_place_is_named(
    loss: Any, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megabatch, "clip_loss", loss)
    (found,) = gpu.host_reads([Call("clip_loss", PLAIN, "eager")], CPU, watch=Reads)
    assert (found.count, found.allowed) == (reads, 0)
    assert found.status == (FAILED if reads else OK)
    assert found.note.startswith("at check/") == bool(reads)


def test_no_cache_of_an_earlier_step_hides_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[float, float] = {}

    def cached(**given: Any) -> Any:
        key = given["image_features"].detach().numpy().tobytes()
        if key not in seen:
            seen[key] = given["image_features"].detach().sum().item()
        return dense(**given)

    monkeypatch.setattr(megabatch, "clip_loss", cached)
    (found,) = gpu.host_reads([Call("clip_loss", PLAIN, "eager")], CPU, watch=Reads)
    assert found.status == FAILED


def test_a_call_that_raises_is_no_host_read_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = count()

    def explode(**given: Any) -> Any:
        if next(steps) == 1:  # the step that is watched, and no other
            raise RuntimeError("kernel\nexploded")
        return dense(**given)

    monkeypatch.setattr(megabatch, "clip_loss", explode)
    monkeypatch.setattr(megabatch, "siglip_loss", lambda logit_bias, **given: dense(**given))
    broken, fine = gpu.host_reads(calls(["clip_loss", "siglip_loss"], ["eager"], ["float32"], [PLAIN]), CPU, Reads)
    assert broken == Finding("clip_loss, plain, eager", FAILED, note="raised RuntimeError: kernel exploded")
    assert fine.status == OK


def test_the_mode_of_torch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        if not modes:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(ZeroDivisionError), gpu.watched("error"):
        raise ZeroDivisionError
    assert modes == ["error", 1]


# ---- launches


def event(name: str, device: Any = DeviceType.CUDA, **more: Any) -> Any:
    return SimpleNamespace(name=name, device_type=device, **more)


def test_what_runs_on_the_device_is_a_launch() -> None:
    events = [event("tile_kernel"), event("tile_kernel"), event("Memset (Device)"), event("Memcpy DtoD")]
    others = [
        event("cudaLaunchKernel", DeviceType.CPU),
        event("aten::mm", DeviceType.CPU),
        event("step", is_user_annotation=True),
        event("Activity Buffer Request"),
        event("cublasLt::splitKreduce_kernel<32, 16>"),
    ]
    found = gpu.launched([*events, *others])
    assert found == {"tile_kernel": 2, "Memset (Device)": 1, "Memcpy DtoD": 1}


def test_the_profiler_is_asked_for_what_the_device_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own profiler, which here sees the CPU alone."""
    asked: list[Any] = []
    profile = torch.profiler.profile

    def on_the_cpu(activities: list[Any]) -> Any:
        asked.extend(activities)
        warnings.warn("of the profiler", stacklevel=2)
        return profile(activities=activities[:1])

    monkeypatch.setattr(torch.profiler, "profile", on_the_cpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.ones(3)
    result, events = gpu.profiled(lambda: x + x)
    assert torch.equal(result, 2 * x)
    assert torch.profiler.ProfilerActivity.CUDA in asked
    assert "aten::add" in {seen.name for seen in events}
    assert not gpu.launched(events)  # none of it on a device


class Operations(TorchDispatchMode):
    """Every operation as an event of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.events.append(event(str(func)))
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], Any]) -> tuple[Any, list[Any]]:
    with Operations() as mode:
        return work(), mode.events


def test_a_small_step_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megabatch, "clip_loss", dense)
    (found,) = gpu.launches(["clip_loss"], ["eager"], "float32", CPU, profile=operations)
    assert found.name == "clip_loss, whole step of 256 rows, eager"
    assert found.allowed == 45
    assert found.count is not None
    few = found.count

    def wordy(**given: Any) -> Any:
        value = dense(**given)
        for _ in range(60):
            value = value * 1.0
        return value

    monkeypatch.setattr(megabatch, "clip_loss", wordy)
    (found,) = gpu.launches(["clip_loss"], ["eager"], "float32", CPU, profile=operations)
    assert found.count >= few + 120  # forward and backward
    assert found.status == FAILED
    assert "aten.mul" in found.note


def test_a_profiler_that_sees_nothing_fails() -> None:
    def blind(work: Callable[[], Any]) -> tuple[Any, list[Any]]:
        return work(), [event("aten::mm", DeviceType.CPU)]

    (found,) = gpu.launches(["clip_loss"], ["eager"], "float32", CPU, profile=blind)
    assert (found.status, found.note) == (FAILED, "the profiler saw nothing run on the device")


def growing(forward: int, backward: int) -> Callable[..., Any]:
    """Launches as they grow: 20 per call, 5 per strip, and so many per tile."""

    def passes(call: Call, device: Any, profile: Any) -> tuple[Counter[str], Counter[str]]:
        strips = call.rows // call.more["tile"] * (2 if call.loss == "nt_xent_loss" else 1)
        tiles = strips * (strips + 1) // 2 if call.loss in ("nt_xent_loss", "supcon_loss") else strips**2
        ahead, back = (Counter({"tile_kernel": 20 + 5 * strips + each * tiles}) for each in (forward, backward))
        return ahead, back

    return passes


@pytest.mark.parametrize("loss", LOSSES)
def test_launches_of_a_tile_are_told_from_those_of_a_call_and_a_strip(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_passes", growing(2, 3))
    found = [each for each in gpu.launches([loss], ["triton"], "float32", CPU) if "tile" in each.name]
    one_pass = loss in ("siglip_loss", "info_nce_loss")
    assert [(each.count, each.allowed) for each in found] == 2 * ([(5, 6)] if one_pass else [(2, 3), (3, 3)])
    assert {each.status for each in found} == {OK}
    monkeypatch.setattr(gpu, "_passes", growing(2, 5))
    found = [each for each in gpu.launches([loss], ["triton"], "float32", CPU) if "tile" in each.name]
    assert [each.status for each in found] == 2 * ([FAILED] if one_pass else [OK, FAILED])
    assert not [each for each in gpu.launches([loss], ["eager"], "float32", CPU) if "tile" in each.name]


# ---- graphs


def replayed(step: Any, inputs: Any) -> Any:
    return step


def stale(step: Any, inputs: Any) -> Any:
    results = step(inputs)
    return lambda others: results


def stale_gradient(step: Any, inputs: Any) -> Any:
    first = step(inputs)
    return lambda others: [step(others)[0], *first[1:]]


def not_a_number(step: Any, inputs: Any) -> Any:
    return lambda others: [x * math.nan for x in step(others)]


def breaks(step: Any, inputs: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def as_it_is(forward: Any) -> Any:
    return forward


def remembers(forward: Any) -> Any:
    first: list[Tensor] = []

    def again(inputs: Any) -> Tensor:
        value = forward(inputs)
        first.append(value.detach())
        return value + (first[0] - value.detach())

    return again


@pytest.mark.parametrize(
    ("capture", "compiler", "words"),
    [
        (replayed, as_it_is, ["", ""]),
        (stale, as_it_is, ["the loss is off by", ""]),
        (stale_gradient, as_it_is, ["gradient 1 is off by", ""]),
        (not_a_number, as_it_is, ["the loss is off by nan", ""]),
        (breaks, as_it_is, ["raised RuntimeError: operation not permitted", ""]),
        (replayed, remembers, ["", "the loss is off by"]),
    ],
)
def test_a_replay_must_give_the_results_of_the_numbers_it_is_given(
    capture: Any, compiler: Any, words: list[str]
) -> None:
    found = gpu.graphs([Call("clip_loss", PLAIN, "eager")], CPU, capture, compiler)
    assert [each.status for each in found] == [FAILED if word else OK for word in words]
    assert all(word in each.note for each, word in zip(found, words, strict=True))
    assert found[1].name == GRAPHS[1]


def test_a_compiler_that_captures_no_graph_is_noted() -> None:
    from torch._dynamo.utils import counters

    def skips(forward: Any) -> Any:
        def counted(inputs: Any) -> Tensor:
            counters["inductor"]["cudagraph_skips"] += 1
            return forward(inputs)

        return counted

    _, found = gpu.graphs([Call("clip_loss", PLAIN, "eager")], CPU, replayed, skips)
    assert found == Finding(GRAPHS[1], OK, note="the compiler captured no graph, 4 skips")


# ---- sections together


def test_findings_are_judged_and_summed_up() -> None:
    fine, over = Finding("a step", OK, 3, 3), Finding("another", FAILED, 4, 3, "why")
    absent = Finding("all", NOT_RUN, note="no CUDA device")
    assert status([fine, over]) == FAILED
    assert status([fine, absent]) == OK
    assert status([absent]) == status([]) == NOT_RUN
    assert summary("launches", [fine, over]) == "launches: 1 of 2 FAILED, first: another: 4, allowed 3 (why)"
    assert summary("launches", [fine]) == "launches: 1 of 1 ok"
    assert summary("launches", [absent]) == "launches: not run: no CUDA device"
    assert str(raised("a step", ValueError("a\n b"))) == "a step: raised ValueError: a b"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sections run, with fakes for what needs a GPU."""
    monkeypatch.setattr(Check, "_why_not", lambda self, able: "")
    monkeypatch.setattr(gpu, "host_reads", lambda calls, device: [Finding(str(x), OK, 0, 0) for x in calls])
    monkeypatch.setattr(gpu, "launches", partial(gpu.launches, profile=operations))
    monkeypatch.setattr(gpu, "graphs", partial(gpu.graphs, capture=replayed, compiler=as_it_is))
    monkeypatch.setattr(gpu, "STEP_LIMIT", 10_000)


@pytest.mark.usefixtures("on_a_gpu")
def test_results_of_every_section_stand_in_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLOAT, "clip_loss"]) == 0
    out = capsys.readouterr().out
    sections = printed_document(out)["sections"]
    asked = len(calls(["clip_loss"], ["eager"], ["float32"]))
    assert sections["host reads"] == {"status": "ok", "examined": asked, "failed": 0, "results": []}
    (step,) = sections["launches"]["results"]  # what was counted is told
    assert step["count"] > 10
    assert sections["graphs"]["status"] == "ok"
    assert sections["graphs"]["examined"] == 6
    assert f"host reads: {asked} of {asked} ok; launches: 1 of 1 ok; graphs: 6 of 6 ok" in last_line(out)
    path = tmp_path / "check.json"
    assert main([*FLOAT, "clip_loss", "--json", str(path)]) == 0
    whole = json.loads(path.read_text())["sections"]
    assert {"name": "clip_loss, plain, eager", "status": "ok", "count": 0, "allowed": 0} in whole["host reads"][
        "results"
    ]
    assert {found["name"] for found in whole["graphs"]["results"]} >= {*GRAPHS}


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("broken", SECTIONS)
def test_a_section_that_fails_or_breaks_stops_no_other_and_fails_the_check(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = broken.replace(" ", "_")

    def explode(*_: Any) -> None:
        raise RuntimeError("device\nlost")

    for examine, said in [
        (explode, f"{broken}: 1 of 1 FAILED, first: the section: raised RuntimeError: device lost"),
        (lambda *_: [Finding("a call", FAILED, 2, 0, "why")], f"{broken}: 1 of 1 FAILED, first: a call: 2, allowed 0"),
    ]:
        monkeypatch.setattr(gpu, function, examine)
        assert main([*FLOAT, "clip_loss"]) == 1
        out = capsys.readouterr().out
        assert last_line(out).startswith(f"megabatch check: FAILED - {said}")
        found = {name: section["status"] for name, section in printed_document(out)["sections"].items()}
        assert found == {name: "failed" if name == broken else "ok" for name in SECTIONS}


@pytest.mark.usefixtures("on_a_gpu")
def test_all_that_failed_is_in_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "STEP_LIMIT", 3)
    monkeypatch.setattr(megabatch, "clip_loss", times(1.01))
    verdict = failure(capsys, *FLOAT, "clip_loss")
    assert "comparisons, first: clip_loss (" in verdict
    assert "; launches: 1 of 1 FAILED, first: clip_loss, whole step of 256 rows, eager: " in verdict


def test_sections_that_broke_before_leave_the_document_and_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Check, "_contest", explode)
    assert main([*TINY_SPEED, "clip_loss"]) == 1
    document = printed_document(capsys.readouterr().out)
    assert document["sections"]["speed"]["results"][0]["note"] == "raised RuntimeError: device lost"
    assert document["verdict"].startswith("FAILED - speed: 1 of 1 FAILED")
    monkeypatch.setattr(command, "compare_retrieval", explode)  # after the comparisons of a loss
    assert main([*TINY_SPEED, "clip_loss", "retrieval_ranks"]) == 1
    document = printed_document(capsys.readouterr().out)
    assert document["sections"]["exactness"]["status"] == "failed"
    assert "no speed is measured where results are missing" in document["notes"]


def test_a_check_that_is_killed_leaves_what_it_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "check.json"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Check, "_speed", killed)
    with pytest.raises(KeyboardInterrupt):
        main([*FLOAT, "clip_loss", "--json", str(path)])
    document = json.loads(path.read_text())
    assert document["verdict"] == "UNFINISHED - the last section that ended was launches"
    assert document["comparisons"]


def test_a_loss_that_is_wrong_is_not_timed_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    right = Check._contest
    monkeypatch.setattr(Check, "_contest", lambda self, case: asked.append(case.loss) or right(self, case))
    monkeypatch.setattr(megabatch, "clip_loss", times(1.01))
    assert main([*TINY_SPEED, "clip_loss", "siglip_loss"]) == 1
    assert asked == ["siglip"]
    assert "no speed is measured where results are wrong: clip_loss" in capsys.readouterr().out


# ---- who takes part on a GPU


def test_on_a_gpu_the_strongest_peers_take_part_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[tuple[str, str], list[str]] = {}

    def noted(case: Any, contenders: Any, *_: Any) -> list[Any]:
        asked[case.loss, case.device] = [contender.name for contender in contenders]
        return []

    monkeypatch.setattr(command, "contest", noted)
    check = SimpleNamespace(
        options=SimpleNamespace(backend="all"), world=None, _able=lambda backend: ["bfloat16", "float32"]
    )
    for loss in ("clip", "siglip"):
        Check._contest(check, Case(loss, 64, 16, "bfloat16", "cuda"))
    ours = ["triton", "eager", "formula", "by_hand", "compiled", "open_clip"]
    assert asked == {("clip", "cuda"): [*ours, "inf_cl"], ("siglip", "cuda"): [*ours, "siglip_kernel"]}
    Check._contest(check, Case("clip", 64, 16))
    assert asked["clip", "cpu"] == ["eager", "formula", "by_hand", "compiled", "open_clip"]


# ---- the machine


def test_the_commit_is_that_of_the_clone_the_package_is_in(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *names, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert report.commit(tmp_path) is None
    git("init")
    (tmp_path / "__init__.py").touch()
    git("add", ".")
    git("commit", "-m", "first", "--no-verify")
    short = git("rev-parse", "--short", "HEAD")
    assert report.commit(tmp_path) == short
    (tmp_path / "__init__.py").write_text("changed")
    assert report.commit(tmp_path) == f"{short}-dirty"
    installed = tmp_path / "site-packages"  # below a clone, and no part of it
    installed.mkdir()
    (installed / "__init__.py").touch()
    assert report.commit(installed) is None


def test_a_gpu_is_described() -> None:
    properties = SimpleNamespace(major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132)
    assert report.gpu(properties) == {
        "capability": "9.0",
        "memory_gib": 80.0,
        "multiprocessors": 132,
        "gpus": torch.cuda.device_count(),
    }


# ---- the command line


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out and summary in out for name, (_, summary) in COMMANDS.items())


def test_a_command_is_imported_when_it_is_called_and_checking_needs_torch_alone() -> None:
    rooms = ["megabatch.bench", "megabatch.check"]
    assert loaded_by("import megabatch.cli", rooms) == []
    assert loaded_by("import megabatch.check.command", [*HEAVY, "numpy", *rooms]) == rooms
    modules = {module for module, _ in [*COMMANDS.values(), *BENCHMARKS.values()]}
    for module in modules - {"megabatch.bench.command"}:
        command = import_module(module)
        assert all(hasattr(command, name) for name in ("DESCRIPTION", "add_arguments", "main"))
