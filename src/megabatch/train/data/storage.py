"""Bytes of files, wherever they are: on a disk, in an object store, on a web server.

A read asks for a range of a file in one request. It returns exactly these bytes, or raises. What fails for a moment is
tried again. A request that takes much longer than others is sent a second time, and the first answer counts.
"""

import asyncio
import concurrent.futures
import errno
import itertools
import os
import random
import re
import stat
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from .source import BadSample

ATTEMPTS = 6
PAUSE_SECONDS = 0.5  # after the first attempt; it doubles with each
TIMEOUT_SECONDS = 60.0
LISTING_SECONDS = 1800.0  # a folder of a million files takes minutes
HEDGE_SECONDS = 1.0  # a request is repeated after this time at the least,
HEDGE_MEDIANS = 4.0  # and so many times the median of recent reads
LARGEST = 2**28  # bytes of a file that is read whole

Known = tuple[int, str]  # size of a file, and what changes when the file does: its ETag, or when it last changed
T = TypeVar("T")
_EXTRAS = {"s3fs": "s3", "gcsfs": "gs", "aiohttp": "http"}  # what provides a package
_OPTIONS = {"s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}}}
_TAGS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "Last-Modified", "last_modified", "mtime")
_PERMANENT: tuple[type[Exception], ...] = (PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT += (ValueError, TypeError, NotImplementedError, ImportError)
_seconds = deque([0.0], maxlen=64)  # that recent reads took
_making: dict[int, threading.Lock] = {}  # of file systems, by process: threads share one, and a fork inherits no lock


class StorageError(OSError):
    """A file, or a part of it, could not be read."""


class Missing(StorageError):
    """There is no such file."""


def read(url: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file, all of them. Raises StorageError."""
    name, wanted = f"{url}, bytes {start} to {stop}", stop - start

    def once() -> bytes:
        data = _read(url, start, stop)
        if len(data) == wanted:
            return data
        size, _ = _size_and_tag(url)
        if size < stop:
            raise StorageError(f"{name}: the file is shorter than its index says, {size} bytes. It changed.")
        if len(data) > wanted:
            raise StorageError(f"{name}: got {len(data)} bytes. The server ignores Range: use one that does not.")
        raise EOFError(f"{len(data)} of {wanted} bytes came")

    return retried(name, once) if wanted else b""


def read_all(url: str) -> bytes:
    size, _ = size_and_tag(url)
    if size > LARGEST:
        raise ValueError(f"{url}: must have at most {LARGEST} bytes, has {size}.")
    return read(url, 0, size)


def size_and_tag(url: str) -> Known:
    return retried(url, lambda: _size_and_tag(url))


def ask(url: str, method: str, **options: Any) -> Any:
    """What a method of a remote file system returns, such as `ls`."""
    return retried(url, lambda: _answer(url, method, LISTING_SECONDS, **options))


def local_path(url: str) -> str | None:
    """The path of a local file, None for any other."""
    path = url.removeprefix("file://")
    return None if re.match(r"[a-z][a-z0-9+.-]+://", path) else path


def known_by_info(info: Mapping[str, Any]) -> Known | None:
    """By what a remote file system says of a file; None for what is none, or where its size is not told."""
    if info["type"] != "file" or info.get("size") is None:
        return None
    return info["size"], next((str(info[name]) for name in _TAGS if info.get(name)), "")


def known_by_status(status: os.stat_result) -> Known | None:
    return (status.st_size, str(status.st_mtime_ns)) if stat.S_ISREG(status.st_mode) else None


def _size_and_tag(url: str) -> Known:
    path = local_path(url)
    known = known_by_info(_answer(url, "info", TIMEOUT_SECONDS)) if path is None else known_by_status(os.stat(path))
    if known is None:
        raise StorageError(f"{url}: must be a file of a known size, is something else.")
    return known


def retried(name: str, function: Callable[[], T]) -> T:
    """What the function returns, after as many attempts as it takes. Raises StorageError where they are too many."""
    for attempt in itertools.count(1):
        try:
            return function()
        except (StorageError, BadSample, ModuleNotFoundError):
            raise
        except Exception as error:
            while isinstance(error, OSError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # a library's own, such as an HTTP status behind a FileNotFoundError
            if _is_of_this_process(error):
                raise
            status = _status(error)
            if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
                raise Missing(f"{name}: there is no such file.") from None
            if status == 416:
                raise StorageError(f"{name}: the file is shorter than its index says. It changed.") from None
            if attempt == ATTEMPTS or not _is_transient(error, status):
                cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise StorageError(f"{name}: tried {attempt} time{'s' * (attempt > 1)}: {cause}") from None
        # Of the system's generator: seeded ones would move, and workers would pause in step.
        time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1) * random.SystemRandom().uniform(0.5, 1.5))
    raise AssertionError


def _is_of_this_process(error: Exception) -> bool:
    """Out of memory or of file descriptors, or a mistake in a program: nothing that a file could be blamed for."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return type(error).__module__ == "builtins" and not isinstance(error, (*_PERMANENT, EOFError))


def _is_transient(error: Exception, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
        return False
    return not isinstance(error, _PERMANENT) and "Credentials" not in type(error).__name__


def _status(error: Exception) -> int | None:
    """The HTTP status of an error of aiohttp, Hugging Face, gcsfs or botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status
    places = ((error, "status"), (response, "status_code"), (error, "code"))
    found = (getattr(place, name, None) for place, name in places)
    return next((each for each in found if isinstance(each, int)), None)


def _read(url: str, start: int, stop: int) -> bytes:
    path = local_path(url)
    if path is not None:
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), stop - start, start)
    options = {"cache_type": "none"} if url.startswith("hf:") else {}  # else it reads ahead
    patience = max(HEDGE_SECONDS, HEDGE_MEDIANS * statistics.median(tuple(_seconds)))
    begun = time.monotonic()
    data: bytes = _answer(url, "cat_file", TIMEOUT_SECONDS, patience, start=start, end=stop, **options)
    _seconds.append(time.monotonic() - begun)
    return data


def _answer(url: str, method: str, timeout: float, patience: float | None = None, **options: Any) -> Any:
    """Of a remote file system, which is asked once more after `patience`, in seconds."""
    requests = [_begun(url, method, options)]
    try:
        if patience is not None and not concurrent.futures.wait(requests, min(patience, timeout)).done:
            requests.append(_begun(url, method, options))
        for request in concurrent.futures.as_completed(requests, timeout):
            if request.exception() is None:
                return request.result()
        return requests[0].result()
    except concurrent.futures.TimeoutError:  # of its own before Python 3.11
        raise TimeoutError(f"no answer in {timeout:g} s") from None
    finally:
        for request in requests:
            request.cancel()


def _begun(url: str, method: str, options: dict[str, Any]) -> "Future[Any]":
    with _making.setdefault(os.getpid(), threading.Lock()):
        system, threads = _system(os.getpid(), "/".join(url.split("/")[:3]))
    path = system._strip_protocol(url)
    if system.async_impl:
        return asyncio.run_coroutine_threadsafe(getattr(system, f"_{method}")(path, **options), system.loop)
    return threads.submit(getattr(system, method), path, **options)


@cache
def _system(process: int, root: str) -> tuple[Any, ThreadPoolExecutor]:
    """The file system of fsspec, which must be used in the process that made it, and threads if it has no own."""
    from fsspec.core import url_to_fs

    options = _OPTIONS.get(root.partition("://")[0], {})
    try:
        system, _ = url_to_fs(root, skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        package = next((package for package in _EXTRAS if package in str(error)), None)
        help = f"pip install 'megabatch[{_EXTRAS[package]}]'" if package else str(error)
        raise ModuleNotFoundError(f"{root}: a package is missing: {help}", name=package) from None
    system.retries = 1  # of s3fs: `retried` would multiply them
    return system, ThreadPoolExecutor(64)
