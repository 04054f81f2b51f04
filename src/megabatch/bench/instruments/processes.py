"""A function in a process of its own, so that its memory, its state and its death are its own too."""

import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# New processes come from a server that has torch loaded and has done nothing with it.
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Cannot allocate memory",
)


class Failed(Exception):
    """The function raised, or its process died; the text says which."""


class OutOfMemory(Failed):
    """It asked for memory that it did not get."""


def context() -> Any:
    """Where processes, pipes and barriers are made."""
    makers = multiprocessing.get_context(_METHOD)
    if _METHOD == "forkserver":
        makers.set_forkserver_preload(["megabatch.bench.loss.trial", "torch._dynamo"])
    return makers


def run(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What `function`, known by its module and name, returns in a new process. Raises Failed."""
    makers = context()
    receiver, sender = makers.Pipe(duplex=False)
    process = makers.Process(target=_child, args=(sender, function, args, kwargs), daemon=True)
    start(process)
    sender.close()
    try:
        error, result = receiver.recv()
    except EOFError:
        process.join()
        raise death(process.exitcode) from None
    except BaseException:  # Ctrl-C, which the process does not hear
        process.kill()
        raise
    process.join()
    if error is not None:
        raise error
    returned: R = result
    return returned


def run_here(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The same in this process: for work on a GPU, which has a meter of its own and takes long to begin with."""
    try:
        return function(*args, **kwargs)
    except Exception as raised:
        failure = failure_of(raised)
    # Outside of the handler, so that nothing holds on to what the function held.
    torch.cuda.empty_cache()
    raise failure


def _child(
    sender: Connection, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    error, result = None, None
    try:
        result = function(*args, **kwargs)
    except Exception as raised:
        error = failure_of(raised)
    sender.send((error, result))


def start(process: Any) -> None:
    """So that neither it nor the server that it comes from hears Ctrl-C. A terminal sends that to all processes; the
    first of them ends the others and says so, once."""
    if threading.current_thread() is not threading.main_thread():  # only the main one may decide
        process.start()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def failure_of(error: Exception) -> Failed:
    """In one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return OutOfMemory("out of memory")
    return Failed(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def death(exitcode: int | None) -> Failed:
    if exitcode is None or exitcode >= 0:
        return Failed(f"its process ended without a result, exit code {exitcode}")
    name = signal.Signals(-exitcode).name
    # The kernel's way to say so.
    return OutOfMemory("out of memory") if name == "SIGKILL" else Failed(f"its process was killed by {name}")
