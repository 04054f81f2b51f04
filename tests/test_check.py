"""`megabatch check`: what it prints and writes, and that it detects a library that is wrong."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch
from megabatch import machine, reference
from megabatch.bench.cases import Case
from megabatch.bench.command import COMMANDS as BENCHMARKS
from megabatch.bench.contenders import CONTENDERS, Contender
from megabatch.bench.loss import entrants
from megabatch.check import gpu
from megabatch.check.cases import FUNCTIONS, LOSSES, cases
from megabatch.check.command import DENSE, PEERS, Check
from megabatch.check.exactness import ALL_ALIKE, HOST_READS, TWICE, Comparison, Way, compare
from megabatch.cli import COMMANDS, main
from megabatch.distributed.world import World

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
    of_torch = "torch/utils/cpp_extension.py"  # it speaks of a CUDA toolkit without a GPU
    assert [line for line in ended.stderr.splitlines() if of_torch not in line] == []
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
    assert list(document["exactness"]) == [f"{function}, eager, one process" for function in FUNCTIONS]
    assert document["machine"]["ranks"] == 1
    assert document["machine"]["torch"] == torch.__version__
    assert "torchrun --nproc-per-node 4 -m megabatch check" in ended.stdout
    text = path.read_text()
    assert not [word for word in (os.uname().nodename, str(Path.home()), str(tmp_path)) if word in text]


def test_without_a_path_the_document_is_printed_before_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLOAT, "siglip_loss", "retrieval_ranks"]) == 0
    out = capsys.readouterr().out
    document = printed_document(out)
    assert list(document["exactness"]) == ["siglip_loss, eager, one process", "retrieval_ranks, eager, one process"]
    assert float(document["exactness"]["siglip_loss, eager, one process"]["float32"]) < 1
    assert "comparisons" not in document
    assert document["failed"] == []
    assert last_line(out) == f"megabatch check: {document['verdict']}"


def test_the_full_sizes_are_right_too(tmp_path: Path) -> None:
    """In float64 as well, where the truth has roundings of its own."""
    path = tmp_path / "check.json"
    words = ["check", "--device", "cpu", "--backend", "eager", "--skip-speed", "--dtype", "bfloat16", "float64"]
    assert main([*words, "--only", *LOSSES, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    for loss in LOSSES:
        checked = {found["case"] for found in document["comparisons"] if found["function"] == loss}
        assert checked == {case.title for case in cases(loss, quick=False)}
    assert document["speed"] == []


@pytest.mark.parametrize("ranks", [1, 5])
def test_scores_of_retrieval_are_exact_and_only_ranks_have_ties(ranks: int) -> None:
    for function, copies in (("similarity_topk", 1), ("retrieval_ranks", 2)):
        (case,) = cases(function, quick=False)
        shares = case.shares(ranks, torch.bfloat16)
        query, key = (torch.cat([share[name] for share in shares]).double() for name in ("query", "key"))
        for row in query @ key.T:
            assert row.unique(return_counts=True)[1].max() == copies
            assert torch.equal(row.float().double(), row)


# ---- a wrong library


def test_a_tolerance_that_cannot_fail_fails() -> None:
    def found(error: float | None, allowed: float) -> Comparison:
        return Comparison("clip_loss", "plain", "float32", "eager", 0, "loss", error, allowed)

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
    assert "retrieval_ranks (exact scores, float32" in failure(capsys, *FLOAT, "retrieval_ranks")

    def repeated(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        values, indices = topk(*args, **options)
        return values, indices[:, :1].expand_as(indices)

    monkeypatch.setattr(megabatch, "similarity_topk", repeated)
    assert "similarity_topk (exact scores, float32" in failure(capsys, *FLOAT, "similarity_topk")


def test_what_fails_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(megabatch, "clip_loss", raising)
    assert main([*FLOAT, "clip_loss", "siglip_loss"]) == 1
    out = capsys.readouterr().out
    document = printed_document(out)
    clip, siglip = (cells["float32"] for cells in document["exactness"].values())
    assert clip.startswith("1/")
    assert clip.endswith(" WRONG")
    assert float(siglip) < 1
    (wrong,) = document["failed"]
    assert wrong["note"] == "raised RuntimeError: kernel exploded"
    assert last_line(out).startswith("megabatch check: FAILED - 1 of ")


# ---- what cannot run, and what is asked for wrongly


def test_a_backend_that_cannot_run_is_refused_with_the_reasons_of_the_library(
    capsys: pytest.CaptureFixture[str],
) -> None:
    features = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="cannot run this call") as refused:
        megabatch.clip_loss(features, features, 2.0, backend="triton")
    verdict = failure(capsys, *QUICK, "--only", "clip_loss", "--dtype", "float64", "--backend", "triton")
    assert "FAILED - nothing could be checked: triton not checked in float64: " in verdict
    assert " ".join(str(refused.value).split()) in verdict


def test_one_backend_of_several_may_refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = megabatch.siglip_loss

    def refuse(**options: Any) -> Any:
        if options["backend"] == "triton":
            raise ValueError("siglip_loss: backend 'triton' cannot run this call:\n  no such GPU")
        return right(**options)

    monkeypatch.setattr(megabatch, "siglip_loss", refuse)
    assert main(["check", "--device", "cpu", "--quick", "--dtype", "float32", "--only", "siglip_loss"]) == 0
    document = printed_document(capsys.readouterr().out)
    assert list(document["exactness"]) == ["siglip_loss, eager, one process"]
    assert document["notes"][0].startswith("triton not checked in float32: ")
    assert document["notes"][0].endswith("no such GPU")


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main([*FLOAT, "clip_loss", "--json", str(tmp_path / "file" / "check.json")])
    assert ended.value.code == 2
    assert "megabatch check: --json must be a file that can be written to, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
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
    assert (
        "--device cuda must have a GPU for every rank, got 0 for rank 0. Use --device cpu." in capsys.readouterr().err
    )
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
    assert list(printed_document(text)["exactness"]) == [
        "retrieval_ranks, eager, one process",
        "retrieval_ranks, eager, ring",
        "similarity_topk, eager, one process",
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
    assert [*rows][:5] == ["megabatch", "ring", "gather", DENSE, "by_hand"]
    for name in ("megabatch", "ring", "gather", DENSE, "by_hand"):
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
        assert rows["compiled"]["status"] == "ok"
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
    document = printed_document(capsys.readouterr().out)
    assert document["speed"] == []
    assert "no speed is measured: results are wrong or missing" in document["notes"]


def test_on_a_gpu_the_strongest_peers_take_part() -> None:
    def asked(loss: str, device: str) -> list[str]:
        return [contender.name for contender in entrants(Case(loss, 64, 16, device=device), ["megabatch", *PEERS])]

    usual = ["megabatch", DENSE, "by_hand", "compiled", "open_clip"]
    assert asked("clip", "cpu") == asked("siglip", "cpu") == usual
    assert asked("clip", "cuda") == [*usual, "inf_cl"]
    assert asked("siglip", "cuda") == [*usual, "siglip_kernel"]


def test_a_check_that_is_killed_leaves_what_it_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "check.json"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Check, "_report_exactness", killed)
    assert main([*FLOAT, "clip_loss", "--json", str(path)]) == 130  # as of any program that Ctrl-C ended
    document = json.loads(path.read_text())
    assert document["verdict"] == "UNFINISHED - clip_loss was the last to end"
    assert document["comparisons"]


# ---- kernels without a GPU


def test_kernels_of_other_losses_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    spare_repeated_patches()
    words = ["check", "--device", "cpu", "--backend", "triton", "--dtype", "bfloat16", "--only"]
    assert main([*words, "info_nce_loss", "supcon_loss"]) == 0
    document = printed_document(capsys.readouterr().out)
    assert list(document["exactness"]) == ["info_nce_loss, triton, one process", "supcon_loss, triton, one process"]


def test_kernels_are_checked_by_the_interpreter() -> None:
    pytest.importorskip("triton")
    words = ("check", "--device", "cpu", "--backend", "triton", "--dtype", "float32", "--only", "clip_loss")
    ended = run(*words, TRITON_INTERPRET="1", PYTHONWARNINGS="default")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = printed_document(ended.stdout)
    assert document["machine"]["triton_interpreted"]
    assert list(document["exactness"]) == ["clip_loss, triton, one process"]
    assert document["speed"] == []
    assert "no speed is measured: kernels are interpreted" in ended.stdout
    assert last_line(ended.stdout).startswith("megabatch check: OK")


# ---- host reads: what torch does on a GPU, on the CPU

HERE = World(torch.device("cpu"))


class Reads(TorchDispatchMode):
    """Raises where a number is read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(gpu.SYNCHRONIZING)
        return func(*args, **(kwargs or {}))


class ReadsInTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream * float(upstream.item() == upstream.item())


def read_in_the_forward(**given: Any) -> Any:
    return _apply(reference.clip_loss(**given), lambda value: value * float(value.item() != math.pi))


def read_in_the_backward(**given: Any) -> Any:
    return _apply(reference.clip_loss(**given), ReadsInTheBackward.apply)


def host_reads(monkeypatch: pytest.MonkeyPatch, loss: Any) -> Comparison:
    """What is found of the host reads of a loss; everything else of it is right."""
    monkeypatch.setattr(megabatch, "clip_loss", loss)
    monkeypatch.setattr(gpu, "no_host_reads", Reads)
    found = list(compare(cases("clip_loss", quick=True)[0], "float32", Way("eager"), HERE, watched=True))
    assert [one.result for one in found if not one.ok] in ([], [HOST_READS])
    (reads,) = [one for one in found if one.result == HOST_READS]
    return reads


@pytest.mark.parametrize("loss", [read_in_the_forward, read_in_the_backward])
def test_a_host_read_is_found_and_its_place_is_named(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = host_reads(monkeypatch, loss)
    assert not found.ok
    assert "the host waits for the GPU at check/cases.py:" in str(found)


def test_a_loss_that_reads_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_reads(monkeypatch, reference.clip_loss).ok


def test_a_call_that_raises_is_no_host_read(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = count()

    def explode(**given: Any) -> Any:
        if next(steps) == 2:  # the step that is watched, and no other
            raise RuntimeError("kernel\nexploded")
        return reference.clip_loss(**given)

    monkeypatch.setattr(megabatch, "clip_loss", explode)
    monkeypatch.setattr(gpu, "no_host_reads", Reads)
    (found,) = compare(cases("clip_loss", quick=True)[0], "float32", Way("eager"), HERE, watched=True)
    assert (found.result, found.note) == ("the call", "raised RuntimeError: kernel exploded")


def test_the_mode_of_torch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        if not modes:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(ZeroDivisionError), gpu.no_host_reads():
        raise ZeroDivisionError
    assert modes == ["error", 1]


def test_on_a_gpu_every_loss_is_watched_with_all_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command as on a GPU, but for the device."""
    right, path = Check.__init__, tmp_path / "check.json"

    def on_a_gpu(self: Check, *args: Any) -> None:
        right(self, *args)
        self.on_gpu = True

    assert main([*FLOAT, *FUNCTIONS]) == 0
    assert "host reads not checked: no GPU" in printed_document(capsys.readouterr().out)["notes"]
    monkeypatch.setattr(Check, "__init__", on_a_gpu)
    monkeypatch.setattr(gpu, "no_host_reads", contextlib.nullcontext)
    assert main([*FLOAT, *FUNCTIONS, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    watched = [(found["function"], found["case"]) for found in document["comparisons"] if found["result"] == HOST_READS]
    assert watched == [(loss, case.title) for loss in LOSSES for case in cases(loss, quick=True)]
    assert document["notes"] == []


# ---- the machine


def test_the_commit_is_that_of_the_clone_the_package_is_in(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *names, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert machine.commit(tmp_path) is None
    git("init")
    (tmp_path / "__init__.py").touch()
    git("add", ".")
    git("commit", "-m", "first", "--no-verify")
    short = git("rev-parse", "--short", "HEAD")
    assert machine.commit(tmp_path) == short
    (tmp_path / "__init__.py").write_text("changed")
    assert machine.commit(tmp_path) == f"{short}-dirty"
    installed = tmp_path / "site-packages"  # below a clone, and no part of it
    installed.mkdir()
    (installed / "__init__.py").touch()
    assert machine.commit(installed) is None


def test_a_gpu_is_described() -> None:
    properties = SimpleNamespace(major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132)
    assert machine.gpu(properties) == {
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
