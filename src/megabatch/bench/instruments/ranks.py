"""A function in several processes at once that form a gloo group: ranks, on this machine, over its loopback."""

import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from . import processes, wire

P = ParamSpec("P")
R = TypeVar("R")

# When one rank has failed the others soon do, and one of them may know more about the cause.
GRACE_SECONDS = 3.0
# What a rank says when it is not the one to blame.
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "BrokenBarrierError", "Timed out")


@dataclass(frozen=True)
class Member:
    """One process among the others: rank `rank` of `size`, or an outsider, who is not in the group."""

    rank: int
    size: int
    everyone: Any  # a multiprocessing.Barrier

    @property
    def outsider(self) -> bool:
        return self.rank >= self.size

    def share(self, rows: int) -> slice:
        """Which of so many rows are this rank's."""
        count = rows // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def meet(self) -> None:
        """Wait for everyone, outsiders too. Sends nothing."""
        self.everyone.wait()


@dataclass(frozen=True)
class Crew:
    """`size` ranks of one thread each, and so many outsiders.

    Attributes:
        patience: Seconds that a rank waits for another before it gives up.
        deadline: Seconds after which all are ended, whatever they do; None: no such time.
        quiet: What they print is dropped, but for the last words of one that dies.
    """

    size: int
    outsiders: int = 0
    patience: float = 1800
    deadline: float | None = None
    quiet: bool = False

    def run(self, function: Callable[Concatenate[Member, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """What `function`, known by its module and name, returns in each, ranks first. Raises processes.Failed."""
        makers, count = processes.context(), self.size + self.outsiders
        everyone = makers.Barrier(count)
        running: dict[Connection, Any] = {}
        with tempfile.TemporaryDirectory(prefix="megabatch-") as folder:
            for rank in range(count):
                receiver, sender = makers.Pipe(duplex=False)
                member = Member(rank, self.size, everyone)
                process = makers.Process(
                    target=_child, args=(sender, self, member, folder, function, args, kwargs), daemon=True
                )
                processes.start(process)
                sender.close()
                running[receiver] = process
            try:
                results = self._collect(running, Path(folder))
                for process in running.values():
                    process.join(GRACE_SECONDS)
                return results
            finally:
                for process in running.values():
                    process.kill()
                    process.join()

    def _collect(self, running: dict[Connection, Any], folder: Path) -> list[Any]:
        results: dict[Connection, Any] = {}
        failures: list[processes.Failed] = []
        end = None if self.deadline is None else time.monotonic() + self.deadline
        pending = list(running)
        while pending:
            ready = wait(pending, None if end is None else max(end - time.monotonic(), 0))
            if not ready:
                break
            for receiver in ready:
                assert isinstance(receiver, Connection)
                pending.remove(receiver)
                error, results[receiver] = _outcome(receiver, running[receiver], folder)
                if error is not None:
                    failures.append(error)
            if failures:
                end = min(end or float("inf"), time.monotonic() + GRACE_SECONDS)
        if failures:
            raise min(failures, key=_is_echo)
        if pending:
            raise processes.Failed(f"no result after {self.deadline:.0f} s: it hangs")
        return [results[receiver] for receiver in running]


def _outcome(receiver: Connection, process: Any, folder: Path) -> tuple[processes.Failed | None, Any]:
    try:
        error, result = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        death, words = processes.death(process.exitcode), _last_words(folder / f"{process.pid}.log")
        return (type(death)(f"{death}: {words}") if words else death), None
    return error, result


def _last_words(log: Path) -> str:
    """The message of the C++ exception that ended a process, if there was one."""
    for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
        if "what():" in line:
            return re.sub(r"\[enforce fail at \S+\] ", "", line.partition("what():")[2].strip())
    return ""


def _is_echo(failure: processes.Failed) -> bool:
    return any(words in str(failure) for words in _ECHOES)


def _child(
    sender: Connection,
    crew: Crew,
    member: Member,
    folder: str,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    if crew.quiet:
        _silence(Path(folder) / f"{os.getpid()}.log")
    torch.set_num_threads(1)
    try:
        if not member.outsider:
            _join(member, folder, crew.patience)
        result = function(member, *args, **kwargs)
    except Exception as error:
        _send(sender, processes.failure_of(error), None)
        os._exit(1)  # at once, so that whoever waits for this rank hears of it
    _send(sender, None, result)
    member.meet()  # nobody hangs up while another still works
    if not member.outsider:
        dist.destroy_process_group()


def _join(member: Member, folder: str, patience: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = wire.LOOPBACK
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=store, rank=member.rank, world_size=member.size, timeout=timeout)


def _send(sender: Connection, error: processes.Failed | None, result: object) -> None:
    # Plain pickle carries tensors by value; the connection's own would share memory with a process that is about to go.
    sender.send_bytes(pickle.dumps((error, result)))


def _silence(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
