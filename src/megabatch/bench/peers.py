"""`megabatch bench peers`: `bench loss` with all losses and every package that computes them."""

import argparse

from . import loss
from .cases import LOSSES

DESCRIPTION = """\
Every package on the same inputs: `megabatch bench loss` for all losses at 1,024 to 4,096 rows. Packages that are not
installed are listed as such; pip install 'megabatch[peers]' installs most of them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loss.add_arguments(parser, tuple(LOSSES))
    parser.set_defaults(rows=[1024, 2048, 4096])


def main(options: argparse.Namespace) -> int:
    return loss.main(options, "peers")
