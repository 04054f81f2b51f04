"""Ranks and nearest keys over the same tiles as the losses: the matrix of scores is never held."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import checks
from .backends import workspace
from .backends.backend import Backend, float32_precision
from .backends.select import select
from .callers import call_site
from .distributed.ranks import Ranks, refuse_together
from .keywords import SearchKeywords, complete, with_keywords
from .losses.block import Block, IndexedTargets, Tile
from .losses.spec import Spec
from .tiling.guards import check_indices, row_norms
from .tiling.handshake import GroupInfo, RankInfo, feature_facts
from .tiling.layout import Layout
from .tiling.options import LossInputs, compute_dtype

SIDE, ACCELERATOR_SIDE, SMALLEST_SIDE = 2048, 8192, 64
CAN_LOOK = ("cpu",)  # devices whose values the host reads without waiting
PAIRS_AT_ONCE = 2**21  # elements of features, where single pairs are scored again
FEWEST_LISTED, SHARE_LISTED = 4096, 2048  # pairs of a tile, and of how many one, that can be scored again unseen
Exclude = Tensor | tuple[Tensor, Tensor] | None


@with_keywords
@torch.no_grad()
def retrieval_ranks(
    query: Tensor, key: Tensor, *, positives: Tensor | None = None, **options: Unpack[SearchKeywords]
) -> Tensor:
    """How many keys score above each query's positive, without the matrix of scores; 0 means it comes first.

    Equals, up to rounding,

        scores = query @ key.T
        (scores > scores.gather(1, positives[:, None])).sum(1)

    so recall at k is `(ranks < k).float().mean()`. Keys that score the same as the positive do not count. Keys within
    the rounding error of the positive are scored again in float64, so equal keys tie on every machine.

    Args:
        query: `[N, D]`.
        key: `[M, D]`, M at least N unless `positives` is given.
        positives: `[N]` integers: the row of this rank's `key` that belongs with each query. Default: row i.

    Returns:
        `[N]` int64. A query whose positive scores NaN gets M: it was not found.
    """
    name = "retrieval_ranks"
    ranks = checks.group_name(name, options.pop("group", ...))
    with refuse_together(name, ranks, query):
        search = _Search(name, ranks, query, key, complete(name, options))
        checks.positives(name, positives, query, key, "rank each column of positives by itself")
        row = torch.arange(len(query), device=query.device)
        positives = row if positives is None else positives.long()
        check_indices(name, "positives", positives, len(key), ranks)
    search.connect(LossInputs(query, key))
    score = search.pair_scores(search.layout.rows[0], row, search.layout.own[1], positives)
    overflows = None if search.may_look else row.new_zeros(1)
    above = search.count_above(score, overflows)
    if overflows is not None and search.ranks.all_gather(overflows).any().item():  # all ranks go again, or none
        above = search.count_above(score)
    return torch.where(score.isnan(), search.num_keys, above)


@with_keywords
@torch.no_grad()
def similarity_topk(
    query: Tensor, key: Tensor, k: int, *, exclude: Exclude = None, **options: Unpack[SearchKeywords]
) -> tuple[Tensor, Tensor]:
    """The k keys that score highest for each query, best first, without the matrix of scores.

    Equals, up to rounding and the order of equal scores, `torch.topk(query @ key.T, k)`.

    Args:
        query: `[N, D]`.
        key: `[M, D]`.
        k: Number of keys to return, 1 to M.
        exclude: Keys that are never returned, to mine hard negatives. `[N]` integers: the row of this rank's `key`
            that is each query's positive. Or `(query_ids, key_ids)`, `[N]` and `[M]` integers: keys
            with the query's id.

    Returns:
        Values, `[N, k]` float32 (float64 for float64 features), and indices, `[N, k]` int64. With a group, indices
        count the keys of all ranks in rank order. Where fewer than k keys are left: -inf and -1.
    """
    name = "similarity_topk"
    ranks = checks.group_name(name, options.pop("group", ...))
    with refuse_together(name, ranks, query):
        search = _Search(name, ranks, query, key, complete(name, options))
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"{name}: k must be a whole number, got {type(k).__name__}.")
        inputs = _check_exclude(search, exclude)
    search.connect(inputs, k)
    values = torch.full((len(query), k), -torch.inf, dtype=search.dtype, device=query.device)
    indices = torch.full((len(query), k), -1, dtype=torch.int64, device=query.device)
    for tile, rows, scores in search.tiles():
        _exclude(tile, scores)
        _keep_best(values[rows], indices[rows], scores, tile.columns.offset, search.may_look)
    return values, indices


def _check_exclude(search: "_Search", exclude: Exclude) -> LossInputs:
    """What a loss would mask: positives, or pairs of equal ids."""
    name, query, key, group = search.name, search.query, search.key, search.ranks.group
    if isinstance(exclude, (tuple, list)):
        if len(exclude) != 2:
            raise ValueError(f"{name}: exclude must be a pair (query_ids, key_ids), got {len(exclude)} entries.")
        query_ids = checks.vector(name, "exclude[0]", exclude[0], "query", query)
        key_ids = checks.vector(name, "exclude[1]", exclude[1], "key", key)
        return LossInputs(query, key, row_ids=query_ids, column_ids=key_ids)
    checks.vector(name, "exclude", exclude, "query", query)
    if exclude is not None:
        check_indices(name, "exclude", exclude, len(key), group)
    return LossInputs(query, key, positives=exclude)


def _exclude(tile: Tile, scores: Tensor) -> None:
    """-inf for the keys that must not be returned, and only for them."""
    scores.clamp_min_(torch.finfo(scores.dtype).min)
    if tile.rows.ids is not None and tile.columns.ids is not None:
        scores.masked_fill_(tile.rows.ids[:, None] == tile.columns.ids, -torch.inf)
    elif isinstance(tile.targets, IndexedTargets):
        tile.targets.put(scores, torch.full_like(scores[:, 0], -torch.inf))


def _keep_best(values: Tensor, indices: Tensor, scores: Tensor, offset: int, may_look: bool) -> None:
    """Merge a tile into the best so far. An index of -1 is an empty slot, which any key that may be returned fills."""
    k, lowest = values.shape[1], torch.finfo(scores.dtype).min
    # Few rows of a late tile still hold one of their query's best. NaN counts as best, as in torch.topk.
    rows = (~(scores.amax(1) <= values[:, -1]) | (indices[:, -1] < 0)).nonzero()[:, 0] if may_look else slice(None)
    found, columns = scores[rows].topk(min(k, scores.shape[1]))
    columns = torch.where(found == -torch.inf, -1, columns + offset)
    found = torch.where(found == lowest, -torch.inf, found)
    found, columns = torch.cat([values[rows], found], 1), torch.cat([indices[rows], columns], 1)
    order = torch.where(columns < 0, -torch.inf, found.clamp_min(lowest)).topk(k).indices
    values[rows], indices[rows] = found.gather(1, order), columns.gather(1, order)


class _Search:
    """This rank's queries against the keys of all ranks, tile by tile."""

    def __init__(self, name: str, ranks: str, query: Tensor, key: Tensor, options: SearchKeywords) -> None:
        checks.features(name, ranks, query=query, key=key)
        self.options = checks.options(name, options, normalize=(True, False))
        self.tile, self.normalize = self.options["tile"], self.options["normalize"]
        self.name, self.query, self.key, self.dtype = name, query, key, compute_dtype(query)
        self.ranks, self.call_site = Ranks(name, ranks, device=key.device), call_site() if ranks else ""
        self.ranks.check_device()
        chosen = select(name, options["backend"], query.device, query.dtype)
        self.budget = self.options["memory_budget"] or chosen.default_budget
        self.may_look = key.device.type in CAN_LOOK
        self.may_wait = self.may_look or self.ranks.size > 1  # before the first tile: ranks wait for each other
        norms = row_norms(query), row_norms(key)
        self.query_norm, key_norm = (torch.ones_like(x) for x in norms) if self.normalize else norms
        # A key of infinite length scores inf or NaN, which no rounding changes.
        self.max_key_norm: Tensor | float = torch.where(key_norm.isfinite(), key_norm, 0.0).amax() if len(key) else 0.0
        half = query.dtype == key.dtype and chosen.multiplies_half(query.device, self.normalize)
        operand = query.dtype if half else self.dtype
        self.backend: Backend = chosen(Spec("softmax"), 1.0, 0.0, self.dtype, operand, query.device)

    def connect(self, inputs: LossInputs, k: int | None = None) -> None:
        """Learn how many keys every rank has, and lay out the tiles."""
        exchange, has_ids = self.options["exchange"], inputs.column_ids is not None
        exclude = "positives" if inputs.positives is not None else "ids" if has_ids else "none"
        same = feature_facts(self.key) | {"normalize": self.normalize, "exchange": exchange, "k": k, "exclude": exclude}
        mine = RankInfo(
            rows=(0, len(self.key), 0),  # queries stay at home: theirs are counted from 0
            dtypes=(self.key.dtype,) * 3,
            ids=(inputs.row_ids is not None, has_ids, False),
            max_norms=(0.0, float(self.max_key_norm) if self.may_wait else 0.0, 0.0),
            budget=self.budget,
        )
        info = GroupInfo.decode(self.ranks.handshake(same, mine.encode(), call_site=self.call_site))
        self.num_keys = info.length(1)
        self.max_key_norm = max(info.max_norms[1]) if self.may_wait else self.max_key_norm
        if self.num_keys == 0:
            raise ValueError(f"{self.name}: the group must have at least one key, got none on all of its ranks.")
        if k is not None and not 1 <= k <= self.num_keys:
            raise ValueError(f"{self.name}: k must be from 1 to the number of keys, {self.num_keys}, got {k}.")
        fits = self.num_keys * self.key.shape[1] * self.key.element_size() <= min(info.budget)
        self.layout = Layout(
            inputs,
            Spec("softmax"),
            self.ranks,
            info,
            normalize=self.normalize,
            overlap=self.options["overlap"],
            gathers=fits if exchange == "auto" else exchange == "gather",
        )
        if self.layout.gathers:
            self.layout.gather()
        with self.ranks.deferred_errors() as errors:
            self.sides = self._sides(max(info.rows[1]))
        self.ranks.handshake({}, errors=errors)
        self.ones = torch.ones(self.sides[1], dtype=self.dtype, device=self.key.device)

    def _sides(self, most_keys: int) -> tuple[int, int]:
        """Height and width of a tile that fits the budget."""
        height, width = self.tile or (SIDE if self.may_look else ACCELERATOR_SIDE,) * 2
        height, width = min(height, max(len(self.query), 1)), min(width, max(most_keys, 1))

        def needed() -> int:
            tile = height * width * (2 * self.dtype.itemsize + (not self.may_look))
            return tile + self.dtype.itemsize * 2 * (height + width) * self.query.shape[1]

        while self.tile is None and needed() > self.budget and max(height, width) > SMALLEST_SIDE:
            height, width = -(-height // 2), -(-width // 2)
        if needed() > self.budget:
            raise ValueError(
                f"{self.name}: memory_budget must be at least {needed()} bytes for a tile of {height} x {width} and "
                f"features of width {self.query.shape[1]}, got {self.budget}. The default is "
                f"{self.backend.default_budget}."
            )
        return height, width

    def tiles(self) -> Iterator[tuple[Tile, slice, Tensor]]:
        """Every tile, the queries it has, and its scores, which the next tile overwrites."""
        with torch.autocast(self.key.device.type, enabled=False):
            for tile in chain.from_iterable(self.layout.strips(*self.sides)):
                rows = slice(tile.rows.offset, tile.rows.offset + len(tile.rows))
                yield tile, rows, self.backend.scores(tile)

    def count_above(self, positive: Tensor, overflows: Tensor | None = None) -> Tensor:
        """How many keys score above the positives by more than rounding. `positive` is float64. The host looks at no
        tile if it gives `overflows`, which counts the tiles where too many pairs should have been scored again."""
        norms = self.query_norm.double() * self.max_key_norm
        exact = positive + 2 * self._error_bound(torch.float64) * norms
        bound = self._error_bound(self.dtype) * norms
        below, beyond = (x.to(self.dtype)[:, None] for x in (positive - bound, torch.maximum(positive + bound, exact)))
        above = torch.zeros(len(positive), dtype=torch.int64, device=positive.device)
        for tile, rows, scores in self.tiles():
            # A product counts faster than a sum of booleans; whole numbers of this size are exact in floating point.
            flags = workspace.shaped(workspace.buffer("scratch", scores.numel(), self.dtype, scores.device), tile.shape)
            ones = self.ones[: scores.shape[1]]
            num_beyond = torch.mv(torch.gt(scores, beyond[rows], out=flags), ones).long()
            above[rows].add_(num_beyond)
            if self.dtype == torch.float64:
                continue
            torch.ge(scores, below[rows], out=flags)
            if overflows is None:
                some = (torch.mv(flags, ones).long() - num_beyond).nonzero()[:, 0]
                pairs = (flags[some].bool() & (scores[some] <= beyond[rows][some])).nonzero()
                row, column = some[pairs[:, 0]], pairs[:, 1]
            else:
                size = max(FEWEST_LISTED, scores.numel() // SHARE_LISTED) + 1
                pairs = torch.nonzero_static(flags.mul_(scores <= beyond[rows]), size=size)  # -1 where there is none
                overflows += pairs[-1, 0] >= 0
                row, column = pairs.clamp_min(0).unbind(1)
            again = self.pair_scores(tile.rows, row, tile.columns, column) > exact[rows][row]
            if overflows is not None:
                again &= pairs[:, 0] >= 0
            above[rows].index_add_(0, row, again.long())
        return above

    def _error_bound(self, dtype: torch.dtype) -> float:
        """Of a dot product of width D by whatever order of additions, relative to the lengths of its factors."""
        rounded = 2.0**-10 if dtype == torch.float32 and float32_precision(self.key.device) == "tf32" else 0.0
        return (self.key.shape[1] + 8) * torch.finfo(dtype).eps + 2 * rounded

    def pair_scores(self, queries: Block, row: Tensor, keys: Block, column: Tensor) -> Tensor:
        """Scores of single pairs in float64: the same wherever a key stands."""
        pairs: list[Tensor] = []
        at_once = max(1, PAIRS_AT_ONCE // self.key.shape[1])
        for rows, columns in zip(torch.split(row, at_once), torch.split(column, at_once), strict=True):
            score = (queries.features[rows].double() * keys.features[columns].double()).sum(1)
            for block, index in ((queries, rows), (keys, columns)):
                if block.inverse_norm is not None:
                    score = score * block.inverse_norm[index]
            pairs.append(score)
        return torch.cat(pairs)
