"""Ranks that disagree, or one with bad input: the same clear error on all of them, and the group stays usable."""

import contextlib
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megabatch
from megabatch import callers, reference
from megabatch.distributed import ranks as distributed_ranks
from megabatch.tiling import handshake

from .ranks import Pool

ODD = 1  # the rank that differs from the others
NUM_RANKS = 3


def features(rows: int = 4, width: int = 5, seed: int = 0, **kind: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(rows, width, generator=generator, dtype=torch.float64), dim=1)
    return x.to(**kind) if kind else x


def pair(odd: bool = False, grad: bool = True, **shape: Any) -> tuple[Tensor, Tensor]:
    """Two sides, of the given shape or dtype on the odd rank only."""
    sides = (features(seed=seed, **(shape if odd else {})) for seed in (0, 1))
    first, second = (side.requires_grad_(grad and side.is_floating_point()) for side in sides)
    return first, second


def call(loss: str, group: Any, inputs: tuple[Any, ...] | None = None, *, scale: Any = 5.0, **options: Any) -> Tensor:
    inputs = pair() if inputs is None else inputs
    value = getattr(megabatch, loss)(*inputs, scale, group=group, **{"normalize": False, **options})
    assert isinstance(value, Tensor)
    return value


class Misuse(NamedTuple):
    """What a rank does, given whether it is the odd one; the error and the words in it."""

    error: type[Exception]
    words: tuple[str, ...]
    act: Callable[[bool, Any], object]


def _no_grad_here(odd: bool, group: Any) -> None:
    with torch.set_grad_enabled(not odd):
        call("clip_loss", group)


def _another_second_dtype(odd: bool, group: Any) -> None:
    first, second = features(dtype=torch.float32), features(dtype=torch.bfloat16 if odd else torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        call("clip_loss", group, (first, second), exchange="gather")


def _another_upstream(odd: bool, group: Any) -> None:
    loss = call("clip_loss", group)
    ((2.0 if odd else 1.0) * loss).backward()


def _bad_positives(odd: bool, group: Any) -> None:
    positives = torch.tensor([0, 1, 2, 4 if odd else 3])
    call("info_nce_loss", group, positives=positives)


def _supcon_labels(odd: bool, group: Any) -> None:
    labels = torch.arange(4).double() if odd else torch.arange(4)
    megabatch.supcon_loss(features().requires_grad_(), labels, 5.0, normalize=False, group=group)


def _two_backwards(odd: bool, group: Any) -> None:
    first, second = (call("clip_loss", group) for _ in range(2))
    (second if odd else first).backward()


def _another_phase(odd: bool, group: Any) -> None:
    loss = call("clip_loss", group)
    if odd:
        loss.backward()
    else:
        call("clip_loss", group)


def _two_calls_swapped(function: Any, odd: bool, group: Any) -> None:
    def of_images() -> None:
        function(*pair(), normalize=False, group=group)

    def of_videos() -> None:
        function(*pair(), normalize=False, group=group)

    for loss in (of_videos, of_images) if odd else (of_images, of_videos):
        loss()


def _a_warning_on_one_rank(odd: bool, group: Any) -> None:
    """Ranks of the pool turn warnings into errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "warned", set())
        rows = [3 * x.detach() if odd else x.detach() for x in pair()]
        megabatch.clip_loss(*rows, 5.0, group=group)


def _a_warning_of_all_ids(odd: bool, group: Any) -> None:
    """Which ranks find out about after their handshake."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(callers, "warned", set())
        warnings.simplefilter("error" if odd else "ignore")
        first, second = pair()
        ids = torch.zeros(len(first), dtype=torch.int64)
        megabatch.clip_loss(first, second, 5.0, normalize=False, ids=ids, group=group)


def _with_a_group_that_sends_from_elsewhere(group: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The messages of the handshake have to travel all the same.
        patch.setattr(
            distributed_ranks.Ranks, "_all_gather", partialmethod(_gather_anyway, distributed_ranks.Ranks._all_gather)
        )
        patch.setattr(distributed_ranks.Ranks, "_device_types", lambda ranks: ["mtia"])
        call("clip_loss", group)


def _with_another_precision(odd: bool, group: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "float32_precision", lambda device: "tf32" if odd else "ieee")
        call("clip_loss", group)


def _gather_anyway(ranks: Any, gather: Any, mine: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_ranks.Ranks, "_device_types", lambda ranks: ["cpu"])
        return gather(ranks, mine)


IDS, WEIGHT = torch.tensor([0, 1, 1, 2]), torch.tensor([1.0, 0.5, 2.0, 1.0])
NAN = torch.tensor(torch.nan, dtype=torch.float64)

MISUSES = {
    "different widths": Misuse(
        ValueError, ("width", "5", "7"), lambda odd, group: call("clip_loss", group, pair(odd, width=7))
    ),
    "different dtypes of the second side": Misuse(
        ValueError,
        ("dtype of the second features", "float32", "bfloat16"),
        _another_second_dtype,
    ),
    "different dtypes": Misuse(
        ValueError,
        ("dtype", "float64", "float32"),
        lambda odd, group: call("clip_loss", group, pair(odd, dtype=torch.float32)),
    ),
    "different functions": Misuse(
        RuntimeError,
        ("clip_loss", "siglip_loss"),
        lambda odd, group: call("siglip_loss" if odd else "clip_loss", group),
    ),
    "a loss and a search": Misuse(
        RuntimeError,
        ("clip_loss", "retrieval_ranks"),
        lambda odd, group: megabatch.retrieval_ranks(*pair(), group=group) if odd else call("clip_loss", group),
    ),
    "different reductions": Misuse(
        ValueError,
        ("reduction", "mean", "sum"),
        lambda odd, group: call("clip_loss", group, reduction="sum" if odd else "mean"),
    ),
    "different grad_reductions": Misuse(
        ValueError,
        ("grad_reduction", "mean", "sum"),
        lambda odd, group: call("clip_loss", group, grad_reduction="sum" if odd else "mean"),
    ),
    "different normalize": Misuse(
        ValueError, ("normalize", "True", "False"), lambda odd, group: call("siglip_loss", group, normalize=odd)
    ),
    "different label_smoothing": Misuse(
        ValueError,
        ("label_smoothing", "0.1", "0.2"),
        lambda odd, group: call("nt_xent_loss", group, label_smoothing=0.2 if odd else 0.1),
    ),
    "different same_ids": Misuse(
        ValueError,
        ("same_ids", "mask", "positive"),
        lambda odd, group: call("clip_loss", group, ids=IDS, same_ids="positive" if odd else "mask"),
    ),
    "different exchange": Misuse(
        ValueError,
        ("exchange", "ring", "gather"),
        lambda odd, group: call("clip_loss", group, exchange="ring" if odd else "gather"),
    ),
    "ids on one rank only": Misuse(
        ValueError, ("ids",), lambda odd, group: call("clip_loss", group, ids=IDS if odd else None)
    ),
    "query_ids on all ranks but one": Misuse(
        ValueError,
        ("ids",),
        lambda odd, group: call("info_nce_loss", group, query_ids=None if odd else IDS, key_ids=None if odd else IDS),
    ),
    "key_ids on one rank only": Misuse(
        ValueError,
        ("key_ids",),
        lambda odd, group: call("info_nce_loss", group, query_ids=IDS, key_ids=IDS if odd else None),
    ),
    "negative_ids on one rank only": Misuse(
        ValueError,
        ("negative_ids",),
        lambda odd, group: call(
            "info_nce_loss",
            group,
            query_ids=IDS,
            key_ids=IDS,
            negatives=features(),
            negative_ids=IDS if odd else None,
        ),
    ),
    "a backend that cannot run on one rank": Misuse(
        ValueError,
        ("backend 'triton'", "float64", f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, backend="triton" if odd else "auto"),
    ),
    "different backends": Misuse(
        ValueError,
        ("the backend must be the same", "eager", "triton"),
        lambda odd, group: call(
            "clip_loss", group, pair(True, dtype=torch.float32), backend="triton" if odd else "eager"
        ),
    ),
    "another precision of float32 products on one rank": Misuse(
        ValueError, ("the precision of float32 products must be the same", "tf32", "ieee"), _with_another_precision
    ),
    "a budget that is too small on one rank": Misuse(
        ValueError,
        ("memory_budget", "10", f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, memory_budget=10 if odd else None),
    ),
    "a search with a budget that is too small on one rank": Misuse(
        ValueError,
        ("memory_budget", "10", f"rank {ODD}"),
        lambda odd, group: megabatch.retrieval_ranks(*pair(), memory_budget=10 if odd else None, group=group),
    ),
    "features on a device that the group does not send from": Misuse(
        ValueError, ("device", "mtia", "cpu"), lambda odd, group: _with_a_group_that_sends_from_elsewhere(group)
    ),
    "query_ids alone on all ranks": Misuse(
        ValueError, ("query_ids alone",), lambda odd, group: call("info_nce_loss", group, query_ids=IDS)
    ),
    "backwards in another order on one rank": Misuse(
        ValueError, ("the order of backwards", f"rank {ODD}"), _two_backwards
    ),
    "a module without a scale on one rank": Misuse(
        ValueError,
        ("ClipLoss", "logit_scale", f"rank {ODD}"),
        lambda odd, group: megabatch.ClipLoss(init_logit_scale=None, normalize=False, group=group)(
            *pair(), None if odd else 5.0
        ),
    ),
    "a scale for a module that owns one on one rank": Misuse(
        ValueError,
        ("SigLipLoss", "owns one", f"rank {ODD}"),
        lambda odd, group: megabatch.SigLipLoss(normalize=False, group=group)(*pair(), 5.0 if odd else None),
    ),
    "different reasons on all ranks": Misuse(
        ValueError,
        ("reduction", "rank 0"),
        lambda odd, group: call("clip_loss", group, reduction="odd" if odd else "even"),
    ),
    "a very long message on one rank": Misuse(
        ValueError,
        ("reduction", "x" * 5000, f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, reduction="x" * 5000 if odd else "mean"),
    ),
    "a backward on one rank, another forward on the others": Misuse(
        RuntimeError, ("forward", "backward", f"rank {ODD}"), _another_phase
    ),
    "two calls that are alike, swapped on one rank": Misuse(
        RuntimeError,
        ("from the same line", "in of_images", "in of_videos", f"rank {ODD}"),
        partial(_two_calls_swapped, partial(megabatch.clip_loss, temperature=0.2)),
    ),
    "two searches that are alike, swapped on one rank": Misuse(
        RuntimeError,
        ("from the same line", "in of_images", "in of_videos", f"rank {ODD}"),
        partial(_two_calls_swapped, megabatch.retrieval_ranks),
    ),
    "a warning of all ids that is an error on one rank": Misuse(
        UserWarning, ("all ids are equal", f"rank {ODD}"), _a_warning_of_all_ids
    ),
    "a warning that is an error on one rank": Misuse(
        UserWarning, ("not of unit length", f"rank {ODD}"), _a_warning_on_one_rank
    ),
    "weight on one rank only": Misuse(
        ValueError,
        ("weight",),
        lambda odd, group: call(
            "supcon_loss", group, (features().requires_grad_(), IDS), weight=WEIGHT if odd else None
        ),
    ),
    "different scales": Misuse(
        ValueError, ("logit_scale", "5", "6"), lambda odd, group: call("clip_loss", group, scale=6.0 if odd else 5.0)
    ),
    "different biases": Misuse(
        ValueError, ("logit_bias",), lambda odd, group: call("siglip_loss", group, logit_bias=-2.0 if odd else -3.0)
    ),
    "a scale that is NaN on one rank": Misuse(
        ValueError,
        ("logit_scale", "nan", f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, scale=NAN if odd else 5.0),
    ),
    "a negative weight on one rank": Misuse(
        ValueError,
        ("weight", f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, weight=-WEIGHT if odd else WEIGHT),
    ),
    "a weight of another length on one rank": Misuse(
        ValueError,
        ("weight", f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, weight=WEIGHT[:3] if odd else WEIGHT),
    ),
    "positives out of range on one rank": Misuse(ValueError, ("positives", "4", f"rank {ODD}"), _bad_positives),
    "fewer keys than queries on one rank": Misuse(
        ValueError,
        ("key", "3", f"rank {ODD}"),
        lambda odd, group: call("info_nce_loss", group, (features(), features(3 if odd else 4).requires_grad_())),
    ),
    "integer features on one rank": Misuse(
        TypeError,
        ("image_features", "int64", f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, pair(odd, dtype=torch.int64)),
    ),
    "three dimensions on one rank": Misuse(
        ValueError,
        ("view1", r"\(1, 4, 5\)", f"rank {ODD}"),
        lambda odd, group: call("nt_xent_loss", group, tuple(x[None] if odd else x for x in pair())),
    ),
    "unpaired rows on one rank": Misuse(
        ValueError,
        ("image_features", "text_features", f"rank {ODD}"),
        lambda odd, group: call("siglip_loss", group, (features(), features(3 if odd else 4).requires_grad_())),
    ),
    "labels that are no integers on one rank": Misuse(TypeError, ("labels", "float64", f"rank {ODD}"), _supcon_labels),
    "an option that is no word on one rank": Misuse(
        ValueError,
        ("reduction", "avg", f"rank {ODD}"),
        lambda odd, group: call("clip_loss", group, reduction="avg" if odd else "mean"),
    ),
    "no_grad on one rank, gradients on the others": Misuse(ValueError, ("grad",), _no_grad_here),
    "no rows at all": Misuse(
        ValueError,
        ("at least one row",),
        lambda odd, group: call("clip_loss", group, pair(True, rows=0)),
    ),
    "all weights zero": Misuse(
        ValueError, ("weight",), lambda odd, group: call("clip_loss", group, weight=torch.zeros(4))
    ),
    "different upstream gradients of a mean": Misuse(
        ValueError, ("1.0 on rank 0", f"2.0 on rank {ODD}"), _another_upstream
    ),
    "searches of different widths": Misuse(
        ValueError, ("width",), lambda odd, group: megabatch.retrieval_ranks(*pair(odd, width=7), group=group)
    ),
    "searches of different k": Misuse(
        ValueError, ("k",), lambda odd, group: megabatch.similarity_topk(*pair(), 3 if odd else 2, group=group)
    ),
    "a search for more keys than all ranks have": Misuse(
        ValueError, ("k", "13", "12"), lambda odd, group: megabatch.similarity_topk(*pair(), 13, group=group)
    ),
    "a search whose positives are out of range on one rank": Misuse(
        ValueError,
        ("positives", "9", f"rank {ODD}"),
        lambda odd, group: megabatch.retrieval_ranks(*pair(), positives=torch.full((4,), 9 if odd else 0), group=group),
    ),
}


def misuse(rank: int, group: Any, name: str) -> tuple[str, str]:
    with pytest.raises((ValueError, TypeError, RuntimeError, UserWarning)) as caught:
        MISUSES[name].act(rank == ODD, group)
    return type(caught.value).__name__, str(caught.value)


def good_step(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    image, text = pair()
    value = call("clip_loss", group, (image, text))
    value.backward()
    assert image.grad is not None
    return value.detach(), image.grad


def assert_usable(pool: Pool) -> None:
    images, texts = (torch.cat([side] * NUM_RANKS) for side in pair(grad=False))
    expected = reference.clip_loss(images, texts, 5.0)
    for value, gradient in pool.run(NUM_RANKS, good_step):
        torch.testing.assert_close(value, expected)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", MISUSES)
def test_every_rank_raises_the_same_error(pool: Pool, name: str) -> None:
    error, words, _ = MISUSES[name]
    first, *others = pool.run(NUM_RANKS, misuse, name)
    if "different functions" not in name and "a loss and a search" not in name:
        assert others == [first] * len(others)
        assert re.match(r"\w+: ", first[1]), "names the function"
    for kind, text in (first, *others):
        assert kind == error.__name__, text
        for word in words:
            assert re.search(word, text), f"{word!r} is not in {text!r}"
    assert_usable(pool)


def odd_weight(rank: int, group: Any) -> Tensor:
    return call("clip_loss", group, weight=torch.zeros(4) if rank == ODD else WEIGHT).detach()


def test_weights_may_all_be_zero_on_one_rank(pool: Pool) -> None:
    images, texts = (torch.cat([side] * NUM_RANKS) for side in pair(grad=False))
    weights = torch.cat([torch.zeros(4) if rank == ODD else WEIGHT for rank in range(NUM_RANKS)])
    for value in pool.run(NUM_RANKS, odd_weight):
        torch.testing.assert_close(value, reference.clip_loss(images, texts, 5.0, weight=weights))


def own_upstream(rank: int, group: Any) -> float:
    image, text = pair()
    (call("clip_loss", group, (image, text), reduction="none") * (rank + 1)).sum().backward()
    assert image.grad is not None
    return image.grad.abs().max().item()


def test_losses_per_row_may_have_any_upstream_gradient(pool: Pool) -> None:
    assert all(largest > 0 for largest in pool.run(NUM_RANKS, own_upstream))


def own_way(rank: int, group: Any) -> Tensor:
    """What only says how a rank computes is its own affair."""
    options = ({"tile": 2}, {"memory_budget": "1MiB"}, {"overlap": False})[rank]
    return call("clip_loss", group, exchange="ring", **options).detach()


def test_tiles_budgets_and_overlap_are_each_ranks_own(pool: Pool) -> None:
    images, texts = (torch.cat([side] * NUM_RANKS) for side in pair(grad=False))
    for value in pool.run(NUM_RANKS, own_way):
        torch.testing.assert_close(value, reference.clip_loss(images, texts, 5.0))


def _ask_as_a_stranger(rank: int, group: Any) -> str:
    with pytest.raises(ValueError) as caught:
        megabatch.clip_loss(*pair(), 5.0, group=dist.GroupMember.NON_GROUP_MEMBER)
    return str(caught.value)


def test_a_rank_outside_of_a_group_is_told_so(pool: Pool) -> None:
    for text in pool.run(2, _ask_as_a_stranger):
        assert "clip_loss: group must have this rank in it" in text


def _refused_and_destroyed(rank: int, world: Any, options: dict[str, Any]) -> bool:
    """Whether anything holds a group after a call on it was refused and it was destroyed."""
    group = dist.new_group()
    held = weakref.ref(group)
    gc.disable()
    try:
        with contextlib.suppress(ValueError, UserWarning):
            call("clip_loss", group, **options)
        dist.destroy_process_group(group)
        del group
        return held() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "options", [{"scale": NAN}, {"memory_budget": 10}, {"reduction": "most"}, {"backend": "triton"}], ids=str
)
def test_a_refusal_holds_no_group(pool: Pool, options: dict[str, Any]) -> None:
    """Its threads would outlive destroy_process_group, and abort the process at its end now and then."""
    assert pool.run(4, _refused_and_destroyed, options) == [False] * 4
