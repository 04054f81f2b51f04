"""`python -m tools.tables`: the tables of figures in the documentation, made from result files.

    python -m tools.tables list             # every table, its command, and whether it has a result file
    python -m tools.tables run loss ring    # measure these again, one command each, into docs/results/NAME.json
    python -m tools.tables write            # write all tables into their pages, and the picture of the README

A page has a table between `<!-- table: NAME -->` and `<!-- end of table -->`. `tests/test_tables.py` fails if one
differs from its result file, and if a page has a table of figures anywhere else.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from megabatch.bench import chunked, contenders, report

from . import loss_summary

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

# Name: the command that measures it, without `megabatch bench` and --json.
COMMANDS = {
    "loss": "loss --losses clip --rows 256 1024 2048 4096 8192 16384",
    "peers": "peers --rows 4096 --losses siglip info_nce nt_xent supcon",
    "paper": "paper --tables largest products --limit 64MiB",
    "ring": "ring --rows 16384 --ranks 2 --contenders ring blocking gather alone by_hand open_clip",
    "step": "step --rows 1024 4096 16384",
    "data": "data",
    "chunked": "chunked --rows 512 --chunk 64",
    "chunked-texts": "chunked --tasks texts --rows 256 --chunk 32",
    "chunked-memory": "chunked --tasks vision --rows 256 16384 --chunk 256 --repeats 0 --contenders megabatch plain",
    "gradients": "gradients",
}
# Of a contender by name: tables name the versions of those that they show.
PACKAGES = {one.name: one.package for one in (*contenders.CONTENDERS.values(), *chunked.CONTENDERS.values())}
BLOCK = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end of table -->", re.DOTALL)
SUMMARY = "loss-summary"  # the table of the README, by tools/loss_summary.py
# A cell that is a figure: a number, perhaps with a unit or another number.
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?: ?(?:%|×|[nmµ]?s|[KMGT]i?B))?"
FIGURE = re.compile(rf"[*~≥ ]*{NUMBER}(?:(?:, | / | ± |<br>){NUMBER})*[*]*")

NO_BREAK = "\u00a0"  # a space that browsers do not break lines at: no figure is torn apart

Row = dict[str, Any]


# ---- a table from a result file


def result(name: str) -> dict[str, Any] | None:
    """What was measured; None where there is nothing, or nothing that names the commit it was measured at."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": {}}
    return found if "commit" in found["machine"] else None


def rendered(name: str, document: dict[str, Any] | None) -> str:
    """The text between the markers."""
    command = f"    megabatch bench {COMMANDS[name]}"
    if document is None:
        return f"{command}\n\nNot measured yet.\n"
    machine, cases = document["machine"], document["cases"]
    threads = f", {machine['threads']} threads" if machine["device_type"] == "cpu" else ""
    about = f"Measured on {document['date'][:10]}: {machine['device']}{threads}, torch {machine['torch']}, "
    tables = [_gradients(cases)] if name == "gradients" else [_by_size(group) for group in _groups(cases)]
    measured = {row.get("package") or PACKAGES.get(row["name"]) for case in cases for row in _shown(case)}
    versions = machine.get("packages", {}).items()
    packages = [f"{package} {version}" for package, version in versions if version and package in measured]
    about += ", ".join([*packages, f"commit {machine['commit']}"])
    return "\n\n".join([command, f"{about}.", *tables]) + "\n"


def _groups(cases: list[Row]) -> list[list[Row]]:
    """Cases that differ in their size only: one table each."""
    groups: dict[str, list[Row]] = {}
    for case in cases:
        groups.setdefault(_heading(case), []).append(case)
    return list(groups.values())


def _heading(case: Row) -> str:
    words = [case[key] for key in ("task", "model") if key in case]
    words += [f"{case['place']}, {case['latency_ms']:g} ms per answer"] if "place" in case else []
    words += [f"{case['loss']}_loss"] if "loss" in case else []
    words += [f"chunks of {case['chunk']}"] if "chunk" in case else []
    words += [f"{case['ranks']} ranks"] if case.get("ranks", 1) > 1 and "rows" in case else []
    return ", ".join(words)


def _by_size(cases: list[Row]) -> str:
    """A row for each contender, a column for each size, and columns for what does not change with the size."""
    titles = {row["name"]: row.get("title") or row["name"] for case in cases for row in _shown(case)}
    sizes = list(dict.fromkeys(map(_size, cases)))
    cells = {(row["name"], _size(case)): row for case in cases for row in case["contenders"]}
    more = {title: cell for title, cell in COLUMNS.items() if any(cell(row) for row in cells.values())}
    body = []
    for name, title in titles.items():
        rows = [cells.get((name, size)) for size in sizes]
        known = [[cell(row) for row in rows if row] for cell in more.values()]
        last = [next(filter(None, reversed(texts)), "") for texts in known]
        body.append([title, *(_cell(row) if row else "" for row in rows), *last])
    table = markdown(["", *sizes, *more], body)
    return "\n\n".join(filter(None, [_heading(cases[0]), table]))


def _shown(case: Row) -> list[Row]:
    """Without what is not installed, or not in a version that can be imported beside the others."""
    missing = re.compile("not installed|import|torchvision", re.IGNORECASE)
    return [row for row in case["contenders"] if not missing.search(f"{row.get('status')}: {row.get('note')}")]


def _size(case: Row) -> str:
    return f"N = {case['rows']:,}" if "rows" in case else f"{case['ranks']} ranks"


def _cell(row: Row) -> str:
    if row.get("status", "ok") != "ok":
        return str(row["status"])
    figures = [report.seconds(row["median"])] if row.get("median") else []
    if (ratio := row.get(_ratio_key(row))) and ratio[1:] != [1.0, 1.0]:
        figures.append("×{:.2f} [{:.2f}, {:.2f}]".format(*ratio))
    figures += [f"{report.mebibytes(row['peak_bytes'])} MiB"] if row.get("peak_bytes") is not None else []
    figures += [f"{'≥ ' if row.get('at_least') else ''}{row['largest_rows']:,}"] if row.get("largest_rows") else []
    return "<br>".join(figures).replace(" ", NO_BREAK)


def _ratio_key(row: Row) -> str:
    """Of its time to that of the contender that its benchmark compares with."""
    return next((key for key in row if key.startswith("over_") and key != "over_products"), "")


def _share(row: Row) -> str:
    parts = row.get("parts") or {}
    return f"{parts['loss'] / sum(parts.values()):.0%}" if "loss" in parts else ""


# Columns for the largest size that has them.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "error": lambda row: report.small(row["error"]) if row.get("error") is not None else "",
    "MiB sent": lambda row: report.mebibytes(row["sent_bytes"]) if row.get("sent_bytes") else "",
    "products": lambda row: f"{row['products']:.1f}" if row.get("products") else "",
    "share of the loss": _share,
}


def _gradients(cases: list[Row]) -> str:
    """One table for all losses and libraries. Settings of a library that are alike share a row."""
    body: list[list[str]] = []
    for (which, *figures), alike in groupby((row for case in cases for row in case["contenders"]), key=_gradient_cells):
        names = [row["name"] for row in alike]
        body.append([names[0] if len(names) == 1 else f"{which}, {len(names)} settings", *figures])
    return markdown(["", "gradient", "cosine", "scale", "value", "uneven"], body)


def _gradient_cells(row: Row) -> tuple[str, ...]:
    """Of which loss, ours together, and what is known of it."""
    which = row["package"] if row["ours"] else row["name"].partition(",")[0]
    if row["status"] != "ok":
        return which, "", "", "", "", row["status"].partition(":")[0]
    scale = [f"{row[key]:.3f}" for key in ("scale", "bias") if row[key] is not None]
    figures = (f"{row['gradient']:.3f}", f"{row['cosine']:.3f}", ", ".join(dict.fromkeys(scale)))
    return which, *figures, row["value"], row["uneven"].partition(":")[0].partition(" by ")[0]


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table of a page."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, rule, *body))


# ---- pages


def written(page: str) -> str:
    """A page with its tables as the result files have them."""

    def block(found: re.Match[str]) -> str:
        if found[1] == SUMMARY:
            return found[0]
        return f"<!-- table: {found[1]} -->\n{rendered(found[1], result(found[1]))}<!-- end of table -->"

    return BLOCK.sub(block, page)


def unsupported(page: str) -> Iterator[str]:
    """Tables of figures that no result file supports, by their first line: more than one cell is a figure."""
    for table in re.findall(r"(?:^\|.*\|\n)+", BLOCK.sub("", page) + "\n", re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        if sum(FIGURE.fullmatch(cell) is not None for row in rows for cell in row[1:]) > 1:
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
            print(f"{name}: megabatch bench {command}{'' if result(name) else '   (not measured)'}")
    elif options.action == "run":
        for name in options.names or COMMANDS:
            path = RESULTS / f"{name}.json"
            command = [sys.executable, "-m", "megabatch", "bench", *shlex.split(COMMANDS[name]), "--json", str(path)]
            if code := subprocess.run(command, check=False).returncode:
                return code
            document = json.loads(path.read_text())
            document["command"] = f"megabatch bench {COMMANDS[name]}"  # the same on every machine
            path.write_text(json.dumps(document, indent=1) + "\n")
    else:
        for path in PAGES:
            path.write_text(written(path.read_text()))
        loss_summary.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
