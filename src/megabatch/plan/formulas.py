"""Every formula of `megabatch plan`, and every constant with where it is from. All of it predicts, nothing measures.

Letters: b rows of the whole batch, n GPUs, L = b / n rows of one; D width of the features. Bytes are of one GPU.

FITTED constants come from one table of the paper (arXiv 2410.17243, Table 1, and one figure of its Figure 4) and are
tested on the others; COUNTED ones from reading code; ASSUMED ones were never measured, and are the first to doubt.
"""

from dataclasses import dataclass

from ..backends.triton_backend import Triton
from .hardware import Gpu
from .models import COLOURS, Model, Tower
from .our_loss import FLOAT, OurLoss

METHODS = ("ring", "gather", "inf-cl", "openclip", "dense")
OURS = ("ring", "gather")

# ---- memory

# Of losses that are not ours, FITTED on Table 1, D = 768, by least relative squares. Float32 matrices of logits: b x b
# in `dense`, L x b in `openclip`. K is read as 1024 and GB as GiB; with 1000 and 10^9 the same table gives 4.00.
MATRICES = 4.1
GATHERED = {"dense": 2.93, "openclip": 2.04}  # float32 copies of the gathered features of one side, b x D
# Float32 copies of the own features of one side, L x D. That of `inf-cl` keeps the largest relative error over the
# table smallest: its figures lie between 14.9 and 17.4.
OWN = {"openclip": 2.61, "inf-cl": 16.1}
# By OpenCLIP's words for precision: bytes of a parameter, and bytes kept for the backward for each token, layer and
# number of the width. 41 is FITTED: 42.40 GB of Table 1 (offload, 32k). Without autocast 16 numbers are COUNTED, with
# an attention that does not write its scores out.
PRECISIONS = {
    "fp32": (4, 64.0),
    **dict.fromkeys(("amp", "amp_bf16", "amp_bfloat16"), (4, 41.0)),
    **dict.fromkeys(("bf16", "fp16", "pure_bf16", "pure_fp16"), (2, 32.0)),
}
# What an optimizer keeps of a parameter, in numbers. COUNTED; Adafactor's second moment is a row and a column, and its
# first is in bfloat16 in the paper's code.
OPTIMIZERS = {"adamw": 2.0, "lion": 1.0, "sgd": 1.0, "adafactor": 0.5}
# Float32 copies of the own features of one side that the paper's training loop holds beside the activations. FITTED on
# Table 1 (offload, 256k to 1024k).
KEPT_FEATURES = 8.3
USABLE = 0.975  # of a GPU's memory, by tensors. ASSUMED: Table 1 has a peak of 77.94 on 80
TOKEN = 8  # bytes
# Where a batch waits for its turn: bytes of a colour on the GPU, and of one that is moved there.
DATA = {"gpu-float32": (4, 0), "gpu-uint8": (1, 0), "host": (0, 1)}

# ---- work

# Products of b x b x D, forward and backward: on every GPU (`dense`), or spread over all. COUNTED.
PRODUCTS = {"dense": 3, "openclip": 6, "inf-cl": 10}
ENCODER_EFFICIENCY = 0.377  # of the peak of matrix units. FITTED on one figure, 48.9 s of Figure 4 (open_clip, 64k)
# The same of losses. Of ours and the paper's kernels as `python -m tools.kernels` predicts ours on an A100
# (docs/kernels.md), which no GPU has confirmed; of library products ASSUMED.
LOSS_EFFICIENCY = {"dense": 0.75, "openclip": 0.75, "inf-cl": 0.37, "ring": 0.66, "gather": 0.66}
PASSES = 17  # over float32 logits where they are held, reads and writes of both directions. ASSUMED
LINK_EFFICIENCY = 0.8  # of the peak of links. ASSUMED
# Forwards' worth of work of a chunk: without a graph, with one, and a backward of two.
CACHED, IN_ONE_PIECE, NO_GRADIENT = 4, 3, 1


@dataclass(frozen=True)
class Run:
    """What is to be run, by the names of the flags. Without `chunk` all rows are encoded at once."""

    model: Model
    gpu: Gpu
    gpus: int
    batch: int
    chunk: int | None = None
    precision: str = "amp_bf16"
    data: str = "host"
    optimizer: str = "adamw"
    frozen: str = "none"

    @property
    def rows(self) -> int:
        """Of one GPU."""
        return self.batch // self.gpus

    @property
    def chunk_rows(self) -> int:
        return min(self.chunk or self.rows, self.rows)

    @property
    def in_one_piece(self) -> bool:
        return self.chunk_rows == self.rows

    @property
    def feature(self) -> int:
        """Bytes of a number of the features."""
        return 4 if self.precision == "fp32" else 2

    @property
    def peak_flops(self) -> float:
        return self.gpu.tf32 if self.precision == "fp32" else self.gpu.half

    @property
    def trained_towers(self) -> list[Tower]:
        return [tower for name, tower in self.model.towers.items() if name != self.frozen]

    @property
    def trained_bytes(self) -> float:
        """Of the parameters that are trained."""
        return sum(tower.mparams for tower in self.trained_towers) * 1e6 * PRECISIONS[self.precision][0]

    @property
    def usable(self) -> float:
        return USABLE * self.gpu.capacity

    def sample_bytes(self, colour: int) -> int:
        """Of one pair: an image and its tokens."""
        return COLOURS * self.model.image_size**2 * colour + self.model.text.tokens * TOKEN if colour else 0

    def our_loss(self, exchange: str) -> OurLoss:
        """By the kernels for GPUs."""
        return OurLoss(self.rows, self.model.embed_dim, self.gpus, exchange, self.feature, self.feature, Triton)


def loss_memory(method: str, batch: int, ranks: int, width: int) -> float:
    """What the loss takes beside the features, of a method that is not ours."""
    rows = batch / ranks
    logits = {"dense": batch, "openclip": rows}.get(method, 0) * batch * FLOAT
    gathered, own = batch * width * FLOAT, rows * width * FLOAT
    return MATRICES * logits + GATHERED.get(method, 0) * gathered + OWN.get(method, 0) * own


def memory(run: Run, method: str) -> dict[str, float]:
    """Bytes by part. `features` are what the training loop holds of them beside the activations of a chunk."""
    weight, kept = PRECISIONS[run.precision]
    features = run.rows * run.model.embed_dim
    if method in OURS:
        held = 2.0 * features * run.feature
        loss, beside = sum(run.our_loss(method).parts.values()) + held, 2 * held  # their gradients, too
    else:
        loss = loss_memory(method, run.batch, run.gpus, run.model.embed_dim)
        beside = KEPT_FEATURES * features * FLOAT
    return {
        "weights": run.model.parameters * weight,
        # DistributedDataParallel sends a copy of them. COUNTED.
        "gradients": (2 if run.gpus > 1 else 1) * run.trained_bytes,
        "optimizer": OPTIMIZERS[run.optimizer] * run.trained_bytes,
        "data": float(run.rows * run.sample_bytes(DATA[run.data][0])),
        # The towers' backward passes come one after the other, but both forwards before them.
        "activations": run.chunk_rows * kept * sum(tower.numbers for tower in run.trained_towers),
        "features": beside,
        "loss": loss,
    }


def peak(run: Run, method: str) -> dict[str, float]:
    """The parts that are there at the peak. In chunks that is in the loss, or in the backward of a chunk; in one piece,
    in the loss while the activations of all rows are there."""
    parts = memory(run, method)
    highest = ["activations", "loss"]
    if not run.in_one_piece:
        highest = ["loss"] if parts["loss"] > parts["activations"] + parts["features"] else ["activations", "features"]
    return {name: parts[name] for name in ("weights", "gradients", "optimizer", "data", *highest)}


def fits(run: Run, method: str) -> bool:
    return sum(peak(run, method).values()) <= run.usable


def products(run: Run, method: str) -> float:
    """On one GPU, in units of b x b x D multiplications and additions."""
    if method in OURS:
        return run.our_loss(method).products / run.gpus
    return PRODUCTS[method] / (1 if method == "dense" else run.gpus)


def wire_bytes(run: Run, method: str) -> float:
    """What one GPU sends for the loss. COUNTED, in float32 where it is not ours.

    `dense` gathers both features and needs nobody's gradients: it has computed all of them. `openclip` scatters them
    back. `inf-cl` turns two rings, each with features forward, features and their gradients backward.
    """
    if method in OURS:
        return run.our_loss(method).wire
    others = run.gpus - 1
    blocks = {"dense": 2 * others, "openclip": 4 * others, "inf-cl": 6 * others + 2 if others else 0}[method]
    return float(blocks * run.rows * run.model.embed_dim * FLOAT)


def seconds(run: Run, method: str) -> dict[str, float]:
    """Of a step, by part: `wire` of the loss, `all_reduce` of the weights' gradients, `copies` from the host."""
    forwards, towers = IN_ONE_PIECE if run.in_one_piece else CACHED, run.model.towers.values()
    work = sum(tower.gflops * 1e9 * (forwards if tower in run.trained_towers else NO_GRADIENT) for tower in towers)
    square = run.batch * run.batch
    # The paper's code multiplies in tf32 whatever comes in.
    speed = (run.gpu.tf32 if method == "inf-cl" else run.peak_flops) * LOSS_EFFICIENCY[method]
    logits = {"dense": square, "openclip": square / run.gpus}.get(method, 0) * FLOAT
    # Along a ring its slowest link decides: the one between nodes where there are several.
    link = run.gpu.link if run.gpus <= run.gpu.per_node else min(run.gpu.link, run.gpu.network)
    summed = 2 * (run.gpus - 1) / run.gpus * run.trained_bytes
    turns = 1 if run.in_one_piece else 2  # a chunk comes again for its backward
    moved = turns * run.rows * run.sample_bytes(DATA[run.data][1])
    return {
        "encoders": run.rows * work / (run.peak_flops * ENCODER_EFFICIENCY),
        "loss": products(run, method) * 2 * square * run.model.embed_dim / speed + PASSES * logits / run.gpu.memory,
        "wire": wire_bytes(run, method) / (link * LINK_EFFICIENCY),
        "all_reduce": summed / (link * LINK_EFFICIENCY),
        "copies": moved / (run.gpu.host * LINK_EFFICIENCY),
    }


def step_seconds(method: str, parts: dict[str, float]) -> float:
    """Copies and the sum of gradients go on beside the encoders, blocks of a ring beside the loss; what is gathered
    before a dense loss is not hidden."""
    loss = (max if method in (*OURS, "inf-cl") else sum)([parts["loss"], parts["wire"]])
    return max(parts["encoders"], parts["all_reduce"] + parts["copies"]) + loss
