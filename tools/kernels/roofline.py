"""How long a training step should take, from what was compiled and the makers' peaks: predicted, never run.

The model, for one tile of the logits:
- a block multiplies at EFFICIENCY of the matrix units' peak, loads its features through the cache, and executes its
  epilogue at the rate of instructions and of special functions; instructions are counted in the compiled code, both
  sides of branches among them;
- where two blocks or more share a multiprocessor, one's epilogue hides behind another's product, and the slowest of
  product, instructions, special functions, cache and memory is the time; where there is one, product and epilogue add
  up;
- features are read from memory once per tile; dlogits and partial statistics are written and read back;
- the gradients are library products, at EFFICIENCY or at the speed of memory, that add to what is there.

Left out: launches, latency, clocks that sink under load, bank conflicts, stalls, pipes narrower than the issue rate
(float32 on the A100), the O(N) work between tiles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.backends.triton_backend import Triton
from megabatch.plan import hardware

from .compiling import Compiled
from .machine_code import Work
from .targets import TARGETS

# Of the peak of matrix units, by any kernel that keeps them fed: assumed, the same for all.
EFFICIENCY = 0.75
ROWS, WIDTH, DTYPE = 32768, 768, "bfloat16"
HALF, FLOAT = 2, 4  # bytes
# What the estimate needs to be compiled.
NEEDED = ("clip forward", "clip forward, no targets", "clip backward", "clip backward, no targets")


@dataclass(frozen=True)
class Gpu:
    """Peaks from spec sheets, and beside them: what the second-level cache delivers, by white papers (for the H100,
    which has none on this, bytes per clock as the A100); per clock and multiprocessor, warp instructions and special
    functions."""

    name: str
    target: str
    peaks: hardware.Gpu
    cache: float
    multiprocessors: int
    clock: float
    issue: int = 4
    special: int = 16

    @property
    def half(self) -> float:
        return self.peaks.half

    @property
    def memory(self) -> float:
        return self.peaks.memory

    @property
    def clocks(self) -> float:
        """Of all multiprocessors, per second."""
        return self.multiprocessors * self.clock


GPUS = (
    Gpu("A100 80GB SXM", "sm_80", hardware.GPUS["A100-80"], 5120 * 1.41e9, 108, 1.41e9),
    Gpu("H100 SXM", "sm_90", hardware.GPUS["H100-80"], 5120 * 1.83e9, 132, 1.83e9),
    # A wavefront of 64 takes the 16 lanes of its unit for 4 clocks, and there are 4 units.
    Gpu("MI300X", "gfx942", hardware.GPUS["MI300X"], 8 * 2048 * 2.1e9, 304, 2.1e9, issue=1),
)


@dataclass(frozen=True)
class Estimate:
    """Seconds, and what they are made of."""

    seconds: float
    limit: str

    def share(self, products: int, gpu: Gpu, rows: int = ROWS, width: int = WIDTH) -> float:
        """Of the peak for bf16/fp16, by the products that cannot be avoided."""
        return products * 2 * rows * rows * width / gpu.half / self.seconds


def tile_kernel(compiled: Compiled, gpu: Gpu, rows: int, columns: int, width: int, written: int) -> Estimate:
    """One tile; `written`: the bytes that come out of it."""
    assert compiled.figures is not None
    settings, target = compiled.settings, TARGETS[gpu.target]
    blocks = math.ceil(rows / settings["rows"]) * math.ceil(columns / settings["columns"])
    turns = math.ceil(width / settings["width"])
    resident = compiled.resident()
    threads = settings["warps"] * target.warp_size

    def issue(work: Work) -> float:
        return work.instructions * settings["warps"] * blocks / (gpu.issue * gpu.clocks)

    loads = blocks * (settings["rows"] + settings["columns"]) * width * HALF
    product = {
        "product": 2 * rows * columns * width / (gpu.half * EFFICIENCY),
        "cache": loads / gpu.cache,
        "memory": (rows + columns) * width * HALF / gpu.memory,
        "instructions": issue(compiled.figures.loop) * turns,
    }
    epilogue = {
        "memory": written / gpu.memory,
        "instructions": issue(compiled.figures.rest),
        "special functions": compiled.figures.rest.special * threads * blocks / (gpu.special * gpu.clocks),
    }
    places = gpu.multiprocessors * max(resident, 1)
    last_round = math.ceil(blocks / places) * places / blocks
    if resident >= 2:
        both = {name: product.get(name, 0.0) + epilogue.get(name, 0.0) for name in product | epilogue}
        seconds, limit = _slowest(both)
    else:
        (first, why), (second, also) = _slowest(product), _slowest(epilogue)
        seconds, limit = first + second, f"{why}, then {also}"
    return Estimate(seconds * last_round, limit)


def _slowest(terms: dict[str, float]) -> tuple[float, str]:
    return max((seconds, name) for name, seconds in terms.items())


@dataclass(frozen=True)
class Step:
    forward: Estimate
    backward: Estimate

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def whole(self) -> Estimate:
        return Estimate(self.seconds, "")


def megabatch(compiled: Sequence[Compiled], gpu: Gpu, rows: int = ROWS, width: int = WIDTH) -> Step | None:
    """clip_loss, forward and backward; None where something is missing among what was compiled."""
    found = {
        one.variant: one
        for one in compiled
        if (one.target, one.dtype, one.kernel, one.width) == (gpu.target, DTYPE, "tile", width) and one.figures
    }
    if any(name not in found for name in NEEDED):
        return None
    height, side = (min(longest, rows) for longest in Triton.tile_sides(width, 1))
    strips = math.ceil(rows / height)
    tiles = {True: strips, False: strips * math.ceil(rows / side) - strips}  # by whether they hold targets
    forward = backward = 0.0
    limits = []
    for targets, count in tiles.items():
        if count:
            suffix = "" if targets else ", no targets"
            statistics, merge = _statistics(
                found[f"clip forward{suffix}"], gpu, height, side, width, slots=4 if targets else 2
            )
            dlogits = tile_kernel(
                found[f"clip backward{suffix}"], gpu, height, side, width, written=height * side * HALF
            )
            forward += count * (statistics.seconds + merge)
            gradients = sum(_gradient(gpu, *sides, width) for sides in ((height, side), (side, height)))
            backward += count * (dlogits.seconds + gradients)
            limits.append((statistics.limit, dlogits.limit))
    return Step(Estimate(forward, limits[-1][0]), Estimate(backward, limits[-1][1]))


def _statistics(
    compiled: Compiled, gpu: Gpu, rows: int, columns: int, width: int, slots: int
) -> tuple[Estimate, float]:
    """The tile kernel, and the seconds to merge its partial statistics."""
    settings = compiled.settings
    across, down = math.ceil(columns / settings["columns"]), math.ceil(rows / settings["rows"])
    partials = slots * (across * rows + down * columns) * FLOAT
    return tile_kernel(compiled, gpu, rows, columns, width, written=partials), partials / gpu.memory


def _gradient(gpu: Gpu, rows: int, columns: int, width: int) -> float:
    """dlogits @ features, added to the gradient in float32."""
    multiplied = 2 * rows * columns * width / (gpu.half * EFFICIENCY)
    moved = (rows * columns + columns * width) * HALF + 2 * rows * width * FLOAT
    return max(multiplied, moved / gpu.memory)
