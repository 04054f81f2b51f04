"""transformers' Trainer on a CLIPModel, with the loss of the whole batch in place of the model's own.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

An image is 2 × 2 pixels of 16 colours; its text says which colour is where.
"""

import gc
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments

import megabatch as mb


class ContrastiveTrainer(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        clip = self.accelerator.unwrap_model(model)  # calling it would form all logits; its towers do not
        options = {"chunk_size": 64, "select": "pooler_output", "module": model}  # who reduces gradients over ranks
        image = mb.chunked(clip.get_image_features, inputs["pixel_values"], **options)
        text = mb.chunked(clip.get_text_features, inputs["input_ids"], **options)
        # The pairs of all ranks together; WORLD is None in a single process.
        return mb.clip_loss(image, text, clip.logit_scale.exp(), normalize=True, group=dist.group.WORLD)


def make_pairs(count: int) -> list[dict[str, Tensor]]:
    colours, palette = torch.randint(0, 16, (count, 4)), torch.randn(16, 3)
    images = palette[colours].transpose(1, 2).view(count, 3, 2, 2)
    texts = torch.cat([colours + 16 * torch.arange(4), torch.full((count, 1), 64)], dim=1)  # 64 ends a text
    return [{"pixel_values": image, "input_ids": text} for image, text in zip(images, texts, strict=True)]


def main() -> None:
    torch.manual_seed(0)
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**tower, "image_size": 2, "patch_size": 1}
    text = {**tower, "vocab_size": 65, "max_position_embeddings": 5, "bos_token_id": 64, "eos_token_id": 64}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=256,
            max_steps=20,
            learning_rate=5e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_find_unused_parameters=False,  # there are none, and the scale is used outside of the towers
        )
        ContrastiveTrainer(model, arguments, train_dataset=make_pairs(8192)).train()


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # by the trainer, which leaves it to us to end it
        gc.collect()  # the trainer first, whose parts hold each other and the group
        dist.destroy_process_group()
