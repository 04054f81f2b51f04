"""Ranks and nearest keys equal the dense answer, ties included, in linear memory."""

import pytest
import torch

import megabatch
from megabatch import reference

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
