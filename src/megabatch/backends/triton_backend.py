"""The triton backend: a kernel per tile whose epilogue is the loss, and library products for the gradients.

Forward: a blocked matrix product reduces each block to partial statistics of its rows and columns; a second, small
kernel merges them. Backward: the same product, whose epilogue writes the dlogits in bf16, fp16 or float32, and two
library products. Runs on NVIDIA GPUs from compute capability 8.0 and on AMD GPUs; for tests also on CPU tensors under
TRITON_INTERPRET=1. It has not run on a GPU yet: it was compiled for them, and tested in the interpreter.
"""

import contextlib
import math
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
from . import triton_settings
from .backend import Backend, Kept, float32_precision, shaped, supports_half_products
from .triton_settings import ELEMENTWISE, Settings, Tuning

Partials = tuple[Tensor | None, Tensor | None]  # of the rows and, where they have statistics too, of the columns

DOTS, DLOGITS = math.nan, 1.0  # marks: what is kept of a tile
SAVED = ("max", "sum_exp", "positive_count", "logit_count")
MERGED = (*SAVED, "softplus_sum", "positive_sum", "logit_sum", "top", "top_positive")


def _import_trouble() -> str:
    """Why there are no kernels; "" where there are."""
    if find_spec("triton") is None:
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


@cache
def _tuning() -> Tuning:
    return Tuning()


class Triton(Backend):
    """What is kept of a tile is its dot products x.y or, by a sigmoid loss in one pass, its dlogits."""

    name = "triton"
    useful_height = 1024

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._architecture = triton_settings.architecture(self.device)
        self._precision = triton_settings.precision(float32_precision(self.device), self._architecture)
        self._settings: Settings | None = None
        # The interpreter stores bfloat16 as integers and would multiply those.
        self._upcast = self.operand_dtype == torch.bfloat16 and _interprets()

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
            reasons.append(
                "this torch cannot multiply bf16/fp16 into float32 here. Use a newer one, or float32 features"
            )
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
        """The dlogits, which a sigmoid loss may write to memory for logits, and partial statistics of both sides for
        blocks of 64 or more."""
        partials = 7 * (rows * -(-columns // 64) + columns * -(-rows // 64))
        dlogits = element if spec.epilogue == "sigmoid" else operand
        return rows * _aligned(columns) * dlogits + partials * torch.float32.itemsize

    # ---- tiles

    def accumulate_statistics(self, tile: Tile, kept: Kept | None = None) -> None:
        dots = dlogits = None
        if kept is not None and self.spec.epilogue == "sigmoid" and len(tile.rows.row_grad):
            kept.mark, dlogits = DLOGITS, self._dlogits_memory(tile, kept.buffer)
        elif kept is not None:
            kept.mark, dots = DOTS, shaped(kept.buffer, tile.shape)
        settings = self._settings_for(tile, search=True)
        partials = self._partials(tile, settings)
        self._run(tile, settings, partials=partials, dots=dots, dlogits=dlogits, gradients=dlogits is not None)
        down, across = _num_blocks(tile, settings)
        self._merge(tile, tile.rows, partials[0], across)
        self._merge(tile, tile.columns, partials[1], down)

    def accumulate_gradients(self, tile: Tile, kept: Kept | None = None) -> None:
        dlogits = self.dlogits(tile, kept)
        if dlogits is not None:
            self._multiply_dlogits(tile, dlogits)

    def dlogits(self, tile: Tile, kept: Kept | None = None) -> Tensor | None:
        """dS * dlogits_scale in the operands' dtype; None where no features need it. Adds to `scalar_sums`."""
        if kept is not None and kept.mark == DLOGITS:
            return self._dlogits_memory(tile, kept.buffer)
        needed = tile.rows.grad is not None or tile.columns.grad is not None
        dlogits = self._dlogits_memory(tile) if needed else None
        if kept is None:
            self._run(tile, self._settings_for(tile), gradients=True, dlogits=dlogits)
        else:
            dots = shaped(kept.buffer, tile.shape)
            self._run(tile, ELEMENTWISE, gradients=True, dlogits=dlogits, dots=dots, dots_given=True)
        return dlogits

    def scores(self, tile: Tile) -> Tensor:
        out = self._buffer("scores", tile.shape, torch.float32)
        self._run(tile, self._settings_for(tile), dots=out)
        if self.scale != 1:
            out.mul_(self.scale)
        return out.add_(self.bias) if self.bias else out

    def _dlogits_memory(self, tile: Tile, memory: Tensor | None = None) -> Tensor:
        """Of the shape of a tile, with rows aligned for vector stores if there is room for that."""
        rows, columns = tile.shape
        if memory is None:
            memory = self._buffer("dlogits", (rows, _aligned(columns)), self.operand_dtype)
        memory = memory.view(-1).view(self.operand_dtype)
        stride = _aligned(columns) if rows * _aligned(columns) <= memory.numel() else columns
        return shaped(memory, (rows, stride))[:, :columns]

    def _partials(self, tile: Tile, settings: Settings) -> Partials:
        down, across = _num_blocks(tile, settings)
        slots = 7 if self.spec.label_smoothing else 5 if self.stats else 4  # as the kernels number them
        both = self.stats if self.spec.epilogue == "sigmoid" else tile.has_column_statistics(self.spec)
        rows = self._buffer("row partials", (slots * across, len(tile.rows)), torch.float32)
        columns = self._buffer("column partials", (slots * down, len(tile.columns)), torch.float32) if both else None
        return rows, columns

    def _id_rule(self, tile: Tile) -> str:
        """What ids mean in this tile."""
        has_ids = tile.rows.ids is not None and tile.columns.ids is not None
        return self.spec.id_rule if has_ids else "ignore"

    # ---- launches

    def _run(
        self,
        tile: Tile,
        settings: Settings,
        *,
        partials: Partials = (None, None),
        gradients: bool = False,
        dlogits: Tensor | None = None,
        dots: Tensor | None = None,
        dots_given: bool = False,
        add_sums: bool = True,
    ) -> None:
        """The tile kernel. `dots` are read where they are given, else written."""
        from .triton_kernels import tile_kernel

        rows, columns, spec = tile.rows, tile.columns, self.spec
        x, x_norm = (None, None) if dots_given else self._operand_and_norm("rows", rows)
        y, y_norm = (None, None) if dots_given else self._operand_and_norm("columns", columns)
        x_strides, y_strides = ((0, 0) if side is None else side.stride() for side in (x, y))
        down, across = _num_blocks(tile, settings)
        width = rows.features.shape[1]
        id_rule = self._id_rule(tile)
        softmax = gradients and spec.epilogue == "softmax"
        two_sided = softmax and spec.two_sided
        sums = None
        if gradients and (self.sum_for_scale or self.sum_for_bias):
            sums = self._buffer("sums", (down * across, 2), torch.float32)
        arguments = {
            "x": x,
            "y": y,
            "x_norm": x_norm,
            "y_norm": y_norm,
            "x_ids": rows.ids if id_rule != "ignore" else None,
            "y_ids": columns.ids if id_rule != "ignore" else None,
            "targets": rows.targets,
            "x_state": rows.state.table if softmax else None,
            "y_state": columns.state.table if two_sided else None,
            "x_row_grad": rows.row_grad if gradients else None,
            "y_row_grad": columns.row_grad if two_sided else None,
            "x_partials": partials[0],
            "y_partials": partials[1],
            "dlogits": dlogits,
            "sums": sums,
            "dots": dots,
            "num_rows": len(rows),
            "num_columns": len(columns),
            "width": width,
            "x_row_stride": x_strides[0],
            "x_feature_stride": x_strides[1],
            "y_row_stride": y_strides[0],
            "y_feature_stride": y_strides[1],
            "x_state_stride": rows.state.table.stride(0) if softmax else 0,
            "y_state_stride": columns.state.table.stride(0) if two_sided else 0,
            "dlogits_stride": 0 if dlogits is None else dlogits.stride(0),
            "dots_stride": len(columns),
            "target_offset": (rows.target_offset or 0) - columns.offset,
            "scale": float(self.scale),
            "bias": float(self.bias),
            "label_smoothing": float(spec.label_smoothing),
            "EPILOGUE": spec.epilogue,
            "ID_RULE": id_rule,
            "TARGETS": _has_targets(tile),
            "DIAGONAL": tile.is_diagonal,
            "SMOOTHING": bool(spec.label_smoothing),
            "STATS": self.stats and partials[0] is not None,
            **_positions(rows.state, SAVED),
            "SUM_FOR_SCALE": gradients and self.sum_for_scale,
            "SUM_FOR_BIAS": gradients and self.sum_for_bias,
            "DLOGITS_SCALE": self.dlogits_scale,
            "EVEN_WIDTH": width % settings.width == 0,
            "PRECISION": self._precision,
            "UPCAST": self._upcast,
            "BLOCK_ROWS": settings.rows,
            "BLOCK_COLUMNS": settings.columns,
            "BLOCK_WIDTH": settings.width,
            "GROUP_ROWS": settings.group_rows,
            "SUBTILES": settings.subtiles,
            "num_warps": settings.warps,
            "num_stages": settings.stages,
        }
        plain = not (id_rule != "ignore" or spec.label_smoothing or self.stats or x_norm is not None)
        roomy = not plain or self.operand_dtype == torch.float32
        self._launch(tile_kernel, down * across, arguments, roomy)
        if sums is not None and add_sums:
            # The dlogits of a diagonal tile serve both triangles, and both are in it.
            self.scalar_sums.add_(sums.sum(0, dtype=torch.float64), alpha=0.5 if tile.is_diagonal else 1.0)

    def _operand_and_norm(self, side: str, block: Block) -> tuple[Tensor, Tensor | None]:
        """What is multiplied, and what each row's dot products are multiplied by afterwards, in float32."""
        if block.features.dtype == self.operand_dtype:
            return block.features, block.inverse_norm
        return self._operand(side, block), None

    def _merge(self, tile: Tile, block: Block, partials: Tensor | None, num_blocks: int) -> None:
        """Add the partial statistics of the rows (or columns) of a tile to their state."""
        from .triton_kernels import merge_kernel

        if partials is None:
            return
        absent: tuple[str, ...] = ()
        if not (_has_targets(tile) or self._id_rule(tile) == "positive"):
            absent = ("positive_sum", "positive_count", "top_positive")
        if block is tile.columns and self.spec.epilogue == "sigmoid":
            absent += ("softplus_sum", "positive_sum", "positive_count")
        arguments = {
            "partials": partials,
            "state": block.state.table,
            "length": len(block),
            "num_blocks": num_blocks,
            "state_stride": block.state.table.stride(0),
            **_positions(block.state, MERGED, absent),
            "BLOCKS": 16,
            "ROWS": 32,
            "num_warps": 4,
        }
        self._launch(merge_kernel, -(-len(block) // 32), arguments)
        block.state.shared_max = None  # the device knows, the host does not

    def _launch(self, kernel: Any, programs: int, arguments: dict[str, Any], roomy: bool = True) -> None:
        """`roomy`: prefer registers to occupancy. NVIDIA's assembler may spill a few registers to fit one more block,
        which the kernels that need many registers do not profit from."""
        # No fused multiply-add: forward and backward must round logits alike.
        options: dict[str, Any] = {"enable_fp_fusion": False}
        if roomy and self._architecture.startswith("sm_"):
            options["maxnreg"] = 255
        with self._on_device():
            self._start(kernel, programs, arguments | options)

    def _start(self, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        """The one place where a kernel starts: prepared launches go here, and tests look here."""
        kernel[(programs,)](**arguments)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    # ---- settings

    def _settings_for(self, tile: Tile, search: bool = False) -> Settings:
        """The same in forward and backward. `search`: where autotuning is on, time those that are not known yet."""
        if self._settings is None:
            found, standard = None, triton_settings.defaults(self._architecture, self._kind)
            if triton_settings.autotunes():
                key = self._key(tile)
                found = _tuning().known(key)
                if search and found is None and min(tile.shape) >= triton_settings.SMALLEST_TUNED:
                    candidates = triton_settings.variants(standard)
                    with self._on_device():
                        found = _tuning().search(key, candidates, lambda settings: self._milliseconds(tile, settings))
            self._settings = found or standard
        return self._settings

    def _milliseconds(self, tile: Tile, settings: Settings) -> float | None:
        """Of statistics and dlogits; None where the device lacks the registers or the shared memory."""
        from triton.runtime.errors import OutOfResources
        from triton.testing import do_bench

        # The state is not known yet. Ones cost the same.
        rows, columns = (
            replace(side, state=State(side.state.names, ones := torch.ones_like(side.state.table)), row_grad=ones[0])
            for side in (tile.rows, tile.columns)
        )
        with_state = Tile(rows, columns, tile.is_diagonal)
        dlogits = self._dlogits_memory(tile)

        def both_kernels() -> None:
            self._run(tile, settings, partials=self._partials(tile, settings))
            self._run(with_state, settings, gradients=True, dlogits=dlogits, add_sums=False)

        try:
            taken: float = do_bench(both_kernels)
        except OutOfResources:
            return None
        return taken

    @property
    def _kind(self) -> str:
        return self._precision if self.operand_dtype == torch.float32 else "half"

    def _key(self, tile: Tile) -> str:
        """What kernels differ in: settings are timed for each."""
        spec, width = self.spec, tile.rows.features.shape[1]
        options = {
            f"ids {spec.id_rule}": self._id_rule(tile) != "ignore",
            "smoothing": spec.label_smoothing > 0,
            "normalize": tile.rows.inverse_norm is not None,
            "stats": self.stats,
        }
        words = [self._architecture, self._kind, str(width), spec.epilogue]
        return " ".join([*words, *(name for name, given in options.items() if given)])


def _num_blocks(tile: Tile, settings: Settings) -> tuple[int, int]:
    return -(-len(tile.rows) // settings.rows), -(-len(tile.columns) // settings.columns)


def _has_targets(tile: Tile) -> bool:
    """Whether targets may lie in this tile. Explicit ones are only known to the device."""
    return tile.rows.targets is not None or tile.targets is not None


def _aligned(columns: int) -> int:
    return -(-columns // 16) * 16


def _positions(state: State, names: tuple[str, ...], absent: tuple[str, ...] = ()) -> dict[str, int]:
    """Of fields in a state, as kernels take them; -1 where there is none."""
    at = {name: index for index, name in enumerate(state.names) if name not in absent}
    return {f"{name.upper()}_AT": at.get(name, -1) for name in names}
