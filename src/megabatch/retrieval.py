"""Ranks and nearest keys, over the same tiles as the losses: no matrix of scores is held.

All tiles have one shape, the last ones padded with zeros: a matrix product rounds by the shape of its operands and the
place in them, and equal keys must get equal scores.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import Unpack

from .backends.backend import Backend
from .backends.select import select
from .checks import (
    check_execution_options,
    check_features,
    check_not_empty,
    check_positives,
    check_word,
    group_name,
    parse_budget,
    parse_tile,
)
from .distributed.collectives import Ranks, kind_of, refused_together
from .distributed.parcel import Parcel
from .distributed.ring import Cargo, Turn, pack
from .keywords import LeftOut, SearchKeywords, complete, with_keywords
from .losses.block import Block, Tile
from .losses.spec import Spec
from .tiling.plan import Plan
from .tiling.values import check_positives as check_values_of_positives
from .tiling.values import compute_dtype, inverse_lengths
from .tiling.walk import walk

PADDING = 64  # sides of a tile are multiples of it, so that no product has ragged edges
SIDE = 2048


@with_keywords
@torch.no_grad()
def retrieval_ranks(
    query: Tensor,
    key: Tensor,
    *,
    positives: Tensor | None = None,
    **options: Unpack[SearchKeywords],
) -> Tensor:
    """How many keys score above each query's positive, without the matrix of scores; 0 means it comes first.

    Equals, for scores whose equal keys are rounded equally,

        scores = query @ key.T
        (scores > scores.gather(1, positives[:, None])).sum(1)

    so that recall at k is `(ranks < k).float().mean()`. Keys that score the same as the positive do not count.

    Args:
        query: `[N, D]`.
        key: `[M, D]`, M at least N unless `positives` is given.
        positives: `[N]` integers: the row of this rank's `key` that belongs with each query. Default: row i.

    Returns:
        `[N]` int64. A query whose positive scores NaN gets M: it was not found.
    """
    name = "retrieval_ranks"
    ranks = group_name(name, options.get("group", LeftOut.GROUP))
    with refused_together(name, ranks):
        scores = _Scores(name, query, key, ranks, complete(name, options))
        check_positives(name, positives, query, key, "rank each column of positives by itself")
        if positives is None:
            positives = torch.arange(len(query), device=query.device)
        check_values_of_positives(name, positives, len(key))
    scores.meet()
    positives = positives.long() + scores.start
    bar = torch.empty(len(query), dtype=scores.compute, device=query.device)
    above = torch.zeros(len(query), dtype=torch.int64, device=query.device)
    for strip in scores.strips():
        rows = strip[0].rows
        scores.fill_in(strip, positives, bar)
        for crossing in strip:
            rows.of(above).add_(scores.count_above(scores.of(crossing), rows.of(bar)))
    return torch.where(bar.isnan(), scores.num_keys, above)


@with_keywords
@torch.no_grad()
def similarity_topk(
    query: Tensor,
    key: Tensor,
    k: int,
    **options: Unpack[SearchKeywords],
) -> tuple[Tensor, Tensor]:
    """The k keys that score highest for each query, best first, without the matrix of scores.

    Equals, up to rounding and the order of equal scores, `torch.topk(query @ key.T, k)`.

    Args:
        query: `[N, D]`.
        key: `[M, D]`.
        k: How many, 1 to M.

    Returns:
        Values, `[N, k]` float32 (float64 for float64 features), and indices, `[N, k]` int64. With a group,
        indices count the keys of all ranks in rank order.
    """
    name = "similarity_topk"
    ranks = group_name(name, options.get("group", LeftOut.GROUP))
    with refused_together(name, ranks):
        scores = _Scores(name, query, key, ranks, complete(name, options))
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"{name}: k must be a whole number, got {type(k).__name__}.")
    scores.meet(k)
    values = torch.full((len(query), k), -torch.inf, dtype=scores.compute, device=query.device)
    indices = torch.zeros((len(query), k), dtype=torch.int64, device=query.device)
    for strip in scores.strips():
        best, where = strip[0].rows.of(values), strip[0].rows.of(indices)
        for crossing in strip:
            candidates = scores.of(crossing)
            # Few rows of a late tile still hold one of their query's best. NaN counts as best, as in torch.topk.
            behind = (~(candidates.amax(1) <= best[:, -1])).nonzero()[:, 0]
            found, column = candidates[behind].topk(min(k, candidates.shape[1]))
            best[behind], place = torch.cat([best[behind], found], 1).topk(k)
            where[behind] = torch.cat([where[behind], column + crossing.columns.start], 1).gather(1, place)
    return values, indices


class _Scores:
    """The plane of this rank's queries and everyone's keys, in tiles of one shape."""

    def __init__(self, name: str, query: Tensor, key: Tensor, ranks: str, options: SearchKeywords) -> None:
        check_features(name, query=query, key=key)
        if not ranks:
            check_not_empty(name, "query", query)
            check_not_empty(name, "key", key)
        check_word(name, "normalize", options["normalize"], (True, False))
        check_execution_options(name, options)
        self.name, self.query, self.key, self.normalize = name, query, key, options["normalize"]
        self.exchange, self.overlap = options["exchange"], options["overlap"]
        self.ranks = Ranks(name, ranks, device=key.device)
        self.ranks.check_device()
        self.compute = compute_dtype(query)
        chosen = select(name, options["backend"], query.device, query.dtype)
        self.tile = parse_tile(name, options["tile"])
        self.budget = parse_budget(name, options["memory_budget"]) or chosen.default_budget
        product = query.dtype if chosen.multiplies_halves(query.device, self.normalize) else None
        self.backend: Backend = chosen(Spec("softmax"), 1.0, 0.0, self.compute, query.device, product=product)

    def meet(self, k: int | None = None) -> None:
        """Learn how many keys every rank has, and plan accordingly."""
        same = kind_of(self.key) | {"normalize": self.normalize, "exchange": self.exchange, "k": k}
        guests = self.ranks.agree(same, {"keys": len(self.key), "budget": self.budget})
        self.keys = [guest["keys"] for guest in guests]
        self.num_keys = sum(self.keys)
        if self.num_keys == 0:
            raise ValueError(f"{self.name}: the group must bring at least one key, got none on all of its ranks.")
        if k is not None and not 1 <= k <= self.num_keys:
            raise ValueError(f"{self.name}: k must be from 1 to the number of keys, {self.num_keys}, got {k}.")
        self.start = sum(self.keys[: self.ranks.rank])
        gathered = self.num_keys * self.key.shape[1] * self.key.element_size()
        fits = gathered <= min(guest["budget"] for guest in guests)
        self.gathers = fits if self.exchange == "auto" else self.exchange == "gather"
        with refused_together(self.name, self.ranks.name):
            self.plan = Plan(*self._sides())
        self.ranks.agree({}, {})
        self._ones = torch.ones(self.plan.columns, dtype=self.compute, device=self.key.device)

    def _sides(self) -> tuple[int, int]:
        """Height and width of a tile: multiples of the padding that fit the budget."""
        element, width = self.compute.itemsize, self.query.shape[1]
        longest = _padded(len(self.query)), _padded(max(self.keys))
        sides = min(SIDE, longest[0]), min(SIDE, longest[1])
        if self.tile is not None:
            sides = min(_padded(self.tile[0]), longest[0]), min(_padded(self.tile[1]), longest[1])

        def needed(sides: tuple[int, int]) -> int:
            return element * (sides[0] * sides[1] + 2 * sum(sides) * width)

        while self.tile is None and needed(sides) > self.budget and max(sides) > PADDING:
            sides = _padded(sides[0] // 2), _padded(sides[1] // 2)
        if needed(sides) > self.budget:
            raise ValueError(
                f"{self.name}: memory_budget must be at least {needed(sides)} bytes for a tile of {sides[0]} x "
                f"{sides[1]} and features of width {width}, got {self.budget}. The default is "
                f"{self.backend.default_budget}."
            )
        return sides

    def strips(self) -> Iterator[list[Tile]]:
        """The tiles by strips of queries: first those of the own keys, then of every visiting rank's."""
        rows = self._padded_strips(self.query, self.plan.rows)
        for owner, keys in self._visits():
            columns = self._padded_strips(keys, self.plan.columns, sum(self.keys[:owner]))
            self._end = columns[0].start + len(keys) if columns else 0
            yield from (strip for strip in walk(self.plan, rows, columns, symmetric=False) if strip)

    def _visits(self) -> Iterator[tuple[int, Tensor]]:
        if self.ranks.size == 1:
            yield 0, self.key
            return
        parcels = [Parcel(((self.key.dtype, (length, self.key.shape[1])),)) for length in self.keys]
        own = pack(self.ranks.rank, parcels, [self.key], self.key.device)
        sizes = [parcel.nbytes for parcel in parcels]
        cargo = Cargo(own, sizes, [0] * len(sizes), merge=_nothing, take_home=_nothing)
        for visit in Turn(self.ranks, self.ranks.size - 1, self.overlap, self.gathers).visits(cargo):
            if visit.parcel is not None:
                yield visit.owner, parcels[visit.owner].open(visit.parcel)[0]
            elif not visit.again:
                yield visit.owner, self.key

    def _padded_strips(self, features: Tensor, side: int, offset: int = 0) -> list[Block]:
        strips = []
        for start, part in zip(range(0, len(features), side), torch.split(features, side), strict=False):
            padded = torch.nn.functional.pad(part, (0, 0, 0, side - len(part))) if len(part) < side else part
            strip = Block(padded, offset + start)
            if self.normalize:
                strip.inverse_norm = inverse_lengths(strip.features)
            strips.append(strip)
        return strips

    def of(self, tile: Tile) -> Tensor:
        """Scores of one tile, without its padding, until the next is asked for."""
        with torch.autocast(tile.rows.features.device.type, enabled=False):
            scores = self.backend.scores(tile)
        return scores[: len(self.query) - tile.rows.start, : self._end - tile.columns.start]

    def fill_in(self, strip: list[Tile], positives: Tensor, bar: Tensor) -> None:
        """The positives' scores that are in this strip, from the same products that the others' come from."""
        positives, bar = strip[0].rows.of(positives), strip[0].rows.of(bar)
        for tile in strip:
            column = positives - tile.columns.start
            here = (column >= 0) & (positives < min(tile.columns.start + len(tile.columns), self._end))
            if here.any():
                scores = self.of(tile)
                found = scores.gather(1, column.clamp_(0, scores.shape[1] - 1)[:, None])[:, 0]
                bar.copy_(torch.where(here, found, bar))

    def count_above(self, scores: Tensor, bar: Tensor) -> Tensor:
        # A product counts faster than a sum of booleans; whole numbers of this size are exact in floating point.
        above = torch.gt(scores, bar[:, None], out=scores)
        with torch.autocast(scores.device.type, enabled=False):
            return torch.mv(above, self._ones[: scores.shape[1]]).long()


def _padded(length: int) -> int:
    return max(PADDING, -(-length // PADDING) * PADDING)


def _nothing(*_: object) -> None:
    """Scores are counted where they are computed: nobody adds anything up for a key."""
