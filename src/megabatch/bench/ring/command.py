"""`megabatch bench ring`: one batch spread over ranks: time, bytes on the wire, memory."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from .. import report, session
from ..bar import work
from ..cases import DTYPES, Case
from ..instruments import wire
from ..results import Row, healthy, over, row_of
from ..session import Session
from . import trial as ring_trial
from .contenders import ENTRANTS, USUAL

DESCRIPTION = """\
Time, bytes sent and peak memory of a training step through the CLIP loss, forward and backward with all gradients, of
one batch spread over ranks: gloo processes of one thread each on this machine. The yardstick is one process that holds
the whole batch, with as many threads as there are ranks (or cores, if fewer).

Time: the entrants take turns within one set of processes, after a run each that is not timed; all ranks start
together, and the slowest counts. Best of all runs, and their mean and standard deviation. Where there are more ranks
than cores, compare the rows of a table with each other only.

Bytes: what the kernel counts on the loopback during a run, TCP's headers and acknowledgements too, over the number of
ranks. The least of all runs, because whatever else talks over the loopback can only add to it.

Memory: the peak of a rank's resident memory during one step beyond inputs and gradients; the largest of the ranks.
Each entrant is weighed in a set of processes of its own.

--bandwidth: the same again where the loopback passes no more than this (tc, in a network namespace of its own; needs
root or user namespaces). All ranks share it. That it holds is checked with a plain transfer first.

Right first: results are compared with the dense loss in float64 at a small number of rows, and at full size with the
one process. What is wrong is reported as WRONG and gets no figures, and the exit code is 1; where megabatch is wrong,
nobody gets a speed. Exit code 2: no limit could be set.
"""

HEAD = ("", "best", "mean ± std", "/ 1 process", "MiB sent/rank", "peak MiB/rank", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=session.positive, nargs="+", default=[16384], metavar="N", help="rows of all ranks together"
    )
    parser.add_argument("--width", type=session.positive, default=512, metavar="D", help="width of the features")
    parser.add_argument(
        "--ranks", type=session.positive, nargs="+", default=[2, 4], metavar="n", help="numbers of ranks"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the features")
    parser.add_argument("--contenders", nargs="+", choices=ENTRANTS, default=list(USUAL), help="who takes part")
    parser.add_argument("--repeats", type=session.positive, default=5, help="timed runs of each")
    parser.add_argument("--bandwidth", type=_rate, nargs="+", default=[], metavar="RATE", help="1gbit, 250mbit, …")
    session.add_arguments(parser)
    # How the command calls itself where the loopback is limited.
    parser.add_argument("--limited-to", type=_rate, help=argparse.SUPPRESS)


def _rate(text: str) -> str:
    try:
        wire.bits_per_second(text.lower())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.lower()


def main(options: argparse.Namespace) -> int:
    try:
        for rate in options.bandwidth:  # what is missing shows now, not in an hour
            wire.try_limit(rate)
        if options.limited_to:
            measured = wire.check_limit(options.limited_to)
            print(f"\nloopback limited to {options.limited_to}: a plain transfer runs at {measured / 1e6:,.0f} Mbit/s")
    except wire.NoLimit as reason:
        print(f"ring: the loopback cannot be limited: {reason}", file=sys.stderr)
        return 2
    uneven = [(rows, size) for rows in options.rows for size in options.ranks if rows % size]
    if uneven:
        print("ring: --rows must be multiples of --ranks, got {} rows for {} ranks".format(*uneven[0]), file=sys.stderr)
        return 2
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    cases = [
        (Case("clip", rows, options.width, options.dtype), size) for rows in options.rows for size in options.ranks
    ]
    with Session("ring", options, threads="ranks × 1 thread") as run:
        jobs: list[tuple[Case, int] | str] = [*cases, *options.bandwidth]
        runs = 5 * len(options.contenders) * (options.repeats + 2)
        once = [work(3 * len(options.contenders), runs * case.rows**2 * case.width) for case, _ in cases]
        for job in run.each(jobs, [*once, *[sum(once)] * len(options.bandwidth)]):
            if isinstance(job, str):
                run.exit_code = max(run.exit_code, _limited(run, options, job))
                continue
            case, size = job
            rows = ring_trial.contest(case, size, options.contenders, options.repeats, run.part)
            run.show(_heading(case, size, options.limited_to), f"{_table(rows)}{_headline(rows, size)}")
            about = {**asdict(case), "ranks": size, "bandwidth": options.limited_to}
            one = row_of(rows, "one")
            run.add(
                about, [row.record(over_one_process=over(row, one)) for row in rows], healthy=healthy(rows, ENTRANTS)
            )
    return run.exit_code


def _limited(run: Session, options: argparse.Namespace, rate: str) -> int:
    """The same where the loopback passes no more than this: a command of its own."""
    with tempfile.TemporaryDirectory(prefix="megabatch-") as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "megabatch", "bench", "ring", "--limited-to", rate, "--json", str(out)]
        for name in ("rows", "width", "ranks", "dtype", "contenders", "repeats"):
            value = getattr(options, name)
            command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        run.hide()  # it has a bar of its own
        try:
            return wire.run_limited(rate, command)
        finally:  # Ctrl-C leaves what it has measured
            text = out.read_text() if out.exists() else ""
            for case in json.loads(text)["cases"] if text else []:
                run.add(case, case["contenders"])


def _heading(case: Case, size: int, limit: str | None) -> str:
    return f"{case}, {size} ranks × {case.rows // size} rows" + (f", {limit} for all" if limit else "")


def _table(rows: list[Row]) -> str:
    one = row_of(rows, "one")
    return report.table(
        HEAD,
        [
            (
                row.title,
                report.seconds(row.best),
                report.spread(row.mean, row.deviation),
                report.ratio(row.best, one.best if one else None),
                report.mebibytes(row.sent_bytes),
                report.mebibytes(row.peak_bytes),
                report.remark(row.status, row.note),
            )
            for row in rows
        ],
    )


def _headline(rows: list[Row], size: int) -> str:
    one, ring = row_of(rows, "one"), row_of(rows, "ring")
    if one is None or ring is None or not one.seconds or not ring.seconds:
        return ""
    best, mean = report.ratio(ring.best, one.best), report.ratio(ring.mean, one.mean)
    return f"\n{size} ranks × 1 thread / {one.title}: {best} (best), {mean} (mean)"
