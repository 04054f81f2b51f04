"""Every formula of `megabatch plan`, and every constant with where it is from. All of it predicts, nothing measures.

Letters: b rows of the whole batch, n GPUs, L = b / n rows of one; D width of the features.

Memory is per GPU, in bytes, and made of parts. A step in chunks has two summits, the loss and the backward of a chunk,
and one of them is the peak; in one piece both are one:

    weights, gradients, optimizer + data + max(loss, activations + features)        in chunks
    weights, gradients, optimizer + data + loss + activations                       in one piece

FITTED constants come from one table of the paper (arXiv 2410.17243, Table 1, and one figure of its Figure 4) and are
tested on the others; COUNTED ones from reading code; ASSUMED ones were never measured, and are the first to doubt.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..backends.backend import Backend
from ..backends.eager import Eager
from ..losses.spec import clip
from ..losses.state import state_fields
from ..tiling.guards import strip_height
from ..tiling.options import LossOptions, Needs
from ..tiling.plan import Plan, Sizes, make_plan, working_bytes
from .hardware import Gpu
from .models import COLOURS, Model

FLOAT, DOUBLE = 4, 8  # bytes

# ---- methods

METHODS = {
    "dense": "CLIP's loss on every GPU: both features gathered, all logits",
    "openclip": "open_clip with local_loss and gather_with_grad: the logits of the own rows",
    "inf-cl": "the code of arXiv 2410.17243: a ring, tiles inside of kernels",
    "ring": "megabatch with exchange='ring': columns of other ranks come one after the other",
    "gather": "megabatch with exchange='gather': columns of all ranks at once",
}
OURS = ("ring", "gather")

# ---- memory of the losses that are not ours: coefficients FITTED on Table 1, D = 768, by least relative squares

# Float32 matrices of logits: b x b in `dense`, L x b in `openclip`. K is read as 1024 and GB as GiB; with 1000 and 10^9
# the same table gives 4.00, and the paper does not say which it means.
MATRICES = 4.1
# Float32 copies of the gathered features of one side, b x D.
GATHERED = {"dense": 2.93, "openclip": 2.04}
# Float32 copies of the own features of one side, L x D. That of `inf-cl` keeps the largest relative error over the
# table smallest: its figures lie between 14.9 and 17.4.
OWN = {"openclip": 2.61, "inf-cl": 16.1}


def loss_memory(method: str, batch: int, ranks: int, width: int) -> float:
    """What the loss takes beside the features, of a method that is not ours."""
    rows = batch / ranks
    logits = {"dense": batch, "openclip": rows}.get(method, 0) * batch * FLOAT
    gathered, own = batch * width * FLOAT, rows * width * FLOAT
    return MATRICES * logits + GATHERED.get(method, 0) * gathered + OWN.get(method, 0) * own


def ring_only_memory(batch: int, ranks: int, width: int) -> float:
    """The paper's ring without tiles inside a GPU: L x L logits on top, in as many float32 matrices as those of the
    dense losses. ASSUMED."""
    return loss_memory("inf-cl", batch, ranks, width) + MATRICES * (batch / ranks) ** 2 * FLOAT


# ---- memory of our loss: COUNTED in the code, and held by tests against what is measured


@dataclass(frozen=True)
class OurLoss:
    """A training step of clip_loss on one of n ranks, all of which bring the same number of rows.

    `feature` and `operand`: bytes of a number of the features and of what products multiply, less than 4 where
    bf16/fp16 is multiplied into float32. Tiles depend on the threads of a CPU.
    """

    rows: int
    width: int
    ranks: int
    exchange: str
    feature: int
    operand: int
    backend: type[Backend]
    budget: int | None = None
    threads: int = 2

    @property
    def parts(self) -> dict[str, float]:
        """Bytes at the peak beyond the features themselves, by part: of the backward, which holds more."""
        plan, states = self.plan, len(state_fields(self._options.spec, stats=False))
        # The saved state of both sides, of all ranks where they gather, and 1 / sum_exp in half the bytes.
        vectors = (2 * states + 1) * self.rows * DOUBLE * (self.ranks if self._gathers else 1)
        always: dict[str, float] = {"gradients": 2 * self._block(FLOAT), "tiles": self._working}
        always |= {"kept logits": plan.kept * plan.slot_size * FLOAT, "vectors": vectors}
        # Beside the dlogits of a tile, four vectors of its rows and columns.
        beside_a_tile = 4 * (plan.rows + plan.columns) * DOUBLE
        tiles = always | {"vectors": vectors + beside_a_tile, "exchange": self._exchange(states)}
        return max(tiles, always | {"finish": self._finish()}, key=total)

    def _finish(self) -> float:
        """After the last tile: the scale's gradient is summed by strips, of bf16/fp16 features converted ones, then
        gradients are rounded to bf16/fp16."""
        half = self.feature != FLOAT
        rounded = 2 * self._block(self.feature) if half else 0
        if self._sum_for_scale:
            return rounded
        place = "cpu" if self.backend.name == "eager" else "meta"
        strip = min(self.rows, strip_height(torch.empty(1, self.width, device=place))) * self.width * FLOAT
        return strip + max(strip if half else 0, rounded)

    def _exchange(self, states: int) -> float:
        """Gathered: the features of all ranks' columns, and their gradients, in one tensor with those that arrive and
        those that leave. On a ring: two packed blocks with room for sums, and the sum that is added to."""
        if self._gathers:
            return self.ranks * (self._block(self.feature) + 3 * self._block(FLOAT))
        packed = self._block(self.feature) + states * self.rows * DOUBLE
        return 2 * packed + 3 * self._block(FLOAT) if self.ranks > 1 else 0.0

    @property
    def wire(self) -> float:
        """Bytes that a rank sends. Gathered: its features to all, sums of statistics of all rows twice, gradients to
        their owners. On a ring: features, then the state of its columns; features and state, then gradients."""
        vector, features, gradients = self.rows * DOUBLE, self._block(self.feature), self._block(FLOAT)
        states = len(state_fields(self._options.spec, stats=False)) * vector
        if self._gathers:
            return (self.ranks - 1) * (features + 2 * 2 * (states - vector) + gradients)
        return (self.ranks - 1) * (2 * (features + states) + gradients)

    @property
    def products(self) -> float:
        """Of N x N x D multiplications and additions: logits kept need not be formed again."""
        kept = self.plan.kept * self.plan.rows * self.plan.columns
        return 4.0 - min(1.0, kept / (self.rows * self.rows * self.ranks))

    @property
    def plan(self) -> Plan:
        """The one that the library would make."""
        return make_plan(self._options, self._sizes, self.ranks == 1)

    @property
    def _gathers(self) -> bool:
        return self.ranks > 1 and self.exchange == "gather"

    @property
    def _options(self) -> LossOptions:
        needs = Needs(rows=True, columns=True, scale=True)
        return LossOptions("clip_loss", clip("ignore", 0.0), needs, normalize=False, memory_budget=self.budget)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(
            rows=(self.rows,),
            columns=(self.rows * self.ranks,) if self._gathers else (self.rows,),
            remote=() if self._gathers else (self.rows,) * (self.ranks - 1),
            width=self.width,
            element=FLOAT,
            operand=self.operand,
            copied=self.feature != self.operand,
            sum_for_scale=self._sum_for_scale,
            backend=self.backend,
            threads=self.threads,
        )

    @property
    def _sum_for_scale(self) -> bool:
        """Where products are rounded: to bf16/fp16, and on a GPU to tf32."""
        return self.operand != FLOAT or self.backend is not Eager

    @property
    def _working(self) -> int:
        plan, sizes = self.plan, self._sizes
        across = (-(-length // plan.columns) for length in sizes.columns + sizes.remote)
        # Where all logits are kept, the eager backend has no buffer for those of a tile.
        unused = self.backend is Eager and plan.kept >= -(-self.rows // plan.rows) * sum(across)
        working = working_bytes(self._options, sizes, plan.rows, plan.columns)
        return working - (plan.rows * plan.columns * FLOAT if unused else 0)

    def _block(self, element: int) -> int:
        return self.rows * self.width * element


def total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


# ---- memory of the encoders

# Bytes of a parameter: itself, its gradient, and the copy of the gradient that DistributedDataParallel sends. COUNTED.
WEIGHTS = {"amp_bf16": 4, "amp": 4, "bf16": 2, "fp32": 4}
# What an optimizer keeps of a parameter, in numbers. COUNTED; Adafactor's second moment is a row and a column, and its
# first is in bfloat16 in the paper's code.
OPTIMIZERS = {"adamw": 2.0, "lion": 1.0, "sgd": 1.0, "adafactor": 0.5}
# Bytes that are kept for the backward for each token, layer and number of the width. That of `amp_bf16` is FITTED:
# 42.40 GB of Table 1 (offload, 32k). Without autocast 16 numbers: COUNTED, with an attention that does not write its
# scores out.
ACTIVATIONS = {"amp_bf16": 41.0, "amp": 41.0, "bf16": 32.0, "fp32": 64.0}
# Float32 copies of the own features of one side that the paper's training loop holds beside the activations. FITTED on
# Table 1 (offload, 256k to 1024k).
KEPT_FEATURES = 8.3
# Of a GPU's memory that tensors may take; the rest is for its driver and for gaps. ASSUMED: Table 1 has a peak of 77.94
# on 80.
USABLE = 0.975

TOKEN = 8  # bytes
# Where a batch waits for its turn, and in which form: bytes of a colour on the GPU, and of one that is moved there.
DATA = {"gpu-float32": (4, 0), "gpu-uint8": (1, 0), "host": (0, 1)}


def trained_parameters(model: Model, frozen: str) -> int:
    return model.parameters - {"image": model.image_parameters, "text": model.text_parameters}.get(frozen, 0)


def encoder_memory(model: Model, ranks: int, precision: str, optimizer: str, frozen: str) -> dict[str, float]:
    """What does not depend on the batch: weights, gradients, optimizer."""
    trained, bytes_ = trained_parameters(model, frozen), WEIGHTS[precision]
    copies = 2 if ranks > 1 else 1
    return {
        "weights": float(model.parameters * bytes_),
        "gradients": float(copies * trained * bytes_),
        "optimizer": OPTIMIZERS[optimizer] * trained * bytes_,
    }


def activation_memory(model: Model, chunk: int, precision: str, frozen: str) -> float:
    """Of one chunk; the towers' backward passes come one after the other, but both forwards before them."""
    towers = {"image": model.image.numbers, "text": model.text.numbers}
    return chunk * ACTIVATIONS[precision] * sum(numbers for name, numbers in towers.items() if name != frozen)


def sample_bytes(model: Model, colour: int) -> int:
    """Of one pair: an image and its tokens."""
    return COLOURS * model.image_size**2 * colour + model.text_length * TOKEN if colour else 0


# ---- work

# Products of N x N x D, forward and backward: on every GPU (`dense`), or spread over all. COUNTED.
PRODUCTS = {"dense": 3, "openclip": 6, "inf-cl": 10}


def products(method: str, ranks: int) -> float:
    """On one GPU, in units of b x b x D multiplications and additions, of a method that is not ours."""
    return PRODUCTS[method] / (1 if method == "dense" else ranks)


def wire_bytes(method: str, rows: int, ranks: int, width: int) -> float:
    """What one GPU sends for the loss, in float32. COUNTED.

    `dense` gathers both features and needs nobody's gradients: it has computed all of them. `openclip` scatters them
    back. `inf-cl` turns two rings, each with features forward, features and their gradients backward.
    """
    if ranks == 1:
        return 0.0
    blocks = {"dense": 2 * (ranks - 1), "openclip": 4 * (ranks - 1), "inf-cl": 6 * ranks - 4}[method]
    return float(blocks * rows * width * FLOAT)


def all_reduce_bytes(model: Model, ranks: int, precision: str, frozen: str) -> float:
    """What one GPU sends for the gradients of the weights."""
    return 2 * (ranks - 1) / ranks * trained_parameters(model, frozen) * WEIGHTS[precision]


# ---- time

# Of the peak of matrix units, by encoders: FITTED on one figure, 48.9 s of Figure 4 (open_clip's loss, 64k).
ENCODER_EFFICIENCY = 0.377
# The same by losses. Of ours and the paper's kernels as `python -m tools.kernels` predicts ours on an A100
# (docs/kernels.md), which no GPU has confirmed; of library products ASSUMED.
LOSS_EFFICIENCY = {"dense": 0.75, "openclip": 0.75, "inf-cl": 0.37, "ring": 0.66, "gather": 0.66}
# Matrices of float32 logits that are read or written where they are held, both directions together. ASSUMED.
PASSES = 17
# Of the peak of links. ASSUMED.
LINK_EFFICIENCY = 0.8
# Forwards' worth of work of a chunk: without a graph, with one, and a backward of two.
CACHED, IN_ONE_PIECE, NO_GRADIENT = 4, 3, 1


def encoder_seconds(model: Model, rows: int, chunk: int, gpu: Gpu, precision: str, frozen: str) -> float:
    forwards = CACHED if chunk < rows else IN_ONE_PIECE
    flops = {"image": model.image_flops, "text": model.text_flops}
    work = sum(flop * (NO_GRADIENT if tower == frozen else forwards) for tower, flop in flops.items())
    return rows * work / (_peak(gpu, precision) * ENCODER_EFFICIENCY)


def loss_seconds(method: str, count: float, batch: int, ranks: int, width: int, gpu: Gpu, precision: str) -> float:
    """`count`: of products on this GPU. The paper's code multiplies in tf32 whatever comes in."""
    peak = gpu.tf32 if method == "inf-cl" else _peak(gpu, precision)
    multiplied = count * 2 * batch * batch * width / (peak * LOSS_EFFICIENCY[method])
    logits = {"dense": batch, "openclip": batch / ranks}.get(method, 0) * batch * FLOAT
    return multiplied + PASSES * logits / gpu.memory


def wire_seconds(bytes_: float, ranks: int, gpu: Gpu) -> float:
    """Along a ring its slowest link decides: the one between nodes where there are several."""
    slowest = gpu.link if ranks <= gpu.per_node else min(gpu.link, gpu.network)
    return bytes_ / (slowest * LINK_EFFICIENCY)


def host_seconds(bytes_: float, gpu: Gpu) -> float:
    return bytes_ / (gpu.host * LINK_EFFICIENCY)


def _peak(gpu: Gpu, precision: str) -> float:
    return gpu.tf32 if precision == "fp32" else gpu.half
