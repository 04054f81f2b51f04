"""`megabatch check`: compare every case in every way, measure speed and memory, then give the verdict."""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megabatch.bench import report
from megabatch.bench.cases import DTYPES, Case
from megabatch.bench.contenders import CONTENDERS, PACKAGES
from megabatch.bench.flags import positive
from megabatch.bench.loss import entrants
from megabatch.bench.processes import Runner, runner
from megabatch.bench.results import Row, over, table
from megabatch.bench.session import try_file
from megabatch.bench.trial import Rules, contest
from megabatch.machine import describe, machine

from .cases import FUNCTIONS, LOSSES, cases
from .exactness import Comparison, Way, compare, worst

DESCRIPTION = """\
Is megabatch exact on this machine, and how fast is it? Every loss, dtype and backend is compared with
megabatch.reference in float64; under torchrun also over all ranks; on a GPU the host must never wait for it. Then a
training step is timed beside the dense loss and other packages. Errors are shown as a share of what is allowed: up to 1
is right. The last line is the verdict, and the exit code is 0 or 1.
"""
BACKENDS = ("eager", "triton")
# Rows, width and dtype of the speed table, and who is in it.
ON_GPU, ON_CPU = ([8192, 32768], 768, "bfloat16"), ([4096], 512, "float32")
DENSE = "formula"
PEERS = ["ring", "gather", DENSE, "by_hand", "compiled", "open_clip", "inf_cl", "siglip_kernel"]
MOST_SHOWN, NAME_WIDTH, CELL_WIDTH = 10, 42, 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one, else cpu")
    add("--backend", choices=("all", *BACKENDS), default="all", help="all: those that can run here")
    add("--only", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), metavar="NAME", help="which functions")
    add("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtype of the features")
    add("--quick", action="store_true", help="exactness only, on tiny sizes")
    add("--skip-speed", action="store_true", help="everything but speed and memory")
    rows = "rows of the batch, of all ranks, in the speed table (default: 8192 32768 on a GPU, else 4096)"
    add("--rows", type=positive, nargs="+", metavar="N", help=rows)
    width = "width of the features in the speed table (default: 768 on a GPU, else 512)"
    add("--width", type=positive, metavar="D", help=width)
    add("--json", type=Path, metavar="PATH", help="write the JSON to this file (default: print a summary of it)")


def main(options: argparse.Namespace) -> int:
    if options.json:
        try_file("megabatch check", "json", options.json)
    with runner(_device(options.device)) as where:
        return Check(where, options).run()


def _device(name: str) -> str:
    gpus, rank = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cpu" or (name == "auto" and not gpus):
        return "cpu"
    if rank >= gpus:
        advice = f"Use torchrun --nproc-per-node {gpus}." if gpus else "Use --device cpu."
        words = f"--device cuda must have a GPU for every rank, got {gpus} for rank {rank}. {advice}"
        print(f"megabatch check: {words}", file=sys.stderr)
        raise SystemExit(2)
    return "cuda"


class Check:
    """One run of the command; every rank goes through all of it, and rank 0 speaks."""

    def __init__(self, where: Runner, options: argparse.Namespace) -> None:
        self.where, self.world, self.options = where, where.world, options
        self.backends = BACKENDS if options.backend == "all" else (options.backend,)
        self.on_gpu = self.world.device.type == "cuda"
        interpreter = not self.on_gpu and os.environ.get("TRITON_INTERPRET") == "1"
        self.interpreted = interpreter and "triton" in self.backends
        self.machine = machine(self.world, ("triton", *PACKAGES)) | {"triton_interpreted": self.interpreted}
        self.comparisons: list[Comparison] = []
        self.refused: list[Comparison] = []
        self.table: dict[str, dict[str, str]] = {}
        self.speed: list[tuple[Case, list[Row]]] = []
        self.notes: list[str] = []

    def run(self) -> int:
        ranks = f"{self.world.size} ranks over {self.world.backend}"
        alone = "one process; for ranks: torchrun --nproc-per-node 4 -m megabatch check"
        self._say(f"{describe(self.machine)}\n{ranks if self.world.size > 1 else alone}\n")
        self._say("exactness: the worst error as a share of what is allowed\n")
        self._say(_line("", self.options.dtype))
        for function in self.options.only:
            self._compare(function)
            self._write(f"UNFINISHED - {function} was the last to end")  # should something end the process
        self._report_exactness()
        if not self.options.quick and not self.options.skip_speed:
            self._measure()
        verdict = self._verdict()
        if self.options.json:
            self._write(verdict)
            self._say(f"\nwritten to {self.options.json}")
        else:
            self._say(f"\nfor a report:\n{json.dumps(self._document(verdict), allow_nan=False)}\n")
        self._say(f"megabatch check: {verdict}")
        self.world.wait()  # torchrun ends the others when one has failed
        return 0 if verdict.startswith("OK") else 1

    def _say(self, text: str) -> None:
        if self.where.speaks:
            print(text, flush=True)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    # ---- exactness

    def _compare(self, function: str) -> None:
        """Every case of a function in every dtype and every way, with a line of the table for each way."""
        watched = self.on_gpu and function in LOSSES
        exchanges = ("", "ring", "gather") if self.world.size > 1 else ("",)
        ways = [Way(backend, exchange) for backend in self.backends for exchange in exchanges]
        mine = [
            found
            for case in cases(function, self.options.quick or self.interpreted)
            for dtype in self.options.dtype
            for way in ways
            for found in compare(case, dtype, way, self.world, watched and not way.exchange)
        ]
        everywhere = worst(self.world.gather(mine))
        self.comparisons += [one for one in everywhere if not one.refused]
        self.refused += [one for one in everywhere if one.refused]
        for way in map(str, ways):
            own = [one for one in self.comparisons if one.function == function and one.way == way]
            if own:
                cells = {dtype: _cell([one for one in own if one.dtype == dtype]) for dtype in self.options.dtype}
                self.table[f"{function}, {way}"] = cells
                self._say(_line(f"{function}, {way}", cells.values()))

    def _report_exactness(self) -> None:
        """What is wrong, and what was not checked."""
        for one in [one for one in self.comparisons if not one.ok][:MOST_SHOWN]:
            self._say(f"WRONG: {one}")
        for backend in self.backends:
            why = {one.dtype: one.note for one in self.refused if one.way.startswith(backend)}
            if why:
                self._note(f"{backend} not checked in {', '.join(why)}: {next(iter(why.values()))}")
        if not self.world.in_step:
            self._note("a call ended in different ways on different ranks, so no other over ranks was checked")
        if not self.on_gpu:
            self._note("host reads not checked: no GPU")

    # ---- speed and memory

    def _measure(self) -> None:
        """The contest of `megabatch bench`, with its contenders."""
        if self.interpreted or not self.comparisons or not all(one.ok for one in self.comparisons):
            why = "kernels are interpreted" if self.interpreted else "results are wrong or missing"
            return self._note(f"no speed is measured: {why}")
        rows, width, dtype = ON_GPU if self.on_gpu else ON_CPU
        dtype = dtype if dtype in self.options.dtype else self.options.dtype[0]
        ours = "megabatch" if self.options.backend == "all" or self.world.size > 1 else self.options.backend
        for loss in [loss for loss in ("clip", "siglip") if f"{loss}_loss" in self.options.only]:
            for count in self.options.rows or rows:
                even = count - count % self.world.size
                case = Case(loss, even, self.options.width or width, dtype, self.where.device, self.world.size)
                found = contest(case, entrants(case, [ours, *PEERS]), Rules(seconds=1.0), self.where)
                self.speed.append((case, found))
                head, body = table(found, {f"/ {found[0].title}": found[0].name})
                self._say(f"\nspeed and memory: {case}, forward and backward\n\n{report.table(head, body)}")

    # ---- the verdict, and the document

    def _verdict(self) -> str:
        wrong = [one for one in self.comparisons if not one.ok]
        failed = [f"{len(wrong)} of {len(self.comparisons)} comparisons, first: {wrong[0]}"] if wrong else []
        for case, rows in self.speed:
            ours = [row for row in rows if CONTENDERS[row.name].ours and row.status != "ok"]
            failed += [f"speed, {case}, {row.title}: {report.remark(row.status, row.note)}" for row in ours]
        if not self.comparisons:
            failed = [f"nothing could be checked: {'; '.join(self.notes)}"]
        if failed:
            return f"FAILED - {'; '.join(failed)}"
        share = max(one.share for one in self.comparisons)
        exact = f"OK - {len(self.comparisons)} comparisons, the worst error is {share:.2f} of what is allowed"
        return "; ".join([exact, *(_beside_dense(case, rows) for case, rows in self.speed[:1])])

    def _write(self, verdict: str) -> None:
        if self.options.json and self.where.speaks:
            comparisons = [asdict(one) | {"ok": one.ok} for one in self.comparisons]
            document = self._document(verdict) | {"comparisons": comparisons}
            self.options.json.write_text(json.dumps(document, allow_nan=False, indent=1) + "\n")

    def _document(self, verdict: str) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "exactness": self.table,
            "failed": [asdict(one) for one in self.comparisons if not one.ok],
            "speed": [{**asdict(case), "contenders": [row.record() for row in rows]} for case, rows in self.speed],
            "notes": self.notes,
            "verdict": verdict,
        }


def _line(name: str, cells: Iterable[str]) -> str:
    return name.ljust(NAME_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells)


def _cell(comparisons: list[Comparison]) -> str:
    """The worst error as a share of what is allowed."""
    if not comparisons:
        return "-"
    wrong = sum(not one.ok for one in comparisons)
    return f"{wrong}/{len(comparisons)} WRONG" if wrong else f"{max(one.share for one in comparisons):.2f}"


def _beside_dense(case: Case, rows: list[Row]) -> str:
    ours, (dense,) = rows[0], [row for row in rows if row.name == DENSE]
    ratio = over(dense, ours)
    if ratio is None:
        return f"{case}: dense {report.remark(dense.status, dense.note)}"
    words = f"{case}: {ratio.median:.1f} times as fast as dense"
    if ours.peak_bytes and dense.peak_bytes:
        words += f", in {ours.peak_bytes / dense.peak_bytes:.1%} of its memory"
    return words
