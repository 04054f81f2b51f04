"""`megabatch index`."""

import argparse
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from .data.index import make
from .data.listing import expand
from .flags import usage_errors

DESCRIPTION = """\
Makes the index of tar shards, which training needs and otherwise makes itself: where every 64th sample starts.
    megabatch index 's3://bucket/laion/{00000..41407}.tar'
It reads each shard through, once, and goes on where it was stopped. Shards that changed are read again. The index is a
folder, megabatch.index, beside the shards or, where it cannot be, in ~/.cache/megabatch.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="tar shards, as --train-data names them")
    parser.add_argument("--skip-bad-shards", action="store_true", help="go on without shards that cannot be read")


def main(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    bar = Progress("shards", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True)
    with usage_errors("index"), bar:
        task = bar.add_task("shards", total=None)
        index = make(
            expand(options.data, skip_missing=options.skip_bad_shards),
            skip_bad=options.skip_bad_shards,
            told=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seconds = time.perf_counter() - started
    print(f"{int(index.samples.sum()):,} samples in {len(index.samples):,} shards, {seconds:.1f} s")
    for folder in dict.fromkeys(file.parent for file in index.files):
        print(folder)
    return 0
