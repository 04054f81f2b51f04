"""`megabatch bench data`: samples per second of a data worker, beside WebDataset's pipeline."""

import argparse
import asyncio
import functools
import io
import itertools
import os
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ..distributed.world import World
from . import flags, measure
from .cases import Step
from .contenders import Contender, NotInstalled, package
from .processes import runner
from .results import Row, over, row_of, table
from .session import Session

DESCRIPTION = """\
Reads, decodes and crops JPEGs of tar shards in one worker, as training does, and with WebDataset's pipeline (a shuffle
buffer of 5,000, a DataLoader of one worker) around the same decoding and transforms. From the disk, and by HTTP and S3
from a server on this machine whose every answer takes --latency; WebDataset reads both with curl. Both are warm: a
round takes --batches from pipelines that have been running. Needs megabatch[train,http,s3], and webdataset for the
comparison.
"""
IMAGE, SIZE = 256, 224  # pixels: of the files, and after the crop
CROP_SCALE = 0.9
PLACES = {"disk": "from the disk", "http": "by HTTP", "s3": "by S3"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_rows(parser, [256])
    parser.add_argument("--batches", type=flags.positive, default=8, metavar="N", help="batches of a round")
    parser.add_argument("--shards", type=flags.positive, default=8, metavar="N", help="tar shards")
    parser.add_argument("--per-shard", type=flags.positive, default=1024, metavar="N", help="samples of a shard")
    parser.add_argument("--latency", type=float, default=20.0, metavar="MS", help="of each answer, in milliseconds")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=[*PLACES], help="where from")
    flags.add_rounds(parser, list(CONTENDERS))
    flags.add_files(parser, plots=False)


def main(options: argparse.Namespace) -> int:
    flags.shrink(options, rows=[32], batches=4, shards=2, per_shard=128, latency=1.0)
    with (
        runner("cpu") as where,
        tempfile.TemporaryDirectory(prefix="megabatch-") as folder,
        nullcontext("") if options.places == ["disk"] else serving(Path(folder), options.latency) as address,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}),  # for the index of what is remote
    ):
        for number in range(options.shards):
            write_shard(Path(folder, f"{number:05}.tar"), options.per_shard, number)
        bases = {"disk": folder, "http": address, "s3": "s3://bucket"}
        cases = list(itertools.product(options.places, options.rows))
        with Session("data", options, where, len(cases), ["webdataset", "pillow"]) as session:
            for place, rows in cases:
                samples, latency = rows * options.batches, 0 if place == "disk" else options.latency
                found = contest(f"{bases[place]}/{{00000..{options.shards - 1:05}}}.tar", rows, options, where.world)
                speed = {"samples/s": lambda row, n=samples: f"{n / row.median:.0f}" if row.median else "-"}
                about = f"N={rows}, {PLACES[place]}, {latency:g} ms for each answer"
                session.show(about, *table(found, {"/ webdataset": "webdataset"}, speed))
                case = {"place": place, "rows": rows, "samples": samples, "latency_ms": latency}
                base = row_of(found, "webdataset")
                session.add(case, (row.record(over_webdataset=over(row, base)) for row in found))
                session.reached()
        return session.exit_code


def contest(what: str, batch: int, options: argparse.Namespace, world: World) -> list[Row]:
    rows = [Row(name, CONTENDERS[name].title) for name in options.contenders]
    steps: dict[str, Step] = {}
    with ExitStack() as stack:
        for row in rows:
            row.status = "not installed"
            with suppress(NotInstalled):
                steps[row.name] = CONTENDERS[row.name].make(Loading(what, batch, options.batches, stack))
                row.status = "ok"
        runs = measure.rounds(world, steps, options.repeats, options.seconds)
    for row in rows:
        row.seconds = [seconds for seconds, _ in runs.get(row.name, [])]
    return rows


# ---- the contenders


class Loading(NamedTuple):
    """What is read, in batches of how many samples, how many batches a step takes, and what ends when all is over."""

    what: str
    batch: int
    batches: int
    stack: ExitStack

    def step(self, batches: Iterator[Any]) -> Step:
        next(batches)  # the first is here before anything is timed

        def step() -> None:
            for _ in range(self.batches):
                next(batches)

        return step


def ours(work: Loading) -> Step:
    from ..train.data import open_source
    from ..train.data.loader import Requests, batches
    from ..train.data.order import Order

    source = open_source(work.what)
    order = Order(source.counts, seed=0, batch_size=work.batch, block=source.block)
    return work.step(work.stack.enter_context(closing(batches(source, _prepare(), Requests(order), workers=1))))


def webdataset(work: Loading) -> Step:
    module = package("webdataset")
    from braceexpand import braceexpand

    what = work.what.replace("s3://", f"{os.environ.get('AWS_ENDPOINT_URL_S3')}/")  # there anybody can read its objects
    urls = list(braceexpand(what if "://" not in what else f"pipe:curl -s -f {what}"))
    pipeline = module.WebDataset(urls, shardshuffle=len(urls), resampled=False, empty_check=False).repeat()
    pipeline = pipeline.shuffle(5000, initial=1000).map(_prepared).batched(work.batch, collation_fn=_joined)
    return work.step(iter(torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=1, prefetch_factor=2)))


CONTENDERS = {
    "megabatch": Contender("megabatch", "megabatch", ours, losses=(), ours=True),
    "webdataset": Contender("webdataset", "webdataset", webdataset, losses=(), package="webdataset"),
}


def tokenize(texts: Sequence[str]) -> Tensor:
    return torch.tensor([list(text.encode()[:32].ljust(32, b"\0")) for text in texts])


@functools.cache
def _prepare() -> Any:
    from ..train.data.prepare import Prepare
    from ..train.preprocessing import Preprocessing

    preprocessing = Preprocessing(SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
    return Prepare(tokenize, preprocessing, CROP_SCALE, 0, "caption", train=True)


def _prepared(sample: dict[str, Any]) -> tuple[Tensor, str]:
    """The same decoding and crop as ours."""
    from ..train.data.images import decode

    drawn = {"crop_scale": CROP_SCALE, "random": Random(sample["__key__"])}
    return _prepare().preprocessing(decode(sample["jpg"]), rgb_first=True, **drawn), sample["txt"].decode()


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
    """The address of a bucket on a server that waits so many milliseconds before each answer. It answers requests for
    objects, whole or in part, as S3 does; the environment makes it the server of s3://."""
    from aiohttp import web

    @web.middleware
    async def late(request: Any, handler: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(latency / 1000)
        return await handler(request)

    async def start() -> Any:
        application = web.Application(middlewares=[late])
        application.router.add_static("/bucket", folder)
        server = web.AppRunner(application, access_log=None)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        return server

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    address = f"http://127.0.0.1:{server.addresses[0][1]}"
    s3 = {"AWS_ENDPOINT_URL_S3": address, "AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "anything"}
    try:
        with mock.patch.dict(os.environ, s3):
            yield f"{address}/bucket"
    finally:
        asyncio.run_coroutine_threadsafe(server.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
