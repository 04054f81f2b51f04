"""Compile the kernels for GPUs that are not here, as the backend would launch them.

The backend gets a tile of its default size, in memory that nobody touches, and records what it would launch. Triton's
own binder then finds what a launch on the target is specialized for: aligned pointers, divisible strides.
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
from typing import Any, TypeVar

import torch

from megabatch.backends.triton_backend import Triton
from megabatch.backends.triton_settings import defaults, precision
from megabatch.losses import spec as specs
from megabatch.losses.block import Block, Tile
from megabatch.losses.spec import Spec
from megabatch.losses.state import State, state_fields

from . import machine_code
from .machine_code import Figures
from .targets import TARGETS, Target

Backend = TypeVar("Backend", bound=Triton)

INTERPRET = "TRITON_INTERPRET"
# What features are, and the kind of kernels for them: float32 in full precision is multiplied by a library.
DTYPES = {
    "bfloat16": (torch.bfloat16, "half"),
    "float16": (torch.float16, "half"),
    "float32": (torch.float32, "given"),
    "tf32": (torch.float32, "tf32"),
}
HALF_DTYPES = ("bfloat16", "float16")
LOSSES: dict[str, Callable[[str, float], Spec]] = {
    "clip": specs.clip,
    "info_nce": specs.info_nce,
    "siglip": lambda id_rule, _: specs.siglip(id_rule),
    "nt_xent": specs.nt_xent,
    "supcon": lambda _, smoothing: specs.supcon(smoothing),
}


@dataclass(frozen=True)
class Variant:
    """One thing that the backend is asked to do with a tile.

    Attributes:
        action: "forward", "forward keep" (logits are kept for the backward), "one pass" (a sigmoid loss computes its
            dlogits in the forward), "backward", "backward kept" (from logits that were kept) or "scores".
        targets: "consecutive", "explicit" (indices, as `positives`) or "none" (none lies in this tile).
    """

    loss: str
    action: str
    id_rule: str = "ignore"
    smoothing: float = 0.0
    stats: bool = False
    normalize: bool = False
    targets: str = "consecutive"
    diagonal: bool = False

    @property
    def name(self) -> str:
        spec = self.spec
        options = {
            f"ids {spec.id_rule}": spec.id_rule != "ignore",
            "smoothing": spec.label_smoothing > 0,
            "stats": self.stats,
            "normalize": self.normalize,
            f"{self.targets.replace('none', 'no')} targets": spec.has_targets and self.targets != "consecutive",
            "diagonal": self.diagonal,
        }
        return ", ".join([f"{self.loss} {self.action}", *(words for words, given in options.items() if given)])

    @property
    def spec(self) -> Spec:
        return LOSSES[self.loss](self.id_rule, self.smoothing)

    @property
    def multiplies(self) -> bool:
        return self.action != "backward kept"


_HEAVIEST: dict[str, Any] = {"id_rule": "positive", "smoothing": 0.1}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("clip", "forward"),
        Variant("clip", "forward", targets="none"),
        Variant("clip", "forward", id_rule="mask"),
        Variant("clip", "forward", **_HEAVIEST),
        Variant("clip", "forward", **_HEAVIEST, targets="none"),
        Variant("clip", "forward", stats=True),
        Variant("clip", "forward", normalize=True),
        Variant("clip", "forward", **_HEAVIEST, stats=True, normalize=True),
        Variant("clip", "forward keep"),
        Variant("clip", "backward"),
        Variant("clip", "backward", targets="none"),
        Variant("clip", "backward", id_rule="mask"),
        Variant("clip", "backward", **_HEAVIEST),
        Variant("clip", "backward", normalize=True),
        Variant("clip", "backward", **_HEAVIEST, normalize=True),
        Variant("clip", "backward kept"),
        Variant("clip", "backward kept", **_HEAVIEST),
        Variant("info_nce", "forward"),
        Variant("info_nce", "forward", **_HEAVIEST),
        Variant("info_nce", "forward keep"),
        Variant("info_nce", "forward keep", **_HEAVIEST, stats=True, normalize=True),
        Variant("info_nce", "backward kept"),
        Variant("info_nce", "backward kept", **_HEAVIEST),
        Variant("info_nce", "backward"),
        Variant("info_nce", "backward", **_HEAVIEST),
        Variant("info_nce", "forward", targets="explicit"),
        Variant("info_nce", "forward", **_HEAVIEST, stats=True, targets="explicit"),
        Variant("info_nce", "backward", targets="explicit"),
        Variant("siglip", "forward"),
        Variant("siglip", "forward", stats=True),
        Variant("siglip", "forward keep"),
        Variant("siglip", "one pass"),
        Variant("siglip", "one pass", targets="none"),
        Variant("siglip", "one pass", id_rule="mask"),
        Variant("siglip", "one pass", id_rule="positive", stats=True, normalize=True),
        Variant("siglip", "backward kept"),
        Variant("siglip", "backward"),
        Variant("siglip", "backward", id_rule="positive", normalize=True),
        Variant("nt_xent", "forward"),
        Variant("nt_xent", "forward", diagonal=True),
        Variant("nt_xent", "forward", id_rule="mask", diagonal=True),
        Variant("nt_xent", "forward keep", diagonal=True),
        Variant("nt_xent", "backward kept", diagonal=True),
        Variant("nt_xent", "backward"),
        Variant("nt_xent", "backward", diagonal=True),
        Variant("supcon", "forward"),
        Variant("supcon", "forward", smoothing=0.1, stats=True, normalize=True, diagonal=True),
        Variant("supcon", "backward"),
        Variant("supcon", "backward", smoothing=0.1, normalize=True, diagonal=True),
        Variant("clip", "scores"),
        Variant("clip", "scores", normalize=True),
    )
}


@dataclass(frozen=True)
class Compiled:
    """One launch, compiled.

    Attributes:
        kernel: "tile", or "merge", which follows a forward.
        width: Of the features.
        binary: Names what was compiled: launches of the same binary differ in nothing that a compiler sees.
        settings: The block's sides, subtiles, warps and stages.
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
        if multiplies and self.dtype in HALF_DTYPES:
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
    """Without the interpreter, for the processes that are started here."""
    taken = {INTERPRET: os.environ.pop(INTERPRET)} if INTERPRET in os.environ else {}
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
        for compiled in [_compiled(job, width, ("tile", "merge")[number], kernel, arguments)]
    ]


def new_backend(kind: type[Backend], variant: Variant, dtype: str, device: str = "cpu") -> Backend:
    operand_dtype, backend_kind = DTYPES[dtype]
    spec = variant.spec
    backend = kind(
        spec,
        10.0,
        -10.0 if spec.epilogue == "sigmoid" else 0.0,
        torch.float32,
        operand_dtype,
        torch.device(device),
        stats=variant.stats,
        sum_for_scale=dtype != "float32",
        sum_for_bias=spec.epilogue == "sigmoid",
        one_pass=variant.action == "one pass",
    )
    backend.kind = backend_kind
    return backend


class Recorder(Triton):
    """Writes down what it would launch."""

    launches: list[tuple[Any, dict[str, Any]]]

    def _start(self, kernel: Any, num_programs: int, arguments: dict[str, Any]) -> None:
        self.launches.append((kernel, arguments))

    def _product(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        pass


def launches(variant: Variant, target: Target, dtype: str, width: int) -> list[tuple[Any, dict[str, Any]]]:
    """Kernels and arguments, at the default settings of a target."""
    backend = new_backend(Recorder, variant, dtype)
    backend.launches, backend.architecture = [], target.name
    if backend.kind == "tf32" and precision("tf32", target.name) != "tf32":
        backend.kind = "given"
    backend.settings = defaults(target.name, backend.kind)
    tile = new_tile(variant, dtype, width)
    keeps = variant.action in ("forward keep", "one pass", "backward kept")
    kept = torch.empty(tile.shape[0] * tile.shape[1]) if keeps else None
    if variant.action == "scores":
        backend.scores(tile)
    elif variant.action.startswith("backward"):
        backend.dlogits(tile, kept)
    else:
        backend.accumulate_statistics(tile, kept)
    return backend.launches


def new_tile(variant: Variant, dtype: str, width: int) -> Tile:
    """Of the default size, in memory that nobody has written to."""
    height, side = Triton.tile_sides(width, 1)
    spec = variant.spec
    names = state_fields(spec, variant.stats)

    def block(length: int, **targets: Any) -> Block:
        return Block(
            torch.empty(length, width, dtype=DTYPES[dtype][0]),
            0,
            ids=torch.empty(length, dtype=torch.int64) if spec.id_rule != "ignore" else None,
            inverse_norm=torch.empty(length) if variant.normalize else None,
            state=State(names, torch.empty(len(names), length, dtype=torch.float64)),
            row_grad=torch.empty(length, dtype=torch.float64),
            grad=torch.empty(length, width),
            **targets,
        )

    targets: dict[str, Any] = {"target_offset": 0 if variant.targets == "consecutive" else 2 * side}
    if variant.targets == "explicit":
        targets = {"targets": torch.empty(height, dtype=torch.int64)}
    rows = block(height, **targets if spec.has_targets else {})
    return Tile(rows, rows if variant.diagonal else block(side), is_diagonal=variant.diagonal)


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
            "subtiles": "SUBTILES",
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
