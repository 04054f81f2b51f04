"""Every loss with every option equals its dense twin, in value, statistics and every gradient."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import megabatch
from megabatch import reference

LOSSES = ("clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss", "supcon_loss")
TILES = (None, 1, 5, (4, 7), 64)


def make_inputs(loss: str, num_rows: int, width: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    def features(rows: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(rows, width, dtype=dtype), dim=1).requires_grad_()

    scale = torch.tensor(7.0, dtype=dtype, requires_grad=True)
    if loss in ("clip_loss", "siglip_loss"):
        inputs = {"image_features": features(num_rows), "text_features": features(num_rows), "logit_scale": scale}
        if loss == "siglip_loss":
            inputs["logit_bias"] = torch.tensor([-2.0], dtype=dtype, requires_grad=True)
        return inputs
    if loss == "info_nce_loss":
        return {"query": features(num_rows), "key": features(num_rows + 3), "logit_scale": scale}
    if loss == "nt_xent_loss":
        return {"view1": features(num_rows), "view2": features(num_rows), "logit_scale": scale}
    return {"features": features(num_rows), "labels": torch.randint(3, (num_rows,)), "logit_scale": scale}


def gradients(value: Tensor, inputs: dict[str, Tensor], upstream: float = 1.0) -> dict[str, Tensor]:
    needed = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    weights = (
        torch.linspace(-1, 2, value.numel(), dtype=value.dtype) if value.dim() else torch.ones((), dtype=value.dtype)
    )
    total = upstream * (value * weights).sum()
    return dict(zip(needed, torch.autograd.grad(total, list(needed.values())), strict=True))


def assert_equals_twin(loss: str, inputs: dict[str, Tensor], upstream: float = 1.0, **options: object) -> None:
    kwargs = {"normalize": False, **inputs, **options}
    dense = {name: value for name, value in kwargs.items() if name not in ("tile", "memory_budget", "backend")}
    ours, expected = getattr(megabatch, loss)(**kwargs), getattr(reference, loss)(**dense)
    if options.get("return_stats"):
        (ours, our_stats), (expected, dense_stats) = ours, expected
        assert our_stats.keys() == dense_stats.keys()
        for name, value in our_stats.items():
            torch.testing.assert_close(value, dense_stats[name], msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(ours, expected)
    our_gradients, dense_gradients = gradients(ours, inputs, upstream), gradients(expected, inputs, upstream)
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, dense_gradients[name], msg=lambda m, name=name: f"d {name}: {m}")


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_its_dense_twin(loss: str, reduction: str, tile: object) -> None:
    if isinstance(tile, tuple) and loss in ("nt_xent_loss", "supcon_loss"):
        tile = tile[0]
    assert_equals_twin(loss, make_inputs(loss, 13, 6), tile=tile, reduction=reduction)


def option_mixes(loss: str) -> list[dict[str, object]]:
    mixes = []
    smoothings = (0.0,) if loss == "siglip_loss" else (0.0, 0.2)
    ids = (None,) if loss == "supcon_loss" else (None, "mask", "positive")
    for smoothing, same, weighted, normalize, stats in itertools.product(
        smoothings, ids, (False, True), (False, True), (False, True)
    ):
        mix: dict[str, object] = {"normalize": normalize, "return_stats": stats}
        if smoothing:
            mix["label_smoothing"] = smoothing
        if same:
            mix["same_ids"] = same
        if weighted:
            mix["weight"] = True
        mixes.append(mix)
    return mixes


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tile", [3, 64])
@pytest.mark.parametrize(("loss", "mix"), [(loss, mix) for loss in LOSSES for mix in option_mixes(loss)], ids=str)
def test_every_mix_of_options_equals_its_dense_twin(loss: str, mix: dict[str, Any], tile: int, reduction: str) -> None:
    num_rows = 11
    inputs = make_inputs(loss, num_rows, 5)
    options = dict(mix)
    if "same_ids" in options:
        ids = torch.randint(6, (num_rows,))
        if loss == "info_nce_loss":
            options |= {"query_ids": ids, "key_ids": torch.randint(6, (num_rows + 3,))}
        else:
            options["ids"] = ids
    if options.pop("weight", False):
        options["weight"] = torch.rand(num_rows).masked_fill(torch.arange(num_rows) == 2, 0)
    assert_equals_twin(loss, inputs, tile=tile, reduction=reduction, **options)


@pytest.mark.parametrize("seed", range(12))
def test_info_nce_with_any_positives_and_negatives_equals_its_twin(seed: int) -> None:
    """Repeated positives, a queue with and without ids, budgets from the smallest on, frozen parts."""
    torch.manual_seed(seed)
    num_queries, num_keys, num_negatives = 5 + seed, 3 + 2 * (seed % 4), 1 + seed
    inputs = make_inputs("info_nce_loss", num_queries, 6)
    inputs["key"] = inputs["key"].detach()[:num_keys].requires_grad_(seed % 3 != 1)
    inputs["negatives"] = torch.randn(num_negatives, 6, dtype=torch.float64, requires_grad=seed % 2 == 0)
    inputs["query"].requires_grad_(seed % 5 != 4)
    options: dict[str, Any] = {"positives": torch.randint(num_keys, (num_queries,))}
    if seed % 2:
        options |= {"query_ids": torch.randint(4, (num_queries,)), "same_ids": ("mask", "positive")[seed % 4 // 2]}
        options["negative_ids"] = torch.randint(4, (num_negatives,))
        if seed % 3:
            options["key_ids"] = torch.randint(4, (num_keys,))
    for budget in (None, 10_000, "1MiB"):
        for reduction in ("mean", "none"):
            assert_equals_twin("info_nce_loss", inputs, tile=4, reduction=reduction, memory_budget=budget, **options)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss", "nt_xent_loss"])
def test_one_frozen_side_equals_its_twin(loss: str, frozen: int) -> None:
    inputs = make_inputs(loss, 11, 5)
    name = [name for name, x in inputs.items() if x.dim() == 2][frozen]
    inputs[name] = inputs[name].detach()
    for tile in (None, 3):
        assert_equals_twin(loss, inputs, tile=tile)


@pytest.mark.parametrize("loss", LOSSES)
def test_one_tensor_may_be_both_sides(loss: str) -> None:
    inputs = make_inputs(loss, 9, 5)
    sides = [name for name, x in inputs.items() if x.dim() == 2]
    shared = inputs[sides[0]]
    for name in sides:
        inputs[name] = shared
    assert_equals_twin(loss, inputs, tile=4)
