"""The benchmark commands: what they print and write, what they refuse to print, and their instruments."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megabatch
from megabatch.bench.cases import LOSSES, Case
from megabatch.bench.instruments import measure, processes
from megabatch.bench.loss import contenders, rivals, trial
from megabatch.bench.loss.contenders import CONTENDERS

from .benchmarks import main

MIB = 2**20
TINY = ["loss", "--rows", "40", "--width", "8", "--repeats", "2", "--seconds", "0"]


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    (case,) = json.loads(path.read_text())["cases"]
    return {row["name"]: row for row in case["contenders"]}


def lines_of(text: str, title: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith(title))


def test_loss_prints_a_table_and_writes_json_with_all_contenders(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    options = ["loss", "--rows", "64", "--width", "16", "--losses", "clip", "--repeats", "3", "--seconds", "0"]
    assert main([*options, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "clip_loss, N=64, D=16, float32" in out
    rows = rows_of(path)
    assert list(rows) == [name for name, contender in CONTENDERS.items() if "clip" in contender.losses]
    for name, row in rows.items():
        (line,) = lines_of(out, f"{row['title']} ") if name != "megabatch" else lines_of(out, "megabatch   ")
        assert row["status"] == "ok" or (name in ("open_clip", "compiled") and row["status"] in line)
        if row["status"] == "ok":
            assert len(row["seconds"]) == 3
            assert row["best"] == min(row["seconds"]) > 0
            for base in ("megabatch", "products"):
                ratios = [own / its for own, its in zip(row["seconds"], rows[base]["seconds"], strict=True)]
                assert row[f"over_{base}"] == sorted(ratios)[1]
            assert (row["peak_bytes"] is None) == (name == "products")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_contender_computes_the_same_loss(loss, dtype):
    case = Case(loss, 40, 8, dtype)
    for contender in CONTENDERS.values():
        if loss in contender.losses and not contender.bare and not contender.compiles:
            try:
                contender.make(case)
            except contenders.NotInstalled:
                continue
            assert trial.fault(contender, case) == "", contender.name


@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_add_up_to_the_whole(loss, monkeypatch):
    monkeypatch.setattr(rivals, "CHUNK", 7)
    for name in ("chunked", "compiled"):
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        assert trial.fault(CONTENDERS[name], Case(loss, 40, 8)) == ""


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("factor", [1 + 1e-4, float("nan")])
def test_a_wrong_result_of_ours_gets_no_speed_for_anyone(factor, monkeypatch, tmp_path, capsys):
    right = megabatch.clip_loss
    monkeypatch.setattr(megabatch, "clip_loss", lambda *args, **options: factor * right(*args, **options))
    path = tmp_path / "out.json"
    names = ["megabatch", "dense", "products"]
    assert main([*TINY, "--losses", "clip", "--contenders", *names, "--json", str(path)]) == 1
    assert "WRONG: at N=40 the loss is off by" in capsys.readouterr().out
    rows = rows_of(path)
    assert rows["megabatch"]["status"] == "wrong"
    assert all(row["best"] is None and row["seconds"] == [] for row in rows.values())


@pytest.mark.usefixtures("inline")
def test_a_wrong_result_of_another_gets_no_speed(monkeypatch, tmp_path, capsys):
    right = rivals.CHUNKED["siglip"]
    monkeypatch.setitem(rivals.CHUNKED, "siglip", lambda *args: 1.01 * right(*args))
    path = tmp_path / "out.json"
    assert main([*TINY, "--losses", "siglip", "--contenders", "megabatch", "chunked", "--json", str(path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    rows = rows_of(path)
    assert rows["chunked"]["best"] is None
    assert rows["megabatch"]["best"] is not None


@pytest.mark.usefixtures("inline")
def test_wrong_gradients_are_wrong_too(monkeypatch):
    right = megabatch.nt_xent_loss
    monkeypatch.setattr(
        megabatch, "nt_xent_loss", lambda x, y, s, **options: right(x, y.detach() + y * 0, s, **options)
    )
    assert "gradient of features 2" in trial.fault(CONTENDERS["megabatch"], Case("nt_xent", 40, 8))


@pytest.mark.usefixtures("inline")
def test_what_cannot_be_compiled_is_reported(monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    assert main([*TINY, "--losses", "info_nce", "--contenders", "megabatch", "compiled"]) == 0
    assert "failed: RuntimeError: no C++ compiler" in capsys.readouterr().out


@pytest.mark.usefixtures("inline")
def test_what_would_not_fit_is_not_run(monkeypatch, capsys):
    monkeypatch.setattr(measure, "available_bytes", lambda: 1000)
    assert main([*TINY, "--losses", "supcon", "--contenders", "megabatch", "dense"]) == 0
    (line,) = lines_of(capsys.readouterr().out, "dense twin")
    assert "would not fit: needs about" in line


def test_the_memory_meter_sees_what_was_allocated_and_freed_again():
    held_before = torch.ones(32 * MIB // 4)
    with measure.PeakMemory() as memory:
        torch.ones(64 * MIB // 4)
    assert 63 * MIB < memory.bytes < 80 * MIB
    with measure.PeakMemory() as nothing:
        pass
    assert nothing.bytes < 8 * MIB
    del held_before


def test_the_memory_of_a_step_leaves_out_inputs_and_gradients():
    case = Case("clip", 4096, 512)  # inputs and gradients take 8 MiB each
    inputs = case.inputs()

    def step(inputs: Any) -> None:
        for x in inputs.leaves:
            x.grad = torch.ones_like(x)
        torch.ones(32 * MIB // 4)

    step(inputs)
    inputs.clear()
    assert 28 * MIB < trial.peak_of(step, inputs) < 40 * MIB


def test_contenders_take_turns_in_any_order():
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    taken = measure.take_turns(steps, repeats=40, seconds=0)
    first, *rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert first == "abc"  # thrown away
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 40, "b": 40, "c": 40}


def test_a_process_that_dies_says_how():
    with pytest.raises(processes.Failed, match="SIGABRT"):
        processes.run(os.abort)
    with pytest.raises(processes.Failed, match="ZeroDivisionError: integer division"):
        processes.run(divmod, 1, 0)
    assert processes.run(divmod, 7, 2) == (3, 1)


def test_without_a_command_help_is_printed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "loss" in out
    assert "demo" in out
