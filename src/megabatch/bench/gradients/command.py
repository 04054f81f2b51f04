"""`megabatch bench gradients`: do gradients over ranks equal those of one process? Ours and others'."""

import argparse
import sys
from dataclasses import asdict

from .. import report, session
from ..cases import LOSSES
from ..session import Session
from . import trial as gradients_trial
from .contenders import PACKAGES, PEERS
from .trial import Row, Setting

DESCRIPTION = """\
Ranks, real gloo processes, share an encoder and hold a few rows each. Every loss is run on them once, in its own
settings for ranks; then gradients are averaged over ranks, as DDP does, or summed where a loss is told so. The
yardstick is the gradient of one process that holds all rows (megabatch.reference, float64).

  encoder      length of the encoder's gradient over that of one process, 1 is right; and the cosine between them
  logit_scale  the same for the gradient of the scale, and of the bias where there is one; - where it is a constant
  value        what the loss returns on a rank: the loss of the whole batch ("global"), that of its own rows against all
               ("local rows"), or so many times that
  uneven       what happens when ranks bring different numbers of rows. In processes of its own: some crash or hang

What megabatch does not get right is marked WRONG, and the exit code is 1.
"""

# Of what an error says; the JSON file has all of it.
LONGEST = 120
HEAD = ("", "encoder", "cosine", "logit_scale", "value", "uneven")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=session.positive, default=4, metavar="W", help="number of ranks")
    parser.add_argument("--rows", type=session.positive, default=8, metavar="N", help="rows of each rank")
    parser.add_argument("--width", type=session.positive, default=16, metavar="D", help="width of the features")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=PACKAGES, help="whose losses")
    parser.add_argument("--timeout", type=float, default=20, metavar="S", help="seconds to wait for a silent rank")
    parser.add_argument("--markdown", action="store_true", help="a table for documentation")
    session.add_arguments(parser, plots=False)


def main(options: argparse.Namespace) -> int:
    if options.ranks < 2:
        print(f"gradients: --ranks must be at least 2, got {options.ranks}.", file=sys.stderr)
        return 2
    setting = Setting(options.ranks, options.rows, options.width, options.timeout)
    rows: list[Row] = []
    with Session("gradients", options, threads="1 thread each") as run:
        try:
            for package in run.each(options.packages):
                peers = [i for i, peer in enumerate(PEERS) if peer.package == package and peer.loss in options.losses]
                found = gradients_trial.contest(setting, peers)
                rows += found
                records = [{**asdict(row), "wrong": row.wrong} for row in found]
                run.add({"package": package, **asdict(setting)}, records, healthy=not any(row.wrong for row in found))
        finally:  # Ctrl-C leaves those that are done
            sizes = f"{setting.ranks} ranks × {setting.rows} rows, D={setting.width}; uneven: {setting.uneven} rows\n"
            body = [_cells(row) for row in rows]
            if body:
                run.show(sizes, report.markdown(HEAD, body) if options.markdown else report.table(HEAD, body))
        print(f"\n{report.versions(options.packages)}")
    return run.exit_code


def _cells(row: Row) -> tuple[str, ...]:
    last = row.uneven if row.status == "ok" else row.status
    if row.wrong:
        last = f"WRONG: {last}"
    scale = _number(row.scale) + ("" if row.bias is None else f", bias {_number(row.bias)}")
    return row.title, _number(row.encoder), _number(row.cosine), scale, row.value or "-", _short(last)


def _short(text: str) -> str:
    """A process's last words are in the JSON."""
    text = text.partition(":")[0] if "was killed by" in text else text
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
