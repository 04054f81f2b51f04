"""`megabatch train`."""

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..distributed.world import World, joined
from ..machine import machine, version
from . import checkpoint
from .config import Config, Run, absolute, to_yaml
from .evaluate import RunFailed
from .flags import REFUSED, add_flags, given_flags, read_config, read_yaml, usage_errors
from .loading import config_of
from .loop import Trainer
from .report import LOGGER, Report, SilentReport, holding_log
from .run_folder import check_name, locked
from .signals import exit_code, leaving_at_once

__all__ = ["DESCRIPTION", "REFUSED", "add_arguments", "main"]

DESCRIPTION = """\
Trains an image and a text encoder (or a text encoder alone, on pairs of texts) contrastively, at any global batch.
    megabatch train --train-data icons --val-data icons --model tiny --global-batch-size 1024 --epochs 10
    torchrun --nproc-per-node 8 -m megabatch train --config run.yaml --name first
A run is a folder, --logs-dir/--name: params.yaml, out.log, metrics.jsonl, checkpoints/, tensorboard/. It resumes with
--resume latest, and keeps its settings but for the flags that you give. (torchrun takes --logs for its own flag.)
"""

FAILED = 1
PACKAGES = ("numpy", "pillow", "open_clip_torch", "timm", "transformers", "tokenizers")  # of the run, where they are

Resume = tuple[Path, checkpoint.State]
add_arguments = add_flags


def main(options: argparse.Namespace) -> int:
    with leaving_at_once(), ExitStack() as stack:
        with usage_errors("train"):
            config, resume = _read(given_flags(options))
            device = device_of(config)
            if config.run.report and find_spec("plotly") is None:
                raise ModuleNotFoundError("--report needs plotly, got none. Run pip install 'megabatch[report]'.")
        torch.set_float32_matmul_precision("high" if config.optimization.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.optimization.tf32
        world = stack.enter_context(joined(device, control_group=False))
        with usage_errors("train"), holding_log() as held:
            folder = Path(config.run.logs) / world.gather(config.run.name or _name_of(config))[0]
            stack.enter_context(locked(folder, world, waits=config.run.resume is not None))
            resume = _checkpoint_to_resume(config.run, folder, world, resume)
            # A checkpoint says itself where it comes from: who takes these settings elsewhere starts anew.
            run = replace(config.run, name=folder.name, resume=None)
            trainer = Trainer(replace(config, run=run), world, folder, resume)
            del resume
            config = replace(config, run=replace(run, allow_changed_data=False))
            if world.rank == 0:
                for place in (folder, trainer.checkpoints.folder):
                    checkpoint.clear_unfinished(place)
                environment = machine(world, [name for name in PACKAGES if version(name)])
                data, facts = (json.dumps(each, indent=1).encode() for each in (trainer.data, environment))
                checkpoint.atomically(folder / "data.json", lambda file: file.write(data))
                checkpoint.atomically(folder / "environment.json", lambda file: file.write(facts))
                checkpoint.atomically(folder / "params.yaml", lambda file: file.write(to_yaml(config).encode()))
        with usage_errors("train"):
            total, first = trainer.total_steps, trainer.progress.step
            report = SilentReport() if world.rank else Report(folder, run, total_steps=total, first_step=first)
        stack.enter_context(report)
        report.say(f"{folder}\n{to_yaml(config)}")
        report.replay(held)
        try:
            return exit_code(trainer.run(report))
        except RunFailed as error:
            report.warn(str(error))
        except checkpoint.WriteFailed as error:
            report.warn(f"{error}. What was saved before is whole: make room, then go on with --resume latest.")
    return FAILED


def device_of(config: Config) -> str:
    name, has_cuda = config.run.device, torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {name!r}.")
    if name.startswith("cuda") and not has_cuda:
        raise ValueError(f"--device must be cpu or auto here, got {name!r}: torch finds no CUDA device.")
    return name


def _read(given: dict[str, Any]) -> tuple[Config, Resume | None]:
    """A run that goes on has the settings it had, but for what is given. A checkpoint that is named comes too."""
    asked = {**(read_yaml(given["config"]) if "config" in given else {}), **given}
    resume, name, logs = asked.get("resume"), asked.get("name"), asked.get("logs", Config().run.logs)
    base = found = None
    if name is not None:
        check_name(name)
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
        found = Path(resume).resolve(), checkpoint.load(Path(resume))
        base = config_of(*found)
        if name is None:
            logs, name = _run_of(found[0])
    config = read_config(given, base=base)
    allowed = asked.get("allow_changed_data", False)  # now, not when the run began
    run = replace(config.run, logs=logs, name=name, resume=resume, allow_changed_data=allowed)
    return absolute(replace(config, run=run)), found


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


def _checkpoint_to_resume(run: Run, folder: Path, world: World, named: Resume | None) -> Resume | None:
    checkpoints = checkpoint.Checkpoints(folder / "checkpoints", run.keep)
    if run.resume == "latest":
        return _latest(checkpoints, world)
    if named is None or named[0].parent != checkpoints.folder.resolve():
        if (folder / "params.yaml").exists():
            raise ValueError(
                f"--name must be that of a new run, got {folder.name}, which is in {folder.parent}. Take another, or "
                "--resume latest."
            )
        return named
    latest = checkpoints.latest()
    if latest is not None and not named[0].samefile(latest):
        raise ValueError(
            f"--resume must be the latest checkpoint of a run that goes on, {latest.name}, got {named[0].name}. Give a "
            "new --name to begin another run from it."
        )
    return named


def _latest(checkpoints: checkpoint.Checkpoints, world: World) -> Resume | None:
    """The newest checkpoint that is whole on all ranks; each reads it once. Newer ones are set aside."""
    damaged: dict[Path, str] = {}
    for path in world.gather(list(checkpoints)[::-1])[0]:
        state, problem = None, None
        try:
            state = checkpoint.load(path)
        except ValueError as error:
            problem = str(error)
        problems = [each for each in world.gather(problem) if each is not None]
        if state is None or problems:
            damaged[path] = problems[0]
            continue
        for newer, reason in damaged.items():
            LOGGER.warning(f"{reason} It is kept as {newer.name}.damaged.")
            if world.rank == 0:  # it must not count as one that is kept
                newer.rename(newer.with_name(newer.name + ".damaged"))
        return path, state
    if damaged:
        raise ValueError(
            f"--resume latest must find a whole checkpoint in {checkpoints.folder}, got damaged ones: "
            f"{', '.join(path.name for path in damaged)}. Begin again with a new --name."
        )
    return None
