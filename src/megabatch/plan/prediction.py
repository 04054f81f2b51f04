"""What is predicted for a run: the formulas put together, and the largest batch and chunk that fit."""

from dataclasses import dataclass, replace

from .formulas import OURS, Run, fits, memory, peak, products, seconds, step_seconds, wire_bytes

MOST_ROWS = 2**32  # of one GPU: beyond it nothing is searched


@dataclass(frozen=True)
class Prediction:
    """Of one method: bytes of one GPU and seconds of a step, by part, in all, and the largest part of each. `largest`
    is the batch that still fits, 0 if none does; `limited_by` what stops it from growing. `products` are of b x b x D
    on one GPU, `wire` is what it sends for the loss, `our_loss` the parts of ours beyond its features."""

    method: str
    fits: bool
    memory: dict[str, float]
    peak: float
    mostly: str
    largest: int
    limited_by: str
    products: float
    wire: float
    time: dict[str, float]
    step: float
    bound_by: str
    our_loss: dict[str, float]


def predict(run: Run, method: str) -> Prediction:
    highest, time, largest = peak(run, method), seconds(run, method), largest_batch(run, method)
    return Prediction(
        method=method,
        fits=fits(run, method),
        memory=memory(run, method),
        peak=sum(highest.values()),
        mostly=_largest_part(highest),
        largest=largest,
        limited_by=_limit(replace(run, batch=largest), method) if largest else "all but the batch",
        products=products(run, method),
        wire=wire_bytes(run, method),
        time=time,
        step=step_seconds(method, time),
        bound_by=_largest_part(time),
        our_loss=run.our_loss(method).parts if method in OURS else {},
    )


def _largest_part(parts: dict[str, float]) -> str:
    return max(parts, key=lambda part: parts[part])


def _limit(run: Run, method: str) -> str:
    """The largest of the parts that grow with the batch."""
    growing = {"data", "loss", "features"} | ({"activations"} if run.in_one_piece else set())
    return _largest_part({name: size for name, size in peak(run, method).items() if name in growing})


def largest_batch(run: Run, method: str) -> int:
    """A multiple of the number of GPUs, by bisection; 0 where not even one row fits."""
    low, high = 0, 1
    while high < MOST_ROWS and fits(replace(run, batch=high * run.gpus), method):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(replace(run, batch=middle * run.gpus), method) else (low, middle)
    return low * run.gpus


def with_largest_chunk(run: Run, method: str) -> Run | None:
    """The run in one piece if that fits, else in chunks of the largest power of two that does; None if none does."""
    powers = [2**n for n in reversed(range(run.rows.bit_length()))]
    return next((one for chunk in (None, *powers) if fits(one := replace(run, chunk=chunk), method)), None)
