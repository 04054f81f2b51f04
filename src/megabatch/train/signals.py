"""Signals that ask a run to leave, and the exit codes of having left."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

# Of a run that has saved and wants to be started again: EX_TEMPFAIL of sysexits.h. One number for all signals, and
# none that a run has which was killed before it could save, as 128 + 15 would be.
REQUEUE = 75
INTERRUPTED = 130  # by Ctrl-C, as the command line has it: a person asked, who does not want it started again

# Schedulers send SIGTERM, and SIGUSR1 some time before (`sbatch --signal=USR1@120`).
LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ONE_REQUEST_SECONDS = 5.0


def exit_code(number: int) -> int:
    """Of a run that a signal has ended, or that ended by itself (0)."""
    return {0: 0, signal.SIGINT: INTERRUPTED}.get(number, REQUEUE)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Before the first step and after the last there is nothing to save."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(exit_code(number))

    with _handling(leave):
        yield


@contextmanager
def leaving_when_asked() -> Iterator[list[int]]:
    """The signals that asked to leave, so far. A second Ctrl-C ends the run at once.

    torchrun hands on to its ranks what they may have got themselves, so one that comes soon after is not a second one;
    and schedulers repeat SIGTERM, for which there is SIGKILL.
    """
    asked: list[int] = []
    first = -math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not asked:
            first = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > first + ONE_REQUEST_SECONDS:
            raise KeyboardInterrupt
        asked.append(number)

    with _handling(note):
        yield asked


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in LEAVE}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier or signal.SIG_DFL)
