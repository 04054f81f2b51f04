"""The contest that all benchmarks hold: present, fits, right, weigh, race; what it prints, writes and refuses."""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megabatch
from megabatch import reference
from megabatch.bench import data, formulas, measure, plot, processes, report, trial
from megabatch.bench.cases import LOSSES, Case, results
from megabatch.bench.command import COMMANDS
from megabatch.bench.contenders import CONTENDERS, CannotRun, Contender, NotInstalled
from megabatch.bench.list import BENCHMARKS
from megabatch.bench.processes import Runner
from megabatch.bench.results import Row, healthy, over, row_of, table
from megabatch.bench.session import Session
from megabatch.bench.trial import Rules, contest
from megabatch.distributed.world import World
from megabatch.tolerance import slack

from .benchmarks import main
from .ranks import PATIENCE

MIB = 2**20
CPU = torch.device("cpu")
HERE = World(CPU)
RUNNER = Runner("cpu", HERE)
TINY = ["--rows", "40", "--width", "8", "--repeats", "2", "--seconds", "0"]
SOME = ["--contenders", "megabatch", "by_hand", "products"]


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    (case,) = json.loads(path.read_text())["cases"]
    return {row["name"]: row for row in case["contenders"]}


def fault(contender: Contender, case: Case) -> str:
    work = case.work(HERE)
    return trial.fault(case, contender, [results(contender.make(work), work)])


# ---- in processes of their own


def test_loss_prints_a_table_and_writes_json_with_the_machine_and_the_command(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    assert main(["loss", *TINY, "--losses", "clip", *SOME, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "clip_loss, N=40, D=8, float32" in out
    assert "/ 4 full-size products" in out
    written = json.loads(path.read_text())
    facts = written["machine"]
    assert {"device", "torch", "commit", "megabatch", "threads", "ranks", "python", "packages"} <= facts.keys()
    assert written["command"].split()[0] == "megabatch"
    rows = rows_of(path)
    assert list(rows) == ["megabatch", "by_hand", "products"]
    for name, row in rows.items():
        assert row["status"] == "ok"
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) <= row["median"] <= max(row["seconds"])
        ratios = [own / its for own, its in zip(row["seconds"], rows["megabatch"]["seconds"], strict=True)]
        median, low, high = row["over_megabatch"]
        assert median == pytest.approx(sum(ratios) / 2)
        assert low <= median <= high
        assert (row["peak_bytes"] is None) == (name == "products")
        assert (row["error"] is None) == (name == "products")


def test_a_process_that_dies_says_how():
    with pytest.raises(processes.Failed, match="killed by SIGABRT"):
        processes.launch("cpu", 1, abort)
    with pytest.raises(processes.Failed, match="ZeroDivisionError: no division"):
        processes.launch("cpu", 1, divide)
    with pytest.raises(processes.OutOfMemory):
        processes.launch("cpu", 1, take, 8 * MIB, 64 * MIB)
    assert processes.launch("cpu", 1, take, 64 * MIB, 8 * MIB) == [8 * MIB]


def abort(world: World) -> None:
    os.abort()


def divide(world: World) -> None:
    raise ZeroDivisionError("no division\nat all")


def take(world: World, limit: int, size: int) -> int:
    measure.limit_memory(limit, 1, world.device)()
    return torch.ones(size // 4).nbytes


def test_what_does_not_fit_its_limit_is_out_of_memory(tmp_path):
    path = tmp_path / "out.json"
    words = ["--rows", "4096", "--width", "8", "--repeats", "0", "--limit", "100MiB", "--error-rows", "0"]
    names = ["--contenders", "small", "by_hand"]
    assert main(["loss", *words, "--losses", "clip", *names, "--json", str(path)]) == 0
    rows = rows_of(path)
    assert (rows["small"]["status"], rows["by_hand"]["status"]) == ("ok", "out of memory")
    assert rows["small"]["peak_bytes"] > 0
    assert rows["small"]["seconds"] == []  # --repeats 0: memory alone


def test_ctrl_c_reaches_one_process_and_ends_all(tmp_path):
    """As a terminal sends it: to all processes of the group."""
    path = tmp_path / "out.json"
    words = ["loss", "--rows", "16", "65536", "--losses", "clip", "--contenders", "megabatch", "--seconds", "0"]
    command = [sys.executable, "-m", "megabatch", "bench", *words, "--json", str(path), "--error-rows", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    bench = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    assert bench.stdout is not None
    while "clip_loss, N=16," not in bench.stdout.readline():
        assert bench.poll() is None
    time.sleep(1.0)
    os.killpg(bench.pid, signal.SIGINT)
    out, err = bench.communicate(timeout=PATIENCE)
    assert bench.returncode == 130, err
    assert "stopped after 1 cases" in err
    assert f"written to {path}" in out
    assert [case["rows"] for case in json.loads(path.read_text())["cases"]] == [16]


# ---- right first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_contender_computes_the_same_loss(loss, dtype):
    case = Case(loss, 40, 8, dtype)
    for contender in CONTENDERS.values():
        if contender.takes_part(loss, 1, "cpu") and not contender.bare and not contender.compiles:
            try:
                contender.make(case.few(contender.multiple).work(HERE))
            except (NotInstalled, RuntimeError, ImportError):  # a package that is not here, or is broken here
                assert contender.package
                continue
            assert fault(contender, case) == "", contender.name


@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_add_up_to_the_whole(loss, monkeypatch):
    monkeypatch.setattr(formulas, "CHUNK", 7)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name in ("checkpointed", "compiled"):
        assert fault(CONTENDERS[name], Case(loss, 40, 8)) == ""
    exact, dense = Case(loss, 40, 8).exact(False), Case(loss, 40, 8).expected()
    assert all(torch.allclose(exact[name], dense[name], rtol=1e-9, atol=1e-12) for name in dense)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("factor", [1 + 1e-4, float("nan")])
def test_a_wrong_result_of_ours_gets_no_speed_for_anyone(factor, monkeypatch, tmp_path, capsys):
    right = megabatch.clip_loss
    monkeypatch.setattr(megabatch, "clip_loss", lambda *args, **options: factor * right(*args, **options))
    path = tmp_path / "out.json"
    assert main(["loss", *TINY, "--losses", "clip", *SOME, "--json", str(path)]) == 1
    assert "WRONG: at N=40 the loss is off by" in capsys.readouterr().out
    rows = rows_of(path)
    assert rows["megabatch"]["status"] == "wrong"
    assert all(row["median"] is None and row["seconds"] == [] for row in rows.values())


@pytest.mark.usefixtures("inline")
def test_a_wrong_result_of_another_gets_no_speed(monkeypatch, tmp_path, capsys):
    right = formulas.CHUNKED["siglip"]
    monkeypatch.setitem(formulas.CHUNKED, "siglip", lambda *args: 1.01 * right(*args))
    path = tmp_path / "out.json"
    names = ["--contenders", "megabatch", "checkpointed", "--error-rows", "0"]
    assert main(["loss", *TINY, "--losses", "siglip", *names, "--json", str(path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    rows = rows_of(path)
    assert rows["checkpointed"]["median"] is None
    assert rows["megabatch"]["median"] is not None


def test_wrong_gradients_are_wrong_too(monkeypatch):
    right = megabatch.nt_xent_loss
    monkeypatch.setattr(
        megabatch, "nt_xent_loss", lambda x, y, s, **options: right(x, y.detach() + y * 0, s, **options)
    )
    assert "gradient of features 2" in fault(CONTENDERS["megabatch"], Case("nt_xent", 40, 8))


@pytest.mark.usefixtures("inline")
def test_at_full_size_everyone_must_agree_with_the_first_of_ours(monkeypatch):
    """Where few rows are right and many are not."""
    right = formulas.BY_HAND["clip"]
    wrong = lambda image, *more: right(image, *more) * (1.01 if len(image) > 300 else 1)  # noqa: E731
    monkeypatch.setitem(formulas.BY_HAND, "clip", wrong)
    rows = contest(Case("clip", 320, 8), [CONTENDERS["megabatch"], CONTENDERS["by_hand"]], Rules(repeats=1), RUNNER)
    assert [row.status for row in rows] == ["ok", "wrong"]
    assert rows[1].note.startswith("at N=320 the loss is ")
    assert rows[0].seconds
    assert not rows[1].seconds


@pytest.mark.parametrize("name", ["megabatch", "by_hand", "metric_learning"])
def test_the_error_is_that_of_the_loss_and_its_gradients_against_float64(name, tmp_path):
    case, contender = Case("nt_xent", 40, 8), CONTENDERS[name]
    truth = case.exact(contender.normalizes)
    work = case.work(HERE)
    found = trial.error(results(contender.make(work), work), truth)
    assert 1e-9 < found < 2e-6
    spoiled = {key: value * (1.001 if "features 2" in key else 1) for key, value in truth.items()}
    assert trial.error(spoiled, truth) == pytest.approx(1e-3)


def test_one_slack_serves_tests_check_and_bench():
    from megabatch.check import exactness

    from . import tolerance

    assert tolerance.slack is slack is trial.slack is exactness.slack


# ---- present, and what cannot run


@pytest.mark.usefixtures("inline")
def test_what_is_missing_or_broken_is_a_row_that_says_so(monkeypatch):
    def gone(work: Any) -> Any:
        raise NotInstalled

    def lacks(work: Any) -> Any:
        raise CannotRun("needs CUDA")

    def breaks(work: Any) -> Any:
        raise RuntimeError("no C++ compiler\nat all")

    named = [Contender(name, name, make) for name, make in (("gone", gone), ("lacks", lacks), ("breaks", breaks))]
    rows = contest(Case("clip", 40, 8), [CONTENDERS["megabatch"], *named], Rules(repeats=1), RUNNER)
    found = [report.remark(row.status, row.note) for row in rows]
    assert found == ["", "not installed", "cannot run: needs CUDA", "failed: RuntimeError: no C++ compiler"]
    assert healthy(rows, {one.name: one for one in (CONTENDERS["megabatch"], *named)})
    assert not healthy(rows[1:], {one.name: replace(one, ours=True) for one in named})


def test_who_takes_part_where():
    def names(loss: str, ranks: int, device: str) -> set[str]:
        return {name for name, one in CONTENDERS.items() if one.takes_part(loss, ranks, device)}

    everywhere = {"megabatch", "by_hand", "compiled", "products"}
    assert all(everywhere <= names(loss, ranks, "cpu") for loss in LOSSES for ranks in (1, 2))
    assert {"cce", "formula", "open_clip"} <= names("clip", 1, "cpu")
    assert {"inf_cl", "triton"} <= names("clip", 1, "cuda:1") - names("clip", 1, "cpu")
    assert "siglip_kernel" in names("siglip", 1, "cuda") - names("clip", 1, "cuda")
    assert {"ring", "gather", "alone"} <= names("clip", 2, "cpu") - names("clip", 1, "cpu")


@pytest.mark.parametrize("wrong", [False, True])
def test_siglip_kernel_is_given_what_it_takes(wrong, monkeypatch):
    """Its signature, by a stand-in: fused_siglip_loss(image, text, log of the scale, bias)."""

    def fused(image: Any, text: Any, log_scale: Any, bias: Any) -> Any:
        return (1.1 if wrong else 1) * reference.siglip_loss(image, text, log_scale.exp(), bias, normalize=False)

    module = SimpleNamespace(fused_siglip_loss=fused, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "siglip_kernel", module)
    assert bool(fault(CONTENDERS["siglip_kernel"], Case("siglip", 64, 16))) == wrong


@pytest.mark.parametrize("loss", ["clip", "info_nce"])
def test_cut_cross_entropy_is_given_what_it_takes(loss, monkeypatch):
    """By a stand-in: linear_cross_entropy(e, c, targets, impl=…), the mean over rows of e @ c.T."""

    def linear_cross_entropy(e: Any, c: Any, targets: Any, impl: str) -> Any:
        assert impl == "torch_compile"
        return torch.nn.functional.cross_entropy(e @ c.T, targets)

    module = SimpleNamespace(linear_cross_entropy=linear_cross_entropy, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    assert fault(CONTENDERS["cce"], Case(loss, 64, 16)) == ""


# ---- the instruments


def test_contenders_run_in_shuffled_order_in_every_round():
    order: list[str] = []
    steps = {name: partial(order.append, name) for name in "abc"}
    runs = measure.rounds(HERE, {**steps, "d": None}, repeats=40, seconds=0)
    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert len(rounds) == 41  # the first is thrown away
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(found) for name, found in runs.items()} == {"a": 40, "b": 40, "c": 40, "d": 0}


def test_the_memory_meter_sees_what_was_allocated_and_freed_again():
    with measure.PeakMemory(CPU) as memory:
        torch.ones(64 * MIB // 4)
    assert memory.bytes is not None
    assert 63 * MIB < memory.bytes < 80 * MIB
    with measure.PeakMemory(CPU) as nothing:
        pass
    assert nothing.bytes is not None
    assert nothing.bytes < 8 * MIB


def test_a_peak_that_cannot_be_reset_is_not_available(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "FORGET", tmp_path / "no" / "such" / "file")
    with measure.PeakMemory(CPU) as memory:
        torch.ones(MIB)
    assert memory.bytes is None
    kept = tmp_path / "status"
    kept.write_text("VmRSS:\t  1000 kB\nVmHWM:\t 90000 kB\n")
    monkeypatch.setattr(measure, "FORGET", tmp_path / "file")
    monkeypatch.setattr(measure, "STATUS", kept)  # a kernel that keeps the old peak
    with measure.PeakMemory(CPU) as memory:
        pass
    assert memory.bytes is None
    assert report.mebibytes(memory.bytes) == "n/a"


def test_a_gpu_is_measured_by_its_own_allocator(monkeypatch):
    gpu, synchronized = torch.device("cuda:1"), []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    with measure.PeakMemory(gpu) as memory:
        pass
    assert memory.bytes == 250
    assert synchronized == [gpu, gpu]


def test_the_profiler_tells_products_from_other_operators():
    x = torch.randn(400, 400)
    found = measure.stages(lambda: [x @ x for _ in range(5)], CPU)
    assert found["products"] > 0
    assert found["communication"] == 0
    other = measure.stages(lambda: [x.exp() for _ in range(5)], CPU)
    assert other["products"] == 0
    assert other["other operators"] > 0
    assert measure.products(lambda: x @ x, CPU) == 2 * 400**3


# ---- what is known of a contender


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    one, other = Row("a", "A", seconds=[1.0, 9.0, 4.0]), Row("b", "B", seconds=[2.0, 3.0, 4.0])
    ratio = over(one, other)
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (1.0, 0.75, 2.0)
    assert (one.median, one.iqr) == (4.0, 4.0)
    assert over(one, None) is None
    assert row_of([one, other], "b") is other
    head, body = table([one, other], {"/ b": "b"})
    assert (head[3], body[0][3]) == ("/ b", "1.00 [0.75, 2.00]")
    one.convict("off")
    assert (one.status, one.note, one.median, one.peak_bytes) == ("wrong", "off", None, None)


def test_cases_that_differ_in_more_than_rows_have_plots_of_their_own():
    def records(rows: int) -> list[dict[str, Any]]:
        return [Row("megabatch", "megabatch", seconds=[rows**2 * 1e-9], peak_bytes=MIB).record()]

    cases = [
        {"rows": rows, "loss": loss, "width": 8, "contenders": records(rows)}
        for loss in ("clip", "siglip")
        for rows in (64, 128)
    ]
    assert list(plot.curves_of(cases)) == ["loss clip", "loss siglip"]
    assert plot.curves_of(cases[:1]) == {}
    looks = [str(sorted(style.items(), key=str)) for style in plot.styles([f"curve {i}" for i in range(14)]).values()]
    assert len(set(looks)) == 14


# ---- a session


def options(folder: Path, *kinds: str) -> argparse.Namespace:
    return argparse.Namespace(**{kind: folder / "new" / f"out.{'png' if kind == 'plot' else kind}" for kind in kinds})


def fill(run: Session, *sizes: int) -> None:
    for rows in sizes:
        ours = Row("megabatch", "megabatch", peak_bytes=MIB, seconds=[rows * 1e-3, rows * 2e-3])
        run.add({"rows": rows}, [ours.record(), Row("other", "other", "not installed").record()])


def test_everything_measured_is_in_the_files(tmp_path, capsys):
    with Session("tried", options(tmp_path, "json", "csv", "plot"), RUNNER, 2) as run:
        fill(run, 64, 128)
    assert run.exit_code == 0
    assert torch.__version__ in capsys.readouterr().out
    written = json.loads((tmp_path / "new/out.json").read_text())
    assert [case["rows"] for case in written["cases"]] == [64, 128]
    with (tmp_path / "new/out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["rows"], line["name"]) for line in lines] == [
        (rows, name) for rows in ("64", "128") for name in ("megabatch", "other")
    ]
    assert [float(x) for x in lines[0]["seconds"].split()] == [0.064, 0.128]
    assert (tmp_path / "new/out.png").read_bytes().startswith(b"\x89PNG")


def test_what_ends_a_run_leaves_the_results_so_far(tmp_path, capsys):
    with Session("tried", options(tmp_path, "json"), RUNNER, 3) as run:
        fill(run, 64)
        assert len(json.loads((tmp_path / "new/out.json").read_text())["cases"]) == 1  # a kill would leave this
        raise KeyboardInterrupt
    assert run.exit_code == 130
    assert "stopped after 1 cases" in capsys.readouterr().err
    with Session("tried", options(tmp_path, "csv"), RUNNER, 0) as run:
        run.add({}, [], healthy=False)
        run.add({}, [])
    assert run.exit_code == 1


def test_on_a_terminal_there_is_a_bar(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Session("tried", options(tmp_path), RUNNER, 2) as run:
        run.reached()
        run.show("heading", ("", "x"), [("a", "1")])
    captured = capsys.readouterr()
    assert "tried" in captured.err
    assert "heading" in captured.out
    assert "heading" not in captured.err


# ---- the command line


@pytest.mark.parametrize("kind", ["json", "csv", "plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(kind, tmp_path, capsys):
    folder = tmp_path / "a.png"
    folder.mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["loss", "--rows", "8", f"--{kind}", str(folder)])
    words = f"loss: --{kind} must be a file that can be written to, got {folder}: Is a directory."
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ring", "--rows", "0"], "--rows: must be a whole number from 1 on, got '0'"),
        (["ring", "--ranks", "1.5"], "--ranks: must be a whole number from 1 on, got '1.5'"),
        (["loss", "--limit", "12MB"], "--limit: must be a size such as 512MiB or 2GiB, got '12MB'"),
        (["loss", "--device", "tpu"], "--device: must be one that torch sees, got 'tpu'. Available here: cpu"),
        (["tiling", "--tiles", "0"], "--tiles: must be a whole number from 1 on, own or whole, got '0'"),
        (["loss", "--plot", "x.txt"], "--plot: must end in .png, got 'x.txt'"),
    ],
)
def test_what_makes_no_sense_is_refused(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="1"):
        main(["loss", "--rows", "8", "--plot", str(tmp_path / "x.png")])
    assert "matplotlib is not installed: pip install 'megabatch[bench]'" in capsys.readouterr().err


def test_every_contender_of_every_benchmark_is_listed(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert set(BENCHMARKS) <= set(COMMANDS)
    assert all(name in out for contenders in BENCHMARKS.values() for name in contenders)
    assert main(["list", "ring"]) == 0
    assert "open_clip SigLipLoss" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="list: benchmark must be one of loss, ring"):
        main(["list", "rnig"])


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[name][0]).add_arguments(parser)
    return parser


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"list"}))
def test_a_word_means_one_thing_in_every_benchmark(name):
    actions = parser_of(name)._option_string_actions
    assert {"--json", "--csv", "--rows"} <= set(actions)
    assert actions["--rows"].help.startswith("rows of the batch, on all ranks together")
    assert ("--device" in actions) == (name != "data")  # which reads and decodes on the CPU
    if name != "gradients":  # which runs once
        assert actions["--repeats"].default >= 7
    if name not in ("gradients", "data"):
        assert actions["--limit"].type.__name__ == "memory"
    assert not {"--dtypes", "--widths", "--bandwidth"} & set(actions)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_description_is_at_most_six_lines(name):
    assert len(import_module(COMMANDS[name][0]).DESCRIPTION.splitlines()) <= 6


# ---- data


def test_data_is_read_from_the_disk_and_from_a_server_and_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    def gone(name: str) -> Any:
        raise NotInstalled

    monkeypatch.setattr(data, "package", gone)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "out.json"
    assert main(["data", "--quick", "--json", str(path)]) == 0
    cases = json.loads(path.read_text())["cases"]
    assert [(case["place"], case["latency_ms"]) for case in cases] == [("disk", 0), ("http", 1.0), ("s3", 1.0)]
    for case in cases:
        ours, other = case["contenders"]
        assert (ours["status"], len(ours["seconds"])) == ("ok", 2)
        assert (other["name"], other["status"], other["seconds"]) == ("webdataset", "not installed", [])
    assert "samples/s" in capsys.readouterr().out


def test_a_server_answers_with_the_bytes_that_are_asked_for_after_its_latency(tmp_path):
    (tmp_path / "x.tar").write_bytes(bytes(range(200)))
    with data.serving(tmp_path, latency=100) as base:
        request = urllib.request.Request(f"{base}/x.tar", headers={"Range": "bytes=10-19"})
        begin = time.perf_counter()
        with urllib.request.urlopen(request) as answer:
            assert (answer.status, answer.read()) == (206, bytes(range(10, 20)))
        assert time.perf_counter() - begin >= 0.1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/y.tar")
