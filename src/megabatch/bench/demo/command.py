"""`megabatch bench demo`: three acts, each a claim of the library that this machine can check."""

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import report
from . import growing

DESCRIPTION = """\
Three acts, everything real and nothing downloaded:
1. the dense loss against megabatch at growing batch sizes under a memory limit, until the dense one is killed;
2. towers trained three times, with the dense loss, with megabatch, and on two ranks: the same curve, and it learns;
3. the same trainer takes one step at batch 65,536 under the memory limit.

Prints tables as it goes and draws a plot (act 1) and a picture of retrieved icons (act 2). The exit code is not 0 if
loss curves differ, if nothing was learned, or if the large step does not fit.
"""

TITLES = {
    1: "The batch grows, the memory does not",
    2: "One run three times, and it learns",
    3: "A step at batch {batch:,}",
}
QUICK_LIMIT = 512  # MiB, of which the towers' optimizer and the icons need most
# What acts 2 and 3 cannot do without, by the name it is imported by.
OF_TRAINING = ("PIL", "yaml", "rich", "braceexpand", "qtawesome")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--acts", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], metavar="ACT")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=growing.DOUBLINGS, metavar="N", help="batch sizes of act 1, growing"
    )
    parser.add_argument("--width", type=int, default=256, metavar="D", help="width of the features of act 1")
    parser.add_argument(
        "--limit", type=int, default=2048, metavar="MIB", help="memory limit of each process of acts 1 and 3, in MiB"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo.png"),
        metavar="PATH",
        help="the plot, beside which the picture goes, or a folder for both",
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: everything small")


def main(options: argparse.Namespace) -> int:
    plot = options.out if options.out.suffix else options.out / "demo.png"
    plot.parent.mkdir(parents=True, exist_ok=True)
    print(report.describe(report.machine()))
    begin = time.perf_counter()
    with _leaving_when_asked(), tempfile.TemporaryDirectory(prefix="megabatch-demo-") as folder:
        passed = [_play(act, options, plot, Path(folder)) for act in sorted(set(options.acts))]
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    return 0 if all(passed) else 1


def _play(act: int, options: argparse.Namespace, plot: Path, folder: Path) -> bool:
    """Whether what it claims is true here."""
    if act == 1:
        _heading(act)
        sizes, width, limit = options.rows, options.width, options.limit
        if options.quick:
            sizes, width, limit = [256, 1024, 4096], 64, 128
        growing.grow(sizes, width, limit, plot)
        return True
    missing = [module for module in OF_TRAINING if importlib.util.find_spec(module) is None]
    if missing:
        print(f"\nAct {act} cannot be played: {', '.join(missing)} not installed: pip install 'megabatch[train]'")
        return False
    from . import big_step, learning

    if act == 2:
        _heading(act)
        plan = learning.QUICK if options.quick else learning.FULL
        return learning.learn(plan, folder / "learning", plot.with_name(f"{plot.stem}-icons.png"))
    step = big_step.QUICK if options.quick else big_step.FULL
    _heading(act, batch=step.batch)
    return big_step.take_a_big_step(step, QUICK_LIMIT if options.quick else options.limit, folder / "big-step" / "run")


@contextmanager
def _leaving_when_asked() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: what it has started ends with it, and its folder goes."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _heading(act: int, **figures: int) -> None:
    title = f"Act {act}: {TITLES[act].format(**figures)}"
    print(f"\n{title}\n{'=' * len(title)}\n", flush=True)
