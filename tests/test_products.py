"""What a step costs, in matrix products of the whole plane: counted inside the operators by torch.profiler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from torch.profiler import ProfilerActivity, profile

import megabatch
from megabatch import reference

NUM_ROWS, WIDTH, TILE = 128, 32, 32
NO_ROOM = 2 * TILE * TILE * 4  # bytes: for the work on one tile, and for no logits kept beside it


def products(step: Callable[[], Any], rows: int, columns: int, width: int) -> float:
    """Multiplications of a step in units of rows x columns x width."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True, acc_events=True) as profiler:
        step()
    flops = sum(event.flops for event in profiler.events() if event.name in ("aten::mm", "aten::addmm"))
    return flops / (2 * rows * columns * width)


def features(rows: int = NUM_ROWS, frozen: bool = False) -> torch.Tensor:
    return normalize(torch.randn(rows, WIDTH), dim=1).requires_grad_(not frozen)


def scalar(value: float, frozen: bool = False) -> torch.Tensor:
    return torch.tensor(value, requires_grad=not frozen)


def test_the_meter_counts_the_dense_loss() -> None:
    """One product forward, two backward, and what the meter cannot miss."""
    image, text = features(), features()
    count = products(lambda: (image @ text.T).exp().sum().backward(), NUM_ROWS, NUM_ROWS, WIDTH)
    assert count == pytest.approx(3)
    dense = products(
        lambda: reference.clip_loss(image, text, scalar(5.0), normalize=False).backward(), NUM_ROWS, NUM_ROWS, WIDTH
    )
    assert dense >= 3


@pytest.mark.parametrize(
    ("expected", "frozen"),
    [
        (4, ()),
        (3, ("image",)),
        (3, ("text",)),
        (2, ("image", "text")),
        (4, ("scale",)),
        (1, ("image", "text", "scale")),
    ],
    ids=str,
)
def test_clip(expected: int, frozen: tuple[str, ...]) -> None:
    image, text = features(frozen="image" in frozen), features(frozen="text" in frozen)
    scale = scalar(5.0, "scale" in frozen)

    def step() -> None:
        # With both sides frozen, dot products are held too.
        budget = NO_ROOM * 3 // 2 if {"image", "text"} <= set(frozen) else NO_ROOM
        value = megabatch.clip_loss(image, text, scale, normalize=False, tile=TILE, memory_budget=budget)
        if value.requires_grad:
            value.backward()

    assert products(step, NUM_ROWS, NUM_ROWS, WIDTH) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("budget", "expected"), [("1MiB", 3), (2**15 + 2**13, 3.5), (2**13, 4)], ids=str)
def test_clip_with_a_budget_that_keeps_logits(budget: str | int, expected: float) -> None:
    """All of them, half of them, none; one tile of work is 8 KiB, the plane 64 KiB."""
    image, text, scale = features(), features(), scalar(5.0)

    def step() -> None:
        megabatch.clip_loss(image, text, scale, normalize=False, tile=TILE, memory_budget=budget).backward()

    assert products(step, NUM_ROWS, NUM_ROWS, WIDTH) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("expected", "frozen"), [(3, ()), (2, ("image",)), (2, ("text",)), (1, ("image", "text", "scale"))], ids=str
)
def test_siglip(expected: int, frozen: tuple[str, ...]) -> None:
    image, text = features(frozen="image" in frozen), features(frozen="text" in frozen)
    scale, bias = scalar(5.0, "scale" in frozen), scalar(-5.0)

    def step() -> None:
        megabatch.siglip_loss(image, text, scale, bias, normalize=False, tile=TILE).backward()

    assert products(step, NUM_ROWS, NUM_ROWS, WIDTH) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("expected", "frozen"), [(3, ()), (2, ("query",)), (2, ("columns",)), (2.5, ("queue",))], ids=str
)
def test_info_nce(expected: float, frozen: tuple[str, ...]) -> None:
    """Keys and a queue of as many extra negatives: half of the columns each."""
    query = features(frozen="query" in frozen)
    key, queue = features(frozen="columns" in frozen), features(frozen="columns" in frozen or "queue" in frozen)

    def step() -> None:
        megabatch.info_nce_loss(query, key, scalar(5.0), negatives=queue, normalize=False, tile=TILE).backward()

    assert products(step, NUM_ROWS, 2 * NUM_ROWS, WIDTH) == pytest.approx(expected, rel=0.02)


def test_info_nce_walks_twice_where_no_useful_strip_fits() -> None:
    query, key = features(), features()
    budget = 3 * TILE * TILE * 4

    def step() -> None:
        megabatch.info_nce_loss(query, key, scalar(5.0), normalize=False, tile=TILE, memory_budget=budget).backward()

    assert products(step, NUM_ROWS, NUM_ROWS, WIDTH) == pytest.approx(4, rel=0.05)


def test_symmetric_losses_walk_one_triangle() -> None:
    """Two products, plus one row of tiles: of T strips, the triangle has T (T + 1) / 2 tiles."""
    view1, view2, scale = features(NUM_ROWS // 2), features(NUM_ROWS // 2), scalar(5.0)
    both = torch.cat([view1, view2]).detach().requires_grad_()
    labels = torch.randint(9, (NUM_ROWS,))
    strips = NUM_ROWS // TILE
    allowed = 2 + 2 / strips

    def nt_xent() -> None:
        megabatch.nt_xent_loss(view1, view2, scale, normalize=False, tile=TILE, memory_budget=NO_ROOM).backward()

    def supcon() -> None:
        megabatch.supcon_loss(both, labels, scale, normalize=False, tile=TILE, memory_budget=2 * NO_ROOM).backward()

    for step in (nt_xent, supcon):
        assert 2 < products(step, NUM_ROWS, NUM_ROWS, WIDTH) <= allowed * 1.02


def test_no_grad_costs_one_product() -> None:
    image, text = features(), features()
    with torch.no_grad():
        count = products(
            lambda: megabatch.clip_loss(image, text, scalar(5.0), normalize=False, tile=TILE), NUM_ROWS, NUM_ROWS, WIDTH
        )
    assert count == pytest.approx(1)
