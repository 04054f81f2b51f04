"""Results are never worse than the dense loss's own, and finite wherever the logits are."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import megabatch
from megabatch import reference
from megabatch.backends.epilogues import common_shift
from megabatch.losses.state import OWN_MAX

from .test_losses import LOSSES, gradients, make_inputs
from .tolerance import HALF_PRECISION, logit_error, slack

DTYPES = (torch.float64, torch.float32, *HALF_PRECISION)
GAPS = (80, 96, 100, 103, 200)


def run(library: object, loss: str, inputs: dict[str, Tensor], upstream: float, **options: object) -> dict[str, Tensor]:
    inputs = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    value = getattr(library, loss)(**inputs, normalize=False, **options)
    return {"loss": value.detach(), **gradients(value, inputs, upstream)}


def assert_no_worse_than_dense(loss: str, inputs: dict[str, Tensor], upstream: float = 1.0, **options: object) -> None:
    """Our error against float64 may exceed the dense loss's own error, in this dtype, by a small slack only."""
    scale = inputs["logit_scale"].item()
    exact_inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = run(reference, loss, exact_inputs, upstream)
    dense = run(reference, loss, inputs, upstream)
    ours = run(megabatch, loss, inputs, upstream, **options)
    num_rows = max(len(x) for x in inputs.values() if x.dim() == 2)
    for name, truth in exact.items():
        # Slopes are of size 1 / rows at most; a feature gradient has the scale on top.
        natural = scale / num_rows if truth.dim() == 2 else 1.0
        peer, error = ((got[name].double() - truth).abs().max().item() for got in (dense, ours))
        allowed = peer + slack(ours[name].dtype, truth.abs().max().item(), natural, logits=scale)
        assert error <= allowed, f"{name}: error {error:.2e}, dense {peer:.2e}, allowed {allowed:.2e}"


def fitted(loss: str, num_rows: int, width: int, closeness: float) -> dict[str, Tensor]:
    """A batch whose positives coincide and whose negatives lie `closeness` logits below, at scale 100."""
    inputs = make_inputs(loss, num_rows, width, torch.float32)
    rows = normalize(torch.randn(num_rows, width), dim=1)
    common = normalize(torch.randn(1, width), dim=1)
    rows = normalize(rows + common * math.sqrt(max(0.0, 1 / (closeness / 100) - 1)), dim=1)
    if loss == "supcon_loss":
        nearly = rows.repeat_interleave(2, 0)[:num_rows] + 1e-4 * torch.randn(num_rows, width)
        inputs["features"] = normalize(nearly, dim=1)
        inputs["labels"] = torch.arange(num_rows) // 2
    else:
        sides = [name for name, x in inputs.items() if x.dim() == 2]
        for name in sides:
            extra = normalize(torch.randn(len(inputs[name]) - num_rows, width), dim=1)
            inputs[name] = torch.cat([rows, extra])
    inputs["logit_scale"] = torch.tensor(100.0)
    return inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 3), (7, 1), (33, 20), (130, 65), (257, 96)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_worse_than_dense_on_random_batches(loss: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make_inputs(loss, *shape, torch.float32)
    inputs = {name: x.detach().to(dtype) if x.dim() == 2 else x for name, x in inputs.items()}
    if dtype == torch.float64:
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    assert_no_worse_than_dense(loss, inputs, tile=48)


@pytest.mark.parametrize("tile", [None, 32])
@pytest.mark.parametrize("budget", [None, "16MiB"])
@pytest.mark.parametrize("closeness", [5.0, 18.0, 60.0, 100.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_worse_than_dense_on_fitted_batches(loss: str, closeness: float, budget: str | None, tile: int) -> None:
    inputs = fitted(loss, 200, 64, closeness)
    assert_no_worse_than_dense(loss, inputs, tile=tile, memory_budget=budget)


def test_fitted_losses_are_never_negative() -> None:
    for loss in ("clip_loss", "info_nce_loss", "nt_xent_loss"):
        value = getattr(megabatch, loss)(**fitted(loss, 300, 64, 60.0), normalize=False, reduction="none", tile=100)
        assert value.min() >= -slack(torch.float64, 100.0, logits=0.0), loss  # logits of 100, added up in float64


def finite(loss: str, inputs: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    results = run(megabatch, loss, inputs, 1.0, **options)
    for name, value in results.items():
        assert value.isfinite().all(), f"{loss}: {name} is not finite"
    return results


def assert_close_to_exact(loss: str, inputs: dict[str, Tensor], **options: object) -> None:
    ours = finite(loss, inputs, **options)
    exact = run(reference, loss, {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}, 1.0)
    width = next(x.shape[1] for x in inputs.values() if x.dim() == 2)
    for name, truth in exact.items():
        # Logits of 1e4 are rounded to 5e-4 in float32, and every probability with them.
        logits = (inputs["logit_scale"] * max(x.norm(dim=1).max() ** 2 for x in inputs.values() if x.dim() == 2)).item()
        natural = inputs["logit_scale"].item() / len(inputs[name]) if truth.dim() == 2 else 1.0
        tolerance = logit_error(width, logits) * max(truth.abs().max().item(), natural)
        assert (ours[name].double() - truth).abs().max() <= tolerance, name


def with_sides(loss: str, sides: list[Tensor], scale: float) -> dict[str, Tensor]:
    inputs = make_inputs(loss, len(sides[0]), sides[0].shape[1], torch.float32)
    names = [name for name, x in inputs.items() if x.dim() == 2]
    for name, side in zip(names, sides, strict=False):
        inputs[name] = side
    inputs["logit_scale"] = torch.tensor(scale)
    return inputs


@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_ten_thousand_stay_finite(loss: str, sign: int, tile: int | None) -> None:
    rows = normalize(torch.randn(24, 16), dim=1)
    # Same rows on both sides: the positives' logits are the largest there are, or the smallest.
    assert_close_to_exact(loss, with_sides(loss, [rows * sign, rows], 1e4), tile=tile)


@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("side", ["rows", "columns", "both"])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("loss", ["clip_loss", "info_nce_loss"])
def test_rows_and_columns_far_below_their_tile(loss: str, gap: int, side: str, tile: int | None, budget: str) -> None:
    """One coordinate shifts all logits of a row (or column) by the gap, without touching the rest."""
    num_rows, width = 48, 18
    rows, columns = normalize(torch.randn(2, num_rows, width), dim=2).unbind()
    rows[:, -2:], columns[:, -2:] = 0.0, 0.0
    rows[:, -1], columns[:, -2] = 1.0, 1.0  # the other side's handle
    low = torch.arange(num_rows) % 5 == 1
    if side in ("rows", "both"):
        rows[low, -2] = -float(gap)
    if side in ("columns", "both"):
        columns[low, -1] = -float(gap)
    inputs = with_sides(loss, [rows, columns], 1.0)
    assert_close_to_exact(loss, inputs, tile=tile, memory_budget=budget)


def around_one_direction(num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Two sides whose rows all point one way, but for one row of the first."""
    rows, columns = normalize(torch.randn(1, width) + 0.05 * torch.randn(2, num_rows, width), dim=2).unbind()
    rows[3].neg_()
    return rows, columns


@pytest.mark.parametrize("budget", [None, "4KiB"])
@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("loss", ["clip_loss", "info_nce_loss", "nt_xent_loss"])
def test_a_row_opposite_to_all_others_at_scale_100(loss: str, tile: int | None, budget: str | None) -> None:
    """Its exponentials underflow with the one shift that all logits have in common up to this scale."""
    budget = None if tile is None else budget
    inputs = with_sides(loss, list(around_one_direction(40, 16)), 100.0)
    assert_close_to_exact(loss, inputs, tile=tile, memory_budget=budget)


@pytest.mark.parametrize(
    ("logits", "shift"), [(0, 0), (60, 0), (60.5, 1), (100, 40), (101, OWN_MAX), (math.inf, OWN_MAX)]
)
def test_logits_up_to_100_have_one_shift_in_common(logits: float, shift: float) -> None:
    assert common_shift(logits) == shift
    assert common_shift(math.nan) == OWN_MAX


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("loss", ["nt_xent_loss", "supcon_loss"])
def test_rows_far_below_their_tile_of_a_symmetric_plane(loss: str, gap: int) -> None:
    rows = normalize(torch.randn(40, 16), dim=1) * 0.1
    rows[::7] = normalize(torch.randn(6, 16), dim=1) * math.sqrt(gap)
    inputs = with_sides(loss, [rows, rows.roll(1, 0)], 1.0)
    assert_close_to_exact(loss, inputs, tile=16)
    assert_close_to_exact(loss, inputs)


@pytest.mark.parametrize("loss", LOSSES)
def test_all_equal_rows(loss: str) -> None:
    row = normalize(torch.randn(1, 12), dim=1)
    assert_close_to_exact(loss, with_sides(loss, [row.repeat(20, 1), row.repeat(20, 1)], 100.0), tile=7)


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_poisoned_memory_reaches_no_result(loss: str, tile: int | None, poison: None) -> None:
    inputs = make_inputs(loss, 23, 9, torch.float32)
    for reduction in ("mean", "none"):
        finite(loss, inputs, tile=tile, reduction=reduction)
        finite(loss, inputs, tile=tile, reduction=reduction, memory_budget="8MiB")
        finite(loss, {**inputs, "logit_scale": torch.tensor(1e4)}, tile=tile, reduction=reduction)


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_in_the_features_gives_nan(loss: str) -> None:
    inputs = {name: x.detach().clone() for name, x in make_inputs(loss, 20, 8, torch.float32).items()}
    features = next(x for x in inputs.values() if x.dim() == 2)
    features[3, 2] = torch.nan
    inputs["labels" if loss == "supcon_loss" else "logit_scale"] = (
        torch.zeros(20, dtype=torch.long) if loss == "supcon_loss" else torch.tensor(3.0)
    )
    assert getattr(megabatch, loss)(**inputs, normalize=False, tile=6).isnan()


def test_scale_gradient_from_bfloat16_features_has_the_right_sign() -> None:
    num_rows, width = 2048, 256
    common = torch.randn(num_rows, width)
    image, text = (normalize(common + 1.6 * torch.randn(num_rows, width), dim=1).bfloat16() for _ in range(2))
    scale = torch.tensor(100.0, requires_grad=True)
    (ours,) = torch.autograd.grad(megabatch.clip_loss(image, text, scale, normalize=False), scale)
    exact_scale = scale.detach().double().requires_grad_()
    logits = exact_scale * image.double() @ text.double().T
    (exact,) = torch.autograd.grad(
        reference.clip_loss(image.double(), text.double(), exact_scale, normalize=False), exact_scale
    )
    slope = (logits.softmax(1) + logits.softmax(0)) / 2 - torch.eye(num_rows)
    size = (slope * logits).abs().sum() / num_rows / 100
    assert ours.sign() == exact.sign()
    assert (ours - exact).abs() <= 1e-4 * size


@pytest.mark.parametrize("frozen", [(), ("image_features",), ("text_features",), ("image_features", "text_features")])
@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_scale_gradient_does_not_depend_on_what_is_frozen(loss: str, scale: float, frozen: tuple[str, ...]) -> None:
    inputs = make_inputs(loss, 30, 8)
    inputs["logit_scale"] = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    for name in frozen:
        inputs[name] = inputs[name].detach()
    ours = gradients(getattr(megabatch, loss)(**inputs, normalize=False, tile=12), inputs)
    exact = gradients(getattr(reference, loss)(**inputs, normalize=False), inputs)
    assert ours.keys() == exact.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, exact[name])


def test_float16_at_32768_rows() -> None:
    num_rows, width = 32768, 8
    image, text = (normalize(torch.randn(num_rows, width), dim=1).half().requires_grad_() for _ in range(2))
    value = megabatch.clip_loss(image, text, 10.0, normalize=False)
    value.backward()
    logits = 10.0 * image.detach().float()[:64] @ text.detach().float().T
    assert value.dtype == torch.float32
    assert image.grad.dtype == torch.float16
    assert image.grad.isfinite().all()
    # The rows' half of the gradient, densely; the columns' half pulls as strongly, so the sizes must agree.
    rows_half = 10 * (logits.softmax(1) @ text.detach().float() - text.detach().float()[:64]) / num_rows / 2
    assert 0.5 < (image.grad[:64].float().norm() / rows_half.norm()).item() / 2 < 2


@pytest.mark.parametrize("width", [8, 64])
def test_no_worse_than_dense_on_nearly_equal_pairs_of_one_class(width: int) -> None:
    """The slope of a diagonal tile takes rows' totals from one half of the plane and columns' from the other."""
    rows = normalize(torch.randn(60, width), dim=1).repeat_interleave(2, 0)
    features = normalize(rows + 1e-3 * torch.randn(120, width), dim=1)
    inputs = {"features": features, "labels": torch.arange(120) // 2, "logit_scale": torch.tensor(100.0)}
    assert_no_worse_than_dense("supcon_loss", inputs)
    assert_no_worse_than_dense("supcon_loss", inputs, tile=50)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_may_be_of_any_size(loss: str, reduction: str, size: float) -> None:
    inputs = make_inputs(loss, 12, 6, torch.float32)
    weight = torch.rand(12) + 0.1
    options = {"normalize": False, "reduction": reduction, "tile": 5}
    scaled = gradients(getattr(megabatch, loss)(**inputs, weight=weight * size, **options), inputs)
    plain = gradients(getattr(megabatch, loss)(**inputs, weight=weight, **options), inputs)
    for name, value in scaled.items():
        expected = plain[name] * (size if reduction == "sum" else 1.0)
        allowed = 2 * slack(torch.float32, expected.abs().max().item(), logits=7.0)
        torch.testing.assert_close(value, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("scale", [3e7, 1e9])
def test_logits_beyond_whole_numbers_of_float32(scale: float) -> None:
    row = normalize(torch.randn(1, 12), dim=1).repeat(20, 1)
    inputs = with_sides("clip_loss", [row, row], scale)
    assert_close_to_exact("clip_loss", inputs, tile=5)
    assert_close_to_exact("clip_loss", inputs)


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_equal_columns_tie_in_the_statistics_whatever_the_tiles(loss: str) -> None:
    row = normalize(torch.randn(1, 96), dim=1).repeat(200, 1)
    extra = {"logit_bias": -3.0} if loss == "siglip_loss" else {}
    for tile in ((9, 13), None):
        _, stats = getattr(megabatch, loss)(row, row, 10.0, **extra, normalize=False, tile=tile, return_stats=True)
        assert stats["accuracy"] == 1


@pytest.mark.parametrize("loss", LOSSES)
def test_an_infinite_row_at_scale_zero_gives_nan_as_the_dense_loss_does(loss: str) -> None:
    inputs = {name: x.detach().clone() for name, x in make_inputs(loss, 12, 6, torch.float32).items()}
    features = next(x for x in inputs.values() if x.dim() == 2)
    features[3] = torch.inf
    inputs["logit_scale"] = torch.tensor(0.0)
    if loss == "supcon_loss":
        inputs["labels"] = torch.arange(12) // 4
    assert getattr(reference, loss)(**inputs, normalize=False).isnan()
    for tile in (None, 5):
        assert getattr(megabatch, loss)(**inputs, normalize=False, tile=tile).isnan()


FLUSHED = """
import torch
from torch.nn.functional import normalize
import megabatch
from megabatch import reference
from megabatch.backends.epilogues import common_shift
from megabatch.losses.state import OWN_MAX

assert torch.set_flush_denormal(True)
torch.manual_seed(0)
rows, columns = (normalize(torch.randn(400, 32), dim=1) for _ in range(2))
# Query i lies lower by up to the gap, and most keys by 8 more: those are what is flushed first.
rows[:, -1], columns[:, -1] = 1.0, torch.linspace(-{gap}, 0, 400)[torch.randperm(400)]
rows[:, -2], columns[:, -2] = torch.where(torch.arange(400) % 50 == 0, 0.0, -8.0), 1.0
worst = 0.0
for tile in (None, 64):
    for budget in (None, 200_000):
        x, y = rows.clone().requires_grad_(), columns.clone().requires_grad_()
        megabatch.info_nce_loss(y, x, 1.0, normalize=False, tile=tile, memory_budget=budget).backward()
        a, b = rows.double().requires_grad_(), columns.double().requires_grad_()
        reference.info_nce_loss(b, a, 1.0, normalize=False).backward()
        for ours, exact in ((x.grad, a.grad), (y.grad, b.grad)):
            worst = max(worst, ((ours - exact).norm() / exact.norm()).item())
print(worst)
"""


@pytest.mark.parametrize("gap", [0, 60, 84, 120])
def test_gradients_keep_their_digits_where_denormal_numbers_are_flushed(gap: int) -> None:
    """In a process of its own: the mode is one of the CPU. exp(-87.3) is the smallest normal float32."""
    run = subprocess.run([sys.executable, "-c", FLUSHED.format(gap=gap)], capture_output=True, text=True, check=True)
    logits = 9.0 + gap
    assert float(run.stdout) <= 4 * torch.finfo(torch.float32).eps * logits
