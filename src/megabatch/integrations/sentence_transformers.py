"""sentence-transformers' losses with in-batch negatives, in linear memory.

    - from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    + from megabatch.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss

Subclasses of the originals: trainers, wrappers and model cards treat them as such.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.ranks import Ranks
from . import same_texts
from .common import all_ranks, check_options, log_local_negatives, not_importable, scale_of
from .directions import Sides, mean_of_all_rows

try:
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer import losses as originals
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises the latter
    name = "megabatch.integrations.sentence_transformers"
    package = "sentence-transformers 6 or newer"
    raise not_importable(name, package, "sentence_transformers", error) from error

__all__ = ["CachedMultipleNegativesRankingLoss", "MultipleNegativesRankingLoss", "NegativeListsCollator"]

# Options of megabatch's losses that say how a loss is computed, not what it is.
_OPTIONS = ("memory_budget", "backend", "tile", "exchange", "overlap")

_INF_CL = """
@misc{cheng2024breakingmemorybarrierinfinite,
      title={Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss},
      author={Zesen Cheng and Hang Zhang and Kehan Li and Sicong Leng and Zhiqiang Hu and Fei Wu and Deli Zhao and Xin Li and Lidong Bing},
      year={2024},
      eprint={2410.17243},
      archivePrefix={arXiv},
      primaryClass={cs.CV},
      url={https://arxiv.org/abs/2410.17243},
}
"""  # noqa: E501


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and hasattr(originals, name):
        raise AttributeError(
            f"{__name__} has no {name}, only {', '.join(__all__)}. Import {name} from {originals.__name__}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class MultipleNegativesRankingLoss(originals.MultipleNegativesRankingLoss):
    """sentence-transformers' MultipleNegativesRankingLoss without the matrices of similarities.

    The same arguments, values and gradients; works in a SentenceTransformerTrainer. With `gather_across_devices` every
    rank returns the loss of all ranks' rows (the original returns the part of its own rows), and ranks may hold
    different numbers of rows. Not supported: similarities other than cos_sim and dot_score, hardness modes, and
    "doc_to_doc" without "doc_to_query". These raise an error.

    Args:
        model: SentenceTransformer model.
        scale: 1 / temperature.
        similarity_fct: `util.cos_sim`, `util.dot_score`, or `model.similarity` where it is one of them.
        gather_across_devices: Whether the rows of all ranks are one batch. If not, each rank has only its own rows as
            negatives, and a warning in the log says so.
        directions: As the original's: "query_to_doc" and any of "query_to_query", "doc_to_query", "doc_to_doc".
        partition_mode: As the original's: "joint" or "per_direction".
        hardness_mode: Must be None.
        hardness_strength: Without a mode it has no effect, as in the original.
        mask_duplicates: Which texts are not used as negatives of a row, on all ranks if gathered. "positive": those
            equal to its positive. "anchor": the positives of rows with the same anchor. True: both, and all texts that
            rows share with it, directly or through other rows. That may be too many in a batch with many duplicates;
            a warning says so. Texts are equal if their tokens are.
        options: Of `megabatch.info_nce_loss`: memory_budget, backend, tile, exchange, overlap.
    """

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = util.cos_sim,
        gather_across_devices: bool = False,
        directions: tuple[str, ...] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        mask_duplicates: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions,
            partition_mode,
            hardness_mode,
            hardness_strength,
        )
        check_options(self._name(), options, _OPTIONS)
        self.mask_duplicates = mask_duplicates
        self.options = options
        self._has_logged = False
        self._hashes: list[Tensor] | ValueError | None = None
        self._check_settings()

    def _name(self) -> str:
        """The name in errors."""
        return type(self).__name__

    def _check_settings(self) -> None:
        """Refuse what the original offers and this class does not. Settings may change after construction."""
        name = self._name()
        if self.hardness_mode is not None:
            raise ValueError(
                f"{name}: hardness_mode must be None, got {self.hardness_mode!r}. Use sentence-transformers' own loss "
                "for hardness weighting."
            )
        if "doc_to_doc" in self.directions and "doc_to_query" not in self.directions:
            raise ValueError(
                f"{name}: directions must have 'doc_to_query' where they have 'doc_to_doc', got {self.directions}. "
                "Use sentence-transformers' own loss for this combination."
            )
        if self.mask_duplicates not in (False, True, "anchor", "positive"):
            raise ValueError(
                f"{name}: mask_duplicates must be False, True, 'anchor' or 'positive', got {self.mask_duplicates!r}."
            )
        self._is_cosine()

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of columns (anchor, positive, negatives...); `labels` are not used."""
        columns = list(sentence_features)
        with self.knowing_the_texts_of(columns):
            return super().forward(columns, labels)  # type: ignore[no-any-return]

    @contextmanager
    def knowing_the_texts_of(self, columns: list[dict[str, Tensor]]) -> Iterator[None]:
        """While losses are computed from the embeddings of these columns."""
        try:
            self._hashes = [self._hash(column) for column in columns] if self.mask_duplicates else None
        except ValueError as error:  # raised after the ranks' handshake
            self._hashes = error
        try:
            yield
        finally:
            self._hashes = None

    def _hash(self, column: dict[str, Tensor]) -> Tensor:
        tokens, mask = column.get("input_ids"), column.get("attention_mask")
        if tokens is None or mask is None or tokens.dim() != 2 or mask.shape != tokens.shape:
            raise ValueError(
                f"{self._name()}: mask_duplicates must have padded tokens to compare (input_ids and "
                f"attention_mask), got a column of {', '.join(sorted(column))}. Set mask_duplicates=False."
            )
        return same_texts.hash_tokens(tokens, mask)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of `[N, D]` anchors, `[N, D]` positives and any number of `[K, D]` negatives, of any K.

        Every negative is used for every anchor. `labels` are not used.
        """
        group = all_ranks() if self.gather_across_devices else None
        if not self.gather_across_devices and not self._has_logged:
            log_local_negatives(self._name(), "Pass gather_across_devices=True")
            self._has_logged = True
        query, positive, *hard = self._agree(embeddings, group)
        sides = Sides(query, positive, hard, *self._ids(query, hard, group))
        options = {**self.options, "logit_scale": scale_of(self.scale), "normalize": self._is_cosine(), "group": group}
        queries_among_themselves = "query_to_query" in self.directions
        docs_among_themselves = "doc_to_doc" in self.directions
        if "doc_to_query" not in self.directions:
            return sides.from_queries(queries_among_themselves, **options)
        if self.partition_mode == "per_direction":
            return sides.both_ways(**options)
        # Both are relative to the score of the same pair, so their denominators add up as they are.
        options["reduction"] = "none"
        from_queries = sides.from_queries(queries_among_themselves, **options)
        from_docs = sides.from_docs(docs_among_themselves, **options)
        return mean_of_all_rows(torch.logaddexp(from_queries, from_docs), group)

    def _agree(self, embeddings: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
        """The embeddings, with hard negatives if any rank has some; or what is wrong on any rank, raised on all."""
        ranks = Ranks(self._name(), "" if group is None else group.group_name)
        with ranks.deferred_errors() as errors:
            self._check_settings()
            self._check_columns(embeddings)
        settings = {
            "directions": list(self.directions),
            "partition_mode": self.partition_mode,
            "mask_duplicates": self.mask_duplicates,
        }
        with_negatives = ranks.handshake(settings, [len(embeddings) > 2], errors)
        if any(any(rank) for rank in with_negatives) and len(embeddings) == 2:
            return [*embeddings, embeddings[0][:0]]
        return embeddings

    def _check_columns(self, embeddings: list[Tensor]) -> None:
        name = self._name()
        if len(embeddings) < 2:
            raise ValueError(
                f"{name}: embeddings must be those of anchors and positives at least, got {len(embeddings)}. Give the "
                "dataset two columns of texts or more."
            )
        query, _, *hard = embeddings
        if "doc_to_doc" in self.directions and any(len(column) != len(query) for column in hard):
            # Documents are not compared with those of their own query, so it must be known whose they are.
            raise ValueError(
                f"{name}: negatives must have one row per anchor with 'doc_to_doc', because row i of each belongs with "
                f"anchor i, got {[len(rows) for rows in hard]} for {len(query)}. Drop 'doc_to_doc'."
            )
        if "doc_to_doc" in self.directions and hard and self.mask_duplicates:
            raise ValueError(
                f"{name}: mask_duplicates must be False with 'doc_to_doc' and hard negatives, which are masked by "
                f"their anchor there, got {self.mask_duplicates!r}. Drop one of the three."
            )
        if self.mask_duplicates and self._hashes is None:
            raise ValueError(
                f"{name}: mask_duplicates must have texts to compare, got embeddings alone. Call the loss with "
                "sentence features, or set mask_duplicates=False."
            )
        if isinstance(self._hashes, ValueError):
            raise self._hashes

    def _ids(
        self, query: Tensor, hard: list[Tensor], group: dist.ProcessGroup | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Ids of rows and of negatives, equal where they are the same thing; None where none are compared."""
        if isinstance(self._hashes, list):
            anchors, positives, *negatives = self._hashes
            extra = torch.cat([*negatives, anchors[:0]])
            if self.mask_duplicates == "positive":
                return positives, extra
            if self.mask_duplicates == "anchor":
                return anchors, torch.full_like(extra, same_texts.NOWHERE_ELSE)
            return same_texts.ids_of_rows(anchors, positives, extra, gather=group is not None)
        if {"query_to_query", "doc_to_doc"} & set(self.directions):
            first = dist.get_rank() << 40 if group is not None else 0
            ids = torch.arange(first, first + len(query), device=query.device)
            return ids, ids.new_full((sum(map(len, hard)),), same_texts.NOWHERE_ELSE)
        return None, None

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mask_duplicates": self.mask_duplicates, **self.options}

    @property
    def citation(self) -> str:
        return str(super().citation) + _INF_CL

    def _is_cosine(self) -> bool:
        """Whether rows are normalised before they are multiplied."""
        function = self.similarity_fct
        owner = getattr(function, "__self__", None)
        if owner is not None and getattr(function, "__name__", "") == "similarity":
            function = util.SimilarityFunction.to_similarity_fn(owner.similarity_fn_name)
        if function not in (util.cos_sim, util.pytorch_cos_sim, util.dot_score):
            raise ValueError(
                f"{self._name()}: similarity_fct must be util.cos_sim or util.dot_score, got "
                f"{util.similarity_fct_name(function)}. Use sentence-transformers' own loss for it."
            )
        return function is not util.dot_score


class _LossOfCached(MultipleNegativesRankingLoss):
    def _name(self) -> str:
        return "CachedMultipleNegativesRankingLoss"


class CachedMultipleNegativesRankingLoss(originals.CachedMultipleNegativesRankingLoss):
    """sentence-transformers' CachedMultipleNegativesRankingLoss with a faster loss that needs less memory.

    The encoder runs twice, mini-batch by mini-batch, as in the original. Between the two passes the loss is that of
    MultipleNegativesRankingLoss above, which does not depend on `mini_batch_size`. Over ranks it communicates once per
    step, where the original has two reductions per mini-batch. Arguments are those above and, of the original,
    `mini_batch_size`, `mini_batch_num_tokens` and `show_progress_bar`.
    """

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = util.cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: tuple[str, ...] = ("query_to_doc",),
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        mask_duplicates: bool | str = False,
        **options: Any,
    ) -> None:
        if isinstance(mini_batch_size, bool) or not isinstance(mini_batch_size, int) or mini_batch_size < 1:
            raise ValueError(
                f"{type(self).__name__}: mini_batch_size must be a whole number, 1 or more, got {mini_batch_size!r}. "
                "It is how many texts the encoder takes at a time."
            )
        super().__init__(
            model,
            mini_batch_size=mini_batch_size,
            mini_batch_num_tokens=mini_batch_num_tokens,
            show_progress_bar=show_progress_bar,
        )
        self.loss = _LossOfCached(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions,
            partition_mode,
            hardness_mode,
            hardness_strength,
            mask_duplicates=mask_duplicates,
            **options,
        )

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of columns (anchor, positive, negatives...); `labels` are not used."""
        columns = list(sentence_features)
        with self.loss.knowing_the_texts_of(columns):
            return super().forward(columns, labels)  # type: ignore[no-any-return]

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the embeddings of each column, in mini-batches; with its gradients in them if asked for."""
        loss: Tensor = self.loss.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
        if with_backward:
            loss.backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
        return loss

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        loss: Tensor = self.loss.compute_loss_from_embeddings(embeddings, labels)
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mask_duplicates": self.loss.mask_duplicates, **self.loss.options}

    @property
    def citation(self) -> str:
        return str(super().citation) + _INF_CL


@dataclass
class NegativeListsCollator(SentenceTransformerDataCollator):
    """sentence-transformers' collator for datasets where a row may have any number of negatives, also none.

    The texts of a column of lists are taken one after another: a column of negatives for all anchors of the batch.

        SentenceTransformerTrainer(..., data_collator=NegativeListsCollator(model.preprocess))
    """

    preprocess_fn: Callable[..., Any]

    def __post_init__(self) -> None:
        self.preprocess_fn = partial(_flatten_and_preprocess, self.preprocess_fn)


def _flatten_and_preprocess(preprocess: Callable[..., Any], values: list[Any], **options: Any) -> dict[str, Any]:
    if any(isinstance(value, list | tuple) for value in values):
        values = [text for value in values for text in value or ()]  # None is none, too
    return dict(preprocess(values, **options)) if values else {}
