"""`python -m tools.kernels`, in a clone: do the GPU kernels fit GPUs that are not here?"""

import argparse
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabatch.bench import report

from ..tables import markdown
from . import compiling, machine_code, roofline, tuning
from .compiling import DTYPES, VARIANTS, Compiled
from .targets import KIB, TARGETS

DESCRIPTION = """\
Compiles the kernels of the triton backend at their default launch settings, for GPUs that need not be here, as real
launches would: the backend says what it launches for a tile of its default size, Triton what that is specialised for.

Prints registers, spills, shared memory against the GPU's limit, blocks that fit a multiprocessor at a time, and the
matrix instruction. A kernel that spills, exceeds a limit, multiplies bf16/fp16 without matrix instructions, or contains
atomics or inline assembly is marked, and the exit code is 1.

Below, an estimate of a training step from these figures and the makers' peaks: PREDICTED, NEVER RUN.
"""

QUICK = [*roofline.NEEDED, "clip forward, ids positive, smoothing", "siglip one pass"]
COLUMNS = ("", "D", "registers", "spills", "shared KiB", "limit", "blocks", "matrix instruction")

WORST = ("", "binaries", "registers", "spills", "shared KiB", "limit", "blocks", "matrix instruction")
Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="tf32: float32 multiplied so")
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 768, 1024], metavar="D")
    parser.add_argument(
        "--variants", nargs="+", default=[""], metavar="TEXT", help="only those with one of these texts in their name"
    )
    parser.add_argument("--quick", action="store_true", help="a minute instead of many: six variants, bfloat16, D=768")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="that compile at a time")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="on a GPU: time launch settings for the forward variants, and keep the fastest for the library to use",
    )
    parser.add_argument("--markdown", action="store_true", help="tables for a page of documentation")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything compiled to this file")


def main(options: argparse.Namespace) -> int:
    if problem := _problem(options):
        print(problem, file=sys.stderr)
        return 2
    variants = [name for name in VARIANTS if any(text in name for text in options.variants)]
    if options.quick:
        variants, options.dtypes, options.widths = QUICK, ["bfloat16"], [768]
    if options.tune:
        return tuning.main(variants, options.dtypes, options.widths)
    table = markdown if options.markdown else report.table
    groups = list(itertools.product(options.targets, options.dtypes))
    jobs = [(target, dtype, name) for target, dtype in groups for name in variants]
    everything: list[Compiled] = []
    print(f"Compiled, not run: there need be no GPU here.\n{_sharing(options.widths)}", flush=True)
    results = iter(compiling.compile_all(jobs, options.widths, options.processes))
    for target, dtype in groups:
        done = [compiled for found in itertools.islice(results, len(variants)) for compiled in found]
        known = {compiled.binary for compiled in everything}
        fresh = [compiled for compiled in done if compiled.binary not in known]
        everything += done
        print(f"\n{title(target, dtype, done)}\n{table(COLUMNS, list(rows_of(fresh)))}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([_record(compiled) for compiled in everything], indent=1) + "\n")
    faulty = {compiled.binary for compiled in everything if compiled.faults()}
    print(f"\nThe worst of each:\n{table(WORST, list(worst(everything)))}")
    print(f"\n{_verdict(everything, faulty)}\n\n{prediction(everything, table)}")
    return 1 if faulty else 0


def _problem(options: argparse.Namespace) -> str:
    """Why nothing can be compiled."""
    if importlib.util.find_spec("triton") is None:
        return "kernels: triton must be installed, got none. Install it with pip install triton."
    if min(options.widths) < 1:
        return f"kernels: --widths must be positive, got {min(options.widths)}. Name widths of features."
    if options.processes < 1:
        return f"kernels: --processes must be positive, got {options.processes}. Use one per core."
    for text in options.variants:
        if not any(text in name for name in VARIANTS):
            names = "; ".join(VARIANTS)
            return f"kernels: --variants must be part of a variant's name, got {text!r}. The names are: {names}."
    return ""


def _sharing(widths: list[int]) -> str:
    text = "What compiles to the same binary is compiled once and listed once per target."
    if len(widths) > 1:
        text += "\nD is an argument, of which only divisors are compiled in: a row names all D that it serves."
    return text


# ---- what was compiled


def title(target: str, dtype: str, compiled: list[Compiled]) -> str:
    text = f"{target} ({TARGETS[target].gpu}), {dtype}"
    tiles = [one.settings for one in compiled if one.kernel == "tile"]
    if tiles:
        text += ": blocks of {rows} x {columns} x {width}, {subtiles} subtiles, {warps} warps, {stages} stages".format(
            **tiles[0]
        )
    return text


def rows_of(compiled: Iterable[Compiled]) -> Iterable[tuple[str, ...]]:
    """One per binary, under the name of the launch that needed it first."""
    by_binary: dict[str, list[Compiled]] = {}
    for one in compiled:
        by_binary.setdefault(one.binary, []).append(one)
    for same in by_binary.values():
        first = same[0]
        name = first.variant if first.kernel == "tile" else f"{first.kernel} of {first.variant}"
        widths = " ".join(map(str, sorted({one.width for one in same})))
        faults = "; ".join(first.faults())
        figures = first.figures
        if figures is None:
            yield name, widths, "-", "-", "-", "-", "-", f"FAULT: {faults}"
            continue
        yield (
            name,
            widths,
            f"{figures.registers}",
            f"{figures.spills}",
            f"{figures.shared / KIB:.1f}",
            f"{TARGETS[first.target].shared_per_block / KIB:.0f}",
            f"{first.resident()}",
            machine_code.family(figures.matrix) + (f"  FAULT: {faults}" if faults else ""),
        )


def worst(everything: list[Compiled]) -> Iterable[tuple[str, ...]]:
    """Of every target and dtype: most registers, spills and shared memory, fewest blocks, of all tile kernels."""
    tiles = [one for one in everything if one.kernel == "tile" and one.figures is not None]
    for (target, dtype), group in itertools.groupby(tiles, key=lambda one: (one.target, one.dtype)):
        same = list(group)
        figures = [one.figures for one in same if one.figures is not None]
        yield (
            f"{target} {dtype}",
            f"{len({one.binary for one in same})}",
            f"{max(each.registers for each in figures)}",
            f"{max(each.spills for each in figures)}",
            f"{max(each.shared for each in figures) / KIB:.1f}",
            f"{TARGETS[target].shared_per_block / KIB:.0f}",
            f"{min(one.resident() for one in same)}-{max(one.resident() for one in same)}",
            machine_code.family(tuple(sorted({opcode for each in figures for opcode in each.matrix}))),
        )


def _verdict(everything: list[Compiled], faulty: set[str]) -> str:
    binaries = len({compiled.binary for compiled in everything})
    text = f"{len(everything)} launches, {binaries} binaries: "
    if faulty:
        return text + f"{len(faulty)} of them do not fit, marked FAULT"
    return text + "no spills, within limits, bf16/fp16 by matrix instructions, no atomics, no inline assembly"


def _record(compiled: Compiled) -> dict[str, Any]:
    resident = None if compiled.figures is None else compiled.resident()
    return {**asdict(compiled), "resident": resident, "faults": compiled.faults()}


# ---- what follows from it


def prediction(everything: list[Compiled], table: Table = report.table) -> str:
    product = 2 * roofline.ROWS**2 * roofline.WIDTH
    shape = f"N={roofline.ROWS}, D={roofline.WIDTH}, {roofline.DTYPE}"
    head = f"""\
PREDICTED, NEVER RUN: clip_loss, forward and backward, {shape} (one product: {product / 1e12:.2f} Tflop).
Share: of the spec sheet's bf16 peak, by the 1 + 3 products that a step cannot avoid; matrix units are assumed to reach
{roofline.EFFICIENCY:.0%} of it in any kernel that feeds them, so no share can be higher. The model is in
tools/kernels/roofline.py.
"""
    rows = list(prediction_rows(everything))
    if not rows:
        names = ", ".join(repr(name) for name in roofline.NEEDED)
        return f"{head}\nNot estimated: that needs {names} in {roofline.DTYPE} at D={roofline.WIDTH}."
    columns = ("", "forward", "backward", "step", "share", "forward's", "backward's", "bound by")
    return f"{head}\n{table(columns, rows)}"


def prediction_rows(everything: list[Compiled]) -> Iterable[tuple[str, ...]]:
    for gpu in roofline.GPUS:
        step = roofline.megabatch(everything, gpu)
        if step is not None:
            yield (
                gpu.name,
                report.seconds(step.forward.seconds),
                report.seconds(step.backward.seconds),
                report.seconds(step.seconds),
                f"{step.whole.share(4, gpu):.0%}",
                f"{step.forward.share(1, gpu):.0%}",
                f"{step.backward.share(3, gpu):.0%}",
                f"{step.forward.limit} / {step.backward.limit}",
            )
