"""Who called the library: the line that a warning is about, and that a call is known by."""

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_PACKAGES = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
# What stands between a loss and the line that calls it. The trainer's own calls are lines of the trainer.
_WRAPPERS = tuple(f"{_PACKAGES[0]}{name}" for name in ("functional.", "modules.", "retrieval.", "integrations"))

warned: set[tuple[str, str]] = set()  # functions, and what they have warned of


def warn_once(function: str, kind: str, message: str) -> None:
    """For every kind of warning, the first time, at the line that called the library."""
    if (function, kind) not in warned:
        warned.add((function, kind))
        warnings.warn(f"{function}: {message}", stacklevel=_first_frame_outside(_PACKAGES)[1])


def call_site() -> str:
    """The line that calls a loss, such as "train.py:42, in step"; "" if unknown."""
    if torch.compiler.is_compiling():
        return ""
    frame, _ = _first_frame_outside((*_WRAPPERS, __file__, _PACKAGES[1]))
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _first_frame_outside(files: tuple[str, ...]) -> tuple[FrameType, int]:
    """The first frame of another file, and its `stacklevel` for the function that calls this one."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(files):
        frame, level = frame.f_back, level + 1
    return frame, level
