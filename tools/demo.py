"""`python -m tools.demo` (`make demo`): three acts, each a claim of the library that this machine can check.

1. The CLIP loss at growing batch sizes under a memory limit: open_clip's formula, torch.compile of the dense loss, and
   megabatch. 2. Towers trained three times: with the dense loss, with megabatch, and on two ranks. 3. One step of the
   same trainer at batch 65,536 under the memory limit. Everything is real and nothing is downloaded.
"""

import argparse
import base64
import importlib
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megabatch.bench import flags, measure, plot, report
from megabatch.bench.cases import Case
from megabatch.bench.contenders import CONTENDERS
from megabatch.bench.processes import runner
from megabatch.bench.results import table
from megabatch.bench.trial import Rules, contest

ACT_1 = """\
One training step through the CLIP loss, D={width}, each contender in a separate process that may take {limit} MiB of
memory and no more (setrlimit), inputs and gradients included. Time is the median of shuffled rounds, memory the peak
beyond inputs and gradients.
"""
ACT_2 = """\
`megabatch train --model tiny` on {icons:,} icons and their names, {steps} steps at batch {batch:,}, three times with
one seed: with the dense loss, with megabatch, and with megabatch on two ranks. Then {held_out:,} held-out names are
looked for among their icons, and the icons among the names.
"""
NO_CLAIM = """\
This does not show that larger batches help: on a dataset of {icons:,} icons they do not."""
ACT_3 = """\
The same trainer takes one step at batch {batch:,}, in a process that may take {limit:,} MiB beyond what Python and
torch take themselves. Icons repeat until the batch is full; rows with the same name are not each other's negatives.
"""
LOSSES = ("formula", "compiled", "megabatch")
SIZES, QUICK_SIZES = [1024, 4096, 16384], [256, 1024, 4096]
SAME_STEPS, SAME = 10, 1e-5  # number of steps, and how much loss curves may differ
RECALLS, LEARNED = (1, 5, 10), 0.10  # the last recall, at least, both ways
WAYS = {"text_to_image": "name to icon", "image_to_text": "icon to name"}
VARIANTS = {"dense loss": (1, ["--dense-loss"]), "megabatch": (1, []), "megabatch, 2 ranks": (2, [])}
OF_TRAINING = ("PIL", "yaml", "rich", "braceexpand", "qtawesome")  # by the name that each is imported by
DATA = ["--train-data", "icons", "--model", "tiny", "--seed", "0"]
LAST_LINES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--acts", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], metavar="ACT")
    parser.add_argument("--rows", type=flags.positive, nargs="+", default=SIZES, metavar="N", help="batches of act 1")
    parser.add_argument("--width", type=flags.positive, default=256, metavar="D", help="width of the features of act 1")
    parser.add_argument("--limit", type=flags.memory, default="2GiB", metavar="SIZE", help="memory of acts 1 and 3")
    parser.add_argument(
        "--out", type=Path, default=Path("build"), metavar="FOLDER", help="for the plot and the picture"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: everything small")


def main(options: argparse.Namespace) -> int:
    if options.quick:
        options.rows, options.width = QUICK_SIZES, 64
    options.out.mkdir(parents=True, exist_ok=True)
    begin, passed = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="megabatch-demo-") as folder:
        for act in sorted(set(options.acts)):
            missing = [name for name in OF_TRAINING if act > 1 and importlib.util.find_spec(name) is None]
            if missing:
                print(f"\nAct {act} needs {', '.join(missing)}: pip install 'megabatch[train]'")
                passed.append(False)
            else:
                passed.append({1: growing, 2: learning, 3: big_step}[act](options, Path(folder)))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    return 0 if all(passed) else 1


def heading(act: int, title: str) -> None:
    print(f"\nAct {act}: {title}\n{'=' * (len(title) + 7)}\n", flush=True)


# ---- act 1


def growing(options: argparse.Namespace, folder: Path) -> bool:
    """Whether megabatch was right at every size and ran at the largest that anybody did."""
    limit = 128 * 2**20 if options.quick else options.limit
    heading(1, "The batch grows, the memory does not")
    print(ACT_1.format(width=options.width, limit=limit // 2**20))
    contenders = [CONTENDERS[name] for name in LOSSES]
    largest = dict.fromkeys((one.title for one in contenders), 0)
    cases: list[dict[str, Any]] = []
    with runner("cpu") as where:
        for rows in sorted(options.rows):
            case = Case("clip", rows, options.width)
            found = contest(case, contenders, Rules(limit=limit), where)
            print(f"{case}\n\n{report.table(*table(found, {'/ megabatch': 'megabatch'}))}\n", flush=True)
            if any(row.status == "wrong" for row in found):
                print("FAILED: a result is wrong")
                return False
            cases.append({"rows": rows, "contenders": [row.record() for row in found]})
            largest |= {row.title: rows for row in found if row.status == "ok"}
    print("largest batch: " + ", ".join(f"{rows:,} rows {title}" for title, rows in largest.items()))
    if importlib.util.find_spec("matplotlib") is not None and (curves := plot.curves_of(cases)):
        path = options.out / "demo.png"
        plot.draw(curves, f"clip_loss, D={options.width}, {limit // 2**20} MiB for each process", path)
        print(f"plot: {path}")
    return largest["megabatch"] == max(largest.values())


# ---- the trainer, as people run it


class Broke(Exception):
    """A run that did not end well. The text has its last words."""


@dataclass(frozen=True)
class Trained:
    folder: Path
    seconds: float
    metrics: list[dict[str, float]]

    @property
    def losses(self) -> list[float]:
        return [values["train/loss"] for values in self.metrics if "train/loss" in values]

    @property
    def held_out(self) -> dict[str, float]:
        """The figures of the last validation."""
        return [values for values in self.metrics if "val/loss" in values][-1]


def train(words: Sequence[str], folder: Path, ranks: int = 1, launcher: Sequence[str] = ("-m", "megabatch")) -> Trained:
    """Into `folder`, which is new; on more ranks than one under torchrun. Raises Broke."""
    from megabatch.train.report import read_metrics

    folder.mkdir(parents=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "megabatch"]
    command = [sys.executable, *(torchrun if ranks > 1 else launcher), "train", *words]
    command += ["--logs-dir", str(folder.parent), "--name", folder.name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // ranks))}
    begin = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if ended.returncode:
        lines = (ended.stdout + ended.stderr).splitlines()[-LAST_LINES:]
        raise Broke("\n".join([f"training ended with exit code {ended.returncode}. Its last words:", *lines]))
    return Trained(folder, time.perf_counter() - begin, read_metrics(folder / "metrics.jsonl"))


# ---- act 2


def learning(options: argparse.Namespace, folder: Path) -> bool:
    """Whether all three learned, and learned the same."""
    from megabatch.train.data.icons import Icons

    steps, batch, held_out = (3, 128, 100) if options.quick else (80, 1024, 1000)
    settings = {"--steps": steps, "--global-batch-size": batch, "--chunk-size": batch, "--warmup": steps // 10}
    settings |= {"--val-num-samples": held_out, "--workers": 0, "--lr": 4e-3, "--wd": 0.2}
    settings |= {"--val-frequency": 0, "--save-frequency": 0}
    words = [*DATA, "--val-data", "icons", *(str(word) for setting in settings.items() for word in setting)]
    icons = len(Icons(held_out=False))
    heading(2, "One run three times, and it learns")
    print(ACT_2.format(icons=icons, steps=steps, batch=batch, held_out=held_out), flush=True)
    runs: dict[str, Trained] = {}
    try:
        for number, (title, (ranks, more)) in enumerate(VARIANTS.items()):
            runs[title] = train([*words, *more], folder / "learning" / str(number), ranks)
            print(f"{title}: loss {runs[title].losses[-1]:.4f}, {runs[title].seconds:.0f} s", flush=True)
    except Broke as broke:
        print(f"FAILED: {broke}")
        return False
    print(f"\n{curves_table(runs)}\n\n{recalls_table(runs, held_out)}\n\n{NO_CLAIM.format(icons=icons)}")
    faults = [*differences(runs), *([] if options.quick else too_little(runs))]
    for fault in faults:
        print(f"FAILED: {fault}")
    path = options.out / "demo-icons.png"
    draw_retrieved(runs["megabatch"].folder, path)
    print(f"picture: {path}")
    return not faults


def largest_difference(run: Trained, dense: Trained, steps: int | None = None) -> float:
    """Of two loss curves. NaN where either has one, infinite where they are not of one length."""
    ours, theirs = (torch.tensor(each.losses[:steps], dtype=torch.float64) for each in (run, dense))
    return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")


def differences(runs: dict[str, Trained]) -> list[str]:
    dense = runs["dense loss"]
    apart = {title: largest_difference(run, dense, SAME_STEPS) for title, run in runs.items()}
    return [
        f"{title}: the loss curve is {most:.1e} off the dense one's in the first {SAME_STEPS} steps, allowed {SAME:g}"
        for title, most in apart.items()
        if not most <= SAME  # NaN is wrong too
    ]


def too_little(runs: dict[str, Trained]) -> list[str]:
    best = RECALLS[-1]
    found = {(title, way): run.held_out[f"val/{way}_R@{best}"] for title, run in runs.items() for way in WAYS}
    return [
        f"{title}: R@{best}, {WAYS[way]}, must be at least {LEARNED:.2f}, got {value:.3f}"
        for (title, way), value in found.items()
        if not value >= LEARNED
    ]


def curves_table(runs: dict[str, Trained]) -> str:
    body = []
    for title, run in runs.items():
        apart = [f"{largest_difference(run, runs['dense loss'], steps):.1e}" for steps in (SAME_STEPS, None)]
        body.append((title, f"{run.losses[-1]:.6f}", *apart, ""))
    return report.table(("", "last loss", f"off in {SAME_STEPS} steps", "in all steps", ""), body)


def recalls_table(runs: dict[str, Trained], held_out: int) -> str:
    head = ("", *(f"{name}: R@{k}" if k == RECALLS[0] else f"R@{k}" for name in WAYS.values() for k in RECALLS), "")
    body: list[Sequence[str]] = [
        (title, *(f"{run.held_out[f'val/{way}_R@{k}']:.3f}" for way in WAYS for k in RECALLS), "")
        for title, run in runs.items()
    ]
    body.append(("by chance", *(f"{k / held_out:.3f}" for _ in WAYS for k in RECALLS), ""))
    return report.table(head, body)


def draw_retrieved(run: Path, path: Path, names: int = 12, found: int = 5) -> None:
    """The first dozen of the held-out names, with the icons that the run's towers find, the right one framed."""
    from PIL import Image, ImageDraw, ImageFont

    from megabatch.train.retrieved import retrieved

    cell, left, font = 76, 300, ImageFont.load_default(18)
    canvas = Image.new("RGB", (left + found * cell + 16, names * cell + 16), "white")
    pen = ImageDraw.Draw(canvas)
    _, examples = retrieved(run, names, found, among=1000)
    for row, example in enumerate(examples):
        top = 8 + row * cell
        pen.text((16, top + cell // 2), example.text[:28], (20, 20, 20), font, anchor="lm")
        for column, picture in enumerate(example.pictures):
            corner = (left + column * cell, top)
            png = io.BytesIO(base64.b64decode(picture.source.partition(",")[2]))
            icon = Image.open(png).convert("RGBA").resize((cell - 20, cell - 20))
            canvas.paste(icon, (corner[0] + 10, corner[1] + 10), icon)
            if picture.right:
                pen.rectangle((*corner, corner[0] + cell - 3, corner[1] + cell - 3), outline=(0, 75, 160), width=4)
    canvas.save(path)


# ---- act 3


def big_step(options: argparse.Namespace, folder: Path) -> bool:
    """Whether it could."""
    batch, chunk, workers = (4096, 256, 0) if options.quick else (65_536, 1024, 2)
    limit = 512 * 2**20 if options.quick else options.limit
    heading(3, f"A step at batch {batch:,}")
    print(ACT_3.format(batch=batch, limit=limit // 2**20), flush=True)
    words = [*DATA, "--steps", "1", "--global-batch-size", str(batch), "--chunk-size", str(chunk)]
    peak = folder / "peak"
    launcher = ["-c", f"from tools.demo import limited; limited({limit}, {str(peak)!r})"]
    try:
        run = train([*words, "--workers", str(workers)], folder / "big-step" / "run", launcher=launcher)
    except Broke as broke:
        print(f"FAILED: {broke}")
        return False
    values = run.metrics[0]
    taken = json.loads(peak.read_text())
    rows = [
        ("rows of the batch", f"{values['train/samples']:,.0f}", ""),
        ("loss", f"{values['train/loss']:.4f}", ""),
        (
            "time",
            f"{values['train/step_seconds']:.1f} s",
            f"of which {values['train/data_seconds']:.1f} s to draw data",
        ),
        ("peak memory", f"{report.mebibytes(taken)} MiB", "data, towers, optimizer and all"),
        ("a dense matrix alone", f"{report.mebibytes(4 * batch**2)} MiB", "and a dense loss holds several"),
    ]
    print(report.table(("", "", ""), rows).lstrip("\n"))
    return True


def limited(limit: int, file: str) -> None:
    """`megabatch …` in this process, which may take `limit` bytes more than it has; its peak goes into a file."""
    importlib.import_module("megabatch.train.command")  # what the trainer consists of is loaded before it is limited
    measure.expendable = True
    measure.limit_memory(limit, 1, torch.device("cpu"))()
    code: object = 0
    with measure.PeakMemory(torch.device("cpu")) as memory:
        try:
            runpy.run_module("megabatch", run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            code = leaving.code
    Path(file).write_text(json.dumps(memory.bytes))
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tools.demo", description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
