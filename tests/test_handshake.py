"""What ranks tell each other before blocks move: numbers in one collective, text only where something is wrong."""

import contextlib
import math
from typing import Any

import pytest
import torch

import megabatch
from megabatch.distributed import ranks as distributed_ranks
from megabatch.distributed.ranks import NUMBERS, Ranks
from megabatch.tiling.handshake import DTYPES, GroupInfo, RankInfo

from .ranks import Pool

INFO = RankInfo(
    rows=(3, 2**40 + 1, 0),
    dtypes=(torch.bfloat16, torch.float64, torch.float16),
    ids=(True, False, True),
    max_norms=(1.5, math.inf, 0.0),
    id_range=(-(2.0**63), 2.0**63),
    needs=(True, False, False, True, True),
    grad_enabled=True,
    scale=1 / 3,
    bias=-10.0,
    budget=2**52 + 1,
)


def test_what_ranks_bring_survives_the_message() -> None:
    infos = [INFO, RankInfo()]
    numbers = torch.tensor([info.encode() for info in infos], dtype=torch.float64)
    assert numbers.shape[1] <= NUMBERS
    found = GroupInfo.decode(numbers.tolist())
    for name, lists in found._asdict().items():
        for rank, info in enumerate(infos):
            value = getattr(info, name)
            of_rank = tuple(numbers[rank] for numbers in lists) if isinstance(value, tuple) else lists[rank]
            if name == "dtypes":
                of_rank = tuple(DTYPES[int(code)] for code in of_rank)
            assert of_rank == value, name
    assert all(type(length) is int for lengths in found.rows for length in lengths)
    assert found.length(0, 1) == 3 + 2**40 + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_features_has_a_number(dtype: torch.dtype) -> None:
    """A rank without rows does not count."""
    ranks = [RankInfo(rows=(1, 0, 0), dtypes=(dtype,) * 3), RankInfo()]
    assert GroupInfo.decode([info.encode() for info in ranks]).dtype(0) == dtype


def numbers_and_collectives(rank: int, group: Any) -> tuple[list[list[float]], int]:
    count, real = 0, distributed_ranks._all_gather_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_ranks, "_all_gather_single", counting)
        found = Ranks("function", group.group_name).handshake({"a word": "x" * 5000}, [rank, -rank / 3], None, "line 1")
    return found, count


def test_a_handshake_is_one_collective(pool: Pool) -> None:
    expected = [[rank, -rank / 3] for rank in range(3)]
    assert pool.run(3, numbers_and_collectives) == [(expected, 1)] * 3


def agreeing(rank: int, group: Any) -> list[list[float]]:
    """A call site that only one rank knows, and a number written in two ways."""
    facts = {"label_smoothing": 0 if rank else 0.0}
    return Ranks("function", group.group_name).handshake(facts, [rank], None, "" if rank else "line 1")


def test_what_is_only_written_differently_is_the_same(pool: Pool) -> None:
    assert pool.run(3, agreeing) == [[[0.0], [1.0], [2.0]]] * 3


def of_all_ranks(rank: int, group: Any) -> list[Any]:
    return Ranks("function", group.group_name).all_gather_json({"rank": rank, "text": "ä" * rank * 1000})


def test_text_of_any_length_reaches_all_ranks(pool: Pool) -> None:
    assert pool.run(3, of_all_ranks) == [[{"rank": rank, "text": "ä" * rank * 1000} for rank in range(3)]] * 3


def nearly_the_same(rank: int, group: Any, difference: float) -> bool:
    rows = torch.eye(3)
    try:
        megabatch.clip_loss(rows, rows, 5.0 * (1 + rank * difference), group=group, normalize=False)
    except ValueError as error:
        return "logit_scale" not in str(error)
    return True


@pytest.mark.parametrize(("difference", "accepted"), [(1e-7, True), (1e-3, False)])
def test_scales_may_be_rounded_differently(pool: Pool, difference: float, accepted: bool) -> None:
    assert pool.run(2, nearly_the_same, difference) == [accepted] * 2


def nan_upstream(rank: int, group: Any) -> bool:
    rows = torch.eye(3).requires_grad_()
    (math.nan * megabatch.clip_loss(rows, rows, 5.0, group=group, normalize=False)).backward()
    assert rows.grad is not None
    return bool(rows.grad.isnan().all())


def test_losses_that_are_multiplied_by_nan_are_multiplied_alike(pool: Pool) -> None:
    assert pool.run(2, nan_upstream) == [True] * 2


class Sent(Exception):
    """The device that a message leaves from."""


def sending_device(rank: int, group: Any, device: str) -> str:
    def to(tensor: torch.Tensor, place: torch.device) -> None:
        raise Sent(str(place))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(Ranks, "_device_types", lambda ranks: ["cuda"])
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(distributed_ranks, "_side_stream", lambda device: None)
        with pytest.raises(Sent) as caught:
            Ranks("function", group.group_name, device=torch.device(device)).handshake({})
    return str(caught.value)


def test_a_group_without_the_cpu_sends_from_the_device_of_its_blocks(pool: Pool) -> None:
    """Never from another one of that kind. Features elsewhere are refused, and for that, too, ranks must meet."""
    assert pool.run(1, sending_device, "cuda:1") == ["cuda:1"]
    assert pool.run(1, sending_device, "cpu") == ["cuda"]
