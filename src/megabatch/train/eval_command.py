"""`megabatch eval`."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from ..distributed.world import joined
from . import checkpoint
from .command import device_of
from .config import Optimization, Run
from .data import open_classes, open_held_out
from .evaluate import evaluate
from .flags import REFUSED, add_flags, given_flags, read_config, usage_errors
from .loading import config_of, load_checkpoint, restored_towers
from .towers import has_weights, make_towers

__all__ = ["DESCRIPTION", "REFUSED", "add_arguments", "main"]

DESCRIPTION = """\
Validation loss of all samples as one batch, retrieval both ways (R@1, R@5, R@10, median rank; ranks count from 1) and
zero-shot classification, in linear memory. Settings are those of the checkpoint's run, but for the flags that you give.
    megabatch eval --checkpoint logs/first --val-data icons
    megabatch eval --checkpoint logs/first/checkpoints/best.pt --zeroshot-data photos --templates prompts.txt
    torchrun --nproc-per-node 8 -m megabatch eval --model ViT-B-32 --pretrained laion2b_e16 --val-data val.csv
"""


# Flags that evaluation has no use for.
OF_TRAINING = {
    *("train_data", "train_num_samples", "dataset_resampled", "train_data_upsampling_factors"),
    *("crop_scale", "lock_image", "feature_cache", "grad_checkpointing", "torchcompile"),
    *("init_logit_scale", "max_logit_scale", "dense_loss"),
    *({each.name for each in fields(Optimization)} - {"chunk_size", "precision"}),
    *("val_frequency", "val_steps"),
    *({each.name for each in fields(Run)} - {"device"}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="checkpoint of megabatch train: a file, or a run's folder (its best, else its latest)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the metrics to this file")
    add_flags(parser, leave_out=OF_TRAINING)


def main(options: argparse.Namespace) -> int:
    with usage_errors("eval"):
        saved = None if options.checkpoint is None else load_checkpoint(options.checkpoint)
        base = None if saved is None else config_of(*saved)
        config = read_config(given_flags(options), base=base, training=False)
        if saved is None and not has_weights(config.model):
            raise ValueError(
                "--checkpoint must be given, or --model with weights: a folder, or a name with --pretrained. Got "
                f"neither, and {config.model.model} has none of its own."
            )
        device = device_of(config)
    with joined(device, control_group=False) as world:
        with usage_errors("eval"):
            if config.evaluation.val_data is None and config.evaluation.zeroshot_data is None:
                raise ValueError("--val-data or --zeroshot-data must be given, got neither.")
            held_out, classes = open_held_out(config, world), open_classes(config)
            has_images = classes is not None or (held_out is not None and not held_out.texts_only)
            if saved is None:
                towers = make_towers(config.model, loss=config.loss.loss)
            elif has_images and saved[1]["megabatch"].get("texts_only") and not has_weights(config.model):
                raise ValueError(
                    "--checkpoint must be of a run with images for --val-data or --zeroshot-data with images, got one "
                    "that was trained on texts alone: its image tower is as random as at the start. Give --val-data of "
                    "texts."
                )
            else:
                towers = restored_towers(config, *saved)
            figures = evaluate(towers.to(world.device), held_out, classes, config, world)
        if world.rank == 0:
            width = max(map(len, figures))
            for name, value in figures.items():
                print(f"{name:{width}}  {value:.6g}")
            if options.json is not None:
                text = json.dumps(figures, indent=1) + "\n"
                checkpoint.atomically(options.json, lambda file: file.write(text.encode()))
    return 0
