"""`megabatch bench loss`: time and memory of every loss, against its peers and against the limit."""

import argparse
import itertools
import sys
from dataclasses import asdict
from typing import Any

import torch

from .. import report, session
from ..bar import work
from ..cases import DTYPES, LOSSES, Case
from ..results import Row, healthy, over, row_of
from ..session import Session
from . import trial
from .contenders import CONTENDERS
from .trial import KNOWN

DESCRIPTION = """\
Time and peak memory of a training step through a loss, forward and backward with all gradients (features, logit_scale,
logit_bias), of megabatch and of its peers.

Time: the contenders of a case take turns in one process, in another order in every round, after a run each that is
thrown away; the best of all rounds, their mean and standard deviation. Compare the ratios, which are medians over the
rounds: seconds are those of this machine. Threads are torch's own choice (OMP_NUM_THREADS).

Memory: the peak of resident memory during one step beyond what the process held before it, less the gradients of the
inputs: beyond inputs and gradients. Before it inputs are made and libraries loaded. Each contender has a process of its
own. One that would need more than the machine has left is not run. On a GPU (--device cuda) it is the allocator's peak,
time is that between two events, and all share one process.

Right first: results are compared with the dense loss in float64 before anything is timed, at a small number of rows
and, for megabatch, at the case's own where that fits into memory. megabatch may be off by no more than the dense loss
in the case's dtype, plus a small slack for rounding; the others must compute the same loss. What is wrong is reported
as WRONG and gets no speed, and the exit code is 1; where megabatch is wrong, nobody gets one.

Error: the largest of the loss and the gradients of the features, each relative to its largest element, against float64
at the case's own size.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=session.positive, nargs="+", default=[256, 1024, 4096, 16384], metavar="N", help="batch sizes"
    )
    parser.add_argument(
        "--width", type=session.positive, nargs="+", default=[512], metavar="D", help="widths of the features"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"], help="dtypes of the features")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["clip", "siglip", "nt_xent"])
    parser.add_argument(
        "--contenders", nargs="+", choices=KNOWN, default=list(CONTENDERS), help="who takes part (bench list)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda: contenders then share this process")
    parser.add_argument("--repeats", type=session.positive, default=7, help="rounds, at least")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="go on with rounds for this long: small steps need it"
    )
    parser.add_argument(
        "--memory-budget",
        metavar="BYTES",
        help="for 'megabatch, logits kept': bytes, or words such as 2GiB; default: what holds the logits",
    )
    parser.add_argument(
        "--error-rows", type=int, default=4096, metavar="N", help="up to so many rows, tell everyone's error"
    )
    session.add_arguments(parser)


def main(options: argparse.Namespace) -> int:
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"loss: --device must be one that torch sees, got {options.device!r}. Here it is cpu.", file=sys.stderr)
        return 2
    cases = [
        Case(name, rows, width, dtype, options.memory_budget, options.device)
        for dtype, name, width, rows in itertools.product(options.dtypes, options.losses, options.width, options.rows)
    ]
    with Session("loss", options) as run:
        for case in run.each(cases, [_work(case, options) for case in cases]):
            rows = trial.contest(
                case, options.contenders, options.repeats, options.seconds, options.error_rows, run.part
            )
            run.show(str(case), _table(case, rows))
            run.add(asdict(case), [_record(row, rows) for row in rows], healthy=healthy(rows, KNOWN))
    return run.exit_code


def _work(case: Case, options: argparse.Namespace) -> float:
    """Everyone is run for its memory, its error and in every round, and takes five products or so."""
    names = [name for name in options.contenders if case.loss in KNOWN[name].losses]
    return work(len(names), 5 * len(names) * (options.repeats + 3) * case.side**2 * case.width)


def _table(case: Case, rows: list[Row]) -> str:
    ours, products = row_of(rows, "megabatch"), row_of(rows, "products")
    head = ("", "best", "mean ± std", "/ megabatch", f"/ {case.kind.products} products", "peak MiB", "error", "")
    return report.table(
        head,
        [
            (
                row.title,
                report.seconds(row.best),
                report.spread(row.mean, row.deviation),
                report.ratio(over(row, ours), 1),
                report.ratio(over(row, products), 1),
                report.mebibytes(row.peak_bytes),
                report.small(row.error),
                report.remark(row.status, row.note),
            )
            for row in rows
        ],
    )


def _record(row: Row, rows: list[Row]) -> dict[str, Any]:
    return row.record(**{f"over_{base}": over(row, row_of(rows, base)) for base in ("megabatch", "products")})
