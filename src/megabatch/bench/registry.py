"""The registry: every contender of every benchmark, by its name there. `megabatch bench list` prints it."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from . import report
from .cases import LOSSES
from .chunked.contenders import CACHERS
from .gradients.contenders import PACKAGES, PEERS
from .loss.contenders import CONTENDERS
from .paper.contenders import NAMES
from .peers.contenders import FIELD, SPREAD
from .ring.contenders import ENTRANTS
from .step.contenders import WAYS

DESCRIPTION = """\
Who takes part in which benchmark, and of which losses: by the name that its --contenders knows, where it has that flag.
And which of the packages that are measured are installed: pip install 'megabatch[peers]' installs them, but for inf_cl.
"""


@dataclass(frozen=True)
class Entry:
    """A contender of one benchmark."""

    title: str
    losses: tuple[str, ...] = ("clip",)


def _spread(names: tuple[str, ...]) -> dict[str, Entry]:
    return {name: Entry(ENTRANTS[name].title) for name in names}


REGISTRY: Mapping[str, Mapping[str, Entry]] = {
    "loss": {name: Entry(one.title, one.losses) for name, one in CONTENDERS.items()},
    "peers": {name: Entry(CONTENDERS[name].title, CONTENDERS[name].losses) for name in FIELD}
    | {f"{name}, on ranks": entry for name, entry in _spread(SPREAD).items()},
    "paper": _spread(NAMES),
    "step": {name: Entry(way.title) for name, way in WAYS.items()},
    "chunked": {name: Entry(one.title, ("clip", "info_nce")) for name, one in CACHERS.items()},
    "ring": _spread(tuple(ENTRANTS)),
    "gradients": {peer.title: Entry(peer.package, (peer.loss,)) for peer in PEERS},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help=f"of {', '.join(REGISTRY)}; all if left out")


def main(options: argparse.Namespace) -> int:
    unknown = [name for name in options.benchmarks if name not in REGISTRY]
    if unknown:
        print(f"list: benchmark must be one of {', '.join(REGISTRY)}, got {unknown[0]!r}.", file=sys.stderr)
        return 2
    body = [
        (benchmark, name, entry.title, "all" if len(entry.losses) == len(LOSSES) else " ".join(entry.losses))
        for benchmark, entries in REGISTRY.items()
        if benchmark in (options.benchmarks or REGISTRY)
        for name, entry in entries.items()
    ]
    widths = report.widths(("benchmark", "contender", "", "losses"), body)
    for row in (("benchmark", "contender", "", "losses"), *body):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n{report.versions(PACKAGES)}")
    return 0
