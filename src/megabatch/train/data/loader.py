"""Batches, made ahead of their use by other processes, and put together by a thread beside the trainer's.

A rank's part of a step is handed out in pieces, so that all workers are at work on one step, whatever its size. Pieces
come back in order. What a batch holds depends on neither the number of workers nor, over all ranks, that of ranks.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
    team: Sequence[InProcess] = [Worker(source, prepare) for _ in range(workers)] or [InProcess(source, prepare)]
    loader = _Loader(requests.of(source, max(1, workers)), team, pin_memory=pin_to is not None)
    if not workers:
        yield from iter(loader.next_batch, None)
        return
    with ThreadPoolExecutor(1, initializer=_set_device, initargs=(pin_to,)) as thread:
        try:
            yield from _one_ahead(loader, thread)
        finally:
            loader.end()  # or the thread would wait for its workers


def _one_ahead(loader: "_Loader", thread: ThreadPoolExecutor) -> Iterator[RankBatch]:
    """While a batch is used, the next is made."""
    future = thread.submit(loader.next_batch)
    while True:
        try:
            batch = future.result()
        except WorkerDied as death:  # This thread alone forks processes: in the other's they would inherit its locks.
            death.worker.restart()
            future = thread.submit(loader.next_batch)
            continue
        if batch is None:
            return
        future = thread.submit(loader.next_batch)
        yield batch


def _set_device(device: torch.device | None) -> None:
    """Memory is pinned for the device of its thread."""
    if device is not None:
        torch.cuda.set_device(device)


class _Loader:
    """Hands out requests to workers in turn, and takes their pieces in the same order."""

    def __init__(self, requests: Iterator[Request], workers: Sequence[InProcess], *, pin_memory: bool) -> None:
        self._requests, self._workers, self._pin_memory = requests, workers, pin_memory
        self._turns: deque[InProcess] = deque()
        self._assembly: _Assembly | None = None
        for worker in [*workers, *workers]:  # one request to work on, and one to go on with
            self._hand_out(worker)

    def _hand_out(self, worker: InProcess) -> None:
        if (request := next(self._requests, None)) is not None:
            worker.send(request)
            self._turns.append(worker)

    def next_batch(self) -> RankBatch | None:
        """None after the last. After WorkerDied, and a restart, it can be called again."""
        while self._turns:
            request, piece = self._turns[0].receive()
            self._hand_out(self._turns.popleft())
            if self._assembly is None:
                self._assembly = _Assembly(request, piece, pin_memory=self._pin_memory)
            self._assembly.add(request, piece)
            if request.last:
                batch, self._assembly = self._assembly.batch(), None
                return batch
        return None

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


class _Assembly:
    """A batch in the making. Pieces are copied into it as they come, which sets their shared memory free."""

    def __init__(self, request: Request, piece: Piece, *, pin_memory: bool) -> None:
        self._step, self._pin_memory = request.step, pin_memory
        self._rooms: dict[str, Tensor] = {}
        for name in ("first", "second", "ids"):
            like = getattr(piece, name)
            shape = (request.planned, *like.shape[1:])
            self._rooms[name] = torch.empty(shape, dtype=like.dtype, pin_memory=pin_memory)
        self._filled = dict.fromkeys(self._rooms, 0)
        self._parts: dict[str, list[Tensor]] = {}  # of what has any number of rows
        self._bad: list[tuple[str, str]] = []
        self._lost: list[Lost] = []

    def add(self, request: Request, piece: Piece) -> None:
        for name, room in self._rooms.items():
            tensor, start = getattr(piece, name), self._filled[name]
            if room.shape[1:] != tensor.shape[1:]:
                raise ValueError(
                    "tokenizer: must make all texts the same length, got "
                    f"{tuple(room.shape[1:])} and {tuple(tensor.shape[1:])}. Pad to the longest there can be."
                )
            room[start : start + len(tensor)] = tensor
            self._filled[name] += len(tensor)
        for name in ("negatives", "negative_ids", "keys", "known", "features"):
            if (tensor := getattr(piece, name)) is not None:
                self._parts.setdefault(name, []).append(tensor.clone())
        rows = request.rows
        for number, name, reason in piece.unread:
            request = request.without(rows[number], name, reason)
        self._lost += request.lost
        self._bad += [*((lost.name, lost.reason) for lost in request.lost), *piece.bad]

    def batch(self) -> RankBatch:
        joined: dict[str, Any] = {name: torch.cat(parts) for name, parts in self._parts.items()}
        if self._pin_memory:
            joined = {name: tensor.pin_memory() for name, tensor in joined.items()}
        first = self._rooms["first"][: self._filled["first"]] if "known" in joined else self._padded("first")
        ids = self._rooms["ids"][: self._filled["ids"]]
        return RankBatch(first, self._padded("second"), ids, self._bad, step=self._step, lost=self._lost, **joined)

    def _padded(self, name: str) -> Tensor:
        room, rows = self._rooms[name], self._filled[name]
        if rows:
            room[rows:] = room[torch.arange(len(room) - rows) % rows]
        return room if rows else room[:0]
