"""`megabatch bench`: the benchmarks by name."""

DESCRIPTION = """\
Measure megabatch and other libraries on this machine: on a CPU, on a GPU (--device cuda), and on the ranks of torchrun.
Results are verified first; incorrect implementations are not timed. What cannot be measured is printed as n/a. --json,
--csv and --plot write what was measured; Ctrl-C ends a benchmark and leaves the results so far.
"""

# Name: its module, and what it is for.
COMMANDS = {
    "list": ("megabatch.bench.list", "contenders of every benchmark, and which packages are installed"),
    "loss": ("megabatch.bench.loss", "time and memory of every loss"),
    "peers": ("megabatch.bench.peers", "the same for all losses and other packages"),
    "ring": ("megabatch.bench.ring", "one batch spread over ranks: time, bytes sent, memory"),
    "gradients": ("megabatch.bench.gradients", "gradients on several ranks against one process, for all packages"),
    "chunked": ("megabatch.bench.chunked", "cost of encoding in chunks"),
    "step": ("megabatch.bench.step", "share of the loss in a training step, and when it matters"),
    "tiling": ("megabatch.bench.tiling", "cost of tiles, and where a step spends its time"),
    "data": ("megabatch.bench.data", "samples per second of a data worker"),
    "paper": ("megabatch.bench.paper", "the tables of arXiv 2410.17243 at this machine's scale"),
}
