"""The processes that work together: this one, or the ranks that torchrun or srun started."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .processes import end_with

# How long a rank waits for another inside a call: it may be compiling kernels. And outside, for one that still waits.
PATIENCE, LONGER = timedelta(minutes=5), timedelta(minutes=30)

T = TypeVar("T")


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

    def broadcast(self, value: Any) -> Any:
        """The object of rank 0."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self.control_group)
        return values[0]

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes. If it raises, so do all ranks."""
        made, error = None, None
        try:
            made = make() if self.rank == 0 else None
        except Exception as caught:
            error = caught
        made, error = self.broadcast((made, error))
        if error is not None:
            raise error
        return made  # type: ignore[no-any-return]

    def wait(self) -> None:
        """For everyone."""
        self.gather(None)


@contextmanager
def joined(device: str, *, control_group: bool = True) -> Iterator[World]:
    """The group of the ranks that torchrun or srun started, or the one there is already, or this process alone.

    Args:
        control_group: Make one, a mesh of connections on the CPU, for programs that go on after a call failed.
    """
    place = torch.device(device)
    running = dist.is_available() and dist.is_initialized()
    launch = None if running else launched(os.environ)
    if launch is not None and place.type == "cuda":
        place = torch.device("cuda", device_index(launch.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(place)
    if launch is not None:
        _join(launch, place, PATIENCE if control_group else LONGER)
    elif not running:
        yield World(place)
        return
    apart = dist.new_group(backend="gloo", timeout=LONGER) if control_group else None
    try:
        yield World(place, dist.get_rank(), dist.get_world_size(), apart)
    finally:
        if launch is not None or apart is not None:
            dist.destroy_process_group(apart if launch is None else None)


def _join(launch: "Launch", place: torch.device, patience: timedelta) -> None:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
    meet: Any = rendezvous  # which torch has not typed
    store, rank, size = next(meet(launch.url, launch.rank, launch.size, timeout=patience))
    # torchrun keeps one store for all restarts: ranks would meet the addresses of those that died.
    store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    on_gpus: dict[str, Any] = {"device_id": place} if place.type == "cuda" else {}
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience, **on_gpus)


@dataclass(frozen=True)
class Launch:
    """How a rank finds the others."""

    url: str
    rank: int
    size: int
    local_rank: int


def launched(variables: Mapping[str, str]) -> Launch | None:
    """What torchrun or srun say in a process's environment; None where it is alone.

    torchrun's variables win: torchrun may be started by srun. A batch script has srun's variables too, but the step's.
    """
    launch = None
    if "WORLD_SIZE" in variables:
        rank, size, local_rank = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        launch = Launch("env://", rank, size, local_rank)
    elif "SLURM_PROCID" in variables and ("SLURM_STEP_ID" in variables or variables.get("ENVIRONMENT") != "BATCH"):
        size = int(variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS", "1"))
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "localhost")
        address = variables.get("MASTER_ADDR", first_host(nodes))
        # The same for all tasks of a step, another for its neighbours, below the ports that systems give away.
        number = int(variables.get("SLURM_JOB_ID", "0")) * 7 + int(variables.get("SLURM_STEP_ID", "0"))
        port = variables.get("MASTER_PORT", 10_000 + number % 20_000)
        rank, local_rank = int(variables["SLURM_PROCID"]), int(variables.get("SLURM_LOCALID", "0"))
        launch = Launch(f"tcp://{address}:{port}", rank, size, local_rank)
    return launch if launch is not None and launch.size > 1 else None


def first_host(nodes: str) -> str:
    """Of SLURM's list, such as node[01-04,07],login1: node01."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]


def device_index(local_rank: int, count: int) -> int:
    """The GPU of a rank. With --gpus-per-task=1 each sees its own alone, as number 0."""
    if count > 1 and local_rank >= count:
        raise ValueError(
            f"ranks: there must be a GPU for each rank of a machine, got {count} GPUs and local rank {local_rank}. "
            "Start fewer ranks per machine."
        )
    return 0 if count == 1 else local_rank
