"""Bytes of files, wherever they are: on a disk, in an object store, on a web server.

A read asks for a range of a file with one request. It returns exactly these bytes or raises. What fails for a moment is
tried again. A request that takes much longer than others is sent a second time, and the first answer is taken.
"""

import asyncio
import errno
import os
import random
import re
import socket
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

ATTEMPTS = 6
PAUSE_SECONDS = 0.5  # after the first attempt; doubles with each
TIMEOUT_SECONDS = 60.0  # of one request
HEDGE_SECONDS = 1.0  # until a request is sent a second time: at least these,
HEDGE_MEDIANS = 4.0  # and so many times the median of recent reads
LARGEST = 2**30  # bytes of a file that is read whole

_EXTRAS = {"s3fs": "s3", "gcsfs": "gs", "aiohttp": "http"}
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EPIPE, errno.ECONNRESET, socket.EAI_AGAIN}
_TRANSIENT |= {errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH}
_PERMANENT = (FileNotFoundError, PermissionError, ValueError, TypeError, NotImplementedError, ImportError)

T = TypeVar("T")


class StorageError(OSError):
    """A file, or a part of it, could not be read."""


class Missing(StorageError):
    """There is no such file."""


def read(url: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file, all of them."""
    name, path, wanted = f"{url}, bytes {start} to {stop}", local_path(url), stop - start

    def once() -> bytes:
        data = _thread.files.read(path, start, wanted) if path is not None else _remote(url).read(url, start, stop)
        if len(data) == wanted:
            return data
        size, _ = _info(url)
        if size < stop:
            raise StorageError(f"{name}: the file has {size} bytes, fewer than its index says. It changed.")
        if len(data) > wanted:
            raise StorageError(
                f"{name}: the server ignores Range and sent {len(data)} bytes. Use one that supports it."
            )
        raise EOFError(f"{len(data)} of {wanted} bytes came")

    return _retried(name, once) if wanted else b""


def read_all(url: str, largest: int = LARGEST) -> bytes:
    size, _ = size_and_tag(url)
    if size > largest:
        raise ValueError(f"{url}: must have at most {largest} bytes, has {size}.")
    return read(url, 0, size)


def size_and_tag(url: str) -> tuple[int, str]:
    """Size in bytes, and what changes when the file does: its ETag, or the time of its last change."""
    return _retried(url, lambda: _info(url))


def local_path(url: str) -> str | None:
    """The path of a local file, None for what is elsewhere."""
    if url.startswith("file://"):
        return url.removeprefix("file://")
    return None if re.match(r"[a-z][a-z0-9+.-]+://", url) else url


def ask(url: str, method: str, **options: Any) -> Any:
    """What a method of the remote file system returns, such as `ls`. Retried."""
    return _retried(url, lambda: _remote(url).ask(method, url, **options))


def tag_of(info: dict[str, Any]) -> str:
    names = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "Last-Modified", "last_modified", "mtime", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")


def _info(url: str) -> tuple[int, str]:
    path = local_path(url)
    if path is not None:
        status = os.stat(path)
        return status.st_size, str(status.st_mtime_ns)
    info = _remote(url).ask("info", url)
    if info["size"] is None:
        raise StorageError(f"{url}: the server does not tell its size. Use one that sends Content-Length.")
    return info["size"], tag_of(info)


def _retried(name: str, function: Callable[[], T]) -> T:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return function()
        except (StorageError, ModuleNotFoundError):
            raise
        except Exception as error:
            while error.__cause__ is not None and isinstance(error.__cause__, Exception):
                error = error.__cause__
            status = _status(error)
            if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
                raise Missing(f"{name}: there is no such file.") from None
            if status == 416:
                raise StorageError(f"{name}: the file ends before, other than its index says. It changed.") from None
            if attempt == ATTEMPTS or not _transient(error, status):
                times = "once" if attempt == 1 else f"{attempt} times"
                raise StorageError(f"{name}: tried {times}: {str(error) or type(error).__name__}") from None
        # Not from the seeded generators: neither may a pause move them, nor may ranks pause in step.
        time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1) * (0.5 + random.SystemRandom().random()))
    raise AssertionError("unreachable")


def _transient(error: Exception, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT
    return not isinstance(error, _PERMANENT)


def _status(error: Exception) -> int | None:
    """The HTTP status, where each library keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        response = response.get("ResponseMetadata", {})
        return response.get("HTTPStatusCode")  # type: ignore[no-any-return]
    found = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((status for status in found if isinstance(status, int)), None)


class _OpenFiles:
    """Reads pieces of local files, and keeps the last few open. Each thread has its own: none closes another's."""

    MOST = 16

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, start: int, size: int) -> bytes:
        if path not in self._descriptors:
            if len(self._descriptors) >= self.MOST:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors.move_to_end(path)
        try:  # A position of its own: after a fork the descriptor's position is everybody's.
            return os.pread(self._descriptors[path], size, start)
        except OSError:
            os.close(self._descriptors.pop(path))  # of a file system that was gone for a while
            raise

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.files = _OpenFiles()


_thread = _Thread()


class _Remote:
    """A file system of fsspec. One that was made before a fork cannot be used after it."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self.files, _ = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        except ImportError as error:
            package = next((name for name in _EXTRAS if name in str(error)), None)
            help = f": pip install 'megabatch[{_EXTRAS[package]}]'" if package else f". {error}"
            raise ModuleNotFoundError(f"{url}: a package is not installed{help}", name=package) from None
        self.files.retries = 1  # of s3fs, each of which would be multiplied by ours
        self._threads = ThreadPoolExecutor(64)  # for file systems that do not use asyncio
        self._seconds: deque[float] = deque([0.0], maxlen=64)

    def read(self, url: str, start: int, stop: int) -> bytes:
        # Without `size` each open asks for it, without "none" as much again is read ahead.
        unbuffered = {"size": stop, "cache_type": "none"} if url.startswith("hf:") else {}
        options = {"start": start, "end": stop, **unbuffered}
        begun = time.monotonic()
        path = self.files._strip_protocol(url)
        pending = {self._begin("cat_file", path, **options)}
        requests = set(pending)
        try:
            patience = max(HEDGE_SECONDS, HEDGE_MEDIANS * statistics.median(tuple(self._seconds)))
            done, pending = wait(pending, min(patience, TIMEOUT_SECONDS))
            if not done:
                pending.add(self._begin("cat_file", path, **options))
                requests |= pending
            while not any(each.exception() is None for each in done) and pending:
                left = begun + TIMEOUT_SECONDS - time.monotonic()
                done, pending = wait(pending, max(left, 0.0), return_when=FIRST_COMPLETED)
                if not done:
                    raise TimeoutError(f"no answer in {TIMEOUT_SECONDS:g} s")
        finally:
            for each in requests:
                each.cancel()
        data: bytes = min(done, key=lambda each: each.exception() is not None).result()
        self._seconds.append(time.monotonic() - begun)
        return data

    def ask(self, method: str, url: str, **options: Any) -> Any:
        request = self._begin(method, self.files._strip_protocol(url), **options)
        if not wait([request], TIMEOUT_SECONDS).done:
            request.cancel()
            raise TimeoutError(f"no answer in {TIMEOUT_SECONDS:g} s")
        return request.result()

    def _begin(self, method: str, *args: Any, **options: Any) -> "Future[Any]":
        if self.files.async_impl:
            return asyncio.run_coroutine_threadsafe(
                getattr(self.files, f"_{method}")(*args, **options), self.files.loop
            )
        return self._threads.submit(getattr(self.files, method), *args, **options)


_remotes: dict[tuple[int, str], _Remote] = {}


def _remote(url: str) -> _Remote:
    key = os.getpid(), "/".join(url.split("/")[:3])
    if key not in _remotes:
        _remotes.setdefault(key, _Remote(url))
    return _remotes[key]
