"""`megabatch train` as people run it, in processes of its own, while this one watches what it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from ...train.report import read_metrics

SECONDS_BETWEEN_LOOKS = 0.2
LAST_LINES = 12
# torchrun's own patience with its ranks is 30.
SECONDS_TO_LEAVE = 45


class Broke(Exception):
    """A run that did not end well. The text has its last words."""


@dataclass(frozen=True)
class Trained:
    """A run that has ended well. `seconds` are those of its processes, from their start to their end."""

    folder: Path
    seconds: float
    metrics: list[dict[str, float]]

    @property
    def losses(self) -> list[float]:
        return [values["train/loss"] for values in self.metrics if "train/loss" in values]

    @property
    def step_seconds(self) -> float:
        return sum(values.get("train/step_seconds", 0.0) for values in self.metrics)

    @property
    def held_out(self) -> dict[str, float]:
        """The figures of the last validation."""
        return [values for values in self.metrics if "val/loss" in values][-1]


def train(flags: Sequence[str], folder: Path, *, title: str, ranks: int = 1, launcher: Sequence[str] = ()) -> Trained:
    """Trains into `folder`, which is new. Raises Broke.

    Args:
        title: What it is called while it runs.
        ranks: More than one: under torchrun. They share the threads that this process has.
        launcher: What runs `megabatch` with one rank, if not `python -m`.
    """
    folder.mkdir(parents=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    torchrun += ["--log-dir", str(folder / "torchrun"), "-m", "megabatch", "--"]
    start = torchrun if ranks > 1 else [*(launcher or ["-m"]), "megabatch"]
    command = [sys.executable, *start, "train", *flags, "--logs", str(folder.parent), "--name", folder.name]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // ranks))}
    begin = time.perf_counter()
    log, metrics = folder / "terminal.log", folder / "metrics.jsonl"
    with log.open("wb") as output, _process(command, output, environment, ranks) as process:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_BETWEEN_LOOKS)
            _show(f"{title}: {_progress(metrics)}, {time.perf_counter() - begin:.0f} s")
    _show("")
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines()
        raise Broke(
            "\n".join([f"{title}: ended with exit code {process.returncode}. Its last words:", *lines[-LAST_LINES:]])
        )
    return Trained(folder, time.perf_counter() - begin, read_metrics(metrics))


@contextmanager
def _process(
    command: list[str], output: IO[bytes], environment: dict[str, str], ranks: int
) -> Iterator["subprocess.Popen[bytes]"]:
    """Nothing of it is left afterwards. Ctrl-C is this process's alone, which ends the other."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # torchrun has to end its ranks before it ends.
            process.send_signal(signal.SIGTERM if ranks > 1 else signal.SIGKILL)
            try:
                process.wait(SECONDS_TO_LEAVE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _progress(metrics: Path) -> str:
    """Of its last whole line."""
    *lines, _ = metrics.read_bytes().split(b"\n") if metrics.exists() else [b""]
    steps = [line for line in lines if b'"train/loss"' in line]
    if not steps:
        return "starting"
    last = json.loads(steps[-1])
    return f"step {last['step']}, loss {float(last['train/loss']):.4f}"


def _show(text: str) -> None:
    """In place of what was shown before. Only where somebody looks on."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)
