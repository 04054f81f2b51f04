"""`megabatch plan`: from the flags to a run, and what is predicted for it."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .formulas import DATA, METHODS, OPTIMIZERS, PRECISIONS, Run
from .hardware import GPUS, Gpu
from .models import MODELS
from .prediction import predict, with_largest_chunk
from .report import UNITS, document, report

DESCRIPTION = """\
What batch fits, how long is a step, and what limits it? PREDICTED from formulas: nothing is run or measured.
    megabatch plan --model ViT-L-14 --gpu A800-80 --gpus 8 --batch 1M
One row for every method: ring and gather (megabatch), inf-cl (the code of arXiv 2410.17243), openclip (local_loss,
gather_with_grad) and dense (CLIP's loss on every GPU). Memory is of one GPU. docs/plan.md says how near it comes.
"""
Thing = TypeVar("Thing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=partial(_named, MODELS), required=True, metavar="NAME", help=f"of {', '.join(MODELS)}")
    gpu = f"of {', '.join(GPUS)}; with other figures: A100-80,capacity=40e9,link=50e9"
    add("--gpu", type=_gpu, required=True, metavar="NAME", help=gpu)
    add("--gpus", type=_rows, default=1, metavar="N", help="how many")
    batch = "rows of all GPUs together: 32768, 32k, 1M (k = 1024)"
    add("--batch", "--global-batch-size", type=_rows, required=True, metavar="B", help=batch)
    chunk = "rows that one GPU encodes at a time (default: all of them, or the largest power of two that fits)"
    add("--chunk", "--chunk-size", type=_rows, metavar="C", help=chunk)
    precision = "OpenCLIP's words. fp32: tf32 products; amp: 16-bit products; bf16, fp16, pure_: 16-bit weights too"
    add("--precision", choices=PRECISIONS, default="amp_bf16", help=precision)
    add("--method", nargs="+", choices=METHODS, default=list(METHODS), help="which rows")
    add("--data", choices=DATA, default="host", help="where images wait for their chunk; host: as megabatch train")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="what it keeps of a parameter is counted")
    add("--frozen", choices=("none", "image", "text"), default="none", help="a tower that is not trained")
    add("--json", metavar="PATH", help="write all of it to this file; - for the terminal (default: print a table)")


def _named(known: Mapping[str, Thing], name: str) -> Thing:
    """Whatever the case and the separators."""

    def plain(word: str) -> str:
        return "".join(letter for letter in word.lower() if letter.isalnum())

    names = {plain(one): one for one in known}
    if plain(name) in names:
        return known[names[plain(name)]]
    near = get_close_matches(plain(name), names, n=3, cutoff=0.5)
    meant = f" Perhaps {' or '.join(names[one] for one in near)} is meant." if near else ""
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {name!r}.{meant}")


def _gpu(text: str) -> Gpu:
    """By its name, with the figures that follow in the place of its own."""
    name, *changes = text.split(",")
    gpu = _named(GPUS, name)
    kinds: dict[str, Any] = {member.name: member.type for member in fields(Gpu) if member.name != "name"}
    for change in changes:
        figure, _, value = change.partition("=")
        try:
            number = kinds[figure](value)
        except (KeyError, ValueError):
            number = 0
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"must have figures above 0, of {', '.join(kinds)}, got {change!r}.")
        gpu = replace(gpu, **{figure: number}, name=text)
    return gpu


def _rows(word: str) -> int:
    number = word.rstrip("".join(UNITS))
    unit = word[len(number) :]
    if unit not in ("", *UNITS) or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number such as 4096, 256k or 1M, got {word!r}.")
    return int(number) * UNITS.get(unit, 1)


def main(options: argparse.Namespace) -> int:
    try:
        run = _run(options)
        predictions = [predict(run, method) for method in options.method]
        text = json.dumps(document(run, predictions), indent=1, allow_nan=False)
        if options.json not in (None, "-"):
            Path(options.json).write_text(text + "\n")
    except (ValueError, OSError) as error:
        said = f"--json must be a path that can be written to: {error}" if isinstance(error, OSError) else error
        print(f"megabatch plan: {said}", file=sys.stderr)
        return 2
    print(text if options.json == "-" else report(run, predictions))
    if options.json not in (None, "-"):
        print(f"\nwritten to {options.json}")
    return 0


def _run(options: argparse.Namespace) -> Run:
    """In the largest chunks with which all methods fit that can. Raises ValueError for a mistake, with what to do."""
    if options.batch % options.gpus:
        below = options.batch // options.gpus * options.gpus
        near = f"{below} or {below + options.gpus}" if below else f"{options.gpus}"
        raise ValueError(f"--batch must be a multiple of --gpus, got {options.batch} for {options.gpus}. Use {near}.")
    run = Run(**{member.name: getattr(options, member.name) for member in fields(Run)})
    found = [one for method in options.method if (one := with_largest_chunk(run, method))]
    return run if run.chunk else min(found, key=lambda one: one.chunk_rows, default=run)
