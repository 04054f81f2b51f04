"""Ids of equal texts in a batch, by which losses mask duplicates."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from .pairs import tie

NOWHERE_ELSE = -1  # the id of a text that no pair of the batch has


def hash_tokens(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """A 64-bit number per row, the same for the same tokens, wherever in the row the padding is."""
    place = attention_mask.long().cumsum(1)
    # Products that wrap round: torch has no unsigned integers to multiply. The constants are odd, and arbitrary.
    mixed = _mix(input_ids.long() * -0x61C8864680B583EB + place * 0x2545F4914F6CDD1D)
    return _mix((mixed * attention_mask.bool()).sum(1))


def _mix(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of `x`, and no two numbers give the same."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def ids_of_rows(anchors: Tensor, positives: Tensor, negatives: Tensor, gather: bool) -> tuple[Tensor, Tensor]:
    """Ids of rows and of negatives, from the hashes of their texts.

    Two rows have one id where they share a text, as anchor or positive, directly or through other rows. A negative has
    the id of the rows that have its text as their anchor or positive; or none of theirs.
    """
    everyones_anchors, everyones_positives = (gather_rows(x) if gather else x for x in (anchors, positives))
    texts = torch.unique(torch.cat([everyones_anchors, everyones_positives]), sorted=True)
    left, right = torch.searchsorted(texts, everyones_anchors), torch.searchsorted(texts, everyones_positives)
    group = tie(left, right, len(texts))
    _warn_of_a_large_group(group[left])
    rows = group[torch.searchsorted(texts, anchors)]
    place = torch.searchsorted(texts, negatives).clamp_(max=len(texts) - 1)
    return rows, torch.where(texts[place] == negatives, group[place], NOWHERE_ELSE)


def _warn_of_a_large_group(ids: Tensor) -> None:
    largest, count = int(ids.bincount().max()), len(ids)
    if largest > max(16, count // 10):
        warnings.warn(
            f"mask_duplicates=True: {largest} of {count} rows are tied together by texts that they share with others, "
            "and have no negatives among each other. Pass mask_duplicates='positive' or 'anchor' to mask less.",
            stacklevel=2,
        )


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all ranks, of which each may have another number."""
    counts = [rows.new_zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, rows.new_tensor([len(rows)]))
    most = max(int(count) for count in counts)
    padded = [rows.new_zeros(most) for _ in counts]
    dist.all_gather(padded, torch.cat([rows, rows.new_zeros(most - len(rows))]))
    return torch.cat([each[: int(count)] for each, count in zip(padded, counts, strict=True)])
