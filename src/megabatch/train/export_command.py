"""`megabatch export`."""

import argparse
from pathlib import Path

import torch

from .flags import usage_errors
from .loading import load_towers

DESCRIPTION = """\
Writes a trained model as a folder that the library it comes from loads: weights as safetensors, configuration,
preprocessing, tokenizer.
    megabatch export logs/first exported
    open_clip.create_model_and_transforms("local-dir:exported")      # a model of open_clip
    transformers.AutoModel.from_pretrained("exported")               # one from a Hugging Face folder
Both are a --model of train and eval again. tiny and small belong to no other library: megabatch.load has them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a file, or a run's folder (its best checkpoint, or latest)")
    parser.add_argument("folder", type=Path, help="new, or empty")


def main(options: argparse.Namespace) -> int:
    with usage_errors("export"):
        folder: Path = options.folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"folder must be new or empty, got {folder}. Nothing is written over: name another.")
        load_towers(options.checkpoint, torch.device("cpu")).export(folder)
        print(folder)
    return 0
