"""How a job is run: `megabatch train` on one thread per rank, on data that is made where it is needed."""

import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import wordnet
from .study import SCORE, Job, Result, Study, best_factor, scores
from .wordnet import read_lines, write_lines

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 2048
DIVERGED = "steps in a row taught nothing"  # what `megabatch train` says then
HARD, MARGIN = 8, 0.05  # negatives are looked for among so many; less similar than the positive by so much

FACTS = ("commit", "torch", "cpu")  # of the environment, which are kept

running: dict[subprocess.Popen[str], Path] = {}  # with the folder of the run
starting = threading.RLock()  # held from the start of a process until it is in `running`


class Runner:
    """Runs jobs of a study.

    Args:
        folder: For data that is made, such as WordNet's pairs.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self._making = threading.RLock()  # of data, which a model may have to be trained for
        self._made: set[Path] = set()  # by this process: other files may be of another grid

    def run(self, job: Job, keep: Path | None = None) -> Result:
        """Trains, and says what came out. Into the folder `keep`, or one that is removed."""
        self.make_data(job)
        words = self.words(job)
        command, started = command_of(words, self.ranks(job)), time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="megabatch-study-") as temporary:
            folder = keep or Path(temporary)
            code, said = train(words, folder, self.ranks(job))
            seconds = time.perf_counter() - started
            metrics = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
            environment = json.loads((folder / "environment.json").read_text()) if metrics else {}
        steps = [line for line in metrics if "train/loss" in line]
        figures = {name: value for line in metrics[-1:] for name, value in line.items() if name.startswith("val/")}
        if (code and DIVERGED not in said) or (not code and SCORE not in figures):
            raise RuntimeError(f"study: {job} must end well with a score, got exit code {code}:\n{said[-2000:]}")
        return {
            "job": asdict(job),
            "rate": self.study.rate(job),
            "steps": len(steps),
            "figures": figures,
            "train_loss": steps[-1]["train/loss"] if steps else None,
            "seconds": round(seconds, 1),
            "command": "OMP_NUM_THREADS=1 " + shlex.join(command).replace(f"{self.folder}/", ""),
            **{name: environment.get(name) for name in FACTS},
            "date": time.strftime("%Y-%m-%d"),
        }

    def words(self, job: Job) -> list[str]:
        """Of `megabatch train`, but for the folder of the run."""
        options: dict[str, Any] = {
            "--model": self.study.grid["model"],
            "--global-batch-size": job.batch,
            "--chunk-size": min(CHUNK, job.batch),
            "--steps": job.steps,
            "--lr": self.study.rate(job),
            "--warmup": self.warmup(job),
            "--seed": job.seed,
            "--val-frequency": 0,
            "--save-frequency": 0,
            "--workers": 0,
        }
        flags = [*self.study.options(job.variant).get("flags", []), *self.study.method(job).get("flags", [])]
        return [*self.files(job), *(str(word) for word in [*itertools.chain(*options.items()), *flags])]

    def warmup(self, job: Job) -> int:
        """The same share of all steps, but two where there are few: one would be at the full rate."""
        share = self.study.options(job.variant).get("warmup", 0.1)
        return max(2, math.floor(share * job.steps))

    def ranks(self, job: Job) -> int:
        return int(self.study.method(job).get("ranks", 1))

    # ---- data

    def files(self, job: Job) -> list[str]:
        if job.dataset == "icons":
            return ["--train-data", "icons", "--val-data", "icons", "--val-num-samples", "100000"]
        options = self.study.options(job.variant)
        name = f"share-{options['share']}" if "share" in options else options.get("negatives", "train")
        folder = self.folder / "wordnet"
        return ["--train-data", str(folder / f"{name}.jsonl"), "--val-data", str(folder / "held_out.jsonl")]

    def make_data(self, job: Job) -> None:
        options = self.study.options(job.variant)
        if job.dataset == "icons":
            if {"share", "negatives"} & options.keys():
                raise ValueError(
                    f"study: {job.variant} must be of wordnet, got icons. They are always whole, as pairs."
                )
            return
        path = Path(self.files(job)[1])
        with self._making:
            if path not in self._made:
                train, _ = wordnet.write(path.parent)
                rows = read_lines(train)
                if share := options.get("share"):  # their order is as good as random
                    write_lines(path, rows[: round(share * len(rows))])
                elif kind := options.get("negatives"):
                    self.write_negatives(path, kind, rows)
                self._made.add(path)

    def write_negatives(self, path: Path, kind: str, rows: Sequence[dict[str, str]]) -> None:
        """Each query with a definition that is not its own: a hard one, by a trained model, or a random one."""
        import torch

        if kind == "mined":
            others = self.hard_definitions(rows)
        else:
            torch.manual_seed(0)
            others = (torch.arange(len(rows)) + torch.randint(1, len(rows), (len(rows),))) % len(rows)
        negatives = ([rows[other]["positive"]] for other in others.tolist())
        write_lines(path, ({**row, "negatives": each} for row, each in zip(rows, negatives, strict=True)))

    def hard_definitions(self, rows: Sequence[dict[str, str]]) -> "Tensor":
        """As docs/evaluation.md mines them, with the best model of batch 1024: of the HARD nearest to a query the first
        that is MARGIN below its own, or else the last."""
        import torch
        from torch.nn.functional import normalize

        import megabatch as mb

        cell = self.study.cell("samples", "wordnet", 1024)
        factor = best_factor(cell, self.study.grid, scores(self.study.results))
        if factor is None:
            raise ValueError("study: negatives are mined with a model of batch 1024, which is not done. Run it first.")
        folder = self.folder / "miner"
        shutil.rmtree(folder, ignore_errors=True)  # of a study that was killed
        self.run(replace(cell, factor=factor, seed=self.study.grid["search"]), keep=folder)
        model = mb.load(folder)

        def encoded(key: str) -> torch.Tensor:
            texts = [row[key] for row in rows]
            parts = [model.encode_text(model.tokenizer(texts[i : i + CHUNK])) for i in range(0, len(texts), CHUNK)]
            return normalize(torch.cat(parts), dim=1)

        with torch.no_grad():
            queries, definitions = encoded("query"), encoded("positive")
            similar, nearest = mb.similarity_topk(queries, definitions, HARD, exclude=torch.arange(len(rows)))
            allowed = similar < (queries * definitions).sum(1, keepdim=True) - MARGIN
        allowed[:, -1] = True
        return nearest.gather(1, allowed.int().argmax(1, keepdim=True)).squeeze(1)


def command_of(words: Sequence[str], ranks: int) -> list[str]:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    return [*torchrun, "megabatch", "train", *words]


def train(words: Sequence[str], folder: Path, ranks: int = 1) -> tuple[int, str]:
    """The exit code of that command, and what it said on stderr."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    program = {"torchrun": "torch.distributed.run"}
    first, *more = command_of(words, ranks)
    command = [sys.executable, "-m", program.get(first, first), *more]
    command += ["--logs-dir", str(folder.parent), "--name", folder.name]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with starting:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)
        running[process] = folder
    with process:
        _, said = process.communicate()
    del running[process]
    return process.returncode, said
