"""Bytes of files, wherever they are: on a disk, in an object store, on a web server.

A read asks for a range of a file in one request. It returns exactly these bytes, or raises. What fails for a moment is
tried again. A request that takes much longer than others is sent a second time, and the first answer counts.
"""

import asyncio
import concurrent.futures
import errno
import os
import random
import re
import socket
import stat
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

ATTEMPTS = 6
PAUSE_SECONDS = 0.5  # after the first attempt; it doubles with each
TIMEOUT_SECONDS = 60.0
LISTING_SECONDS = 1800.0  # a folder of a million files takes minutes
HEDGE_SECONDS = 1.0  # a request is repeated after this time at the least,
HEDGE_MEDIANS = 4.0  # and so many times the median of recent reads
LARGEST = 2**28  # bytes of a file that is read whole

T = TypeVar("T")
_EXTRAS = {"s3fs": "s3", "gcsfs": "gs", "aiohttp": "http"}  # what provides a package
_OPTIONS = {"s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}}}
_TAGS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "Last-Modified", "last_modified", "mtime")
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EPIPE, errno.ECONNRESET, socket.EAI_AGAIN}
_TRANSIENT |= {errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH}
_PERMANENT = (FileNotFoundError, PermissionError, ValueError, TypeError, NotImplementedError, ImportError)


class StorageError(OSError):
    """A file, or a part of it, could not be read."""


class Missing(StorageError):
    """There is no such file."""


def read(url: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file, all of them. Raises StorageError."""
    name, path, wanted = f"{url}, bytes {start} to {stop}", local_path(url), stop - start

    def once() -> bytes:
        data = _remote(url).read(url, start, stop) if path is None else _read_local(path, start, wanted)
        if len(data) == wanted:
            return data
        size, _ = _size_and_tag(url)
        if size < stop:
            raise StorageError(f"{name}: the file is shorter than its index says, {size} bytes. It changed.")
        if len(data) > wanted:
            raise StorageError(f"{name}: got {len(data)} bytes. The server ignores Range: use one that does not.")
        raise EOFError(f"{len(data)} of {wanted} bytes came")

    return _retried(name, once) if wanted else b""


def read_all(url: str) -> bytes:
    size, _ = size_and_tag(url)
    if size > LARGEST:
        raise ValueError(f"{url}: must have at most {LARGEST} bytes, has {size}.")
    return read(url, 0, size)


def size_and_tag(url: str) -> tuple[int, str]:
    """Bytes of a file, and what changes when the file does: its ETag, or the time of its last change."""
    return _retried(url, lambda: _size_and_tag(url))


def ask(url: str, method: str, **options: Any) -> Any:
    """What a method of a remote file system returns, such as `ls`."""
    return _retried(url, lambda: _remote(url).ask(url, method, LISTING_SECONDS, **options))


def local_path(url: str) -> str | None:
    """The path of a local file, None for any other."""
    path = url.removeprefix("file://")
    return None if re.match(r"[a-z][a-z0-9+.-]+://", path) else path


def tag_of(info: Mapping[str, Any]) -> str:
    return next((str(info[name]) for name in _TAGS if info.get(name)), "")


def _size_and_tag(url: str) -> tuple[int, str]:
    path = local_path(url)
    if path is not None:
        status = os.stat(path)
        is_file, size, tag = stat.S_ISREG(status.st_mode), status.st_size, str(status.st_mtime_ns)
    else:
        info = _remote(url).ask(url, "info", TIMEOUT_SECONDS)
        is_file, size, tag = info["type"] == "file", info["size"], tag_of(info)
    if not is_file or size is None:
        raise StorageError(f"{url}: must be a file{' with a known size' * is_file}, is something else.")
    return size, tag


def _retried(name: str, function: Callable[[], T]) -> T:
    attempt = 1
    while True:
        try:
            return function()
        except (StorageError, ModuleNotFoundError):
            raise
        except Exception as error:
            while isinstance(error, OSError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # a library's own, such as an HTTP status behind a FileNotFoundError
            status = _status(error)
            if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
                raise Missing(f"{name}: there is no such file.") from None
            if status == 416:
                raise StorageError(f"{name}: the file is shorter than its index says. It changed.") from None
            if attempt == ATTEMPTS or not _is_transient(error, status):
                cause = str(error) or type(error).__name__
                raise StorageError(f"{name}: tried {attempt} time{'s' * (attempt > 1)}: {cause}") from None
        # Of the system's generator: seeded ones would move, and workers would pause in step.
        time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1) * random.SystemRandom().uniform(0.5, 1.5))
        attempt += 1


def _is_transient(error: Exception, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT
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


def _read_local(path: str, start: int, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), size, start)


class _Remote:
    """A file system of fsspec. It must be used in the process that made it."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        options = _OPTIONS.get(url.partition("://")[0], {})
        try:
            self._system, _ = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            package = next((package for package in _EXTRAS if package in str(error)), None)
            help = f"pip install 'megabatch[{_EXTRAS[package]}]'" if package else str(error)
            raise ModuleNotFoundError(f"{url}: a package is missing: {help}", name=package) from None
        self._system.retries = 1  # of s3fs: `_retried` would multiply them
        self._threads = ThreadPoolExecutor(64)  # where the file system does not use asyncio
        self._seconds = deque([0.0], maxlen=64)

    def read(self, url: str, start: int, stop: int) -> bytes:
        options: dict[str, Any] = {"start": start, "end": stop}
        if url.startswith("hf:"):
            options["cache_type"] = "none"  # else it reads ahead
        begun = time.monotonic()
        requests = [self._begin(url, "cat_file", **options)]
        patience = max(HEDGE_SECONDS, HEDGE_MEDIANS * statistics.median(tuple(self._seconds)))
        if not concurrent.futures.wait(requests, min(patience, TIMEOUT_SECONDS)).done:
            requests.append(self._begin(url, "cat_file", **options))
        data: bytes = _first_answer(requests, TIMEOUT_SECONDS)
        self._seconds.append(time.monotonic() - begun)
        return data

    def ask(self, url: str, method: str, timeout: float, **options: Any) -> Any:
        return _first_answer([self._begin(url, method, **options)], timeout)

    def _begin(self, url: str, method: str, **options: Any) -> "Future[Any]":
        path = self._system._strip_protocol(url)
        if self._system.async_impl:
            coroutine = getattr(self._system, f"_{method}")(path, **options)
            return asyncio.run_coroutine_threadsafe(coroutine, self._system.loop)
        return self._threads.submit(getattr(self._system, method), path, **options)


def _first_answer(requests: "list[Future[Any]]", timeout: float) -> Any:
    try:
        for request in concurrent.futures.as_completed(requests, timeout):
            if request.exception() is None:
                return request.result()
        return requests[0].result()
    except concurrent.futures.TimeoutError:
        raise TimeoutError(f"no answer in {timeout:g} s") from None
    finally:
        for request in requests:
            request.cancel()


def _remote(url: str) -> _Remote:
    key = os.getpid(), "/".join(url.split("/")[:3])
    return _remotes.get(key) or _remotes.setdefault(key, _Remote(url))


_remotes: dict[tuple[int, str], _Remote] = {}
