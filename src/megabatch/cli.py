"""The command line. A command is a module with DESCRIPTION, add_arguments(parser) and main(options) -> exit code.

It is imported when it is called, so that none pays for what another needs.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__

# Name: its module, and what it is for.
COMMANDS = {
    "check": ("megabatch.check.command", "is everything exact here, and how fast is it?"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser("megabatch", description="Contrastive learning at any batch size.")
    parser.add_argument("--version", action="version", version=f"megabatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", dest="command")
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if words[:1] == [name]:
            command = import_module(module)
            subparser.description = command.DESCRIPTION
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.main)
    options = parser.parse_args(words)
    if "run" not in options:
        parser.print_help()
        return 0
    code: int = options.run(options)
    return code
