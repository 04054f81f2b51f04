"""A LightningModule: the loss goes into training_step, and Trainer does as it always does.

    python examples/lightning_module.py
    python examples/lightning_module.py 2    # the batch over two devices

A pair is one thing, seen through two random lenses; the towers learn which views belong together.
"""

import sys

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import megabatch as mb


class TwoTowers(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
        self.text = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, texts = batch
        # In chunks, for the memory of one chunk's activations at a time.
        image_features = mb.chunked(self.image, images, chunk_size=256)
        text_features = mb.chunked(self.text, texts, chunk_size=256)
        # The pairs of all devices together, wherever there are several; WORLD is None where there is one.
        group = dist.group.WORLD
        loss = mb.clip_loss(image_features, text_features, self.log_scale.exp(), normalize=True, group=group)
        if index % 5 == 0:
            self.print(f"step {self.global_step:3d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(devices: int = 1) -> None:
    lightning.seed_everything(0, verbose=False)
    things, lenses = torch.randn(32768, 32), torch.randn(2, 32, 128) / 32**0.5
    pairs = TensorDataset(things @ lenses[0], things @ lenses[1])
    loader = DataLoader(pairs, batch_size=2048 // devices, shuffle=True)
    quiet = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    trainer = lightning.Trainer(accelerator="cpu", devices=devices, max_epochs=1, **dict.fromkeys(quiet, False))
    trainer.fit(TwoTowers(), loader)
    del trainer  # and the model with it, whose reducer may otherwise wait for ever for gloo's threads
    if dist.is_initialized():
        dist.destroy_process_group()  # which Lightning does for NCCL only


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
