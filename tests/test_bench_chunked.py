"""The benchmark of encoding in chunks: what it prints and writes, what it refuses to print, and what it trains."""

import json
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megabatch
from megabatch.bench.chunked import command as chunked
from megabatch.bench.chunked import contenders as cachers
from megabatch.bench.chunked import trial as chunked_trial
from megabatch.bench.chunked.contenders import CACHERS
from megabatch.bench.chunked.towers import TASKS, Encoding, Shape
from megabatch.bench.chunked.trial import Weight
from megabatch.bench.instruments import measure, processes
from megabatch.bench.loss.contenders import NotInstalled
from megabatch.bench.loss.trial import Row

from .benchmarks import main

MIB = 2**20
TINY = Shape(width=8, layers=1, image=8, patch=4, context=5, vocabulary=11)
FREE = ["megabatch", "floor", "plain"]  # of other packages


@pytest.fixture
def inline(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, the malloc of this process stays as it is."""
    monkeypatch.setattr(measure, "return_freed_memory", lambda: None)


def cases_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["cases"])


def lines_of(text: str, title: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith(title))


def test_chunked_prints_three_tables_and_writes_json(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    assert main(["chunked", "--quick", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    *timed, weighed = cases_of(path)
    assert [case["task"] for case in timed] == ["pairs", "towers"]
    for case in timed:
        rows = {row["name"]: row for row in case["contenders"]}
        assert list(rows) == [name for name, cacher in CACHERS.items() if case["task"] in cacher.tasks]
        for name, row in rows.items():
            assert row["status"] == "ok" or (name not in FREE and row["status"] == "not installed")
            assert any(row["status"] in line or row["status"] == "ok" for line in lines_of(out, row["title"]))
            if row["status"] == "ok":
                assert len(row["seconds"]) == 2
                assert row["over_floor"] > 0
                assert row["peak_bytes"] is not None
        assert rows["floor"]["over_floor"] == 1
    assert [(weight["rows"], weight["status"]) for weight in weighed["contenders"]] == [
        *((32, "ok") for _ in range(2)),
        *((256, "ok") for _ in range(2)),
    ]
    assert weighed["contenders"][2]["inputs"] == 256 * (3 * 16 * 16 + 4 * 16)  # images of bytes, features of floats


@pytest.mark.parametrize("task", TASKS)
def test_everyone_computes_the_gradients_of_a_step_in_one_piece(task):
    for name in FREE:
        assert chunked_trial.fault(CACHERS[name], Encoding(task, 20, 8, TINY)) == "", name


@pytest.mark.usefixtures("inline")
def test_with_dropout_gradients_are_checked_without():
    encoding = Encoding("pairs", 20, 8, replace(TINY, dropout=0.5))
    assert "the loss is off" in chunked_trial.fault(CACHERS["plain"], encoding)
    assert chunked_trial.examine(encoding, Row("plain", ""), MIB * 1024).status == "ok"


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("spoiled", ["value", "gradient"])
def test_a_wrong_result_of_ours_gets_no_speed_for_anyone(spoiled, monkeypatch, tmp_path, capsys):
    right = megabatch.chunked

    def wrong(*args: Any, **options: Any) -> Any:
        features = right(*args, **options)
        return features + 1e-2 if spoiled == "value" else torch.cat([features[:-1], features[-1:].detach()])

    monkeypatch.setattr(megabatch, "chunked", wrong)
    path = tmp_path / "out.json"
    assert main(["chunked", "--quick", "--contenders", *FREE, "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "WRONG: at N=40 the " in out
    assert (spoiled == "gradient") == ("the gradient of " in out)
    *timed, weighed = cases_of(path)
    for case in timed:
        assert case["contenders"][0]["status"] == "wrong"
        assert all(row["best"] is None and row["seconds"] == [] for row in case["contenders"])
    assert [weight["peak"] is None for weight in weighed["contenders"]] == [False, True, True, False]


@pytest.mark.usefixtures("inline")
def test_a_result_that_is_wrong_only_at_full_size_is_wrong_too(monkeypatch, tmp_path, capsys):
    right = megabatch.chunked

    def wrong(encoder: Any, inputs: Any, **options: Any) -> Any:
        features = right(encoder, inputs, **options)
        return features if len(inputs) < 96 else torch.cat([features[:-9], features[-9:].detach()])

    monkeypatch.setattr(megabatch, "chunked", wrong)
    assert main(["chunked", "--quick", "--tables", "pairs", "--contenders", *FREE]) == 1
    assert "WRONG: at N=96 the gradient of " in capsys.readouterr().out


@pytest.mark.usefixtures("inline")
def test_a_wrong_result_of_another_gets_no_speed(monkeypatch, tmp_path):
    def halved(task: Any, chunk: int) -> Any:
        step = cachers.floor(task, chunk)
        return lambda: step() / 2

    monkeypatch.setitem(CACHERS, "grad_cache", replace(CACHERS["grad_cache"], make=halved))
    path = tmp_path / "out.json"
    options = ["--tables", "towers", "--contenders", "megabatch", "floor", "grad_cache", "--json", str(path)]
    assert main(["chunked", "--quick", *options]) == 1
    best = {row["name"]: row["best"] for row in cases_of(path)[0]["contenders"]}
    assert best.pop("grad_cache") is None
    assert all(best.values())


@pytest.mark.usefixtures("inline")
def test_who_is_not_installed_is_listed(monkeypatch, capsys):
    def missing(task: Any, chunk: int) -> Any:
        raise NotInstalled

    monkeypatch.setitem(CACHERS, "grad_cache", replace(CACHERS["grad_cache"], make=missing))
    assert main(["chunked", "--quick", "--tables", "towers", "--contenders", "floor", "grad_cache"]) == 0
    (line,) = lines_of(capsys.readouterr().out, "GradCache  ")
    assert line.endswith("not installed")


@pytest.mark.usefixtures("inline")
def test_what_would_take_more_than_the_limit_is_not_run_in_one_piece(monkeypatch, tmp_path):
    monkeypatch.setattr(chunked_trial, "peak_of", lambda step, task: step() and MIB)
    monkeypatch.setattr(chunked_trial, "weigh", lambda name, encoding, weight, keep_freed: replace(weight, peak=MIB))
    path = tmp_path / "out.json"
    options = ["--tables", "pairs", "memory", "--contenders", *FREE, "--limit", "0.002", "--json", str(path)]
    assert main(["chunked", "--quick", *options]) == 0
    timed, weighed = cases_of(path)
    assert [row["status"] for row in timed["contenders"]] == ["ok", "ok", "not run"]
    assert timed["contenders"][-1]["best"] is None
    assert [weight["status"] for weight in weighed["contenders"]] == ["ok", "ok", "ok", "not run"]
    assert all(
        "would take about 0.0 GiB" in last["note"] for last in (timed["contenders"][-1], weighed["contenders"][-1])
    )


def resident_with_half_of_64_mib_freed(returning: bool) -> int:
    if returning:
        measure.return_freed_memory()
    torch.ones(16 * MIB // 4)  # once freed, blocks of this size are kept
    before = measure._status("VmRSS")
    blocks = [torch.ones(MIB // 4) for _ in range(64)]
    del blocks[::2]
    return measure._status("VmRSS") - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_freed_memory_is_not_counted_once_malloc_returns_it():
    assert processes.run(resident_with_half_of_64_mib_freed, False) > 56 * MIB
    assert processes.run(resident_with_half_of_64_mib_freed, True) < 40 * MIB


def test_ratios_are_to_the_limit_and_to_one_chunk():
    rows = [
        Row("megabatch", "ours", seconds=[4.0, 3.0, 2.2]),
        Row("floor", "limit", seconds=[2.0, 2.5, 2.0]),
        Row("plain", "piece", status="not run"),
    ]
    ours, limit, piece = chunked._time_table(rows).splitlines()[1:]
    assert ours.split() == ["ours", "2.20", "s", "3.07", "s", "±", "901.8", "ms", "1.20", "-"]
    assert limit.split() == ["limit", "2.00", "s", "2.17", "s", "±", "288.7", "ms", "1.00", "-"]
    assert piece.split() == ["piece", "-", "-", "-", "-", "not", "run"]
    weights = [Weight("one", 8, peak=4 * MIB), Weight("many", 64, peak=5 * MIB, inputs=MIB, loss=MIB, seconds=1.0)]
    many = chunked._memory_table(weights).splitlines()[2]
    assert " ".join(many.split()) == "many 64 1.00 s 1.0 1.0 5.0 1.25"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "6"], "--width must be a multiple of 4, the number of heads, got 6."),
        (["--image", "30"], "--image must be a multiple of --patch, got 30 and 8."),
        (["--rows", "8"], "--rows must be at least --chunk, got 8 and 64."),
        (["--memory-rows", "8"], "--memory-rows must be at least --memory-chunk, got 8 and 256."),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, message, capsys):
    assert main(["chunked", *options]) == 2
    assert message in capsys.readouterr().err
