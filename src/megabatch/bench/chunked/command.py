"""`megabatch bench chunked`: what encoding in chunks costs, and the memory it takes."""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from .. import report, session
from ..results import Row, healthy, over, row_of
from ..session import Session
from . import trial as chunked_trial
from .contenders import CACHERS
from .towers import HEADS, Encoding, Shape
from .trial import Weight

DESCRIPTION = """\
A training step of transformers with random weights, whose batch is encoded chunk by chunk: megabatch.chunked, other
packages that do so, and the limit.

  pairs   anchors and positives through one text tower; InfoNCE, one direction, cosine, scale 20
  towers  images (bytes, made floats chunk by chunk) and texts through a tower each; CLIP's loss, its scale learnable
  memory  an image tower trained at a batch of one chunk, and of many

The limit is what must be computed, and nothing else, written by hand over the same chunks: a forward without a graph,
the loss, a second forward and the backward. It, GradCache and the step in one piece are given megabatch's loss;
sentence-transformers' is built in.

Time: all take turns in one process, after a run each that is thrown away. "/ limit": the median over the rounds of the
ratio to the limit in the same round, which other work on the machine disturbs less.

Memory: the peak of resident memory during one step beyond what the process held before it. In the first two tables
the gradients of the parameters are taken off; in the third they are not, and an optimizer takes a step too. There,
"inputs" is the batch itself, held before the step and not counted; "loss" is what features, their gradients and the
loss take alone, in the same process: it grows with the batch whatever the encoder does. Everyone has a process of its
own, in which malloc hands freed blocks of 64 KiB and more back at once, so that it is what is in use that is counted;
--keep-freed leaves it as it is. What would take more than --limit in one piece, judged by one chunk, is not run.

Right first: the loss and the gradient of every parameter are compared, without dropout, with a step in one piece
through the dense loss in float64, on few rows in ragged chunks; megabatch may be off by no more than that step in
float32, plus a small slack for rounding. And at full size with the step in one piece, where that fits. What is wrong is
reported as WRONG and gets no figures, and the exit code is 1; where megabatch is wrong, nobody gets a speed.
"""

TABLES = ("pairs", "towers", "memory")
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = Shape()
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="what is measured")
    parser.add_argument(
        "--rows", type=session.positive, default=1024, metavar="N", help="batch size of pairs and towers"
    )
    parser.add_argument(
        "--chunk", type=session.positive, default=64, metavar="C", help="rows of a chunk of pairs and towers"
    )
    parser.add_argument("--memory-rows", type=session.positive, default=16384, metavar="N", help="batch size of memory")
    parser.add_argument(
        "--memory-chunk", type=session.positive, default=256, metavar="C", help="rows of a chunk of memory"
    )
    parser.add_argument(
        "--width", type=session.positive, default=shape.width, metavar="W", help="of towers and features"
    )
    parser.add_argument("--layers", type=session.positive, default=shape.layers, help="of every tower")
    parser.add_argument(
        "--image", type=session.positive, default=shape.image, metavar="PIXELS", help="side of an image"
    )
    parser.add_argument("--patch", type=session.positive, default=shape.patch, metavar="PIXELS", help="side of a patch")
    parser.add_argument(
        "--context", type=session.positive, default=shape.context, metavar="TOKENS", help="length of a text"
    )
    parser.add_argument("--vocabulary", type=session.positive, default=shape.vocabulary, metavar="TOKENS")
    parser.add_argument("--dropout", type=float, default=shape.dropout, metavar="P", help="of what is measured")
    parser.add_argument("--contenders", nargs="+", choices=CACHERS, default=list(CACHERS), help="who takes part")
    parser.add_argument("--repeats", type=session.positive, default=5, help="rounds, at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="go on with rounds for this long")
    parser.add_argument("--limit", type=float, default=4.0, metavar="GIB", help="for a step in one piece, in GiB")
    parser.add_argument(
        "--keep-freed", action="store_true", help="in memory, leave malloc as it is, which keeps much of what is freed"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: small towers, small batches")
    session.add_arguments(parser, plots=False)


def main(options: argparse.Namespace) -> int:
    if options.quick:
        options.rows, options.chunk, options.memory_rows, options.memory_chunk = 96, 32, 256, 32
        options.width, options.layers, options.image, options.context, options.vocabulary = 16, 1, 16, 8, 64
        options.repeats, options.seconds = 2, 0.0
    fields = ("width", "layers", "image", "patch", "context", "vocabulary", "dropout")
    shape = Shape(**{name: getattr(options, name) for name in fields})
    refusal = _refusal(options, shape)
    if refusal:
        print(f"chunked: {refusal}", file=sys.stderr)
        return 2
    packages = list(dict.fromkeys(CACHERS[name].package for name in options.contenders))
    with Session("chunked", options) as run:
        print(report.versions(packages), flush=True)
        if options.quick:
            print("quick: these towers are so small that fixed costs rule; the ratios say nothing about real ones")
        for name in run.each(options.tables):
            (_weigh if name == "memory" else _time)(run, name, options, shape)
    return run.exit_code


def _refusal(options: argparse.Namespace, shape: Shape) -> str:
    if shape.width % HEADS:
        return f"--width must be a multiple of {HEADS}, the number of heads, got {shape.width}."
    if shape.image % shape.patch:
        return f"--image must be a multiple of --patch, got {shape.image} and {shape.patch}."
    for rows, chunk in (("rows", "chunk"), ("memory_rows", "memory_chunk")):
        got = getattr(options, rows), getattr(options, chunk)
        if got[0] < got[1]:
            names = [f"--{name.replace('_', '-')}" for name in (rows, chunk)]
            return f"{names[0]} must be at least {names[1]}, got {got[0]} and {got[1]}."
    return ""


def _weigh(run: Session, name: str, options: argparse.Namespace, shape: Shape) -> None:
    encoding = Encoding("vision", options.memory_rows, options.memory_chunk, shape)
    weights = chunked_trial.weights(encoding, int(options.limit * GIB), options.keep_freed)
    run.show(f"{name}: {encoding}", _memory_table(weights))
    fine = all(weight.status in ("ok", "not run") for weight in weights)
    run.add({"table": name, **asdict(encoding)}, [asdict(weight) for weight in weights], healthy=fine)


def _time(run: Session, name: str, options: argparse.Namespace, shape: Shape) -> None:
    encoding = Encoding(name, options.rows, options.chunk, shape)
    limit = int(options.limit * GIB)
    rows = chunked_trial.contest(encoding, options.contenders, options.repeats, options.seconds, limit)
    run.show(f"{name}: {encoding}", _time_table(rows))
    fine = healthy(rows, CACHERS)
    run.add({"table": name, **asdict(encoding)}, [_record(row, rows) for row in rows], healthy=fine)


def _time_table(rows: list[Row]) -> str:
    floor = row_of(rows, "floor")
    head = ("", "best", "mean ± std", "/ limit", "peak MiB", "")
    return report.table(
        head,
        [
            (
                row.title,
                report.seconds(row.best),
                report.spread(row.mean, row.deviation),
                report.ratio(over(row, floor), 1),
                report.mebibytes(row.peak_bytes),
                report.remark(row.status, row.note),
            )
            for row in rows
        ],
    )


def _memory_table(weights: list[Weight]) -> str:
    base = weights[0].peak
    head = ("", "rows", "time", "inputs MiB", "loss MiB", "peak MiB", f"/ {weights[0].rows} rows", "")
    return report.table(
        head,
        [
            (
                weight.title,
                f"{weight.rows}",
                report.seconds(weight.seconds),
                report.mebibytes(weight.inputs),
                report.mebibytes(weight.loss),
                report.mebibytes(weight.peak),
                report.ratio(weight.peak, base),
                report.remark(weight.status, weight.note),
            )
            for weight in weights
        ],
    )


def _record(row: Row, rows: list[Row]) -> dict[str, Any]:
    return row.record(over_floor=over(row, row_of(rows, "floor")))
