"""Can a step be captured in a CUDA graph? And compiled with mode="reduce-overhead", which captures on its own?

A graph is captured with some numbers and replayed with others. The loss and all gradients must be those of a plain call
with the latter.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .calls import DEFAULT, PLAIN, SCALE, Call, leaves_of
from .findings import FAILED, OK, Finding, each

SECTION = "graphs"
GRAPHED, COMPILED = "CUDA graph", "reduce-overhead"
OPTIONS = (DEFAULT, PLAIN, SCALE)
WARM_UPS = 3
# Another order of a sum at most; numbers of the captured batch would be off by their own size.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}

Inputs = dict[str, Any]
# The loss and its gradients.
Results = list[Tensor]
# From a step and the inputs that it is captured with: the step as it is replayed, with inputs of the same shapes.
Capture = Callable[[Callable[[Inputs], Results], Inputs], Callable[[Inputs], Results]]
Compiler = Callable[[Callable[[Inputs], Tensor]], Callable[[Inputs], Tensor]]


def captured(step: Callable[[Inputs], Results], inputs: Inputs) -> Callable[[Inputs], Results]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(inputs)

    def replay(others: Inputs) -> Results:
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


def examine(
    calls: Sequence[Call], device: torch.device, capture: Capture = captured, compiler: Compiler = compiled
) -> list[Finding]:
    return [
        *each(SECTION, calls, lambda call: [_graphed(call, device, capture)]),
        *each(SECTION, calls, lambda call: [_compiled(call, device, compiler)]),
    ]


def _graphed(call: Call, device: torch.device, capture: Capture) -> Finding:
    def step(inputs: Inputs) -> Results:
        return _results(call.forward, inputs)

    first = call.inputs(device)
    others = call.other(first)
    expected = step(others)
    return _judged(call, GRAPHED, capture(step, first)(others), expected)


def _compiled(call: Call, device: torch.device, compiler: Compiler) -> Finding:
    first = call.inputs(device)
    others = call.other(first)
    expected = _results(call.forward, others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own use of what torch deprecates
        skipped, forward = _skips(), compiler(call.forward)
        for inputs in (*[first] * WARM_UPS, others):  # records after the first few
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            got = [x.clone() for x in _results(forward, inputs)]
        skips = _skips() - skipped
    return _judged(call, COMPILED, got, expected, f"the compiler captured no graph, {skips} skips" if skips else "")


def _skips() -> int:
    """Graphs that the compiler decided not to capture."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def _results(forward: Callable[[Inputs], Tensor], inputs: Inputs) -> Results:
    value = forward(inputs)
    return [value.detach(), *torch.autograd.grad(value, leaves_of(inputs))]


def _judged(call: Call, how: str, got: Results, expected: Results, note: str = "") -> Finding:
    name = f"{call}, {how}"
    for place, (ours, right) in enumerate(zip(got, expected, strict=True)):
        error = (ours.double() - right.double()).abs().max().item()
        allowed = TOLERANCE[call.dtype] * max(right.abs().max().item(), 1e-30)
        if not error <= allowed:  # NaN is wrong too
            what = "the loss" if place == 0 else f"gradient {place}"
            text = f"{what} is off by {error:.1e} after the replay, allowed {allowed:.1e}"
            return Finding(SECTION, name, FAILED, note=text)
    return Finding(SECTION, name, OK, note=note)
