"""`python -m megabatch`, and under torchrun `torchrun -m megabatch`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
