"""How fast is it, and in what memory? A training step against the dense loss and other packages, by turns.

In one process with the contenders of `megabatch bench loss`, over ranks with the entrants of `megabatch bench ring`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megabatch.bench.cases import Case
from megabatch.bench.instruments import processes
from megabatch.bench.instruments.ranks import Member
from megabatch.bench.loss import trial
from megabatch.bench.loss.contenders import Contender, Step, package, step_of
from megabatch.bench.report import mebibytes, ratio, remark, seconds, table
from megabatch.bench.results import Row
from megabatch.bench.ring import trial as ring_trial
from megabatch.bench.ring.contenders import ENTRANTS
from megabatch.bench.ring.trial import Digest, Lap, Taken

from ..distributed.world import World
from .exactness import refusal

LOSSES = ("clip", "siglip")
OURS = {"triton", "eager", "ring", "gather"}
DENSE = "formula"
REPEATS, SECONDS = 3, 1.0


def siglip_kernel(case: Case) -> Step:
    """Takes the logarithm of the scale."""
    loss = package("siglip_kernel").fused_siglip_loss

    def fused(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        value: Tensor = loss(image, text, scale.log(), bias)
        return value

    return step_of(fused)


SIGLIP_KERNEL = Contender("siglip_kernel", "siglip-kernel fused_siglip_loss", siglip_kernel, ("siglip",), multiple=64)


@dataclass(frozen=True)
class Contest:
    """One table: a case and what became of those who took part."""

    case: Case
    rows: Sequence[Row]

    @property
    def healthy(self) -> bool:
        """Ours ran and was right; others may be wrong, too large or missing."""
        return all(row.status == "ok" for row in self.rows if row.name in OURS)

    @property
    def table(self) -> str:
        base = self.rows[0].best
        body = [
            (
                row.title + (" (dense)" if row.name == DENSE else ""),
                seconds(row.best),
                ratio(row.best, base),
                mebibytes(row.peak_bytes),
                remark(row.status, row.note),
            )
            for row in self.rows
        ]
        return table(("", "time", f"/ {self.rows[0].title}", "peak MiB", ""), body)

    @property
    def summary(self) -> str:
        """Against the dense loss, in words; "" where there is nothing to compare."""
        ours = self.rows[0]
        dense = next((row for row in self.rows if row.name == DENSE), None)
        if dense is None or ours.best is None:
            return ""
        if dense.best is None:
            return f"{self.case}: dense {remark(dense.status, dense.note)}"
        words = f"{self.case}: {dense.best / ours.best:.1f} times as fast as dense"
        if ours.peak_bytes and dense.peak_bytes:
            words += f", in {ours.peak_bytes / dense.peak_bytes:.1%} of its memory"
        return words


def contests(
    world: World, functions: Sequence[str], rows: Sequence[int], width: int, dtype: str, backend: str
) -> Iterator[Contest]:
    """Those of `functions` that take part. Over ranks `rows` are those of all, and only clip_loss does."""
    for loss in LOSSES if world.size == 1 else LOSSES[:1]:
        if f"{loss}_loss" not in functions:
            continue
        for count in rows:
            case = Case(loss, count - count % world.size, width, dtype, device=str(world.device))
            yield Contest(case, _alone(case, backend) if world.size == 1 else _over_ranks(case, world))


def _alone(case: Case, backend: str) -> list[Row]:
    device = torch.device(case.device)
    on_gpu = device.type == "cuda"
    by_kernels = on_gpu and not refusal(case.kind.function, "triton", case.dtype, device)
    ours = [backend] if backend in OURS else ["triton", "eager"] if by_kernels else ["eager"]
    names = [*ours, DENSE, "open_clip"]
    if on_gpu:
        trial.KNOWN.setdefault(SIGLIP_KERNEL.name, SIGLIP_KERNEL)
        names += ["compiled", "inf_cl", SIGLIP_KERNEL.name]
    return trial.contest(case, names, REPEATS, SECONDS)


def _over_ranks(case: Case, world: World) -> list[Row]:
    member = Member(world.rank, world.size, everyone=world)
    rows = [_entered(case, member, world, name) for name in ("ring", "gather", DENSE, "open_clip")]
    runners = [row for row in rows if row.status == "ok"]
    mine = ring_trial.race(member, case, [row.name for row in runners], REPEATS)
    ring_trial.judge(case, world.size, runners, [_taken(*said) for said in world.gather(mine)])
    return rows


def _entered(case: Case, member: Member, world: World, name: str) -> Row:
    """One entrant on its own: is it there, does it fit, what memory does it need."""
    row, entrant = Row(name, ENTRANTS[name].title), ENTRANTS[name]
    fits = case.device != "cpu" or trial.would_fit(entrant.held(case, world.size))
    if not all(world.gather(fits)):
        row.status = "would not fit"
        return row
    small = case.with_rows(world.size * 64)
    peak, failure = None, ""
    try:
        outcome = processes.run_here(ring_trial.examine, member, case, small, name)
        peak = None if outcome is None else outcome[1]
    except processes.Failed as failed:
        failure = f"rank {world.rank}: {failed}"
    peaks, failures = zip(*world.gather([peak, failure]), strict=True)
    if any(failures):
        row.status, row.note = "failed", next(filter(None, failures))
    elif None in peaks:
        row.status = "not installed"
    else:
        row.peak_bytes = max(peaks)
    return row


def _taken(digests: dict[str, list[float]], laps: dict[str, list[Any]]) -> Taken:
    """As it was before it travelled."""
    return Taken(
        {name: Digest(*numbers) for name, numbers in digests.items()},
        {name: [Lap(*run) for run in runs] for name, runs in laps.items()},
    )
