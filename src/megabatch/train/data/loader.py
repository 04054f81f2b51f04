"""Batches, made ahead of their use by other processes.

A rank's part of a step is handed out in pieces, so that all workers are at work on one step, whatever its size. Pieces
come back in order. What a batch holds depends on neither the number of workers nor, over all ranks, that of ranks.
"""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .order import Order
from .prepare import Piece, Prepare
from .source import Source

_PIECE = 256  # samples
_MOST_PIECES_AHEAD = 128  # each takes some file descriptors, of which a process has about a thousand
_LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Batch(Piece):
    """A rank's part of a step. Bad samples are left out, so it may have fewer rows than planned, or none."""

    step: int = 0


def batches(
    source: Source,
    prepare: Prepare,
    order: Order,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    workers: int,
    first_step: int,
    last_step: int | None,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """The part of `rank` of the steps from `first_step` up to, not including, `last_step`, or where `order` ends.

    Workers end when the iterator is closed or dropped.
    """
    requests = _Requests(order, batch_size, rank, world_size, first_step, last_step)
    pieces_of_step = -(-batch_size // world_size // _PIECE)
    ahead = min(-(-pieces_of_step // max(1, workers)), _MOST_PIECES_AHEAD // max(1, workers))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: the user's choice
        loader: DataLoader[tuple[_Request, Piece]] = DataLoader(
            _Pieces(source, prepare),
            batch_size=None,
            sampler=requests,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=_start_worker,
            prefetch_factor=max(2, ahead) if workers else None,
            generator=torch.Generator(),  # or it draws a seed, which it has no use for, from the trainer's
        )
        with _signals_blocked():
            replies = iter(loader)
    assembly: _Assembly | None = None
    for request, piece in replies:
        assembly = assembly or _Assembly(request, piece, pin_memory)
        assembly.add(piece)
        if request.last:
            yield assembly.batch()
            assembly = None


@dataclass(frozen=True)
class _Request:
    """Samples for a worker to prepare. `rows` is what the rank's part of the step is planned to have in all."""

    step: int
    rows: int
    last: bool  # of its step
    passes: list[int]
    indices: list[int]


@dataclass(frozen=True)
class _Requests:
    order: Order
    batch_size: int
    rank: int
    world_size: int
    first_step: int
    last_step: int | None

    def __iter__(self) -> Iterator[_Request]:
        step = self.first_step
        while self.last_step is None or step < self.last_step:
            passes, indices = self.order.of_step(step, self.batch_size)
            if not len(indices):
                return
            start, stop = (rank * len(indices) // self.world_size for rank in (self.rank, self.rank + 1))
            # A rank without rows has one piece, which is empty.
            for begin in range(start, max(stop, start + 1), _PIECE):
                end = min(begin + _PIECE, stop)
                yield _Request(step, stop - start, end == stop, passes[begin:end].tolist(), indices[begin:end].tolist())
            step += 1


@dataclass(frozen=True)
class _Pieces(Dataset[tuple[_Request, Piece]]):
    source: Source
    prepare: Prepare

    def __getitem__(self, request: Any) -> tuple[_Request, Piece]:
        return request, self.prepare(self.source, request.passes, request.indices)


class _Assembly:
    """A batch in the making. Pieces are copied into it as they come, which sets their shared memory free."""

    def __init__(self, request: _Request, piece: Piece, pin_memory: bool) -> None:
        def room(like: Tensor) -> Tensor:
            return torch.empty(request.rows, *like.shape[1:], dtype=like.dtype, pin_memory=pin_memory)

        self._step, self._pin_memory = request.step, pin_memory
        self._rows = self._images = 0
        self._first, *self._room = (room(tensor) for tensor in (piece.first, piece.second, piece.ids))
        self._cached: list[tuple[Tensor, Tensor]] = []
        self._features: list[Tensor] = []
        self._negatives: list[tuple[Tensor, Tensor]] = []
        self._bad: list[tuple[str, str]] = []

    def add(self, piece: Piece) -> None:
        stop = self._rows + len(piece.ids)
        last_image = self._images + len(piece.first)
        second, ids = (room[self._rows : stop] for room in self._room)
        rooms = (self._first[self._images : last_image], second, ids)
        for room, tensor in zip(rooms, (piece.first, piece.second, piece.ids), strict=True):
            if room.shape[1:] != tensor.shape[1:]:
                raise ValueError(
                    "tokenizer: must make all texts the same length, got "
                    f"{tuple(room.shape[1:])} and {tuple(tensor.shape[1:])}. Pad to the longest there can be."
                )
            room[:] = tensor
        if piece.negatives is not None and piece.negative_ids is not None:
            self._negatives.append((piece.negatives.clone(), piece.negative_ids.clone()))
        if piece.keys is not None and piece.known is not None:
            self._cached.append((piece.keys.clone(), piece.known.clone()))
            self._features += [features.clone() for features in piece.features]
        self._rows, self._images = stop, last_image
        self._bad += piece.bad

    def batch(self) -> Batch:
        second, ids = (room[: self._rows] for room in self._room)
        negatives, negative_ids = (
            (self._joined(list(each)) for each in zip(*self._negatives, strict=True))
            if self._negatives
            else (None, None)
        )
        keys, known = (torch.cat(each) for each in zip(*self._cached, strict=True)) if self._cached else (None, None)
        first, features = self._first[: self._images], [self._joined(self._features)] if self._features else []
        return Batch(first, second, ids, negatives, negative_ids, self._bad, keys, known, features, step=self._step)

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        joined = torch.cat(tensors)
        return joined.pin_memory() if self._pin_memory else joined


def _as_it_is(piece: Any) -> Any:
    return piece


def _start_worker(number: int) -> None:
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_TRAINER)
    threading.Thread(target=_end_at_the_trainers_word, daemon=True).start()


def _end_at_the_trainers_word() -> None:
    """SIGTERM from the trainer is how its end, if nothing else, ends its workers. Others send it to the whole group."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """For processes that start in here, so that none is hit before it can say what it does not listen to."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
