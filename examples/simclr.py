"""SimCLR with lightly's loss in linear memory: one changed import. Nothing is downloaded.

    python examples/simclr.py

Images are gratings of eight kinds; a view is a crop with noise and another contrast. Training knows no kinds; at the
end unseen images get that of their nearest neighbours.
"""

import torch
from torch import Tensor, nn

import megabatch as mb
from megabatch.integrations.lightly import NTXentLoss  # was: from lightly.loss import NTXentLoss

KINDS, SIDE, CROP, BATCH, STEPS = 8, 20, 16, 512, 31


def make_images(count: int) -> tuple[Tensor, Tensor]:
    """Images `[N, 1, 20, 20]` and their kinds: four directions, each fine and coarse, at any phase."""
    kind = torch.randint(KINDS, (count,))
    angle = (kind % 4) * torch.pi / 4 + 0.1 * torch.randn(count)
    frequency = torch.where(kind < 4, 0.8, 1.6)[:, None, None]
    along = angle.cos()[:, None, None] * torch.arange(SIDE) + angle.sin()[:, None, None] * torch.arange(SIDE)[:, None]
    return torch.sin(frequency * along + 6.3 * torch.rand(count, 1, 1))[:, None], kind


def view(images: Tensor) -> Tensor:
    top, left = torch.randint(SIDE - CROP + 1, (2, len(images), 1, 1))
    row, column = top + torch.arange(CROP)[:, None], left + torch.arange(CROP)
    crops = images[torch.arange(len(images))[:, None, None], 0, row, column][:, None]
    return crops * (0.5 + torch.rand(len(images), 1, 1, 1)) + 0.7 * torch.randn_like(crops)


def main() -> None:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    encoder = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    criterion = NTXentLoss(temperature=0.2)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=5e-3)
    for step in range(STEPS):
        images, _ = make_images(BATCH)
        loss = criterion(head(encoder(view(images))), head(encoder(view(images))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")

    (known, kinds), (unseen, truth) = make_images(2000), make_images(500)
    with torch.no_grad():
        key, query = (encoder(view(x)) for x in (known, unseen))
    _, nearest = mb.similarity_topk(query, key, k=9, normalize=True)
    found = kinds[nearest].mode(dim=1).values == truth
    print(f"{found.float().mean().item():.1%} of unseen images are of their neighbours' kind")


if __name__ == "__main__":
    main()
