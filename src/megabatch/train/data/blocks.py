"""Blocks of samples: read ahead of their use, by several threads, and held until all of their samples were used."""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

IN_FLIGHT = 16  # blocks that a process reads at a time

Key = TypeVar("Key", bound=Hashable)
Block = TypeVar("Block", bound=Sized)


class Blocks(Generic[Key, Block]):
    """Blocks by key. It can be sent to other processes, and forked: what it holds stays behind.

    Args:
        load: Reads a block, whose length is its number of samples. What it raises is raised whenever the block is
            asked for, for as long as it is held.

    Attributes:
        most: So many are held: those that were asked for last.
    """

    def __init__(self, load: Callable[[Key], Block]) -> None:
        self._load, self.most = load, 64
        self._start()

    def _start(self) -> None:
        self._held: OrderedDict[Key, Future[Block]] = OrderedDict()
        self._uses: Counter[Key] = Counter()
        self._used_up: Key | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_load": self._load, "most": self.most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Starts to read those that are not held."""
        if self._process != os.getpid():  # threads are not forked
            self._start()
        for key in keys:
            if key not in self._held:
                self._threads = self._threads or ThreadPoolExecutor(IN_FLIGHT)
                self._held[key] = self._threads.submit(self._load, key)
            self._held.move_to_end(key)
        while len(self._held) > self.most:
            self._drop(next(iter(self._held)))

    def get(self, key: Key) -> Block:
        """The block, for the use of one of its samples."""
        if self._used_up is not None and self._used_up != key:
            self._drop(self._used_up)  # and not before: until now its samples could be named
        self.prefetch([key])
        block = self._held[key].result()
        self._uses[key] += 1
        if self._uses[key] >= len(block):
            self._used_up = key
        return block

    def peek(self, key: Key) -> Block | None:
        """The block, if it was read."""
        future = self._held.get(key)
        return future.result() if future is not None and future.done() and not future.exception() else None

    def _drop(self, key: Key) -> None:
        self._held.pop(key).cancel()
        self._uses.pop(key, None)
        if self._used_up == key:
            self._used_up = None
