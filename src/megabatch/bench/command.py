"""`megabatch bench`: the benchmarks by name."""

DESCRIPTION = """\
Measure megabatch beside its peers on this machine: on a CPU, on a GPU (--device cuda), and on the ranks of torchrun.
Results are verified first; incorrect implementations are not timed. What cannot be measured is printed as n/a. --json,
--csv and --plot write what was measured; Ctrl-C ends a benchmark and leaves the results so far.
"""

# Name: its module, and what it is for.
COMMANDS = {
    "list": ("megabatch.bench.list", "who takes part in which benchmark, and which packages are installed"),
    "loss": ("megabatch.bench.loss", "time and memory of every loss beside its peers"),
    "peers": ("megabatch.bench.peers", "the same for all losses and every package that computes them"),
    "ring": ("megabatch.bench.ring", "one batch spread over ranks: time, bytes on the wire, memory"),
    "gradients": ("megabatch.bench.gradients", "do gradients over ranks equal those of one process? ours and others'"),
    "chunked": ("megabatch.bench.chunked", "what encoding in chunks costs, beside other ways to do so"),
    "step": ("megabatch.bench.step", "the share of a training step that the loss takes, and when it matters"),
    "tiling": ("megabatch.bench.tiling", "what tiles cost, and what a step spends its time on"),
    "paper": ("megabatch.bench.paper", "the tables of arXiv 2410.17243 at this machine's scale"),
}
