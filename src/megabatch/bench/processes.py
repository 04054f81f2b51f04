"""A function on ranks: in new processes, which torchrun's launcher starts, or in those that torchrun has started.

In a separate process a contender's memory, state and crash do not affect others. Results come from all ranks.
"""

import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..distributed.world import World, joined
from . import measure

R = TypeVar("R")

# New processes come from a server that has torch loaded and has done nothing with it.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = ["megabatch.bench.trial", "torch._dynamo"]
# SIGKILL is how the kernel reports it.
_OUT_OF_MEMORY = re.compile("out of memory|allocate memory|not enough memory|bad_alloc|MemoryError|SIGKILL")
# What a rank says when it is not the one to blame.
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class Failed(Exception):
    """The function raised, or its process died; the text says which, in one line."""


class OutOfMemory(Failed):
    """It asked for memory that it did not get."""


@dataclass(frozen=True)
class Runner:
    """Runs functions where the benchmark is to run: under torchrun, and on an accelerator, in this process's world,
    else in new processes."""

    device: str
    world: World

    @property
    def under_torchrun(self) -> bool:
        return self.world.size > 1

    @property
    def speaks(self) -> bool:
        """Rank 0 prints and writes."""
        return self.world.rank == 0

    def run(self, ranks: int, function: Callable[..., R], *args: Any) -> list[R]:
        """What `function`, known by its module and name, returns on every rank. Raises Failed."""
        if ranks == self.world.size and (self.under_torchrun or self.device != "cpu"):
            return self._here(function, *args)
        return launch(self.device, ranks, function, *args)

    def _here(self, function: Callable[..., R], *args: Any) -> list[R]:
        failure, result = "", None
        try:
            result = function(self.world, *args)
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error).strip()}"
        # Outside of the handler, so that nothing holds on to what the function held.
        if failure and self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        failures, results = zip(*self.world.gather((failure, result)), strict=True)
        if any(failures):
            raise failure_of(next(filter(None, failures)))
        return list(results)


@contextmanager
def runner(device: str) -> Iterator[Runner]:
    with joined(device) as world:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        yield Runner(str(world.device) if world.size > 1 else device, world)


def launch(device: str, ranks: int, function: Callable[..., R], *args: Any, patience: float | None = None) -> list[R]:
    """In new processes. `patience`: seconds that a rank waits for another before it gives up."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we report a failure once
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="megabatch-") as folder, _own_signals():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"megabatch-{os.getpid()}-{time.monotonic_ns()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.02,
            start_method=METHOD,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        try:
            results = elastic_launch(config, _child)(device, patience, function, args)
        except SignalException as received:
            if received.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + received.sigval) from None
        except ChildFailedError as error:
            raise failure_of(_told(error, Path(folder))) from None
        return [results[rank] for rank in range(ranks)]


@contextmanager
def _own_signals() -> Iterator[None]:
    """The launcher installs handlers and does not remove them."""
    if threading.current_thread() is not threading.main_thread():  # only the main one may have any
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _child(device: str, patience: float | None, function: Callable[..., R], args: tuple[Any, ...]) -> R:
    # What was loaded before the fork is never garbage, and looking through it would copy all of its pages.
    gc.freeze()
    measure.expendable = True
    alone = int(os.environ["WORLD_SIZE"]) == 1
    if device == "cpu" and not alone:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = measure.LOOPBACK
        if patience is not None:
            dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    with joined(device) as world:
        result = function(world, *args)
        world.wait()  # no rank leaves while another still works
        return result


def _told(error: ChildFailedError, folder: Path) -> str:
    """What a rank said, rather than one that only misses another; or a C++ exception before it ended the process."""
    said = [json.loads(file.read_text())["message"]["message"] for file in folder.rglob("error.json")]
    said.sort(key=lambda words: any(echo in words for echo in _ECHOES))
    _, failure = error.get_first_failure()
    if said and not any(echo in said[0] for echo in _ECHOES):
        return str(said[0])
    errors = "\n".join(log.read_text(errors="replace") for log in folder.rglob("stderr.log"))
    for found in re.findall(r"what\(\): (.*)", errors):
        return "killed by SIGABRT: " + re.sub(r"\[enforce fail at \S+\] ", "", found.strip())
    return f"killed by {failure.signal_name()}" if failure.exitcode < 0 or not said else str(said[0])


def failure_of(text: str) -> Failed:
    text = text.strip().partition("\n")[0]
    return OutOfMemory("out of memory") if _OUT_OF_MEMORY.search(text) else Failed(text)
