"""`megabatch train`."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..distributed.world import World, joined
from . import checkpoint
from .checkpoint import Checkpoints
from .config import Config, from_mapping, to_yaml
from .evaluate import NoSamples
from .flags import REFUSED, add_flags, given_flags, read_config, read_yaml, usage_errors
from .loop import Diverged, Trainer
from .report import Report, holding_log

__all__ = ["DESCRIPTION", "REFUSED", "add_arguments", "main"]

DESCRIPTION = """\
Trains an image and a text encoder (or a text encoder alone, on pairs of texts) contrastively, at any global batch.
    megabatch train --train-data icons --val-data icons --model tiny --global-batch-size 1024 --epochs 10
    torchrun --nproc-per-node 8 -m megabatch train --config run.yaml --name first
A run is a folder, --logs-dir/--name: params.yaml, out.log, metrics.jsonl, checkpoints/, tensorboard/. It resumes with
--resume latest, and keeps its settings but for the flags that you give. (torchrun takes --logs for its own flag.)
"""

DIVERGED = 1
SIGNALLED = 128  # and the signal's number, as shells have it

add_arguments = add_flags


def main(options: argparse.Namespace) -> int:
    with usage_errors("train"):
        config = _read(given_flags(options))
        device = device_of(config)
    with joined(device, control_group=False) as world:
        with usage_errors("train"):
            folder = Path(config.run.logs) / world.gather(config.run.name or _name_of(config))[0]
            config = replace(config, run=replace(config.run, name=folder.name))
            resume = _checkpoint_to_resume(config, folder)
            world.wait()  # before rank 0 makes the folder that others look for
            # A checkpoint says itself where it comes from: who takes these settings elsewhere starts anew.
            config = replace(config, run=replace(config.run, resume=None))
            with holding_log() as held:
                trainer = Trainer(config, world, folder, resume)
            if world.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                Checkpoints(folder / "checkpoints", config.run.keep).clear_unfinished()
                checkpoint.atomically(folder / "params.yaml", lambda file: file.write(to_yaml(config).encode()))
        with _report(trainer, folder, world) as report:
            report.say(f"{folder}\n{to_yaml(config)}")
            report.replay(held)
            try:
                number = trainer.run(report)
            except (Diverged, NoSamples) as error:
                report.warn(str(error))
                return DIVERGED
    return SIGNALLED + number if number else 0


def device_of(config: Config) -> str:
    name, has_cuda = config.run.device, torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {name!r}.")
    if name.startswith("cuda") and not has_cuda:
        raise ValueError(f"--device must be one that torch finds, got {name!r}, and torch finds no CUDA device.")
    return name


def _read(given: dict[str, Any]) -> Config:
    """A run that goes on has the settings it had, but for what is given."""
    asked = {**(read_yaml(given["config"]) if "config" in given else {}), **given}
    resume, name, logs = asked.get("resume"), asked.get("name"), asked.get("logs", Config().run.logs)
    base = None
    if resume == "latest":
        if name is None:
            raise ValueError("--resume latest must come with --name, got none. Name the run that is to go on.")
        params = Path(logs) / name / "params.yaml"
        if params.exists():
            base = read_config({"config": params})
        elif "train_data" not in asked:
            raise ValueError(
                f"--resume latest must find a run, got none at {params.parent}. Look at --name and --logs, or give "
                "--train-data to begin it."
            )
    elif resume is not None:
        base = from_mapping(checkpoint.load(Path(resume))["megabatch"]["config"])
        if name is None:
            logs, name = _run_of(Path(resume).resolve())
    config = read_config(given, base=base)
    return replace(config, run=replace(config.run, logs=logs, name=name, resume=resume))


def _run_of(path: Path) -> tuple[str, str]:
    """Folder and name of the run that a checkpoint belongs to."""
    if path.parent.name != "checkpoints" or not (path.parents[1] / "params.yaml").exists():
        raise ValueError(f"--resume {path} must come with --name, because it is in no run's folder.")
    return str(path.parents[2]), path.parents[1].name


def _name_of(config: Config) -> str:
    model = Path(config.model.model).name.replace("/", "-")
    options = config.optimization
    settings = f"{model}-{config.loss.loss}-b{options.global_batch_size}-lr{options.lr:g}-seed{config.run.seed}"
    return f"{time.strftime('%Y_%m_%d-%H_%M_%S')}-{settings}"


def _checkpoint_to_resume(config: Config, folder: Path) -> Path | None:
    resume, checkpoints = config.run.resume, Checkpoints(folder / "checkpoints", config.run.keep)
    if resume == "latest":
        return checkpoints.latest()
    path = None if resume is None else Path(resume).resolve()
    is_own = path is not None and path.parent == checkpoints.folder.resolve()
    if not is_own:
        if (folder / "params.yaml").exists():
            raise ValueError(
                f"--name must be that of a new run, got {folder.name}, which is in {folder.parent}. Take another, or "
                "--resume latest."
            )
        return path
    latest = checkpoints.latest()
    if path is not None and latest is not None and not path.samefile(latest):
        raise ValueError(
            f"--resume must be the latest checkpoint of a run that goes on, {latest.name}, got {path.name}. Give a new "
            "--name to begin another run from it."
        )
    return path


def _report(trainer: Trainer, folder: Path, world: World) -> Report:
    """Rank 0 alone speaks."""
    if world.rank:
        return Report.silent()
    run = trainer.config.run
    return Report(
        folder,
        total_steps=trainer.total_steps,
        first_step=trainer.progress.step,
        report_to=run.report_to,
        wandb_project=run.wandb_project_name,
        log_every=run.log_every_n_steps,
    )
