"""`megabatch bench step`: the share of a training step that the loss takes, and when it matters."""

import argparse
import math
import sys
from dataclasses import asdict

from .. import report, session
from ..bar import work
from ..instruments import processes
from ..results import healthy
from ..session import Session
from . import trial as step_trial
from .contenders import WAYS
from .training import PARTS, towers_of
from .trial import JUDGED_BY, LOSS_JUDGED_BY, Room, Setting, StepRow
from .verdict import WORTH, percent, verdict

DESCRIPTION = f"""\
A whole training step (encoders, CLIP's loss, AdamW) of towers that `megabatch train` builds, at growing batch, with the
dense loss (open_clip's formula) and with megabatch's, the batch encoded in one piece and in chunks (megabatch.chunked):
what share of the step is the loss, and when does it matter which loss it is? Weights are random, images are bytes of
noise, made floats as they are encoded, texts are random letters. All of it is made in memory: reading data is no part
of the step. The learning rate is 0, so that every step sees the same weights.

Time: the four ways take turns in one process, after a run each that is thrown away. A step is split where the features
are done and where their gradients are: before and after that it is the encoders, between it is the loss, forward and
backward, and then the optimizer. The parts are means over all rounds; they must add up to the step, or there are no
figures.

Memory: "held MiB" is what is there before a step begins: weights, what the optimizer keeps of them, and the batch;
"step MiB" the peak of resident memory during one step beyond that, gradients of the parameters included; "loss MiB" the
peak of the loss alone, beyond features and their gradients, and "% of memory" its share of the first two together.
Everyone has a process of its own, without dropout, in which malloc hands freed blocks of 64 KiB and more back at once.
What would take more than --limit, or than the machine has left, is not run; that is judged by what the encoders take
for {JUDGED_BY[0]} and {JUDGED_BY[1]} rows and the dense loss for {LOSS_JUDGED_BY}, and marked as extrapolated.

Right first, without dropout: the loss and all gradients are compared with the dense step in one piece on few rows in
ragged chunks; and at full size the loss and the length of the gradient, by all ways that fit. What is wrong is
reported as WRONG and gets no figures, and the exit code is 1; where megabatch is wrong, nobody gets a speed.

The verdict: megabatch matters from that batch on at which, and at all larger ones, the step with the dense loss takes
{WORTH} times the time or the memory of the step with megabatch's, or does not fit. For the time the part of the loss
alone is exchanged: all else is the same in both, and its noise is often more than what a loss takes.
"""

GIB = 2**30
HEAD = ("", "best", "mean ± std", *PARTS, "% of time", "held MiB", "step MiB", "loss MiB", "% of memory", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="tiny", help="towers: tiny, small, or a model of open_clip by name, such as ViT-B-32"
    )
    parser.add_argument(
        "--rows", type=session.positive, nargs="+", default=[256, 1024, 4096, 16384], metavar="N", help="batch sizes"
    )
    parser.add_argument("--chunk", type=session.positive, default=256, metavar="C", help="rows of a chunk")
    parser.add_argument("--repeats", type=session.positive, default=3, help="rounds, at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="go on with rounds for this long")
    parser.add_argument("--limit", type=_gibibytes, default=math.inf, metavar="GIB", help="for a step, in GiB")
    parser.add_argument("--markdown", action="store_true", help="tables for a page of documentation")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: small batches of tiny towers")
    session.add_arguments(parser)


def _gibibytes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def main(options: argparse.Namespace) -> int:
    if options.quick:
        options.model, options.rows, options.chunk = "tiny", [32, 96], 32
        options.repeats, options.seconds = 2, 0.0
    try:
        parameters = sum(parameter.numel() for parameter in towers_of(options.model).parameters())
    except (ValueError, ImportError) as refusal:
        print(f"step: {refusal}", file=sys.stderr)
        return 2
    settings = [Setting(options.model, rows, options.chunk) for rows in sorted(set(options.rows))]
    measured: dict[int, list[StepRow]] = {}
    with Session("step", options, memory_is="peak memory of a step") as run:
        try:
            room = processes.run(step_trial.judge, options.model)
        except processes.Failed as failure:
            print(f"step: not even {JUDGED_BY[-1]} rows can be encoded: {failure}", file=sys.stderr)
            return 1
        print(_about(options, parameters, room), flush=True)
        for setting in run.each(settings, [work(8, 1e5 * setting.rows * (64 + setting.rows)) for setting in settings]):
            rows = step_trial.contest(setting, room, options.limit * GIB, options.repeats, options.seconds, run.part)
            measured[setting.rows] = rows
            run.show(f"{setting.model}, N={setting.rows}, chunks of {setting.chunk}\n", _table(rows, options.markdown))
            run.add({**asdict(setting), "width": room.width}, map(_record, rows), healthy=healthy(rows, WAYS))
        said = [words for chunked in (False, True) if (words := verdict(measured, chunked))]
        if said:
            run.show("", "\n\n".join(said))
    return run.exit_code


def _about(options: argparse.Namespace, parameters: int, room: Room) -> str:
    text = f"{options.model}: {parameters / 1e6:.1f} million parameters, features {room.width} wide"
    if options.quick:
        text += "\nquick: these batches are so small that fixed costs rule; the shares say nothing about real ones"
    return text


def _table(rows: list[StepRow], markdown: bool) -> str:
    body = [
        (
            row.title,
            report.seconds(row.best),
            report.spread(row.mean, row.deviation),
            *(report.seconds(row.part(part)) for part in PARTS),
            percent(row.time_share),
            report.mebibytes(row.held_bytes),
            report.mebibytes(row.peak_bytes),
            report.mebibytes(row.loss_bytes),
            percent(row.memory_share),
            report.remark(row.status, row.note),
        )
        for row in rows
    ]
    return report.markdown(HEAD, body) if markdown else report.table(HEAD, body)


def _record(row: StepRow) -> dict[str, object]:
    return row.record(time_share=row.time_share, memory_share=row.memory_share)
