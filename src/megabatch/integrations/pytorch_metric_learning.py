"""pytorch-metric-learning's NTXentLoss and SupConLoss, in linear memory.

    - from pytorch_metric_learning.losses import NTXentLoss, SupConLoss
    + from megabatch.integrations.pytorch_metric_learning import NTXentLoss, SupConLoss

Subclasses of the originals that replace only the computation: reducers, regularizers, statistics, SelfSupervisedLoss,
CrossBatchMemory (which computes a matrix of its own) and DistributedLossWrapper work as before. That wrapper gathers
the rows of all ranks before it calls the loss, so the loss does not communicate; without it, on several ranks, a
warning in the log says that negatives are those of this rank. `megabatch.supcon_loss(…, group=…)` uses a ring instead.

Not supported: distances other than CosineSimilarity and DotProductSimilarity, and miners that choose negatives. Losses
of bf16/fp16 embeddings are float32.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

import megabatch as mb

from .common import as_tensor, log_local_negatives, not_importable
from .pairs import ids_of_labels, ids_of_pairs, num_negatives, positive_pairs, range_of

try:
    from pytorch_metric_learning import distances, losses
    from pytorch_metric_learning.utils.common_functions import labels_or_indices_tuple_required
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
except ImportError as error:
    name = "megabatch.integrations.pytorch_metric_learning"
    package = "pytorch-metric-learning 2.5 or newer"
    raise not_importable(name, package, "pytorch_metric_learning", error) from error

__all__ = ["NTXentLoss", "SupConLoss"]

Tuple = tuple[Tensor, ...]


def __dir__() -> list[str]:
    return __all__


class _Linear(losses.GenericPairLoss):
    """Shared by both losses; comes before the original in the method resolution order."""

    def __init__(self, temperature: float, memory_budget: int | str | None, backend: str, **kwargs: Any) -> None:
        super().__init__(temperature=temperature, **kwargs)
        self.options = {"memory_budget": memory_budget, "backend": backend}
        self._has_logged = False
        self._check_distance()

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Tuple | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        labels_or_indices_tuple_required(labels, indices_tuple)
        self._check_distance()
        if not self._has_logged and not _is_wrapped():
            remedy = "Wrap it in pytorch_metric_learning.utils.distributed.DistributedLossWrapper"
            log_local_negatives(type(self).__name__, remedy)
        self._has_logged = True
        if self.distance.collect_stats:
            normalized = (self.distance.maybe_normalize(x) for x in (embeddings, ref_emb))
            self.distance.set_default_stats(embeddings, ref_emb, *normalized)
        if ref_emb is not embeddings and not ref_emb.requires_grad:
            ref_emb = ref_emb.clone()  # a memory may be written to before the backward
        if indices_tuple is None:
            assert labels is not None
            found = self._of_labels(embeddings, ref_emb, *ids_of_labels(labels, ref_labels))
        else:
            listed = [x.to(embeddings.device) for x in indices_tuple]
            a1, p, a2, n = listed if len(listed) == 4 else (*listed[:2], *listed[::2])
            if _counts_for_nothing(len(a1), len(a2)):
                return self.zero_losses()  # type: ignore[no-any-return]
            found = self._of_pairs(embeddings, ref_emb, labels, ref_labels, a1, p, a2, n)
        return self.zero_losses() if found is None else {"loss": found}

    def _check_distance(self) -> None:
        distance, name = self.distance, type(self).__name__
        if type(distance) not in (distances.CosineSimilarity, distances.DotProductSimilarity):
            raise ValueError(
                f"{name}: distance must be CosineSimilarity or DotProductSimilarity, got {type(distance).__name__}. "
                f"Use pytorch_metric_learning.losses.{name} for others."
            )
        if (distance.p, distance.power) != (2, 1):
            raise ValueError(
                f"{name}: distance must have p=2 and power=1, got p={distance.p} and power={distance.power}. "
                f"Use pytorch_metric_learning.losses.{name} for others."
            )

    def _keywords(self) -> dict[str, Any]:
        scale = torch.ones(1, dtype=torch.float64) / self.temperature  # which may be negative
        normalizes = bool(self.distance.normalize_embeddings)
        return {"logit_scale": scale, "normalize": normalizes, "reduction": "none", "group": None, **self.options}

    def _refuse_pairs(self, what: str, got: str) -> None:
        name = type(self).__name__
        raise ValueError(
            f"{name}: indices_tuple must leave all {what} in, each once, because this loss takes all of them, got "
            f"{got}. Use pytorch_metric_learning.losses.{name} with miners that choose negatives."
        )


class NTXentLoss(_Linear, losses.NTXentLoss):
    """`pytorch_metric_learning.losses.NTXentLoss` without its cubic memory: the same values and gradients.

    Every pair (a, p) of rows of one label has a loss, with all rows n of other labels as negatives:

        s = embeddings @ ref_emb.T / temperature
        -log(exp(s[a, p]) / (exp(s[a, p]) + exp(s[a, n]).sum()))

    Memory and time are those of `megabatch.info_nce_loss` with one query per pair, or half of that if every label
    occurs twice, as in SimCLR. m rows of one label make m * (m - 1) pairs: many, for few labels in a large batch.

    In float32 the original's losses are at most 87 and have no gradient there; these have no such limit.

    An `indices_tuple` may have any positives; the negatives of their anchors must be all rows of other labels, once
    each. Without labels, rows connected by positive pairs have one label.

    Args:
        temperature: Similarities are divided by it.
        memory_budget, backend: As in `megabatch.info_nce_loss`.
        kwargs: Of the original: distance, reducer, embedding_regularizer, embedding_reg_weight, collect_stats.
    """

    def __init__(
        self, temperature: float = 0.07, *, memory_budget: int | str | None = None, backend: str = "auto", **kwargs: Any
    ) -> None:
        super().__init__(temperature, memory_budget, backend, **kwargs)

    def _of_labels(self, embeddings: Tensor, ref_emb: Tensor, ids: Tensor, ref_ids: Tensor) -> dict[str, Any] | None:
        anchors, positives = positive_pairs(ids, ref_ids)
        if _counts_for_nothing(len(anchors), num_negatives(ids, ref_ids, len(anchors))):
            return None
        if ref_emb is embeddings and ref_ids is ids and bool((ids.bincount() == 2).all()):
            first, second = (x[anchors < positives] for x in (anchors, positives))
            values: Any = mb.nt_xent_loss(embeddings[first], embeddings[second], **self._keywords())
            values = values[torch.cat([first, second]).argsort()]
        else:
            values = self._pair_losses(embeddings, ref_emb, ids, ref_ids, anchors, positives)
        return {"losses": values, "indices": (anchors, positives), "reduction_type": "pos_pair"}

    def _of_pairs(
        self,
        embeddings: Tensor,
        ref_emb: Tensor,
        labels: Tensor | None,
        ref_labels: Tensor | None,
        a1: Tensor,
        p: Tensor,
        a2: Tensor,
        n: Tensor,
    ) -> dict[str, Any]:
        width = len(ref_emb)
        if labels is None or ref_labels is None:
            ids, ref_ids = ids_of_pairs(a1, p, len(embeddings), None if ref_emb is embeddings else width)
        else:
            ids, ref_ids = ids_of_labels(labels, ref_labels)
        is_anchor = torch.zeros_like(ids, dtype=torch.bool).index_fill(0, a1, True)
        a2, n = (x[is_anchor[a2]] for x in (a2, n))
        listed = a2.bincount(minlength=len(ids))
        due = width - ref_ids.bincount(minlength=len(ids) + width)[ids]
        others = bool((ids[a2] != ref_ids[n]).all()) and len(torch.unique(a2 * width + n)) == len(a2)
        if not (others and torch.equal(listed[is_anchor], due[is_anchor]) and torch.equal(ids[a1], ref_ids[p])):
            self._refuse_pairs("negatives", f"{len(a2)} for anchors that have {int(due[is_anchor].sum())}")
        pairs, place = torch.unique(a1 * width + p, return_inverse=True)
        values = self._pair_losses(embeddings, ref_emb, ids, ref_ids, pairs // width, pairs % width)
        return {"losses": values[place], "indices": (a1, p), "reduction_type": "pos_pair"}

    def _pair_losses(
        self, embeddings: Tensor, ref_emb: Tensor, ids: Tensor, ref_ids: Tensor, anchors: Tensor, positives: Tensor
    ) -> Any:
        which: dict[str, Any] = {"query_ids": ids[anchors], "key_ids": ref_ids, "positives": positives}
        return mb.info_nce_loss(embeddings[anchors], ref_emb, **which, same_ids="mask", **self._keywords())


class SupConLoss(_Linear, losses.SupConLoss):
    """`pytorch_metric_learning.losses.SupConLoss` without the matrix of similarities: the same values and gradients.

    Equals `megabatch.supcon_loss(embeddings, labels, temperature=temperature, normalize=True, reduction="none")`,
    passed to the reducer. With `ref_emb`, the columns are its rows.

    An `indices_tuple` must list, for every anchor that has positives, all rows as positives or negatives, except one at
    most, such as the anchor itself.

    Args:
        temperature: Similarities are divided by it.
        memory_budget, backend: As in `megabatch.supcon_loss`.
        kwargs: Of the original: distance, reducer, embedding_regularizer, embedding_reg_weight, collect_stats.
    """

    def __init__(
        self, temperature: float = 0.1, *, memory_budget: int | str | None = None, backend: str = "auto", **kwargs: Any
    ) -> None:
        super().__init__(temperature, memory_budget, backend, **kwargs)

    def _of_labels(self, embeddings: Tensor, ref_emb: Tensor, ids: Tensor, ref_ids: Tensor) -> dict[str, Any] | None:
        num_positives = ref_ids.bincount(minlength=len(ids) + len(ref_ids))[ids] - int(ref_ids is ids)
        total = int(num_positives.sum())
        if _counts_for_nothing(total, num_negatives(ids, ref_ids, total)):
            return None
        if ref_ids is not ids:
            # A query must have a positive: the last of its label, or, where there is none, any, which then weighs 0.
            last = ids.new_zeros(len(ids) + len(ref_ids)).scatter_reduce(0, ref_ids, range_of(ref_ids), "amax")[ids]
            values: Any = mb.info_nce_loss(
                embeddings,
                ref_emb,
                query_ids=ids,
                key_ids=ref_ids,
                positives=last,
                same_ids="positive",
                weight=num_positives.clamp(max=1),
                **self._keywords(),
            )
        elif ref_emb is embeddings:
            values = mb.supcon_loss(embeddings, ids, **self._keywords())
        else:
            values = self._but_for_one(embeddings, ref_emb, *positive_pairs(ids, ref_ids), range_of(ids))
        return {"losses": values, "indices": range_of(ids), "reduction_type": "element"}

    def _of_pairs(
        self, embeddings: Tensor, ref_emb: Tensor, _: object, __: object, a1: Tensor, p: Tensor, a2: Tensor, n: Tensor
    ) -> dict[str, Any]:
        indices, width = range_of(embeddings), len(ref_emb)
        has_positives = torch.zeros_like(indices, dtype=torch.bool).index_fill(0, a1, True)
        positives, negatives = torch.unique(a1 * width + p), torch.unique(a2 * width + n)
        pairs = torch.cat([positives, negatives])
        rows = pairs // width
        listed = rows.bincount(minlength=len(indices))
        fewest = int(listed[has_positives].min())
        if len(torch.unique(pairs)) < len(pairs) or fewest < width - 1:
            self._refuse_pairs("pairs", f"an anchor with {fewest} of {width} rows")
        left_out = width * (width - 1) // 2 - torch.zeros_like(indices).index_add(0, rows, pairs % width)
        left_out = left_out.where(listed < width, -1)
        values = self._but_for_one(embeddings, ref_emb, positives // width, positives % width, left_out)
        return {"losses": values, "indices": indices, "reduction_type": "element"}

    def _but_for_one(
        self, embeddings: Tensor, ref_emb: Tensor, anchors: Tensor, positives: Tensor, left_out: Tensor
    ) -> Tensor:
        """From pairs in order, where `left_out` is the one row of `ref_emb` that is no column of each anchor, or -1."""
        keywords = self._keywords()
        rows, counts = torch.unique(anchors, return_counts=True)
        starts = counts.cumsum(0) - counts
        first = positives[starts]
        keys: dict[str, Any] = {"query_ids": left_out[rows], "key_ids": range_of(ref_emb), "positives": first}
        values = as_tensor(mb.info_nce_loss(embeddings[rows], ref_emb, **keys, same_ids="mask", **keywords))
        # As if the first positive were the only one; the mean of all is what counts.
        query, key = (x if x.dtype == torch.float64 else x.float() for x in (embeddings, ref_emb))
        if keywords["normalize"]:
            query, key = normalize(query, dim=1), normalize(key, dim=1)
        further = key[first] - embedding_bag(positives, key, starts, mode="mean")
        values += keywords["logit_scale"] * (query[rows] * further).sum(1)
        return values.new_zeros(len(embeddings)).index_copy(0, rows, values)


def _is_wrapped() -> bool:
    """Whether DistributedLossWrapper, which gathers the rows of all ranks, makes this call. It leaves no other sign."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), DistributedLossWrapper):
            return True
        frame = frame.f_back
    return False


def _counts_for_nothing(num_positives: int, num_negatives: int) -> bool:
    """Where the originals say that there is no loss: one pair of each is not enough for them."""
    return min(num_positives, num_negatives) == 0 or max(num_positives, num_negatives) == 1
