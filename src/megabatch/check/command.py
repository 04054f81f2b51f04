"""`megabatch check`: exactness, what only a GPU can show, speed and memory, then the verdict."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ..distributed.world import World, joined
from . import graphs, host_reads, launches, report, speed
from .calls import calls
from .cases import DTYPES, LOSSES, cases
from .exactness import RETRIEVAL, Comparison, Way, compare_loss, compare_retrieval, merged, refusal
from .findings import FAILED, NOT_RUN, Finding, raised, summary
from .speed import Contest

DESCRIPTION = """\
Is megabatch exact on this machine, and how fast is it?

    megabatch check
    torchrun --nproc-per-node 4 -m megabatch check

Exactness: every loss, dtype and backend, with the options that reach a kernel, on odd sizes and on a fitted batch at
scale 100: values, statistics and all gradients against megabatch.reference in float64 on the same inputs, and a second
run that must give the same bits. The error may exceed that of the dense loss in the same dtype by a few roundings. A
figure of the table is the worst error as a share of what is allowed: up to 1 is right. Under torchrun every rank
checks its own device alone, and then all ranks one batch together, with different numbers of rows on each.

On a GPU, in one process: host reads, which must be none, in forward and backward of every loss with every option;
launches, counted by the profiler, of a small step and of a tile; graphs, captured by torch.cuda.graph and by
torch.compile(mode="reduce-overhead") and replayed with other numbers. Elsewhere they are reported as not run.

Speed and memory: a training step against open_clip's formula, and open_clip itself where installed; on a GPU also
against torch.compile of the dense loss, inf_cl and siglip-kernel. They take turns; the best run counts. Memory is the
peak beyond inputs and gradients: of the allocator on a GPU, else resident memory. No loss is timed that is wrong.

What fails in one section stops no other. The last line is the verdict, the exit code 0 or 1. The line of JSON before it
is for a report; --json writes it to a file instead, with every result, after every section.
"""
FUNCTIONS = (*LOSSES, *RETRIEVAL)
BACKENDS = ("eager", "triton")
# Rows, width and dtype of the speed table.
ON_GPU, ON_CPU = ([8192, 32768], 768, "bfloat16"), ([4096], 512, "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=_device, default="auto", help="auto (default: cuda if there is one), cpu, cuda"
    )
    parser.add_argument(
        "--backend",
        choices=("all", "auto", *BACKENDS),
        default="all",
        help="all (default): every backend that can run here; auto: the one that the library chooses",
    )
    parser.add_argument("--only", nargs="+", choices=FUNCTIONS, metavar="NAME", help=f"of {', '.join(FUNCTIONS)}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="of the features; default: all")
    parser.add_argument("--quick", action="store_true", help="exactness only, few cases of tiny sizes")
    parser.add_argument("--skip-speed", action="store_true", help="everything but speed and memory")
    parser.add_argument("--rows", type=_positive, nargs="+", metavar="N", help="batch sizes of the speed table")
    parser.add_argument("--width", type=_positive, metavar="D", help="width of the features of the speed table")
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


def _positive(word: str) -> int:
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {word!r}.")
    return number


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
        self.dtypes: list[str] = options.dtypes or list(DTYPES)
        self.backends = BACKENDS if options.backend == "all" else (options.backend,)
        self.comparisons: list[Comparison] = []
        self.findings: dict[str, list[Finding]] = {}
        self.contests: list[Contest] = []
        self.notes: list[str] = []

    def run(self) -> int:
        if problem := self._json_problem():
            self._say(problem)
            return 2
        self.reasons = self._reasons()
        self.interpreted = self._interpreted()
        self.machine = report.machine(self.world, self.interpreted)
        self._say(report.describe(self.machine))
        self.refused = self._refused()
        if any(not reason for reason in self.reasons.values()):
            self._section("exactness", self._exactness)
        self._on_gpu(host_reads.SECTION)
        self._on_gpu(launches.SECTION)
        self._section("speed", self._speed)
        self._on_gpu(graphs.SECTION)  # last, for a capture that fails may leave the device unusable
        verdict = report.verdict(self.comparisons, self.findings, self.contests, self.refused)
        self._publish(verdict)
        self._say(f"megabatch check: {verdict}")
        self.world.wait()  # torchrun ends the others when one has failed
        return 0 if verdict.startswith("OK") else 1

    def _section(self, name: str, work: Callable[[], None]) -> None:
        """A section that breaks is a failure of its own, and the next one follows. Ranks would lose each other."""
        try:
            work()
        except Exception as error:
            if self.world.size > 1:
                raise
            self.findings.setdefault(name, []).append(raised(name, "the section", error))
            self._say(f"\n{summary(name, self.findings[name])}")
        if self.options.json and not self.world.rank:  # what there is, should a later section end the process
            self._write(f"UNFINISHED - the last section that ended was {name}")

    def _json_problem(self) -> str:
        """Why the file cannot be written, which should show now; "" if it can."""
        problem = ""
        if self.options.json and self.world.rank == 0:
            try:
                self.options.json.parent.mkdir(parents=True, exist_ok=True)
                self.options.json.touch()
            except OSError as error:
                problem = (
                    f"megabatch check: --json must be a path that can be written to, got {self.options.json}: {error}"
                )
        said: str = self.world.gather(problem)[0]
        return said

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, flush=True)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    # ---- what can run

    def _reasons(self) -> dict[str, str]:
        """Why a function cannot run by a backend in a dtype, on any rank; "" where it can."""
        mine = {
            f"{function} {backend} {dtype}": refusal(function, backend, dtype, self.world.device)
            for function in (LOSSES[0], *RETRIEVAL)
            for backend in self.backends
            for dtype in self.dtypes
        }
        everyones = self.world.gather(mine)
        return {name: next((said[name] for said in everyones if said[name]), "") for name in mine}

    def _reason(self, function: str, backend: str, dtype: str) -> str:
        return self.reasons[f"{function if function in RETRIEVAL else LOSSES[0]} {backend} {dtype}"]

    def _interpreted(self) -> bool:
        """Kernels that run on a CPU are."""
        wanted = self.world.device.type == "cpu" and "triton" in self.backends
        return wanted and any(not self._reason(LOSSES[0], "triton", dtype) for dtype in self.dtypes)

    def _refused(self) -> list[str]:
        """What was asked for by name and cannot run, in the library's words; the rest is noted."""
        refused = []
        for backend in self.backends:
            reasons = {dtype: self._reason(LOSSES[0], backend, dtype) for dtype in self.dtypes}
            by_name = self.options.backend == backend
            if by_name and (all(reasons.values()) or (self.options.dtypes and any(reasons.values()))):
                refused.append(next(filter(None, reasons.values())))
                self._note(refused[-1])
            else:
                without = [dtype for dtype in reasons if reasons[dtype]]
                if without:
                    where = f" in {', '.join(without)}" if len(without) < len(reasons) else ""
                    _, *why, _ = reasons[without[0]].splitlines()
                    self._note(f"{backend} not checked{where}: {'; '.join(map(str.strip, why))}")
        return refused

    # ---- exactness

    def _exactness(self) -> None:
        self._say("\nexactness: the worst error as a share of what is allowed\n")
        self._say(report.exactness_line("", self.dtypes))
        for function in self.functions:
            mine = [found for dtype in self.dtypes for found in self._compare(function, dtype)]
            everyones = self.world.gather([asdict(found) for found in mine])
            everywhere = merged([[Comparison(**record) for record in records] for records in everyones])
            self.comparisons += everywhere
            for way in dict.fromkeys(found.way for found in everywhere):
                here = [found for found in everywhere if found.way == way]
                cells = [report.cell([found for found in here if found.dtype == dtype]) for dtype in self.dtypes]
                self._say(report.exactness_line(f"{function}, {way}", cells))
        wrong = [found for found in self.comparisons if not found.ok]
        for found in wrong[: report.MOST_SHOWN]:
            self._say(f"WRONG: {found}")
        if len(wrong) > report.MOST_SHOWN:
            self._say(f"... and {len(wrong) - report.MOST_SHOWN} more")
        if not self.world.in_step:
            self._note("a call ended in different ways on different ranks, so no other over ranks was checked")

    def _compare(self, function: str, dtype: str) -> list[Comparison]:
        able = [backend for backend in self.backends if not self._reason(function, backend, dtype)]
        found: list[Comparison] = []
        if not able:
            return found
        for alone in (True, False) if self.world.size > 1 and self.world.in_step else (True,):
            exchanges = [""] if alone else ["ring", "gather"]
            ways = [
                Way(backend, exchange, self.interpreted and backend == "triton")
                for backend in able
                for exchange in exchanges
            ]
            if function in RETRIEVAL:
                found += compare_retrieval(function, dtype, ways, self.world, alone)
            else:
                # Every other option is another kernel to compile.
                for case in cases(function, self.options.quick or self.interpreted, few="triton" in able):
                    found += compare_loss(case, dtype, ways, self.world, alone)
        return found

    # ---- what only a GPU can show

    def _on_gpu(self, section: str) -> None:
        def work() -> None:
            self.findings[section] = self._examined(section)
            self._say(f"\n{summary(section, self.findings[section])}")
            for found in [found for found in self.findings[section] if not found.silent and found.status != NOT_RUN]:
                self._say(f"  {'FAILED: ' if found.status == FAILED else ''}{found}")

        self._section(section, work)

    def _examined(self, section: str) -> list[Finding]:
        losses = [function for function in self.functions if function in LOSSES]
        dtypes = ["float32", *self.dtypes] if "float32" in self.dtypes else self.dtypes
        able = [backend for backend in self.backends if not self._reason(LOSSES[0], backend, dtypes[0])]
        if why := self._why_not(losses, able):
            return [Finding(section, "all", NOT_RUN, note=why)]
        device = self.world.device
        if section == launches.SECTION:
            return launches.examine(losses, able, dtypes[0], device)
        if section == graphs.SECTION:
            return graphs.examine(calls(losses, able, dtypes[:1], graphs.OPTIONS), device)
        return host_reads.examine(calls(losses, able, dtypes), device)

    def _why_not(self, losses: list[str], able: list[str]) -> str:
        """Why what needs a GPU is not run; "" where it is."""
        if self.world.device.type != "cuda":
            return "no CUDA device"
        if self.options.quick:
            return "--quick"
        if self.world.size > 1:
            return "several ranks, and it takes one process: megabatch check"
        if not losses or not able:
            return "no loss among --only" if not losses else "no backend can run"
        return ""

    # ---- speed

    def _speed(self) -> None:
        if self.options.quick or self.options.skip_speed:
            return
        if self.interpreted:
            return self._note("\nno speed is measured: kernels are interpreted")
        wrong = {found.function for found in self.comparisons if not found.ok}
        right = [function for function in self.functions if function not in wrong]
        if self.refused or not self.comparisons or "exactness" in self.findings:
            return self._note("no speed is measured where results are missing")
        if wrong:
            self._note(f"no speed is measured where results are wrong: {', '.join(sorted(wrong))}")
        rows, width, dtype = ON_GPU if self.world.device.type == "cuda" else ON_CPU
        dtype = dtype if dtype in self.dtypes else self.dtypes[0]
        rows, width = self.options.rows or rows, self.options.width or width
        for contest in speed.contests(self.world, right, rows, width, dtype, self.options.backend):
            self.contests.append(contest)
            over = f", {self.world.size} ranks" if self.world.size > 1 else ""
            self._say(f"\nspeed and memory: {contest.case}{over}, forward and backward\n\n{contest.table}")

    # ---- the document

    def _publish(self, verdict: str) -> None:
        if self.world.rank:
            return
        if self.options.json:
            self._write(verdict)
            print(f"\nwritten to {self.options.json}")
        else:
            print(f"\nfor a report:\n{self._document(verdict)}\n")

    def _write(self, verdict: str) -> None:
        self.options.json.write_text(self._document(verdict) + "\n")

    def _document(self, verdict: str) -> str:
        whole = self.options.json is not None
        found = report.document(
            self.machine, self.comparisons, self.findings, self.contests, self.notes, verdict, whole=whole
        )
        return json.dumps(found, allow_nan=False, indent=1 if whole else None)
