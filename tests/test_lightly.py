"""lightly's NTXentLoss and its stand-in: the same values, gradients and banks, on one process and on four."""

import copy
import inspect
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabatch
from megabatch.integrations.lightly import NTXentLoss

from .ranks import LoggedLines, Pool
from .shims import import_torchvision
from .test_memory import LargestTensor

import_torchvision()

from lightly.loss import NTXentLoss as Original  # noqa: E402

DTYPES = [torch.float64, torch.float32]


def views(num_rows: int, dtype: torch.dtype = torch.float64, width: int = 6) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, num_rows, width, dtype=torch.float64).to(dtype) * 3
    return x[0].requires_grad_(), x[1].requires_grad_()


def outcome(loss: nn.Module, out0: Tensor, out1: Tensor) -> list[Tensor]:
    """The loss, and the gradients for an upstream gradient that is not 1."""
    value = loss(out0, out1)
    return [value.detach(), *torch.autograd.grad(3 * value, (out0, out1))]


def test_signature_is_that_of_the_original() -> None:
    for method in ("__init__", "forward"):
        found = inspect.signature(getattr(NTXentLoss, method)).parameters
        for parameter in inspect.signature(getattr(Original, method)).parameters.values():
            assert found[parameter.name].default == parameter.default
            assert found[parameter.name].kind == parameter.kind
    mine, theirs = NTXentLoss(memory_bank_size=(4, 3)), Original(memory_bank_size=(4, 3))
    assert type(mine.memory_bank) is type(theirs.memory_bank)
    for name in ("temperature", "gather_distributed"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.state_dict() == theirs.state_dict() == {}


@pytest.mark.parametrize("temperature", [0.5, 0.05, 2, -0.5])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_bank(dtype: torch.dtype, num_rows: int, temperature: float) -> None:
    inputs = views(num_rows, dtype)
    torch.testing.assert_close(
        outcome(NTXentLoss(temperature), *inputs), outcome(Original(temperature), *inputs), rtol=1e-5, atol=1e-5
    )


def test_a_temperature_may_change_and_be_learnt() -> None:
    inputs = views(5)
    mine, theirs = NTXentLoss(), Original()
    temperatures = torch.full((2,), 0.3, dtype=torch.float64, requires_grad=True)
    mine.temperature, theirs.temperature = temperatures
    torch.testing.assert_close(outcome(mine, *inputs), outcome(theirs, *inputs))
    gradient = torch.autograd.grad(mine(*inputs) - theirs(*inputs), temperatures)[0]
    assert gradient[0] != 0
    torch.testing.assert_close(gradient[0], -gradient[1])
    NTXentLoss(nn.Parameter(torch.tensor(0.2)))


@pytest.mark.parametrize("temperature", [0.0, 1e-9, -1e-9])
def test_temperatures_next_to_zero_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"^Illegal"):
        Original(temperature)
    with pytest.raises(
        ValueError, match=rf"^NTXentLoss: temperature must be 1e-8 or more in size, .* got {temperature}"
    ):
        NTXentLoss(temperature)


# ---- With a bank


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.2, -0.5])
@pytest.mark.parametrize("size", [3, 7, 10])
def test_a_bank_that_wraps_round(size: int, temperature: float, dtype: torch.dtype) -> None:
    """Batches of 4: the bank is smaller than a batch, not a multiple of it, or takes several."""
    made, states = [], []
    for kind in (NTXentLoss, Original):
        torch.manual_seed(3)
        made.append(kind(temperature, memory_bank_size=(size, 6)).to(dtype))
        states.append(torch.get_rng_state())
    mine, theirs = made
    assert torch.equal(*states)
    for step in range(8):
        inputs = views(4, dtype)
        before = mine.memory_bank.bank.clone()
        torch.testing.assert_close(outcome(mine, *inputs), outcome(theirs, *inputs), rtol=1e-5, atol=1e-5)
        assert torch.equal(mine.memory_bank.bank, theirs.memory_bank.bank), f"step {step}"
        assert torch.equal(mine.memory_bank.bank_ptr, theirs.memory_bank.bank_ptr)
        assert not torch.equal(mine.memory_bank.bank, before)


def test_other_rows_are_no_negatives_where_there_is_a_bank() -> None:
    out0, out1 = views(4)
    loss = NTXentLoss(memory_bank_size=(5, 6)).double()
    frozen = out0.detach()  # does not update the bank
    rows = torch.stack([loss(frozen[i : i + 1], out1[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(loss(frozen, out1), rows.mean())


@pytest.mark.parametrize("way", ["no grad", "inference", "frozen out0", "frozen out1"])
def test_when_the_bank_is_updated(way: str) -> None:
    made = []
    for kind in (NTXentLoss, Original):
        torch.manual_seed(3)
        made.append(kind(memory_bank_size=(9, 6)).double())
    out0, out1 = views(4)
    before = made[0].memory_bank.bank.clone()
    modes = {"no grad": torch.no_grad, "inference": torch.inference_mode}
    with modes.get(way, torch.enable_grad)():
        out0 = out0.detach() if way == "frozen out0" else out0
        out1 = out1.detach() if way == "frozen out1" else out1
        torch.testing.assert_close(*(loss(out0, out1).detach() for loss in made))
    assert torch.equal(*(loss.memory_bank.bank for loss in made))
    assert torch.equal(made[0].memory_bank.bank, before) == (way != "frozen out1")


def test_what_somebody_put_into_the_bank_is_taken_as_it_is() -> None:
    """Not normalised again."""
    made = []
    for kind in (NTXentLoss, Original):
        made.append(kind(memory_bank_size=(9, 6)).double())
        made[-1].memory_bank.bank.copy_(torch.arange(54.0).reshape(9, 6) / 9)
    inputs = views(4)
    torch.testing.assert_close(*(outcome(loss, *inputs) for loss in made))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_bank_of_float32_serves_features_of_any_dtype(dtype: torch.dtype) -> None:
    """The original needs the module cast first."""
    torch.manual_seed(3)
    loss, exact = NTXentLoss(memory_bank_size=(9, 6)), Original(memory_bank_size=(9, 6)).double()
    exact.memory_bank.bank.copy_(loss.memory_bank.bank)
    inputs = views(4, dtype)
    found, expected = outcome(loss, *inputs), outcome(exact, *(x.detach().double().requires_grad_() for x in inputs))
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    precision = torch.finfo(dtype).eps ** 0.9
    torch.testing.assert_close([x.double() for x in found], expected, rtol=4 * precision, atol=4 * precision)
    assert loss.memory_bank.bank.dtype == torch.float32


def test_bank_of_no_rows_is_none() -> None:
    inputs = views(4)
    for size in ((0, 6), (0,)):
        torch.testing.assert_close(outcome(NTXentLoss(memory_bank_size=size), *inputs), outcome(NTXentLoss(), *inputs))


@pytest.mark.parametrize("size", [5, -1, (4,), (4, 5, 6)])
def test_sizes_that_the_original_refuses(size: Any) -> None:
    for kind in (NTXentLoss, Original):
        with pytest.raises(ValueError, match=r"[Mm]emory bank size"):
            kind(memory_bank_size=size)


def test_copies_have_banks_of_their_own() -> None:
    loss = NTXentLoss(memory_bank_size=(9, 6)).double()
    other = copy.deepcopy(loss)
    loss(*views(4))
    assert not torch.equal(loss.memory_bank.bank, other.memory_bank.bank)


def test_only_a_bank_needs_lightly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lightly"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert NTXentLoss()(*views(3)) > 0
    told = r"^NTXentLoss: lightly must be importable, .*=\(8, 4\), .* Run pip install 'megabatch\[lightly\]'\.$"
    with pytest.raises(ImportError, match=told):
        NTXentLoss(memory_bank_size=(8, 4))


# ---- Options, memory


def test_options_reach_the_loss() -> None:
    inputs = views(5)
    options = {"label_smoothing": 0.1, "reduction": "sum"}
    expected = megabatch.nt_xent_loss(*inputs, temperature=0.5, normalize=True, **options)
    torch.testing.assert_close(NTXentLoss(**options)(*inputs), expected)
    bank = NTXentLoss(memory_bank_size=(9, 6), reduction="none", tile=2, memory_budget="1MiB").double()
    assert bank(*inputs).shape == (5,)
    assert repr(NTXentLoss(reduction="sum")) == "NTXentLoss(temperature=0.5, gather_distributed=False, reduction='sum')"


@pytest.mark.parametrize("option", ["weight", "ids", "group", "normalize", "memory_buget", "return_stats"])
def test_other_options_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=rf"^NTXentLoss: options must be among memory_budget, .*, got {option}\."):
        NTXentLoss(**{option: None})


@pytest.mark.parametrize("bank", [0, (1024, 4)])
def test_no_matrix_is_made(bank: Any) -> None:
    inputs = views(256, torch.float32, width=4)
    with LargestTensor() as largest:
        NTXentLoss(memory_bank_size=bank, tile=32, memory_budget="170KiB")(*inputs).backward()
    assert largest.numel <= 34 * (256 + 1024)  # a strip of rows that InfoNCE completes at once
    with LargestTensor() as largest:
        Original(memory_bank_size=bank)(*inputs).backward()
    assert largest.numel >= 256 * (1024 if bank else 256), "the meter saw nothing"


# ---- Ranks


def step(rank: int, group: dist.ProcessGroup, mine: bool, gather: bool, bank: Any, sizes: tuple[int, ...]) -> Any:
    """Loss and the gradient of an encoder that DDP averages, of two steps; and the bank."""
    generator = torch.Generator().manual_seed(5)
    encoder = nn.Linear(4, 6).double()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, generator=generator)
    torch.manual_seed(3)
    loss = (NTXentLoss if mine else Original)(0.3, bank, gather).double()
    ddp = nn.parallel.DistributedDataParallel(encoder, process_group=group)
    told: list[Any] = []
    for _ in range(2):
        images = torch.randn(2, sum(sizes), 4, generator=generator, dtype=torch.float64)
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        encoder.zero_grad()
        out = ddp(images[:, rows])
        value = loss(out[0], out[1])
        value.backward()
        told.append((value.detach(), *(p.grad.clone() for p in encoder.parameters())))
    return told, None if loss.memory_bank is None else getattr(loss.memory_bank, "bank", None)


@pytest.mark.parametrize("bank", [0, (30, 6)])
@pytest.mark.parametrize("gather", [True, False])
def test_ranks_get_what_the_original_gives_them(gather: bool, bank: Any, pool: Pool) -> None:
    sizes = (4, 4, 4, 4)
    found, expected = (pool.run(4, step, mine, gather, bank, sizes) for mine in (True, False))
    for when in range(2):
        values, theirs = ([told[when][0] for told, _ in ranks] for ranks in (found, expected))
        if gather and not bank:  # the original's are those of local rows
            assert len(set(map(float, values))) == 1
            assert len(set(map(float, theirs))) == 4
            theirs = [torch.stack(theirs).mean()] * 4
        torch.testing.assert_close(values, theirs)
        for (mine, _), (original, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[when][1:], original[when][1:])
    if bank:
        for (_, mine), (_, original) in zip(found, expected, strict=True):
            assert torch.equal(mine, original)


def test_ranks_with_different_numbers_of_rows_are_one_batch(pool: Pool) -> None:
    alone = step_alone((6, 1, 4, 5))
    for told, _ in pool.run(4, step, True, True, 0, (6, 1, 4, 5)):
        torch.testing.assert_close(told, alone)


def logged_lines(rank: int, group: dist.ProcessGroup, gather: bool, bank: int) -> list[str]:
    with LoggedLines("megabatch.integrations") as lines:
        loss = NTXentLoss(gather_distributed=gather, memory_bank_size=(bank, 6) if bank else 0)
        for _ in range(2):
            loss(*views(3 + rank * (not bank)))
    return lines


@pytest.mark.parametrize("bank", [0, 16])
def test_local_negatives_on_several_ranks_are_logged_once_by_rank_0(bank: int, pool: Pool) -> None:
    (line,), *others = pool.run(2, logged_lines, False, bank)
    assert line.startswith("NTXentLoss: each of 4 ranks uses only its own rows as negatives. Pass gather_distributed=")
    assert others == [[]]
    assert pool.run(4, logged_lines, True, bank) == [[]] * 4


def step_alone(sizes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    encoder = nn.Linear(4, 6).double()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, generator=generator)
    told = []
    for _ in range(2):
        out = encoder(torch.randn(2, sum(sizes), 4, generator=generator, dtype=torch.float64))
        value = Original(0.3)(out[0], out[1])
        told.append((value.detach(), *torch.autograd.grad(value, list(encoder.parameters()))))
    return told
