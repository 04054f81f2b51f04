"""`megabatch bench list`: the contenders of every benchmark."""

import argparse

from ..machine import version
from . import chunked, data, gradients, loss, paper, ring, step
from .cases import LOSSES
from .contenders import CONTENDERS, PACKAGES

DESCRIPTION = """\
Contenders of every benchmark by their name for --contenders, with their losses, and which packages are installed.
pip install 'megabatch[peers]' installs those that are on PyPI.
"""
BENCHMARKS = {
    "loss": loss.ONE_PROCESS,
    "ring": ring.ON_RANKS,
    "paper": {name: CONTENDERS[name] for name in paper.METHODS},
    "chunked": chunked.CONTENDERS,
    "step": step.CONTENDERS,
    "gradients": gradients.SETTINGS,
    "data": data.CONTENDERS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(BENCHMARKS)
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help=f"of {names}; all if left out")


def main(options: argparse.Namespace) -> int:
    for name in options.benchmarks:
        if name not in BENCHMARKS:
            raise SystemExit(f"list: benchmark must be one of {', '.join(BENCHMARKS)}, got {name!r}.")
    body = [
        (benchmark, one.name, one.title, "all" if set(one.losses) >= set(LOSSES) else " ".join(one.losses))
        for benchmark, contenders in BENCHMARKS.items()
        if benchmark in (options.benchmarks or BENCHMARKS)
        for one in contenders.values()
    ]
    head = ("benchmark", "contender", "", "losses")
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    for row in (head, *body):
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print("\n" + ", ".join(f"{name} {version(name) or 'not installed'}" for name in PACKAGES))
    return 0
