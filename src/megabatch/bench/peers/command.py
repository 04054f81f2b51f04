"""`megabatch bench peers`: every tool of the field on the same inputs."""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from .. import report, session
from ..bar import work
from ..cases import DTYPES, LOSSES, Case
from ..gradients.contenders import PACKAGES
from ..loss.contenders import CONTENDERS
from ..results import Row, healthy, over, row_of
from ..ring import trial as ring_trial
from ..ring.contenders import ENTRANTS
from ..session import Session
from . import trial as peers_trial
from .contenders import FIELD, SPREAD
from .trial import RANKS, Standing

DESCRIPTION = f"""\
Every tool of the field on the same inputs, a table per loss: a training step through the loss, forward and backward
with all gradients. What is not installed says so in its row; pip install 'megabatch[peers]' installs all of them.

  best, mean ± std   at the largest of three sizes, by turns in one process; and the best over megabatch's
  MiB at N, 2N, 4N   peak memory beyond inputs and gradients, each in a process of its own
  per doubling       the factor by which that grows when the rows double, fitted to the three: × 2 is linear, × 4 the
                     square. Where little memory is used, noise rules
  error              the largest of the loss and the gradients of the features, relative, against float64, at 4N
  encoder, cosine    over {RANKS} ranks, in the tool's own setting for them, after gradients are averaged as DDP does:
                     length of an encoder's gradient over that of one process, 1 is right; the cosine between them
  scale              the same for logit_scale; - where it is a constant

The last table is what there is over ranks only: the CLIP loss of one batch spread over {RANKS} ranks, gloo processes of
one thread each, in the same columns; memory and bytes sent are those of a rank, error and gradient those of few rows.

How it is measured, and that results are checked first, is told by bench loss, ring and gradients. What is wrong is
reported as WRONG and gets no figures, and the exit code is 1; where megabatch is wrong, nobody gets a speed.
"""

FACTORS = (1, 2, 4)
LEAST_ROWS = 8  # with fewer some losses have nothing to contrast
TIME = ("best", "mean ± std", "/ megabatch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--rows", type=int, default=1024, metavar="N", help="the smallest of the sizes N, 2N, 4N")
    parser.add_argument("--width", type=int, default=512, metavar="D", help="width of the features")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the features")
    parser.add_argument("--contenders", nargs="+", choices=FIELD, default=list(FIELD), help="who takes part")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="go on with rounds for this long")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that all of it runs here")
    parser.add_argument("--markdown", action="store_true", help="tables for documentation")
    session.add_arguments(parser)


def main(options: argparse.Namespace) -> int:
    if options.quick:
        options.rows, options.width, options.repeats, options.seconds = 16, 8, 2, 0.0
    refusal = _refusal(options)
    if refusal:
        print(f"peers: {refusal}", file=sys.stderr)
        return 2
    with Session("peers", options) as run:
        print(report.versions(PACKAGES), flush=True)
        if options.quick:
            print("quick: sizes so small that fixed costs rule; time and memory say nothing about real ones")
        jobs = [(_side_by_side, _cases(loss, options)) for loss in options.losses]
        if "clip" in options.losses:
            jobs.append((_spread, _cases("clip", options)))
        for measure, cases in run.each(jobs, [_work(cases) for _, cases in jobs]):
            measure(run, cases, options)
    return run.exit_code


def _refusal(options: argparse.Namespace) -> str:
    for name, least in (("rows", LEAST_ROWS), ("width", 1), ("repeats", 1)):
        if getattr(options, name) < least:
            return f"--{name} must be {least} or more, got {getattr(options, name)}."
    for loss in options.losses:
        if not any(loss in CONTENDERS[name].losses for name in options.contenders):
            names = " ".join(options.contenders)
            return f"--contenders must have one for every loss, got {names}. None of them computes {loss}."
    return ""


def _cases(loss: str, options: argparse.Namespace) -> list[Case]:
    return [Case(loss, options.rows * factor, options.width, options.dtype) for factor in FACTORS]


def _work(cases: list[Case]) -> float:
    return sum(work(2 * len(FIELD), 30 * len(FIELD) * case.side**2 * case.width) for case in cases)


# ---- one process


def _side_by_side(run: Session, cases: list[Case], options: argparse.Namespace) -> None:
    standings: list[Standing] = []
    done: list[Case] = []
    try:
        for case, standings in peers_trial.contest(
            cases, options.contenders, options.repeats, options.seconds, run.part
        ):
            records = [_record(standing, standings, case.rows) for standing in standings]
            run.add(asdict(case), records, healthy=all(standing.healthy for standing in standings))
            done.append(case)
    finally:  # Ctrl-C leaves the sizes that are done
        if done:
            head, body = _head(done), [_cells(standing, standings, done) for standing in standings]
            table = report.markdown(head, body) if options.markdown else report.table(head, body)
            run.show(f"{done[-1]}\n" if options.markdown else str(done[-1]), f"{table}{_settings(standings)}")


def _record(standing: Standing, standings: list[Standing], rows: int) -> dict[str, Any]:
    """Of one size; growth is that up to it."""
    contender = standing.contender
    row = standing.sizes.get(rows) or Row(contender.name, contender.title, "not run", _remark(standing))
    return row.record(
        over_megabatch=over(row, _ours(standings, rows)),
        growth=standing.growth,
        over_ranks=None if standing.over_ranks is None else asdict(standing.over_ranks),
    )


def _ours(standings: list[Standing], rows: int) -> Row | None:
    return row_of([standing.sizes[rows] for standing in standings if rows in standing.sizes], "megabatch")


def _head(cases: list[Case]) -> tuple[str, ...]:
    peaks = [f"MiB at {case.rows}" for case in cases]
    return ("", *TIME, *peaks, "per doubling", "error", "encoder", "cosine", "scale", "")


def _cells(standing: Standing, standings: list[Standing], cases: list[Case]) -> tuple[str, ...]:
    """Who is wrong has no figures, whatever was right at a smaller size."""
    contender, largest = standing.contender, cases[-1].rows
    sizes = {} if standing.wrong else standing.sizes
    row = sizes.get(largest) or Row(contender.name, contender.title)
    over_ranks = standing.over_ranks
    ratios = (None, None, None) if over_ranks is None else (over_ranks.encoder, over_ranks.cosine, over_ranks.scale)
    return (
        contender.title,
        report.seconds(row.best),
        report.spread(row.mean, row.deviation),
        report.ratio(over(row, _ours(standings, largest)), 1),
        *(report.mebibytes(sizes[case.rows].peak_bytes if case.rows in sizes else None) for case in cases),
        "-" if standing.wrong or standing.growth is None else f"× {standing.growth:.1f}",
        report.small(row.error),
        *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        _remark(standing),
    )


def _remark(standing: Standing) -> str:
    """What went wrong first, and from which size on, if not from the first."""
    ranks = standing.over_ranks
    if ranks is not None and ranks.wrong:
        found = ranks.status if ranks.status != "ok" else f"value {ranks.value}, uneven rows: {ranks.uneven}"
        return report.remark("wrong", f"over {RANKS} ranks; {found}")
    for index, (rows, row) in enumerate(standing.sizes.items()):
        if row.status != "ok":
            told = index == 0 or row.status == "wrong"  # which tells its size itself
            return ("" if told else f"N={rows}: ") + report.remark(row.status, row.note)
    return ""


def _settings(standings: list[Standing]) -> str:
    """In what setting each is over ranks, and why it has no gradients there if it has none."""
    found = [standing.over_ranks for standing in standings if standing.over_ranks is not None]
    lines = [f"- {row.title}" + ("" if row.status == "ok" else f": {row.status}") for row in found]
    return "\n".join([f"\n\nOver {RANKS} ranks:", *lines]) if lines else ""


# ---- over ranks


def _spread(run: Session, cases: list[Case], options: argparse.Namespace) -> None:
    sizes: dict[int, list[Row]] = {}
    try:
        for index, case in enumerate(cases):
            rows = sizes[case.rows] = ring_trial.contest(case, RANKS, list(SPREAD), options.repeats)
            records = [row.record(over_megabatch=over(row, row_of(rows, "ring"))) for row in rows]
            run.add({**asdict(case), "ranks": RANKS}, records, healthy=healthy(rows, ENTRANTS))
            run.part((index + 1) / len(cases))
    finally:  # Ctrl-C leaves the sizes that are done
        if sizes:
            largest = max(sizes)
            body = [_spread_cells(row, sizes) for row in sizes[largest]]
            heading = f"clip_loss, N={largest}, D={options.width}, {options.dtype}, {RANKS} ranks, 1 thread each"
            head = (
                "",
                *TIME,
                *(f"MiB at {rows}" for rows in sizes),
                "per doubling",
                "MiB sent",
                "error",
                "encoder",
                "",
            )
            table = report.markdown(head, body) if options.markdown else report.table(head, body)
            run.show(heading + ("\n" if options.markdown else ""), table)


def _spread_cells(row: Row, sizes: dict[int, list[Row]]) -> tuple[str, ...]:
    own = {rows: other for rows, found in sizes.items() if (other := row_of(found, row.name)) is not None}
    grows = peers_trial.growth({rows: other.peak_bytes for rows, other in own.items()})
    return (
        row.title,
        report.seconds(row.best),
        report.spread(row.mean, row.deviation),
        report.ratio(over(row, row_of(sizes[max(sizes)], "ring")), 1),
        *(report.mebibytes(other.peak_bytes) for other in own.values()),
        "-" if grows is None else f"× {grows:.1f}",
        report.mebibytes(row.sent_bytes),
        report.small(row.error),
        "-" if row.gradient is None else f"{row.gradient:.3f}",
        report.remark(row.status, row.note),
    )
