"""The largest batch that runs while every rank has a hard limit of memory: by trying."""

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..cases import Case
from ..instruments import measure, processes
from ..instruments.ranks import Crew, Member
from ..loss.contenders import step_of
from ..ring.contenders import ENTRANTS

# Rows per rank that the search starts with, and whose multiples it tries.
FIRST_ROWS = 256
UNIT = 16
# The search ends when the smallest batch that failed is this near to the largest that ran.
NEAR = 1 / 16


class Attempt(NamedTuple):
    """A step that was tried. `seconds` is None if it failed, and `note` says how."""

    seconds: float | None
    note: str = ""


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        rows: The largest batch that ran; 0: none did.
        seconds: Of its step.
        failed: The smallest batch that did not run; None: none was met.
        note: What happened there.
        at_least: Nobody knows whether a larger one runs: its step would take too long.
    """

    rows: int = 0
    seconds: float | None = None
    failed: int | None = None
    note: str = ""
    at_least: bool = False


def search(attempt: Callable[[int], Attempt], first: int, unit: int, time_limit: float) -> Found:
    """The largest number of rows that runs: doubling until a step fails, then halving what lies between.

    A step that would take longer than `time_limit` seconds, by the square of the rows, is not tried.
    """
    rows, seconds, failed, note = 0, None, None, ""
    while True:
        candidate = _next(rows, failed, first, unit)
        if candidate is None:
            return Found(rows, seconds, failed, note)
        if seconds is not None and seconds * (candidate / rows) ** 2 > time_limit:
            return Found(rows, seconds, failed, note, at_least=True)
        tried = attempt(candidate)
        if tried.seconds is None:
            failed, note = candidate, tried.note
        else:
            rows, seconds = candidate, tried.seconds


def _next(rows: int, failed: int | None, first: int, unit: int) -> int | None:
    if failed is None:
        return 2 * rows or first
    if failed - rows <= max(NEAR * rows, unit):
        return None
    return (rows + failed) // 2 // unit * unit


def largest(name: str, size: int, width: int, limit: int, time_limit: float) -> Found:
    """Of an entrant on `size` ranks that may take `limit` bytes each. Raises processes.Failed where a step fails for
    another reason than memory."""

    def attempt(rows: int) -> Attempt:
        case = Case("clip", rows // size, width)
        try:
            return Attempt(max(Crew(size, quiet=True).run(step_within, limit, name, case)))
        except processes.Failed as failure:
            if isinstance(failure, processes.OutOfMemory) or "bad_alloc" in str(failure):
                return Attempt(None, str(failure))
            raise

    return search(attempt, size * FIRST_ROWS, size * UNIT, time_limit)


def step_within(member: Member, limit: int, name: str, share: Case) -> float:
    """Seconds of a step while this rank may take `limit` bytes more than it has, for its inputs too.

    `share`: this rank's rows. All ranks have the same numbers, on which neither memory nor time depends.
    """
    measure.return_freed_memory()  # what malloc keeps for later would count
    step = step_of(ENTRANTS[name].make(member))
    step(share.with_rows(UNIT).inputs())  # loads what it needs
    allowed = measure.private_bytes() + limit
    inputs = share.inputs()  # before the limit is set, because making them takes more than holding them
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    return measure.clocked(lambda: step(inputs))
