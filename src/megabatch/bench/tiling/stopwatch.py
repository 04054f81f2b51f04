"""Stopwatch: what the time of one step is made of.

It replaces the functions at the seams between the stages by ones that tell the time when they begin and end. Times are
exclusive, what a function calls at another seam is that seam's, so they add up to the whole. Only the eager backend
has these seams: a GPU's kernels do products and epilogue at once.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from ...backends.eager import Eager
from ...distributed.ranks import Ranks
from ...losses.state import State
from ...tiling.layout import PackedColumns

REST = "rest"
STAGES = ("products", "epilogue", "merges", "communication", REST)

# Seconds by stage.
Lap = dict[str, float]


class Seam(NamedTuple):
    """A function by the class or module that has it. Whatever it does belongs to a stage."""

    stage: str
    owner: Any
    name: str

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


SEAMS = (
    Seam("products", torch, "addmm"),  # in float32, all of them
    Seam("epilogue", Eager, "accumulate_statistics"),
    Seam("epilogue", Eager, "accumulate_gradients"),
    Seam("merges", State, "reset"),
    Seam("merges", State, "merge"),
    Seam("merges", PackedColumns, "add"),  # of what two ranks have added up
    Seam("communication", PackedColumns, "pack"),
    Seam("communication", Ranks, "handshake"),
    Seam("communication", Ranks, "all_gather"),
    Seam("communication", Ranks, "all_gather_block"),
    Seam("communication", Ranks, "transfer"),
    Seam("communication", Ranks, "wait"),
)


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, a function of a class or module is what `wrap` makes of it."""
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {name} of its own: the stopwatch must learn where it went.")
    function = vars(owner)[name]
    setattr(owner, name, wrap(function))
    try:
        yield
    finally:
        setattr(owner, name, function)


class Stopwatch:
    """
    Attributes:
        laps: Of every `with stopwatch.lap():` that came to its end, the seconds of each stage.
        calls: How often each seam was met.
    """

    def __init__(self, seams: Sequence[Seam] = SEAMS, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seams, self.clock = seams, clock
        self.laps: list[Lap] = []
        self.calls: Counter[str] = Counter()
        self._lap: Lap = {}
        self._within: list[str] = []
        self._since = 0.0

    @contextmanager
    def lap(self) -> Iterator[None]:
        with ExitStack() as seams:
            for seam in self.seams:
                seams.enter_context(replaced(seam.owner, seam.name, functools.partial(self._timed, seam)))
            self._lap, self._within, self._since = dict.fromkeys(STAGES, 0.0), [REST], self.clock()
            yield
            self._account()
        self.laps.append(self._lap)

    def _timed(self, seam: Seam, function: Callable[..., Any]) -> Callable[..., Any]:
        stage, name = seam.stage, str(seam)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._account()
            self._within.append(stage)
            self.calls[name] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._account()
                self._within.pop()

        return timed

    def _account(self) -> None:
        """The time since the last call is that of the innermost stage."""
        now = self.clock()
        self._lap[self._within[-1]] += now - self._since
        self._since = now
