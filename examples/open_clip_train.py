"""A small open_clip model in a training loop of one's own, with megabatch's loss in place of open_clip's.

    python examples/open_clip_train.py
    torchrun --nproc-per-node 2 examples/open_clip_train.py

open_clip's own training program needs no script: torchrun … -m megabatch.integrations.open_clip, in place of
-m open_clip_train.main, with the same arguments.
"""

import os

import torch
import torch.distributed as dist
from open_clip import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# from open_clip import ClipLoss
from megabatch.integrations.open_clip import ClipLoss  # the one line that changes

BATCH, STEPS, COLOURS = 256, 41, 16


def make_pairs(count: int, palette: Tensor) -> tuple[Tensor, Tensor]:
    """Images of four coloured patches, `[N, 3, 16, 16]`, and the names of the colours with an end mark, `[N, 5]`."""
    colours = torch.randint(COLOURS, (count, 4))
    patches = palette[colours].transpose(1, 2).unflatten(2, (2, 2))
    images = patches.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    end = torch.full((count, 1), COLOURS)
    return images + 0.1 * torch.randn_like(images), torch.cat([colours, end], dim=1)


def train(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    palette = torch.randn(COLOURS, 3)
    vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=5, vocab_size=COLOURS + 1, width=64, heads=2, layers=2)
    model: torch.nn.Module = CLIP(32, vision, text, output_dict=True)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = ClipLoss(rank=rank, world_size=world_size)
    torch.manual_seed(1 + rank)  # every rank has pairs of its own

    for step in range(STEPS):
        loss = criterion(**model(*make_pairs(BATCH // world_size, palette)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    if ranks := int(os.environ.get("WORLD_SIZE", "0")):
        dist.init_process_group("gloo")  # "nccl", and a device per rank, on GPUs
    train(int(os.environ.get("RANK", "0")), max(1, ranks))
    if ranks:
        dist.destroy_process_group()  # after the model, whose reducer may otherwise wait for ever for gloo's threads
