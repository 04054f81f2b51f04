"""`megabatch bench tiling`: the stopwatch and its seams, what the command prints, and what it refuses to print."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import megabatch
from megabatch.bench.cases import LOSSES, Case
from megabatch.bench.instruments.ranks import Crew, Member
from megabatch.bench.loss import trial as loss_trial
from megabatch.bench.tiling import command
from megabatch.bench.tiling import trial as tiling_trial
from megabatch.bench.tiling.contenders import Tiling
from megabatch.bench.tiling.stopwatch import SEAMS, STAGES, Seam, Stopwatch
from megabatch.bench.tiling.trial import Taken, TilingRow
from megabatch.tiling.plan import Plan

from .benchmarks import main

CASE = Case("clip", 96, 8)
TINY = ["tiling", "--rows", "96", "--width", "8", "--repeats", "2", "--seconds", "0"]


class Clock:
    """Time passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Work:
    """Functions that take their time, one inside the other."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def epilogue(self) -> str:
        self.clock.spend(1)
        self.product()
        self.clock.spend(2)
        with pytest.raises(ValueError, match="once"):
            self.product(fails=True)
        self.merge()
        return "done"

    def product(self, fails: bool = False) -> None:
        self.clock.spend(10)
        if fails:
            raise ValueError("once")

    def merge(self) -> None:
        self.clock.spend(100)


WORK = (Seam("epilogue", Work, "epilogue"), Seam("products", Work, "product"), Seam("merges", Work, "merge"))


def functions() -> list[Any]:
    return [vars(seam.owner)[seam.name] for seam in (*SEAMS, *WORK)]


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    (case,) = json.loads(path.read_text())["cases"]
    return {row["name"]: row for row in case["contenders"]}


# ---- the stopwatch


def test_stages_are_exclusive_and_add_up_to_the_whole():
    clock = Clock()
    watch, work = Stopwatch(WORK, clock), Work(clock)
    with watch.lap():
        clock.spend(1000)
        assert work.epilogue() == "done"
        work.product()
        clock.spend(2000)
    work.product()  # after the lap, which nobody counts
    expected = {"products": 30, "epilogue": 3, "merges": 100, "communication": 0, "rest": 3000}
    assert watch.laps == [expected]
    assert sum(expected.values()) == clock.now - 10
    assert watch.calls == {"Work.epilogue": 1, "Work.product": 3, "Work.merge": 1}


def test_a_seam_that_is_gone_is_an_error_and_not_a_stage_of_no_time():
    before = functions()
    for gone in (Seam("products", Work, "multiply"), Seam("products", Work, "__repr__")):  # the second is inherited
        with pytest.raises(AttributeError, match=f"Work has no {gone.name} of its own"), Stopwatch((*WORK, gone)).lap():
            pass
    assert functions() == before


def test_functions_are_restored_after_an_error_inside():
    before, watch = functions(), Stopwatch()
    with watch.lap():
        assert not set(functions()[: len(SEAMS)]) & set(before)
    assert functions() == before
    with pytest.raises(ZeroDivisionError), watch.lap():
        raise ZeroDivisionError
    assert functions() == before
    assert len(watch.laps) == 1


@pytest.mark.parametrize("loss", LOSSES)
def test_results_are_the_same_under_the_stopwatch(loss):
    case, watch = Case(loss, 96, 8), Stopwatch()
    step = Tiling("32").step(case, 1)
    plain = loss_trial.results(step, case.inputs())
    with watch.lap():
        timed = loss_trial.results(step, case.inputs())
    assert all(torch.equal(timed[name], value) for name, value in plain.items())
    (lap,) = watch.laps
    assert all(lap[stage] > 0 for stage in ("products", "epilogue", "merges", "rest"))


def test_every_product_of_a_step_is_seen():
    """Forward and backward: nine tiles, and three products of each, because their logits are kept."""
    watch, inputs = Stopwatch(), CASE.inputs()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, watch.lap():
        Tiling("32").step(CASE, 1)(inputs)
    multiplied = [event for event in profiler.events() if event.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert watch.calls["torch.addmm"] == len(multiplied) == 3 * 9


# ---- the command


@pytest.mark.usefixtures("inline")
def test_quick_prints_both_tables_and_writes_the_stages(tmp_path, capsys):
    path, sheet = tmp_path / "out.json", tmp_path / "out.csv"
    assert main(["tiling", "--quick", "--json", str(path), "--csv", str(sheet)]) == 0
    out = capsys.readouterr().out
    assert "clip_loss, N=256, D=32, float32\nms, mean ± std" in out
    assert "% of plain products, fastest run" in out
    rows = rows_of(path)
    assert list(rows) == ["products", "own", "64", "whole"]
    assert [rows[name]["tile"] for name in ("64", "whole")] == [[64, 64], [256, 256]]
    assert rows["products"]["seconds"]
    assert "merges_seconds" not in rows["products"]
    for name in ("own", "64", "whole"):
        row = rows[name]
        assert row["status"] == "ok"
        for base, other in (("products", "products"), ("undivided", "whole")):
            ratios = [own / its for own, its in zip(row["seconds"], rows[other]["seconds"], strict=True)]
            assert row[f"over_{base}"] == pytest.approx(sum(ratios) / 2)  # the median of two
        assert all(len(row[f"{stage}_seconds"]) == 2 == len(row["seconds"]) for stage in STAGES)
        assert row["products_mean"] > 0 < row["epilogue_of_best"]
    assert "merges_mean" in sheet.read_text().splitlines()[0]
    kept = [line.endswith("logits kept: fewer products") for line in out.splitlines() if line.startswith(("64", "und"))]
    assert kept == [True, True, False, False]  # all logits fit the budget


@pytest.mark.usefixtures("inline")
def test_a_wrong_result_gets_no_figures_for_any_tile(monkeypatch, tmp_path, capsys):
    right = megabatch.siglip_loss

    def wrong(*args: Any, **options: Any) -> Any:
        return right(*args, **options) * (1 if options["tile"] is None else 1 + 1e-4)

    monkeypatch.setattr(megabatch, "siglip_loss", wrong)
    path = tmp_path / "out.json"
    assert main([*TINY, "--losses", "siglip", "--tiles", "own", "32", "--json", str(path)]) == 1
    assert "WRONG: at N=96 the loss is off by" in capsys.readouterr().out
    rows = rows_of(path)
    assert [row["status"] for row in rows.values()] == ["ok", "ok", "wrong"]
    assert all(row["best"] is None and "rest_mean" not in row for row in rows.values())


@pytest.mark.usefixtures("inline")
def test_a_tile_that_fails_is_reported(monkeypatch, capsys):
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such tile")

    monkeypatch.setattr(tiling_trial, "examine", refuse)
    assert main([*TINY, "--tiles", "32"]) == 1
    assert "failed: RuntimeError: no such tile" in capsys.readouterr().out


@pytest.mark.usefixtures("inline")
def test_sizes_that_do_not_cut_the_plane_are_said_to_be_undivided(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main([*TINY, "--tiles", "96", "200", "whole", "--json", str(path)]) == 0
    assert [row["status"] for row in rows_of(path).values()] == ["ok", "not run", "not run", "ok"]
    assert capsys.readouterr().out.count("not run: the same as undivided") == 2


@pytest.mark.usefixtures("inline")
def test_what_would_not_fit_is_not_run(monkeypatch, capsys):
    monkeypatch.setattr(loss_trial.measure, "available_bytes", lambda: 96 * 96 * 4 * 2)
    assert main([*TINY, "--tiles", "whole"]) == 0
    assert capsys.readouterr().out.count("would not fit: needs about") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "96", "97", "--ranks", "2"], "--rows must be multiples of --ranks, got 97 rows for 2 ranks"),
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--ranks", "2", "0"], "--ranks must be at least 1, got 0"),
        (["--repeats", "-1"], "--repeats must be at least 1, got -1"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, capsys):
    assert main(["tiling", *words]) == 2
    assert f"tiling: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["0", "-1", "1.5", "all", ""])
def test_what_is_no_size_of_a_tile_is_refused(word, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tiling", f"--tiles={word}"])
    assert f"must be a whole number from 1, own or whole, got '{word}'" in capsys.readouterr().err


def test_shares_are_those_of_the_fastest_run():
    def lap(products: float, rest: float) -> dict[str, float]:
        return {**dict.fromkeys(STAGES, 0.0), "products": products, "rest": rest}

    plan = Plan(32, 64)
    rows = [
        TilingRow("products", "plain products", seconds=[2.0, 4.0]),
        TilingRow("own", "own", seconds=[3.0, 5.0], laps=[lap(5.0, 1.0), lap(2.0, 1.0)], plan=plan),
        TilingRow("whole", "undivided", seconds=[4.0], laps=[lap(2.0, 4.0)], plan=plan),
        TilingRow("64", "64", status="not run"),
    ]
    _, own, undivided = command._shares(rows).splitlines()
    assert own.split() == ["own", "100.0", "0.0", "0.0", "0.0", "50.0", "150.0", "150.0", "0.75"]
    assert undivided.split() == ["undivided", "100.0", "0.0", "0.0", "0.0", "200.0", "300.0", "200.0", "1.00"]
    assert command._shares(rows[1:]) == ""
    own = command._times(CASE, 1, rows).splitlines()[2]
    zeros = ["0.00", "±", "0.00"] * 3
    assert own.split()[1:10] == ["32", "×", "64", "3500.00", "±", "2121.32", *zeros[:3]]
    assert own.split()[-7:] == ["4500.00", "±", "2121.32", "4000.00", "±", "1414.21", "-"]


@pytest.mark.parametrize(
    ("loss", "ranks", "one_pass", "kept", "said"),
    [
        ("clip", 1, False, 0, ""),
        ("clip", 1, False, 1, "fewer"),
        ("clip", 1, False, 9, "fewer"),
        ("siglip", 1, True, 1, ""),
        ("info_nce", 1, False, 0, "more"),
        ("info_nce", 1, False, 8, "more"),
        ("info_nce", 1, False, 9, ""),
        ("info_nce", 3, False, 2, "more"),
        ("info_nce", 3, False, 3, ""),
        ("nt_xent", 1, False, 0, ""),
        ("nt_xent", 1, False, 21, "fewer"),
    ],
)
def test_a_row_says_where_its_products_are_not_the_plain_ones(loss, ranks, one_pass, kept, said):
    plan = Plan(32, 32, one_pass, kept)
    remark = command._formed(Case(loss, 96, 8), ranks, TilingRow("own", "own", plan=plan))
    assert f"{said} products" in remark if said else remark == ""


# ---- over ranks


def calls_on_a_rank(member: Member) -> dict[str, int]:
    watch = Stopwatch()
    with watch.lap():
        Tiling("32").step(CASE, member.size)(CASE.inputs().cut(member.share(CASE.rows)))
    return dict(watch.calls)


def test_a_step_over_ranks_meets_every_seam():
    for calls in Crew(2).run(calls_on_a_rank):
        assert set(calls) == {str(seam) for seam in SEAMS}


@pytest.mark.usefixtures("inline")
def test_over_ranks_communication_is_a_stage_with_overlap_and_without(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main([*TINY, "--ranks", "2", "--tiles", "32", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "clip_loss, N=96, D=8, float32, 2 ranks × 48 rows, 1 thread each" in out
    assert "\n32: communication takes " in out
    rows = rows_of(path)
    assert [(row["name"], row["overlap"]) for row in rows.values()][1:] == [("32", True), ("32, no overlap", False)]
    for row in list(rows.values())[1:]:
        assert (row["status"], row["tile"]) == ("ok", [32, 32])
        assert all(seconds > 0 for seconds in row["communication_seconds"])
        assert row["over_undivided"] is None


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_and_tile_reach_the_loss(overlap, monkeypatch):
    asked: dict[str, Any] = {}

    def loss(image: torch.Tensor, *_: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.update(options)
        return image.sum()

    monkeypatch.setattr(megabatch, "clip_loss", loss)
    Tiling("32", overlap).step(CASE, 2)(CASE.inputs())
    assert (asked["tile"], asked["exchange"], asked["overlap"]) == (32, "ring", overlap)


def test_over_ranks_the_slowest_counts():
    laps = [{"products": 1.0, "rest": 2.0}, {"products": 2.0, "rest": 0.0}]
    others = [{"products": 0.0, "rest": 1.0}, {"products": 1.0, "rest": 2.0}]
    row = TilingRow("32", "32")
    tiling_trial._record(row, [Taken({"32": [3.0, 1.0]}, {"32": laps}), Taken({"32": [2.0, 4.0]}, {"32": others})])
    assert row.seconds == [3.0, 4.0]
    assert row.laps == [laps[0], others[1]]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_shares_of_all_ranks_are_the_batch(loss):
    case = Case(loss, 96, 8)
    parts = [case.inputs().cut(Member(rank, 2, None).share(case.rows)) for rank in range(2)]
    for index, whole in enumerate(case.inputs().features):
        assert torch.equal(torch.cat([part.features[index] for part in parts]), whole)
    labels = case.inputs().labels
    assert labels is None or torch.equal(torch.cat([part.labels for part in parts]), labels)
    assert all((part.bias is None) == (case.kind.bias is None) for part in parts)
