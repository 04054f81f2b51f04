"""Real trainers on real ranks: DDP, FSDP2, one that adds gradients up, and a loss module that nobody wraps."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch import reference

from .ranks import Pool

NUM_STEPS = 3
LOSSES = ("clip_loss", "siglip_loss", "nt_xent_loss")
SIZES = {
    ("even", 2): (5, 5),
    ("even", 3): (4, 4, 4),
    ("even", 4): (4, 4, 4, 4),
    ("uneven", 2): (3, 7),
    ("uneven", 3): (6, 1, 4),
    ("empty", 3): (5, 0, 6),
}

Parameters = dict[str, Tensor]
Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


class TwoTowers(nn.Module):
    """An encoder of pairs whose scale and bias are parameters like any other."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.image, self.text = nn.Linear(6, 5), nn.Linear(4, 5)
        self.log_scale = nn.Parameter(torch.tensor([1.5]))
        self.bias = nn.Parameter(torch.tensor([-2.0]))
        self.double()
        for parameter in (*self.image.parameters(), *self.text.parameters()):
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        image, text = (nn.functional.normalize(x, dim=1) for x in (self.image(images), self.text(texts)))
        return image, text, self.log_scale.exp(), 1 * self.bias


def batches(num_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(NUM_STEPS):
        yield (
            torch.randn(num_rows, 6, generator=generator, dtype=torch.float64),
            torch.randn(num_rows, 4, generator=generator, dtype=torch.float64),
        )


def rows_of(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def objective(module: Any, loss: str, outputs: tuple[Tensor, ...], **options: Any) -> Tensor:
    image, text, scale, bias = outputs
    function = getattr(module, loss)
    if loss == "nt_xent_loss":
        return function(image, text, scale, normalize=False, **options) + 0 * bias.sum()
    return function(image, text, scale, logit_bias=bias, normalize=False, **options)


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter or gradient, wherever its shards are."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def train(
    model: nn.Module,
    plain: nn.Module,
    loss_of: Callable[[tuple[Tensor, ...]], Tensor],
    rows: slice,
    num_rows: int,
    after_backward: Callable[[], None] = lambda: None,
) -> tuple[list[float], Parameters, Parameters]:
    """A few steps of SGD. Returns losses, the gradients of the first step and the parameters after the last."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    losses, gradients = [], {}
    for images, texts in batches(num_rows):
        optimizer.zero_grad()
        loss = loss_of(model(images[rows], texts[rows]))
        loss.backward()
        after_backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {name: whole(p.grad) for name, p in plain.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients, {name: whole(p) for name, p in plain.named_parameters()}


def one_process(loss: str, num_rows: int) -> tuple[list[float], Parameters, Parameters]:
    model = TwoTowers()
    return train(model, model, lambda outputs: objective(reference, loss, outputs), slice(None), num_rows)


def assert_same(ours: tuple[list[float], Parameters, Parameters], expected: Any) -> None:
    torch.testing.assert_close(ours[0], expected[0])
    for words, found, wanted in zip(("gradient of", "trained"), ours[1:], expected[1:], strict=True):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], msg=lambda m, what=f"{words} {name}": f"{what}: {m}")


# ---- DistributedDataParallel


def under_ddp(rank: int, group: Any, loss: str, sizes: tuple[int, ...], exchange: str) -> Any:
    plain = TwoTowers()
    model = DistributedDataParallel(plain, process_group=group)

    def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
        return objective(megabatch, loss, outputs, group=group, exchange=exchange)

    return train(model, plain, loss_of, rows_of(sizes, rank), sum(sizes))


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("rows", [("even", 2), ("even", 4), ("uneven", 2), ("uneven", 3), ("empty", 3)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_ddp_trains_as_one_process_does(pool: Pool, loss: str, rows: tuple[str, int], exchange: str) -> None:
    expected = one_process(loss, sum(SIZES[rows]))
    for answer in pool.run(rows[1], under_ddp, loss, SIZES[rows], exchange):
        assert_same(answer, expected)


def per_row_under_ddp(rank: int, group: Any, loss: str, sizes: tuple[int, ...]) -> Any:
    plain = TwoTowers()
    model = DistributedDataParallel(plain, process_group=group)

    def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
        per_row = objective(megabatch, loss, outputs, group=group, reduction="none")
        return (hardness(rank) * per_row).mean()

    return train(model, plain, loss_of, rows_of(sizes, rank), sum(sizes))


def hardness(rank: int) -> float:
    return 1.0 + 0.5 * rank


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_per_row_under_ddp_train_the_average_objective(pool: Pool, loss: str) -> None:
    """Each rank makes something else of its rows; DDP trains the mean of what they make."""
    sizes = SIZES["uneven", 3]
    model = TwoTowers()

    def own(per_row: Tensor, rank: int) -> Tensor:
        views = per_row.chunk(2) if loss == "nt_xent_loss" else (per_row,)
        return hardness(rank) * torch.cat([view[rows_of(sizes, rank)] for view in views]).mean()

    def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
        per_row = objective(reference, loss, outputs, reduction="none")
        return torch.stack([own(per_row, rank) for rank in range(len(sizes))]).mean()

    losses, *expected = train(model, model, loss_of, slice(None), sum(sizes))
    answers = pool.run(3, per_row_under_ddp, loss, sizes)
    torch.testing.assert_close(torch.tensor([answer[0] for answer in answers]).mean(0), torch.tensor(losses))
    for answer in answers:
        assert_same((losses, *answer[1:]), (losses, *expected))


# ---- FSDP2


def under_fsdp(rank: int, group: Any, loss: str, sizes: tuple[int, ...]) -> Any:
    with _torch_may_warn():
        mesh = (
            init_device_mesh("cpu", (len(sizes),))
            if len(sizes) == dist.get_world_size()
            else DeviceMesh.from_group(group, "cpu")
        )
        model = TwoTowers()
        for part in (model.image, model.text, model):
            fully_shard(part, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

        def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
            return objective(megabatch, loss, outputs, group=mesh)

        return train(model, model, loss_of, rows_of(sizes, rank), sum(sizes))


@contextmanager
def _torch_may_warn() -> Iterator[None]:
    """FSDP2 warns of its own use of torch; our warnings stay errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module=r"torch\..*")
        yield


@pytest.mark.parametrize("rows", [("even", 2), ("even", 4), ("uneven", 3)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_fsdp2_trains_as_one_process_does(pool: Pool, loss: str, rows: tuple[str, int]) -> None:
    expected = one_process(loss, sum(SIZES[rows]))
    for answer in pool.run(rows[1], under_fsdp, loss, SIZES[rows]):
        assert_same(answer, expected)


# ---- a trainer that adds gradients up


def with_a_sum(rank: int, group: Any, loss: str, sizes: tuple[int, ...]) -> Any:
    model = TwoTowers()

    def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
        return objective(megabatch, loss, outputs, group=group, grad_reduction="sum")

    def add_up() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)

    return train(model, model, loss_of, rows_of(sizes, rank), sum(sizes), add_up)


@pytest.mark.parametrize("rows", [("even", 4), ("uneven", 3), ("empty", 3)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_trainer_that_adds_gradients_up_trains_as_one_process_does(
    pool: Pool, loss: str, rows: tuple[str, int]
) -> None:
    expected = one_process(loss, sum(SIZES[rows]))
    for answer in pool.run(rows[1], with_a_sum, loss, SIZES[rows]):
        assert_same(answer, expected)


# ---- a loss module outside of any wrapper


def features(sizes: tuple[int, ...], rank: int | None, step: int) -> list[Tensor]:
    """Float32, so that bits could differ."""
    generator = torch.Generator().manual_seed(step)
    rows = slice(None) if rank is None else rows_of(sizes, rank)
    return [nn.functional.normalize(torch.randn(sum(sizes), 5, generator=generator), dim=1)[rows] for _ in range(2)]


def module_alone(rank: int, group: Any, name: str, sizes: tuple[int, ...]) -> list[Parameters]:
    criterion = getattr(megabatch, name)(group=group, normalize=False)
    optimizer = torch.optim.Adam(criterion.parameters(), lr=0.1)
    history = []
    for step in range(5):
        optimizer.zero_grad()
        criterion(*(x.requires_grad_() for x in features(sizes, rank, step))).backward()
        optimizer.step()
        history.append({name: whole(p) for name, p in criterion.named_parameters()})
    return history


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_a_loss_module_outside_ddp_stays_equal_on_all_ranks(pool: Pool, name: str) -> None:
    sizes = SIZES["uneven", 3]
    first, *others = pool.run(3, module_alone, name, sizes)
    log_scale = nn.Parameter(torch.tensor([1 / 0.07 if name == "ClipLoss" else 10.0]).log())
    expected = {"logit_scale": log_scale, "logit_bias": nn.Parameter(torch.tensor([-10.0]))}
    loss = {"ClipLoss": reference.clip_loss, "SigLipLoss": reference.siglip_loss}[name]
    optimizer = torch.optim.Adam(expected.values(), lr=0.1)
    for step, ours in enumerate(first):
        optimizer.zero_grad()
        loss(*features(sizes, None, step), log_scale.exp(), logit_bias=expected["logit_bias"]).backward()
        optimizer.step()
        for parameter, value in ours.items():
            torch.testing.assert_close(value, expected[parameter].detach(), rtol=1e-4, atol=1e-4)
            for other in others:
                assert torch.equal(value, other[step][parameter]), f"{parameter} after step {step}"
