"""The triton backend: a kernel per tile whose epilogue is the loss, and library products for the gradients.

Forward: a blocked matrix product reduces each block to partial statistics; a second, small kernel merges them.
Backward: the same product, whose epilogue writes the dlogits, and two library products. For NVIDIA GPUs from compute
capability 8.0 and AMD GPUs; no GPU has run it yet. Tests run it on CPU tensors under TRITON_INTERPRET=1.
"""

import math
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from . import triton_settings
from .backend import Backend, float32_precision, supports_half_products
from .triton_settings import ELEMENTWISE, Settings
from .workspace import shaped

NUM_SLOTS = 7  # for partial statistics of a row or a column of one block, as the kernels number them


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
    return not _import_trouble() and bool(import_module(".triton_kernels", __package__).INTERPRETED)


class Triton(Backend):
    """What is kept of a tile is its dot products x.y or, by a sigmoid loss in one pass, its dlogits."""

    name = "triton"
    useful_height = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.architecture = triton_settings.architecture(self.device)
        self._precision = triton_settings.precision(float32_precision(self.device), self.architecture)
        self.kind = self._precision if self.operand_dtype == torch.float32 else "half"
        self.settings: Settings | None = None
        self._keeps_dlogits = self.one_pass and self.spec.epilogue == "sigmoid"

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
        partials = NUM_SLOTS * (rows * -(-columns // 64) + columns * -(-rows // 64))
        dlogits = element if spec.epilogue == "sigmoid" else operand
        return rows * _aligned(columns) * dlogits + partials * torch.float32.itemsize

    # ---- tiles

    def accumulate_statistics(self, tile: Tile, kept: Tensor | None = None) -> None:
        down, across = _num_blocks(tile, self.settings_for(tile))
        maxima, smoothing = self.spec.epilogue == "softmax" or self.stats, self.spec.label_smoothing > 0
        positives = maxima and (_has_targets(tile) or self._id_rule(tile) == "positive")
        slots = maxima, True, positives, positives, smoothing, smoothing, positives and self.stats
        partials = {"x": self._buffer("row partials", (NUM_SLOTS * across, len(tile.rows)), torch.float32)}
        if self.stats if self.spec.epilogue == "sigmoid" else tile.has_column_statistics(self.spec):
            partials["y"] = self._buffer("column partials", (NUM_SLOTS * down, len(tile.columns)), torch.float32)
        outputs: dict[str, Any] = {f"{side}_partials": memory for side, memory in partials.items()}
        if kept is not None and self._keeps_dlogits:
            outputs["dlogits"] = self._dlogits_memory(tile, kept)
        elif kept is not None:
            outputs["dots"] = shaped(kept, tile.shape)
        self._run(tile, gradients="dlogits" in outputs, SLOTS=slots, **outputs)
        for side, memory in partials.items():
            self._merge(tile, side, memory, positives)

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
        self._run(tile, gradients=True, dlogits=dlogits, dots=dots)
        return dlogits

    def scores(self, tile: Tile) -> Tensor:
        out = self._buffer("scores", tile.shape, torch.float32)
        self._run(tile, dots=out)
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

    # ---- launches

    def _run(self, tile: Tile, gradients: bool = False, **outputs: Any) -> None:
        """The tile kernel. Dots among the outputs of gradients are an input: what those are computed from."""
        from .triton_kernels import tile_kernel

        rows, columns, spec = tile.rows, tile.columns, self.spec
        dlogits, multiplies = outputs.get("dlogits"), outputs.get("dots") is None or not gradients
        settings = self.settings_for(tile) if multiplies else ELEMENTWISE
        num_programs, sums = math.prod(_num_blocks(tile, settings)), None
        if gradients and (self.sum_for_scale or self.sum_for_bias):
            sums = self._buffer("sums", (num_programs, 2), torch.float32)
        arguments = {
            "num_rows": len(rows),
            "num_columns": len(columns),
            "scale": float(self.scale),
            "bias": float(self.bias),
            "EPILOGUE": spec.epilogue,
            "ID_RULE": self._id_rule(tile),
            "DIAGONAL": tile.is_diagonal,
            "DLOGITS_SCALE": self.dlogits_scale,
            "EVEN_WIDTH": rows.features.shape[1] % settings.width == 0,
            "PRECISION": self._precision,
            **settings.arguments(),
            **(self._features(tile) if multiplies else {}),
            "x_ids": rows.ids,
            "y_ids": columns.ids,
            "targets": rows.targets,
            "target_offset": (rows.target_offset or 0) - columns.offset if _has_targets(tile) else None,
            "label_smoothing": spec.label_smoothing or None,
            **(self._row_terms("x", rows) if gradients else {}),
            **(self._row_terms("y", columns) if gradients and spec.two_sided else {}),
            **outputs,
            "dlogits_stride": None if dlogits is None else dlogits.stride(0),
            "sums": sums,
        }
        options = spec.label_smoothing or self.stats or rows.inverse_norm is not None
        large = bool(options) or arguments["ID_RULE"] != "ignore" or self.operand_dtype == torch.float32
        self._launch(tile_kernel, num_programs, arguments, large)
        if sums is not None:
            # The dlogits of a diagonal tile serve both triangles, and both are in it.
            self.scalar_sums.add_(sums.sum(0, dtype=torch.float64), alpha=0.5 if tile.is_diagonal else 1.0)

    def _features(self, tile: Tile) -> dict[str, Any]:
        """What is multiplied. Normalised after the product, in float32, unless it must be copied before."""
        x, y = tile.rows.features, tile.columns.features
        norms = {"x_norm": tile.rows.inverse_norm, "y_norm": tile.columns.inverse_norm}
        if any(features.dtype != self.operand_dtype or features.stride(1) != 1 for features in (x, y)):
            x, y, norms = self._operand("rows", tile.rows), self._operand("columns", tile.columns), {}
        return {"x": x, "y": y, "width": x.shape[1], "x_stride": x.stride(0), "y_stride": y.stride(0), **norms}

    def _row_terms(self, side: str, block: Block) -> dict[str, Tensor]:
        """What the dlogits of a row (x) or a column (y) depend on."""
        terms = {"label": block.row_grads}
        if self.spec.epilogue == "softmax":
            terms = {"label": block.positive_share, "max": block.state["max"], "factor": block.probability_factor}
        if self.spec.label_smoothing:
            terms["uniform"] = block.uniform_share
        return {f"{side}_{name}": term for name, term in terms.items()}

    def _id_rule(self, tile: Tile) -> str:
        """What ids mean in this tile."""
        return "ignore" if tile.rows.ids is None or tile.columns.ids is None else self.spec.id_rule

    def _merge(self, tile: Tile, side: str, partials: Tensor, positives: bool) -> None:
        """Add the partial statistics of the rows (x) or columns (y) of a tile to their state."""
        from .triton_kernels import merge_kernel

        block = tile.rows if side == "x" else tile.columns
        names = [name for name in block.state.names if positives or "positive" not in name]
        if side == "y" and self.spec.epilogue == "sigmoid":  # whose losses are those of rows
            names = [name for name in names if name.startswith("top")]
        sizes = {"length": len(block), "num_blocks": len(partials) // NUM_SLOTS, "BLOCKS": 16, "ROWS": 32}
        fields = {f"{name}_at": block.state[name] for name in names}
        self._launch(merge_kernel, -(-len(block) // 32), {"partials": partials, **sizes, **fields, "num_warps": 4})

    def _launch(self, kernel: Any, num_programs: int, arguments: dict[str, Any], large: bool = True) -> None:
        # No fused multiply-add: forward and backward must round logits alike.
        options: dict[str, Any] = {"enable_fp_fusion": False}
        if large and self.architecture.startswith("sm_"):
            # Without it, NVIDIA's assembler spills a few registers of a large kernel to fit one more block.
            options["maxnreg"] = 255
        self._start(kernel, num_programs, arguments | options)

    def _start(self, kernel: Any, num_programs: int, arguments: dict[str, Any]) -> None:
        """The one place where a kernel starts: the place for prepared launches."""
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            kernel[(num_programs,)](**arguments)

    def settings_for(self, tile: Tile) -> Settings:
        """The same for all tiles of a call, forward and backward."""
        if self.settings is None:
            found = triton_settings.tuned().get(self.tuning_key(tile))
            self.settings = found or triton_settings.defaults(self.architecture, self.kind)
        return self.settings

    def tuning_key(self, tile: Tile) -> str:
        """What kernels differ in."""
        width, normalize = tile.rows.features.shape[1], tile.rows.inverse_norm is not None
        words = [self.architecture, self.kind, f"D={width}", self.spec.epilogue, f"ids={self.spec.id_rule}"]
        words += [f"two_sided={self.spec.two_sided}", f"smoothing={self.spec.label_smoothing > 0}"]
        return " ".join([*words, f"normalize={normalize}", f"stats={self.stats}"])


def _num_blocks(tile: Tile, settings: Settings) -> tuple[int, int]:
    return -(-len(tile.rows) // settings.rows), -(-len(tile.columns) // settings.columns)


def _has_targets(tile: Tile) -> bool:
    """Whether targets may lie in this tile. Explicit ones are only known to the device."""
    return tile.rows.targets is not None or tile.targets is not None


def _aligned(columns: int) -> int:
    return -(-columns // 16) * 16
