"""Kernels compiled as they are launched, for GPUs that are not here.

The backend itself decides what is launched: it is given a tile of its own default size, in memory that nobody touches,
and a launcher that writes down what it is asked for. Triton's own binder then finds what a launch on the target would
be specialised for: aligned pointers, divisible strides.
"""

import os
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context, parent_process
from typing import Any

import torch

from ...backends.backend import Kept
from ...backends.triton_backend import Triton
from ...backends.triton_settings import AUTOTUNE
from ...losses import spec as specs
from ...losses.block import Block, Tile
from ...losses.spec import Spec
from ...losses.state import State, fields, remembered
from . import machine_code
from .machine_code import Figures
from .targets import TARGETS, Target

INTERPRET = "TRITON_INTERPRET"
# What features are, and how float32 is multiplied.
DTYPES = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "float32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}
HALVES = ("bfloat16", "float16")
LOSSES: dict[str, Callable[[str, float], Spec]] = {
    "clip": specs.clip,
    "info_nce": specs.info_nce,
    "siglip": lambda same, _: specs.siglip(same),
    "nt_xent": specs.nt_xent,
    "supcon": lambda _, smoothing: specs.supcon(smoothing),
}


@dataclass(frozen=True)
class Variant:
    """One thing that the backend is asked to do with a tile.

    Attributes:
        action: "fold", "fold keeping" (what the backward will need is kept), "push", "push kept" or "scores".
        targets: The tile may hold positives by position, as those on the diagonal of a batch of pairs do.
        frozen: No features get a gradient, so no slope is written.
    """

    loss: str
    action: str
    same: str = "ignore"
    smoothing: float = 0.0
    stats: bool = False
    normalize: bool = False
    targets: bool = True
    diagonal: bool = False
    frozen: bool = False

    @property
    def name(self) -> str:
        spec = self.spec
        options = {
            f"ids {spec.same}": spec.same != "ignore",
            "smoothing": spec.smoothing > 0,
            "stats": self.stats,
            "normalize": self.normalize,
            "no targets": spec.targets and not self.targets,
            "diagonal": self.diagonal,
            "frozen": self.frozen,
        }
        return ", ".join([f"{self.loss} {self.action}", *(words for words, said in options.items() if said)])

    @property
    def spec(self) -> Spec:
        return LOSSES[self.loss](self.same, self.smoothing)

    @property
    def multiplies(self) -> bool:
        return self.action != "push kept"


_HEAVIEST: dict[str, Any] = {"same": "positive", "smoothing": 0.1}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("clip", "fold"),
        Variant("clip", "fold", targets=False),
        Variant("clip", "fold", same="mask"),
        Variant("clip", "fold", **_HEAVIEST),
        Variant("clip", "fold", **_HEAVIEST, targets=False),
        Variant("clip", "fold", stats=True),
        Variant("clip", "fold", normalize=True),
        Variant("clip", "fold", **_HEAVIEST, stats=True, normalize=True),
        Variant("clip", "fold keeping"),
        Variant("clip", "push"),
        Variant("clip", "push", targets=False),
        Variant("clip", "push", same="mask"),
        Variant("clip", "push", **_HEAVIEST),
        Variant("clip", "push", normalize=True),
        Variant("clip", "push", **_HEAVIEST, normalize=True),
        Variant("clip", "push", frozen=True),
        Variant("clip", "push kept"),
        Variant("clip", "push kept", **_HEAVIEST),
        Variant("info_nce", "fold"),
        Variant("info_nce", "fold", **_HEAVIEST),
        Variant("info_nce", "fold keeping"),
        Variant("info_nce", "fold keeping", **_HEAVIEST, stats=True, normalize=True),
        Variant("info_nce", "push kept"),
        Variant("info_nce", "push kept", **_HEAVIEST),
        Variant("info_nce", "push"),
        Variant("info_nce", "push", **_HEAVIEST),
        Variant("siglip", "fold"),
        Variant("siglip", "fold", stats=True),
        Variant("siglip", "fold keeping"),
        Variant("siglip", "fold keeping", targets=False),
        Variant("siglip", "fold keeping", same="mask"),
        Variant("siglip", "fold keeping", same="positive", stats=True, normalize=True),
        Variant("siglip", "push kept"),
        Variant("siglip", "push"),
        Variant("siglip", "push", same="positive", normalize=True),
        Variant("nt_xent", "fold"),
        Variant("nt_xent", "fold", diagonal=True),
        Variant("nt_xent", "fold", same="mask", diagonal=True),
        Variant("nt_xent", "fold keeping", diagonal=True),
        Variant("nt_xent", "push kept", diagonal=True),
        Variant("nt_xent", "push"),
        Variant("nt_xent", "push", diagonal=True),
        Variant("supcon", "fold"),
        Variant("supcon", "fold", smoothing=0.1, stats=True, normalize=True, diagonal=True),
        Variant("supcon", "push"),
        Variant("supcon", "push", smoothing=0.1, normalize=True, diagonal=True),
        Variant("clip", "scores"),
        Variant("clip", "scores", normalize=True),
    )
}


@dataclass(frozen=True)
class Compiled:
    """One launch, compiled.

    Attributes:
        kernel: "tile", or "merge rows" or "merge columns", which follow a fold.
        width: Of the features.
        binary: Names what was compiled: launches of the same binary differ in nothing that a compiler sees.
        settings: The block's sides, parts, warps and stages.
        figures: None where it did not compile.
        error: Why it did not, or what it must not do.
    """

    target: str
    dtype: str
    variant: str
    kernel: str
    width: int
    binary: str
    settings: dict[str, int]
    figures: Figures | None
    error: str = ""

    def faults(self) -> list[str]:
        """Why these settings do not fit this GPU; none if they do."""
        if self.figures is None:
            return [self.error]
        target, figures = TARGETS[self.target], self.figures
        found = [self.error] if self.error else []
        if figures.spills or figures.stack:
            found.append(f"spills: {figures.spills}, stack {figures.stack} bytes")
        if figures.shared > target.shared_per_block:
            found.append(f"shared memory: {figures.shared} of {target.shared_per_block} bytes")
        if not self.resident():
            found.append("no block fits a multiprocessor")
        multiplies = self.kernel == "tile" and VARIANTS[self.variant].multiplies
        if multiplies and self.dtype in HALVES:
            wrong = [opcode for opcode in figures.matrix if not opcode.startswith(target.matrix)]
            if wrong or not figures.matrix:
                found.append(f"multiplies by {', '.join(wrong) or 'no matrix instruction'} instead of {target.matrix}")
        return found

    def resident(self) -> int:
        """Blocks at work at a time on one multiprocessor."""
        assert self.figures is not None
        return TARGETS[self.target].blocks(self.figures.registers, self.figures.shared, self.settings["warps"])


# ---- in the process that asks


def compile_all(
    jobs: Sequence[tuple[str, str, str]], widths: Sequence[int], num_processes: int
) -> Iterator[list[Compiled]]:
    """All launches of each (target, dtype, variant), in order."""
    with _environment(), _pool(num_processes) as pool:
        try:
            yield from pool.map(partial(compile_job, widths=tuple(widths)), jobs)
        finally:
            pool.shutdown(cancel_futures=True)


def _pool(num_processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=_end_with_the_parent)


def _end_with_the_parent() -> None:
    """Also where the parent is killed, and cannot say so."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _environment() -> Iterator[None]:
    """Without what would change the kernels or their settings, for the processes that are started here."""
    taken = {name: os.environ.pop(name) for name in (INTERPRET, AUTOTUNE) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


# ---- in the process that compiles


def compile_job(job: tuple[str, str, str], widths: tuple[int, ...]) -> list[Compiled]:
    target, dtype, variant = job
    return [
        compiled
        for width in widths
        for number, (kernel, arguments) in enumerate(launches(VARIANTS[variant], TARGETS[target], dtype, width))
        for compiled in [_compiled(job, width, ("tile", "merge rows", "merge columns")[number], kernel, arguments)]
    ]


class Recorder(Triton):
    """The backend as it is on a target."""

    def __init__(self, spec: Spec, target: Target, dtype: str, stats: bool) -> None:
        self.launches: list[tuple[Any, dict[str, Any]]] = []
        product, precision = DTYPES[dtype]
        super().__init__(
            spec,
            10.0,
            -10.0 if spec.link == "sigmoid" else 0.0,
            torch.float32,
            torch.device("cpu"),
            product=product,
            stats=stats,
            sums_slopes=dtype != "float32",
            launcher=lambda kernel, grid, arguments: self.launches.append((kernel, arguments)),
        )
        self._architecture = target.name
        self._precision = precision


def launches(variant: Variant, target: Target, dtype: str, width: int) -> list[tuple[Any, dict[str, Any]]]:
    """Kernels and arguments."""
    spec = variant.spec
    backend = Recorder(spec, target, dtype, variant.stats)
    tile = _tile(variant, DTYPES[dtype][0], width)
    kept = Kept(torch.empty(tile.shape[0] * tile.shape[1])) if variant.action in ("fold keeping", "push kept") else None
    if variant.action.startswith("fold"):
        backend.fold(tile, kept)
    elif variant.action.startswith("push"):
        backend.slope(tile, kept)
    else:
        backend.scores(tile)
    return backend.launches


def _tile(variant: Variant, dtype: torch.dtype, width: int) -> Tile:
    height, side = Triton.sides(width, 1)
    spec = variant.spec
    names = remembered(spec) if variant.action.startswith("push") else fields(spec, variant.stats)
    pulled = variant.action.startswith("push") or (spec.link == "sigmoid" and variant.action == "fold keeping")
    within = (0, height) if variant.targets else (2 * side, 2 * side + height)

    def block(start: int, length: int) -> Block:
        return Block(
            torch.empty(length, width, dtype=dtype),
            start,
            ids=torch.empty(length, dtype=torch.int64) if spec.same != "ignore" else None,
            target=torch.empty(length, dtype=torch.int64) if spec.targets else None,
            targets_within=within,
            inverse_norm=torch.empty(length) if variant.normalize else None,
            state=State(names, torch.empty(len(names), length, dtype=torch.float64)),
            pull=torch.empty(length if pulled else 0, dtype=torch.float64),
            grad=None if variant.frozen else torch.empty(length, width),
        )

    rows = block(0, height)
    return Tile(rows, rows if variant.diagonal else block(0, side), diagonal=variant.diagonal)


def _compiled(job: tuple[str, str, str], width: int, name: str, kernel: Any, arguments: dict[str, Any]) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = TARGETS[job[0]]
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    # Where a launch does not say, Triton says what it will do about fused multiply-adds in a later version.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    backend = make_backend(gpu)
    asked = {**arguments, "debug": False}
    bound, specialization, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(**asked)
    options, signature, constants, attributes = kernel._pack_args(backend, asked, bound, specialization, rest)
    source = ASTSource(kernel, signature, constants, attributes)
    binary = f"{target.name}-{source.hash()}-{options.hash()}"
    settings = {
        word: arguments[key]
        for word, key in {
            "rows": "BLOCK_ROWS",
            "columns": "BLOCK_COLUMNS",
            "width": "BLOCK_WIDTH",
            "parts": "PARTS",
            "warps": "num_warps",
            "stages": "num_stages",
        }.items()
        if key in arguments
    }
    made = _DONE.get(binary)
    if made is None:
        made = _DONE[binary] = _figures(source, gpu, options.__dict__)
    return Compiled(*job, name, width, binary, settings, *made)


_DONE: dict[str, tuple[Figures | None, str]] = {}


def _figures(source: Any, gpu: Any, options: dict[str, Any]) -> tuple[Figures | None, str]:
    import triton

    try:
        compiled = triton.compile(source, target=gpu, options=options)
    except Exception as error:  # whatever a compiler says, it says of this kernel alone
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = " ".join(str(cause).split())
        return None, f"does not compile: {type(cause).__name__}: {text[-300:]}"
    shared = int(compiled.metadata.shared)
    forbidden = ", ".join(machine_code.forbidden_operations(compiled.asm["ttir"]))
    if gpu.backend == "hip":
        return machine_code.of_amd(compiled.asm["amdgcn"], shared), forbidden
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    return machine_code.of_nvidia(resources, sass, shared), forbidden


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_tool_path(name), *arguments], capture_output=True, text=True, check=True).stdout


@cache
def _tool_path(name: str) -> str:
    from triton import knobs

    return str(getattr(knobs.nvidia, name).path)
