"""The pool of ranks that the other tests run on: what it answers, and how it fails."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from . import ranks
from .ranks import Pool, RanksFailed


def total(rank: int, group: dist.ProcessGroup, number: int) -> tuple[int, torch.Tensor]:
    values = torch.tensor([number * 10**rank])
    dist.all_reduce(values, group=group)
    return rank, values


def fail_on(rank: int, group: dist.ProcessGroup, failing: tuple[int, ...]) -> None:
    if rank in failing:
        raise ValueError("as told")
    dist.barrier(group)


def die_on(rank: int, group: dist.ProcessGroup, dying: int) -> None:
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)


def warn(rank: int, group: dist.ProcessGroup) -> None:
    warnings.warn("take care", stacklevel=1)


@pytest.mark.parametrize(("members", "expected"), [(1, 2), (2, 22), (3, 222), (4, 2222), ((1, 3), 22)], ids=str)
def test_a_function_runs_on_the_ranks_asked_for(pool: Pool, members: int | tuple[int, ...], expected: int) -> None:
    answers = pool.run(members, total, 2)
    assert [rank for rank, _ in answers] == list(range(len(answers)))
    assert {values.item() for _, values in answers} == {expected}


def test_an_error_names_its_rank_and_the_pool_goes_on(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 of 2: ValueError: as told; rank 1 of 2: ValueError: as told"):
        pool.run(2, fail_on, (0, 1))
    monkeypatch.setattr(ranks, "ENDING", 0.5)
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] did not answer; ranks \[2\] did(?s:.)*On rank 2"):
        pool.run(3, fail_on, (2,))
    monkeypatch.undo()
    assert pool.run(4, total, 1)[3][1].item() == 1111


def test_a_dead_rank_is_told_at_once_and_replaced(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 died with exit code -9"):
        pool.run(4, die_on, 1)
    assert time.monotonic() - start < ranks.GROUP_TIMEOUT / 2
    assert pool.run(2, total, 1)[0][1].item() == 11


def test_warnings_are_errors_on_ranks_too(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="UserWarning: take care"):
        pool.run(2, warn)
