"""`megabatch bench data`: samples per second of a data worker, beside WebDataset's pipeline."""

import argparse
import functools
import http.server
import io
import itertools
import os
import re
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from . import flags, measure, report
from .processes import runner
from .results import Row, over, row_of
from .session import Session

DESCRIPTION = """\
Reads, decodes and crops JPEGs of tar shards in one worker, as training does, and with WebDataset's pipeline (a shuffle
buffer of 5,000, a DataLoader of one worker) around the same decoding and transforms. From the disk, and from a web
server on this machine whose every answer takes --latency. Both are warm: a round takes --samples from pipelines that
have been running. Needs megabatch[train], and webdataset for the comparison.
"""
IMAGE, SIZE = 256, 224  # pixels: of the files, and after the crop
CROP_SCALE = 0.9
TITLES = {"megabatch": "megabatch", "webdataset": "webdataset"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_rows(parser, [256])
    parser.add_argument("--samples", type=flags.positive, default=2048, metavar="N", help="samples of a round")
    parser.add_argument("--shards", type=flags.positive, default=8, metavar="N", help="tar shards")
    parser.add_argument("--per-shard", type=flags.positive, default=1024, metavar="N", help="samples of a shard")
    parser.add_argument(
        "--latency", type=float, default=20.0, metavar="MS", help="of each answer of the web server, in milliseconds"
    )
    parser.add_argument("--places", nargs="+", choices=("disk", "http"), default=["disk", "http"], help="where from")
    flags.add_contest(parser, list(TITLES))
    flags.add_files(parser, plots=False)


def main(options: argparse.Namespace) -> int:
    flags.shrink(options, rows=[32], samples=128, shards=2, per_shard=128, latency=1.0)
    with runner("cpu") as where, tempfile.TemporaryDirectory(prefix="megabatch-") as name:
        folder = Path(name)
        for number in range(options.shards):
            write_shard(folder / f"{number:05}.tar", options.per_shard, number)
        cases = list(itertools.product(options.places, options.rows))
        with Session("data", options, where, len(cases), ["webdataset", "pillow"]) as session:
            for place, rows_of_batch in cases:
                with ExitStack() as stack:
                    base = str(folder) if place == "disk" else stack.enter_context(serving(folder, options.latency))
                    rows = contest(
                        f"{base}/{{00000..{options.shards - 1:05}}}.tar", rows_of_batch, options, where.world
                    )
                body = [
                    (
                        row.title,
                        f"{options.samples / row.median:.0f}" if row.median else "-",
                        str(over(row, row_of(rows, "webdataset")) or "-"),
                        report.remark(row.status, row.note),
                    )
                    for row in rows
                ]
                about = "from the disk" if place == "disk" else f"over HTTP, {options.latency:g} ms for each answer"
                session.show(f"N={rows_of_batch}, {about}", ("", "samples/s", "time / webdataset's", ""), body)
                case = {"place": place, "rows": rows_of_batch, "samples": options.samples}
                case |= {"latency_ms": options.latency} if place == "http" else {}
                session.add(case, (row.record() for row in rows))
                session.reached()
        return session.exit_code


def contest(what: str, batch: int, options: argparse.Namespace, world: Any) -> list[Row]:
    rows = [Row(name, TITLES[name]) for name in options.contenders]
    steps: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for row in rows:
            if row.name == "webdataset" and find_spec("webdataset") is None:
                row.status = "not installed"
                continue
            make = {"megabatch": megabatch_samples, "webdataset": webdataset_samples}[row.name]
            samples = stack.enter_context(make(what, batch))
            next(samples)
            steps[row.name] = functools.partial(take, samples, options.samples)
        runs = measure.rounds(world, steps, set(steps), options.repeats, options.seconds)
    for row in rows:
        row.seconds = [seconds for seconds, _ in runs.get(row.name, [])]
    return rows


def take(batches: Iterator[int], samples: int) -> None:
    while samples > 0:
        samples -= next(batches)


# ---- the contenders


def tokenize(texts: Sequence[str]) -> Tensor:
    return torch.tensor([list(text.encode()[:32].ljust(32, b"\0")) for text in texts])


@contextmanager
def megabatch_samples(what: str, batch: int) -> Iterator[Iterator[int]]:
    """The size of each batch."""
    from ..train.data import open_source
    from ..train.data.loader import Requests, batches
    from ..train.data.order import Order

    source = open_source(what)
    order = Order(source.counts, seed=0, batch_size=batch, block=source.block)
    loaded = batches(source, _prepare(), Requests(order), workers=1)
    try:
        yield (len(each.ids) for each in loaded)
    finally:
        loaded.close()


@contextmanager
def webdataset_samples(what: str, batch: int) -> Iterator[Iterator[int]]:
    import webdataset  # type: ignore[import-untyped]
    from braceexpand import braceexpand

    urls = list(braceexpand(what if "://" not in what else f"pipe:curl -s -f {what}"))
    pipeline = webdataset.WebDataset(urls, shardshuffle=len(urls), resampled=False, empty_check=False).repeat()
    pipeline = pipeline.shuffle(5000, initial=1000).map(_prepared).batched(batch, collation_fn=_joined)
    loaded = iter(torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=1, prefetch_factor=2))
    yield (len(texts) for _, texts in loaded)


@functools.cache
def _prepare() -> Any:
    from ..train.data.prepare import Prepare
    from ..train.preprocessing import Preprocessing

    preprocessing = Preprocessing(SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    return Prepare(tokenize, preprocessing, CROP_SCALE, 0, "caption", train=True)


def _prepared(sample: dict[str, Any]) -> tuple[Tensor, str]:
    """The same decoding and crop as ours."""
    from ..train.data.images import decode

    random = Random(sample["__key__"])
    image = decode(sample["jpg"])
    pixels = _prepare().preprocessing(image, rgb_first=True, crop_scale=CROP_SCALE, random=random)
    return pixels, sample["txt"].decode()


def _joined(samples: Sequence[tuple[Tensor, str]]) -> tuple[Tensor, Tensor]:
    images, texts = zip(*samples, strict=True)
    return torch.stack(images), tokenize(texts)


# ---- the data


def write_shard(path: Path, samples: int, number: int) -> None:
    """Photographs, as far as JPEG is concerned: smooth colours with some noise, 25 KB each."""
    from PIL import Image

    with tarfile.open(path, "w") as tar:
        for index in range(samples):
            generator = torch.Generator().manual_seed(number * samples + index)
            coarse = torch.rand(1, 3, 8, 8, generator=generator)
            smooth = torch.nn.functional.interpolate(coarse, IMAGE, mode="bicubic")[0]
            noisy = smooth + 0.06 * torch.randn(3, IMAGE, IMAGE, generator=generator)
            pixels = (noisy.clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 0).numpy()
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=85)
            for suffix, data in (("jpg", file.getvalue()), ("txt", f"picture {index} of {number}".encode())):
                member = tarfile.TarInfo(f"{index:06}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@contextmanager
def serving(folder: Path, latency: float) -> Iterator[str]:
    """The address of a server that knows ranges, and waits so many milliseconds before each answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            time.sleep(latency / 1000)
            path = folder / os.path.basename(self.path)
            if not path.exists():
                self.send_error(404)
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, stop = (int(asked[1]), min(int(asked[2] or size - 1) + 1, size)) if asked else (0, size)
            self.send_response(206 if asked else 200)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(stop - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()
            if body:
                with path.open("rb") as file:
                    file.seek(start)
                    self.wfile.write(file.read(stop - start))

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Of a client that hung up."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
