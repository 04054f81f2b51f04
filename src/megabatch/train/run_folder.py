"""The folder of a run: what it may be called, and the lock that leaves it to one run at a time."""

import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..distributed.world import World

LOGGER = logging.getLogger("megabatch")
PATIENCE = 60.0  # seconds for ranks of a run that was killed: torchrun gives them 30
_AGAIN = 0.2


def check_name(name: str) -> None:
    if name in (".", "..") or "/" in name or not name.isprintable():
        raise ValueError(
            f"--name must be the name of one folder inside --logs, got {name!r}. Give the folder around it as --logs."
        )


@contextmanager
def locked(folder: Path, world: World, *, waits: bool) -> Iterator[None]:
    """The folder is for the ranks of this run alone, until the last of them ends, however it ends.

    The lock is the operating system's: no file has to be removed after a kill. Rank 0 asks for the folder, where
    `waits` for up to PATIENCE, and then all ranks and their data workers hold it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        holder = _take(file, PATIENCE if waits else 0) if world.rank == 0 else None
        if holder := world.gather(holder)[0]:
            raise ValueError(
                f"--name must be that of a run that has ended, got {folder}, which {holder} runs. Wait for it, end "
                "it, or take another --name."
            )
        if world.rank:
            _lock(file, fcntl.LOCK_SH)
        yield


def _take(file: IO[str], patience: float) -> str | None:
    """Who has it, or None: this process has."""
    end, said = time.monotonic() + patience, False
    while not _lock(file, fcntl.LOCK_EX):
        if time.monotonic() >= end:
            return _holder(file)
        if not said:
            print(f"megabatch train: waiting up to {patience:.0f} s for {_holder(file)} to end", file=sys.stderr)
            said = True
        time.sleep(_AGAIN)
    own = f"pid {os.getpid()} on {socket.gethostname()}"
    file.truncate(0)
    file.write(own)
    file.flush()
    # Another may come in between the two locks. It has then written its name.
    return None if _lock(file, fcntl.LOCK_SH) and _holder(file) == own else _holder(file)


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read() or "another process"


def _lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        LOGGER.warning(f"{file.name}: {error.strerror}: nothing keeps a second run out of this folder")
    return True
