"""The GPU kernels compiled for GPUs that are not here, and the figures that are read from what comes out."""

import argparse
import importlib.util
import inspect
import io
import json
import os
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.backends import triton_backend
from megabatch.backends.triton_backend import Triton
from megabatch.backends.triton_settings import DEFAULTS, Settings, defaults, tuned
from megabatch.losses.block import Tile
from tools.kernels import command as kernels
from tools.kernels import compiling, machine_code, roofline, tuning
from tools.kernels.compiling import VARIANTS, Compiled
from tools.kernels.machine_code import Figures, Work
from tools.kernels.targets import KIB, TARGETS


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return kernels.main(parser.parse_args(words))


interpreted = pytest.mark.skipif(not triton_backend._interprets(), reason="for Triton's interpreter")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from triton.runtime.jit import JITFunction

    if not hasattr(JITFunction, "_pack_args"):
        pytest.skip("tools.kernels compiles with a newer Triton", allow_module_level=True)

SASS = """\
\t.headerflags\t@"EF_CUDA_SM80"
        .global         tile_kernel
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P2 BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0030*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0040*/                   HMMA.16816.F32.BF16 R12, R4, R7, R12 ;
        /*0050*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   FADD R8, R8, -R9 ;
        /*0070*/                   MUFU.EX2 R8, R8 ;
        /*0080*/              @!P0 STG.E [R2.64], R8 ;
        /*0090*/                   EXIT ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
        /*00b0*/                   NOP;
"""
RESOURCES = " Function tile_kernel:\n  REG:80 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:488 TEXTURE:0 SURFACE:0 SAMPLER:0"
AMDGCN = """\
tile_kernel:                            ; @tile_kernel
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\t.loc\t1 243 35                        ; triton_kernels.py:243:35
\tv_mfma_f32_32x32x8_bf16 v[2:17], v[20:21], v[22:23], v[2:17]
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\tv_exp_f32_e32 v1, v2
\tv_add_f32_e32 v1, v1, v2
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_next_free_vgpr 60
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 0
    .vgpr_count:     60
    .vgpr_spill_count: 0
"""
FITS = Figures(80, 0, 0, 16 * KIB, ("HMMA.16816.F32.BF16",), Work(180, 0), Work(3000, 160))


def compiled(figures: Figures | None = FITS, variant: str = "clip forward", **changes: Any) -> Compiled:
    settings = {"rows": 128, "columns": 128, "width": 64, "subtiles": 4, "warps": 8, "stages": 3}
    one = Compiled("sm_80", "bfloat16", variant, "tile", 768, f"binary of {variant}", settings, figures)
    return replace(one, **changes)


# ---- what is compiled

# What every step of clip_loss launches, for every target; everything else for one of them, in one of the dtypes.
COMMON = ["clip forward", "clip backward"]
OTHERS = [name for name in VARIANTS if name not in COMMON]
SUBSET = [
    *((target, "bfloat16", variant) for target in TARGETS for variant in COMMON),
    *zip(cycle(TARGETS), cycle(["float16", "float32", "tf32", "bfloat16"]), OTHERS, strict=False),
]


@pytest.fixture(scope="module")
def subset() -> list[Compiled]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiling.INTERPRET, "1")  # must not reach the processes that compile
        results = compiling.compile_all(SUBSET, [512, 768, 1024], num_processes=min(2, os.cpu_count() or 1))
        found = [one for job in results for one in job]
        assert os.environ[compiling.INTERPRET] == "1"
    return found


@needs_triton
def test_kernels_fit_the_gpus_at_their_default_settings(subset):
    assert {(one.target, one.dtype, one.variant) for one in subset} == set(SUBSET)
    assert {(one.target, one.dtype, one.variant): one.faults() for one in subset if one.faults()} == {}
    for one in subset:
        figures, target = one.figures, TARGETS[one.target]
        assert figures is not None
        assert (figures.spills, figures.stack) == (0, 0)
        assert figures.shared <= target.shared_per_block
        assert one.resident() >= 1
        if one.kernel == "tile" and one.dtype in compiling.HALF_DTYPES and VARIANTS[one.variant].multiplies:
            assert [opcode.startswith(target.matrix) for opcode in figures.matrix] == [True]


@needs_triton
def test_a_forward_merges_rows_and_columns_at_once(subset):
    kernels_of = {one.kernel for one in subset if one.variant == "clip forward" and one.target == "sm_80"}
    assert kernels_of == {"tile", "merge"}
    assert {one.kernel for one in subset if one.variant == "clip backward"} == {"tile"}


@needs_triton
def test_widths_share_a_binary_and_dtypes_do_not(subset):
    tiles = [one for one in subset if one.kernel == "tile"]
    assert len(tiles) == 3 * len(SUBSET)
    for job in SUBSET:
        assert len({one.binary for one in tiles if (one.target, one.dtype, one.variant) == job}) == 1
    common = {one.binary for one in tiles if one.variant in COMMON and one.dtype == "bfloat16"}
    assert len(common) == 2 * len(TARGETS)


@needs_triton
def test_launches_have_the_default_settings_and_arguments_of_real_ones():
    target = TARGETS["sm_90"]
    for name in VARIANTS:
        first, *merges = compiling.launches(VARIANTS[name], target, "float16", 768)
        arguments = defaultdict(lambda: None, first[1])
        assert arguments["num_rows"] == arguments["num_columns"] == 8192
        assert (arguments["x"] is None) == ("backward kept" in name)
        if arguments["x"] is not None:
            assert arguments["x"].shape == (8192, 768)
            assert arguments["x"].dtype == torch.float16
            assert (arguments["x_norm"] is not None) == ("normalize" in name)
        settings = defaults("sm_90", "given" if arguments["x"] is None else "half")
        assert arguments["num_warps"] == settings.warps
        assert arguments["BLOCK_WIDTH"] == settings.width
        assert arguments["EVEN_WIDTH"]
        statistics = "forward" in name or "one pass" in name
        assert len(merges) == statistics
        assert (arguments["x_partials"] is not None) == statistics
        gradients = "backward" in name or "one pass" in name
        assert (arguments["x_label"] is not None) == gradients
        assert (arguments["dlogits"] is not None) == gradients
        keeps = "scores" in name or "forward keep" in name
        assert (arguments["dots"] is not None) == (keeps or "backward kept" in name)
        assert (arguments["target_offset"] is not None) == ("no targets" not in name and "supcon" not in name)
        assert (arguments["targets"] is not None) == ("explicit targets" in name)
        assert bool(arguments["SLOTS"] and arguments["SLOTS"][6]) == ("stats" in name)
        assert (arguments["label_smoothing"] is not None) == ("smoothing" in name)
        assert (arguments["ID_RULE"] != "ignore") == ("ids" in name)
        assert arguments["DIAGONAL"] == ("diagonal" in name)


@needs_triton
def test_the_source_of_the_kernels_has_no_assembly_and_no_atomics():
    from megabatch.backends import triton_kernels

    source = inspect.getsource(triton_kernels)
    names = {token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == 1}
    assert "dot" in names
    assert [name for name in names if re.search(r"asm|atomic", name)] == []


# ---- what is read from it


def test_figures_of_nvidia():
    figures = machine_code.of_nvidia(RESOURCES, SASS, shared=4096)
    assert figures == Figures(80, 0, 0, 4096, ("HMMA.16816.F32.BF16",), Work(4, 0), Work(7, 1))
    assert machine_code.family(figures.matrix) == "mma (HMMA.16816.F32.BF16)"


def test_figures_of_amd():
    figures = machine_code.of_amd(AMDGCN, shared=4096)
    assert figures == Figures(60, 0, 0, 4096, ("v_mfma_f32_32x32x8_bf16",), Work(2, 0), Work(3, 1))
    assert machine_code.family(figures.matrix) == "mfma (v_mfma_f32_32x32x8_bf16)"


def test_spills_are_seen():
    spilling = SASS.replace("FADD R8, R8, -R9", "STL [R1+0x4], R14")
    assert machine_code.of_nvidia(RESOURCES, spilling, 0).spills == 1
    assert machine_code.of_nvidia(RESOURCES, SASS.replace("MOV R1", "LDL.LU R1"), 0).spills == 1
    assert machine_code.of_nvidia(RESOURCES.replace("STACK:0", "STACK:8"), SASS, 0).stack == 8
    assert machine_code.of_amd(AMDGCN.replace(".sgpr_spill_count: 0", ".sgpr_spill_count: 3"), 0).spills == 3
    assert machine_code.of_amd(AMDGCN.replace(".vgpr_spill_count: 0", ".vgpr_spill_count: 2"), 0).spills == 2
    assert machine_code.of_amd(AMDGCN.replace("fixed_size: 0", "fixed_size: 16"), 0).stack == 16


def test_a_report_that_says_nothing_is_not_taken_for_a_good_one():
    with pytest.raises(ValueError, match="STACK"):
        machine_code.of_nvidia("", SASS, 0)
    with pytest.raises(ValueError, match="spill_count"):
        machine_code.of_amd("", 0)


@pytest.mark.parametrize(
    ("ttir", "found"),
    [
        ("%1 = tt.load %0", []),
        ("%1 = tt.atomic_rmw fadd, acq_rel, gpu, %0", ["atomics"]),
        ('%1 = tt.elementwise_inline_asm "cvt.rna.tf32.f32 $0, $1;"', ["inline assembly"]),
    ],
)
def test_forbidden_operations_are_seen(ttir, found):
    assert machine_code.forbidden_operations(ttir) == found


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"spills": 1}, "spills: 1, stack 0 bytes"),
        ({"stack": 8}, "spills: 0, stack 8 bytes"),
        ({"shared": 164 * KIB}, "shared memory: 167936 of 166912 bytes"),
        ({"matrix": ()}, "multiplies by no matrix instruction instead of HMMA"),
        ({"matrix": ("HGMMA.64x128x16.F32.BF16",)}, "multiplies by HGMMA.64x128x16.F32.BF16 instead of HMMA"),
    ],
)
def test_what_does_not_fit_is_a_fault_and_the_exit_code_says_so(changes, fault, monkeypatch, capsys):
    one = compiled(replace(FITS, **changes))
    assert one.faults()[:1] == ([fault] if fault else [])
    monkeypatch.setattr(compiling, "compile_all", lambda jobs, *_: iter([[one]] * len(jobs)))
    options = ["--targets", "sm_80", "--dtypes", "bfloat16", "--variants", "clip forward"]
    assert main(options) == (1 if fault else 0)
    out = capsys.readouterr().out
    assert ("FAULT" in out) == bool(fault)
    assert ("no spills, within limits" in out) == (not fault)
    assert (fault or "") in out


def test_bf16_may_do_without_matrix_instructions_where_nothing_is_multiplied():
    nothing = replace(FITS, matrix=())
    assert compiled(nothing, variant="clip backward kept").faults() == []
    assert compiled(nothing, kernel="merge rows").faults() == []
    assert compiled(nothing, dtype="float32").faults() == []


def test_what_does_not_compile_is_a_fault():
    one = compiled(None, error="does not compile: OutOfResources: shared memory")
    assert one.faults() == ["does not compile: OutOfResources: shared memory"]
    (row,) = kernels.rows_of([one])
    assert row[-1] == "FAULT: does not compile: OutOfResources: shared memory"


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "blocks"),
    [
        ("sm_80", 64, 0, 8, 4),  # 65536 registers by 256 threads of 64
        ("sm_80", 65, 0, 8, 3),  # given out by eights
        ("sm_80", 32, 80 * KIB, 4, 2),
        ("sm_80", 32, 82 * KIB, 4, 1),  # and a KiB for the system
        ("sm_86", 16, 0, 4, 12),  # 48 warps
        ("gfx942", 128, 16 * KIB, 8, 2),
        ("gfx942", 64, 64 * KIB, 4, 1),
        ("sm_90", 255, 0, 16, 0),
    ],
)
def test_blocks_that_fit_a_multiprocessor(target, registers, shared, warps, blocks):
    assert TARGETS[target].blocks(registers, shared, warps) == blocks


# ---- the command


@needs_triton
def test_the_command_prints_a_row_per_binary_and_writes_json(tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["--targets", "sm_90", "--dtypes", "bfloat16", "--widths", "512", "768", "520", "--processes", "1"]
    assert main([*options, "--variants", "siglip backward, ids", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("siglip backward, ids positive, normalize")]
    assert [re.split("  +", line)[1] for line in lines] == ["512 768", "520"]  # 520 has a last load of its own
    assert all("wgmma (HGMMA." in line for line in lines)
    assert "sm_90 (H100), bfloat16: blocks of" in out
    assert "3 launches, 2 binaries: no spills" in out
    assert "PREDICTED, NEVER RUN" in out
    assert "Not estimated" in out
    records = json.loads(path.read_text())
    assert [record["width"] for record in records] == [512, 768, 520]
    assert all(record["faults"] == [] and record["figures"]["registers"] > 0 for record in records)


def test_without_triton_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--quick"]) == 2
    assert "pip install triton" in capsys.readouterr().err


@needs_triton
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "clip", "moco"], "--variants must be part of a variant's name, got 'moco'"),
        (["--widths", "0"], "--widths must be positive, got 0"),
        (["--processes", "0"], "--processes must be positive, got 0"),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    assert main([*options]) == 2
    assert message in capsys.readouterr().err


def test_quick_names_variants_that_exist():
    assert set(kernels.QUICK) <= set(VARIANTS)


# ---- tuning


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[int, float]]:
    """Small tiles in the interpreter, and milliseconds by the rows of a block; an error where there are none."""
    pytest.importorskip("triton")
    from triton import testing
    from triton.runtime.errors import OutOfResources

    milliseconds: dict[int, float] = {}
    steps: list[Settings] = []
    original = Triton.settings_for

    def settings_for(backend: Triton, tile: Tile) -> Settings:
        steps.append(original(backend, tile))
        return steps[-1]

    def do_bench(step: Callable[[], object]) -> float:
        steps.clear()
        step()
        (settings,) = set(steps)
        if settings.rows not in milliseconds:
            raise OutOfResources(300_000, 200_000, "shared memory")
        return milliseconds[settings.rows]

    monkeypatch.setattr(testing, "do_bench", do_bench)
    monkeypatch.setattr(Triton, "settings_for", settings_for)
    monkeypatch.setattr(Triton, "tile_sides", staticmethod(lambda width, threads: (40, 40)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "candidates", lambda default: [default, *(replace(default, rows=n) for n in (64, 16))])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned.cache_clear()
    yield milliseconds
    tuned.cache_clear()


@interpreted
@pytest.mark.parametrize(
    ("times", "rows"),
    [
        ({32: 2.0, 64: 1.0, 16: 3.0}, 64),
        ({32: 2.0, 64: 2.0, 16: 2.0}, 32),  # the default wins a tie
        ({32: 2.0, 16: 1.0}, 16),  # one does not fit the device
        ({}, 32),
    ],
    ids=str,
)
def test_the_fastest_settings_are_written_for_the_library_to_read(
    times: dict[int, float], rows: int, clock: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    clock |= times
    names = ["clip forward", "clip forward, no targets", "clip backward", "siglip one pass"]
    assert tuning.main(names, ["float32", "bfloat16"], [8], device="cpu") == 0
    tuned.cache_clear()  # as in a new process
    found = tuned()
    assert [key.split()[1:4] for key in found] == [
        [kind, "D=8", f"epilogue={epilogue}"] for epilogue in ("softmax", "sigmoid") for kind in ("given", "half")
    ]
    assert {settings.rows for settings in found.values()} == {rows}
    assert "tuning.json" in capsys.readouterr().out


@interpreted
def test_tuning_leaves_other_entries_as_they_are(clock: dict[int, float]) -> None:
    clock[16] = 1.0
    for width in (8, 4):
        tuned.cache_clear()
        tuning.main(["clip forward"], ["float32"], [width], device="cpu")
    assert [path.name for path in tuning.tuning_path().parent.iterdir()] == ["tuning.json"]
    tuned.cache_clear()
    assert [key.split()[2] for key in tuned()] == ["D=8", "D=4"]


@needs_triton
def test_tuning_wants_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--tune", "--quick"]) == 2
    assert "--tune must run on a GPU, got none" in capsys.readouterr().err


def test_what_is_tried_begins_with_the_defaults_and_has_nothing_twice():
    for kinds in DEFAULTS.values():
        for settings in kinds.values():
            tried = tuning.candidates(settings)
            assert tried[0] == settings
            assert len(tried) == len(set(tried)) > 10


# ---- the estimate


def everything(**changes: Any) -> Iterator[Compiled]:
    for gpu, matrix in zip(roofline.GPUS, ("HMMA", "HGMMA", "v_mfma"), strict=True):
        for name in roofline.NEEDED:
            yield compiled(replace(FITS, matrix=(matrix,), **changes), name, target=gpu.target)


def test_no_estimate_beats_the_assumed_speed_of_products():
    for gpu in roofline.GPUS:
        step = roofline.megabatch(list(everything()), gpu)
        assert step is not None
        for estimate, products in ((step.forward, 1), (step.backward, 3), (step.whole, 4)):
            assert 0 < estimate.share(products, gpu) <= roofline.EFFICIENCY


def test_a_block_alone_waits_for_its_epilogue():
    gpu = roofline.GPUS[0]
    alone, together = (
        roofline.tile_kernel(compiled(replace(FITS, registers=registers)), gpu, 8192, 8192, 768, written=0)
        for registers in (255, 128)
    )
    assert alone.limit == "product, then instructions"
    assert together.limit == "product"
    assert alone.seconds > together.seconds >= 2 * 8192**2 * 768 / (gpu.half * roofline.EFFICIENCY)


def test_more_work_is_never_predicted_to_be_faster():
    gpu = roofline.GPUS[1]
    seconds = [
        roofline.tile_kernel(compiled(replace(FITS, rest=Work(count, special))), gpu, 8192, 8192, 768, 0).seconds
        for count, special in ((1000, 0), (30000, 0), (30000, 20000))
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]


def test_the_estimate_is_marked_as_predicted_and_needs_all_its_kernels():
    text = kernels.prediction(list(everything()))
    assert text.startswith("PREDICTED, NEVER RUN")
    assert "A100 80GB SXM" in text
    assert "MI300X" in text
    assert "Not estimated" in kernels.prediction(list(everything())[1:4])
