"""Batches, made ahead of their use by other processes, and put together by a thread beside the trainer's.

A rank's part of a step is handed out in pieces, so that all workers are at work on one step, whatever its size. Pieces
come back in order. What a batch holds depends on neither the number of workers nor, over all ranks, that of ranks.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .order import Order
from .prepare import Piece, Prepare
from .source import Lost, Source
from .workers import InProcess, Request, Row, Worker, WorkerDied

_PIECE = 256  # samples
_SPARE = 64  # blocks beyond those of two windows, where parts of workers and ranks meet


@dataclass
class RankBatch(Piece):
    """A rank's part of a step. Bad samples are left out, so it may have fewer rows than planned, or none.

    `first` and `second` have the planned number of rows all the same, so that shapes stay: those beyond `len(ids)`
    repeat others. (With a cache of features, `first` has what it needs; without a row, neither has any.)
    """

    step: int = 0
    lost: list[Lost] = field(default_factory=list)


@dataclass(frozen=True)
class Requests:
    """The part of a rank of the steps from `first_step` up to, not including, `last_step`, or where `order` ends.

    Attributes:
        lost: Reasons of samples to leave out, by position in the stream and number of the sample.
    """

    order: Order
    rank: int = 0
    world_size: int = 1
    first_step: int = 0
    last_step: int | None = None
    lost: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def of(self, source: Source, workers: int) -> Iterator[Request]:
        """Each step in as many pieces as `workers` times a whole number, so that a worker always has the same part of
        a step: the same lanes of the order, whose blocks nobody else reads."""
        step, lane = self.first_step, self.order.lane_rows
        while self.last_step is None or step < self.last_step:
            passes, indices = self.order.of_step(step)
            if not len(indices):
                return
            start, stop = (rank * len(indices) // self.world_size for rank in (self.rank, self.rank + 1))
            pieces = -(-(stop - start) // (_PIECE * workers)) * workers or 1  # a rank without rows has an empty one
            cuts = [start + number * (stop - start) // pieces // lane * lane for number in range(pieces)]
            for begin, end in pairwise([start, *cuts[1:], stop]):
                numbered = zip(passes[begin:end].tolist(), indices[begin:end].tolist(), strict=True)
                first = step * self.order.batch_size + begin
                rows = [Row(position, *each) for position, each in enumerate(numbered, start=first)]
                request = Request(step, stop - start, end == stop, rows)
                for row in rows if self.lost else ():
                    if reason := self.lost.get((row.position, row.sample)):
                        request = request.without(row, source.name(row.sample), reason)
                yield request
            step += 1


def batches(
    source: Source, prepare: Prepare, requests: Requests, *, workers: int, device: torch.device | None = None
) -> Generator[RankBatch, None, None]:
    """What is asked for, in memory from which `device` copies fast. Workers end when this is closed or dropped."""
    pin_to = device if device is not None and device.type == "cuda" else None
    source.keep(2 * requests.order.window_blocks // (requests.world_size * max(1, workers)) + _SPARE)
    processes = [Worker(source, prepare) for _ in range(workers)]
    team: Sequence[InProcess] = processes or [InProcess(source, prepare)]
    made = _made(requests.of(source, len(team)), team, pin_memory=pin_to is not None)
    if not processes:
        yield from (batch for batch in made if isinstance(batch, RankBatch))
        return
    set_device = partial(torch.cuda.set_device, pin_to) if pin_to else None  # for which its thread pins memory
    with ThreadPoolExecutor(1, initializer=set_device) as thread:
        try:
            future = thread.submit(next, made, None)
            while (batch := future.result()) is not None:
                if isinstance(batch, Worker):  # This thread alone forks: in the other's, it would inherit locks.
                    batch.restart()
                future = thread.submit(next, made, None)  # while a batch is used, the next is made
                if isinstance(batch, RankBatch):
                    yield batch
        finally:
            for worker in processes:
                worker.end()  # or the thread would wait for them


def _made(
    requests: Iterator[Request], team: Sequence[InProcess], *, pin_memory: bool
) -> Iterator[RankBatch | InProcess]:
    """Batches, of what is asked of workers in turn. A worker comes instead if it died, and must be restarted."""
    turns: deque[InProcess] = deque()

    def hand_out(worker: InProcess) -> None:
        if (request := next(requests, None)) is not None:
            worker.send(request)
            turns.append(worker)

    for worker in [*team, *team]:  # one request to work on, and one to go on with
        hand_out(worker)
    assembly = _Assembly(pin_memory)
    while turns:
        try:
            request, piece = turns[0].receive()
        except WorkerDied:
            yield turns[0]
            continue
        hand_out(turns.popleft())
        assembly.add(request, piece)
        if request.last:
            yield assembly.batch(request.step)
            assembly = _Assembly(pin_memory)


class _Assembly:
    """A batch in the making. Pieces are copied into it as they come, which sets their shared memory free."""

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._rooms: dict[str, Tensor] = {}  # for as many rows as are planned
        self._filled: Counter[str] = Counter()
        self._parts: defaultdict[str, list[Tensor]] = defaultdict(list)  # of what has any number of rows
        self._bad: list[tuple[str, str]] = []
        self._lost: list[Lost] = []

    def add(self, request: Request, piece: Piece) -> None:
        for name in ("first", "second"):
            rows: Tensor = getattr(piece, name)
            shape, start = (request.planned, *rows.shape[1:]), self._filled[name]
            if name not in self._rooms:
                self._rooms[name] = torch.empty(shape, dtype=rows.dtype, pin_memory=self._pin_memory)
            room = self._rooms[name]
            if room.shape != shape:
                raise ValueError(
                    "tokenizer: must make all texts the same length, got "
                    f"{tuple(room.shape[1:])} and {shape[1:]}. Pad to the longest there can be."
                )
            room[start : start + len(rows)] = rows
            self._filled[name] += len(rows)
        for name in ("ids", "negatives", "negative_ids", "keys", "known", "features"):
            if (part := getattr(piece, name)) is not None:
                self._parts[name].append(part.clone())
        asked = request.rows
        for number, name, reason in piece.unread:
            request = request.without(asked[number], name, reason)
        self._lost += request.lost
        self._bad += [*((lost.name, lost.reason) for lost in request.lost), *piece.bad]

    def batch(self, step: int) -> RankBatch:
        parts: dict[str, Any] = {name: torch.cat(parts) for name, parts in self._parts.items()}
        if self._pin_memory:
            parts = {name: part.pin_memory() for name, part in parts.items()}
        first = self._rooms["first"][: self._filled["first"]] if "known" in parts else self._padded("first")
        return RankBatch(first, self._padded("second"), bad=self._bad, step=step, lost=self._lost, **parts)

    def _padded(self, name: str) -> Tensor:
        room, rows = self._rooms[name], self._filled[name]
        if rows:
            room[rows:] = room[torch.arange(len(room) - rows) % rows]
        return room if rows else room[:0]
