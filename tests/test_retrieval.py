"""Ranks and nearest keys equal the dense answer, ties included, in linear memory, and no accelerator is waited for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import megabatch
from megabatch import reference, retrieval
from megabatch.backends.backend import supports_half_products
from megabatch.distributed.ranks import Ranks

from .ranks import Pool

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (3, 5, 7), (70, 130, 65), (200, 333, 16), (65, 500, 300), (31, 33, 512)]


@pytest.mark.parametrize("tile", [None, 64, (64, 128)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_equal_the_dense_answer(shape: tuple[int, int, int], tile: object) -> None:
    num_queries, num_keys, width = shape
    query, key = torch.randn(num_queries, width), torch.randn(num_keys, width)
    positives = torch.randint(num_keys, (num_queries,))
    ranks = megabatch.retrieval_ranks(query, key, positives=positives, tile=tile)
    expected = reference.retrieval_ranks(query.double(), key.double(), positives=positives)
    assert torch.equal(ranks, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_keys_tie_wherever_they_lie(shape: tuple[int, int, int]) -> None:
    num_queries, num_keys, width = shape
    query, key = torch.randn(num_queries, width), torch.randn(1, width).expand(num_keys, width)
    ranks = megabatch.retrieval_ranks(query, key, positives=torch.randint(num_keys, (num_queries,)), tile=64)
    assert torch.equal(ranks, torch.zeros_like(ranks))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(200, 64, 200), (128, 128, 100), (37, 1000, 33), (64, 130, 768)], ids=str)
def test_copies_of_the_positive_tie_with_it(shape: tuple[int, int, int], dtype: torch.dtype, normalize: bool) -> None:
    """A BLAS rounds a column by its place in the matrix. Copies of a few keys lie anywhere among the others."""
    num_queries, num_keys, width = shape
    length = 0.001 if normalize else 1.0  # normalised rows are of unit length, whatever they were before
    few = length * torch.randn(7, width)
    copied = torch.arange(num_keys) % 7
    query, key = (length * torch.randn(num_queries, width)).to(dtype), few[copied].to(dtype)
    positives = torch.randint(num_keys, (num_queries,))
    ranks = megabatch.retrieval_ranks(query, key, positives=positives, normalize=normalize, tile=(50, 64))
    # The rank among the few, each counted as often as it was copied.
    scores = query.double() @ few.to(dtype).double().T
    if normalize:
        scores = scores / few.to(dtype).double().norm(dim=1)
    above = scores > scores.gather(1, copied[positives][:, None])
    assert torch.equal(ranks, (above * torch.bincount(copied, minlength=7)).sum(1))
    assert torch.equal(ranks, reference.retrieval_ranks(query, key, positives=positives, normalize=normalize))


def test_by_default_row_i_belongs_with_row_i() -> None:
    query = torch.randn(9, 4)
    key = torch.cat([query, torch.randn(3, 4)])
    expected = reference.retrieval_ranks(query.double(), key.double(), normalize=True)
    assert torch.equal(megabatch.retrieval_ranks(query, key, normalize=True), expected)
    assert torch.equal(expected, torch.zeros(9, dtype=torch.long))


def test_a_positive_that_scores_nan_is_not_found() -> None:
    key = torch.randn(7, 4)
    key[2] = torch.nan
    ranks = megabatch.retrieval_ranks(torch.randn(7, 4), key)
    assert ranks[2] == 7
    assert (ranks[torch.arange(7) != 2] < 7).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("normalize", [False, True])
def test_topk_equals_the_dense_answer(k: int, normalize: bool, dtype: torch.dtype) -> None:
    query, key = torch.randn(150, 24).to(dtype), torch.randn(301, 24).to(dtype)
    values, indices = megabatch.similarity_topk(query, key, k, normalize=normalize, tile=(64, 128))
    expected, _ = reference.similarity_topk(query, key, k, normalize=normalize)
    torch.testing.assert_close(values, expected)
    assert values.dtype == expected.dtype
    query, key = query.double(), key.double()
    if normalize:
        query, key = torch.nn.functional.normalize(query, dim=1), torch.nn.functional.normalize(key, dim=1)
    chosen = torch.stack([key[i] @ q for q, i in zip(query, indices, strict=True)])
    torch.testing.assert_close(chosen, expected.double(), rtol=1e-5, atol=1e-5)


def test_topk_of_all_keys_sorts_them() -> None:
    query, key = torch.randn(5, 3), torch.randn(130, 3)
    values, indices = megabatch.similarity_topk(query, key, 130, tile=64)
    torch.testing.assert_close(values, (query @ key.T).sort(1, descending=True).values)
    assert torch.equal(indices.sort(1).values, torch.arange(130).expand(5, 130))


def test_topk_returns_no_index_twice_where_scores_are_minus_infinity() -> None:
    query, key = torch.rand(3, 4) + 0.1, torch.rand(63, 4)
    key[10:50] = -torch.inf
    values, indices = megabatch.similarity_topk(query, key, 63, tile=16)
    assert torch.equal(indices.sort(1).values, torch.arange(63).expand(3, 63))
    assert (values[:, 23:] == -torch.inf).all()
    excluded = torch.tensor([12, 0, 5])
    values, indices = megabatch.similarity_topk(query, key, 63, exclude=excluded, tile=16)
    for row, left_out in zip(indices, excluded.tolist(), strict=True):
        assert sorted(row.tolist()) == [-1, *(index for index in range(63) if index != left_out)]


@pytest.mark.parametrize("tile", [None, 16], ids=str)
def test_topk_leaves_out_what_is_excluded(tile: int | None) -> None:
    query, key = torch.randn(40, 8), torch.randn(70, 8)
    positives = torch.randint(70, (40,))
    query_ids, key_ids = torch.randint(5, (40,)), torch.randint(5, (70,))
    for exclude in (positives, (query_ids, key_ids)):
        values, indices = megabatch.similarity_topk(query, key, 6, exclude=exclude, tile=tile)
        expected, where = reference.similarity_topk(query, key, 6, exclude=exclude)
        torch.testing.assert_close(values, expected)
        assert torch.equal(indices, where)


def test_topk_has_empty_slots_where_too_few_keys_are_left() -> None:
    query, key, ids = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 0, 0, 0, 1])
    values, indices = megabatch.similarity_topk(query, key, 3, exclude=(torch.zeros(4, dtype=torch.long), ids))
    assert torch.equal(indices, torch.tensor([[4, -1, -1]] * 4))
    assert (values[:, 1:] == -torch.inf).all()


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (torch.tensor([0, 9, 1]), "similarity_topk: exclude must be rows of key, 0 to 4, got 0 to 9"),
        ((torch.arange(3),), "exclude must be a pair"),
        ((torch.arange(3), torch.arange(4)), r"exclude\[1\] must have one entry for every row of key"),
    ],
)
def test_a_wrong_exclude_is_named(exclude: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        megabatch.similarity_topk(torch.randn(3, 2), torch.randn(5, 2), 2, exclude=exclude)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k: megabatch.similarity_topk(q, k, 8), "k must be from 1 to the number of keys, 7, got 8"),
        (lambda q, k: megabatch.similarity_topk(q, k, 0), "k must be from 1 to the number of keys, 7, got 0"),
        (lambda q, k: megabatch.retrieval_ranks(k, q[:5]), "key must have at least as many rows as query.*5 and 7"),
        (lambda q, k: megabatch.retrieval_ranks(q, k, positives=torch.full((6,), 7)), "0 to 6, got 7 to 7"),
        (lambda q, k: megabatch.retrieval_ranks(q, k[:, :2]), "the same width, got 3 and 2"),
        (
            lambda q, k: megabatch.retrieval_ranks(q, k, memory_budget=10),
            "memory_budget must be at least",
        ),
        (
            lambda q, k: megabatch.retrieval_ranks(q, k, tile=64, memory_budget=99),
            "features of width 3, got 99",
        ),
        (lambda q, k: megabatch.retrieval_ranks(q[:0], k), "query must have at least one row"),
        (lambda q, k: megabatch.retrieval_ranks(q, k, backend="fast"), "backend must be one of 'auto'"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(6, 3), torch.randn(7, 3))


# ---- accelerators: the host looks at nothing until the end


READS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "equal", "allclose", "is_nonzero"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "argwhere", "repeat_interleave"}


class Reads(TorchFunctionMode):
    """Notes by name what makes the host wait for tensors: numbers, shapes that depend on them, and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        indexed = name in ("__getitem__", "__setitem__") and tree_leaves(args[1])
        if name in READS or (indexed and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indexed)):
            self.found.append(name)
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class FakeReads(Reads):
    """On tensors of a GPU that is not there. Torch without CUDA cannot index them by brackets, nor copy."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        on_gpu = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda]
        if func.__name__ == "__getitem__" and on_gpu:
            return self.part(*args)
        if func.__name__ == "__setitem__" and on_gpu:
            return torch.ops.aten.copy_(self.part(*args[:2]), args[2])
        result = func(*args, **kwargs)
        if on_gpu and any(isinstance(x, Tensor) and x.is_cpu for x in tree_leaves(result)):
            self.found.append(f"{func.__name__} to the CPU")
        return result

    @staticmethod
    def part(x: Tensor, index: Any) -> Tensor:
        dim = 0
        for entry in index if isinstance(index, tuple) else (index,):
            if isinstance(entry, Tensor):
                x = torch.ops.aten.index.Tensor(x, [None] * dim + [entry])
            elif isinstance(entry, slice):
                x = torch.ops.aten.slice.Tensor(x, dim, entry.start, entry.stop)
            else:
                x = x.unsqueeze(dim) if entry is None else x.select(dim, entry)
            dim += not isinstance(entry, int)
        return x


def gpu(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


CALLS: dict[str, Callable[..., Any]] = {
    "ranks": megabatch.retrieval_ranks,
    "ranks of positives": lambda q, k, **how: megabatch.retrieval_ranks(q, k, positives=gpu(9), **how),
    "topk": lambda q, k, **how: megabatch.similarity_topk(q, k, 3, **how),
    "topk but positives": lambda q, k, **how: megabatch.similarity_topk(q, k, 3, exclude=gpu(9), **how),
    "topk but ids": lambda q, k, **how: megabatch.similarity_topk(q, k, 3, exclude=(gpu(9), gpu(20)), **how),
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_no_gpu_is_waited_for(call: str, dtype: torch.dtype, normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whatever reads one raises. Overflows are asked for once, after all tiles."""
    asked: list[Tensor] = []
    nothing = SimpleNamespace(any=lambda: SimpleNamespace(item=lambda: 0))
    copy = torch.ops.aten.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, other: copy(self, other))  # noqa: PLW0108 (a method)
    monkeypatch.setattr(Ranks, "all_gather", lambda self, overflows: asked.append(overflows) or nothing)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), FakeReads() as reads:
            query, key = gpu(9, 8, dtype=dtype), gpu(20, 8, dtype=dtype)
            found = CALLS[call](query, key, normalize=normalize, tile=(5, 8), backend="eager")
    finally:
        supports_half_products.cache_clear()  # of what it learnt of the GPU
    assert reads.found == []
    assert len(asked) == call.startswith("ranks")
    assert all(x.is_cuda and len(x) == 9 for x in tree_leaves(found))


def test_tiles_are_larger_on_a_gpu() -> None:
    def sides(device: str, **how: Any) -> tuple[int, int]:
        with FakeTensorMode(allow_non_fake_inputs=True), FakeReads():
            query, key = (torch.empty(20_000, 16, device=device) for _ in range(2))
            options = retrieval.complete("retrieval_ranks", {"backend": "eager", **how})
            search = retrieval._Search("retrieval_ranks", "", query, key, options)
            search.may_wait = False  # fake tensors have no longest row to tell
            search.connect(retrieval.LossInputs(query, key))
        return search.sides

    assert sides("cpu") == (2048, 2048)
    assert sides("cuda") == (4096, 4096)
    assert sides("cuda", memory_budget="1G") == (8192, 8192)
    assert sides("cuda", tile=100) == (100, 100)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is treated as an accelerator."""
    monkeypatch.setattr(retrieval, "CAN_LOOK", ())
    monkeypatch.setattr(retrieval, "check_indices", lambda *arguments: None)  # a GPU stops by itself


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_looked_at_is_the_same(
    dtype: torch.dtype, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a few keys tie; NaN and infinity are in their places."""
    few = torch.randn(9, 33).to(dtype)
    query, key = torch.randn(70, 33).to(dtype), few[torch.randint(9, (150,))]
    key[5], key[70], query[7] = torch.nan, torch.inf, 0.0
    positives, ids = torch.randint(150, (70,)), (torch.randint(5, (70,)), torch.randint(5, (150,)))
    how: dict[str, Any] = {"normalize": normalize, "tile": (40, 64)}

    def results() -> tuple[list[Any], list[str]]:
        with Reads() as reads:
            ranks = megabatch.retrieval_ranks(query, key, positives=positives, **how)
            best = [megabatch.similarity_topk(query, key, 6, exclude=exclude, **how) for exclude in (None, ids)]
            best.append(megabatch.similarity_topk(query, key, 149, exclude=positives, **how))
        return [ranks, *best], reads.found

    (seen, *best), reads = results()
    assert "nonzero" in reads
    monkeypatch.setattr(retrieval, "CAN_LOOK", ())
    monkeypatch.setattr(retrieval, "check_indices", lambda *arguments: None)
    (unseen, *same), reads = results()
    assert reads == ["item"]
    assert torch.equal(unseen, seen)
    assert torch.equal(unseen, reference.retrieval_ranks(query, key, positives=positives, normalize=normalize))
    for (values, indices), (expected, where) in zip(same, best, strict=True):
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal((indices < 0).sum(1), (where < 0).sum(1))
        assert all(len(set(row) - {-1}) == sum(x >= 0 for x in row) for row in indices.tolist()), "a key twice"


@pytest.mark.usefixtures("unseen")
def test_unseen_tiles_give_the_dense_answer() -> None:
    test_ranks_equal_the_dense_answer((70, 130, 65), 64)
    test_ranks_equal_the_dense_answer((200, 333, 16), None)
    test_equal_keys_tie_wherever_they_lie((70, 130, 65))
    test_by_default_row_i_belongs_with_row_i()
    test_a_positive_that_scores_nan_is_not_found()
    test_topk_equals_the_dense_answer(4, True, torch.float32)
    test_topk_of_all_keys_sorts_them()
    test_topk_returns_no_index_twice_where_scores_are_minus_infinity()
    test_topk_leaves_out_what_is_excluded(16)
    test_topk_has_empty_slots_where_too_few_keys_are_left()


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("room", [99, 100])
def test_too_many_ties_for_a_list_are_looked_at(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first tile, 100 keys tie with the positive, or nearly. A list of 100 just holds them."""
    monkeypatch.setattr(retrieval, "FEWEST_LISTED", room)
    query, key = torch.rand(1, 24) + 0.1, torch.rand(1, 24).repeat(150, 1)
    key[50:100] *= 1 + 2e-7
    with Reads() as reads:
        ranks = megabatch.retrieval_ranks(query, key, tile=100)
    assert torch.equal(ranks, reference.retrieval_ranks(query, key))
    assert ranks > 0
    assert reads.found[0] == "item"
    assert ("nonzero" in reads.found) == (room < 100)


def test_a_row_that_is_none_is_named() -> None:
    query, key = torch.randn(3, 2), torch.randn(5, 2)
    for wrong in (-1, 5):
        rows = torch.tensor([0, wrong, 1])
        with pytest.raises(ValueError, match="retrieval_ranks: positives must be rows of key, 0 to 4"):
            megabatch.retrieval_ranks(query, key, positives=rows)
        with pytest.raises(ValueError, match="similarity_topk: exclude must be rows of key, 0 to 4"):
            megabatch.similarity_topk(query, key, 1, exclude=rows)


def _overflowing_on_rank_1(rank: int, group: Any, features: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[str]]:
    query, key = features[rank]
    with pytest.MonkeyPatch.context() as patch, Reads() as reads:
        patch.setattr(retrieval, "CAN_LOOK", ())
        patch.setattr(retrieval, "FEWEST_LISTED", 8)
        ranks = megabatch.retrieval_ranks(query, key, group=group, exchange="ring")
    return ranks, reads.found


def test_all_ranks_look_if_one_has_too_many_ties(pool: Pool) -> None:
    features = [(torch.randn(6, 5), torch.randn(7, 5)), (torch.randn(9, 5), torch.randn(1, 5).repeat(9, 1))]
    features.append((torch.randn(0, 5), torch.randn(0, 5)))
    keys, offset = torch.cat([key for _, key in features]), 0
    for (query, key), (ranks, reads) in zip(features, pool.run(3, _overflowing_on_rank_1, features), strict=True):
        if len(query):
            expected = reference.retrieval_ranks(query, keys, positives=offset + torch.arange(len(query)))
            assert torch.equal(ranks, expected)
            assert "nonzero" in reads
        offset += len(key)


def _long_keys_elsewhere(rank: int, group: Any, features: list[tuple[Tensor, Tensor]]) -> Tensor:
    return megabatch.retrieval_ranks(*features[rank], group=group, exchange="gather")


def test_the_longest_key_of_all_ranks_says_what_is_near(pool: Pool) -> None:
    """Of the long keys every product has its opposite, so they score 0 but for rounding, as the positive does."""
    half = 1000 * torch.randn(50, 64)
    long = torch.cat([half, -half], 1)[:, torch.randperm(128)]
    features = [(torch.ones(1, 128), torch.zeros(1, 128)), (torch.ones(0, 128), long)]
    assert (features[0][0] @ long.T).any()
    ranks, _ = pool.run(2, _long_keys_elsewhere, features)
    assert ranks.tolist() == [0]
