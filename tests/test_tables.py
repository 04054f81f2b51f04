"""Every table of figures in the documentation comes from a result file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import loss_summary, tables

# Of predictions and printed figures: nothing on it is measured.
PREDICTED = ("plan.md",)


def document(rows: list[dict[str, Any]], **case: Any) -> dict[str, Any]:
    machine = {"device": "a CPU", "device_type": "cpu", "threads": 2, "torch": "2.13", "commit": "abc"}
    cases = [{**case, "rows": size, "contenders": rows} for size in (1024, 4096)]
    return {"benchmark": "loss", "date": "2026-11-18T00:00:00", "machine": machine, "cases": cases}


def contender(name: str = "megabatch", **changes: Any) -> dict[str, Any]:
    row = {"name": name, "title": name, "status": "ok", "note": "", "median": 0.0123, "peak_bytes": 5 * 2**20}
    return {**row, "error": 1e-7, "parts": {}, **changes}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_of_a_page_are_what_their_result_files_say(page: Path) -> None:
    assert tables.written(page.read_text()) == page.read_text(), "run python -m tools.tables write"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_has_no_table_of_figures_that_no_result_file_supports(page: Path) -> None:
    assert page.name in PREDICTED or list(tables.unsupported(page.read_text())) == []


def test_every_result_file_has_a_table_and_every_table_a_page() -> None:
    shown = {name for page in tables.PAGES for name, _ in tables.BLOCK.findall(page.read_text())}
    assert shown == {*tables.COMMANDS, tables.SUMMARY}
    assert {path.stem for path in tables.RESULTS.glob("*.json")} <= set(tables.COMMANDS)


def test_a_table_is_rendered_with_its_machine_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "before\n\n<!-- table: loss -->\nold\n<!-- end of table -->\n\nafter\n"
    assert "Not measured yet." in tables.written(page)
    rows = [contender(), contender("slow", status="out of memory", median=None), contender("x", status="not installed")]
    (tmp_path / "loss.json").write_text(json.dumps(document(rows, loss="clip", ranks=1)))
    page = tables.written(page)
    assert "| 12.3\u00a0ms<br>5.0\u00a0MiB |" in page  # browsers break no line inside a figure
    shown = page.replace(tables.NO_BREAK, " ")
    assert f"    megabatch bench {tables.COMMANDS['loss']}\n" in shown
    assert "Measured on 2026-11-18: a CPU, 2 threads, torch 2.13, commit abc." in page
    assert "clip_loss\n\n|  | N = 1,024 | N = 4,096 | error |" in page
    assert "| megabatch | 12.3 ms<br>5.0 MiB | 12.3 ms<br>5.0 MiB | 1.0e-07 |" in shown
    assert "| slow | out of memory | out of memory |" in page
    assert "not installed" not in page
    assert tables.written(page) == page
    both = document([contender(), contender("open_clip")], loss="clip")
    both["machine"]["packages"] = {"open_clip_torch": "3.3.0", "lightly": "1.6.0"}
    assert "torch 2.13, open_clip_torch 3.3.0, commit abc." in tables.rendered("loss", both)  # lightly is not shown
    (tmp_path / "loss.json").write_text(json.dumps(document([contender(median=0.5)], loss="clip")))
    assert tables.written(page) != page  # other figures than the page has


def test_the_share_of_the_loss_and_bytes_sent_are_shown_where_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    rows = [contender(error=None, sent_bytes=2**21, parts={"loss": 1.0, "encoders": 3.0})]
    (tmp_path / "step.json").write_text(json.dumps(document(rows, model="tiny", chunk=32, ranks=2)))
    text = tables.rendered("step", tables.result("step"))
    assert "tiny, chunks of 32, 2 ranks\n" in text
    assert "| MiB sent | share of the loss |" in text
    assert text.rstrip().endswith("| 2.0 | 25% |")


def test_a_cell_has_the_ratio_of_its_rounds_with_quartiles() -> None:
    rows = [contender(over_products=[1.1, 1.0, 1.2], over_megabatch=[1.0, 1.0, 1.0])]
    rows += [contender("dense", over_products=[2.2, 2.0, 2.4], over_megabatch=[1.96, 1.9, 2.05])]
    text = tables.rendered("loss", document(rows, loss="clip")).replace(tables.NO_BREAK, " ")
    assert "| megabatch | 12.3 ms<br>5.0 MiB |" in text
    assert "| dense | 12.3 ms<br>×1.96 [1.90, 2.05]<br>5.0 MiB |" in text


def test_settings_of_a_library_with_the_same_gradients_share_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    known = {"gradient": 1.0, "cosine": 1.0, "scale": 1.0, "bias": None, "value": "global", "uneven": "works"}
    rows = [
        {"package": "p", "ours": False, "status": "ok", **known, "name": f"p Loss, dist={way}"} for way in ("a", "b")
    ]
    rows += [{**rows[0], "name": "p Other", "gradient": 0.25, "uneven": "killed by SIGABRT: a long message"}]
    given = document(rows)
    given["cases"] = given["cases"][:1]
    (tmp_path / "gradients.json").write_text(json.dumps(given))
    text = tables.rendered("gradients", tables.result("gradients"))
    assert "| p Loss, 2 settings | 1.000 | 1.000 | 1.000 | global | works |\n" in text
    assert "| p Other | 0.250 | 1.000 | 1.000 | global | killed |\n" in text


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ("| | time | memory |\n|---|---|---|\n| ours | 12.3 ms | 5 MiB |\n", 1),
        ("| | peak MiB |\n|---|---|\n| ours | 12 |\n| theirs | 1,024 |\n", 1),
        ("| | a | b |\n|---|---|---|\n| ours | 0.543, 0.547 | **0.5 ± 0.1** |\n", 1),
        ("| flag | |\n|---|---|\n| `--limit` | such as 2GiB |\n", 0),
        ("| package | tested with |\n|---|---|\n| torch | 2.8.0, 2.13.0 |\n| lightly | 1.5.20 |\n", 0),
        ("<!-- table: x -->\n| | a | b |\n|---|---|---|\n| ours | 12.3 ms | 4 |\n<!-- end of table -->\n", 0),
    ],
)
def test_a_table_that_no_result_file_supports_is_found(table: str, found: int) -> None:
    assert len(list(tables.unsupported(f"text\n\n{table}\nmore\n"))) == found


def test_every_table_has_a_command_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    from .test_docs import read_command, trouble_with

    for command in tables.COMMANDS.values():
        typed = read_command(f"megabatch bench {command}")
        assert typed is not None
        assert trouble_with(typed) == ""
    assert tables.main(["list"]) == 0
    assert "loss: megabatch bench loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tables.main(["run", "nothing"])


def test_the_summary_of_the_readme_names_what_its_times_are() -> None:
    rows = [contender(name) for name in loss_summary.COLUMNS]
    assert "Times are medians;" in loss_summary.table(document(rows, loss="clip"))
    earlier = [{"best" if key == "median" else key: value for key, value in row.items()} for row in rows]
    assert "Times are the best of several runs;" in loss_summary.table(document(earlier, loss="clip"))
