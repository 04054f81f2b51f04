"""`megabatch plan`: from the flags to a run, and what is predicted for it."""

import argparse
import json
import sys
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from .formulas import DATA, METHODS, OPTIMIZERS, WEIGHTS
from .hardware import GIB, GPUS, Gpu
from .models import MODELS, Model
from .prediction import Run, predict
from .report import UNITS, document, report

DESCRIPTION = """\
What batch fits, how long is a step, and what limits it? PREDICTED from formulas: nothing is run or measured.
    megabatch plan --model ViT-L-14 --gpu A800-80 --gpus 8 --batch 256k --chunk 128
One row for every method: dense (CLIP's loss on every GPU), openclip (local_loss, gather_with_grad), inf-cl (the code of
arXiv 2410.17243), ring and gather (megabatch). Memory is of one GPU. The formulas are in megabatch/plan/formulas.py;
docs/plan.md says how near they come to printed figures.
"""
Thing = TypeVar("Thing")
DIMENSIONS = [member for member in fields(Model) if member.type is int]
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
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"of {', '.join(MODELS)}; dimensions that are given replace its own")
    add("--gpu", metavar="NAME", help=f"of {', '.join(GPUS)}; figures that are given replace its own")
    add("--gpus", type=_positive, default=1, metavar="N", help="how many")
    batch = "rows of all GPUs together: 32768, 32k, 1M (k = 1024)"
    add("--batch", "--global-batch-size", type=_batch, required=True, metavar="B", help=batch)
    chunk = "rows that one GPU encodes at a time (default: all of them at once)"
    add("--chunk", "--chunk-size", type=_batch, metavar="C", help=chunk)
    words = "OpenCLIP's: amp_bf16, amp: float32 weights, bf16/fp16 products; bf16: weights too; fp32: tf32 products"
    add("--precision", choices=WEIGHTS, default="amp_bf16", help=words)
    add("--method", nargs="+", choices=METHODS, default=list(METHODS), help="which rows")
    add("--data", choices=DATA, default="gpu-float32", help="where the images of a step wait for their chunk")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="what it keeps of a parameter is counted")
    add("--frozen", choices=("none", "image", "text"), default="none", help="a tower that is not trained")
    add("--memory-budget", metavar="SIZE", help="of megabatch's loss, such as 512MiB; a large one keeps logits")
    add("--json", metavar="PATH", help="write all of it as JSON to this file; - for the terminal, instead of the table")
    dimensions = parser.add_argument_group("dimensions of a model")
    for member in DIMENSIONS:
        dimensions.add_argument(f"--{member.name.replace('_', '-')}", type=_positive, metavar="N")
    figures = parser.add_argument_group("figures of a GPU")
    for flag, (_, _, text) in GPU_FLAGS.items():
        figures.add_argument(f"--{flag}", type=_amount, metavar="X", help=text)
    figures.add_argument("--gpus-per-node", type=_positive, metavar="N", help="default 8")


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {word!r}.")
    return int(word)


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


def main(options: argparse.Namespace) -> int:
    try:
        run = _run(options)
        predictions = [predict(run, method) for method in options.method]
        text = json.dumps(document(run, predictions), indent=1, allow_nan=False)
        if options.json not in (None, "-"):
            Path(options.json).write_text(text + "\n")
    except OSError as error:
        print(
            f"megabatch plan: --json must be a path that can be written to, got {options.json}: {error}",
            file=sys.stderr,
        )
        return 2
    except ValueError as error:
        print(f"megabatch plan: {error}", file=sys.stderr)
        return 2
    print(text if options.json == "-" else report(run, predictions))
    if options.json not in (None, "-"):
        print(f"\nwritten to {options.json}")
    return 0


# ---- from the flags to a run. ValueError: a mistake of the user's, with what to do


def _run(options: argparse.Namespace) -> Run:
    names = ("gpus", "batch", "chunk", "precision", "data", "optimizer", "frozen")
    given = {name: getattr(options, name) for name in names}
    run = Run(model=_model(options), gpu=_gpu(options), budget=_budget(options.memory_budget), **given)
    if run.batch % run.gpus:
        below = run.batch // run.gpus * run.gpus
        near = f"{below} or {below + run.gpus}" if below else f"{run.gpus}"
        raise ValueError(f"--batch must be a multiple of --gpus, got {run.batch} for {run.gpus}. Use {near}.")
    if run.model.patch_size > run.model.image_size:
        got = f"{run.model.patch_size} and {run.model.image_size}"
        raise ValueError(f"--patch-size must be at most --image-size, got {got}.")
    return run


def _budget(word: str | None) -> int | None:
    if word is None:
        return None
    digits = word.rstrip("KMGiB")
    sizes = {"MiB": 2**20, "GiB": 2**30, "KiB": 2**10}
    if word[len(digits) :] not in sizes or not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"--memory-budget must be a size such as 512MiB, got {word!r}.")
    return int(digits) * sizes[word[len(digits) :]]


def _model(options: argparse.Namespace) -> Model:
    given = {one.name: value for one in DIMENSIONS if (value := getattr(options, one.name)) is not None}
    if options.model is not None:
        model = _named("--model", options.model, MODELS)
        return replace(model, **given, name=f"{model.name} with other dimensions" if given else model.name)
    missing = [one.name for one in DIMENSIONS if one.default is MISSING and one.name not in given]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(
            f"--model must be named or all its dimensions given, missing {flags}. Models are {', '.join(MODELS)}."
        )
    return Model("a model of these dimensions", **given)


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
        raise ValueError(
            f"--gpu must be named or its figures given, missing {', '.join(missing)}. GPUs are {', '.join(GPUS)}."
        )
    link = given.get("link", PCIE)
    usual = {"tf32": given["half"] / 2, "link": link, "host": PCIE, "network": link}
    return Gpu("a GPU of these figures", **{**usual, **given})


def _named(flag: str, name: str, known: dict[str, Thing]) -> Thing:
    """By its name, whatever the case and the separators, or by a beginning or end of four letters that no other has."""

    def plain(word: str) -> str:
        return "".join(letter for letter in word.lower() if letter.isalnum())

    names, wanted = {plain(one): one for one in known}, plain(name)
    alike = [one for one in names if len(wanted) >= 4 and (one.startswith(wanted) or one.endswith(wanted))]
    if wanted in names or len(alike) == 1:
        return known[names[wanted if wanted in names else alike[0]]]
    near = alike or get_close_matches(wanted, names, n=3, cutoff=0.5)
    meant = f" Perhaps {' or '.join(names[one] for one in near)} is meant." if near else ""
    raise ValueError(f"{flag} must be one of {', '.join(known)}, got {name!r}.{meant}")
