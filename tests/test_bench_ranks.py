"""The benchmark commands over ranks: what they print and write, what they refuse, and their instruments."""

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import reference
from megabatch.bench import report
from megabatch.bench.cases import Case
from megabatch.bench.gradients import contenders as peers
from megabatch.bench.gradients import trial as gradients_trial
from megabatch.bench.gradients.trial import Ratios, Setting, Step
from megabatch.bench.instruments import processes, wire
from megabatch.bench.instruments.ranks import Crew, Member
from megabatch.bench.loss import contenders
from megabatch.bench.ring import command as ring
from megabatch.bench.ring import trial as ring_trial
from megabatch.bench.ring.contenders import ENTRANTS
from megabatch.bench.ring.trial import Digest, Row, Taken

from .benchmarks import main

MIB = 2**20
NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo:     111      2    0    0    0     0          0         0      333      4    0    0    0     0       0
  eth0:     555      6    0    0    0     0          0         0      777      8    0    0    0     0       0
"""


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    (case,) = json.loads(path.read_text())["cases"]
    return {row["name"]: row for row in case["contenders"]}


def add_up(member: Member) -> tuple[int, torch.Tensor | None]:
    """What a crew is asked to do: the sum of the ranks, over the ranks."""
    member.meet()
    if member.outsider:
        return member.rank, None
    total = torch.tensor([float(member.rank)])
    dist.all_reduce(total)
    return member.rank, total


def one_dies(member: Member) -> None:
    if member.rank == 1:
        os.abort()
    dist.barrier()


def one_raises(member: Member) -> None:
    if member.rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def hang(member: Member) -> None:
    time.sleep(60)


def test_ring_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    options = ["ring", "--rows", "64", "--width", "8", "--ranks", "2", "--repeats", "2"]
    assert main([*options, "--contenders", "one", "ring", "formula", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "clip_loss, N=64, D=8, float32, 2 ranks × 32 rows" in out
    assert "\n2 ranks × 1 thread / 1 process × " in out
    rows = rows_of(path)
    assert list(rows) == ["one", "ring", "formula"]
    for row in rows.values():
        assert row["status"] == "ok"
        assert len(row["seconds"]) == 2
        assert 0 < row["best"] <= row["mean"]
        ratios = [own / its for own, its in zip(row["seconds"], rows["one"]["seconds"], strict=True)]
        assert row["over_one_process"] == statistics.median(ratios)
        assert row["title"] in out
    assert rows["one"]["sent_bytes"] is None
    if wire.COUNTERS.exists():
        # Forward a block of features each way, backward the gradient: 32 rows of 8 floats each, twice or more.
        assert all(2 * 32 * 8 * 4 <= rows[name]["sent_bytes"] < MIB for name in ("ring", "formula"))


def test_a_wrong_result_of_ours_gets_no_figures(monkeypatch, tmp_path, capsys):
    right = reference.clip_loss
    monkeypatch.setattr(reference, "clip_loss", lambda *args, **options: 1.0001 * right(*args, **options))
    path = tmp_path / "out.json"
    options = ["ring", "--rows", "16", "--width", "4", "--ranks", "2", "--contenders", "ring", "--json", str(path)]
    assert main(options) == 1
    assert "WRONG: at N=16 the loss is off by" in capsys.readouterr().out
    row = rows_of(path)["ring"]
    assert (row["best"], row["peak_bytes"], row["sent_bytes"], row["seconds"]) == (None, None, None, [])


@pytest.mark.parametrize(
    ("factors", "wrong"),
    [((1, 1, 1), ""), ((1.1, 1, 1), "loss"), ((1, 1.1, 1), "scale"), ((1, 1, 1.1), "gradient norm")],
)
def test_at_full_size_everyone_is_held_against_the_one_process(factors, wrong):
    truth = Digest(5.0, -0.2, 0.04)
    # Each of two ranks has half the rows, and a gradient twice as large, which the trainer halves.
    rank = Digest(*(f * x for f, x in zip(factors, (5.0, -0.2, 0.04 * 2**0.5), strict=True)))
    taken = [Taken({"ring": rank}, {}), Taken({"ring": rank}, {}), Taken({"one": truth}, {})]
    rows = [Row("one", "", seconds=[1.0]), Row("ring", "", seconds=[1.0])]
    ring_trial._compare(Case("clip", 64, 8), rows, taken)
    assert rows[0].status == "ok"
    assert (rows[1].status, rows[1].seconds) == (("wrong", []) if wrong else ("ok", [1.0]))
    assert f"at N=64 the {wrong}" in rows[1].note or not wrong


def test_gradients_of_ranks_together_are_held_against_one_process():
    case = Case("clip", 32, 8)
    truth = ring_trial.trial.results(contenders.dense(case), case.inputs().to(torch.float64))

    def part(rank: int, factor: float) -> dict[str, torch.Tensor]:
        """Of one of two ranks, whose gradients a trainer will halve."""
        mine = slice(16 * rank, 16 * rank + 16)
        return {name: factor * 2 * x[mine] if x.dim() else x for name, x in truth.items()}

    error, gradient = ring_trial.against_truth(case, [part(0, 1.0), part(1, 1.0)])
    assert error < 1e-12
    assert gradient == pytest.approx(1.0)
    error, gradient = ring_trial.against_truth(case, [part(0, 0.5), part(1, 0.5)])
    assert error == pytest.approx(0.5)
    assert gradient == pytest.approx(0.5)


def test_one_rank_has_no_gradients_to_compare(capsys):
    assert main(["gradients", "--ranks", "1"]) == 2
    assert "gradients: --ranks must be at least 2, got 1." in capsys.readouterr().err


def test_rows_that_ranks_cannot_share_equally_are_refused(capsys):
    assert main(["ring", "--rows", "64", "63", "--ranks", "2"]) == 2
    assert "--rows must be multiples of --ranks, got 63 rows for 2 ranks" in capsys.readouterr().err


def test_the_table_holds_every_run_against_the_one_process():
    rows = [
        Row("one", "1 process × 2 threads", peak_bytes=2 * MIB, seconds=[2.0, 4.0]),
        Row("ring", "megabatch, ring", peak_bytes=MIB, sent_bytes=1.5 * MIB, seconds=[3.0, 3.0]),
        Row("open_clip", "open_clip", status="not installed"),
    ]
    one, ours, open_clip = ring._table(rows).splitlines()[1:]
    assert one.split()[5:] == ["2.00", "s", "3.00", "s", "±", "1.41", "s", "1.00", "-", "2.0"]
    assert ours.split()[2:] == ["3.00", "s", "3.00", "s", "±", "0.00", "ms", "1.50", "1.5", "1.0"]
    assert open_clip.endswith("not installed")
    assert ring._headline(rows, 2) == "\n2 ranks × 1 thread / 1 process × 2 threads: 1.50 (best), 1.00 (mean)"
    assert ring._headline(rows[:1], 2) == ""


def test_a_ratio_to_nothing_is_none():
    assert [report.ratio(1.0, base) for base in (None, 0, 2.0)] == ["-", "-", "0.50"]


def test_memory_of_all_ranks_together_is_judged_by_who_holds_what():
    case, ranks = Case("clip", 64, 8), 4
    held = {
        name: ENTRANTS[name].held(case, ranks) / case.matrix_bytes for name in ("global", "formula", "untiled", "ring")
    }
    assert held == {"global": 6 * ranks, "formula": 9, "untiled": 3 / ranks, "ring": 0}


def test_markdown_tables_survive_a_bar_in_a_cell():
    assert report.markdown(("a", "b"), [("1|2", "3")]) == "| a | b |\n| --- | --- |\n| 1/2 | 3 |"


def test_ranks_find_each_other_and_results_come_in_order():
    first, second, outsider = Crew(2, outsiders=1).run(add_up)
    assert (first[0], second[0], outsider) == (0, 1, (2, None))
    assert first[1] == second[1] == 1


def test_a_crew_says_who_failed_and_why():
    with pytest.raises(processes.Failed, match="SIGABRT"):
        Crew(2, quiet=True).run(one_dies)
    with pytest.raises(processes.Failed, match="ValueError: the cause"):
        Crew(2, quiet=True).run(one_raises)
    with pytest.raises(processes.Failed, match="no result after 1 s: it hangs"):
        Crew(2, deadline=1).run(hang)


def test_the_byte_meter_reads_what_an_interface_sent():
    assert wire.transmitted(NET_DEV, "lo") == 333
    assert wire.transmitted(NET_DEV, "eth0") == 777
    with pytest.raises(KeyError):
        wire.transmitted(NET_DEV, "lo0")


@pytest.mark.skipif(not wire.COUNTERS.exists(), reason="nobody counts bytes here")
def test_the_byte_meter_sees_a_transfer_and_little_else():
    def counted(size: int) -> int:
        before = wire.sent_bytes()
        wire._transfer_seconds(size)
        after = wire.sent_bytes()
        assert before is not None
        assert after is not None
        return after - before

    # The least of several, because other processes may talk at the same time.
    assert 4 * MIB < min(counted(4 * MIB) for _ in range(5)) < 4.5 * MIB
    assert min(counted(1) for _ in range(5)) < 4096


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 1e9), ("2.5mbit", 2.5e6), ("100kbps", 8e5), ("9bit", 9)])
def test_rates_are_written_as_tc_writes_them(rate, bits):
    assert wire.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "1", "gbit", "fast", "1gb", "0gbit", "-1gbit", "nanbit"])
def test_what_is_no_rate_is_refused(rate, capsys):
    with pytest.raises(ValueError, match="as in 1gbit; got"):
        wire.bits_per_second(rate)
    with pytest.raises(SystemExit):
        main(["ring", f"--bandwidth={rate}"])
    assert "as in 1gbit; got" in capsys.readouterr().err


def test_a_limit_holds_and_its_absence_is_seen():
    with pytest.raises(wire.NoLimit, match="above the limit of 1mbit"):
        wire.check_limit("1mbit")
    try:
        wire.try_limit("400mbit")
    except wire.NoLimit as reason:
        pytest.skip(f"the loopback cannot be limited: {reason}")
    code = "from megabatch.bench.instruments import wire; assert wire.check_limit('400mbit') > 1e8"
    assert wire.run_limited("400mbit", [sys.executable, "-c", code]) == 0


def test_where_no_limit_can_be_set_the_command_says_what_is_missing(monkeypatch, capsys):
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "tc" else which(name, path=path))
    assert main(["ring", "--bandwidth", "1gbit"]) == 2
    assert "the loopback cannot be limited: not installed: tc " in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name, path=None: which("false"))
    assert main(["ring", "--bandwidth", "1gbit"]) == 2
    assert "exit code 1 (needs root" in capsys.readouterr().err


def test_gradients_over_ranks_are_those_of_one_process(tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["gradients", "--ranks", "2", "--losses", "clip", "--packages", "megabatch", "inf_cl", "--markdown"]
    assert main([*options, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| megabatch clip_loss | 1.000 | 1.000 | 1.000 | global | works |" in out
    assert '| megabatch clip_loss, grad_reduction="sum" | 1.000 | 1.000 | 1.000 | global | works |' in out
    (peer,) = (case["contenders"][0] for case in json.loads(path.read_text())["cases"] if case["package"] == "inf_cl")
    assert peer["status"].startswith(("not installed", "needs triton", "its kernels need CUDA"))


def test_every_peer_is_one_of_our_losses_and_named_once():
    assert len({peer.title for peer in peers.PEERS}) == len(peers.PEERS)
    assert {peer.package for peer in peers.PEERS if peer.ours} == {"megabatch"}
    setting = Setting(4, 8, 16, 1)
    assert (setting.equal, setting.uneven) == ([8, 8, 8, 8], [8, 5, 8, 5])


def test_ratios_tell_length_from_direction():
    truth = Step(1.0, torch.tensor([2.0, 0.0]), scale=4.0)
    found = [Step(1.0, torch.tensor([1.0, 0.0]), 4.0), Step(1.0, torch.tensor([0.0, 1.0]), 4.0)]
    length, cosine, scale, bias = gradients_trial.ratios("mean", found, truth)
    assert (length, cosine) == (pytest.approx(0.5**1.5 / 1.0), pytest.approx(0.5**0.5))
    assert (scale, bias) == (1.0, None)
    assert gradients_trial.ratios("sum", found, truth).scale == 2.0
    assert not Ratios(length, cosine, scale, bias).right
    assert Ratios(1.0, 1.0, None, None).right


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ([2.0, 2.0], "global"),
        ([1.5, 2.5], "local rows"),
        ([4.0, 4.0], "global × 2"),
        ([3.5, 4.5], "local rows × 2"),
        ([3.0, 3.0], "global × 1.50"),
    ],
)
def test_the_reported_value_is_named(losses, value):
    assert gradients_trial.value_of(losses, 2.0) == value


def test_only_ours_can_be_wrong():
    fine = {"encoder": 1.0, "cosine": 1.0, "scale": 1.0, "value": "global", "uneven": gradients_trial.WORKS}
    for change in (
        {},
        {"encoder": 0.25},
        {"scale": None},
        {"bias": 2.0},
        {"uneven": "hangs"},
        {"status": "ValueError"},
    ):
        row = {"title": "", "package": "", "loss": "clip", "trainer": "mean", **fine, **change}
        assert gradients_trial.Row(**row, ours=True).wrong == bool(change)
        assert not gradients_trial.Row(**row, ours=False).wrong
