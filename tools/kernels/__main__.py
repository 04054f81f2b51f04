"""`python -m tools.kernels`."""

import argparse
import sys

from .command import DESCRIPTION, add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m tools.kernels", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
