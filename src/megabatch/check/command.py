"""`megabatch check`: exactness, what only a GPU can show, speed and memory, then the verdict."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megabatch.bench import report
from megabatch.bench.cases import Case
from megabatch.bench.contenders import CONTENDERS, PACKAGES
from megabatch.bench.flags import positive
from megabatch.bench.processes import Runner
from megabatch.bench.results import Row, table
from megabatch.bench.trial import Rules, contest

from ..distributed.world import World, joined
from . import gpu
from .cases import DTYPES, LOSSES, cases
from .exactness import RETRIEVAL, Comparison, Way, compare_loss, compare_retrieval, merged, refusal
from .gpu import FAILED, NOT_RUN, OK, Finding
from .report import DENSE, beside_dense, cell, described, status, summary

DESCRIPTION = """\
Is megabatch exact on this machine, and how fast is it? Every loss, dtype and backend against megabatch.reference in
float64; under torchrun also all ranks together. On a GPU: host reads, launches, graph capture. Then a training step
beside OpenCLIP's formula, the dense loss by hand and compiled, and other packages. A figure of the first table is the
worst error as a share of what is allowed: up to 1 is right. What fails in one section stops no other. The last line is
the verdict, the exit code 0 or 1. docs/first-gpu.md has what each section requires.
"""
FUNCTIONS = (*LOSSES, *RETRIEVAL)
BACKENDS = ("eager", "triton")
SECTIONS = ("host reads", "launches", "graphs")
# Rows, width and dtype of the speed table.
ON_GPU, ON_CPU = ([8192, 32768], 768, "bfloat16"), ([4096], 512, "float32")
PEERS = (DENSE, "by_hand", "compiled", "open_clip", "inf_cl", "siglip_kernel")
MOST_SHOWN, NAME_WIDTH, CELL_WIDTH = 10, 44, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=_device, default="auto", help="auto (cuda if there is one), cpu or cuda")
    parser.add_argument("--backend", choices=("all", "auto", *BACKENDS), default="all", help="all that can run here")
    parser.add_argument("--only", nargs="+", choices=FUNCTIONS, metavar="NAME", help=f"of {', '.join(FUNCTIONS)}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtype of the features")
    parser.add_argument("--quick", action="store_true", help="exactness only, few cases of tiny sizes")
    parser.add_argument("--skip-speed", action="store_true", help="everything but speed and memory")
    parser.add_argument(
        "--rows", type=positive, nargs="+", metavar="N", help="rows of the batch of the speed table, of all ranks"
    )
    parser.add_argument("--width", type=positive, metavar="D", help="width of the features of the speed table")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON to this file")


def _device(word: str) -> str:
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "cpu"
    if word not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be one of auto, cpu, cuda, got {word!r}.")
    if word == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("must be a device of this machine, got 'cuda' and torch sees none. Use cpu.")
    here, place = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if word == "cuda" and place >= here:
        raise argparse.ArgumentTypeError(
            f"must have a GPU for every rank of this machine, got {here} for rank {place}. "
            f"Use torchrun --nproc-per-node {here}."
        )
    return word


def main(options: argparse.Namespace) -> int:
    with joined(options.device) as world:
        try:
            return Check(world, options).run()
        except Exception as error:
            if world.size == 1:
                raise
            # The ranks have lost each other: nobody can speak for all.
            stream = sys.stdout if world.rank == 0 else sys.stderr
            text = " ".join(str(error).split())
            print(f"megabatch check: FAILED - rank {world.rank}: {type(error).__name__}: {text}", file=stream)
            return 1


class Check:
    """One run of the command; every rank goes through all of it, and rank 0 speaks."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.functions: list[str] = options.only or list(FUNCTIONS)
        self.losses = [function for function in self.functions if function in LOSSES]
        self.backends = BACKENDS if options.backend == "all" else (options.backend,)
        self.comparisons: list[Comparison] = []
        self.findings: dict[str, list[Finding]] = {}
        self.speed: list[tuple[Case, list[Row]]] = []
        self.notes: list[str] = []

    def run(self) -> int:
        if problem := self.world.gather(self._json_problem())[0]:
            self._say(problem)
            return 2
        self.reasons = self._reasons()
        self.interpreted = self.world.device.type == "cpu" and bool(self._able("triton"))
        self.machine = {**report.machine(self.world, ("triton", *PACKAGES)), "triton_interpreted": self.interpreted}
        self._say(described(self.machine))
        self.refused = self._refused()
        if any(not reason for reason in self.reasons.values()):
            self._section("exactness", self._exactness)
        self._section("host reads", self._on_gpu)
        self._section("launches", self._on_gpu)
        self._section("speed", self._speed)
        self._section("graphs", self._on_gpu)  # last, for a capture that fails may leave the device unusable
        verdict = self._verdict()
        self._publish(verdict)
        self._say(f"megabatch check: {verdict}")
        self.world.wait()  # torchrun ends the others when one has failed
        return 0 if verdict.startswith("OK") else 1

    def _section(self, name: str, work: Callable[[str], None]) -> None:
        """One that breaks is a failure of its own, and the next one follows. Ranks would lose each other."""
        try:
            work(name)
        except Exception as error:
            if self.world.size > 1:
                raise
            self.findings.setdefault(name, []).append(gpu.raised("the section", error))
            self._say(f"\n{summary(name, self.findings[name])}")
        if self.options.json and not self.world.rank:  # what there is, should a later section end the process
            self._write(f"UNFINISHED - the last section that ended was {name}")

    def _json_problem(self) -> str:
        """Why the file cannot be written, which should show now; "" if it can."""
        path = self.options.json
        if path is not None and self.world.rank == 0:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            except OSError as error:
                return f"megabatch check: --json must be a path that can be written to, got {path}: {error}"
        return ""

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, flush=True)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    # ---- what can run

    def _reasons(self) -> dict[tuple[str, str, str], str]:
        """Why a function cannot run by a backend in a dtype, on any rank; "" where it can."""
        mine = {
            (function, backend, dtype): refusal(function, backend, dtype, self.world.device)
            for function in (LOSSES[0], *RETRIEVAL)
            for backend in self.backends
            for dtype in self.options.dtype
        }
        everyones = self.world.gather(mine)
        return {name: next((said[name] for said in everyones if said[name]), "") for name in mine}

    def _able(self, backend: str, function: str = LOSSES[0]) -> list[str]:
        """The dtypes that a backend can run in."""
        function = function if function in RETRIEVAL else LOSSES[0]
        return [dtype for dtype in self.options.dtype if self.reasons.get((function, backend, dtype)) == ""]

    def _refused(self) -> list[str]:
        """What was asked for by name and cannot run, in the library's words; the rest is noted."""
        refused = []
        for backend in self.backends:
            able = self._able(backend)
            without = {
                dtype: self.reasons[LOSSES[0], backend, dtype] for dtype in self.options.dtype if dtype not in able
            }
            some = len(self.options.dtype) < len(DTYPES)  # asked for by name as well
            if without and self.options.backend == backend and (not able or some):
                refused.append(next(iter(without.values())))
                self._note(refused[-1])
            elif without:
                where = f" in {', '.join(without)}" if able else ""
                _, *why, _ = next(iter(without.values())).splitlines()
                self._note(f"{backend} not checked{where}: {'; '.join(map(str.strip, why))}")
        return refused

    # ---- exactness

    def _exactness(self, section: str) -> None:
        def line(name: str, cells: Iterable[str]) -> None:
            cells = list(cells)
            self._say(report.line([name, *cells, ""], [NAME_WIDTH, *[CELL_WIDTH] * len(cells), 0]))

        self._say("\nexactness: the worst error as a share of what is allowed\n")
        line("", self.options.dtype)
        for function in self.functions:
            mine = [found for dtype in self.options.dtype for found in self._compare(function, dtype)]
            everyones = self.world.gather([asdict(found) for found in mine])
            everywhere = merged([[Comparison(**record) for record in records] for records in everyones])
            self.comparisons += everywhere
            for way in dict.fromkeys(found.way for found in everywhere):
                here = [found for found in everywhere if found.way == way]
                by_dtype = ([found for found in here if found.dtype == dtype] for dtype in self.options.dtype)
                line(f"{function}, {way}", map(cell, by_dtype))
        wrong = [found for found in self.comparisons if not found.ok]
        for found in wrong[:MOST_SHOWN]:
            self._say(f"WRONG: {found}")
        if len(wrong) > MOST_SHOWN:
            self._say(f"... and {len(wrong) - MOST_SHOWN} more")
        if not self.world.in_step:
            self._note("a call ended in different ways on different ranks, so no other over ranks was checked")

    def _compare(self, function: str, dtype: str) -> list[Comparison]:
        able = [backend for backend in self.backends if dtype in self._able(backend, function)]
        found: list[Comparison] = []
        for alone in (True, False) if self.world.size > 1 and self.world.in_step else (True,):
            exchanges = [""] if alone else ["ring", "gather"]
            ways = [Way(one, way, self.interpreted and one == "triton") for one in able for way in exchanges]
            if function in RETRIEVAL:
                found += compare_retrieval(function, dtype, ways, self.world, alone) if ways else []
                continue
            # Every other option is another kernel to compile.
            for case in cases(function, self.options.quick or self.interpreted, few="triton" in able) if ways else ():
                found += compare_loss(case, dtype, ways, self.world, alone)
        return found

    # ---- what only a GPU can show

    def _on_gpu(self, section: str) -> None:
        self.findings[section] = self._examined(section)
        self._say(f"\n{summary(section, self.findings[section])}")
        for found in self.findings[section]:
            if found.status == FAILED or (found.status == OK and (found.count or found.note)):
                self._say(f"  {'FAILED: ' if found.status == FAILED else ''}{found}")

    def _examined(self, section: str) -> list[Finding]:
        dtypes = sorted(self.options.dtype, key=lambda dtype: dtype != "float32")
        able = [backend for backend in self.backends if dtypes[0] in self._able(backend)]
        if why := self._why_not(able):
            return [Finding("all", NOT_RUN, note=why)]
        device = self.world.device
        if section == "launches":
            return gpu.launches(self.losses, able, dtypes[0], device)
        if section == "graphs":
            some = (gpu.DEFAULT, gpu.PLAIN, gpu.SCALE)
            return gpu.graphs(gpu.calls(self.losses, able, dtypes[:1], some), device)
        return gpu.host_reads(gpu.calls(self.losses, able, dtypes), device)

    def _why_not(self, able: Sequence[str]) -> str:
        """Why what needs a GPU is not run; "" where it is."""
        reasons = {
            "no CUDA device": self.world.device.type != "cuda",
            "--quick": self.options.quick,
            "several ranks, and it takes one process: megabatch check": self.world.size > 1,
            "no loss among --only": not self.losses,
            "no backend can run": not able,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    # ---- speed

    def _speed(self, section: str) -> None:
        if self.options.quick or self.options.skip_speed:
            return
        wrong = sorted({found.function for found in self.comparisons if not found.ok})
        if self.interpreted:
            return self._note("\nno speed is measured: kernels are interpreted")
        if self.refused or not self.comparisons or "exactness" in self.findings:
            return self._note("no speed is measured where results are missing")
        if wrong:
            self._note(f"no speed is measured where results are wrong: {', '.join(wrong)}")
        rows, width, dtype = ON_GPU if self.world.device.type == "cuda" else ON_CPU
        dtype = dtype if dtype in self.options.dtype else self.options.dtype[0]
        device, ranks = str(self.world.device), self.world.size
        for loss in ("clip", "siglip"):
            for count in self.options.rows or rows if f"{loss}_loss" in {*self.functions} - {*wrong} else ():
                case = Case(loss, count - count % ranks, self.options.width or width, dtype, device, ranks)
                found = self._contest(case)
                self.speed.append((case, found))
                head, body = table(found, {f"/ {found[0].title}": found[0].name})
                self._say(f"\nspeed and memory: {case}, forward and backward\n\n{report.table(head, body)}")

    def _contest(self, case: Case) -> list[Row]:
        """The contest of `megabatch bench`, with its contenders."""
        if case.ranks > 1:
            ours = ["ring", "gather"] if case.loss == "clip" else ["megabatch"]
        elif self.options.backend in BACKENDS:
            ours = [self.options.backend]
        else:
            ours = [backend for backend in ("triton", "eager") if case.dtype in self._able(backend)]
        names = [name for name in (*ours, *PEERS) if CONTENDERS[name].takes_part(case.loss, case.ranks, case.device)]
        where = Runner(case.device, self.world)
        return contest(case, [CONTENDERS[name] for name in names], Rules(seconds=1.0), where)

    # ---- the verdict, and the document

    def _verdict(self) -> str:
        wrong = [found for found in self.comparisons if not found.ok]
        bad = [f"{len(wrong)} of {len(self.comparisons)} comparisons, first: {wrong[0]}"] if wrong else []
        bad += [" ".join(text.split()) for text in self.refused[:1]]
        bad += [summary(name, found) for name, found in self.findings.items() if status(found) == FAILED]
        for case, rows in self.speed:
            ours = [row for row in rows if CONTENDERS[row.name].ours]
            bad += [f"speed, {case}, {row.title}: {row.status} {row.note}" for row in ours if row.status != "ok"][:1]
        if not self.comparisons and not bad:
            bad = ["nothing could be checked"]
        if bad:
            return f"FAILED - {'; '.join(bad)}"
        worst = max(found.share for found in self.comparisons)
        parts = [f"OK - {len(self.comparisons)} comparisons, the worst error is {worst:.2f} of what is allowed"]
        parts += [summary(name, found) for name, found in self.findings.items() if status(found) != NOT_RUN]
        left_out = {name: found[0].note for name, found in self.findings.items() if status(found) == NOT_RUN}
        if left_out:
            parts.append(f"not run: {', '.join(left_out)} ({next(iter(left_out.values()))})")
        return "; ".join([*parts, *(words for case, rows in self.speed[:1] if (words := beside_dense(case, rows)))])

    def _publish(self, verdict: str) -> None:
        if self.world.rank == 0 and self.options.json:
            self._write(verdict)
            print(f"\nwritten to {self.options.json}")
        elif self.world.rank == 0:
            print(f"\nfor a report:\n{json.dumps(self._document(verdict, whole=False), allow_nan=False)}\n")

    def _write(self, verdict: str) -> None:
        text = json.dumps(self._document(verdict, whole=True), allow_nan=False, indent=1)
        self.options.json.write_text(text + "\n")

    def _document(self, verdict: str, whole: bool) -> dict[str, Any]:
        """`whole`: every result; else the comparisons that failed, the worst of every group, and findings that tell."""
        groups: dict[tuple[str, str, str], list[Comparison]] = {}
        for found in self.comparisons:
            groups.setdefault((found.function, found.way, found.dtype), []).append(found)
        exactness = [
            {
                **dict(zip(("function", "way", "dtype"), group, strict=True)),
                "comparisons": len(members),
                "failed": sum(not member.ok for member in members),
                "worst": max(members, key=lambda member: member.share).record(),
            }
            for group, members in groups.items()
        ]
        return {
            "machine": self.machine,
            "exactness": exactness,
            "failed": [found.record() for found in self.comparisons if not found.ok],
            "sections": {
                name: {
                    "status": status(findings),
                    "examined": sum(found.status != NOT_RUN for found in findings),
                    "failed": sum(found.status == FAILED for found in findings),
                    "results": [
                        {key: value for key, value in asdict(found).items() if value not in (None, "")}
                        for found in findings
                        if whole or found.status != OK or found.count or found.note
                    ],
                }
                for name, findings in self.findings.items()
            },
            "speed": [{**asdict(case), "contenders": [row.record() for row in rows]} for case, rows in self.speed],
            "notes": self.notes,
            "verdict": verdict,
            **({"comparisons": [found.record() for found in self.comparisons]} if whole else {}),
        }
