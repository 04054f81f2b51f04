"""Real ranks for the tests: a pool of processes in one gloo world, and processes of one's own that may die."""

import gc
import logging
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 4
GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3))
# Seconds. They run out where something fails, and only there: a slow machine, or a busy one, is to have its time.
PATIENCE = 600.0  # with a process, or with one call on the pool
STRAGGLER_TIMEOUT = 120.0  # with the other ranks, when the first has answered
ENDING = 30.0  # with the others, when the first has raised
GROUP_TIMEOUT = 300.0  # with a message

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(*members: int) -> dist.ProcessGroup:
    """In a rank of the pool: the group of these ranks of its world, one of GROUPS that this rank is in."""
    return _groups[members]


class LoggedLines(list[str]):
    """Messages that a logger, and those below it, log within a `with`."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self.logger, self.handler = logging.getLogger(logger), logging.Handler()
        self.handler.emit = lambda record: self.append(record.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> "LoggedLines":
        self.logger.addHandler(self.handler)
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.handler)

    def __reduce__(self) -> Any:
        return list, (list(self),)


class RanksFailed(Exception):
    """A function raised on some rank, or a rank died or never answered; the text says which."""


def new_process(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process from a server that has torch loaded and has done nothing with it: the one of megabatch.bench."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["megabatch.bench.trial", "torch._dynamo"])
    process: BaseProcess = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def new_pipe() -> tuple[Connection, Connection]:
    return get_context("forkserver").Pipe()


def join_world(rank: int, size: int, folder: str, timeout: float) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Pool:
    """Ranks that outlive a test. They start with the first call, and anew after a call that left them out of step."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, ranks: int | tuple[int, ...], function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, group, *args)`, known by its module and name, returns on the first `ranks` ranks.

        Or on the given ones, which must be one of GROUPS; `rank` is the one within the group.
        """
        members = tuple(range(ranks)) if isinstance(ranks, int) else ranks
        assert members in GROUPS
        self._start()
        for member in members:
            # Plain bytes: the pickler of pipes would share memory between processes, some of which die.
            self._pipes[member].send_bytes(pickle.dumps((members, function, args)))
        answers = self._collect(members)
        errors = {rank: answer[1:] for rank, answer in enumerate(answers) if answer[0] == "raised"}
        if errors:
            if len(errors) < len(members) or len({kind_and_text for kind_and_text, _ in errors.values()}) > 1:
                self._kill()  # some ranks may still hold messages of this call
            first = min(errors)
            texts = "; ".join(
                f"rank {rank} of {len(members)}: {': '.join(error)}" for rank, (error, _) in errors.items()
            )
            raise RanksFailed(f"{texts}\n\nOn rank {first}:\n{errors[first][1]}")
        return [answer[1] for answer in answers]

    def _collect(self, members: tuple[int, ...]) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < len(members):
            waiting = {self._pipes[member]: member for member in members if member not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} did not answer; ranks {sorted(answers)} did", answers)
            for pipe in ready:
                member = waiting[pipe]
                try:
                    answers[member] = pickle.loads(self._pipes[member].recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[member].join(ENDING)
                    self._fail(f"rank {member} died with exit code {self._processes[member].exitcode}", answers)
            raised = any(answer[0] == "raised" for answer in answers.values())
            deadline = min(deadline, time.monotonic() + (ENDING if raised else STRAGGLER_TIMEOUT))
        return [answers[member] for member in members]

    def _fail(self, what: str, answers: dict[int, Any]) -> None:
        self._kill()
        told = "".join(f"\n\nOn rank {rank}:\n{answer[2]}" for rank, answer in answers.items() if answer[0] == "raised")
        raise RanksFailed(f"{what}.{told}")

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self._kill()
        self._folder = tempfile.TemporaryDirectory(prefix="megabatch-ranks-")
        for rank in range(WORLD_SIZE):
            ours, theirs = new_pipe()
            self._processes.append(new_process(_serve, rank, self._folder.name, theirs))
            self._pipes.append(ours)
            theirs.close()

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(ENDING)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(rank: int, folder: str, pipe: Connection) -> None:
    """A rank of the pool: answer calls until the pool closes, or is gone."""
    gc.freeze()  # or every collection would look through torch, and copy the pages that are shared with the server
    _groups[tuple(range(WORLD_SIZE))] = join_world(rank, WORLD_SIZE, folder, GROUP_TIMEOUT)
    for members in GROUPS:
        if len(members) < WORLD_SIZE:
            group = dist.new_group(list(members))
            if rank in members:
                _groups[members] = group
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        if call is None:
            dist.destroy_process_group()
            return
        members, function, args = call
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # as in pyproject.toml
                warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning, "triton")
                answer = ("returned", function(members.index(rank), _groups[members], *args))
            sent = pickle.dumps(answer)
        except BaseException as error:  # pytest.fail raises one, too
            sent = pickle.dumps(("raised", (type(error).__name__, str(error)), traceback.format_exc()))
        pipe.send_bytes(sent)


def run_apart(
    size: int,
    function: Callable[..., None],
    folder: Path,
    *args: Any,
    group_timeout: float = GROUP_TIMEOUT,
    deadline: float = PATIENCE,
    stopped: tuple[int, ...] = (),
) -> list[int | None]:
    """`function(rank, group, folder, *args)` on ranks of their own. Returns their exit codes.

    Ranks that are still there at the deadline are killed, and so are those that are known to be `stopped` when all
    others have ended.
    """
    processes = [
        new_process(_run_apart, rank, size, function, str(folder), group_timeout, args) for rank in range(size)
    ]
    end = time.monotonic() + deadline
    for rank, process in enumerate(processes):
        if rank not in stopped:
            process.join(max(end - time.monotonic(), 0))
    _end(processes)
    return [process.exitcode for process in processes]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.join(0.5)
        process.kill()
        process.join()


def _run_apart(
    rank: int, size: int, function: Callable[..., None], folder: str, timeout: float, args: tuple[Any, ...]
) -> None:
    function(rank, join_world(rank, size, folder, timeout), Path(folder), *args)
