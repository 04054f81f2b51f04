"""What is kept of a run, so that it goes on to the bit after any death.

A checkpoint is written under another name, brought to the disk, and then renamed: under its own name it is whole or not
there. It holds tensors and plain values alone, and is read without unpickling anything else. Its keys are OpenCLIP's.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

State = dict[str, Any]

_WHOLE = re.compile(r"step_(\d+)\.pt")
_UNFINISHED = ".unfinished"


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
        unfinished = _unfinished(path)
        _write_to_disk(unfinished, lambda file: torch.save(state, file))
        if is_best:
            _name_as_well(unfinished, self.folder / "best.pt")
        if for_open_clip:
            _name_as_well(unfinished, self.folder / "epoch_latest.pt")
        _rename(unfinished, path)
        if self.keep:
            for old in list(self)[: -self.keep]:
                old.unlink()
        return path

    def clear_unfinished(self) -> None:
        """What a killed run was writing."""
        for path in self.folder.glob(f"*{_UNFINISHED}"):
            path.unlink()


def load(path: Path) -> State:
    """Raises ValueError where the file is not a checkpoint of ours."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(
            f"checkpoint: there must be a file {path}, got none. Look in the run's checkpoints folder."
        ) from None
    except Exception as error:
        raise ValueError(
            f"checkpoint: {path} must be a file that megabatch wrote, got one that does not load "
            f"({type(error).__name__}). Take another of the run's checkpoints."
        ) from error
    if not isinstance(state, dict) or "megabatch" not in state:
        raise ValueError(
            f"checkpoint: {path} must be one of megabatch's, got one without its settings. Weights of open_clip are "
            "loaded by --pretrained."
        )
    return state


def atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """The file at `path` is the old one or the new one, whenever the machine stops."""
    _write_to_disk(_unfinished(path), write)
    _rename(_unfinished(path), path)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + _UNFINISHED)


def _write_to_disk(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _name_as_well(path: Path, name: Path) -> None:
    second = _unfinished(name)
    with suppress(FileNotFoundError):
        second.unlink()
    try:
        os.link(path, second)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, second)
    _rename(second, name)


def _rename(path: Path, name: Path) -> None:
    os.replace(path, name)
    _sync(name.parent)


def _sync(folder: Path) -> None:
    """Names are the folder's, and reach the disk with it."""
    with suppress(OSError):  # not everywhere can a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
