"""inf_cl's losses and their stand-ins, against the dense formula: inf_cl itself runs on CUDA alone."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from megabatch.integrations import inf_cl

from .ranks import Pool

NAMES = ("cal_inf_loss", "cal_ring_loss", "cal_flash_loss")
MEANS = NAMES[:2]


def features(num_q: int, num_k: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Not normalised, and as these losses take them."""
    q, k = (torch.randn(rows, width, dtype=torch.float64).to(dtype) for rows in (num_q, num_k))
    return q.requires_grad_(), k.requires_grad_()


def dense(q: Tensor, k: Tensor, labels: Tensor | None, scale: Any, reduction: str) -> Tensor:
    labels = torch.arange(len(q)) if labels is None else labels
    return cross_entropy(scale * q @ k.T, labels, reduction=reduction)


def outcome(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The loss, and the gradients for an upstream gradient that differs from row to row."""
    upstream = torch.linspace(1, 3, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad((upstream * loss).sum(), inputs)]


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_the_originals(name: str) -> None:
    parameters = inspect.signature(getattr(inf_cl, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == [
        ("labels", None),
        ("scale", None),
        ("head_dim", 256),
    ]
    assert [p.name for p in parameters][:2] == ["q", "k"]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize(("num_q", "num_k", "width"), [(5, 5, 3), (7, 70, 48), (65, 65, 384), (1, 1, 1)])
@pytest.mark.parametrize("given_labels", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_any_shape(name: str, given_labels: bool, num_q: int, num_k: int, width: int) -> None:
    q, k = features(num_q, num_k, width)
    labels = torch.randint(num_k, (num_q,)) if given_labels else None
    scale = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    expected = dense(q, k, labels, scale, "none" if name == "cal_flash_loss" else "mean")
    found = getattr(inf_cl, name)(q, k, labels, scale)
    torch.testing.assert_close(outcome(found, q, k, scale), outcome(expected, q, k, scale))


@pytest.mark.parametrize("name", NAMES)
def test_fewer_keys_than_queries(name: str) -> None:
    q, k = features(9, 4, 6)
    labels = torch.arange(9) % 4
    expected = dense(q, k, labels, 1.0, "none" if name == "cal_flash_loss" else "mean")
    torch.testing.assert_close(outcome(getattr(inf_cl, name)(q, k, labels), q, k), outcome(expected, q, k))


@pytest.mark.parametrize("scale", [None, 1.0, 0.07, 1, 100.0, torch.tensor([100.0])])
@pytest.mark.parametrize("name", NAMES)
def test_every_scale(name: str, scale: Any) -> None:
    """Also 100, where the ring of the original overflows; and no warning that 0.07 looks like a temperature."""
    q, k = features(20, 20, 8)
    factor = 1.0 if scale is None else scale
    expected = dense(q, k, None, factor, "none" if name == "cal_flash_loss" else "mean")
    found = getattr(inf_cl, name)(q, k, scale=scale)
    torch.testing.assert_close(outcome(found, q, k), outcome(expected, q, k))
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_float32_for_half_precision(name: str, dtype: torch.dtype) -> None:
    q, k = features(20, 20, 8, dtype)
    found = outcome(getattr(inf_cl, name)(q, k, scale=torch.tensor(2.0)), q, k)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = outcome(dense(*exact, None, 2.0, "none" if name == "cal_flash_loss" else "mean"), *exact)
    assert found[0].dtype == torch.float32
    assert {x.dtype for x in found[1:]} == {dtype}
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(gradient, wanted.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("head_dim", [16, 256, 7])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_depends_on_head_dim(name: str, head_dim: int) -> None:
    q, k = features(5, 5, 12)
    loss = getattr(inf_cl, name)
    assert torch.equal(loss(q, k, None, None, head_dim), loss(q, k))


# ---- Ranks


def rows_of(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def batch(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(7)
    return *features(num_rows, num_rows, 6), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)


def on_a_rank(rank: int, group: dist.ProcessGroup, name: str, sizes: tuple[int, ...], local: Any) -> list[Tensor]:
    """Value, this rank's gradients, and the scale's after DDP's average."""
    q, k, scale = batch(sum(sizes))
    q, k = (x.detach()[rows_of(sizes, rank)].requires_grad_() for x in (q, k))
    value = getattr(inf_cl, name)(q, k, None if local is None else local[rank], scale)
    found = outcome(value, q, k, scale)
    dist.all_reduce(found[-1])
    return [*found[:-1], found[-1] / dist.get_world_size()]


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (6, 1, 3, 0)])
@pytest.mark.parametrize("given_labels", [False, True])
@pytest.mark.parametrize("name", MEANS)
def test_ranks_are_one_batch(name: str, given_labels: bool, sizes: tuple[int, ...], pool: Pool) -> None:
    """The scale's gradient is that of one process, not four times it; labels are rows of a rank's own keys."""
    local = [torch.arange(size).flip(0) for size in sizes] if given_labels else None
    labels = None
    if local is not None:
        labels = torch.cat([rows + sum(sizes[:rank]) for rank, rows in enumerate(local)])
    q, k, scale = batch(sum(sizes))
    value, *gradients, of_scale = outcome(dense(q, k, labels, scale, "mean"), q, k, scale)
    for rank, found in enumerate(pool.run(4, on_a_rank, name, sizes, local)):
        torch.testing.assert_close(found[0], value)
        torch.testing.assert_close(found[-1], of_scale)
        for mine, whole in zip(found[1:3], gradients, strict=True):
            torch.testing.assert_close(mine / 4, whole[rows_of(sizes, rank)])


def test_flash_loss_is_of_one_process_also_among_ranks(pool: Pool) -> None:
    sizes = (6, 1, 3, 2)
    q, k, scale = batch(sum(sizes))
    for rank, found in enumerate(pool.run(4, on_a_rank, "cal_flash_loss", sizes, None)):
        rows = rows_of(sizes, rank)
        torch.testing.assert_close(found[0], dense(q[rows], k[rows], None, scale, "none").detach())
