"""What ranks tell each other once per step: a few numbers, in one collective of the group that trains."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..distributed.world import World

_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


class StepFacts(NamedTuple):
    """Of a step, on one rank or on all together.

    Attributes:
        rows: Samples that are trained on.
        skipped: Samples that were left out.
        unlisted: Those among them that skipped.jsonl lacks.
        nonfinite: Ranks on which the step before taught nothing.
        signal: The highest number of one that asks to leave, or 0.
    """

    rows: int
    skipped: int
    unlisted: int
    nonfinite: int
    signal: int


def exchange(world: World, mine: StepFacts) -> Callable[[], StepFacts]:
    """Starts to gather, at the start of a step. What it returns waits, so call that when the step's work is queued."""
    if world.group is None:
        return lambda: mine
    sent = torch.tensor(mine, device=world.device)
    everyones = sent.new_empty(world.size * len(mine))
    work = _all_gather_single(everyones, sent, group=world.group, async_op=True)

    @cache
    def read() -> StepFacts:
        work.wait()
        *others, signals = everyones.view(world.size, -1).T.tolist()
        return StepFacts._make([*map(sum, others), max(signals)])

    return read
