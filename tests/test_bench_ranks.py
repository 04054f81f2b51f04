"""Benchmarks over ranks: one batch spread over processes, the paper's tables, tiles, and gradients."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.bench import gradients, measure, paper, processes
from megabatch.bench.cases import Case, results
from megabatch.bench.contenders import CONTENDERS, Contender, ours
from megabatch.bench.gradients import SETTINGS, Outcome, value_of
from megabatch.bench.processes import Runner
from megabatch.bench.tiling import contenders as tilings
from megabatch.bench.trial import Rules, combined, contest
from megabatch.distributed.world import World

from .benchmarks import main
from .ranks import PATIENCE

MIB = 2**20
RUNNER = Runner("cpu", World(torch.device("cpu")))
ON_RANKS = [one for one in CONTENDERS.values() if one.takes_part("clip", 2, "cpu") and not one.package]


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_ring_measures_time_bytes_and_memory_of_everyone_on_ranks(tmp_path, capsys):
    path = tmp_path / "out.json"
    names = [one.name for one in ON_RANKS if one.name not in ("compiled", "products")]
    assert main(["ring", "--quick", "--contenders", *names, "--json", str(path)]) == 0
    (case,) = document(path)["cases"]
    assert (case["ranks"], case["rows"]) == (2, 64)
    rows = {row["name"]: row for row in case["contenders"]}
    assert list(rows) == names
    assert {row["status"] for row in rows.values()} == {"ok"}
    features = 64 * 8 * 4 / 2  # of a rank, one side
    assert rows["ring"]["sent_bytes"] > 2 * features
    assert rows["alone"]["sent_bytes"] is None
    out = capsys.readouterr().out
    assert "clip_loss, N=64, D=8, float32, 2 ranks" in out
    assert "megabatch, one process, " in out


def test_loss_runs_under_torchrun_and_one_rank_speaks(tmp_path):
    path = tmp_path / "out.json"
    words = ["bench", "loss", "--quick", "--losses", "clip", "--contenders", "megabatch", "by_hand", "products"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megabatch"]
    command = [sys.executable, *launcher, *words, "--json", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("clip_loss, N=40, D=8, float32, 2 ranks") == 1
    found = document(path)
    assert found["machine"]["ranks"] == 2
    assert {row["status"] for case in found["cases"] for row in case["contenders"]} == {"ok"}


def weaker(work: Any) -> Any:
    """Its gradients are a little too small on one rank."""
    step = ours(work)

    def spoiled() -> Any:
        loss = step()
        work.inputs.features[0].grad *= 0.99 if work.world.rank else 1.0
        return loss

    return spoiled


def test_a_wrong_result_on_one_rank_gets_no_figures_for_anyone():
    wrong = Contender("wrong", "wrong", weaker, on="ranks", ours=True)
    rows = contest(Case("clip", 64, 8, ranks=2), [CONTENDERS["by_hand"], wrong], Rules(repeats=2), RUNNER)
    assert [row.status for row in rows] == ["ok", "wrong"]
    assert "gradient of features 1 is off by" in rows[1].note
    assert all(not row.seconds for row in rows)
    assert rows[1].peak_bytes is None


def test_gradients_of_ranks_together_are_those_of_a_trainer():
    found = [
        {
            "loss": torch.tensor(1.0),
            "gradient of features 1": torch.ones(2, 3),
            "gradient of the scale": torch.tensor(x),
        }
        for x in (2.0, 4.0)
    ]
    mean, total = combined(found), combined(found, "sum")
    assert mean["gradient of features 1"].tolist() == [[0.5] * 3] * 4
    assert total["gradient of features 1"].tolist() == [[1.0] * 3] * 4
    assert (mean["gradient of the scale"], total["gradient of the scale"]) == (3.0, 6.0)
    assert mean["loss"] == total["loss"] == 1.0


def ranks_of(world: World, fails: int) -> int:
    if world.rank == fails:
        raise ValueError("just so")
    return world.rank


def test_ranks_find_each_other_and_the_first_to_fail_is_heard():
    assert processes.launch("cpu", 3, ranks_of, -1) == [0, 1, 2]
    with pytest.raises(processes.Failed, match=r"^ValueError: just so$"):
        processes.launch("cpu", 2, ranks_of, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["ring", "--rows", "15", "--ranks", "2"],
            "--rows must be multiples of the number of ranks, got 15 rows for 2",
        ),
        (["ring", "--ranks", "1"], "ring: --ranks must be 2 or more, got 1."),
        (["gradients", "--ranks", "1"], "gradients: --ranks must be 2 or more and divide --rows, got 32 rows for 1"),
    ],
)
def test_rows_that_ranks_cannot_share_equally_are_refused(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_the_byte_meter_reads_what_the_loopback_sent(monkeypatch, tmp_path):
    file = tmp_path / "dev"
    file.write_text("Inter-| Receive\n face |bytes\n    lo: 1 2 3 4 5 6 7 8 4242 10\n  eth0: 1 2 3 4 5 6 7 8 9 10\n")
    monkeypatch.setattr(measure, "TRAFFIC", file)
    monkeypatch.setattr(measure, "LOOPBACK", "lo")
    assert measure.sent_bytes() == 4242
    monkeypatch.setattr(measure, "TRAFFIC", tmp_path / "none")
    assert measure.sent_bytes() is None


def test_a_slow_loopback_is_slow():
    """Where the kernel lets us: a megabyte at 8 Mbit/s takes about a second, and the tool is gone afterwards."""
    tool = Path(__file__).parent.parent / "tools" / "slow_loopback"
    if subprocess.run([tool, "8mbit", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare, ip, tc and the right to use them")
    script = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(server.getsockname())
receiver, _ = server.accept()
thread = threading.Thread(target=lambda: sender.sendall(bytes(2**20)))
start, count = time.perf_counter(), 0
thread.start()
while count < 2**20:
    count += len(receiver.recv(2**16))
assert time.perf_counter() - start > 0.5
"""
    subprocess.run([tool, "8mbit", sys.executable, "-c", script], check=True, timeout=PATIENCE)


# ---- the paper's tables


@pytest.mark.parametrize("edge", [300, 1000, 5000])
def test_the_search_ends_within_a_sixteenth_of_the_edge(edge):
    tried: list[int] = []

    def attempt(rows: int) -> float | None:
        tried.append(rows)
        return 0.1 if rows <= edge else None

    found = paper.search(attempt, first=256, unit=16, time_limit=60)
    assert found.largest_rows <= edge < found.failed_rows
    assert found.failed_rows - found.largest_rows <= max(found.largest_rows / 16, 16)
    assert len(set(tried)) == len(tried)
    assert not found.at_least


def test_the_search_tries_no_step_that_would_take_too_long():
    found = paper.search(lambda rows: rows / 1000, first=256, unit=16, time_limit=2.0)
    assert (found.largest_rows, found.at_least) == (512, True)


def test_only_a_lack_of_memory_ends_the_search():
    case = Case("clip", 256, 64, ranks=2)
    small = replace(case, rows=2 * 256)
    with pytest.raises(processes.OutOfMemory):
        RUNNER.run(2, paper.step_within, replace(case, rows=8192), CONTENDERS["by_hand"], 32 * MIB)
    assert max(RUNNER.run(2, paper.step_within, small, CONTENDERS["ring"], 64 * MIB)) > 0
    broken = Contender("broken", "broken", breaks, on="ranks")
    with pytest.raises(processes.Failed, match="RuntimeError: not memory"):
        paper.largest(case, broken, RUNNER, 64 * MIB, 1.0)


def breaks(work: Any) -> Any:
    raise RuntimeError("not memory")


def test_paper_makes_all_of_its_tables(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["--contenders", "formula", "two_passes", "ring", "--json", str(path)]
    assert main(["paper", "--quick", *words]) == 0
    out = capsys.readouterr().out
    assert "largest batch with 64.0 MiB per rank" in out
    counted = {
        row["name"]: round(row["products"])
        for case in document(tmp_path / "out-largest.json")["cases"]
        for row in case["contenders"]
    }
    assert counted == {"formula": 6, "two_passes": 6, "ring": 3}  # few rows: logits are kept
    assert [row["status"] for row in document(path)["cases"][0]["contenders"]] == ["ok"] * 3


# ---- tiles


@pytest.mark.parametrize("ranks", [1, 2])
def test_tiling_tells_the_parts_of_a_step(ranks, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["tiling", "--quick", "--ranks", str(ranks), "--json", str(path)]) == 0
    (case,) = document(path)["cases"]
    rows = {row["name"]: row for row in case["contenders"]}
    assert list(rows) == ["own", "64", "whole", "products"]
    for name in ("own", "64", "whole"):
        assert rows[name]["parts"]["products"] > 0
        assert (rows[name]["parts"]["communication"] > 0) == (ranks > 1)
        assert rows[name]["over_products"] is not None
    assert "full-size products" in capsys.readouterr().out


def test_a_size_of_tiles_reaches_the_loss(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr("megabatch.clip_loss", lambda *args, **options: asked.append(options))
    case = Case("clip", 64, 8)
    for contender in tilings(["own", "64", "whole"], case, ["tiles"]):
        step = contender.make(case.work(World(torch.device("cpu"))))
        with pytest.raises(TypeError):  # of a loss that is None
            step()
    assert [options["tile"] for options in asked] == [None, 64, 2**30]


# ---- gradients


def test_gradients_over_ranks_are_those_of_one_process(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["gradients", "--ranks", "2", "--rows", "16", "--losses", "clip", "supcon", "--timeout", "120"]
    assert main([*words, "--packages", "megabatch", "pytorch-metric-learning", "--json", str(path)]) == 0
    rows = {row["name"]: row for case in document(path)["cases"] for row in case["contenders"]}
    for name, row in rows.items():
        if row["ours"]:
            figures = (row["gradient"], row["cosine"], row["scale"])
            assert figures == pytest.approx((1, 1, 1), abs=1e-3), name
            assert (row["value"], row["uneven"]) == ("global", "works")
    efficient = rows["pytorch-metric-learning SupConLoss, DistributedLossWrapper(efficient=True)"]
    assert efficient["gradient"] > 1.1
    assert "killed by SIGABRT" in efficient["uneven"]
    assert "WRONG" not in capsys.readouterr().out


def test_a_gradient_of_ours_that_is_off_is_wrong_and_only_ours_can_be():
    found = gradients.examine(Contender("x", "", weaker, ("clip",), ours=True), 16, 8, 2, RUNNER)
    assert found.gradient == pytest.approx(1, abs=0.01)
    assert found.wrong
    right = Outcome("x", "megabatch", True, gradient=1.0, cosine=1.0, scale=1.0, value="global", uneven="works")
    assert not right.wrong
    assert replace(right, scale=0.5).wrong
    assert replace(right, uneven="killed by SIGABRT").wrong
    assert not replace(right, scale=0.5, ours=False).wrong


@pytest.mark.parametrize(
    ("losses", "value"),
    [([2.0, 2.0], "global"), ([1.0, 3.0], "local rows"), ([4.0, 4.0], "global × 2"), ([1.0, 5.0], "local rows × 1.50")],
)
def test_the_reported_value_is_named(losses, value):
    assert value_of(losses, 2.0) == value


def test_every_setting_is_one_of_our_losses_and_named_once():
    from megabatch.bench.cases import LOSSES

    assert {one.losses[0] for one in SETTINGS.values()} == set(LOSSES)
    assert len(SETTINGS) == len(list(gradients._settings()))
    assert isinstance(SETTINGS["open_clip SigLipLoss, dist_impl=bidir"].make, partial)


def test_the_shares_of_all_ranks_are_the_batch():
    case = Case("clip", 12, 8, ranks=3)
    parts = [case.work(World(torch.device("cpu"), rank, 3)).inputs.features[0] for rank in range(3)]
    assert torch.equal(torch.cat(parts), case.inputs().features[0])
    uneven = [case.work(World(torch.device("cpu"), rank, 3), [6, 2, 4]).start for rank in range(3)]
    assert uneven == [0, 6, 8]
    work = case.work(World(torch.device("cpu")))
    assert results(CONTENDERS["by_hand"].make(work), work).keys() == case.expected().keys()
