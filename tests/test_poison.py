"""The `poison` fixture is a meter of other tests: here is its own."""

import pytest
import torch

MAKERS = {
    "empty": lambda like: torch.empty(4, 3, dtype=like.dtype),
    "empty_like": lambda like: torch.empty_like(like, dtype=like.dtype),
    "empty_strided": lambda like: torch.empty_strided((4, 3), (3, 1), dtype=like.dtype),
    "new_empty": lambda like: like.new_empty(4, 3),
    "new_empty_strided": lambda like: like.new_empty_strided((4, 3), (3, 1)),
}

# Taken at import, while no test is running.
UNPOISONED = [torch.empty, torch.empty_like, torch.Tensor.new_empty]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maker", MAKERS)
def test_unwritten_memory_is_nan_while_poisoned(maker, dtype):
    made = MAKERS[maker](torch.ones(4, 3, dtype=dtype))
    assert made.shape == (4, 3)
    assert made.dtype == dtype
    assert made.isnan().all()


@pytest.mark.usefixtures("poison")
def test_poison_leaves_integers_and_written_memory_alone():
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert torch.equal(torch.zeros(3), torch.tensor([0.0, 0.0, 0.0]))
    assert torch.empty(3, requires_grad=True).requires_grad


def test_poison_ends_with_the_test_that_asked_for_it():
    assert [torch.empty, torch.empty_like, torch.Tensor.new_empty] == UNPOISONED
