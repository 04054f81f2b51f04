"""How parameters move: groups, schedule, precision."""

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from .config import Optimization

AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16}


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], options: Optimization) -> torch.optim.AdamW:
    """AdamW. Norms, biases and scales do not decay: they are what has one dimension or none.

    The groups come in OpenCLIP's order, so that its program can go on from our checkpoints.
    """
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": options.wd},
    ]
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.eps)


def warmup_steps(options: Optimization, total_steps: int) -> int:
    return min(10_000, total_steps // 10) if options.warmup is None else options.warmup


def learning_rate(step: int, options: Optimization, total_steps: int, steps_per_epoch: int = 1) -> float:
    """Of step `step`, counted from 0: up in a straight line, then down half a cosine, or constant, with or without a
    fall at the end."""
    warmup = warmup_steps(options, total_steps)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    if options.lr_scheduler == "const-cooldown":
        cooldown = round((options.epochs_cooldown or 0) * steps_per_epoch)
        left: float = min(1.0, (total_steps - step) / max(1, cooldown)) ** options.lr_cooldown_power
        return options.lr_cooldown_end + left * (options.lr - options.lr_cooldown_end)
    if options.lr_scheduler == "const":
        return options.lr
    done = (step - warmup) / max(1, total_steps - warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * done))


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Products in half precision where it was asked for. Weights, and the loss's logits, stay float32."""
    return torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)


def make_scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """Lifts the small gradients of float16 above its zero; does nothing else."""
    return torch.amp.GradScaler(device.type, enabled=precision == "amp")


def running_statistics(module: nn.Module) -> list[torch.Tensor]:
    """What a forward in training changes: batch norms'."""
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def is_finite(values: Mapping[str, float]) -> bool:
    return math.isfinite(values["train/loss"]) and math.isfinite(values["train/grad_norm"])


def stable_seed(*numbers: int | str) -> int:
    """63 bits of all of them, in their order."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big") >> 1
