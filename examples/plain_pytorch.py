"""A plain training loop: two towers that run in chunks, and the CLIP loss of the whole batch.

    python examples/plain_pytorch.py

A pair is one thing, seen through two random lenses; the towers learn which views belong together.
"""

import torch
from torch import Tensor, nn

import megabatch as mb

BATCH, CHUNK, STEPS = 2048, 256, 21


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))


def make_pairs(count: int, lenses: Tensor) -> tuple[Tensor, Tensor]:
    things = torch.randn(count, 32)
    image, text = (things @ lens for lens in lenses)
    return image, text


def main() -> None:
    torch.manual_seed(0)
    lenses = torch.randn(2, 32, 128) / 32**0.5
    image_tower, text_tower = tower(), tower()
    criterion = mb.ClipLoss(normalize=True)  # owns the learnable scale
    optimizer = torch.optim.AdamW(
        [*image_tower.parameters(), *text_tower.parameters(), *criterion.parameters()], lr=2e-3
    )

    for step in range(STEPS):
        images, texts = make_pairs(BATCH, lenses)
        # As image_tower(images), with the activations of one chunk at a time.
        image_features = mb.chunked(image_tower, images, chunk_size=CHUNK)
        text_features = mb.chunked(text_tower, texts, chunk_size=CHUNK)
        # Every row has all others as negatives; the matrix of logits is never there.
        loss = criterion(image_features, text_features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
