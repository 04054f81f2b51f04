"""`megabatch plan`: from the flags to a run, and what is predicted for it."""

import argparse
import json
import sys
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from .formulas import DATA, METHODS, OPTIMIZERS, WEIGHTS
from .hardware import GIB, GPUS, Gpu
from .models import MODELS, Model
from .prediction import Run, predict
from .report import UNITS, document, report

_METHODS = "\n".join(f"    {name:<10} {what}" for name, what in METHODS.items())
DESCRIPTION = f"""\
What batch fits, how long is a step, and what limits it? PREDICTED from formulas: nothing is run or measured.

    megabatch plan --model ViT-L-14 --gpu A800-80 --gpus 8 --batch 256k --chunk 128

One row for every method:
{_METHODS}

Memory is of one GPU: weights, gradients and optimizer, the data, and the loss or the activations of one chunk with the
features, whichever is more; without --chunk, both. The formulas are in megabatch/plan/formulas.py;
docs/plan.md says how near they come to printed figures.
"""
Thing = TypeVar("Thing")
# What `megabatch train` calls it.
SAME_PRECISION = {"bf16": "amp"}
DIMENSIONS = [member.name for member in fields(Model) if member.type is int]
PCIE = 32e9  # bytes per second of version 4 with 16 lanes
# Flag: the Gpu's field, what one of it is, and what it says.
GPU_FLAGS = {
    "memory": ("capacity", GIB, "GiB of one GPU"),
    "tflops": ("half", 1e12, "Tflop/s of dense bfloat16 products"),
    "tf32-tflops": ("tf32", 1e12, "Tflop/s of dense tf32 products; half of --tflops where no --gpu is named"),
    "bandwidth": ("memory", 1e9, "GB/s of its memory"),
    "link": ("link", 1e9, "GB/s to a GPU of the same node, one direction"),
    "host": ("host", 1e9, "GB/s from the host's memory; default 32 where no --gpu is named"),
    "network": ("network", 1e9, "GB/s to another node for each GPU; as --link where no --gpu is named"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help=f"of {', '.join(MODELS)}; dimensions that are given replace its own"
    )
    parser.add_argument("--gpu", metavar="NAME", help=f"of {', '.join(GPUS)}; figures that are given replace its own")
    parser.add_argument("--gpus", type=_positive, default=1, metavar="N", help="how many (default 1)")
    parser.add_argument(
        "--batch",
        "--global-batch-size",
        type=_batch,
        required=True,
        metavar="B",
        help="rows of all GPUs together: 32768, 32k, 1M (k = 1024)",
    )
    parser.add_argument(
        "--chunk",
        "--chunk-size",
        type=_batch,
        metavar="C",
        help="rows that one GPU encodes at a time; default: all of them at once",
    )
    parser.add_argument(
        "--precision",
        type=lambda word: SAME_PRECISION.get(word, word),
        choices=WEIGHTS,
        default="amp",
        help="amp (default; bf16 of megabatch train): float32 weights, bfloat16 products; bfloat16: all; tf32",
    )
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument(
        "--data",
        choices=DATA,
        default="gpu-float32",
        help="where the images of a step wait for their chunk (default gpu-float32, as in the paper)",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default adamw")
    parser.add_argument(
        "--frozen", choices=("none", "image", "text"), default="none", help="a tower that is not trained"
    )
    parser.add_argument(
        "--memory-budget", type=_mebibytes, metavar="MIB", help="of megabatch's loss; a large one keeps logits"
    )
    parser.add_argument(
        "--json", metavar="PATH", help="write all of it as JSON to this file; - for the terminal, instead of the table"
    )
    dimensions = parser.add_argument_group("dimensions of a model")
    for name in DIMENSIONS:
        dimensions.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="N")
    figures = parser.add_argument_group("figures of a GPU")
    for flag, (_, _, text) in GPU_FLAGS.items():
        figures.add_argument(f"--{flag}", type=_amount, metavar="X", help=text)
    figures.add_argument("--gpus-per-node", type=_positive, metavar="N", help="default 8")


def _positive(word: str) -> int:
    number = int(word) if word.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {word!r}.")
    return number


def _batch(word: str) -> int:
    number = word.rstrip("".join(UNITS))
    unit = word[len(number) :]
    if unit not in ("", *UNITS) or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number such as 4096, 256k or 1M, got {word!r}.")
    return int(number) * UNITS.get(unit, 1)


def _amount(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {word!r}.")
    return number


def _mebibytes(word: str) -> int:
    return _positive(word) * 2**20


class Mistake(Exception):
    """The user's; the text says what to do."""


def main(options: argparse.Namespace) -> int:
    try:
        run = _run(options)
        predictions = [predict(run, method) for method in options.method]
        text = json.dumps(document(run, predictions), indent=1, allow_nan=False)
        if options.json not in (None, "-"):
            _write(Path(options.json), text)
    except (Mistake, ValueError) as error:  # of values: what the library has against a budget
        print(f"megabatch plan: {error}", file=sys.stderr)
        return 2
    print(text if options.json == "-" else report(run, predictions))
    if options.json not in (None, "-"):
        print(f"\nwritten to {options.json}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise Mistake(f"--json must be a path that can be written to, got {path}: {error}") from error


# ---- from the flags to a run


def _run(options: argparse.Namespace) -> Run:
    run = Run(
        model=_model(options),
        gpu=_gpu(options),
        gpus=options.gpus,
        batch=options.batch,
        chunk=options.chunk,
        precision=options.precision,
        data=options.data,
        optimizer=options.optimizer,
        frozen=options.frozen,
        budget=options.memory_budget,
    )
    if run.batch % run.gpus:
        below = run.batch // run.gpus * run.gpus
        near = f"{below} or {below + run.gpus}" if below else f"{run.gpus}"
        raise Mistake(f"--batch must be a multiple of --gpus, got {run.batch} for {run.gpus}. Use {near}.")
    if run.model.patch_size > run.model.image_size:
        raise Mistake(
            f"--patch-size must be at most --image-size, got {run.model.patch_size} and {run.model.image_size}."
        )
    return run


def _model(options: argparse.Namespace) -> Model:
    given = {name: value for name in DIMENSIONS if (value := getattr(options, name)) is not None}
    if options.model is not None:
        model = _named("--model", options.model, MODELS)
        return replace(model, **given, name=f"{model.name} with other dimensions" if given else model.name)
    try:
        return Model("a model of these dimensions", **given)
    except TypeError as error:
        missing = [f"--{name.replace('_', '-')}" for name in _without_default() if name not in given]
        raise Mistake(
            f"--model must be named or all its dimensions given, missing {', '.join(missing)}. "
            f"Models are {', '.join(MODELS)}."
        ) from error


def _without_default() -> list[str]:
    defaults = set(vars(Model))  # of a dataclass: its defaults are attributes of the class
    return [name for name in DIMENSIONS if name not in defaults]


def _gpu(options: argparse.Namespace) -> Gpu:
    flags = {flag: getattr(options, flag.replace("-", "_")) for flag in GPU_FLAGS}
    given: dict[str, Any] = {GPU_FLAGS[flag][0]: value * GPU_FLAGS[flag][1] for flag, value in flags.items() if value}
    if options.gpus_per_node:
        given["per_node"] = options.gpus_per_node
    if options.gpu is not None:
        gpu = _named("--gpu", options.gpu, GPUS)
        return replace(gpu, **given, name=f"{gpu.name} with other figures" if given else gpu.name)
    needed = ["memory", "tflops", "bandwidth", *(["link"] if options.gpus > 1 else [])]
    missing = [f"--{flag}" for flag in needed if not flags[flag]]
    if missing:
        raise Mistake(
            f"--gpu must be named or its figures given, missing {', '.join(missing)}. GPUs are {', '.join(GPUS)}."
        )
    link = given.get("link", PCIE)
    usual = {"tf32": given["half"] / 2, "link": link, "host": PCIE, "network": link}
    return Gpu("a GPU of these figures", **{**usual, **given})


def _named(flag: str, name: str, known: dict[str, Thing]) -> Thing:
    """By its name, whatever the case and the separators, or by a beginning or end of four letters that no other has."""
    plain, wanted = {_plain(one): one for one in known}, _plain(name)
    alike = [one for one in plain if len(wanted) >= 4 and (one.startswith(wanted) or one.endswith(wanted))]
    if wanted in plain or len(alike) == 1:
        return known[plain[wanted if wanted in plain else alike[0]]]
    near = alike or get_close_matches(wanted, plain, n=3, cutoff=0.5)
    meant = f" Perhaps {' or '.join(plain[one] for one in near)} is meant." if near else ""
    raise Mistake(f"{flag} must be one of {', '.join(known)}, got {name!r}.{meant}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
