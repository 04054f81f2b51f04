"""The command line of the benchmarks."""

import argparse
import sys
from collections.abc import Sequence

from . import chunked, demo, gradients, kernels, loss, ring


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m megabatch.bench", description="Measure megabatch on this machine.")
    commands = parser.add_subparsers(title="commands", metavar="")
    for name, command, summary in (
        ("loss", loss, "time and memory of every loss against its peers"),
        ("chunked", chunked, "what encoding in chunks costs, beside other ways to do so, and the memory it takes"),
        ("ring", ring, "one batch spread over ranks: time, bytes on the wire, memory"),
        ("gradients", gradients, "do gradients over ranks equal those of one process? ours and others'"),
        (
            "kernels",
            kernels,
            "the GPU kernels compiled for GPUs that are not here: do they fit? how fast should they be?",
        ),
        (
            "demo",
            demo,
            "three acts: dense against megabatch under a memory limit, towers trained, a step at batch 65,536",
        ),
    ):
        subparser = commands.add_parser(
            name, help=summary, description=command.DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.main)
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
