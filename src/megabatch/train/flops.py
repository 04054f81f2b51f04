"""The work of a training step, and what share of the device's peak it is."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from megabatch.plan.hardware import GPUS

from .towers import Towers


@torch.no_grad()
def flops_per_sample(towers: Towers, *, texts_only: bool) -> float:
    """Of the towers: one forward and, where a tower is trained, a backward that is twice that. What is formed a second
    time (--chunk-size, --grad-checkpointing) does not count, nor does the loss."""
    device, size, channels = towers.logit_scale.device, towers.preprocessing.size, towers.preprocessing.channels
    image = torch.zeros(1, channels, size, size, device=device)
    tokens = towers.tokenizer(["a"]).to(device)
    was_training, was_fast = towers.training, torch.backends.mha.get_fastpath_enabled()
    towers.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # whose operators are not counted
    with FlopCounterMode(display=False) as of_image:
        towers.encode_image(image)
    with FlopCounterMode(display=False) as of_text:
        towers.encode_text(tokens)
    torch.backends.mha.set_fastpath_enabled(was_fast)
    towers.train(was_training)
    images = 0 if texts_only else 1 if towers.image_is_locked else 3
    return float(images * of_image.get_total_flops() + (6 if texts_only else 3) * of_text.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """By the GPU's data sheet. None where it is not among those of `megabatch plan`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = [gpu for gpu in GPUS.values() if gpu.name.removesuffix("-80").replace("-", " ") in name]
    return (found[0].tf32 if precision == "fp32" else found[0].half) if found else None
