"""The triton backend: a kernel per tile whose epilogue is the loss, and library products for the gradients.

Forward: a blocked matrix product reduces each block to partial statistics; a second, small kernel merges them.
Backward: the same product, whose epilogue writes the dlogits, and two library products. For NVIDIA GPUs from compute
capability 8.0 and AMD GPUs; no GPU has run it yet. Tests run it on CPU tensors under TRITON_INTERPRET=1.
"""

import contextlib
from dataclasses import astuple, replace
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
from .backend import Backend, float32_precision, shaped, supports_half_products
from .triton_settings import ELEMENTWISE, Settings, Tuning

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
        self._kind = self._precision if self.operand_dtype == torch.float32 else "half"
        self._settings: Settings | None = None
        self._keeps_dlogits = self.one_pass and self.spec.epilogue == "sigmoid"
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
            reasons.append("this torch cannot multiply bf16/fp16 into float32 here. Use a newer one, or float32 inputs")
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
        """Dlogits, which a sigmoid loss may write where logits are kept, and partial statistics by blocks of 64."""
        partials = 7 * (rows * -(-columns // 64) + columns * -(-rows // 64))
        dlogits = element if spec.epilogue == "sigmoid" else operand
        return rows * _aligned(columns) * dlogits + partials * torch.float32.itemsize

    # ---- tiles

    def accumulate_statistics(self, tile: Tile, kept: Tensor | None = None) -> None:
        dots = dlogits = None
        if kept is not None and self._keeps_dlogits:
            dlogits = self._dlogits_memory(tile, kept)
        elif kept is not None:
            dots = shaped(kept, tile.shape)
        settings = self._settings_for(tile, search=True)
        rows, columns = self._partials(tile, settings)
        self._run(tile, settings, partials=(rows, columns), dots=dots, dlogits=dlogits, gradients=dlogits is not None)
        self._merge(tile, tile.rows, rows)
        if columns is not None:
            self._merge(tile, tile.columns, columns)

    def accumulate_gradients(self, tile: Tile, kept: Tensor | None = None) -> None:
        dlogits = self.dlogits(tile, kept)
        if dlogits is not None:
            self._multiply_dlogits(tile, dlogits)

    def dlogits(self, tile: Tile, kept: Tensor | None = None) -> Tensor | None:
        """dS * dlogits_scale in the operands' dtype; None where no features need it. Adds to `scalar_sums`."""
        if kept is not None and self._keeps_dlogits:
            return self._dlogits_memory(tile, kept)
        needed = tile.rows.grad is not None or tile.columns.grad is not None
        dlogits = self._dlogits_memory(tile) if needed else None
        dots = None if kept is None else shaped(kept, tile.shape)
        settings = self._settings_for(tile) if kept is None else ELEMENTWISE
        self._run(tile, settings, gradients=True, dlogits=dlogits, dots=dots, dots_given=kept is not None)
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

    def _partials(self, tile: Tile, settings: Settings) -> tuple[Tensor, Tensor | None]:
        """Memory for partial statistics, by slot and block: of the rows and, where they have any, of the columns."""
        slots = 7 if self.spec.label_smoothing else 5 if self.stats else 4  # as the kernels number them
        both = self.stats if self.spec.epilogue == "sigmoid" else tile.has_column_statistics(self.spec)
        down, across = _num_blocks(tile, settings)
        rows = self._buffer("row partials", (slots * across, len(tile.rows)), torch.float32).view(slots, across, -1)
        if not both:
            return rows, None
        columns = self._buffer("column partials", (slots * down, len(tile.columns)), torch.float32)
        return rows, columns.view(slots, down, -1)

    def _id_rule(self, tile: Tile) -> str:
        """What ids mean in this tile."""
        return "ignore" if tile.rows.ids is None or tile.columns.ids is None else self.spec.id_rule

    # ---- launches

    def _run(
        self,
        tile: Tile,
        settings: Settings,
        *,
        partials: tuple[Tensor | None, Tensor | None] = (None, None),
        gradients: bool = False,
        dlogits: Tensor | None = None,
        dots: Tensor | None = None,
        dots_given: bool = False,
        add_sums: bool = True,
    ) -> None:
        """The tile kernel. `dots` are read where they are given, else written."""
        from .triton_kernels import tile_kernel

        rows, columns, spec, id_rule = tile.rows, tile.columns, self.spec, self._id_rule(tile)
        down, across = _num_blocks(tile, settings)
        softmax = gradients and spec.epilogue == "softmax"
        sums_needed = gradients and (self.sum_for_scale or self.sum_for_bias)
        sums = self._buffer("sums", (down * across, 2), torch.float32) if sums_needed else None
        arguments = {
            **self._side("x", rows, not dots_given, id_rule != "ignore", softmax, gradients),
            **self._side("y", columns, not dots_given, id_rule != "ignore", *[softmax and spec.two_sided] * 2),
            "targets": rows.targets,
            "x_partials": partials[0],
            "y_partials": partials[1],
            "dlogits": dlogits,
            "sums": sums,
            "dots": dots,
            "num_rows": len(rows),
            "num_columns": len(columns),
            "width": rows.features.shape[1],
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
            "EVEN_WIDTH": rows.features.shape[1] % settings.width == 0,
            "PRECISION": self._precision,
            "UPCAST": self._upcast,
            **dict(zip(triton_settings.ARGUMENTS, astuple(settings), strict=True)),
        }
        plain = id_rule == "ignore" and not (spec.label_smoothing or self.stats or rows.inverse_norm is not None)
        roomy = not plain or self.operand_dtype == torch.float32
        self._launch(tile_kernel, down * across, arguments, roomy)
        if sums is not None and add_sums:
            # The dlogits of a diagonal tile serve both triangles, and both are in it.
            self.scalar_sums.add_(sums.sum(0, dtype=torch.float64), alpha=0.5 if tile.is_diagonal else 1.0)

    def _side(self, name: str, block: Block, multiply: bool, ids: bool, state: bool, grad: bool) -> dict[str, Any]:
        """The arguments of the tile kernel that rows (x) and columns (y) both have."""
        x, norm = None, None
        if multiply and block.features.dtype == self.operand_dtype:
            x, norm = block.features, block.inverse_norm  # normalised after the product, in float32
        elif multiply:
            x = self._operand({"x": "rows", "y": "columns"}[name], block)
        arguments = {
            "": x,
            "_norm": norm,
            "_ids": block.ids if ids else None,
            "_state": block.state.table if state else None,
            "_row_grad": block.row_grad if grad else None,
            "_row_stride": 0 if x is None else x.stride(0),
            "_feature_stride": 0 if x is None else x.stride(1),
            "_state_stride": block.state.table.stride(0) if state else 0,
        }
        return {name + suffix: value for suffix, value in arguments.items()}

    def _merge(self, tile: Tile, block: Block, partials: Tensor) -> None:
        """Add the partial statistics of the rows (or columns) of a tile to their state."""
        from .triton_kernels import merge_kernel

        positives = _has_targets(tile) or self._id_rule(tile) == "positive"
        absent: tuple[str, ...] = () if positives else ("positive_sum", "positive_count", "top_positive")
        if block is tile.columns and self.spec.epilogue == "sigmoid":
            absent += ("softplus_sum", "positive_sum", "positive_count")
        arguments = {
            "partials": partials,
            "state": block.state.table,
            "length": len(block),
            "num_blocks": partials.shape[1],
            "state_stride": block.state.table.stride(0),
            **_positions(block.state, MERGED, absent),
            "BLOCKS": 16,
            "ROWS": 32,
            "num_warps": 4,
        }
        self._launch(merge_kernel, -(-len(block) // 32), arguments)

    def _launch(self, kernel: Any, programs: int, arguments: dict[str, Any], roomy: bool = True) -> None:
        """`roomy`: without it, NVIDIA's assembler spills a few registers of a large kernel to fit one more block."""
        # No fused multiply-add: forward and backward must round logits alike.
        options: dict[str, Any] = {"enable_fp_fusion": False}
        if roomy and self._architecture.startswith("sm_"):
            options["maxnreg"] = 255
        with self._on_device():
            self._start(kernel, programs, arguments | options)

    def _start(self, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        """The one place where a kernel starts: the place for prepared launches."""
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
        with_state, dlogits = Tile(rows, columns, tile.is_diagonal), self._dlogits_memory(tile)

        def both_kernels() -> None:
            self._run(tile, settings, partials=self._partials(tile, settings))
            self._run(with_state, settings, gradients=True, dlogits=dlogits, add_sums=False)

        try:
            return float(do_bench(both_kernels))
        except OutOfResources:
            return None

    def _key(self, tile: Tile) -> str:
        """What kernels differ in: settings are timed for each."""
        words = [self._architecture, self._kind, str(tile.rows.features.shape[1]), self.spec.epilogue]
        words += [f"ids {self.spec.id_rule}"] if self._id_rule(tile) != "ignore" else []
        words += ["smoothing"] if self.spec.label_smoothing else []
        words += ["normalize"] if tile.rows.inverse_norm is not None else []
        words += ["stats"] if self.stats else []
        return " ".join(words)


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
