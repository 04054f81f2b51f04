"""Bytes of files on disks, S3 and web servers, which run here, and the shards that `--train-data` names."""

import errno
import json
import logging
import os
import random
import re
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import boto3
import pytest
from fsspec.config import conf
from fsspec.registry import _registry
from moto.server import ThreadedMotoServer

from megabatch.train.data import storage
from megabatch.train.data.listing import expand
from megabatch.train.data.storage import Missing, StorageError, read, read_all, size_and_tag

CONTENT = bytes(random.Random(0).randbytes(5000))


class Server(ThreadingHTTPServer):
    """Serves ranges of files, and goes wrong as told: each request takes the next of `faults`."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.faults: list[Callable[[Handler, bytes], None] | None] = []
        self.methods: list[str] = []
        self.ranges: list[str | None] = []
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are meant to."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.methods.append(self.command)
        self.server.ranges.append(self.headers.get("Range"))
        content = self.server.files.get(self.path.partition("?")[0])
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault is not None:
            fault(self, content or b"")
        elif content is None:
            self.send_error(404)
        else:
            self.answer(*self.cut(content))

    do_HEAD = do_GET

    def cut(self, content: bytes) -> tuple[int, bytes]:
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            return 200, content
        part = content[int(span[1]) : int(span[2]) + 1]
        return (206, part) if part else (416, b"")

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", f'"{hash(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def status(code: int, body: bytes = b"") -> Callable[[Handler, bytes], None]:
    return lambda handler, content: handler.answer(code, body)


def reset(handler: Handler, content: bytes) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.connection.close()


def short(handler: Handler, content: bytes) -> None:
    """Hangs up in the middle of the body."""
    code, part = handler.cut(content)
    handler.answer(code, part[: len(part) // 2], length=len(part))
    handler.close_connection = True


def wrong_length(handler: Handler, content: bytes) -> None:
    """A whole answer, of half the range."""
    code, part = handler.cut(content)
    handler.answer(code, part[: len(part) // 2])


def no_range(handler: Handler, content: bytes) -> None:
    handler.answer(200, content)


def hang(handler: Handler, content: bytes) -> None:
    handler.server.closing.wait()
    handler.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server({"/a.tar": CONTENT})
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.closing.set()
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an S3 server that has a bucket `data`."""
    logging.getLogger("werkzeug").setLevel(logging.INFO)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="data")
        client.put_object(Bucket="data", Key="a.tar", Body=CONTENT)
        for number in range(20):
            client.put_object(Bucket="data", Key=f"folder/{number:02}.tar", Body=CONTENT[: 100 + number])
        client.put_object(Bucket="data", Key="folder/00.json", Body=b"{}")
        yield client
    running.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(storage, "HEDGE_SECONDS", 50.0)  # a slow machine is not a slow server


def where(kind: str, server: Server, tmp_path: Path) -> str:
    (tmp_path / "a.tar").write_bytes(CONTENT)
    local = f"{tmp_path}/a.tar"
    return {"local": local, "file": f"file://{local}", "http": f"{server.url}/a.tar", "s3": "s3://data/a.tar"}[kind]


@pytest.mark.parametrize("kind", ["local", "file", "http", "s3"])
def test_a_read_returns_exactly_the_range(kind: str, server: Server, s3: Any, tmp_path: Path) -> None:
    url = where(kind, server, tmp_path)
    for start, stop in [(0, 1), (0, 5000), (4999, 5000), (1234, 2345), (10, 10)]:
        assert read(url, start, stop) == CONTENT[start:stop]
    assert read_all(url) == CONTENT


@pytest.mark.parametrize("kind", ["local", "http", "s3"])
@pytest.mark.parametrize(("start", "stop"), [(4990, 5001), (6000, 6010)])
def test_a_range_past_the_end_is_an_error(
    kind: str, start: int, stop: int, server: Server, s3: Any, tmp_path: Path
) -> None:
    url = where(kind, server, tmp_path)
    with pytest.raises(StorageError, match=rf"{url}, bytes {start} to {stop}: the file is shorter than its index says"):
        read(url, start, stop)
    assert server.methods.count("GET") <= 1  # not retried


@pytest.mark.parametrize("kind", ["local", "http", "s3"])
def test_a_missing_file_is_told_apart(kind: str, server: Server, s3: Any, tmp_path: Path) -> None:
    url = where(kind, server, tmp_path).replace("a.tar", "b.tar")
    for function in (lambda: read(url, 0, 10), lambda: size_and_tag(url), lambda: read_all(url)):
        with pytest.raises(Missing, match=rf"{url}.*: there is no such file"):
            function()


@pytest.mark.parametrize("fault", [reset, short, wrong_length, status(500), status(503), status(429)])
def test_a_fault_that_passes_is_retried(fault: Callable[[Handler, bytes], None], server: Server) -> None:
    server.faults = [fault]
    if fault is wrong_length:
        server.faults += [None]  # the size is asked for
    assert read(f"{server.url}/a.tar", 100, 200) == CONTENT[100:200]
    assert server.methods.count("GET") == 2


def test_a_fault_that_stays_names_url_range_attempts_and_cause(server: Server) -> None:
    server.faults = [status(503)] * storage.ATTEMPTS
    with pytest.raises(StorageError, match=rf"{server.url}/a\.tar, bytes 5 to 9: tried 6 times: 503") as raised:
        read(f"{server.url}/a.tar", 5, 9)
    assert not isinstance(raised.value, Missing)
    assert server.methods == ["GET"] * 6


def test_a_server_that_is_gone_is_not_a_missing_file(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/a.tar"
    for function in (lambda: read(url, 0, 10), lambda: size_and_tag(url)):
        with pytest.raises(StorageError, match="tried 6 times") as raised:
            function()
        assert not isinstance(raised.value, Missing)


def test_what_is_forbidden_is_not_retried(server: Server) -> None:
    server.faults = [status(403)]
    with pytest.raises(StorageError, match="tried 1 time: 403"):
        read(f"{server.url}/a.tar", 5, 9)
    assert server.methods == ["GET"]


def test_s3_without_credentials_says_so_at_once(s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError, match="tried 1 time: Unable to locate credentials"):
        read("s3://other/a.tar", 0, 10)


def test_a_server_without_range_is_an_error_and_not_retried(server: Server) -> None:
    server.faults = [no_range]
    with pytest.raises(StorageError, match=r"got 5000 bytes\. The server ignores Range"):
        read(f"{server.url}/a.tar", 5, 9)
    assert server.methods.count("GET") == 1


def test_s3_that_slows_down_is_asked_again_once_per_attempt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as often again by each library in between."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    server.faults = [status(503, b"<Error><Code>SlowDown</Code><Message>Wait</Message></Error>")] * 50
    with pytest.raises(StorageError, match="tried 2 times"):
        read("s3://slow/a.tar", 0, 10)
    assert server.methods == ["GET"] * 2


def test_a_request_that_hangs_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    server.faults = [hang] * 10
    with pytest.raises(StorageError, match=r"tried 2 times: no answer in 0\.2 s"):
        read(f"{server.url}/a.tar", 5, 9)
    with pytest.raises(StorageError, match=r"tried 2 times: no answer in 0\.2 s"):
        size_and_tag(f"{server.url}/a.tar")


def test_a_slow_request_is_sent_a_second_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    monkeypatch.setattr(storage, "HEDGE_SECONDS", 0.2)
    monkeypatch.setattr(storage, "TIMEOUT_SECONDS", 20.0)
    server.faults = [hang]
    assert read(f"{server.url}/a.tar", 5, 9) == CONTENT[5:9]
    assert server.methods == ["GET"] * 2


def test_a_second_request_that_fails_does_not_end_the_first(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def late(handler: Handler, content: bytes) -> None:
        failed.wait()
        handler.answer(*handler.cut(content))

    def fail(handler: Handler, content: bytes) -> None:
        handler.answer(503, b"")
        threading.Timer(0.3, failed.set).start()

    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    monkeypatch.setattr(storage, "HEDGE_SECONDS", 0.1)
    server.faults = [late, fail]
    assert read(f"{server.url}/a.tar", 5, 9) == CONTENT[5:9]


def test_where_reads_are_slow_the_second_request_waits(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(handler: Handler, content: bytes) -> None:
        handler.server.closing.wait(0.3)
        handler.answer(*handler.cut(content))

    url = f"{server.url}/a.tar"
    monkeypatch.setattr(storage, "HEDGE_SECONDS", 0.05)
    monkeypatch.setattr(storage, "_seconds", deque([15.0] * 64))  # reads of the past
    server.faults = [late]
    assert read(url, 5, 9) == CONTENT[5:9]
    assert server.methods == ["GET"]


def test_retries_leave_the_seeded_generator_alone(server: Server) -> None:
    state = random.getstate()
    server.faults = [status(503)]
    read(f"{server.url}/a.tar", 5, 9)
    assert random.getstate() == state


def _read_in_child(urls: list[str], pipe: Connection) -> None:
    pipe.send([read(url, 10, 20) for url in urls])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_can_read_what_its_parent_has_read(server: Server, s3: Any, tmp_path: Path) -> None:
    urls = [where(kind, server, tmp_path) for kind in ("local", "http", "s3")]
    before = [read(url, 10, 20) for url in urls]
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=_read_in_child, args=(urls, theirs))
    child.start()
    theirs.close()
    assert ours.recv() == before == [CONTENT[10:20]] * 3
    child.join()


def test_threads_read_the_right_files_and_leave_none_open(tmp_path: Path) -> None:
    paths = [f"{tmp_path}/{number}" for number in range(40)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(bytes([number]) * 64)
    numbers = [random.Random(0).randrange(40) for _ in range(5000)]
    before = os.listdir("/proc/self/fd")
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda number: read(paths[number], 3, 4)[0], numbers)) == numbers
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_a_disk_that_fails_for_a_moment_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, faults = tmp_path / "a", os.pread, [errno.EIO, errno.ESTALE]
    path.write_bytes(CONTENT)

    def pread(*arguments: int) -> bytes:
        if faults:
            raise OSError(faults.pop(), "for a moment")
        return real(*arguments)

    monkeypatch.setattr(os, "pread", pread)
    assert read(str(path), 3, 8) == CONTENT[3:8]
    faults += [errno.EIO] * storage.ATTEMPTS
    with pytest.raises(StorageError, match=r"a, bytes 3 to 8: tried 6 times: for a moment"):
        read(str(path), 3, 8)
    faults += [errno.EISDIR]
    with pytest.raises(StorageError, match="tried 1 time"):
        read(str(path), 3, 8)


@pytest.mark.parametrize(
    ("protocol", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gs"), ("http", "aiohttp", "http")]
)
def test_a_missing_package_is_named_with_its_extra(
    protocol: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(_registry, protocol, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"missing: pip install 'megabatch\[{extra}\]'") as raised:
        read(f"{protocol}://nowhere/a.tar", 0, 1)
    assert raised.value.name == package


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(StorageError, match=r"abc://x/a\.tar.*tried 1 time: Protocol not known: abc"):
        read("abc://x/a.tar", 0, 1)


@pytest.mark.parametrize("kind", ["local", "http", "s3"])
def test_the_tag_changes_with_the_file(kind: str, server: Server, s3: Any, tmp_path: Path) -> None:
    url = where(kind, server, tmp_path)
    size, tag = size_and_tag(url)
    expand("s3://data/*.tar")  # what was listed is not remembered
    assert size == 5000
    assert size_and_tag(url) == (size, tag)
    server.files["/a.tar"] = CONTENT[::-1]
    os.utime(tmp_path / "a.tar", ns=(0, 1))
    s3.put_object(Bucket="data", Key="a.tar", Body=CONTENT[::-1])
    assert size_and_tag(url) != (size, tag)
    s3.put_object(Bucket="data", Key="a.tar", Body=CONTENT)


def test_a_fault_while_asking_for_the_size_is_retried(server: Server) -> None:
    server.faults = [status(503), status(503)]  # a HEAD, then a GET
    assert size_and_tag(f"{server.url}/a.tar")[0] == 5000


def test_what_is_read_whole_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    monkeypatch.setattr(storage, "LARGEST", 4999)
    with pytest.raises(ValueError, match="a: must have at most 4999 bytes, has 5000"):
        read_all(f"{tmp_path}/a")


def test_a_hub_is_asked_for_the_range_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's file system opens files, which would read ahead."""
    monkeypatch.setitem(conf, "hf", {"endpoint": server.url})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    tree = [{"type": "file", "path": f"{number:02}.tar", "size": 5000, "oid": f"{number}"} for number in range(20)]
    revision = json.dumps({"_id": "1", "id": "me/set", "sha": "0" * 40, "siblings": []}).encode()
    server.files["/api/datasets/me/set/revision/main"] = server.files["/api/datasets/me/set"] = revision
    server.files["/api/datasets/me/set/tree/main"] = json.dumps(tree).encode()
    server.files |= {f"/datasets/me/set/resolve/main/{number:02}.tar": CONTENT for number in range(20)}
    assert read("hf://datasets/me/set/03.tar", 10, 20) == CONTENT[10:20]
    asked = len(server.ranges)
    assert read("hf://datasets/me/set/04.tar", 20, 30) == CONTENT[20:30]
    assert server.ranges[asked:] == ["bytes=20-29"]
    shards = expand("hf://datasets/me/set/{00..19}.tar")
    assert [(shard.size, shard.tag) for shard in shards] == [(5000, f"{number}") for number in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    for number in range(20):
        (tmp_path / f"folder/{number:02}.tar").write_bytes(CONTENT[: 100 + number])
    (tmp_path / "folder/00.json").write_text("{}")
    return tmp_path / "folder"


PATTERNS = {
    "{}/{{00..19}}.tar": 20,
    "{}/{{03,07}}.tar": 2,
    "{}/0{{1..2}}.*ar": 2,
    "{}/*.tar": 20,
    "{}/0?.tar": 10,
    "{}": 20,
    "{}/": 20,
    "{0}/01.tar::{0}/1*.tar": 11,
    "{}/01.tar": 1,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["local", "file", "s3"])
def test_patterns_name_the_same_shards_everywhere(pattern: str, kind: str, folder: Path, s3: Any) -> None:
    base = {"local": f"{folder}", "file": f"file://{folder}", "s3": "s3://data/folder"}[kind]
    shards = expand(pattern.format(base))
    names = [os.path.basename(shard.url) for shard in shards]
    assert len(shards) == PATTERNS[pattern]
    assert names == sorted(names)
    for shard in shards:
        assert shard.weight == 1.0
        assert (shard.size, shard.tag) == size_and_tag(shard.url)
        assert read_all(shard.url) == CONTENT[: 100 + int(os.path.basename(shard.url)[:2])]


def test_a_remote_folder_is_listed_and_its_shards_are_not_asked_for(s3: Any, caplog: pytest.LogCaptureFixture) -> None:
    for pattern, count in {
        "s3://data/folder/{00..19}.tar": 20,
        "s3://data/folder/": 20,
        "s3://data/folder/0*.tar": 10,
    }.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "werkzeug"):
            assert len(expand(pattern)) == count
        requests = [record.getMessage() for record in caplog.records if record.name == "werkzeug"]
        assert any("list-type=2" in request for request in requests)
        assert not any(".tar" in request for request in requests)


def test_shards_of_a_web_folder_are_its_links(server: Server) -> None:
    server.files |= {f"/shards/{number}.tar": CONTENT[:number] for number in (3, 1, 2)}
    page = "".join(f'<a href="{number}.tar">{number}</a> <a href="{number}.json">x</a>' for number in (3, 1, 2))
    server.files["/shards/"] = server.files["/shards"] = page.encode()
    for pattern in (f"{server.url}/shards/", f"{server.url}/shards/*.tar"):
        shards = expand(pattern)
        assert [(shard.url, shard.size) for shard in shards] == [(f"{server.url}/shards/{n}.tar", n) for n in (1, 2, 3)]


@pytest.mark.parametrize("path", ["/a.tar?signature=abc", "/download?id=3"])
def test_a_web_address_is_no_glob_and_no_folder(path: str, server: Server) -> None:
    server.files["/download"] = CONTENT
    url = f"{server.url}{path}"
    assert [(shard.url, shard.size) for shard in expand(url)] == [(url, 5000)]
    assert server.methods == ["HEAD"]
    assert read(url, 5, 9) == CONTENT[5:9]


def test_brackets_are_names(tmp_path: Path) -> None:
    (tmp_path / "[a]").mkdir()
    (tmp_path / "[a]/x.tar").write_bytes(b"12")
    assert [shard.size for shard in expand(f"{tmp_path}/[a]/*.tar")] == [2]


def test_a_list_has_one_source_per_line(folder: Path, s3: Any, tmp_path: Path) -> None:
    text = f"{folder}/01.tar\n\n  {folder}/{{02..03}}.tar  \npipe:aws s3 cp s3://data/folder/04.tar -\ns3://data/folder/1*.tar\n"
    (tmp_path / "list.txt").write_text(text)
    (tmp_path / "other").write_text(text)
    s3.put_object(Bucket="data", Key="list.txt", Body=text.encode())
    for what in (f"{tmp_path}/list.txt", f"@{tmp_path}/list.txt", f"@{tmp_path}/other", "s3://data/list.txt"):
        shards = expand(f"{what}::s3://data/a.tar", factors="2::3")
        assert [shard.size for shard in shards] == [101, 102, 103, 104, *range(110, 120), 5000]
        assert [shard.weight for shard in shards] == [2.0] * 14 + [3.0]


@pytest.mark.parametrize(
    "command",
    [
        "aws s3 cp {} -",
        "aws s3 cp --quiet {} - || true",
        " aws s3 cp '{}' -",
        "gsutil cat {}",
        "gsutil -q cat {} || true",
        "curl -f -s -L {}",
        "curl -fsSL --retry 5 {} || true",
        "curl {}",
    ],
)
def test_pipes_that_print_a_file_are_read_directly(command: str, server: Server) -> None:
    server.files |= {f"/{number}.tar": CONTENT[:number] for number in (1, 2)}
    shards = expand("pipe:" + command.format(server.url + "/{1..2}.tar"))
    assert [(shard.url, shard.size) for shard in shards] == [(f"{server.url}/{n}.tar", n) for n in (1, 2)]


@pytest.mark.parametrize(
    "command",
    [
        "cat {}",
        "aws s3 cp {} - | gunzip",
        "aws s3 cp --profile other {} -",
        "curl -H 'Authorization: x' {}",
        "curl {} {}",
        "curl '{}",
        "curl",
        "curl {} ; rm -rf x",
        "aws s3 cp {} x.tar",
    ],
)
def test_other_pipes_are_refused(command: str) -> None:
    with pytest.raises(ValueError, match=r"must be `pipe:aws s3 cp URL -`.* it is not run\. Write the URL itself"):
        expand("pipe:" + command.format("s3://data/a.tar", "s3://data/b.tar"))


def test_missing_shards_are_counted_and_the_first_is_named(folder: Path, server: Server, s3: Any) -> None:
    for base in (f"{folder}", "s3://data/folder"):
        with pytest.raises(ValueError, match=rf"{base}/20\.tar: must be a file, but 3 of 23 shards are not"):
            expand(base + "/{00..22}.tar")
        with pytest.raises(ValueError, match=rf"{base}/20\.tar: must be a file, but 2 of 3 shards are not"):
            expand(base + "/{19..21}.tar")
    with pytest.raises(ValueError, match=r"s3://nowhere/00\.tar: must be a file, but 20 of 20 shards are not"):
        expand("s3://nowhere/{00..19}.tar")
    with pytest.raises(ValueError, match=r"/1\.tar: must be a file, but 2 of 2 shards are not"):
        expand(f"{server.url}/{{1..2}}.tar")


def test_unreadable_is_not_missing(server: Server) -> None:
    server.faults = [status(403)] * 4
    with pytest.raises(StorageError, match=r"a\.tar: tried 1 time: 403"):
        expand(f"{server.url}/a.tar")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_manifest_has_sources_and_weights(suffix: str, folder: Path, tmp_path: Path) -> None:
    sources = [
        {"name": "a", "shards": f"{folder}/{{00..01}}.tar", "samples": 200, "sampling_weight": 2.5},
        {"name": "b", "shards": [f"{folder}/02.tar", f"{folder}/03.tar"], "samples": 50, "sampling_weight": 1},
    ]
    path = tmp_path / f"mix.{suffix}"
    path.write_text(json.dumps({"version": 1, "sources": sources}))  # JSON is YAML
    assert [shard.weight for shard in expand(str(path))] == [2.5, 2.5, 1, 1]
    assert [shard.size for shard in expand(str(path))] == [100, 101, 102, 103]
    assert [shard.weight for shard in expand(str(path), factors="1::4")] == [1, 1, 4, 4]
    for source, fraction in zip(sources, (0.8, 0.2), strict=True):
        source["mixture_fraction"] = fraction
    path.write_text(json.dumps({"version": 1, "weight_mode": "mixture_fraction", "sources": sources}))
    assert [shard.weight for shard in expand(str(path))] == [0.8 / 200] * 2 + [0.2 / 50] * 2


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"sources": []}',
        '{"version": 2, "sources": []}',
        '{"version": 1, "sources": [{}]}',
        '{"version": 1, "sources": [{"shards": 3}]}',
        '{"version": 1, "sources": [{"shards": [3]}]}',
        '{"version": 1, "sources": [], "weight_mode": "x"}',
        '{"version": 1, "sources": [{"shards": "x", "sampling_weight": "much"}]}',
    ],
)
def test_what_is_no_manifest_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mix.json").write_text(text)
    with pytest.raises(ValueError, match=r"mix\.json: must be a manifest \{version: 1"):
        expand(f"{tmp_path}/mix.json")


def test_bad_patterns_name_the_remedy(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "a.tar").mkdir()
    (tmp_path / "b.tar.gz").touch()
    for what, factors, message in [
        ("simplecache::s3://b/a.tar", None, r"must not be a chain.* Write s3://b/a\.tar without a cache"),
        ("filecache://x::s3://b/a.tar", None, "must not be a chain"),
        (f"{folder}/0{{0..1.tar", None, "closing brace"),
        (f"{folder}/{{0..1000000}}.tar", None, "must be at most 1000000 shards"),
        (f"{folder}/00.tar::", None, "a source before and after each ::"),
        (f"{tmp_path}/empty", None, r"empty/\*\.tar: must match at least one tar that is not compressed"),
        (f"{folder}/x*.tar", None, "must match at least one tar"),
        (f"{tmp_path}/empty.txt", None, "must name at least one shard, names none"),
        (f"{tmp_path}/*.tar", None, r"a\.tar: must be a file of a known size, is something else"),
        (f"{tmp_path}/*.gz", None, r"must not be compressed: .* Convert it: gzip -dk b\.tar\.gz"),
        (f"{folder}/00.tar::{folder}/01.tar", "1", "must have one number per source, got 1 for 2"),
        (f"{folder}/00.tar", "many", "must be numbers, such as 1::2, got 'many'"),
    ]:
        with pytest.raises((ValueError, StorageError), match=message):
            expand(what, factors=factors)
    for name, command in {
        "a.tar.gz": "gzip -dk a.tar.gz",
        "a b.tgz": "gzip -dk 'a b.tgz'",
        "a.tar.zst": "zstd -d a.tar.zst",
        "a.tar.bz2": "bzip2 -dk a.tar.bz2",
        "a.tar.xz": "xz -dk a.tar.xz",
    }.items():
        with pytest.raises(ValueError, match=rf"must not be compressed: .* Convert it: {command}$"):
            expand(f"s3://data/{name}")
