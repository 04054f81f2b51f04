"""A rank that dies or sits still ends all others with an error that says where they waited, for whom, and why."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import megabatch
from megabatch.backends.eager import Eager

from .ranks import PATIENCE, run_apart

GROUP_TIMEOUT = 10.0  # seconds
AT_ONCE, IN_THE_END = 0.8 * GROUP_TIMEOUT, 4 * GROUP_TIMEOUT
VICTIM = 1
TORCH_SAYS = "Connection|connection|Timed out|timed out|Read error|reset by peer|Broken pipe|closed"


class Fault(NamedTuple):
    """What happens to the victim, at its first tile of a visiting block, in the second step of training."""

    num_ranks: int
    signal: signal.Signals
    phase: str
    loss: str = "clip_loss"
    exchange: str = "ring"
    overlap: bool = True

    @property
    def told_at_once(self) -> bool:
        """Whether torch tells of a death at once: gloo does, unless it interrupts a transfer, which takes overlap."""
        return self.signal == signal.SIGKILL and not self.overlap

    def __str__(self) -> str:
        how = f"{self.loss} {self.exchange}{'' if self.overlap else ' without overlap'}"
        return f"{self.signal.name} in the {self.phase} pass of {self.num_ranks} ranks, {how}"


FAULTS = [
    Fault(3, signal.SIGKILL, "forward"),
    Fault(4, signal.SIGKILL, "forward", overlap=False),
    Fault(4, signal.SIGKILL, "backward"),
    Fault(3, signal.SIGKILL, "backward", overlap=False),
    Fault(4, signal.SIGKILL, "forward", "nt_xent_loss"),
    Fault(3, signal.SIGKILL, "backward", "siglip_loss", "gather"),
    Fault(4, signal.SIGSTOP, "forward"),
    Fault(3, signal.SIGSTOP, "backward"),
]


def strike(fault: Fault) -> None:
    """From now on: at the second tile of the pass, which is the first of a block from another rank."""
    name = {"forward": "accumulate_statistics", "backward": "accumulate_gradients"}[fault.phase]
    real, count = getattr(Eager, name), 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), fault.signal)
        return real(*args, **kwargs)

    setattr(Eager, name, counting)


def step(rank: int, group: Any, fault: Fault) -> None:
    generator = torch.Generator().manual_seed(rank)
    # Blocks that the buffers between two processes cannot hold.
    sides = [torch.randn(64, 8192, generator=generator).requires_grad_() for _ in range(2)]
    loss = getattr(megabatch, fault.loss)(
        *sides, 5.0, group=group, normalize=True, exchange=fault.exchange, overlap=fault.overlap
    )
    loss.backward()


def rank_in_danger(rank: int, group: Any, folder: Path, fault: Fault) -> None:
    step(rank, group, fault)
    if rank == VICTIM:
        strike(fault)
    start = time.monotonic()
    told: dict[str, Any] = {"text": None}
    try:
        while time.monotonic() - start < IN_THE_END:
            step(rank, group, fault)
    except RuntimeError as error:
        told = {"text": str(error)}
    told["seconds"] = time.monotonic() - start
    (folder / f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # as one does after such an error: the others learn of it at once


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_rank_that_fails_ends_the_others(fault: Fault, tmp_path: Path) -> None:
    exits = run_apart(
        fault.num_ranks,
        rank_in_danger,
        tmp_path,
        fault,
        group_timeout=GROUP_TIMEOUT,
        stopped=(VICTIM,) if fault.signal == signal.SIGSTOP else (),
    )
    assert exits == [-signal.SIGKILL if rank == VICTIM else 0 for rank in range(fault.num_ranks)]
    everyone = set(range(fault.num_ranks))
    for rank in everyone - {VICTIM}:
        waits_for_the_victim = rank == (VICTIM + 1) % fault.num_ranks
        in_time = AT_ONCE if fault.told_at_once and waits_for_the_victim else IN_THE_END
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        text = told["text"]
        assert text is not None, f"rank {rank} saw nothing"
        assert text.startswith(f"{fault.loss}: "), text
        named = {int(number) for number in re.findall(r"rank (\d)", text)} - {rank}
        assert named or "waited for the other ranks" in text, f"says whom it waited for: {text}"
        around_it = {(rank + way) % fault.num_ranks for way in (-1, 1)}
        assert named <= (around_it if (fault.loss, fault.exchange) == ("clip_loss", "ring") else everyone), text
        assert re.search(r"step \d|the sum" if fault.exchange == "ring" else r"the (gather|sum|handshake)", text), text
        assert fault.phase in text, text
        assert re.search(TORCH_SAYS, text), text
        assert told["seconds"] < in_time, f"rank {rank} took {told['seconds']:.1f} s: {text}"


HOLDING = """
import weakref, torch, torch.distributed as dist, megabatch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
megabatch.clip_loss(torch.eye(3), torch.eye(3), 10.0, group=dist.group.WORLD)
dist.destroy_process_group()
print("gone" if group() is None else "held")
"""


def test_nothing_holds_a_group_that_was_destroyed() -> None:
    """Or its threads, which may need the interpreter, are there when the interpreter has ended."""
    ended = subprocess.run(
        [sys.executable, "-c", HOLDING], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert ended.stdout.split()[-1] == "gone"  # gloo of torch 2.8 prints lines of its own
