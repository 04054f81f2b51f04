"""The triton backend: a kernel per tile whose epilogue is the loss, and library products for the gradients.

Forward: a blocked matrix product reduces each block to partial statistics; a second, small kernel merges them.
Backward: the same product, whose epilogue writes the dlogits, and two library products. Float32 in full precision, for
which NVIDIA has no matrix instruction, is multiplied by a library product too, and the kernel starts from that. The
host reads nothing from the device, and a tile is two launches and its library products.

For NVIDIA GPUs from compute capability 8.0 and AMD GPUs; no GPU has run it yet. Tests run it on CPU tensors under
TRITON_INTERPRET=1.
"""

import math
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from ..losses.state import state_fields
from . import triton_settings
from .backend import Backend, float32_precision, multiply, supports_half_products
from .triton_settings import Settings
from .workspace import shaped

NUM_SLOTS = 7  # for partial statistics of a row or a column of one block, as the kernels number them
MERGED_ROWS = 32  # by one program


@cache
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
        precision = triton_settings.precision(float32_precision(self.device), self.architecture)
        self.kind = "half" if self.operand_dtype != torch.float32 else "tf32" if precision == "tf32" else "given"
        self.settings: Settings | None = None
        self._keeps_dlogits = self.one_pass and self.spec.epilogue == "sigmoid"
        self._prepared: dict[tuple[Any, ...], tuple[Settings, dict[str, Any]]] = {}
        self._sums: list[Tensor] = []  # two per program of the tile kernel, of all tiles so far; the last ones are used

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
        """Dlogits, which a sigmoid loss may write where logits are kept and which overwrite the dot products of a
        library, if those are not read twice; by blocks of 64, partial statistics and sums."""
        down, across = -(-rows // 64), -(-columns // 64)
        small = NUM_SLOTS * (rows * across + columns * down) * torch.float32.itemsize + 2 * down * across * 8
        dlogits = element if spec.epilogue == "sigmoid" else operand
        dots = element if spec.symmetric and operand == element else 0
        return rows * _aligned(columns) * (dlogits + dots) + small

    # ---- tiles

    def accumulate_statistics(self, tile: Tile, kept: Tensor | None = None) -> None:
        of_columns = self.stats if self.spec.epilogue == "sigmoid" else tile.has_column_statistics(self.spec)
        down, across = _num_blocks(tile, self.settings_for(tile))
        partials = {"x_partials": self._buffer("row partials", (NUM_SLOTS * across, len(tile.rows)), torch.float32)}
        if of_columns:
            shape = NUM_SLOTS * down, len(tile.columns)
            partials["y_partials"] = self._buffer("column partials", shape, torch.float32)
        if kept is not None and self._keeps_dlogits:
            self._run(tile, partials, dlogits=self._matrix(tile, self.operand_dtype, kept))
        else:
            self._run(tile, partials, dots=None if kept is None else self._matrix(tile, torch.float32, kept))
        self._merge(tile, partials)

    def accumulate_gradients(self, tile: Tile, kept: Tensor | None = None) -> None:
        self._multiply_dlogits(tile, self.dlogits(tile, kept))

    def dlogits(self, tile: Tile, kept: Tensor | None = None) -> Tensor:
        """dS * dlogits_scale in the operands' dtype. Adds to `scalar_sums`."""
        if kept is not None and self._keeps_dlogits:
            return self._matrix(tile, self.operand_dtype, kept)
        dlogits = self._matrix(tile, self.operand_dtype)
        dots = None if kept is None else self._matrix(tile, torch.float32, kept)
        self._run(tile, {}, dlogits=dlogits, dots=dots)
        return dlogits

    def scores(self, tile: Tile) -> Tensor:
        out = self._buffer("scores", tile.shape, torch.float32)
        if self.kind == "given":
            multiply(self._operand("rows", tile.rows), self._operand("columns", tile.columns).T, out=out)
        else:
            self._run(tile, {}, dots=out)
        scale, bias = self._scale_and_bias
        if isinstance(scale, Tensor) or scale != 1:
            out.mul_(scale)
        return out.add_(bias) if isinstance(bias, Tensor) or bias else out

    @property
    def scalar_sums(self) -> Tensor:
        sums = [slots.sum(0) for slots in self._sums]
        return torch.stack(sums).sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=self.device)

    def _matrix(self, tile: Tile, dtype: torch.dtype, memory: Tensor | None = None, name: str = "dlogits") -> Tensor:
        """Of the shape of a tile, with rows aligned for vector access if there is room for that."""
        rows, columns = tile.shape
        if memory is None:
            memory = self._buffer(name, (rows, _aligned(columns)), dtype)
        memory = memory.view(-1).view(dtype)
        stride = _aligned(columns) if rows * _aligned(columns) <= memory.numel() else columns
        return shaped(memory, (rows, stride))[:, :columns]

    # ---- launches

    def _run(
        self, tile: Tile, partials: dict[str, Tensor], dlogits: Tensor | None = None, dots: Tensor | None = None
    ) -> None:
        """The tile kernel. Dots that come with dlogits are what those are computed from; others are written."""
        rows, columns, sums = tile.rows, tile.columns, None
        kept, multiplies = dlogits is not None and dots is not None, False
        operands: dict[str, Any] = {}
        if self.kind == "given":
            operands, x, y = self._features(tile)
            if not kept:
                if dots is None:  # those of a diagonal tile are read twice: where dlogits go, some would be too late
                    in_place = None if tile.is_diagonal else dlogits
                    dots = self._matrix(tile, torch.float32, name="dots") if in_place is None else in_place
                self._product(x, y, dots)
        elif not kept:
            operands, x, y = self._features(tile)
            operands |= {"x": x, "y": y, "width": x.shape[1], "x_stride": x.stride(0), "y_stride": y.stride(0)}
            multiplies = True
        settings, constants = self._prepare(tile, multiplies, bool(partials))
        num_programs = math.prod(_num_blocks(tile, settings))
        if dlogits is not None:
            operands |= self._row_terms("x", rows) | (self._row_terms("y", columns) if self.spec.two_sided else {})
            sums = self._sums_for(num_programs)
        arguments = {
            "num_rows": len(rows),
            "num_columns": len(columns),
            "x_ids": rows.ids,
            "y_ids": columns.ids,
            "targets": rows.targets,
            "target_offset": _target_offset(tile),
            **operands,
            **partials,
            "dots": dots,
            "dots_stride": None if dots is None else dots.stride(0),
            "dlogits": dlogits,
            "dlogits_stride": None if dlogits is None else dlogits.stride(0),
            "sums": sums,
        }
        self._start(self._kernels.tile_kernel, num_programs, constants | arguments)

    def _product(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        multiply(x, y.T, out=out)

    def _prepare(self, tile: Tile, multiplies: bool, statistics: bool) -> tuple[Settings, dict[str, Any]]:
        """What is the same for all tiles of a kind."""
        id_rule, settings = self._id_rule(tile), self.settings_for(tile)
        kind = settings, multiplies, statistics, tile.is_diagonal, id_rule, self._has_positives(tile)
        if kind not in self._prepared:
            if not multiplies and self.kind != "given":
                settings = triton_settings.defaults(self.architecture, "given")
            spec, rows = self.spec, tile.rows
            options = spec.label_smoothing or self.stats or rows.inverse_norm is not None or id_rule != "ignore"
            constants = {
                "scalars": self._scalars,
                "EPILOGUE": spec.epilogue,
                "ID_RULE": id_rule,
                "DIAGONAL": tile.is_diagonal,
                "DLOGITS_SCALE": self.dlogits_scale,
                "EVEN_WIDTH": not multiplies or rows.features.shape[1] % settings.width == 0,
                "SLOTS": self._slots(tile) if statistics else None,
                "label_smoothing": spec.label_smoothing or None,
                **settings.arguments(),
                **self._options(bool(options) or self.operand_dtype == torch.float32),
            }
            self._prepared[kind] = settings, constants
        return self._prepared[kind]

    def _options(self, large: bool = True) -> dict[str, Any]:
        # No fused multiply-add: forward and backward must round logits alike. Without maxnreg, NVIDIA's assembler
        # spills a few registers of a large kernel to fit one more block.
        nvidia = large and self.architecture.startswith("sm_")
        return {"enable_fp_fusion": False, **({"maxnreg": 255} if nvidia else {})}

    @cached_property
    def _kernels(self) -> Any:
        return import_module(".triton_kernels", __package__)

    @cached_property
    def _scalars(self) -> Tensor:
        """Scale and bias, where kernels read them."""
        how: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        both = self._scale_and_bias
        return torch.stack([x.to(**how) if isinstance(x, Tensor) else torch.full((), x, **how) for x in both])

    @property
    def _scale_and_bias(self) -> tuple[float | Tensor, float | Tensor]:
        """Tensors where only the device knows them: no host may wait for their values."""
        return self.scale, self.bias

    def _slots(self, tile: Tile) -> tuple[bool, ...]:
        """The partial statistics that the loss has."""
        spec = self.spec
        maxima, smoothing = spec.epilogue == "softmax" or self.stats, spec.label_smoothing > 0
        positives = maxima and self._has_positives(tile)
        return maxima, True, smoothing, smoothing, positives, positives, positives and self.stats

    def _sums_for(self, num_programs: int) -> Tensor | None:
        """Zeros at first. Kernels of one stream follow each other: a program adds to what the last tile left."""
        if not (self.sum_for_scale or self.sum_for_bias):
            return None
        if not self._sums or len(self._sums[-1]) < num_programs:
            self._sums.append(torch.zeros(num_programs, 2, dtype=torch.float64, device=self.device))
        return self._sums[-1]

    def _features(self, tile: Tile) -> tuple[dict[str, Any], Tensor, Tensor]:
        """What is multiplied, after the norms. Normalised after the product, unless it must be copied before."""
        x, y = tile.rows.features, tile.columns.features
        if any(features.dtype != self.operand_dtype or features.stride(1) != 1 for features in (x, y)):
            return {}, self._operand("rows", tile.rows), self._operand("columns", tile.columns)
        return {"x_norm": tile.rows.inverse_norm, "y_norm": tile.columns.inverse_norm}, x, y

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

    def _has_positives(self, tile: Tile) -> bool:
        """Whether there may be some. Explicit targets, and ids, are only known to the device."""
        return tile.rows.targets is not None or tile.targets is not None or self._id_rule(tile) == "positive"

    def _merge(self, tile: Tile, partials: dict[str, Tensor]) -> None:
        """Add the partial statistics of a tile to the states of its rows and columns."""
        arguments: dict[str, Any] = {"positives": int(self._has_positives(tile))}
        num_programs = 0
        for side, memory in partials.items():
            block = tile.rows if side == "x_partials" else tile.columns
            arguments |= {
                side: memory,
                f"{side[0]}_blocks": len(memory) // NUM_SLOTS,
                f"{side[0]}_state": block.state.table,
                f"{side[0]}_stride": block.state.table.stride(0),
                f"{side[0]}_length": len(block),
            }
            num_programs += -(-len(block) // MERGED_ROWS)
        self._start(self._kernels.merge_kernel, num_programs, self._merge_constants | arguments)

    @cached_property
    def _merge_constants(self) -> dict[str, Any]:
        """With the rows of a state's table where its fields are."""
        names, fields = state_fields(self.spec, self.stats), self._kernels.FIELDS
        places = tuple(names.index(name) if name in names else None for name in fields)
        # The losses of a sigmoid loss are those of rows.
        tops = (place if name.startswith("top") else None for name, place in zip(fields, places, strict=True))
        of_columns = places if self.spec.epilogue == "softmax" else tuple(tops)
        sizes = {"BLOCKS": 16, "ROWS": MERGED_ROWS, "num_warps": 4}
        return {"X_PLACES": places, "Y_PLACES": of_columns, **sizes, **self._options()}

    def _start(self, kernel: Any, num_programs: int, arguments: dict[str, Any]) -> None:
        """The one place where a kernel starts."""
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            kernel[(num_programs,)](**arguments)

    def settings_for(self, tile: Tile) -> Settings:
        """The same for all tiles of a call, forward and backward."""
        if self.settings is None:
            found = triton_settings.tuned().get(self.tuning_key(tile))
            self.settings = found or triton_settings.defaults(self.architecture, self.kind)
        return self.settings

    def tuning_key(self, tile: Tile) -> str:
        """What the kernels of a call differ in. What only some of its tiles have is not here: all have one setting."""
        rows, spec = tile.rows, self.spec
        targets = "explicit" if rows.targets is not None else "consecutive" if spec.has_targets else "none"
        words = {
            "D": rows.features.shape[1],
            "epilogue": spec.epilogue,
            "ids": spec.id_rule,
            "targets": targets,
            "two_sided": spec.two_sided,
            "smoothing": spec.label_smoothing > 0,
            "normalize": rows.inverse_norm is not None,
            "stats": self.stats,
            "sums": self.sum_for_scale or self.sum_for_bias,
            "one_pass": self._keeps_dlogits,
        }
        return " ".join([self.architecture, self.kind, *(f"{name}={value}" for name, value in words.items())])


def _num_blocks(tile: Tile, settings: Settings) -> tuple[int, int]:
    return -(-len(tile.rows) // settings.rows), -(-len(tile.columns) // settings.columns)


def _target_offset(tile: Tile) -> int | None:
    """From a row's number, or from its explicit target, to the column of its positive. None: no target is here."""
    here = tile.rows.targets is not None or tile.targets is not None
    return (tile.rows.target_offset or 0) - tile.columns.offset if here else None


def _aligned(columns: int) -> int:
    return -(-columns // 16) * 16
