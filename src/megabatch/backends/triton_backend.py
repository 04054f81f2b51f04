"""The triton backend: tiles by one kernel whose epilogue is the loss, and the gradients by library products.

Forward: a matrix product in blocks, each reduced to partial statistics of its rows and columns, which a second, small
kernel merges. Backward: the same product, whose epilogue writes the slope G in the features' own half type, and two
library products. For NVIDIA from compute capability 8.0 and AMD; under TRITON_INTERPRET=1 also on CPU tensors, to test.
No GPU has run it yet: it was compiled for them, and its results come from the interpreter.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from ..losses.state import State
from .backend import MIB, Backend, Kept, float32_precision, supports_half_products, shaped
from .triton_settings import (
    ELEMENTWISE,
    SMALLEST_TUNED,
    Settings,
    Tuning,
    architecture,
    autotunes,
    defaults,
    precision,
    variants,
)

Launcher = Callable[[Any, tuple[int], dict[str, Any]], None]

# What the backward of a softmax knows of a row.
REMEMBERED = ("max", "sum_exp", "positive_count", "logit_count")
# Marks of what is kept of a tile: x.y, or already the slope.
PRODUCTS, SLOPE = math.nan, 1.0

_TUNING: list[Tuning] = []


def _installed() -> bool:
    return find_spec("triton") is not None


def _import_trouble() -> str:
    """Why there are no kernels; "" where there are."""
    if not _installed():
        return "triton is not installed. Install it with pip install triton"
    try:
        import_module(".triton_kernels", __package__)
    except Exception as error:
        return f"triton cannot be imported ({type(error).__name__}: {error}). Install it anew"
    return ""


@cache
def _launch_trouble() -> str:
    """Why compiled kernels cannot be launched; "" where they can. Triton builds its launcher by a C compiler."""
    try:
        from triton.runtime import driver

        _ = driver.active.utils
    except Exception as error:
        text = " ".join(str(error).split())
        return f"triton cannot launch kernels here ({type(error).__name__}: {text}). It may want a C compiler: set CC"
    return ""


def _interprets() -> bool:
    """Whether kernels run in Triton's interpreter, which the environment decides when they are first needed."""
    if _import_trouble():
        return False
    from triton.runtime.interpreter import InterpretedFunction

    from .triton_kernels import tile_kernel

    return isinstance(tile_kernel, InterpretedFunction)


def launch(kernel: Any, grid: tuple[int], arguments: dict[str, Any]) -> None:
    kernel[grid](**arguments)


class Triton(Backend):
    """What is kept of a tile is x.y or, by a sigmoid loss whose pulls are known, the slope."""

    name = "triton"
    useful_height = 1024

    def __init__(self, *arguments: Any, launcher: Launcher = launch, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._launcher = launcher
        self._architecture = architecture(self.device)
        self._settings: Settings | None = None
        self._precision = precision(float32_precision(self.device), self._architecture)
        # The interpreter takes bfloat16 for the integers that it stores them in.
        self._widens = self.operand_dtype == torch.bfloat16 and _interprets()
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    @staticmethod
    def suits(device: torch.device) -> bool:
        return device.type == "cuda" and not _interprets()

    @staticmethod
    def reasons_against(device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = [trouble] if (trouble := _import_trouble()) else []
        if device.type == "cpu" and not _interprets():
            reasons.append(
                "the features are on the CPU. Move them to a GPU, or set TRITON_INTERPRET=1 before the first call to "
                "try the kernels here, slowly"
            )
        elif device.type not in ("cpu", "cuda"):
            reasons.append(f"the features are on {device.type}. It runs on CUDA and ROCm devices")
        elif device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
            major, minor = torch.cuda.get_device_capability(device)
            reasons.append(f"the GPU has compute capability {major}.{minor}. It needs 8.0 or newer")
        elif device.type == "cuda" and not reasons and not _interprets() and (trouble := _launch_trouble()):
            reasons.append(trouble)
        if dtype.itemsize == 2 and not supports_half_products(device):
            reasons.append("this torch cannot multiply halves into float32 here. Use a newer one, or float32 features")
        if dtype == torch.float64:
            reasons.append("the features are float64. Its kernels compute in float32")
        return reasons

    @staticmethod
    def multiplies_half(device: torch.device, normalize: bool) -> bool:
        return supports_half_products(device)

    @staticmethod
    def tile_sides(width: int, threads: int) -> tuple[int, int]:
        return 8192, 8192

    @staticmethod
    def tile_bytes(spec: Spec, rows: int, columns: int, element: int, operand: int, sum_for_scale: bool) -> int:
        """The slope, by a sigmoid loss perhaps in memory for logits, and partial statistics for every 64 rows or
        columns of both sides."""
        partials = 7 * (rows * -(-columns // 64) + columns * -(-rows // 64))
        slope = element if spec.epilogue == "sigmoid" else operand
        return rows * _padded(columns) * slope + partials * torch.float32.itemsize

    # ---- tiles

    def accumulate_statistics(self, tile: Tile, kept: Kept | None = None) -> None:
        products = slope = None
        if kept is not None and self.spec.epilogue == "sigmoid" and len(tile.rows.row_grad):
            kept.mark, slope = SLOPE, self._as_slope(kept.buffer, tile)
        elif kept is not None:
            kept.mark, products = PRODUCTS, shaped(kept.buffer, tile.shape)
        settings = self._tuned(tile)
        down, across = _blocks(tile, settings)
        of_rows, of_columns = partials = self._partials(tile, settings)
        self._run(tile, settings, fold=partials, products=products, slope=slope, push=slope is not None)
        self._merge(tile, tile.rows, of_rows, across)
        if of_columns is not None:
            self._merge(tile, tile.columns, of_columns, down)

    def accumulate_gradients(self, tile: Tile, kept: Kept | None = None) -> None:
        slope = self.slope(tile, kept)
        if slope is not None:
            self._multiply_dlogits(tile, slope)

    def slope(self, tile: Tile, kept: Kept | None = None) -> Tensor | None:
        """G times the lift, in the type that products take; None where no features need it."""
        if kept is not None and not math.isnan(kept.mark):
            return self._as_slope(kept.buffer, tile)
        needed = tile.rows.grad is not None or tile.columns.grad is not None
        slope = self._new_slope(tile) if needed else None
        products = None if kept is None else shaped(kept.buffer, tile.shape)
        settings = self._settings_for(tile) if kept is None else ELEMENTWISE
        self._run(tile, settings, push=True, products=products, given=kept is not None, slope=slope)
        return slope

    def scores(self, tile: Tile) -> Tensor:
        out = self._buffer("scores", tile.shape, torch.float32)
        self._run(tile, self._settings_for(tile), products=out)
        if self.scale != 1:
            out.mul_(self.scale)
        return out.add_(self.bias) if self.bias else out

    def slope_sums(self) -> tuple[float, float]:
        slopes, products = self._sums.tolist()
        return products, slopes

    def _new_slope(self, tile: Tile) -> Tensor:
        rows, columns = tile.shape
        return self._as_slope(self._buffer("slope", (rows, _padded(columns)), self.operand_dtype), tile)

    def _as_slope(self, buffer: Tensor, tile: Tile) -> Tensor:
        """Memory as a slope, whose rows begin where aligned stores can, if there is room for that."""
        memory, (rows, columns) = buffer.view(-1).view(self.operand_dtype), tile.shape
        stride = _padded(columns) if rows * _padded(columns) <= memory.numel() else columns
        return shaped(memory, (rows, stride))[:, :columns]

    def _partials(self, tile: Tile, settings: Settings) -> tuple[Tensor, Tensor | None]:
        """Memory for what blocks leave of the tile's rows and, where they are folded too, of its columns."""
        down, across = _blocks(tile, settings)
        slots = 4 + 2 * bool(self.spec.label_smoothing) + self.stats
        both = self.stats if self.spec.epilogue == "sigmoid" else tile.has_column_statistics(self.spec)
        of_rows = self._buffer("row partials", (slots * across, len(tile.rows)), torch.float32)
        if not both:
            return of_rows, None
        return of_rows, self._buffer("column partials", (slots * down, len(tile.columns)), torch.float32)

    def _has_ids(self, tile: Tile) -> bool:
        return self.spec.id_rule != "ignore" and tile.rows.ids is not None and tile.columns.ids is not None

    # ---- launches

    def _run(
        self,
        tile: Tile,
        settings: Settings,
        fold: tuple[Tensor, Tensor | None] | None = None,
        push: bool = False,
        products: Tensor | None = None,
        given: bool = False,
        slope: Tensor | None = None,
        sums: bool = True,
    ) -> None:
        """The tile kernel. `products` are read where they are `given`, else written; `sums` of slopes are added up."""
        from .triton_kernels import tile_kernel

        rows, columns, spec = tile.rows, tile.columns, self.spec
        (x, x_norm), (y, y_norm) = (
            (block.features, None) if given else self._factors(side, block)
            for side, block in (("rows", rows), ("columns", columns))
        )
        down, across = _blocks(tile, settings)
        sums_it = push and (self.sums_slopes or spec.epilogue == "sigmoid")
        partial_sums = self._buffer("sums", (down * across, 2), torch.float32) if sums_it else None
        softmax_push = push and spec.epilogue == "softmax"
        both_push = softmax_push and spec.two_sided
        x_state, y_state = rows.state.table, columns.state.table
        ids = self._has_ids(tile)
        arguments = {
            "x": None if given else x,
            "y": None if given else y,
            "x_norm": x_norm,
            "y_norm": y_norm,
            "x_ids": rows.ids if ids else None,
            "y_ids": columns.ids if ids else None,
            "target": rows.target if tile.may_hold_targets else None,
            "x_state": x_state if softmax_push else None,
            "y_state": y_state if both_push else None,
            "x_pull": rows.row_grad if push else None,
            "y_pull": columns.row_grad if both_push else None,
            "products": products,
            "x_partials": fold[0] if fold else None,
            "y_partials": fold[1] if fold else None,
            "slope": slope,
            "sums": partial_sums,
            "num_rows": len(rows),
            "num_columns": len(columns),
            "width": x.shape[1],
            "x_stride": x.stride(0),
            "x_step": x.stride(1),
            "y_stride": y.stride(0),
            "y_step": y.stride(1),
            "x_state_stride": x_state.stride(0) if softmax_push else 0,
            "y_state_stride": y_state.stride(0) if both_push else 0,
            "products_stride": len(columns),
            "slope_stride": 0 if slope is None else slope.stride(0),
            "column_start": columns.offset,
            "scale": float(self.scale),
            "bias": float(self.bias),
            "smoothing": float(spec.label_smoothing),
            "LINK": spec.epilogue,
            "SAME": spec.id_rule,
            "IDS": ids,
            "TARGETS": tile.may_hold_targets,
            "DIAGONAL": tile.is_diagonal,
            "SMOOTHING": bool(spec.label_smoothing),
            "STATS": self.stats and fold is not None,
            "GIVEN": given,
            "KEEP": products is not None and not given,
            "FOLD": fold is not None,
            "PUSH": push,
            "SUM": sums_it,
            "BOTH": both_push or (fold is not None and fold[1] is not None),
            **{f"{name.upper()}_AT": _position(rows, name) if softmax_push else -1 for name in REMEMBERED},
            "LIFT": self.dlogits_scale if slope is not None else 0.0,
            "EVEN_WIDTH": x.shape[1] % settings.width == 0,
            "PRECISION": self._precision,
            "WIDEN": self._widens,
            "BLOCK_ROWS": settings.rows,
            "BLOCK_COLUMNS": settings.columns,
            "BLOCK_WIDTH": settings.width,
            "BAND": settings.band,
            "PARTS": settings.parts,
            "num_warps": settings.warps,
            "num_stages": settings.stages,
        }
        plain = (
            not (ids or spec.label_smoothing or self.stats or x_norm is not None)
            and self.operand_dtype != torch.float32
        )
        self._launch(tile_kernel, down * across, arguments, roomy=not plain)
        if partial_sums is not None and sums:
            # A diagonal tile's slope is that of both halves of the plane, and both halves are in it.
            self._sums.add_(partial_sums.sum(0, dtype=torch.float64), alpha=0.5 if tile.is_diagonal else 1.0)

    def _factors(self, side: str, block: Block) -> tuple[Tensor, Tensor | None]:
        """What is multiplied, and what every row's products are multiplied by then: halves are normalised afterwards,
        in float32."""
        if block.features.dtype == self.operand_dtype:
            return block.features, block.inverse_norm
        return self._operand(side, block), None

    def _merge(self, tile: Tile, block: Block, partials: Tensor, num_blocks: int) -> None:
        from .triton_kernels import merge_kernel

        names = ("shift", "total", "positive", "count", "everything", "valid", "best", "best_positive")
        at = {name: _position(block, name) for name in names}
        if block is tile.columns and self.spec.epilogue == "sigmoid":  # they have a best, and nothing else
            at |= {"total": -1, "positive": -1, "count": -1}
        if not (tile.may_hold_targets or (self._has_ids(tile) and self.spec.id_rule == "positive")):
            at |= {"positive": -1, "count": -1, "best_positive": -1}
        arguments = {
            "partials": partials,
            "state": block.state.table,
            "length": len(block),
            "num_blocks": num_blocks,
            "state_stride": block.state.table.stride(0),
            "LINK": self.spec.epilogue,
            "BEST_SLOT": 4 + 2 * bool(self.spec.label_smoothing),
            **{f"{name.upper()}_AT": position for name, position in at.items()},
            "BLOCKS": 16,
            "BLOCK": 32,
            "num_warps": 4,
        }
        self._launch(merge_kernel, -(-len(block) // 32), arguments)

    def _launch(self, kernel: Any, programs: int, arguments: dict[str, Any], roomy: bool = True) -> None:
        """`roomy`: registers before occupancy. Left to itself, NVIDIA's assembler spills a few to fit in another block,
        which does no harm where there are enough of them."""
        # Products and sums are rounded one by one: forward and backward must see the same logits.
        options: dict[str, Any] = {"enable_fp_fusion": False}
        if roomy and self._architecture.startswith("sm_"):
            options["maxnreg"] = 255
        with self._on_device():
            self._launcher(kernel, (programs,), arguments | options)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    # ---- settings

    def _settings_for(self, tile: Tile) -> Settings:
        if self._settings is None:
            tuned = _tuning().known(self._key(tile)) if autotunes() else None
            self._settings = tuned or defaults(self._architecture, self._kind)
        return self._settings

    def _tuned(self, tile: Tile) -> Settings:
        """The same, after a search if that is asked for and nobody has made it: a forward comes before its backward."""
        key = self._key(tile)
        if self._settings is None and autotunes() and min(tile.shape) >= SMALLEST_TUNED and not _tuning().known(key):
            candidates = variants(defaults(self._architecture, self._kind))
            with self._on_device():
                _tuning().search(key, candidates, lambda settings: self._milliseconds(tile, settings))
        return self._settings_for(tile)

    def _milliseconds(self, tile: Tile, settings: Settings) -> float | None:
        """Of a fold and a push; None where the device has not the registers or the shared memory."""
        from triton.runtime.errors import OutOfResources
        from triton.testing import do_bench

        # Nothing is known of the rows yet: numbers that cost the same.
        rows, columns = (
            replace(side, state=State(side.state.names, ones := torch.ones_like(side.state.table)), row_grad=ones[0])
            for side in (tile.rows, tile.columns)
        )
        pulled = Tile(rows, columns, tile.is_diagonal)
        slope = self._new_slope(tile)

        def fold_and_push() -> None:
            self._run(tile, settings, fold=self._partials(tile, settings))
            self._run(pulled, settings, push=True, slope=slope, sums=False)

        try:
            taken: float = do_bench(fold_and_push)
        except OutOfResources:
            return None
        return taken

    @property
    def _kind(self) -> str:
        return self._precision if self.operand_dtype == torch.float32 else "half"

    def _key(self, tile: Tile) -> str:
        """What kernels differ in: their settings serve no others."""
        spec, width = self.spec, tile.rows.features.shape[1]
        options = {
            f"ids {spec.id_rule}": self._has_ids(tile),
            "smoothing": spec.label_smoothing > 0,
            "normalize": tile.rows.inverse_norm is not None,
            "stats": self.stats,
        }
        return " ".join(
            [self._architecture, self._kind, str(width), spec.epilogue, *(n for n, has in options.items() if has)]
        )


def _tuning() -> Tuning:
    if not _TUNING:
        _TUNING.append(Tuning())
    return _TUNING[0]


def _blocks(tile: Tile, settings: Settings) -> tuple[int, int]:
    return -(-len(tile.rows) // settings.rows), -(-len(tile.columns) // settings.columns)


def _padded(columns: int) -> int:
    return -(-columns // 16) * 16


def _position(block: Block, name: str) -> int:
    """Of a field among those of a state; -1 where there is none."""
    names = block.state.names
    return names.index(name) if name in names else -1
