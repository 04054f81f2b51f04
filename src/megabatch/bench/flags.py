"""The flags that benchmarks share: one word has one meaning in all of them."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .cases import DTYPES

_SIZES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def positive(text: str) -> int:
    """An argument type: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def memory(text: str) -> int:
    digits = text.rstrip("KMGiB")
    unit = text[len(digits) :]
    if unit not in _SIZES or not digits.replace(".", "", 1).isdigit() or float(digits) <= 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB or 2GiB, got {text!r}")
    return int(float(digits) * _SIZES[unit])


def device(text: str) -> str:
    try:
        kind = torch.device(text).type
    except RuntimeError:
        kind = ""
    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not has.get(kind):
        here = ", ".join(name for name, there in has.items() if there)
        raise argparse.ArgumentTypeError(f"must be one that torch sees, got {text!r}. Available here: {here}")
    return text


def png(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return Path(text)


def add_rows(parser: argparse.ArgumentParser, rows: Sequence[int], chunk: int | None = None) -> None:
    words = "rows of the batch, on all ranks together"
    parser.add_argument("--rows", type=positive, nargs="+", default=list(rows), metavar="N", help=words)
    if chunk is not None:
        parser.add_argument("--chunk", type=positive, default=chunk, metavar="C", help="rows encoded at a time")


def add_sizes(parser: argparse.ArgumentParser, rows: Sequence[int], width: int = 512) -> None:
    add_rows(parser, rows)
    parser.add_argument("--width", type=positive, nargs="+", default=[width], metavar="D", help="width of the features")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="dtype of the features")


def add_rounds(parser: argparse.ArgumentParser, contenders: Iterable[str], default: Sequence[str] = ()) -> None:
    """Which contenders, and for how long."""
    names, words = list(contenders), "contenders: see megabatch bench list"
    chosen = list(default or names)
    parser.add_argument("--contenders", nargs="+", choices=names, default=chosen, metavar="NAME", help=words)
    words = "number of rounds, at least; 0: memory only"
    parser.add_argument("--repeats", type=count, default=7, metavar="N", help=words)
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="measure for at least this long")
    words = "tiny sizes, to test that it runs; the figures mean nothing"
    parser.add_argument("--quick", action="store_true", help=words)


def add_contest(parser: argparse.ArgumentParser, contenders: Iterable[str], default: Sequence[str] = ()) -> None:
    """The same, on which device, and in how much memory."""
    add_rounds(parser, contenders, default)
    add_device(parser)
    words = "memory limit of a process, such as 2GiB (default: what is available)"
    parser.add_argument("--limit", type=memory, metavar="SIZE", help=words)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=device, default="cpu", help="device: cpu, cuda, cuda:1, …")


def add_files(parser: argparse.ArgumentParser, plots: bool = True) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured to this file")
    words = "write the same as CSV, one line per contender and case"
    parser.add_argument("--csv", type=Path, metavar="PATH", help=words)
    if plots:
        parser.add_argument("--plot", type=png, metavar="PATH", help="plot time and memory against rows")


def shrink(options: argparse.Namespace, **tiny: Any) -> None:
    """What --quick makes of the flags."""
    if options.quick:
        vars(options).update({"repeats": 2, "seconds": 0.0, **tiny})
