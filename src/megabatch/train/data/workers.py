"""Processes that prepare samples. What kills a process is known: the sample that it was at."""

import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # by which tensors pass through pipes

from ...distributed.processes import end_with
from .prepare import Piece, Prepare
from .source import Lost, Source

# A fork copies no source, however large its index. It is safe where threads are as few as on Linux.
CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
SLOW_SECONDS = 60.0  # without an answer, until somebody is told; doubled each time
_MOST_DEATHS = 8  # over one request: more are not the samples' fault
_LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LOGGER = logging.getLogger("megabatch")


class Row(NamedTuple):
    """Of a batch: its place in the stream of samples, the number of the pass, and that of the sample."""

    position: int
    number: int
    sample: int


@dataclass(frozen=True)
class Request:
    """Rows to prepare. `planned` is how many the rank's part of the step has in all; `last` of those it is."""

    step: int
    planned: int
    last: bool
    rows: list[Row]
    lost: tuple[Lost, ...] = ()

    def without(self, row: Row, name: str, reason: str) -> "Request":
        lost = Lost(row.position, row.sample, name, reason)
        return replace(self, rows=[each for each in self.rows if each != row], lost=(*self.lost, lost))


class InProcess:
    """A worker that is this process.

    Attributes:
        pending: The requests that it was sent, and has not answered.
        position: That of the row in work, -1 if none is.
    """

    def __init__(self, source: Source, prepare: Prepare) -> None:
        self.source, self.prepare = source, prepare
        self.pending: deque[Request] = deque()
        self.position = CONTEXT.RawValue("q", -1)

    def send(self, request: Request) -> None:
        self.pending.append(request)
        self.source.prefetch(row.sample for row in request.rows)

    def receive(self) -> tuple[Request, Piece]:
        """The oldest request, and what it asked for."""
        request = self.pending.popleft()
        return request, self.prepare(self.source, [row.number for row in request.rows], self._noting(request.rows))

    def _noting(self, rows: list[Row]) -> Iterator[int]:
        for row in rows:
            self.position.value = row.position
            yield row.sample
        self.position.value = -1


class WorkerDied(Exception):
    """Its worker can be restarted, and asked again."""


class Worker(InProcess):
    """A process of its own. It leaves signals to the trainer: they are sent to all processes of a run."""

    def __init__(self, source: Source, prepare: Prepare) -> None:
        super().__init__(source, prepare)
        self._deaths = 0
        self._start()

    def _start(self) -> None:
        self.position.value = -1
        self._pipe, theirs = CONTEXT.Pipe()
        arguments = (theirs, self.source, self.prepare, self.position, os.getpid())
        self._process = CONTEXT.Process(target=_work, args=arguments, daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_TRAINER)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._end = Finalize(None, _end, (self._process,), exitpriority=1)

    def end(self) -> None:
        self._end()

    def send(self, request: Request) -> None:
        self.pending.append(request)
        with suppress(BrokenPipeError):  # of a process that died: a restart sends what is pending
            self._pipe.send(request)

    def receive(self) -> tuple[Request, Piece]:
        """Raises what the preparation raised, or WorkerDied."""
        patience = SLOW_SECONDS
        while not self._pipe.poll(patience):  # which a dead process ends, too
            said = (self._process.pid, patience, self._at()[1])
            _LOGGER.warning("data: worker %d is alive and slow: %.0f s without an answer, at %s", *said)
            patience *= 2
        try:
            piece = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            if self._process.is_alive():
                raise
            raise WorkerDied from None
        if not isinstance(piece, Piece):
            error, trace = piece
            raise error from RuntimeError(f"in a data worker:\n{trace}")
        self._deaths = 0
        return self.pending.popleft(), piece

    def _at(self) -> tuple[Row | None, str]:
        """What the process is at, or was at when it died."""
        rows = (row for request in self.pending for row in request.rows if row.position == self.position.value)
        row = next(rows, None)
        return row, "no sample" if row is None else self.source.name(row.sample)

    def restart(self) -> None:
        """After its death: another process, for what is left to do, without the sample that it was at."""
        code, (row, name) = self._process.exitcode, self._at()
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        _LOGGER.warning("data: worker %d was %s at %s; restarted", self._process.pid, cause, name)
        self._deaths += 1
        if self._deaths > (2 if row is None else _MOST_DEATHS):
            raise RuntimeError(
                f"data: workers must live, but {self._deaths} in a row were {cause}, the last at {name}. Is there "
                "enough memory (SIGKILL), and shared memory (SIGBUS: /dev/shm)? Lower --workers."
            )
        pending, self.pending = self.pending, deque()
        self._pipe.close()
        self._start()
        for request in pending:
            if row is not None and row in request.rows:
                request = request.without(row, name, f"its worker was {cause}")
            self.send(request)


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _work(pipe: Connection, source: Source, prepare: Prepare, position: Any, trainer: int) -> None:
    end_with(trainer)
    torch.set_num_threads(1)
    worker = InProcess(source, prepare)
    worker.position = position
    while True:
        while not worker.pending or pipe.poll():
            worker.send(pipe.recv())
        try:
            _, piece = worker.receive()
        except Exception as error:
            pipe.send((error, traceback.format_exc()))
        else:
            pipe.send(piece)
