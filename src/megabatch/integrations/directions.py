"""The directions of an in-batch loss on texts, each as one call of a loss of megabatch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megabatch as mb

from .common import as_tensor


@dataclass(frozen=True)
class Sides:
    """The embeddings of a batch, and ids of its rows and hard negatives where some pairs are masked."""

    query: Tensor
    doc: Tensor
    hard: list[Tensor]
    ids: Tensor | None
    hard_ids: Tensor | None

    def from_queries(self, among_themselves: bool, **options: Any) -> Tensor:
        """Each query's document among all documents and hard negatives and, if asked for, the other queries."""
        negatives, ids = self.hard, [self.hard_ids] if self.hard else []
        if among_themselves:
            negatives, ids = [*self.hard, self.query], [self.hard_ids, self.ids]
        return self._info_nce(self.query, self.doc, negatives, ids, **options)

    def from_docs(self, among_themselves: bool, **options: Any) -> Tensor:
        """Each document's query among all queries and, if asked for, all documents but those of its own query."""
        negatives, ids = [], []
        if among_themselves:
            negatives, ids = [self.doc, *self.hard], [self.ids] * (1 + len(self.hard))
        return self._info_nce(self.doc, self.query, negatives, ids, **options)

    def both_ways(self, **options: Any) -> Tensor:
        """The mean of the two directions."""
        if not self.hard:
            return as_tensor(mb.clip_loss(self.query, self.doc, ids=self.ids, **options))
        return (self.from_queries(False, **options) + self.from_docs(False, **options)) / 2

    def _info_nce(
        self, query: Tensor, key: Tensor, negatives: list[Tensor], negative_ids: list[Tensor | None], **options: Any
    ) -> Tensor:
        given = [each for each in negative_ids if each is not None]
        which: dict[str, Any] = {"query_ids": self.ids, "key_ids": self.ids}
        if negatives:
            which |= {"negatives": torch.cat(negatives), "negative_ids": torch.cat(given) if given else None}
        return as_tensor(mb.info_nce_loss(query, key, **which, **options))


def mean_of_all_rows(losses: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Its value is the mean over the rows of all ranks, and so is what trainers make of its gradients by averaging."""
    if group is None:
        return losses.mean()
    total = torch.stack([losses.detach().double().sum(), losses.new_tensor(len(losses), dtype=torch.float64)])
    dist.all_reduce(total, group=group)
    share = losses.sum() * (dist.get_world_size(group) / total[1])
    return share + ((total[0] / total[1]).to(share.dtype) - share.detach())
