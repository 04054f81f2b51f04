"""DistributedDataParallel: every rank encodes its own pairs, and the loss is that of all ranks' pairs together.

    torchrun --nproc-per-node 2 examples/ddp.py

A pair is one thing, seen through two random lenses; the towers learn which views belong together.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb

BATCH, STEPS = 2048, 21


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
        self.text = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(images), self.text(texts), self.log_scale.exp()


def train() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    lenses = torch.randn(2, 32, 128) / 32**0.5
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1 + rank)  # every rank has pairs of its own

    for step in range(STEPS):
        things = torch.randn(BATCH // world_size, 32)
        image_features, text_features, scale = model(things @ lenses[0], things @ lenses[1])
        # Negatives come from all ranks. DDP averages the gradients, and has those of one process with the whole batch.
        loss = mb.clip_loss(image_features, text_features, scale, normalize=True, group=dist.group.WORLD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")  # the same on every rank


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl", and a device per rank, on GPUs
    train()
    dist.destroy_process_group()  # after the model, whose reducer may otherwise wait for ever for gloo's threads
