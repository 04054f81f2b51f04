"""What only a GPU shows: whether the host waits for it. Each time, the GPU runs dry."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent.parent
SYNCHRONIZING = "called a synchronizing CUDA operation"  # torch's words


@contextmanager
def no_host_reads() -> Iterator[None]:
    """torch raises where the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def host_read(step: Callable[[], object]) -> str:
    """The line of the package where the host first waits for the GPU; "" if it never does."""
    try:
        with no_host_reads():
            step()
    except RuntimeError as error:
        if SYNCHRONIZING not in str(error):
            raise
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents
        ]
        place = Path(frames[-1].filename).relative_to(PACKAGE).as_posix()
        return f"{place}:{frames[-1].lineno} {frames[-1].line or ''}"
    return ""
