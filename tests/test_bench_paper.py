"""`megabatch bench paper`: its methods are right on ranks, its search finds the edge, and it invents no figure."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.bench.cases import Case
from megabatch.bench.instruments import processes
from megabatch.bench.instruments.ranks import Crew, Member
from megabatch.bench.loss.trial import Results, results
from megabatch.bench.paper import command, largest, tables, trial
from megabatch.bench.paper.contenders import METHODS, NAMES, STAGES
from megabatch.bench.paper.largest import Attempt, Found
from megabatch.bench.results import Row
from megabatch.bench.ring import trial as ring_trial
from megabatch.bench.ring.contenders import ENTRANTS, USUAL

from .benchmarks import main

MIB = 2**20
SMALL = Case("clip", 48, 16)
NEW = ("global", "disco", "ring_only", "two_walks", "kept")


def results_and_products(member: Member) -> tuple[dict[str, Results], dict[str, int]]:
    found = {name: results(ring_trial._step(member, ENTRANTS[name]), ring_trial._share(member, SMALL)) for name in NEW}
    return found, trial.count(member, list(STAGES), SMALL.width)


def contenders_of(path: Path) -> list[dict[str, Any]]:
    return [row for case in json.loads(path.read_text())["cases"] for row in case["contenders"]]


def contest_where_dense_outgrows(case: Case, size: int, names: list[str], *_: Any) -> list[Row]:
    """The dense loss takes 6 matrices, and at 256 rows more than there is."""
    rows = [Row(name, ENTRANTS[name].title, peak_bytes=case.rows * 100, seconds=[1.0, 3.0]) for name in names]
    for row in rows:
        if row.name == "global" and case.rows < 256:
            row.peak_bytes = 6 * case.matrix_bytes
        elif row.name == "global":
            row.status, row.peak_bytes, row.seconds = "would not fit", None, []
    return rows


def test_every_method_has_the_gradients_of_one_process_and_its_products_are_counted():
    found = Crew(2, quiet=True).run(results_and_products)
    for name in NEW:
        assert ring_trial.fault(ENTRANTS[name], SMALL, [own[name] for own, _ in found]) == ""
    plane = 2 * (2 * trial.COUNTED_ROWS) ** 2 * SMALL.width
    counted = {name: sum(flops[name] for _, flops in found) / plane for name in STAGES}
    # Where all logits fit the default budget, as they do here, ours are kept for the backward in every stage.
    assert counted == {"global": 6, "formula": 6, "ring_only": 6, "two_walks": 6, "ring": 3, "kept": 3}


def test_what_every_rank_holds_counts_once_per_rank():
    case = Case("clip", 1024, 8)
    assert ENTRANTS["global"].held(case, 4) == 4 * ENTRANTS["global"].held(case, 1) > 0
    assert ENTRANTS["formula"].held(case, 4) == ENTRANTS["formula"].held(case, 1)


def test_the_tables_know_all_their_methods_and_ring_runs_none_of_the_new_ones_unasked():
    assert set(NAMES) == {*METHODS, *STAGES} <= set(ENTRANTS)
    assert set(USUAL) == set(ENTRANTS) - set(NEW)


@pytest.mark.parametrize("edge", [0, 31, 32, 100, 511, 512, 1000, 4096, 100_000])
def test_the_search_ends_within_a_sixteenth_of_the_edge(edge):
    tried = []

    def attempt(rows: int) -> Attempt:
        tried.append(rows)
        return Attempt(1.0) if rows <= edge else Attempt(None, f"no room for {rows}")

    found = largest.search(attempt, first=512, unit=32, time_limit=1e9)
    assert found.failed is not None
    assert found.rows <= edge < found.failed
    assert found.failed - found.rows <= max(found.rows / 16, 32)
    assert found.note == f"no room for {found.failed}"
    assert not found.at_least
    assert len(set(tried)) == len(tried) <= 16
    assert all(rows % 32 == 0 for rows in tried)


def test_the_search_tries_no_step_that_would_take_too_long():
    def attempt(rows: int) -> Attempt:
        return Attempt((rows / 512) ** 2) if rows < 3000 else Attempt(None, "out of memory")

    assert largest.search(attempt, 512, 32, time_limit=10) == Found(1024, 4.0, at_least=True)
    assert largest.search(attempt, 512, 32, time_limit=17) == Found(2048, 16.0, at_least=True)
    # Of what lies between 2048 and 4096, the latter failed, the step of 2560 took longer than expected.
    slow = {2560: Attempt(60.0)}
    ended = largest.search(lambda rows: slow.get(rows) or attempt(rows), 512, 32, time_limit=64)
    assert ended == Found(2560, 60.0, failed=3072, note="out of memory", at_least=True)


def test_a_rank_that_outgrows_its_limit_fails():
    with pytest.raises(processes.OutOfMemory):
        Crew(2, quiet=True).run(largest.step_within, MIB, "ring", Case("clip", 4096, 64))


def test_only_a_lack_of_memory_ends_the_search(monkeypatch):
    failures = [processes.OutOfMemory("out of memory"), processes.Failed("killed by SIGABRT: std::bad_alloc")]

    def run(crew: Crew, function: Any, limit: int, name: str, case: Case) -> list[float]:
        if case.rows < 400:
            return [1.0, 2.0]
        raise failure

    monkeypatch.setattr(Crew, "run", run)
    for failure in failures:
        found = largest.largest("ring", 2, 8, MIB, time_limit=100)
        assert (found.rows, found.seconds, found.note) == (768, 2.0, str(failure))
    failure = processes.Failed("ValueError: a mistake")
    with pytest.raises(processes.Failed, match="a mistake"):
        largest.largest("ring", 2, 8, MIB, time_limit=100)


def test_memory_is_extrapolated_from_the_last_two_points_and_never_faster_than_the_square():
    square = [(n, 24 * n * n) for n in (256, 512, 1024)]
    assert trial.extrapolated(square, 4096) == (pytest.approx(24 * 4096**2), pytest.approx(2), 1024)
    linear = trial.extrapolated([(256, 10**9), (512, 1000), (1024, 2000)], 4096)
    assert linear is not None
    assert (linear.bytes, linear.power) == (pytest.approx(8000), pytest.approx(1))
    assert trial.extrapolated([(512, 100), (1024, 10_000)], 2048) == (40_000, 2.0, 1024)
    assert trial.extrapolated([(512, 100), (1024, 100)], 2048) == (100, 0.0, 1024)
    assert trial.extrapolated([(1024, 100)], 2048) == (400, 2.0, 1024)
    assert trial.extrapolated([(1024, 100)], 512) is None


def test_what_was_not_measured_is_marked_and_stands_in_no_measured_field(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ring_trial, "contest", contest_where_dense_outgrows)
    monkeypatch.setattr(trial, "products", lambda names, size, width: dict.fromkeys(names, 4.0))
    path, sheet = tmp_path / "out.json", tmp_path / "out.csv"
    words = ["paper", "--tables", "memory", "time", "ablation", "--rows", "64", "128", "256", "--ablation-rows", "256"]
    assert main([*words, "--ranks", "2", "--json", str(path), "--csv", str(sheet)]) == 0
    out = capsys.readouterr().out
    dense = next(line for line in out.splitlines() if line.startswith("CLIP's global loss"))
    assert dense.split()[3:] == ["0.1", "0.4", "~1.5", "(extrapolated)"]
    stage = next(line for line in out.splitlines() if line.startswith("dense: CLIP's global loss"))
    assert stage.split()[4:] == ["O(b²)", "4.00", "~1.5", "(extrapolated)", *"----", "would", "not", "fit"]
    *_, row = (row for row in contenders_of(path) if row["name"] == "global")
    assert (row["peak_bytes"], row["best"], row["status"]) == (None, None, "would not fit")
    assert row["extrapolated_bytes"] == pytest.approx(6 * 4 * 256**2)
    assert (row["extrapolated_from_rows"], row["extrapolated_power"]) == (128, pytest.approx(2))
    measured = [row for row in contenders_of(path) if row["peak_bytes"] is not None]
    assert len(measured) == 5 + 5 + 6
    assert all(row["extrapolated_bytes"] is None for row in measured)
    with sheet.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["extrapolated_bytes"] != "" for line in lines] == [row["peak_bytes"] == "" for row in lines]


def test_a_stage_is_held_against_the_one_above_it():
    rows = [
        Row("formula", "", peak_bytes=8 * MIB, seconds=[2.0, 4.0]),
        Row("ring_only", "", peak_bytes=2 * MIB, seconds=[3.0, 3.0]),
        Row("two_walks", "", peak_bytes=MIB, seconds=[6.0, 6.0]),
        Row("ring", "", status="wrong", note="off"),
    ]
    first, second, third, last = tables.ablation({64: rows}, 64, {"formula": 6.0, "ring_only": 8.0}).splitlines()[1:]
    assert first.split()[4:] == ["O(b²/n)", "6.00", "8.0", "-", "2.00", "s", "3.00", "s", "±", "1.41", "s", "-"]
    assert second.split()[3:] == [
        "O(b²/n²)",
        "8.00",
        "2.0",
        "0.25",
        "3.00",
        "s",
        "3.00",
        "s",
        "±",
        "0.00",
        "ms",
        "1.50",
    ]
    assert third.split()[2:] == ["O(bD/n)", "-", "1.0", "0.50", "6.00", "s", "6.00", "s", "±", "0.00", "ms", "2.00"]
    assert last.endswith("WRONG: off")


def test_the_largest_batch_is_told_with_what_stopped_the_search():
    exact = Found(3000, 1.0, failed=3200, note="out of memory")
    more = Found(6000, 2.0, failed=9000, note="out of memory", at_least=True)
    found = {
        "a": (Row("a", "dense"), exact),
        "b": (Row("b", "ours"), more),
        "c": (Row("c", "c", "failed", "why"), None),
    }
    first, second, third = tables.largest(found, 2).splitlines()[1:]
    assert first.split() == ["dense", "3,000", "1,500", "1.00", "1.00", "s", "3,200", "rows:", "out", "of", "memory"]
    assert second.split()[1:9] == ["≥", "6,000", "≥", "3,000", "≥", "2.00", "2.00", "s"]
    assert second.endswith("9,000 rows: out of memory; a larger step would take too long")
    assert third.endswith("failed: why")
    # Nobody knows how many times as many rows it is.
    turned = tables.largest({"a": (Row("a", "a"), more), "b": (Row("b", "b"), exact)}, 2).splitlines()[2]
    assert turned.split()[:6] == ["b", "3,000", "1,500", "-", "1.00", "s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "64", "63", "--ranks", "2"], "must be multiples of --ranks, got 63 rows for 2 ranks."),
        (["--ranks", "3", "--tables", "ablation"], "must be multiples of --ranks, got 128 rows for 3 ranks."),
        (["--limit", "0"], "--limit must be a positive number, got 0.0."),
        (["--time-limit", "nan"], "--time-limit must be a positive number, got nan."),
        (["--limit", "1e9"], "--limit must fit the machine 2 times, got 1e+09 MiB."),
        (["--contenders", "kept"], "--contenders must have one for the table memory, global, formula, disco,"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    assert main(["paper", "--quick", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("paper: ")
    assert message in error


def test_the_interrupted_command_shows_the_batch_sizes_it_has(monkeypatch, capsys):
    def contest(case: Case, *args: Any) -> list[Row]:
        if case.rows == 128:
            raise KeyboardInterrupt
        return contest_where_dense_outgrows(case, *args)

    monkeypatch.setattr(ring_trial, "contest", contest)
    assert main(["paper", "--rows", "64", "128", "--ranks", "2", "--tables", "memory"]) == 130
    told = capsys.readouterr()
    assert "N=64\n" in told.out
    assert "N=128" not in told.out
    assert "stopped after 1 of 2 cases" in told.err


def test_a_search_that_breaks_is_told_and_fails_the_command(monkeypatch, capsys):
    def broken(*_: Any) -> Found:
        raise processes.Failed("ValueError: a mistake")

    monkeypatch.setattr(command, "largest", broken)
    assert main(["paper", "--quick", "--tables", "largest", "--contenders", "ring"]) == 1
    assert "failed: ValueError: a mistake" in capsys.readouterr().out


def test_only_what_holds_logits_may_outgrow_the_machine():
    assert command._healthy([Row("ring_only", "", "failed", "out of memory"), Row("global", "", "failed", "any")])
    assert not command._healthy([Row("ring", "", "failed", "out of memory")])
    assert not command._healthy([Row("ring_only", "", "failed", "any")])
    assert not command._healthy([Row("global", "", "wrong")])


def test_the_quick_command_makes_every_table(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["paper", "--quick", "--contenders", "ring", "--time-limit", "1e-9", "--json", str(path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    for heading in ("(Table 1)", "(Table 2)", "(Figure 4)", "(Table 4)"):
        assert out.count(heading) == 1
    by_size, search = json.loads(path.read_text())["cases"]
    assert by_size["tables"] == ["memory", "time", "ablation"]
    assert {row["name"]: row["products"] for row in by_size["contenders"]} == {"ring": 3.0}
    assert all(len(row["seconds"]) == 2 and row["peak_bytes"] >= 0 for row in by_size["contenders"])
    assert [(row["largest_rows"], row["at_least"]) for row in search["contenders"]] == [(512, True)]
