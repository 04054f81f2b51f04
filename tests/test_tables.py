"""Every table of figures in the documentation comes from a result file."""

import json
from typing import Any

import pytest

from tools import tables

# Tables that were measured before there were result files, by page. What is new has one: these numbers only shrink.
EARLIER = {"benchmarks.md": 17, "drop-ins.md": 1, "several-ranks.md": 1}
EARLIER |= {"two-memory-barriers.md": 2}
# Pages of predictions, data sheets and printed figures: nothing on them is measured.
PREDICTED = ("kernels.md", "plan.md")


def document(**changes: Any) -> dict[str, Any]:
    row = {"name": "megabatch", "title": "megabatch", "status": "ok", "note": "", "median": 0.0123, "iqr": 0.001}
    row |= {"over_megabatch": [1.0, 0.9, 1.1], "peak_bytes": 5 * 2**20, "error": 1e-7, **changes}
    machine = {"device": "a CPU", "device_type": "cpu", "threads": 2, "torch": "2.13", "commit": "abc"}
    cases = [{"loss": "clip", "rows": 4096, "contenders": [row]}]
    about = {"benchmark": "loss", "date": "2026-11-18T00:00:00", "command": "megabatch bench loss"}
    return {**about, "machine": machine, "cases": cases}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_of_a_page_are_what_their_result_files_say(page):
    text = page.read_text()
    assert tables.written(text) == text
    if page.name not in PREDICTED:
        assert len(list(tables.unsupported(text))) == EARLIER.get(page.name, 0), list(tables.unsupported(text))


def test_a_table_is_rendered_with_its_machine_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "loss.json").write_text(json.dumps(document()))
    page = tables.written("before\n\n<!-- table: loss -->\nold\n<!-- end of table -->\n\nafter\n")
    assert "    megabatch bench loss\n" in page
    assert "Measured on 2026-11-18: a CPU, 2 threads, torch 2.13, commit abc." in page
    assert "loss clip, rows 4,096" in page
    assert "| megabatch | 12.3 ms | 1.00 ms | 1.00 [0.90, 1.10] | 5.0 | 1.0e-07 |  |" in page
    assert tables.written(page) == page
    (tmp_path / "loss.json").write_text(json.dumps(document(median=0.5)))
    assert tables.written(page) != page  # other figures than the page has


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ("| | time |\n|---|---|\n| ours | 12.3 ms |\n", 1),
        ("| | peak MiB |\n|---|---|\n| ours | 12 |\n", 1),
        ("| flag | |\n|---|---|\n| `--limit` | such as 2GiB |\n", 0),
        ("<!-- table: x -->\n| | time |\n|---|---|\n| ours | 12.3 ms |\n<!-- end of table -->\n", 0),
    ],
)
def test_a_table_that_no_result_file_supports_is_found(table, found):
    assert len(list(tables.unsupported(f"text\n\n{table}\nmore\n"))) == found


def test_every_table_has_a_command_that_can_be_typed(capsys):
    from .test_docs import read_command, trouble_with

    for command in tables.COMMANDS.values():
        typed = read_command(f"megabatch bench {command}")
        assert typed is not None
        assert trouble_with(typed) == ""
    assert tables.main(["list"]) == 0
    assert "loss: megabatch bench loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tables.main(["run", "nothing"])
