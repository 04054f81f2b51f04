"""`megabatch bench`: the benchmarks by name."""

DESCRIPTION = """\
Measure megabatch on this machine, beside its peers. Every figure is measured here and now, in processes of their own,
after a warm-up, contenders by turns; results are checked first, and what is wrong gets no speed. Peak memory is
resident memory on a CPU, and on a GPU (loss --device cuda) the allocator's. Where a figure is not measured but
extrapolated or predicted, it says so.

--json, --csv and --plot write what was measured; Ctrl-C ends a benchmark and leaves the results so far.
"""

# Name: its module, and what it is for.
COMMANDS = {
    "list": ("megabatch.bench.registry", "who takes part in which benchmark, and which packages are installed"),
    "loss": ("megabatch.bench.loss.command", "time and memory of every loss against its peers"),
    "peers": (
        "megabatch.bench.peers.command",
        "every tool of the field on the same inputs: time, memory and its growth, error, gradients over ranks",
    ),
    "paper": (
        "megabatch.bench.paper.command",
        "the paper's tables at this machine's scale: loss memory, largest batch, time, ablation",
    ),
    "tiling": ("megabatch.bench.tiling.command", "what tiling costs: the time of every stage against plain products"),
    "step": ("megabatch.bench.step.command", "the share of a training step that the loss takes, and when it matters"),
    "chunked": (
        "megabatch.bench.chunked.command",
        "what encoding in chunks costs, beside other ways to do so, and the memory it takes",
    ),
    "ring": ("megabatch.bench.ring.command", "one batch spread over ranks: time, bytes on the wire, memory"),
    "gradients": (
        "megabatch.bench.gradients.command",
        "do gradients over ranks equal those of one process? ours and others'",
    ),
    "kernels": (
        "megabatch.bench.kernels.command",
        "the GPU kernels compiled for GPUs that are not here: do they fit? how fast should they be?",
    ),
    "demo": (
        "megabatch.bench.demo.command",
        "three acts: dense against megabatch under a memory limit, towers trained, a step at batch 65,536",
    ),
}
