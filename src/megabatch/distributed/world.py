"""The processes that work together: this one, or the ranks that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# How long a rank waits for another inside a call: it may be compiling kernels. And outside, for one that still waits.
PATIENCE, LONGER = timedelta(minutes=5), timedelta(minutes=30)


@dataclass
class World:
    """This process, rank `rank` of `size`, and the device it computes on.

    Attributes:
        control_group: The same ranks, apart from the group that the work goes through, to talk about it; None: that
            group itself.
        in_step: A call on the group ended the same way on all ranks, so another may follow.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    control_group: dist.ProcessGroup | None = None
    in_step: bool = True

    @property
    def group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.size > 1 else None

    @property
    def backend(self) -> str:
        return dist.get_backend() if self.size > 1 else "none"

    def gather(self, mine: Any) -> list[Any]:
        """The objects of all ranks."""
        everyones = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(everyones, mine, group=self.control_group)
        return everyones

    def wait(self) -> None:
        """For everyone."""
        self.gather(None)


@contextmanager
def joined(device: str, *, control_group: bool = True) -> Iterator[World]:
    """The group of torchrun's ranks, or the one there is already, or this process alone.

    Args:
        control_group: Make one, a mesh of connections on the CPU, for programs that go on after a call failed.
    """
    place = torch.device(device)
    patience = PATIENCE if control_group else LONGER
    starting = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if starting:
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(place)
            dist.init_process_group("nccl", timeout=patience, device_id=place)
        else:
            dist.init_process_group("gloo", timeout=patience)
    if not (dist.is_available() and dist.is_initialized()):
        yield World(place)
        return
    apart = dist.new_group(backend="gloo", timeout=LONGER) if control_group else None
    try:
        yield World(place, dist.get_rank(), dist.get_world_size(), apart)
    finally:
        if starting or apart is not None:
            dist.destroy_process_group(None if starting else apart)
