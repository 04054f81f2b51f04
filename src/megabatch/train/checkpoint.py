"""What is kept of a run, so that it resumes bit-exactly after a kill.

A checkpoint is written under another name, brought to the disk, and then renamed: under its own name it is whole or not
there. It holds tensors and plain values alone, and is read without unpickling anything else. Its keys are OpenCLIP's.
"""

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from .config import must

State = dict[str, Any]

_WHOLE = re.compile(r"step_(\d+)\.pt")
_UNFINISHED = ".unfinished"


class WriteFailed(OSError):
    """A file could not be written: the disk is full, for instance. What was there before is there still."""


class Checkpoints:
    """The folder of a run's checkpoints: the last `keep` (0: all), and the best."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def __iter__(self) -> Iterator[Path]:
        """By step, the oldest first."""
        found = [(int(match[1]), path) for path in self.folder.glob("*.pt") if (match := _WHOLE.fullmatch(path.name))]
        return iter([path for _, path in sorted(found)])

    def latest(self) -> Path | None:
        paths = list(self)
        return paths[-1] if paths else None

    def write(self, state: State, *, is_best: bool, for_open_clip: bool) -> Path:
        """`epoch_latest.pt`, the name that OpenCLIP looks for, is the same file under a second name.

        It gets its own name last. So a run that is killed before goes on from an earlier one, and names it all again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{state['global_step']:08d}.pt"
        names = ["best.pt"] * is_best + ["epoch_latest.pt"] * for_open_clip
        atomically(path, lambda file: torch.save(state, file), also=[self.folder / name for name in names])
        if self.keep:
            for old in list(self)[: -self.keep]:
                old.unlink()
        return path


def load(path: Path) -> State:
    """Checked by the sums that are in the file. Tensors are read when they are used, once for all ranks of a machine.

    Raises ValueError where the file is not a checkpoint of ours, or no longer what was written.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint: there must be a file {path}, got none. Look in the run's checkpoints folder.")
    try:
        _check_sums(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"checkpoint: {path} must be a file that megabatch wrote, got one that is damaged or another's "
            f"({type(error).__name__}). Take another checkpoint; train --resume latest takes the newest whole one."
        ) from error
    if not isinstance(state, dict) or "megabatch" not in state:
        raise ValueError(
            f"checkpoint: {path} must be one of megabatch's, got one without its settings. Weights of open_clip are "
            "loaded by --pretrained."
        )
    return state


def reading(path: Path, what: str, advice: str) -> AbstractContextManager[None]:
    """For what is made of a checkpoint, which may be another's or malformed."""
    malformed = (RuntimeError, ValueError, KeyError, TypeError, AttributeError)
    return must(f"checkpoint: {path} must fit {what}", advice, malformed)


def _check_sums(path: Path) -> None:
    """torch.save writes a CRC-32 of every tensor, and torch.load does not look at them."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise zipfile.BadZipFile("it is compressed")
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")


def append(path: Path, text: str, *, sync: bool = False) -> None:
    """At the end of a file. What a full disk takes of it is no whole line, which readers pass over."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        raise WriteFailed(error.errno, error.strerror, str(path)) from None


def atomically(path: Path, write: Callable[[IO[bytes]], object], *, also: Sequence[Path] = ()) -> None:
    """The file at `path` is the old one or the new one, whenever the machine stops.

    Names in `also` are of the same file, and are given to it before its own.
    """
    unfinished, *others = (name.with_name(f"{name.name}.{os.getpid()}{_UNFINISHED}") for name in (path, *also))
    try:
        with open(unfinished, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        for other, name in zip(others, also, strict=True):
            _link(unfinished, other)
            os.replace(other, name)
        os.replace(unfinished, path)
        _sync(path.parent)
    except BaseException as error:
        for left in (unfinished, *others):
            left.unlink(missing_ok=True)
        if (cause := _os_error(error)) is None:
            raise
        raise WriteFailed(cause.errno, cause.strerror, str(path)) from error


def clear_unfinished(folder: Path) -> None:
    """What a killed run was writing."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def _os_error(error: BaseException | None) -> OSError | None:
    """What is behind an error: torch.save says of a full disk that a position is unexpected."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _link(path: Path, name: Path) -> None:
    name.unlink(missing_ok=True)
    try:
        os.link(path, name)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, name)


def _sync(folder: Path) -> None:
    """Names are the folder's, and reach the disk with it."""
    with suppress(OSError):  # not everywhere can a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
