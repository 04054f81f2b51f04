"""Processes that prepare samples. A process may be killed by what it reads; what it was reading is known."""

import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.multiprocessing  # by which tensors pass through pipes

from .prepare import Piece, Prepare
from .source import Lost, Source

SLOW_SECONDS = 60.0  # without an answer, until somebody is told; doubled each time
_MOST_DEATHS = 8  # over one request: more are not the samples' fault
_LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LOGGER = logging.getLogger("megabatch")


@dataclass(frozen=True)
class Request:
    """Samples to prepare.

    Attributes:
        rows: What the rank's part of the step is planned to have in all.
        last: Of its step.
        positions: In the stream of samples, of each.
        bad, lost: Those that are left out already.
    """

    step: int
    rows: int
    last: bool
    positions: list[int]
    passes: list[int]
    indices: list[int]
    bad: tuple[tuple[str, str], ...] = ()
    lost: tuple[Lost, ...] = ()

    def without(self, row: int, name: str, reason: str) -> "Request":
        columns = {"positions": self.positions, "passes": self.passes, "indices": self.indices}
        left: dict[str, Any] = {each: [*values[:row], *values[row + 1 :]] for each, values in columns.items()}
        return replace(self, **left, bad=(*self.bad, (name, reason)))


class WorkerDied(Exception):
    """`worker.restart()` goes on without the sample."""

    def __init__(self, worker: "Worker") -> None:
        super().__init__(worker)
        self.worker = worker


class InProcess:
    """A worker that is this process."""

    def __init__(self, source: Source, prepare: Prepare) -> None:
        self.source, self.prepare = source, prepare
        self.pending: deque[Request] = deque()

    def send(self, request: Request) -> None:
        self.pending.append(request)

    def receive(self) -> tuple[Request, Piece]:
        """The next request that was sent, and what it asked for."""
        request = self.pending.popleft()
        return request, self.prepare(self.source, request.passes, request.indices)

    def end(self) -> None:
        pass


class Worker(InProcess):
    """A process of its own. It is forked, so that no source is copied, where that is safe.

    It leaves signals to the trainer: they are sent to all processes of a run.
    """

    def __init__(self, source: Source, prepare: Prepare) -> None:
        super().__init__(source, prepare)
        self._context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._deaths = 0
        self._start()

    def _start(self) -> None:
        self._position = self._context.RawValue("q", -1)
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(  # type: ignore[attr-defined]
            target=_work, args=(theirs, self._position, self.source, self.prepare), daemon=True
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_TRAINER)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.end = Finalize(None, _end, (self._process,), exitpriority=1)  # type: ignore[method-assign]

    def send(self, request: Request) -> None:
        super().send(request)
        self._pipe.send(request)

    def receive(self) -> tuple[Request, Piece]:
        """Raises WorkerDied, and what the preparation raised. Call it again after a restart."""
        patience = SLOW_SECONDS
        while not self._pipe.poll(patience):  # which a dead process ends, too
            _LOGGER.warning(
                "data: worker %d is alive and slow: %.0f s without an answer, at %s",
                *(self._process.pid, patience, self._sample()[1] or "no sample"),
            )
            patience *= 2
        try:
            piece = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            if self._process.is_alive():
                raise
            raise WorkerDied(self) from None
        if isinstance(piece, tuple):
            error, trace = piece
            raise error from RuntimeError(f"in a data worker:\n{trace}")
        self._deaths = 0
        return self.pending.popleft(), piece

    def _sample(self) -> tuple[int, str]:
        """Position and name of what the process is at, or was at when it died."""
        position = self._position.value
        for request in self.pending:
            if position in request.positions:
                return position, self.source.name(request.indices[request.positions.index(position)])
        return -1, ""

    def restart(self) -> None:
        """After its death: another process, for what is left to do."""
        code, (position, name) = self._process.exitcode, self._sample()
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        _LOGGER.warning("data: worker %d was %s at %s; restarted", self._process.pid, cause, name or "no sample")
        self._deaths += 1
        if self._deaths > _MOST_DEATHS or (self._deaths > 2 and not name):
            raise RuntimeError(
                f"data: workers must live, but {self._deaths} in a row were {cause} over the same piece of a batch"
                f"{f', the last at {name}' if name else ''}. Is there enough memory (SIGKILL), and shared memory "
                "(SIGBUS: /dev/shm)? Lower --workers."
            )
        pending, self.pending = self.pending, deque()
        self._pipe.close()
        self._start()
        for request in pending:
            if position in request.positions:
                row, reason = request.positions.index(position), f"its worker was {cause}"
                lost = Lost(position, request.indices[row], name, reason)
                request = replace(request.without(row, name, reason), lost=(*request.lost, lost))
            self.send(request)


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _work(pipe: Connection, position: Any, source: Source, prepare: Prepare) -> None:
    """Until the trainer ends it, or is no more."""
    torch.set_num_threads(1)
    trainer = os.getppid()
    while os.getppid() == trainer:
        if not pipe.poll(5):
            continue
        request = pipe.recv()
        try:
            piece = prepare(source, request.passes, _noting(request, position))
        except Exception as error:
            pipe.send((error, traceback.format_exc()))
        else:
            pipe.send(piece)


def _noting(request: Request, position: Any) -> Iterator[int]:
    """The samples, one after the other; `position` is that of the one in work."""
    for position.value, index in zip(request.positions, request.indices, strict=True):
        yield index
    position.value = -1
