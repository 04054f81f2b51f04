"""A run, and what is predicted for it: the formulas put together."""

from dataclasses import dataclass, field, replace

from ..backends.triton_backend import Triton
from . import formulas
from .formulas import OURS, OurLoss, total
from .hardware import Gpu
from .models import Model

MOST_ROWS = 2**32  # of one GPU: beyond it nothing is searched
NOTHING_FITS = "all but the batch"


@dataclass(frozen=True)
class Run:
    """What is to be run. Names are those of the command's flags; `budget` is our loss's, in bytes."""

    model: Model
    gpu: Gpu
    gpus: int
    batch: int
    chunk: int | None = None
    precision: str = "amp_bf16"
    data: str = "gpu-float32"
    optimizer: str = "adamw"
    frozen: str = "none"
    budget: int | None = None

    @property
    def rows(self) -> int:
        """Of one GPU."""
        return self.batch // self.gpus

    @property
    def chunk_rows(self) -> int:
        return min(self.chunk or self.rows, self.rows)

    @property
    def feature(self) -> int:
        """Bytes of a number of the features."""
        return 4 if self.precision == "fp32" else 2

    def our_loss(self, exchange: str) -> OurLoss:
        """Our loss in this run, by the kernels for GPUs."""
        return OurLoss(
            self.rows, self.model.embed_dim, self.gpus, exchange, self.feature, self.feature, Triton, self.budget
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, by part. Encoded in chunks, at the peak either the loss or activations and features count,
    whichever is more; in one piece, the activations of the whole batch are there while the loss is computed."""

    weights: float
    gradients: float
    optimizer: float
    data: float
    activations: float
    features: float
    loss: float
    in_one_piece: bool = False

    @property
    def summit(self) -> dict[str, float]:
        """The parts that make the peak."""
        encoders = {"activations": self.activations, "features": self.features}
        in_one_piece = {"activations": self.activations, "loss": self.loss}
        highest = in_one_piece if self.in_one_piece else max({"loss": self.loss}, encoders, key=total)
        return {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "data")} | highest

    @property
    def peak(self) -> float:
        return total(self.summit)

    @property
    def limit(self) -> str:
        """The largest part."""
        summit = self.summit
        return max(summit, key=lambda part: summit[part])


@dataclass(frozen=True)
class Time:
    """Seconds of a step, by part: `wire` of the loss, `all_reduce` of the weights' gradients, `copies` from the host.
    `overlaps`: the loss computes while its blocks travel."""

    encoders: float
    loss: float
    wire: float
    all_reduce: float
    copies: float
    overlaps: bool

    @property
    def without_overlap(self) -> float:
        return self.encoders + self.loss + self.wire + self.all_reduce + self.copies

    @property
    def with_overlap(self) -> float:
        """Copies and the sum of gradients go on beside the encoders, blocks of a ring beside the loss."""
        loss = max(self.loss, self.wire) if self.overlaps else self.loss + self.wire
        return max(self.encoders, self.all_reduce + self.copies) + loss

    @property
    def limit(self) -> str:
        """What takes longest: compute of encoders or loss, the wire, or copies from the host."""
        wire = self.wire + self.all_reduce
        parts = {"encoders": self.encoders, "loss": self.loss, "wire": wire, "copies": self.copies}
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class Prediction:
    """Of one method: `products` of b x b x D on one GPU, `wire` bytes that it sends for the loss, the `largest` batch
    that fits (0: none) and what stops its `growth`; `our_loss` by part, beyond its features."""

    method: str
    memory: Memory
    time: Time
    products: float
    wire: float
    usable: float
    largest: int
    growth: str
    our_loss: dict[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.usable


def predict(run: Run, method: str) -> Prediction:
    largest = _largest_batch(run, method)
    ours = run.our_loss(method) if method in OURS else None
    wire = ours.wire if ours else formulas.wire_bytes(method, run.rows, run.gpus, run.model.embed_dim)
    count = ours.products / run.gpus if ours else formulas.products(method, run.gpus)
    return Prediction(
        method=method,
        memory=memory(run, method),
        time=_time(run, method, count, wire),
        products=count,
        wire=wire,
        usable=usable(run.gpu),
        largest=largest,
        growth=_growth(replace(run, batch=largest), method) if largest else NOTHING_FITS,
        our_loss=ours.parts if ours else {},
    )


def _growth(run: Run, method: str) -> str:
    """The largest of the parts that grow with the batch."""
    summit = memory(run, method).summit
    growing = ["data", "loss", "features"]
    if run.chunk_rows == run.rows:  # a larger batch is a larger chunk
        growing.append("activations")
    return max(growing, key=lambda part: summit.get(part, 0.0))


def usable(gpu: Gpu) -> float:
    return formulas.USABLE * gpu.capacity


def memory(run: Run, method: str) -> Memory:
    width, rows = run.model.embed_dim, run.rows
    on_gpu, _ = formulas.DATA[run.data]
    if method in OURS:
        # The features; beside the activations of a chunk, their gradients too.
        features = 2 * rows * width * run.feature
        loss, kept = total(run.our_loss(method).parts) + features, 2.0 * features
    else:
        loss = formulas.loss_memory(method, run.batch, run.gpus, width)
        kept = formulas.KEPT_FEATURES * rows * width * formulas.FLOAT
    return Memory(
        **formulas.encoder_memory(run.model, run.gpus, run.precision, run.optimizer, run.frozen),
        data=float(rows * formulas.sample_bytes(run.model, on_gpu)),
        activations=formulas.activation_memory(run.model, run.chunk_rows, run.precision, run.frozen),
        features=kept,
        loss=loss,
        in_one_piece=run.chunk_rows == run.rows,
    )


def _time(run: Run, method: str, count: float, wire: float) -> Time:
    _, moved = formulas.DATA[run.data]
    turns = 2 if run.chunk_rows < run.rows else 1  # a chunk comes again for its backward
    summed = formulas.all_reduce_bytes(run.model, run.gpus, run.precision, run.frozen)
    return Time(
        encoders=formulas.encoder_seconds(run.model, run.rows, run.chunk_rows, run.gpu, run.precision, run.frozen),
        loss=formulas.loss_seconds(method, count, run.batch, run.gpus, run.model.embed_dim, run.gpu, run.precision),
        wire=formulas.wire_seconds(wire, run.gpus, run.gpu),
        all_reduce=formulas.wire_seconds(summed, run.gpus, run.gpu),
        copies=formulas.host_seconds(turns * run.rows * formulas.sample_bytes(run.model, moved), run.gpu),
        overlaps=method in (*OURS, "inf-cl"),
    )


def largest_chunk(run: Run, method: str) -> int:
    """The largest power of two, below the present chunk, with which the batch fits; 0 where none does."""
    chunk = 1 << max(run.chunk_rows - 1, 1).bit_length() - 1
    while chunk and memory(replace(run, chunk=chunk), method).peak > usable(run.gpu):
        chunk //= 2
    return chunk


def _largest_batch(run: Run, method: str) -> int:
    """A multiple of the number of GPUs, by bisection; 0 where not even one row fits."""

    def fits(rows: int) -> bool:
        return memory(replace(run, batch=rows * run.gpus), method).peak <= usable(run.gpu)

    low, high = 0, 1
    while high < MOST_ROWS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * run.gpus
