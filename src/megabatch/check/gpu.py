"""What only a GPU shows: that a step reads nothing back, how many kernels it launches, and that it can be captured.

`watch`, `profile`, `capture` and `compiler` are what needs a GPU, so that tests can do without one.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

import megabatch
from megabatch.bench.tolerance import eps

from .cases import Case
from .exactness import leaves

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
PACKAGE = Path(__file__).parent.parent
DEFAULT, PLAIN, SCALE = "default", "plain", "scale with a gradient"
HALF = ("bfloat16", "float16")
# What each option gives beside features and scale, and what it passes.
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    DEFAULT: ((), {"normalize": None}),
    PLAIN: ((), {}),
    "normalize": ((), {"normalize": True}),
    "ids mask": (("ids",), {"same_ids": "mask"}),
    "ids positive": (("ids",), {"same_ids": "positive"}),
    "weight": (("weight",), {}),
    "label_smoothing": ((), {"label_smoothing": 0.1}),
    "return_stats": ((), {"return_stats": True}),
    "positives": (("positives",), {}),
    "negatives": (("negatives",), {}),
    "reduction none": ((), {"reduction": "none"}),
    **{dtype: ((), {}) for dtype in HALF},
    SCALE: ((), {}),
}
ONLY = {"positives": ("info_nce_loss",), "negatives": ("info_nce_loss",)}
NEVER = {"ids mask": ("supcon_loss",), "ids positive": ("supcon_loss",), "label_smoothing": ("siglip_loss",)}
STEP_LIMIT, TILE_LIMIT = 45, 3  # launches
# Batches of several numbers of tiles. Kept: all logits fit the default budget. Else fewer fit than are worth keeping.
TILES: tuple[tuple[str, int, tuple[int, ...], dict[str, Any]], ...] = (
    ("logits kept", 256, (2, 4, 6), {}),
    ("logits computed again", 2048, (8, 12, 16), {"memory_budget": "48MiB"}),
)
# What the profiler, or a library's product, does on its own account.
OVERHEAD = ("Activity Buffer", "Command Buffer", "Lazy Function", "Instrumentation", "Resource")
SYNCHRONIZING = "called a synchronizing CUDA operation"  # torch's words
WARM_UPS = 3

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What became of one call. `status`: ok, failed, not run; `count` and `allowed` where something was counted."""

    name: str
    status: str
    count: float | None = None
    allowed: float | None = None
    note: str = ""

    def __str__(self) -> str:
        text = self.name if self.count is None else f"{self.name}: {self.count:g}, allowed {self.allowed:g}"
        return text + (
            f" ({self.note})" if self.count is not None and self.note else "" if not self.note else f": {self.note}"
        )


def raised(name: str, error: BaseException) -> Finding:
    return Finding(name, FAILED, note=f"raised {type(error).__name__}: {' '.join(str(error).split())}")


@dataclass(frozen=True)
class Call:
    """One call of a loss. Scale and bias are numbers unless the option says that they have gradients."""

    loss: str
    option: str
    backend: str
    dtype: str = "float32"
    rows: int = 293
    width: int = 72
    more: dict[str, Any] = field(default_factory=lambda: {"tile": 160})

    def __str__(self) -> str:
        return f"{self.loss}, {self.option}, {self.backend}"

    def inputs(self, device: torch.device) -> Inputs:
        """Copies of their own, each time of the same numbers."""
        case = Case(self.loss, self.option, self.rows, self.width, OPTIONS[self.option][0])
        kind: torch.dtype = getattr(torch, self.dtype)
        scalars: Inputs = leaves(case.scalars(kind), device)
        if self.option != SCALE:
            scalars = {name: x.item() for name, x in scalars.items()}
        return {**leaves(case.shares(1, kind)[0], device), **scalars}

    def other(self, inputs: Inputs) -> Inputs:
        """Other numbers of the same shapes: every other row of one side turns to one row of the other side."""
        sides = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.dim() == 2]
        changed = inputs[sides[0]].detach().clone()
        changed[::2] += inputs[sides[-1]].detach()[0]
        return inputs | {sides[0]: torch.nn.functional.normalize(changed, dim=1).requires_grad_()}

    def forward(self, inputs: Inputs) -> Tensor:
        """The loss, as one number."""
        options = {"normalize": False, **OPTIONS[self.option][1], **self.more, "backend": self.backend, "group": None}
        returned = getattr(megabatch, self.loss)(**inputs, **options)
        value: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return value.sum() if value.dim() else value


def gradients(value: Tensor, inputs: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad(value, [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]))


def calls(
    losses: Iterable[str], backends: Sequence[str], dtypes: Sequence[str], options: Iterable[str] = tuple(OPTIONS)
) -> list[Call]:
    """Every loss with every option that it has, in the first of the dtypes or the one that the option names."""
    return [
        Call(loss, option, backend, option if option in HALF else dtypes[0])
        for loss in losses
        for backend in backends
        for option in options
        if loss in ONLY.get(option, (loss,)) and loss not in NEVER.get(option, ())
        if option not in HALF or option in dtypes
    ]


def each(calls: Sequence[Call], examine: Callable[[Call], list[Finding]]) -> list[Finding]:
    """The findings of every call. One that raises is a finding too, and the rest go on."""

    def tried(call: Call) -> list[Finding]:
        try:
            return examine(call)
        except Exception as error:
            return [raised(str(call), error)]

    return [found for call in calls for found in tried(call)]


# ---- host reads: each makes the host wait until the GPU has caught up


@contextmanager
def watched(mode: str) -> Iterator[None]:
    """torch raises ("error") or warns ("warn") where the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def host_reads(calls: Sequence[Call], device: torch.device, watch: Callable[[str], Any] = watched) -> list[Finding]:
    def examine(call: Call) -> list[Finding]:
        first = call.inputs(device)
        # Compiles kernels and fills caches. The others have other numbers, so that no cache of results can help.
        gradients(call.forward(first), first)
        other = call.other(first)
        try:
            with watch("error"):
                gradients(call.forward(other), other)
        except RuntimeError as error:
            if SYNCHRONIZING not in str(error):
                raise
            with warnings.catch_warnings(record=True) as caught, watch("warn"):
                warnings.simplefilter("always")
                gradients(call.forward(other), other)
            reads = sum(SYNCHRONIZING in str(warning.message) for warning in caught)
            # Where torch warned of none, the one that it raised for is still there.
            return [Finding(str(call), FAILED, max(reads, 1), 0, f"at {_place(error)}")]
        return [Finding(str(call), OK, 0, 0)]

    return each(calls, examine)


def _place(error: BaseException) -> str:
    """The innermost line of the package on the way to the error."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(PACKAGE):
            return f"{Path(frame.filename).relative_to(PACKAGE).as_posix()}:{frame.lineno} {frame.line or ''}".rstrip()
    return "an unknown line"


# ---- launches: small batches wait for them, not for arithmetic


def profiled(work: Callable[[], Any]) -> tuple[Any, list[Any]]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=activities) as profile:
            result = work()
            torch.cuda.synchronize()
        return result, list(profile.events() or [])


def launched(events: Iterable[Any]) -> Counter[str]:
    """What ran on the device, by name: kernels, copies and fills, but no sums of a library's split product."""
    return Counter(
        event.name
        for event in events
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(OVERHEAD)
        and "splitkreduce" not in event.name.lower()
    )


def launches(
    losses: Sequence[str], backends: Sequence[str], dtype: str, device: torch.device, profile: Any = profiled
) -> list[Finding]:
    steps = [Call("clip_loss", SCALE, backend, dtype, 256, 512, {}) for backend in backends if "clip_loss" in losses]

    def whole_step(call: Call) -> list[Finding]:
        seen = sum(_passes(call, device, profile), Counter[str]())
        return [_judged(f"{call.loss}, whole step of {call.rows} rows, {call.backend}", seen.total(), STEP_LIMIT, seen)]

    found = each(steps, whole_step)
    for title, tile, sides, more in TILES if "triton" in backends else ():
        # Nothing is multiplied by tensor cores but bf16/fp16, and nothing else is what kernels are for.
        tiled = [Call(loss, PLAIN, "triton", "bfloat16", more={**more, "tile": tile}) for loss in losses]
        found += each(tiled, partial(_per_tile, title, sides, device, profile))
    return found


def _per_tile(title: str, sides: Sequence[int], device: torch.device, profile: Any, call: Call) -> list[Finding]:
    """Launches grow by a constant, by strips of tiles and by tiles. The second difference leaves the tiles alone."""
    counts, numbers, seen = [], [], Counter[str]()
    for side in sides:
        forward, backward = _passes(replace(call, rows=side * call.more["tile"]), device, profile)
        counts.append((forward.total(), backward.total()))
        side *= 2 if call.loss == "nt_xent_loss" else 1
        numbers.append(side * (side + 1) / 2 if call.loss in ("nt_xent_loss", "supcon_loss") else side**2)
        seen = forward + backward
    ahead, back = (
        (a - 2 * b + c) / (numbers[0] - 2 * numbers[1] + numbers[2]) for a, b, c in zip(*counts, strict=True)
    )
    # Both passes of these are one walk over the tiles: the forward may launch what others do in the backward.
    if call.loss in ("siglip_loss", "info_nce_loss"):
        both = {"forward and backward": (ahead + back, 2 * TILE_LIMIT)}
    else:
        both = {"forward": (ahead, TILE_LIMIT), "backward": (back, TILE_LIMIT)}
    return [_judged(f"{call.loss}, a tile {way}, {title}", *figures, seen) for way, figures in both.items()]


def _passes(call: Call, device: torch.device, profile: Any) -> tuple[Counter[str], Counter[str]]:
    """Launches of forward and backward, the second time that both run: the first compiles, and starts the profiler."""
    for _ in range(2):
        inputs = call.inputs(device)
        value, forward = profile(partial(call.forward, inputs))
        _, backward = profile(partial(gradients, value, inputs))
    return launched(forward), launched(backward)


def _judged(name: str, count: float, allowed: float, seen: Counter[str]) -> Finding:
    if not seen:  # a meter that sees nothing proves nothing
        return Finding(name, FAILED, note="the profiler saw nothing run on the device")
    most = ", ".join(f"{times} {kernel[:60]}" for kernel, times in seen.most_common(8))
    return Finding(name, OK, count, allowed) if count <= allowed else Finding(name, FAILED, count, allowed, most)


# ---- graphs: captured with some numbers and replayed with others


def captured(step: Callable[[Inputs], list[Tensor]], inputs: Inputs) -> Callable[[Inputs], list[Tensor]]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(inputs)

    def replay(others: Inputs) -> list[Tensor]:
        with torch.no_grad():
            for name, x in others.items():
                if isinstance(x, Tensor):
                    inputs[name].copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        return results

    return replay


def compiled(forward: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    torch.compiler.reset()
    return torch.compile(forward, mode="reduce-overhead", fullgraph=True)


def graphs(
    calls: Sequence[Call], device: torch.device, capture: Any = captured, compiler: Any = compiled
) -> list[Finding]:
    def step(forward: Callable[[Inputs], Tensor], inputs: Inputs) -> list[Tensor]:
        value = forward(inputs)
        return [value.detach(), *gradients(value, inputs)]

    def graphed(call: Call) -> list[Finding]:
        first = call.inputs(device)
        others = call.other(first)
        expected = step(call.forward, others)
        return [_replayed(f"{call}, CUDA graph", call, capture(partial(step, call.forward), first)(others), expected)]

    def reduced(call: Call) -> list[Finding]:
        first = call.inputs(device)
        others = call.other(first)
        expected = step(call.forward, others)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own use of what torch deprecates
            skipped, forward = _skips(), compiler(call.forward)
            for inputs in (*[first] * WARM_UPS, others):  # records after the first few
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                got = [x.clone() for x in step(forward, inputs)]
        skips = _skips() - skipped
        note = f"the compiler captured no graph, {skips} skips" if skips else ""
        return [_replayed(f"{call}, reduce-overhead", call, got, expected, note)]

    return [*each(calls, graphed), *each(calls, reduced)]


def _skips() -> int:
    """Graphs that the compiler decided not to capture."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def _replayed(name: str, call: Call, got: list[Tensor], expected: list[Tensor], note: str = "") -> Finding:
    """Another order of a sum at most: numbers of the captured batch would be off by their own size."""
    for place, (ours, right) in enumerate(zip(got, expected, strict=True)):
        error = (ours.double() - right.double()).abs().max().item()
        allowed = 100 * eps(getattr(torch, call.dtype)) * right.abs().max().item()
        if not error <= allowed:  # NaN is wrong too
            what = "the loss" if place == 0 else f"gradient {place}"
            return Finding(name, FAILED, note=f"{what} is off by {error:.1e} after the replay, allowed {allowed:.1e}")
    return Finding(name, OK, note=note)
