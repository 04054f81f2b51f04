"""`megabatch bench peers`: who stands in which table, what the tables say, and what gets no figures."""

import json
from pathlib import Path
from typing import Any

import pytest

import megabatch
from megabatch.bench.cases import LOSSES, Case
from megabatch.bench.gradients import trial as gradients_trial
from megabatch.bench.gradients.contenders import PEERS
from megabatch.bench.loss import contenders, rivals
from megabatch.bench.loss import trial as loss_trial
from megabatch.bench.loss.contenders import CONTENDERS
from megabatch.bench.peers import command
from megabatch.bench.peers import trial as peers_trial
from megabatch.bench.peers.contenders import FIELD, OVER_RANKS, SPREAD, peer_of
from megabatch.bench.peers.trial import Standing, growth
from megabatch.bench.results import Row
from megabatch.bench.ring import trial as ring_trial
from megabatch.bench.ring.contenders import ENTRANTS

from .benchmarks import main

MIB = 2**20
CASES = [Case("siglip", rows, 8) for rows in (16, 32, 64)]


def cases_of(path: Path) -> list[dict[str, dict[str, Any]]]:
    """The contenders of each case, by name."""
    return [{row["name"]: row for row in case["contenders"]} for case in json.loads(path.read_text())["cases"]]


def line_of(text: str, title: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{title}  "))
    return line.removeprefix(title).split()


def gradients_of(name: str, loss: str, **found: Any) -> gradients_trial.Row:
    fine = {"encoder": 1.0, "cosine": 1.0, "scale": 1.0, "value": "global", "uneven": gradients_trial.WORKS, **found}
    return gradients_trial.Row(OVER_RANKS[name, loss], "", loss, "mean", name == "megabatch", **fine)


def standing(name: str, peaks: dict[int, int], **largest: Any) -> Standing:
    sizes = {rows: Row(name, CONTENDERS[name].title, peak_bytes=peak) for rows, peak in peaks.items()}
    for attribute, value in largest.items():
        setattr(sizes[max(sizes)], attribute, value)
    return Standing(CONTENDERS[name], sizes)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients over ranks, which start processes."""
    monkeypatch.setattr(peers_trial, "gradients", lambda name, loss: None)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, one_process: None) -> None:
    """Everybody gets the same figures, and nothing is run."""

    def rows_of(names: list[str], known: Any) -> list[Row]:
        return [Row(name, known[name].title, peak_bytes=3 * MIB, seconds=[1.0, 2.0]) for name in names]

    def contest(case: Case, names: list[str], repeats: int, seconds: float, error_rows: int, reached: Any) -> list[Row]:
        reached(0.5)
        return rows_of([name for name in names if case.loss in CONTENDERS[name].losses], CONTENDERS)

    monkeypatch.setattr(loss_trial, "contest", contest)
    monkeypatch.setattr(ring_trial, "contest", lambda case, size, names, repeats: rows_of(names, ENTRANTS))


def test_every_contender_but_variants_of_others_is_of_the_field():
    assert set(CONTENDERS) - set(FIELD) == {"kept", "small", "by_hand", "formula", "drop_in", "products"}
    assert set(FIELD) <= set(CONTENDERS)
    assert set(SPREAD) <= set(ENTRANTS)


@pytest.mark.usefixtures("unmeasured")
def test_every_tool_has_a_row_in_the_table_of_each_of_its_losses(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["peers", "--rows", "16", "--width", "8", "--json", str(path)]) == 0
    *tables, spread = capsys.readouterr().out.split("_loss, N=64, D=8, float32")[1:]
    *found, _, _, over_ranks = cases_of(path)
    for loss, table, contenders_found in zip(LOSSES, tables, found[2::3], strict=True):
        expected = [name for name in FIELD if loss in CONTENDERS[name].losses]
        assert list(contenders_found) == expected
        assert all(line_of(table, CONTENDERS[name].title)[:2] == ["1.00", "s"] for name in expected)
    assert list(over_ranks) == list(SPREAD)
    assert all(line_of(spread, ENTRANTS[name].title)[-5:] == ["×", "1.0", "-", "-", "-"] for name in SPREAD)


def test_every_tool_over_ranks_is_one_whose_gradients_are_looked_at():
    for (name, loss), title in OVER_RANKS.items():
        index = peer_of(name, loss)
        assert index is not None
        assert (PEERS[index].title, PEERS[index].loss, PEERS[index].trainer) == (title, loss, "mean")
        assert loss in CONTENDERS[name].losses
        assert PEERS[index].ours == CONTENDERS[name].ours
    assert peer_of("dense", "clip") is None
    packages = {PEERS[index].package for key in OVER_RANKS if (index := peer_of(*key)) is not None}
    assert packages == {peer.package for peer in PEERS} - {"inf_cl"}  # which has no loss for one process on a CPU


@pytest.mark.parametrize(
    ("peaks", "factor"),
    [
        ({1: 5, 2: 10, 4: 20}, 2),
        ({1: 5, 2: 20, 4: 80}, 4),
        ({1: 5, 4: 320}, 8),
        ({1: 100, 2: 200, 4: None}, 2),
        ({1: 10, 2: 40, 4: 80}, 8**0.5),  # the line through the logarithms that is nearest to all three
        ({1: 7, 2: None, 4: None}, None),
        ({1: 0, 2: 0, 4: 7}, None),
        ({}, None),
    ],
)
def test_growth_is_the_factor_per_doubling(peaks, factor):
    assert growth(peaks) == (None if factor is None else pytest.approx(factor))


def test_a_row_has_the_time_of_the_largest_size_and_the_memory_of_all():
    ours = standing("megabatch", {16: MIB, 32: 2 * MIB, 64: 4 * MIB}, seconds=[1.0, 3.0], error=2e-7)
    ours.sizes[16].seconds = [0.001]
    ours.over_ranks = gradients_of("megabatch", "siglip")
    other = standing("open_clip", {16: MIB, 32: 4 * MIB, 64: 16 * MIB}, seconds=[4.0])
    other.over_ranks = gradients_of("open_clip", "siglip", encoder=0.5, scale=None)
    rows = [command._cells(each, [ours, other], CASES) for each in (ours, other)]
    figures = ("1.0", "2.0", "4.0", "× 2.0", "2.0e-07", "1.000", "1.000", "1.000", "")
    assert rows[0] == ("megabatch", "1.00 s", "2.00 s ± 1.41 s", "1.00", *figures)
    figures = ("1.0", "4.0", "16.0", "× 4.0", "-", "0.500", "1.000", "-", "")
    assert rows[1] == ("open_clip", "4.00 s", "4.00 s ± -", "4.00", *figures)
    assert len(command._head(CASES)) == len(rows[0])
    record = command._record(other, [ours, other], 64)
    assert (record["over_megabatch"], record["growth"]) == (4.0, pytest.approx(4.0))
    assert record["over_ranks"]["title"] == "open_clip SigLipLoss, dist_impl=bidir"
    assert "\n- open_clip SigLipLoss, dist_impl=bidir" in command._settings([ours, other])
    other.over_ranks.status = "not installed"
    assert "\n- open_clip SigLipLoss, dist_impl=bidir: not installed" in command._settings([ours, other])


def test_what_no_longer_fits_says_from_which_size_on():
    each = standing("dense", {16: MIB, 32: 4 * MIB, 64: 0}, peak_bytes=None, status="would not fit", note="needs more")
    cells = command._cells(each, [each], CASES)
    assert cells[1:8] == ("-", "-", "-", "1.0", "4.0", "-", "× 4.0")
    assert cells[-1] == "N=64: would not fit: needs more"
    assert each.healthy


def test_ours_must_run_and_others_may_fail():
    assert not standing("megabatch", {16: 0}, status="failed").healthy
    assert standing("dense", {16: 0}, status="failed").healthy


@pytest.mark.usefixtures("inline", "one_process")
def test_a_tool_that_is_not_installed_has_a_row_that_says_so(monkeypatch, capsys):
    def missing(name: str) -> None:
        raise contenders.NotInstalled

    monkeypatch.setattr(contenders, "package", missing)
    monkeypatch.setattr(command, "FACTORS", (1,))
    assert main(["peers", "--quick", "--losses", "nt_xent", "--contenders", "megabatch", "lightly"]) == 0
    out = capsys.readouterr().out
    assert line_of(out, "lightly") == ["-"] * 9 + ["not", "installed"]
    assert line_of(out, "megabatch")[0] != "-"


@pytest.mark.usefixtures("inline", "one_process")
def test_a_wrong_tool_gets_no_figures_and_goes_no_further(monkeypatch, tmp_path, capsys):
    right, path = rivals.CHUNKED["siglip"], tmp_path / "out.json"
    monkeypatch.setitem(rivals.CHUNKED, "siglip", lambda *arguments: 1.01 * right(*arguments))
    monkeypatch.setattr(command, "FACTORS", (1, 2))
    options = ["peers", "--quick", "--losses", "siglip", "--contenders", "megabatch", "chunked", "--json", str(path)]
    assert main(options) == 1
    assert line_of(capsys.readouterr().out, CONTENDERS["chunked"].title)[:11] == ["-"] * 10 + ["WRONG:"]
    assert [(case["chunked"]["status"], case["chunked"]["best"]) for case in cases_of(path)] == [
        ("wrong", None),
        ("not run", None),
    ]
    assert all(case["megabatch"]["best"] is not None for case in cases_of(path))


def test_what_is_wrong_at_one_size_has_no_figures_at_all():
    each = standing("dense", {16: MIB, 32: 4 * MIB}, status="wrong", note="at N=32 the loss is off")
    cells = command._cells(each, [each], CASES)
    assert cells[1:-1] == ("-",) * 11
    assert cells[-1] == "WRONG: at N=32 the loss is off"
    assert not each.healthy


@pytest.mark.usefixtures("inline", "one_process")
def test_where_ours_is_wrong_nobody_gets_a_speed(monkeypatch, tmp_path, capsys):
    right, path = megabatch.supcon_loss, tmp_path / "out.json"
    monkeypatch.setattr(megabatch, "supcon_loss", lambda *args, **options: 1.0001 * right(*args, **options))
    options = ["peers", "--quick", "--losses", "supcon", "--contenders", "megabatch", "dense", "--json", str(path)]
    assert main(options) == 1
    assert "WRONG: at N=16 the loss is off by" in capsys.readouterr().out
    assert all(row["best"] is None for case in cases_of(path) for row in case.values())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.5, 1)])
def test_where_our_gradients_over_ranks_are_wrong_nobody_gets_a_speed(factor, code, monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    found = gradients_of("megabatch", "info_nce", encoder=factor)
    monkeypatch.setattr(peers_trial, "gradients", lambda name, loss: found if name == "megabatch" else None)
    options = ["peers", "--quick", "--losses", "info_nce", "--contenders", "megabatch", "dense", "--json", str(path)]
    assert main(options) == code
    assert ("WRONG: over 2 ranks" in capsys.readouterr().out) == (code == 1)
    assert all((row["best"] is None) == (code == 1) for case in cases_of(path) for row in case.values())


@pytest.mark.usefixtures("unmeasured")
def test_a_wrong_result_over_ranks_ends_in_exit_code_1(monkeypatch, capsys):
    row = Row("disco", "DisCo", "wrong", "off by 2")
    monkeypatch.setattr(ring_trial, "contest", lambda case, size, names, repeats: [row])
    assert main(["peers", "--quick", "--losses", "clip", "--markdown"]) == 1
    assert "| DisCo | - | - | - | - | - | - | - | - | - | - | WRONG: off by 2 |" in capsys.readouterr().out


@pytest.mark.usefixtures("unmeasured")
def test_progress_goes_up_to_the_whole():
    shares: list[float] = []
    list(peers_trial.contest(CASES, ["megabatch", "dense"], 1, 0.0, shares.append))
    work = [16**2, 32**2, 64**2]
    gradients = [0.05, 0.1]
    halves = [0.1 + 0.9 * (sum(work[:i]) + work[i] / 2) / sum(work) for i in range(3)]
    assert shares == pytest.approx(gradients + halves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "peers: --rows must be 8 or more, got 0."),
        (["--repeats", "0"], "peers: --repeats must be 1 or more, got 0."),
        (["--contenders", "lightly"], "peers: --contenders must have one for every loss, got lightly. None of them"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message, capsys):
    assert main(["peers", *options]) == 2
    assert message in capsys.readouterr().err


def test_peers_measures_what_it_prints_in_processes_of_their_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "FACTORS", (1, 2))
    path, table = tmp_path / "out.json", tmp_path / "out.csv"
    options = ["peers", "--quick", "--losses", "supcon", "--contenders", "megabatch", "dense"]
    assert main([*options, "--json", str(path), "--csv", str(table)]) == 0
    out = capsys.readouterr().out
    assert line_of(out, "megabatch")[-3:] == ["1.000", "1.000", "1.000"]
    assert line_of(out, CONTENDERS["dense"].title)[-3:] == ["-", "-", "-"]
    assert [list(case) for case in cases_of(path)] == [["megabatch", "dense"]] * 2
    for case in cases_of(path):
        for row in case.values():
            assert row["status"] == "ok"
            assert len(row["seconds"]) == 2
            assert row["error"] < 1e-5
        assert case["megabatch"]["over_ranks"]["uneven"] == gradients_trial.WORKS
    assert len(table.read_text().splitlines()) == 1 + 4
