"""`python -m megabatch.bench loss`: time and memory of every loss, against its peers and against the limit."""

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import report, trial
from .cases import DTYPES, LOSSES, Case
from .contenders import CONTENDERS
from .trial import Row

DESCRIPTION = """\
Time and peak memory of a training step through a loss, forward and backward with all gradients (features, logit_scale,
logit_bias), of megabatch and of its peers.

Time: the contenders of a case take turns in one process, after a run each that is thrown away; the best of all rounds
counts. Compare the ratios: seconds are those of this machine. Threads are torch's own choice (OMP_NUM_THREADS).

Memory: the peak of resident memory during one step beyond what the process held before it, less the gradients of the
inputs: beyond inputs and gradients. Before it inputs are made and libraries loaded. Each contender has a process of its
own. One that would need more than the machine has left is not run.

Right first: results are compared with the dense loss in float64 before anything is timed, at a small number of rows
and, for megabatch, at the case's own where that fits into memory. megabatch may be off by no more than the dense loss
in the case's dtype, plus a small slack for rounding; the others must compute the same loss. What is wrong is reported
as WRONG and gets no speed, and the exit code is 1; where megabatch is wrong, nobody gets one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[256, 1024, 4096, 16384], metavar="N", help="batch sizes"
    )
    parser.add_argument("--width", type=int, nargs="+", default=[512], metavar="D", help="widths of the features")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"], help="dtypes of the features")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["clip", "siglip", "nt_xent"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="who takes part")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, at least")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="go on with rounds for this long: small steps need it"
    )
    parser.add_argument(
        "--memory-budget",
        metavar="BYTES",
        help="for 'megabatch, logits kept': bytes, or words such as 2GiB; default: what holds the logits",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write everything measured to this file, every run too"
    )


def main(options: argparse.Namespace) -> int:
    machine = report.machine()
    print(report.describe(machine), flush=True)
    cases: list[dict[str, Any]] = []
    healthy = True
    if options.json:  # a path that cannot be written to shows now, not in an hour
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.touch()
    for dtype, name, width, rows in itertools.product(options.dtypes, options.losses, options.width, options.rows):
        case = Case(name, rows, width, dtype, options.memory_budget)
        results = trial.contest(case, options.contenders, options.repeats, options.seconds)
        print(f"\n{case}\n{_table(case, results)}", flush=True)
        healthy &= all(row.status != "wrong" for row in results)
        healthy &= all(row.status != "failed" for row in results if CONTENDERS[row.name].ours)
        cases.append({**asdict(case), "contenders": [_record(row, results) for row in results]})
        if options.json:  # after every case, so that a long run leaves something when stopped
            options.json.write_text(json.dumps({"machine": machine, "cases": cases}, indent=2) + "\n")
    if options.json:
        print(f"\nwritten to {options.json}")
    return 0 if healthy else 1


def _table(case: Case, rows: list[Row]) -> str:
    ours, products = _best(rows, "megabatch"), _best(rows, "products")
    head = ("", "time", "/ megabatch", f"/ {case.kind.products} products", "peak MiB", "")
    return report.table(
        head,
        [
            (
                row.title,
                report.seconds(row.best),
                report.ratio(row.best, ours),
                report.ratio(row.best, products),
                report.mebibytes(row.peak_bytes),
                report.remark(row.status, row.note),
            )
            for row in rows
        ],
    )


def _record(row: Row, rows: list[Row]) -> dict[str, Any]:
    """A row for the JSON file: everything, and the ratios of the table."""
    record: dict[str, Any] = {**asdict(row), "best": row.best}
    for base in ("megabatch", "products"):
        best = _best(rows, base)
        record[f"over_{base}"] = row.best / best if row.best and best else None
    return record


def _best(rows: list[Row], name: str) -> float | None:
    return next((row.best for row in rows if row.name == name), None)
