"""What a run shows of itself: metrics.jsonl, out.log, the terminal, TensorBoard."""

import io
import json
import logging
import math
import re
import sys
import threading
import time
from dataclasses import fields
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from megabatch.train import checkpoint
from megabatch.train import report as report_module
from megabatch.train.config import Run
from megabatch.train.report import Report, SilentReport, read_metrics

VALUES = {
    "train/epoch": 2,
    "train/loss": 6.931471805599453,
    "train/accuracy": 0.0123,
    "train/logit_scale": 14.28571,
    "train/grad_norm": 0.512,
    "train/lr": 5e-4,
    "train/samples_per_second": 3303.2,
    "train/data_seconds": 0.0121,
    "train/step_seconds": 0.31,
    "train/memory_mib": 812.0,
}


class Screen(Console):
    """A terminal, or none, whose text can be read."""

    def __init__(self, terminal: bool) -> None:
        self.stream = io.StringIO()
        super().__init__(file=self.stream, force_terminal=terminal, force_interactive=terminal, width=80)

    @property
    def text(self) -> str:
        """Without colours and movements."""
        return Text.from_ansi(re.sub(r"\x1b\[[0-9;?]*[A-Zhl]", "", self.stream.getvalue())).plain


def make(folder, *, terminal=False, **options):
    run = Run(**{each.name: options.pop(each.name) for each in fields(Run) if each.name in options})
    settings = {"total_steps": 25, "first_step": 0, "console": Screen(terminal)}
    return Report(folder, run, **{**settings, **options})


def lines(path) -> list[str]:
    return path.read_text().splitlines()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No thread, handler or redirection outlives its report, whatever the test does."""
    before = set(threading.enumerate())
    logger = logging.getLogger("megabatch")
    state = (list(logger.handlers), logger.level, logger.propagate, sys.stdout, sys.stderr)
    yield
    assert {thread for thread in threading.enumerate() if not thread.name.startswith("wandb")} <= before
    assert (list(logger.handlers), logger.level, logger.propagate, sys.stdout, sys.stderr) == state


# ---- metrics.jsonl


def test_every_step_and_validation_is_a_line_with_exact_numbers(tmp_path):
    with make(tmp_path) as report:
        report.step(1, {"train/loss": 0.1 + 0.2, "train/samples": 1024})
        report.step(2, {"train/loss": 5e-324})
        report.validation(2, {"val/loss": 1 / 3})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": 0.1 + 0.2, "train/samples": 1024},
        {"step": 2, "train/loss": 5e-324},
        {"step": 2, "val/loss": 1 / 3},
    ]


def test_numbers_that_json_does_not_have_are_words_that_float_reads(tmp_path):
    def refuse(word):
        raise AssertionError(word)

    with make(tmp_path) as report:
        report.step(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "a": "nan", "b": "inf", "c": "-inf"}
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


def test_a_line_is_in_the_file_as_soon_as_its_step_is_done(tmp_path):
    with make(tmp_path) as report:
        for step in (1, 2, 3):
            report.step(step, VALUES)
            assert len(lines(tmp_path / "metrics.jsonl")) == step


@pytest.mark.parametrize("tail", ["", '{"step": 4, "train/lo', '{"step": 4}'])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path, tail):
    def play(report, steps):
        with report:
            for step in steps:
                report.step(step, {"train/loss": 1 / step})
                if step == 2:
                    report.validation(step, {"val/loss": 0.5})

    play(make(tmp_path / "whole"), range(1, 6))
    play(make(tmp_path / "killed"), range(1, 4))
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write(tail)
    play(make(tmp_path / "killed", first_step=2), range(3, 6))
    assert lines(tmp_path / "killed" / "metrics.jsonl") == lines(tmp_path / "whole" / "metrics.jsonl")
    assert [path.name for path in (tmp_path / "killed").iterdir() if "metrics" in path.name] == ["metrics.jsonl"]


def test_a_file_is_cut_by_replacing_it_whole(tmp_path, monkeypatch):
    """Killed while cutting, a run has the old file still."""
    with make(tmp_path) as report:
        for step in range(1, 6):
            report.step(step, VALUES)
    before = lines(tmp_path / "metrics.jsonl")

    def killed(*_):
        assert lines(tmp_path / "metrics.jsonl") == before
        assert lines(next(tmp_path.glob("metrics.jsonl*.unfinished"))) == before[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, first_step=2)
    assert lines(tmp_path / "metrics.jsonl") == before


def test_lines_that_cannot_be_read_are_dropped_and_counted(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\0\0\0\n[]\n{"loss": 1}\n{"step": 2}\n')
    make(tmp_path, first_step=2).close()
    assert lines(tmp_path / "metrics.jsonl") == ['{"step": 1}', '{"step": 2}']
    assert "WARNING" in lines(tmp_path / "out.log")[0]
    assert lines(tmp_path / "out.log")[0].endswith("metrics.jsonl: 3 lines could not be read, and were dropped")


# ---- lines


def test_without_a_terminal_there_is_a_plain_line_now_and_then_and_at_the_end(tmp_path):
    screen = Screen(terminal=False)
    with make(tmp_path, console=screen) as report:
        for step in range(1, 26):
            report.step(step, VALUES)
    assert re.findall(r"\[(\d+)/25 \((\d+)%\)\]", screen.stream.getvalue()) == [
        ("1", "4"),
        ("10", "40"),
        ("20", "80"),
        ("25", "100"),
    ]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d \| INFO \| Train Epoch: 2 \[10/25 \(40%\)\] Data \(t\): 0\.012 "
        r"Batch \(t\): 0\.310 3303\.2/s LR: 0\.0005 Logit Scale: 14\.286 Grad Norm: 0\.512 Memory: 812 MiB "
        r"Accuracy: 0\.0123 Loss: 6\.9315",
        screen.stream.getvalue().splitlines()[1],
    )
    assert (tmp_path / "out.log").read_text() == screen.stream.getvalue()


def test_lines_show_what_there_is_of_a_step(tmp_path):
    with make(tmp_path, log_every_n_steps=1) as report:
        report.step(1, {"train/loss": math.nan})
    assert lines(tmp_path / "out.log")[0].endswith("| Train [1/25 (4%)] Loss: nan")


def test_what_is_said_is_on_the_terminal_and_in_the_log(tmp_path):
    screen = Screen(terminal=False)
    with make(tmp_path, console=screen) as report:
        report.say("hello")
        report.warn("careful")
        report.validation(7, {"val/loss": 1.5, "val/R@1": 0.25})
    assert [line.split(" | ", 1)[1] for line in lines(tmp_path / "out.log")] == [
        "INFO | hello",
        "WARNING | careful",
        "INFO | Eval Step: 7 val/loss: 1.5 val/R@1: 0.25",
    ]
    assert screen.stream.getvalue() == (tmp_path / "out.log").read_text()


def test_a_resumed_run_goes_on_with_its_log(tmp_path):
    for word in ("first", "second"):
        with make(tmp_path) as report:
            report.say(word)
    assert [line.split()[-1] for line in lines(tmp_path / "out.log")] == ["first", "second"]


def test_lines_do_not_come_twice_where_the_root_logger_is_set_up(tmp_path, caplog):
    with caplog.at_level(logging.INFO), make(tmp_path) as report:
        report.say("once")
    assert caplog.records == []


def test_lines_go_to_stderr_unless_told_otherwise(tmp_path, capsys):
    with make(tmp_path, console=None) as report:
        report.say("hello")
    out, err = capsys.readouterr()
    assert (out, err.split(" | ")[-1]) == ("", "hello\n")


def test_an_error_that_ends_a_run_is_in_its_log(tmp_path):
    screen = Screen(terminal=False)
    with pytest.raises(ZeroDivisionError), make(tmp_path, console=screen):
        _ = 1 / 0
    assert lines(tmp_path / "out.log")[-1] == "ZeroDivisionError: division by zero"
    assert screen.stream.getvalue() == ""  # Python shows it there


# ---- the bar


def test_on_a_terminal_there_is_a_bar_with_everything_on_it(tmp_path):
    screen = Screen(terminal=True)
    with make(tmp_path, console=screen) as report:
        for step in range(1, 8):
            report.step(step, VALUES)
    first, second, bar = screen.text.rstrip().splitlines()[-3:]
    assert first == "Data (t): 0.012 Batch (t): 0.310 3303.2/s LR: 0.0005 Logit Scale: 14.286 Grad "
    assert second == "Norm: 0.512 Memory: 812 MiB Accuracy: 0.0123 Loss: 6.9315"
    assert re.fullmatch(r"Train Epoch: 2 \S+ +7/25 \d:\d\d:\d\d (\d:\d\d:\d\d|-:--:--) left", bar)


def test_time_left_is_the_time_that_steps_took_so_far(tmp_path, monkeypatch):
    screen = Screen(terminal=True)
    clock = [0.0]
    monkeypatch.setattr(screen, "get_time", lambda: clock[0])
    with make(tmp_path, console=screen, total_steps=1000, first_step=100) as report:
        for step in range(101, 121):
            clock[0] += 2.0
            report.step(step, VALUES)
    assert screen.text.rstrip().endswith("120/1000 0:00:40 0:29:20 left")


def test_the_bar_of_a_resumed_run_begins_where_it_was(tmp_path):
    screen = Screen(terminal=True)
    make(tmp_path, console=screen, total_steps=1000, first_step=100).close()
    assert " 100/1000 " in screen.text


def test_with_a_bar_the_lines_of_steps_are_in_the_log_alone(tmp_path):
    screen = Screen(terminal=True)
    with make(tmp_path, console=screen) as report:
        for step in range(1, 26):
            report.step(step, VALUES)
    assert "INFO" not in screen.text
    assert len(lines(tmp_path / "out.log")) == 4


def test_what_is_said_stands_above_the_bar_in_one_piece(tmp_path):
    screen = Screen(terminal=True)
    long = "a/path/[that]/is/" + "long/" * 30
    with make(tmp_path, console=screen) as report:
        report.step(1, VALUES)
        report.say(long)
        report.step(2, VALUES)
        print("printed by somebody else")
    shown = [line.rsplit(" | ")[-1] for line in screen.text.splitlines() if "Loss" not in line]
    assert shown.index(long) < shown.index("printed by somebody else")
    assert screen.text.rstrip().endswith("left")


def test_the_bar_is_not_drawn_at_every_step(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(report_module, "time", SimpleNamespace(monotonic=lambda: now))

    def drawn(pause: float) -> int:
        nonlocal now
        screen = Screen(terminal=True)
        with make(tmp_path, console=screen, total_steps=1000) as report:
            for step in range(1, 11):
                report.step(step, VALUES)
                now += pause
        return screen.text.count("Loss")

    assert drawn(0) == 2  # the first, and at the end
    assert drawn(2 * report_module.SECONDS_BETWEEN_FRAMES) >= 10


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_the_terminal_is_itself_again_after_an_error(tmp_path, error):
    screen = Screen(terminal=True)

    def run():
        with make(tmp_path, console=screen) as report:
            report.step(1, VALUES)
            raise error

    with pytest.raises(error):
        run()
    shown = screen.stream.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden, and shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("Loss")


def test_the_bar_runs_no_thread(tmp_path):
    """Workers may be forked at any time, and a thread could hold a lock then."""
    before = threading.active_count()
    with make(tmp_path, terminal=True) as report:
        report.step(1, VALUES)
        assert threading.active_count() == before


# ---- other ranks


def test_the_silent_report_takes_everything_and_shows_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with SilentReport() as report:
        report.step(1, VALUES)
        report.validation(1, VALUES)
        report.say("hello")
        report.warn("careful")
        report.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_the_silent_report_is_silent_in_every_method():
    public = {name for name in vars(Report) if not name.startswith("_")}
    assert public <= set(vars(SilentReport))


def test_a_report_can_be_closed_twice(tmp_path):
    with make(tmp_path) as report:
        report.close()


# ---- TensorBoard


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_value_of_every_step(tmp_path):
    with make(tmp_path, report_to="tensorboard") as report:
        report.step(1, {"train/loss": 0.5, "train/lr": 0.25})
        report.step(2, {"train/loss": 0.125})
        report.validation(2, {"val/loss": 2.0})
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5), (2, 0.125)], "train/lr": [(1, 0.25)], "val/loss": [(2, 2.0)]}


def test_tensorboard_has_a_step_as_soon_as_it_is_done(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    flushed = []
    flush = SummaryWriter.flush
    monkeypatch.setattr(SummaryWriter, "flush", lambda writer: (flush(writer), flushed.append(scalars(tmp_path))))
    with make(tmp_path, report_to="tensorboard") as report:
        report.step(1, {"train/loss": 0.5})
        assert flushed == [{"train/loss": [(1, 0.5)]}]


def test_wandb_has_every_value_of_every_step(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    with make(tmp_path / "run", report_to="wandb,tensorboard", wandb_project_name="ours") as report:
        assert (wandb.run.name, wandb.run.project) == ("run", "ours")
        original = wandb.run.log

        def log(values, step):
            logged.append((values, step))
            original(values, step=step)

        monkeypatch.setattr(wandb.run, "log", log)
        report.step(1, {"train/loss": 0.5})
        report.validation(1, {"val/loss": 0.25})
    assert logged == [({"train/loss": 0.5}, 1), ({"val/loss": 0.25}, 1)]
    assert wandb.run is None
    assert scalars(tmp_path / "run")


def test_wandb_has_a_run_for_each_folder_and_goes_on_with_it(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for folder in ("a/run", "b/run", "a/run"):
        with make(tmp_path / folder, report_to="wandb"):
            ids.append(wandb.run.id)
    assert ids[0] == ids[2] != ids[1]


def test_without_its_package_wandb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"--report-to wandb needs wandb, got none\. Run pip install wandb\."):
        make(tmp_path, report_to="wandb")


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path):
    for first_step, value in ((0, 1.0), (2, 2.0)):
        time.sleep(1.1 if first_step else 0)  # names of its files, which order them, tell seconds
        with make(tmp_path, report_to="tensorboard", first_step=first_step) as report:
            for step in range(first_step + 1, 6 - first_step):
                report.step(step, {"train/loss": value})
    assert scalars(tmp_path) == {"train/loss": [(1, 1.0), (2, 1.0), (3, 2.0)]}


def test_without_its_package_tensorboard_is_refused_and_nothing_stays_open(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ModuleNotFoundError) as e:
        make(tmp_path, report_to="tensorboard")
    assert e.value.name == "tensorboard"  # by which the command line says what to install


def test_tensorboard_is_not_imported_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    make(tmp_path).close()


def test_names_that_no_encoding_has_can_be_logged(tmp_path):
    with make(tmp_path) as report:
        report.warn("skipped \udce9.jpg")
    assert "skipped \\udce9.jpg" in (tmp_path / "out.log").read_text()


def test_what_was_logged_before_is_shown_by_the_report(tmp_path, capsys):
    with report_module.holding_log() as held:
        logging.getLogger("megabatch.train.towers").warning("before")
    assert "before" not in capsys.readouterr().err
    with make(tmp_path) as report:
        report.replay(held)
    assert "WARNING | before" in (tmp_path / "out.log").read_text()


def test_a_line_with_no_number_of_a_step_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": Infinity}\n{"step": "x"}\n')
    make(tmp_path, first_step=1).close()
    assert lines(tmp_path / "metrics.jsonl") == ['{"step": 1}']


def test_samples_of_steps_that_were_not_finite_are_cut_with_the_metrics(tmp_path):
    with make(tmp_path) as report:
        for step in (1, 2, 3):
            report.not_finite(step, {"train/loss": math.nan}, ["a", "b"])
    make(tmp_path, first_step=2).close()
    kept = [json.loads(line) for line in lines(tmp_path / "nonfinite.jsonl")]
    assert kept == [{"step": step, "train/loss": "nan", "samples": ["a", "b"]} for step in (1, 2)]
