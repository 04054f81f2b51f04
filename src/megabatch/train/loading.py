"""Towers of a checkpoint."""

from dataclasses import replace
from pathlib import Path

import torch

from . import checkpoint
from .config import Config, from_mapping
from .preprocessing import Preprocessing
from .towers import Towers, make_towers

OTHER_MODEL = "Give the --model that it was trained with, or take another checkpoint."


def load_towers(path: Path, device: torch.device) -> Towers:
    """See `megabatch.load`."""
    saved = load_checkpoint(path)
    return restored_towers(config_of(*saved), *saved).to(device).eval()


def config_of(path: Path, state: checkpoint.State) -> Config:
    with checkpoint.reading(path, "this version", "Use the version of megabatch that wrote it."):
        return from_mapping(state["megabatch"]["config"])


def load_checkpoint(path: Path) -> tuple[Path, checkpoint.State]:
    """The checkpoint that `path` is, or that the run in this folder has: its best, or else its latest."""
    if path.is_file():
        return path, checkpoint.load(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    best = folder / "best.pt"
    found = best if best.exists() else checkpoint.Checkpoints(folder, keep=0).latest()
    if found is None:
        got = "which has none" if path.is_dir() else "which is not there"
        raise ValueError(
            f"checkpoint: must be a file, or a run's folder with checkpoints, got {path}, {got}. Look in the "
            "--logs-dir of train."
        )
    return found, checkpoint.load(found)


def restored_towers(config: Config, path: Path, state: checkpoint.State) -> Towers:
    """The towers that a configuration names, with the weights and the preprocessing of a checkpoint."""
    model = replace(config.model, pretrained=None, lock_image=False)  # all weights are in there
    towers = make_towers(model, loss=config.loss.loss)
    with checkpoint.reading(path, f"--model {config.model.model}", OTHER_MODEL):
        restore(towers, state)
    return towers


def restore(towers: Towers, state: checkpoint.State, *, averaged: bool = True) -> None:
    """Weights, where `averaged` their moving average if there is one, and preprocessing. Images have the size that the
    towers take now."""
    weights = state["state_dict_ema"] if averaged and "state_dict_ema" in state else state["state_dict"]
    towers.model.load_state_dict(weights)
    saved = state["megabatch"]["preprocessing"]
    towers.preprocessing = Preprocessing(**{**saved, "size": towers.preprocessing.size})
