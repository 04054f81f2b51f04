"""Is it exact? Every result of a case against `megabatch.reference` in float64, on the same inputs.

The error may exceed that of the dense function in the same dtype by the slack of `tolerance.py` only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

import megabatch
from megabatch.tolerance import eps, slack, summed_in

from ..distributed.world import World
from . import gpu
from .cases import GRADIENT, SCALARS, UPSTREAM, Case, Results, Share

ALONE, ALL_ALIKE, TWICE, HOST_READS = "one process", "same on all ranks", "same bits twice", "host reads"
REFUSED = "cannot run this call"  # the library's words
# Triton's interpreter cuts bfloat16 off where a GPU rounds: twice a rounding, always to one side, so errors add up.
TRUNCATION = 3


class Way(NamedTuple):
    """How a case is run: by which backend, and over ranks with which exchange; "" for this process alone."""

    backend: str
    exchange: str = ""

    def __str__(self) -> str:
        return f"{self.backend}, {self.exchange or ALONE}"


@dataclass(frozen=True)
class Comparison:
    """One result that was held against what it must be. `error` is None where there was none; `note` says why."""

    function: str
    case: str
    dtype: str
    way: str
    rank: int
    result: str
    error: float | None
    allowed: float = 0.0
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.allowed < math.inf

    @property
    def refused(self) -> bool:
        """The backend cannot run such a call here."""
        return REFUSED in self.note

    @property
    def share(self) -> float:
        """The error as a share of what is allowed."""
        if self.ok and not self.error:
            return 0.0
        return self.error / self.allowed if self.error and self.allowed else math.inf

    def __str__(self) -> str:
        found = self.note or f"off by {self.error:.2e}, allowed {self.allowed:.2e}"
        return f"{self.function} ({self.case}, {self.dtype}, {self.way}, rank {self.rank}) {self.result}: {found}"


def compare(case: Case, dtype: str, way: Way, world: World, watched: bool = False) -> Iterator[Comparison]:
    """Every result of two runs: the first against the truth, the second against the first. `watched`: the host must not
    wait for the GPU. Ranks that have lost each other compare nothing more."""
    rank, group, exchange = 0, None, {}
    if way.exchange:
        rank, group, exchange = world.rank, world.group, {"exchange": way.exchange}
        if not world.in_step:
            return
    shares, truths, dense = _expected(case, dtype, world.size if way.exchange else 1, world.device)
    inputs = case.inputs(shares[rank], world.device)
    run = partial(case.call, megabatch, inputs, backend=way.backend, group=group, **exchange)
    ours, again, read, complaint = {}, {}, "", ""
    try:
        ours, again = run(), run()
        read = gpu.host_read(run) if watched else ""
    except Exception as error:
        complaint = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    if way.exchange:
        complaint = _agreed(complaint, world)
    about = partial(Comparison, case.function, case.title, dtype, str(way), world.rank)
    if complaint:
        yield about("the call", None, note=complaint)
        return
    allowed = _allowances(case, dtype, truths, dense, way.backend == "triton" and world.device.type == "cpu")
    for name, exact in truths[rank].items():
        if name not in ours or ours[name].shape != exact.shape:
            got = f"shape {tuple(ours[name].shape)}" if name in ours else "nothing"
            yield about(name, None, note=f"got {got} instead of shape {tuple(exact.shape)}")
            continue
        off = _largest(ours[name].cpu().double() - exact)
        finite = math.isfinite(off)
        yield about(name, off if finite else None, allowed[name], "" if finite else "is not finite")

    def required(what: str, wrong: str) -> Comparison:
        return about(what, None if wrong else 0.0, note=wrong)

    differing = ", ".join(name for name, x in ours.items() if not torch.equal(x, again[name]))
    yield required(TWICE, differing and f"{differing}: another result in a second run")
    if watched:
        yield required(HOST_READS, read and f"the host waits for the GPU at {read}")
    if way.exchange and "loss" in ours and ours["loss"].dim() == 0:
        seen = sorted(set(world.gather(ours["loss"].item())))
        yield required(ALL_ALIKE, f"ranks got {' and '.join(map(repr, seen))}" if len(seen) > 1 else "")


@lru_cache(maxsize=2)  # the ways of a case have the same
def _expected(
    case: Case, dtype: str, ranks: int, device: torch.device
) -> tuple[list[Share], list[Results], list[Results]]:
    """What every rank brings, what it must get, and what the dense function gives in this dtype, or float32."""
    shares = case.shares(ranks, getattr(torch, dtype))
    dense = case.expected(shares, device, torch.float32 if dtype == "float64" else None)
    return shares, case.expected(shares, torch.device("cpu"), torch.float64), dense


def _agreed(complaint: str, world: World) -> str:
    """Of all ranks, where they complain of different things."""
    complaints = world.gather(complaint)
    if len(set(complaints)) == 1:
        return complaint
    world.in_step = False
    # Whoever waited in vain knows least of the cause.
    told = [f"rank {rank} {said}" for rank, said in enumerate(complaints) if said]
    return "; ".join(sorted(told, key=lambda said: " waited for " in said))


def _allowances(
    case: Case, dtype: str, truths: list[Results], dense: list[Results], interpreted: bool
) -> dict[str, float]:
    """What each result may be off by: the dense function's own error on any rank, and the slack."""
    summed, features = case.options.get("reduction", "mean") != "mean", getattr(torch, dtype)
    # In float64 the truth is as far off as the dense function: in proportion, as that is in float32.
    finer = 2 * eps(torch.float64) / eps(torch.float32) if dtype == "float64" else 1.0
    allowed = {}
    for name in truths[0]:
        exact = [truth[name] for truth in truths]
        error = max(_largest(peer[name].cpu().double() - own) for peer, own in zip(dense, exact, strict=True))
        largest, natural, kind = max(map(_largest, exact)), 1.0, summed_in(features)
        if name.startswith(GRADIENT) and name.removeprefix(GRADIENT) not in SCALARS:
            # dlogits are of size 1 / rows, and the scale comes on top.
            natural, kind = case.scale * len(truths) / (1 if summed else sum(map(len, exact))), features
        times = TRUNCATION if interpreted and kind == torch.bfloat16 else 1
        allowed[name] = finer * error + times * UPSTREAM * slack(kind, largest / UPSTREAM, natural, case.scale)
    return allowed


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def worst(everyones: Sequence[Sequence[Comparison]]) -> list[Comparison]:
    """The ranks' comparisons as one list: each as it was on the rank where it was worst."""
    found: dict[tuple[str, ...], Comparison] = {}
    for one in (one for comparisons in everyones for one in comparisons):
        key = (one.function, one.case, one.dtype, one.way, one.result)
        if key not in found or one.share > found[key].share:
            found[key] = one
    return list(found.values())
