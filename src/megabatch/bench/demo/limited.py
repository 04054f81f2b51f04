"""`python -m megabatch.bench.demo.limited MIB FILE megabatch train …`: a command that may take no more memory.

The limit is the kernel's (setrlimit), beyond what the command's Python and torch take themselves. What it took at its
peak, in bytes beyond the same, is written to FILE.
"""

import resource
import runpy
import sys
from pathlib import Path

from ..instruments import measure


def main(words: list[str]) -> int:
    mib, file, module, *rest = words
    from ...train import command as command  # what the trainer consists of is loaded before it is limited

    allowed = measure.private_bytes() + int(mib) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    sys.argv = [module, *rest]
    code: object = 0
    with measure.PeakMemory() as memory:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            code = leaving.code
    Path(file).write_text(f"{memory.bytes}\n")
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
