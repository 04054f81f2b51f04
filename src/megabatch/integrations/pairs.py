"""Rows that belong together, found without a matrix of all pairs."""

import torch
from torch import Tensor


def tie(left: Tensor, right: Tensor, count: int) -> Tensor:
    """For each of `count` things, the least that pairs (left[k], right[k]) tie it to, directly or through others."""
    least = torch.arange(count, device=left.device)
    while True:
        lower = torch.minimum(least[left], least[right])
        tied = least.scatter_reduce(0, left, lower, "amin").scatter_reduce(0, right, lower, "amin")
        tied = tied[tied]  # those that were tied to this one follow it
        if torch.equal(tied, least):
            return tied
        least = tied


def ids_of_labels(labels: Tensor, ref_labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Labels of any dtype as numbers from 0. They are one tensor twice where a row is no positive of itself."""
    if ref_labels is None or ref_labels is labels:
        ids = torch.unique(labels, return_inverse=True)[1]
        return ids, ids
    ids = torch.unique(torch.cat([labels, ref_labels]), return_inverse=True)[1]
    return ids[: len(labels)], ids[len(labels) :]


def ids_of_pairs(anchors: Tensor, positives: Tensor, num_rows: int, num_refs: int | None) -> tuple[Tensor, Tensor]:
    """One id for all rows that pairs tie together; `num_refs` is None where positives are rows of the same tensor."""
    if num_refs is None:
        ids = tie(anchors, positives, num_rows)
        return ids, ids
    ids = tie(anchors, positives + num_rows, num_rows + num_refs)
    return ids[:num_rows], ids[num_rows:]


def positive_pairs(ids: Tensor, ref_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of one id, those of each anchor in order; without the anchor itself where the ids are one tensor."""
    of_id = ref_ids.bincount(minlength=len(ids) + len(ref_ids))
    count = of_id[ids]
    anchors = range_of(ids).repeat_interleave(count)
    shift = (of_id.cumsum(0) - of_id)[ids] - (count.cumsum(0) - count)
    positives = ref_ids.argsort(stable=True)[range_of(anchors) + shift[anchors]]
    if ref_ids is not ids:
        return anchors, positives
    others = anchors != positives
    return anchors[others], positives[others]


def num_negatives(ids: Tensor, ref_ids: Tensor, num_positives: int) -> int:
    return len(ids) * len(ref_ids) - num_positives - (len(ids) if ref_ids is ids else 0)


def range_of(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)
