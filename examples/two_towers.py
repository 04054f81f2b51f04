"""Train two small towers at a large batch, on one process or many.

    python examples/two_towers.py
    torchrun --nproc-per-node 2 examples/two_towers.py

Every image shows four patches of colour; its text says which colour is where.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb

COLOURS, PATCHES, SIDE = 16, 4, 8  # a patch is SIDE x SIDE pixels
PALETTE = torch.randint(0, 256, (COLOURS, 3), generator=torch.Generator().manual_seed(0))


class TwoTowers(nn.Module):
    def __init__(self, width: int = 128, dim: int = 64) -> None:
        super().__init__()
        patches = nn.Conv2d(3, width, kernel_size=SIDE, stride=SIDE)
        self.image = nn.Sequential(patches, nn.GELU(), nn.Flatten(), nn.Linear(PATCHES * width, dim))
        words = nn.EmbeddingBag(PATCHES * COLOURS, width)
        self.text = nn.Sequential(words, nn.Linear(width, width), nn.GELU(), nn.Linear(width, dim))
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())

    def forward(self, images: Tensor, tokens: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        # Images stay uint8 in host memory: each chunk goes to the device, and becomes float, when its turn comes.
        image = mb.chunked(self.encode_image, images, chunk_size=chunk, transform=to_float)
        return image, mb.chunked(self.encode_text, tokens, chunk_size=chunk), self.log_scale.exp()

    def encode_image(self, images: Tensor) -> Tensor:
        return normalize(self.image(images), dim=-1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        return normalize(self.text(tokens), dim=-1)


def make_pairs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images, uint8 `[N, 3, 8, 32]`, and their texts, `[N, 4]` tokens."""
    colours = torch.randint(0, COLOURS, (count, PATCHES), generator=generator)
    row = PALETTE[colours].repeat_interleave(SIDE, dim=1).transpose(1, 2)  # of pixels: [N, 3, 32]
    images = row[:, :, None] + torch.randint(-30, 31, (count, 3, SIDE, PATCHES * SIDE), generator=generator)
    return images.clamp(0, 255).to(torch.uint8), colours + COLOURS * torch.arange(PATCHES)


def to_float(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2048, help="pairs of all ranks together")
    parser.add_argument("--chunk", type=int, default=256, help="pairs whose activations are held at a time")
    args = parser.parse_args()

    # torchrun says which rank this is. Without it there is one, and all below is the same.
    backend, device = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    train(args, device)
    dist.destroy_process_group()  # after the model, whose reducer may otherwise wait for ever for gloo's threads


def train(args: argparse.Namespace, device: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1 + rank)  # every rank has pairs of its own
    ddp = DistributedDataParallel(TwoTowers().to(device))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-3)

    for step in range(args.steps):
        # The chunks are formed in the forward of what is wrapped: DDP reduces every gradient once per step.
        image, text, scale = ddp(*make_pairs(args.batch // world_size, data), args.chunk)
        # The negatives of a pair are all others, of all ranks; the loss is that of the whole batch on every rank.
        loss = mb.clip_loss(image, text, scale, normalize=False, group=dist.group.WORLD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step:3d}  loss {loss.item():.3f}  scale {scale.item():.2f}", flush=True)

    with torch.no_grad():
        image, text, _ = ddp(*make_pairs(1000 // world_size, data), args.chunk)  # that no step has seen
    # Each rank's images look for their texts among those of all ranks. 0: no other text is nearer.
    found = (mb.retrieval_ranks(image, text, group=dist.group.WORLD) == 0).float().mean()
    dist.all_reduce(found)
    if rank == 0:
        print(f"{found.item() / world_size:.1%} of unseen images find their text")


if __name__ == "__main__":
    main()
