"""Does a step read anything back from the GPU? Each read makes the host wait until the GPU has caught up."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from .calls import Call, leaves_of
from .findings import FAILED, Finding, counted, each

SECTION = "host reads"
# torch's words, in an error or a warning.
SYNCHRONIZING = "called a synchronizing CUDA operation"
PACKAGE = Path(__file__).parent.parent

# Makes torch raise ("error") or warn ("warn") where the host waits for the GPU.
Watch = Callable[[str], AbstractContextManager[object]]


@contextmanager
def watched(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def examine(calls: Sequence[Call], device: torch.device, watch: Watch = watched) -> list[Finding]:
    return each(SECTION, calls, lambda call: [_examined(call, device, watch)])


def _examined(call: Call, device: torch.device, watch: Watch) -> Finding:
    first = call.inputs(device)
    # Compiles kernels and fills caches. The others have other numbers, so that no cache of results can help.
    _step(call, first)
    other = call.other(first)
    try:
        with watch("error"):
            _step(call, other)
    except RuntimeError as error:
        if SYNCHRONIZING not in str(error):
            raise
        reads = _count(call, other, watch)
        # Where torch warned of none, the one that it raised for is still there.
        return Finding(SECTION, str(call), FAILED, max(reads, 1), 0, f"at {_place(error)}")
    return counted(SECTION, str(call), 0, 0)


def _step(call: Call, inputs: dict[str, object]) -> None:
    torch.autograd.grad(call.forward(inputs), leaves_of(inputs))


def _count(call: Call, inputs: dict[str, object], watch: Watch) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch("warn"):
            _step(call, inputs)
    return sum(SYNCHRONIZING in str(warning.message) for warning in caught)


def _place(error: BaseException) -> str:
    """The innermost line of the package on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(PACKAGE)), None)
    if inner is None:
        return "an unknown line"
    return f"{Path(inner.filename).relative_to(PACKAGE).as_posix()}:{inner.lineno} {inner.line or ''}".rstrip()
