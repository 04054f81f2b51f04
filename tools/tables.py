"""`python -m tools.tables`: the tables of figures in the documentation, made from result files.

    python -m tools.tables list             # every table, its command, and whether it has a result file
    python -m tools.tables run loss ring    # measure these again, one command each, into docs/results/NAME.json
    python -m tools.tables write            # write all tables into their pages

A page has a table between `<!-- table: NAME -->` and `<!-- end of table -->`. `tests/test_tables.py` fails if one
differs from its result file, and if a page has a new table of figures anywhere else.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megabatch.bench import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

# Name: the command that measures it, without `megabatch bench` and --json.
COMMANDS = {
    "loss": "loss --losses clip --rows 256 1024 2048 4096 8192 16384",
    "peers": "peers",
    "tiling": "tiling --rows 8192",
    "paper": "paper",
    "ring": "ring --rows 16384 --ranks 2",
    "step": "step",
    "chunked": "chunked --rows 512 --chunk 64",
    "chunked-memory": "chunked --tasks vision --rows 256 16384 --chunk 256 --repeats 0",
    "gradients": "gradients",
    "drop-ins": "loss --losses info_nce --rows 4096 8192 --width 384 --contenders mnrl cached_mnrl drop_in by_hand",
}
# Those of tools/loss_summary.py have another form.
BLOCK = re.compile(r"<!-- table: (?!loss-summary)([\w-]+) -->\n(.*?)<!-- end of table -->", re.DOTALL)
SUMMARY = re.compile(r"<!-- table: loss-summary -->\n.*?<!-- end of table -->", re.DOTALL)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
# A cell with a measured figure.
FIGURE = re.compile(r"\|\s*[~≥*]*\s*[\d,.]+ (?:s|ms|µs|MiB|GiB|GB|MB)\b")
MEMORY = re.compile(r"\|[^|\n]*\bMiB\b[^|\n]*\|")

Cells = Mapping[str, Callable[[dict[str, Any]], str]]


def _ratio(name: str) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        found = row.get(name)
        return f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]" if found else ""

    return cell


def _columns(document: dict[str, Any]) -> Cells:
    """Every figure that some contender of the document has."""
    rows = [row for case in document["cases"] for row in case["contenders"]]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {"": lambda row: str(row.get("title") or row["name"])}
    if any(row.get("median") for row in rows):
        columns["median"] = lambda row: report.seconds(row["median"]) if row["median"] else ""
        columns["IQR"] = lambda row: report.seconds(row["iqr"]) if row["median"] else ""
    for name in dict.fromkeys(key for row in rows for key in row if key.startswith("over_")):
        if any(row.get(name) for row in rows):
            columns[f"/ {name.removeprefix('over_').replace('_', ' ')}"] = _ratio(name)
    figures = {"peak MiB": ("peak_bytes", report.mebibytes), "MiB sent": ("sent_bytes", report.mebibytes)}
    figures |= {"error": ("error", report.small), "largest batch": ("largest_rows", lambda x: f"{x:,}")}
    figures |= {name: (name, lambda x: f"{x:.3f}") for name in ("gradient", "cosine", "scale", "bias", "products")}
    figures |= {name: (name, str) for name in ("value", "uneven")}
    for title, (key, words) in figures.items():
        if any(row.get(key) not in (None, "") for row in rows):
            columns[title] = lambda row, key=key, words=words: "" if row.get(key) in (None, "") else words(row[key])
    columns[" "] = lambda row: report.remark(row.get("status", "ok"), row.get("note", ""))
    return columns


def rendered(name: str, document: dict[str, Any]) -> str:
    """The text between the markers."""
    machine, columns, cases = document["machine"], _columns(document), document["cases"]
    threads = f", {machine['threads']} threads" if machine["device_type"] == "cpu" else ""
    about = f"Measured on {document['date'][:10]}: {machine['device']}{threads}, torch {machine['torch']}, "
    parts = [f"    {document['command']}\n", f"{about}commit {machine['commit']}."]
    if "package" in cases[0]["contenders"][0]:  # of gradients: one table for all of them
        cases = [{"contenders": [row for case in cases for row in case["contenders"]]}]
    for case in cases:
        sizes = [(key, case[key]) for key in ("task", "model", "loss", "rows", "ranks", "chunk") if key in case]
        heading = ", ".join(f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in sizes)
        body = [tuple(cell(row) for cell in columns.values()) for row in case["contenders"]]
        parts += [*([heading] if heading else []), report.markdown(tuple(columns), body)]
    return "\n\n".join(parts) + "\n"


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def written(page: str) -> str:
    """A page with its tables as the result files have them."""

    def block(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{rendered(found[1], result(found[1]))}<!-- end of table -->"

    return BLOCK.sub(block, page)


def unsupported(page: str) -> Iterator[str]:
    """Tables of figures that no result file supports, by their first line."""
    outside = SUMMARY.sub("", BLOCK.sub("", page))
    for table in re.findall(r"(?:^\|.*\|\n)+", outside + "\n", re.MULTILINE):
        if FIGURE.search(table) or MEMORY.search(table.splitlines()[0]):
            yield table.splitlines()[0]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tools.tables", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("list", "run", "write"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)}; run: all if left out")
    options = parser.parse_args(words)
    if unknown := next((name for name in options.names if name not in COMMANDS), None):
        parser.error(f"NAME must be one of {', '.join(COMMANDS)}, got {unknown!r}")
    if options.action == "list":
        for name, command in COMMANDS.items():
            has = "" if (RESULTS / f"{name}.json").exists() else "   (no result file)"
            print(f"{name}: megabatch bench {command}{has}")
    elif options.action == "run":
        for name in options.names or COMMANDS:
            path = RESULTS / f"{name}.json"
            command = [sys.executable, "-m", "megabatch", "bench", *shlex.split(COMMANDS[name]), "--json", str(path)]
            if code := subprocess.run(command, check=False).returncode:
                return code
            document = result(name)
            document["command"] = f"megabatch bench {COMMANDS[name]}"  # the same on every machine
            path.write_text(json.dumps(document, indent=1) + "\n")
    else:
        for path in PAGES:
            path.write_text(written(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
