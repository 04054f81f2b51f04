"""The kernels, run by Triton's interpreter on the CPU: the eager backend's results, whatever is asked of them."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch
from megabatch import reference
from megabatch.backends import backend as backend_module
from megabatch.backends import triton_backend, triton_settings, workspace
from megabatch.backends.eager import Eager
from megabatch.backends.triton_backend import Triton
from megabatch.losses import spec as specs
from megabatch.losses.block import Block, Tile
from megabatch.losses.state import State, state_fields
from megabatch.tiling import call
from megabatch.tiling.options import LossOptions
from megabatch.tiling.plan import Plan, Sizes

from . import test_numbers, test_ranks
from . import test_retrieval as test_retrieval_
from .interpreter import spare_repeated_patches
from .ranks import Pool
from .test_losses import LOSSES, gradients, make_inputs
from .test_numbers import GAPS, assert_no_worse_than_dense, fitted

pytest.importorskip("triton")
if not triton_backend._interprets():
    pytest.skip("for Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)
spare_repeated_patches()  # here, for the ranks that run functions of this file too

HALF_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF_DTYPES)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
NUM_ROWS = 37  # two blocks, the second a small one

Results = dict[str, Tensor]


def cycled(values: Iterable[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Every value with one of the others, in turn."""
    return list(zip(values, cycle(others), strict=False))


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Features in this dtype, scale and bias in float32; frozen parts stay frozen."""
    kinds = {name: dtype if x.dim() == 2 else torch.float32 for name, x in inputs.items() if x.is_floating_point()}
    return {
        name: x.detach().to(kinds[name]).requires_grad_(x.requires_grad) if name in kinds else x
        for name, x in inputs.items()
    }


def results(library: Any, loss: str, inputs: dict[str, Tensor], **options: Any) -> Results:
    value = getattr(library, loss)(**inputs, **{"normalize": False, **options})
    value, stats = value if isinstance(value, tuple) else (value, {})
    found = {"loss": value.detach(), **stats}
    if value.requires_grad:
        found |= {f"d {name}": gradient for name, gradient in gradients(value, inputs).items()}
    return found


def natural_sizes(inputs: dict[str, Tensor], options: dict[str, Any]) -> dict[int, float]:
    """How large the terms are that results are sums of, by the results' number of dimensions, cancelled or not.

    The dlogits of a row add up to 2 at most, those of a sigmoid loss to the number of columns; a feature's gradient has
    scale * feature on top, that of scale or bias is a sum over all rows.
    """
    sides = [x.detach().float() for x in inputs.values() if x.dim() == 2]
    num_rows, scale = len(sides[0]), inputs["logit_scale"].item()
    weight = options.get("weight")
    weight = torch.ones(num_rows) if weight is None else weight
    divisor = weight.sum().item() if options.get("reduction", "mean") == "mean" else 0.5  # upstreams of "none" reach 2
    per_row = len(sides[-1]) if "logit_bias" in inputs else 2
    entry = 1.0 if options.get("normalize") else max(side.abs().max().item() for side in sides)
    one_row = per_row * weight.max().item() / divisor
    return {2: one_row * scale * entry, 1: one_row, 0: per_row * weight.sum().item() / divisor}


def assert_close(ours: Results, expected: Results, inputs: dict[str, Tensor], **options: Any) -> None:
    """Two computations of the same. Each rounds a logit by eps of the largest, which moves probabilities by as much,
    and sums by a few eps. Gradients in bf16/fp16 have rounded dlogits (an eps, because the interpreter truncates) and
    are rounded themselves (half an eps)."""
    sides = [x.detach().float() for x in inputs.values() if x.dim() == 2]
    norms = [1.0 if options.get("normalize") else side.norm(dim=1).max().item() for side in sides]
    logits = inputs["logit_scale"].item() * max(norms) ** 2 + abs(inputs.get("logit_bias", torch.zeros(1)).item())
    sizes = natural_sizes(inputs, options)
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert value.dtype == expected[name].dtype
        error, largest = (value - expected[name]).abs().max().item(), expected[name].abs().max().item()
        allowed = 2 * EPS[torch.float32] * (logits + 4) * max(largest, sizes[value.dim()])
        if value.dtype in HALF_DTYPES:
            allowed += 1.5 * EPS[value.dtype] * largest
        assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}, the largest is {largest:.2e}"


def assert_same_bits(ours: Results, expected: Results) -> None:
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name


def assert_equals_eager(loss: str, inputs: dict[str, Tensor], **options: Any) -> None:
    expected = results(megabatch, loss, inputs, backend="eager", **options)
    assert all(value.isfinite().all() for value in expected.values())
    assert_close(results(megabatch, loss, inputs, backend="triton", **options), expected, inputs, **options)


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ "auto" takes the kernels, and some are launched: for tests of other files."""
    launched = []

    def start(self: Triton, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        launched.append(kernel)
        original(self, kernel, programs, arguments)

    original = Triton._start
    monkeypatch.setattr(Triton, "suits", staticmethod(lambda device: True))
    monkeypatch.setattr(Triton, "_start", start)
    yield
    assert launched


@pytest.fixture(params=["as planned", "nothing kept", "one tile kept"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Logits are kept as far as the budget goes, never, or those of the first tile only."""
    if request.param != "as planned":
        limit_kept(monkeypatch, 0 if request.param == "nothing kept" else 1)
    chosen: str = request.param
    return chosen


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward computes all logits again."""
    limit_kept(monkeypatch, 0)


def limit_kept(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    def make_plan(options: LossOptions, sizes: Sizes, may_be_one_pass: bool) -> Plan:
        plan = original(options, sizes, False)
        return plan._replace(kept=min(plan.kept, most))

    original = call.make_plan
    monkeypatch.setattr(call, "make_plan", make_plan)


@contextmanager
def settings(chosen: triton_settings.Settings) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(triton_settings.DEFAULTS, "interpreter", dict.fromkeys(("half", "tf32", "given"), chosen))
        yield


# ---- every loss, every option


def mixes(loss: str) -> list[dict[str, Any]]:
    smooth = {} if loss == "siglip_loss" else {"label_smoothing": 0.2}
    found: list[dict[str, Any]] = [
        {},
        {"return_stats": True},
        {"tile": 19, "normalize": True},
        {"reduction": "none", "weight": True, "return_stats": True, **smooth},
        {"reduction": "sum", "weight": True, "normalize": True, "memory_budget": "8MiB"},
    ]
    if smooth:
        found += [smooth, {"tile": 23, **smooth}]
    if loss == "supcon_loss":
        return found
    for same in ("mask", "positive"):
        found += [
            {"same_ids": same},
            {"same_ids": same, "tile": 23, "return_stats": True},
            {"same_ids": same, "reduction": "none", "weight": True, "normalize": True, **smooth},
        ]
    return found


def completed(loss: str, mix: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """The tensors of a mix's options."""
    options = dict(mix)
    if "same_ids" in options:
        ids, key_ids = torch.randint(9, (num_rows,)), torch.randint(9, (num_rows + 3,))
        options |= {"query_ids": ids, "key_ids": key_ids} if loss == "info_nce_loss" else {"ids": ids}
    if options.get("weight"):
        options["weight"] = torch.rand(num_rows).masked_fill(torch.arange(num_rows) == 2, 0)
    return options


@pytest.mark.parametrize(("loss", "mix"), [(loss, mix) for loss in LOSSES for mix in mixes(loss)], ids=str)
@pytest.mark.usefixtures("kept")
def test_equals_eager_with_every_option(loss: str, mix: dict[str, Any]) -> None:
    num_rows = 19 if loss == "nt_xent_loss" else NUM_ROWS
    inputs = make_inputs(loss, num_rows, 20, torch.float32)
    assert_equals_eager(loss, inputs, **completed(loss, mix, num_rows))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=named)
@pytest.mark.parametrize(("loss", "mix"), [(loss, mix) for loss in LOSSES for mix in mixes(loss)[1:4:2]], ids=str)
def test_equals_eager_in_half_precision(loss: str, mix: dict[str, Any], dtype: torch.dtype) -> None:
    num_rows = 19 if loss == "nt_xent_loss" else NUM_ROWS
    inputs = cast(make_inputs(loss, num_rows, 20), dtype)
    assert_equals_eager(loss, inputs, **completed(loss, mix, num_rows))


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, "mask"), (torch.float16, "positive")], ids=str)
@pytest.mark.usefixtures("kept")
def test_info_nce_with_positives_and_a_queue_equals_eager(dtype: torch.dtype, same: str) -> None:
    inputs = cast(make_inputs("info_nce_loss", NUM_ROWS, 20), dtype)
    inputs["negatives"] = normalize(torch.randn(9, 20), dim=1).to(dtype).requires_grad_()
    ids = {name: torch.randint(9, (n,)) for name, n in (("query_ids", 37), ("key_ids", 40), ("negative_ids", 9))}
    positives = torch.randint(40, (NUM_ROWS,))
    assert_equals_eager("info_nce_loss", inputs, positives=positives, **ids, same_ids=same, return_stats=True)
    assert_equals_eager("info_nce_loss", inputs, positives=positives, tile=(33, 17), label_smoothing=0.1)


def test_a_bias_of_the_softmax_losses_changes_nothing() -> None:
    inputs = make_inputs("clip_loss", NUM_ROWS, 20, torch.float32)
    plain = results(megabatch, "clip_loss", inputs, backend="triton")
    bias = torch.tensor(-5.0, requires_grad=True)
    biased = results(megabatch, "clip_loss", inputs | {"logit_bias": bias}, backend="triton")
    assert biased.pop("d logit_bias") == 0
    assert_close(biased, plain, inputs)


@pytest.mark.parametrize(
    ("frozen", "tile"),
    [
        (("image_features",), None),
        (("image_features",), 19),
        (("text_features", "logit_scale"), 19),
        (("logit_scale",), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_frozen_inputs_equal_eager(loss: str, frozen: tuple[str, ...], tile: int | None) -> None:
    inputs = make_inputs(loss, NUM_ROWS, 20, torch.float32)
    assert_equals_eager(loss, {name: x.detach() if name in frozen else x for name, x in inputs.items()}, tile=tile)


@pytest.mark.parametrize("tile", [None, 17])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_scale_alone_may_need_a_gradient(loss: str, tile: int | None) -> None:
    inputs = make_inputs(loss, 19, 20, torch.float32)
    inputs = {name: x.detach() if x.dim() == 2 else x for name, x in inputs.items()}
    assert_equals_eager(loss, inputs, tile=tile)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_gradients(loss: str) -> None:
    inputs = make_inputs(loss, 19, 20, torch.float32)
    with torch.no_grad():
        assert_equals_eager(loss, inputs, return_stats=True)
        assert_equals_eager(loss, inputs, tile=7)


@pytest.mark.filterwarnings("ignore:.*all ids are equal")
def test_rows_that_have_no_positive_and_rows_that_have_only_their_own() -> None:
    inputs = make_inputs("supcon_loss", NUM_ROWS, 20, torch.float32)
    for labels in (torch.arange(NUM_ROWS) // 2, torch.arange(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.long)):
        assert_equals_eager("supcon_loss", inputs | {"labels": labels}, return_stats=True)
        assert_equals_eager("supcon_loss", inputs | {"labels": labels}, tile=23, label_smoothing=0.3)
    for loss in ("clip_loss", "siglip_loss"):
        inputs = make_inputs(loss, NUM_ROWS, 20, torch.float32)
        for same in ("mask", "positive"):
            ids = torch.zeros(NUM_ROWS, dtype=torch.long)
            assert_equals_eager(loss, inputs, ids=ids, same_ids=same, return_stats=True)


@pytest.mark.parametrize(
    "module",
    [
        megabatch.ClipLoss(),
        megabatch.SigLipLoss(),
        megabatch.InfoNCELoss(),
        megabatch.NTXentLoss(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_take_the_backend_too(module: torch.nn.Module) -> None:
    first, second = torch.randn(2, 19, 20)
    values = []
    for backend in ("eager", "triton"):
        other = type(module)(backend=backend, normalize=True)
        values.append(other(first, second))
    torch.testing.assert_close(values[1], values[0])


def test_a_graph_may_be_walked_twice() -> None:
    for options in ({}, {"tile": 19, "memory_budget": "8MiB"}, {"reduction": "none"}):
        for loss in ("clip_loss", "siglip_loss"):
            inputs = make_inputs(loss, NUM_ROWS, 20, torch.float32)
            value = getattr(megabatch, loss)(**inputs, normalize=False, backend="triton", **options).sum()
            needed = [x for x in inputs.values() if x.requires_grad]
            first, second = (torch.autograd.grad(value, needed, retain_graph=True) for _ in range(2))
            assert all(torch.equal(*both) for both in zip(first, second, strict=True))


def test_a_compiled_step_equals_an_eager_one() -> None:
    torch._dynamo.reset()
    inputs = make_inputs("clip_loss", NUM_ROWS, 20, torch.float32)

    def step(**inputs: Tensor) -> Tensor:
        return megabatch.clip_loss(**inputs, normalize=False, backend="triton")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**inputs)
    value = step(**inputs)
    assert torch.equal(compiled, value)
    for ours, expected in zip(gradients(compiled, inputs).values(), gradients(value, inputs).values(), strict=True):
        assert torch.equal(ours, expected)


# ---- every shape


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("width", [1, 7, 32, 63, 65, 100, 384, 640, 1152])
@pytest.mark.usefixtures("nothing_kept")
def test_every_width_is_no_worse_than_dense(width: int, dtype: torch.dtype) -> None:
    loss = "siglip_loss" if width % 2 == 0 else "clip_loss"
    assert_no_worse_than_dense(loss, cast(make_inputs(loss, 5, width), dtype), backend="triton")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    cycled([(1, 1), (1, 7), (7, 63), (63, 65), (65, 1), (100, 7), (64, 32)], DTYPES),
    ids=str,
)
def test_every_number_of_rows_and_columns_is_no_worse_than_dense(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_rows, num_columns = shape
    inputs = cast(make_inputs("info_nce_loss", num_rows, 12), dtype)
    inputs["key"] = normalize(torch.randn(num_columns, 12), dim=1).to(dtype)
    inputs["positives"] = torch.randint(num_columns, (num_rows,))
    assert_no_worse_than_dense("info_nce_loss", inputs, backend="triton")


@pytest.mark.parametrize("num_rows", [1, 7, 32, 65])
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss", "supcon_loss"])
def test_every_number_of_rows_equals_eager(loss: str, num_rows: int) -> None:
    assert_equals_eager(loss, make_inputs(loss, num_rows, 12, torch.float32), return_stats=True)


@pytest.mark.parametrize("tile", [1, (4, 7), (33, 2), 33], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("nothing_kept")
def test_every_tile_equals_eager(loss: str, tile: Any) -> None:
    """Targets, ids and the diagonal are counted from where a tile begins."""
    num_rows = {1: 3, 33: 35}.get(tile, 9)
    if isinstance(tile, tuple) and loss in ("nt_xent_loss", "supcon_loss"):
        tile = tile[0]
    num_rows = 18 if tile == 33 and loss == "nt_xent_loss" else num_rows
    inputs = make_inputs(loss, num_rows, 6, torch.float32)
    mix = {} if loss == "supcon_loss" else {"same_ids": "mask"}
    assert_equals_eager(loss, inputs, tile=tile, **completed(loss, mix, num_rows))


def test_more_partial_results_than_a_merge_takes_at_once() -> None:
    """Of 1100 columns a row has 35: the largest logits are among the first, or among the last."""
    for start in (0, 1090):
        inputs = make_inputs("info_nce_loss", 3, 6, torch.float32)
        key = normalize(torch.randn(1100, 6), dim=1)
        key[start : start + 10] *= 5
        inputs["key"] = key.requires_grad_()
        mix = {"positives": torch.tensor([1, 700, 1099]), "return_stats": True, "label_smoothing": 0.1}
        assert_equals_eager("info_nce_loss", inputs, **mix)


SHAPES = {
    replace(chosen, warps=1, stages=1): kind
    for name, kinds in triton_settings.DEFAULTS.items()
    if name != "interpreter"
    for kind, chosen in kinds.items()
}


@pytest.mark.parametrize(("chosen", "loss"), cycled(SHAPES, ["clip_loss", "siglip_loss", "supcon_loss"]))
@pytest.mark.usefixtures("nothing_kept")
def test_the_blocks_of_every_architecture_equal_eager(
    chosen: triton_settings.Settings, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SHAPES[chosen] == "tf32":  # which the interpreter multiplies exactly
        monkeypatch.setattr(triton_backend, "float32_precision", lambda device: "tf32")
    inputs = make_inputs(loss, chosen.rows + 5, 70, torch.float32)
    inputs = cast(inputs, torch.float16) if SHAPES[chosen] == "half" else inputs
    with settings(chosen):
        assert_equals_eager(loss, inputs, tile=4 * chosen.rows, return_stats=True, reduction="none")


@pytest.mark.parametrize("group_rows", [1, 3, 8])
@pytest.mark.usefixtures("nothing_kept")
def test_every_grouping_of_blocks_equals_eager(group_rows: int) -> None:
    """No grouping, groups that do not divide the tile, and a group larger than the tile."""
    with settings(triton_settings.Settings(16, 16, 16, subtiles=4, group_rows=group_rows, warps=1, stages=1)):
        inputs = make_inputs("info_nce_loss", 60, 12, torch.float32)
        assert_equals_eager("info_nce_loss", inputs)


# ---- numbers


@pytest.mark.parametrize(("closeness", "tile"), [(18.0, 24), (60.0, None), (60.0, 24)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("kept")
def test_no_worse_than_dense_on_fitted_batches(loss: str, closeness: float, tile: int | None) -> None:
    """Also where the backward computes the logits again: positives must cancel all the same."""
    inputs = fitted(loss, 20 if loss == "nt_xent_loss" else 40, 64, closeness)
    assert_no_worse_than_dense(loss, inputs, tile=tile, backend="triton")


def test_fitted_losses_are_never_negative() -> None:
    for loss in ("clip_loss", "info_nce_loss", "nt_xent_loss"):
        inputs, how = fitted(loss, 40, 64, 60.0), {"normalize": False, "tile": 24, "backend": "triton"}
        assert getattr(megabatch, loss)(**inputs, reduction="none", **how).min() >= -1e-13, loss


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_of_ten_thousand_stay_finite(loss: str, sign: int) -> None:
    test_numbers.test_logits_of_ten_thousand_stay_finite(loss, sign, tile=None if sign > 0 else 17)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(("gap", "side"), [*((gap, "both") for gap in GAPS), (100, "rows"), (100, "columns")])
@pytest.mark.usefixtures("nothing_kept")
def test_rows_and_columns_far_below_their_tile(gap: int, side: str) -> None:
    test_numbers.test_rows_and_columns_far_below_their_tile("clip_loss", gap, side, None, None)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("how", [(None, "64MiB"), (16, None)], ids=str)
def test_rows_and_columns_far_below_their_tile_however_they_are_met(how: Any) -> None:
    for loss in ("clip_loss", "info_nce_loss"):
        test_numbers.test_rows_and_columns_far_below_their_tile(loss, 100, "both", *how)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("gap", [80, 103, 200])
def test_rows_far_below_their_tile_of_a_symmetric_plane(gap: int) -> None:
    test_numbers.test_rows_far_below_their_tile_of_a_symmetric_plane("supcon_loss", gap)


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("loss", LOSSES)
def test_other_numbers_that_break_naive_kernels(loss: str) -> None:
    if loss != "nt_xent_loss":
        test_numbers.test_all_equal_rows(loss)
    test_numbers.test_nan_in_the_features_gives_nan(loss)
    if loss == "clip_loss":
        test_numbers.test_logits_beyond_whole_numbers_of_float32(1e9)
    if loss in ("clip_loss", "siglip_loss"):
        test_numbers.test_scale_gradient_does_not_depend_on_what_is_frozen(loss, 0.0, ("text_features",))


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"normalize": True}], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "info_nce_loss", "siglip_loss"])
def test_padding_is_hidden_where_every_logit_is_very_negative(loss: str, options: dict[str, Any]) -> None:
    """A block's last rows and columns are not there: the logit of nothing, 0, would outdo all that are."""
    inputs = make_inputs(loss, 33, 6, torch.float32)
    first, second = (name for name, x in inputs.items() if x.dim() == 2)
    common = torch.tensor([30.0, 0, 0, 0, 0, 0])
    inputs[first] = (inputs[first].detach() + common).requires_grad_()
    inputs[second] = (inputs[second].detach() - common).requires_grad_()
    assert results(reference, loss, inputs, return_stats=True)["positive_logit"] < -4000
    for scale in (7.0, 300.0):
        inputs["logit_scale"] = torch.tensor(scale, requires_grad=True)
        exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        expected = results(reference, loss, exact, **options)
        for name, value in results(megabatch, loss, inputs, backend="triton", **options).items():
            error, largest = (value - expected[name]).abs().max(), expected[name].abs().max()
            # The logits themselves are rounded to eps * scale * 900, and every probability with them.
            assert error <= EPS[torch.float32] * scale * 900 * max(largest, 1e-3), name


def with_identity(loss: str, num_rows: int, scale: float, bias: float, roll: int = 0) -> dict[str, Tensor]:
    """Every feature is 1 in one row of each side: the rows' gradients are the dlogits themselves."""
    inputs = make_inputs(loss, num_rows, num_rows, torch.float32)
    first, second = (name for name, x in inputs.items() if x.dim() == 2)
    inputs |= {first: torch.eye(num_rows), second: torch.eye(num_rows).roll(roll, 0)}
    inputs |= {"logit_scale": torch.tensor(scale)} | ({"logit_bias": torch.tensor(bias)} if bias else {})
    return inputs


def dlogits_of(library: Any, loss: str, inputs: dict[str, Tensor], upstream: float, **options: Any) -> Tensor:
    first = next(name for name, x in inputs.items() if x.dim() == 2)
    dtype = torch.float16 if library is megabatch else torch.float64
    given = {name: x.to(dtype).requires_grad_(name == first) if x.dim() == 2 else x for name, x in inputs.items()}
    value = getattr(library, loss)(**given, normalize=False, reduction="sum", **options)
    return gradients(value, given, upstream)[first].double()


# Probabilities of batches of 32768, of a million, and of 50 million.
@pytest.mark.parametrize(("depth", "tile"), [(10.5, 24), (13.9, None), (17.7, None)])
@pytest.mark.parametrize("loss", ["clip_loss", "info_nce_loss", "siglip_loss"])
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_float16_keeps_the_dlogits_of_large_batches(
    loss: str, depth: float, tile: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eager, "multiplies_half", staticmethod(lambda device, normalize: True))  # as on a GPU
    bias, scale = (-depth, 2 * depth) if loss == "siglip_loss" else (0.0, depth)
    inputs, upstream = with_identity(loss, 40, scale, bias), 0.1 * torch.tensor(depth).exp().item()
    exact = dlogits_of(reference, loss, inputs, upstream)
    ours = dlogits_of(megabatch, loss, inputs, upstream, backend=backend, tile=tile)
    negatives = ~torch.eye(40, dtype=torch.bool)
    assert (exact.abs() > 0.05).all()
    # The dlogits and the gradient are rounded to float16, by half an eps each; the logits to float32.
    allowed = EPS[torch.float16] + 4 * EPS[torch.float32] * depth
    assert (ours / exact - 1)[negatives].abs().max() <= allowed


@pytest.mark.parametrize("depth", [10.5, 17.7, 60.0])
def test_small_sigmoid_losses_keep_their_digits(depth: float) -> None:
    inputs = with_identity("siglip_loss", 40, 2 * depth, -depth)
    ours = megabatch.siglip_loss(**inputs, normalize=False, backend="triton")
    exact = reference.siglip_loss(**{name: x.double() for name, x in inputs.items()}, normalize=False)
    assert (ours / exact - 1).abs() <= EPS[torch.float32] * (depth + 4)  # an exponential of a rounded logit


@pytest.mark.parametrize("loss", ["info_nce_loss", "siglip_loss"])
def test_float16_keeps_the_dlogits_of_rows_of_small_weight(loss: str) -> None:
    inputs = with_identity(loss, 40, 3.0, -3.0 if loss == "siglip_loss" else 0.0)
    weight = torch.ones(40).masked_fill(torch.arange(40) % 3 == 1, 1e-5)
    exact = dlogits_of(reference, loss, inputs, 1.0, weight=weight)[1::3] * 1e4
    ours = dlogits_of(megabatch, loss, inputs, 1e4, weight=weight, backend="triton")[1::3]
    assert (ours / exact - 1).abs().max() <= EPS[torch.float16] + 4 * EPS[torch.float32] * 3


@pytest.mark.parametrize("loss", ["clip_loss", "info_nce_loss", "nt_xent_loss"])
def test_float16_has_room_for_the_largest_dlogits(loss: str) -> None:
    inputs = with_identity(loss, 20, 30.0, 0.0, roll=1)
    exact = dlogits_of(reference, loss, inputs, 1.0)
    allowed = (EPS[torch.float16] + 4 * EPS[torch.float32] * 30) * exact.abs().max()
    assert (dlogits_of(megabatch, loss, inputs, 1.0, backend="triton") - exact).abs().max() <= allowed


@pytest.mark.parametrize("options", [{}, {"tile": 48}, {"normalize": True}], ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=named)
def test_the_scale_gradient_of_half_features_is_summed_before_anything_is_rounded(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    num_rows, scale = 80, torch.tensor(50.0, requires_grad=True)
    common = torch.randn(num_rows, 40)
    image, text = (normalize(common + 1.6 * torch.randn(num_rows, 40), dim=1).to(dtype) for _ in range(2))
    (ours,) = torch.autograd.grad(
        megabatch.clip_loss(image, text, scale, backend="triton", **{"normalize": False, **options}), scale
    )
    first, second = (normalize(x.double(), dim=1) if options.get("normalize") else x.double() for x in (image, text))
    dots = first @ second.T
    logits = 50 * dots
    dlogits = ((logits.softmax(1) + logits.softmax(0)) / 2 - torch.eye(num_rows)) / num_rows
    assert (ours - (dlogits * dots).sum()).abs() <= EPS[torch.float32] * 50 * (dlogits * dots).abs().sum()


# ---- memory


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever kernels write to lies between NaN, which is still there when they are done."""
    width, fenced = 4096, []

    def fence(rows: int, length: int, dtype: torch.dtype) -> Tensor:
        fenced.append(torch.full((rows, length + 2 * width), torch.nan, dtype=dtype))
        return fenced[-1][:, width : width + length]

    def buffer(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return fence(1, size, dtype)[0]

    def neutral(names: tuple[str, ...], num_rows: int, device: torch.device, shift: float) -> State:
        return State(names, fence(len(names), num_rows, torch.float64)).reset(shift)

    monkeypatch.setattr(workspace, "buffer", buffer)
    monkeypatch.setattr(workspace, "allocate", lambda size, dtype, device: fence(1, size, dtype)[0])
    monkeypatch.setattr(State, "neutral", neutral)
    yield
    assert fenced
    for memory in fenced:
        assert memory[:, :width].isnan().all()
        assert memory[:, -width:].isnan().all()


def among_others(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same, as views: features with NaN on all sides, integers with others between and behind."""
    views = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.dim() == 2:
            memory = torch.full((len(x) + 80, x.shape[1] + 50), torch.nan, dtype=x.dtype)
            views[name] = memory[40:-40, : x.shape[1]]
            views[name] = views[name].copy_(x.detach()).requires_grad_(x.requires_grad)
        elif isinstance(x, Tensor) and x.dim() == 1 and not x.is_floating_point():
            views[name] = torch.stack([x, x.new_zeros(len(x))], 1)[:, 0]
    return views


@pytest.mark.usefixtures("poison", "fences", "kept")
@pytest.mark.parametrize(
    ("dtype", "mix"),
    [
        (torch.float32, {"return_stats": True}),
        (torch.bfloat16, {"reduction": "none"}),
        (torch.float16, {"tile": 23, "normalize": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_beyond_inputs_and_outputs_is_read_or_written(
    loss: str, dtype: torch.dtype, mix: dict[str, Any]
) -> None:
    num_rows = 19 if loss == "nt_xent_loss" else NUM_ROWS
    inputs = cast(make_inputs(loss, num_rows, 20), dtype)
    ours = results(megabatch, loss, among_others(inputs), backend="triton", **mix)
    assert_close(ours, results(megabatch, loss, inputs, backend="eager", **mix), inputs, **mix)


@pytest.mark.parametrize("same", ["mask", "positive"])
def test_ids_may_be_every_second_entry_of_others(same: str) -> None:
    for loss in ("clip_loss", "siglip_loss", "info_nce_loss"):
        options = completed(loss, {"same_ids": same}, NUM_ROWS)
        inputs = make_inputs(loss, NUM_ROWS, 20, torch.float32)
        expected = results(megabatch, loss, inputs, backend="eager", **options)
        assert_close(results(megabatch, loss, inputs, backend="triton", **among_others(options)), expected, inputs)


def test_labels_and_positives_may_be_every_second_entry_of_others() -> None:
    inputs = make_inputs("supcon_loss", NUM_ROWS, 20, torch.float32)
    expected = results(megabatch, "supcon_loss", inputs, backend="eager")
    assert_close(results(megabatch, "supcon_loss", among_others(inputs), backend="triton"), expected, inputs)
    inputs = make_inputs("info_nce_loss", NUM_ROWS, 20, torch.float32)
    options = {"positives": torch.randint(40, (NUM_ROWS,))}
    expected = results(megabatch, "info_nce_loss", inputs, backend="eager", **options)
    assert_close(
        results(megabatch, "info_nce_loss", inputs, backend="triton", **among_others(options)), expected, inputs
    )


@pytest.mark.parametrize("layout", ["transposed", "expanded", "every second feature", "backwards"])
def test_features_may_have_any_strides(layout: str) -> None:
    inputs = make_inputs("clip_loss", NUM_ROWS, 20, torch.float32)
    image = {
        "transposed": lambda x: x.T.contiguous().T,
        "expanded": lambda x: x[:1].expand(NUM_ROWS, 20),
        "every second feature": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 2)[:, :, 0],
        "backwards": lambda x: x.T.contiguous()[:, 1:].T,
    }[layout](inputs["image_features"].detach())
    inputs["image_features"] = image.requires_grad_()
    inputs["text_features"] = inputs["text_features"].detach()[: len(image)].requires_grad_()
    assert_equals_eager("clip_loss", inputs)


@pytest.mark.parametrize(("loss", "dtype"), cycled([*LOSSES, "siglip_loss"], DTYPES), ids=str)
@pytest.mark.parametrize("budget", [None, "8MiB"])
def test_rows_of_dlogits_are_aligned(
    loss: str, dtype: torch.dtype, budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def start(self: Triton, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        written.extend([arguments["dlogits"]] if arguments.get("dlogits") is not None else [])
        original(self, kernel, programs, arguments)

    original = Triton._start
    monkeypatch.setattr(Triton, "_start", start)
    results(megabatch, loss, cast(make_inputs(loss, 32, 20), dtype), backend="triton", tile=16, memory_budget=budget)
    assert written
    for dlogits in written:
        assert dlogits.data_ptr() % 16 == 0
        assert dlogits.stride(0) % 16 == 0


def test_features_are_normalised_before_they_are_rounded() -> None:
    """As under autocast, which the CPU has no say in: lengths that float16 has no numbers for."""
    features = normalize(torch.randn(9, 20), dim=1)
    lengths = torch.logspace(-9, 9, 9)
    block = Block(features * lengths[:, None], 0, inverse_norm=1 / lengths)
    scores = new_backend(specs.info_nce("ignore", 0.0), operand_dtype=torch.float16).scores(Tile(block, block))
    torch.testing.assert_close(scores, features @ features.T, atol=2 * EPS[torch.float16], rtol=0)


# ---- memory that passes 2^31 elements, of which only what is touched is real


def reserved(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros so far apart that 32-bit offsets do not reach them, but memory that is there, all zeros too."""
    behind = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, (2**31 + behind) * dtype.itemsize, flags=flags)
    except OSError:
        pytest.skip("this machine reserves no memory that it has not")
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, 2**31)


@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**27)], ids=["rows", "features"])
@pytest.mark.parametrize("side", ["image_features", "text_features"])
def test_features_may_lie_beyond_32_bits(side: str, strides: tuple[int, int]) -> None:
    inputs = cast(make_inputs("clip_loss", 3, 36), torch.float16)
    expected = results(megabatch, "clip_loss", inputs, backend="triton")
    far = reserved((3, 36), strides, torch.float16).copy_(inputs[side].detach())
    inputs[side] = far.requires_grad_()
    assert_close(results(megabatch, "clip_loss", inputs, backend="triton"), expected, inputs)


def new_backend(spec: specs.Spec, changes: dict[str, Any] | None = None, **options: Any) -> Triton:
    """A backend that launches kernels with other arguments in the place of some."""

    class Changed(Triton):
        def _start(self, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
            known = {name: value for name, value in (changes or {}).items() if name in arguments}
            super()._start(kernel, (changes or {}).get("programs", programs), arguments | known)

    operand_dtype, kind = options.pop("operand_dtype", torch.float32), options.pop("kind", None)
    scale, bias = options.pop("scale", 1.0), options.pop("bias", 0.0)
    backend = Changed(spec, scale, bias, torch.float32, operand_dtype, torch.device("cpu"), **options)
    backend.kind = kind or backend.kind
    return backend


def new_tile(spec: specs.Spec, sides: tuple[int, int], far_state: bool = False) -> Tile:
    """With neutral states, consecutive targets, and row gradients of one."""
    names = state_fields(spec, stats=False)
    blocks = []
    for length in sides:
        table = torch.zeros(len(names), length, dtype=torch.float64)
        table = reserved((len(names), length), (2**30, 1), torch.float64) if far_state else table
        row_grad = torch.ones(length, dtype=torch.float64)
        features = normalize(torch.randn(length, 6), dim=1)
        state = State(names, table).reset()
        blocks.append(Block(features, 0, state=state, row_grad=row_grad, grad=torch.zeros(length, 6)))
    blocks[0].target_offset = 0
    return Tile(*blocks)


def test_dot_products_and_dlogits_may_lie_beyond_32_bits() -> None:
    """Those of 2^30 columns, of which the first block is computed."""
    spec = specs.siglip("ignore")
    tile = new_tile(spec, (3, 64))
    expected, dots = new_backend(spec).dlogits(tile), tile.rows.features @ tile.columns.features.T
    expected = expected.clone()
    far = reserved((3, 64), (2**30, 1), torch.float32)
    changes = {"dots": far, "dots_stride": 2**30, "num_columns": 2**30, "BLOCK_COLUMNS": 64, "programs": 1}
    new_backend(spec, changes, kind="tf32").scores(tile)
    torch.testing.assert_close(far, dots)
    dlogits = new_backend(spec, changes).dlogits(tile, torch.zeros(3 * 64))
    torch.testing.assert_close(dlogits, expected)
    far = reserved((3, 64), (2**30, 1), torch.float32)
    new_backend(spec, {"dlogits": far, "dlogits_stride": 2**30}).dlogits(tile)
    assert torch.equal(far, expected)


def test_states_may_lie_beyond_32_bits() -> None:
    spec, found = specs.clip("positive", 0.1), []
    for far_state in (False, True):
        torch.manual_seed(0)
        tile = new_tile(spec, (5, 7), far_state)
        backend = new_backend(spec)
        backend.accumulate_statistics(tile)
        dlogits = backend.dlogits(tile)
        assert dlogits is not None
        found.append([tile.rows.state.table, tile.columns.state.table, dlogits.clone()])
    for near, far in zip(*found, strict=True):
        assert near.isfinite().all()
        assert torch.equal(near, far)


@pytest.mark.parametrize("explicit", [False, True])
def test_targets_may_lie_beyond_32_bits(explicit: bool) -> None:
    """Columns that begin beyond 2^33: targets are counted in 64 bits before they are counted from the tile's edge."""
    spec, found = specs.clip("ignore", 0.0), []
    for offset in (0, 2**33):
        torch.manual_seed(0)
        tile = new_tile(spec, (5, 7))
        tile.columns.offset = offset
        tile.rows.target_offset = None if explicit else offset + 1
        tile.rows.targets = torch.tensor([3, 0, 6, 1, 1]) + offset if explicit else None
        new_backend(spec).accumulate_statistics(tile)
        found.append([tile.rows.state.table, tile.columns.state.table])
    logits = tile.rows.features @ tile.columns.features.T
    positives = torch.tensor([3, 0, 6, 1, 1] if explicit else [1, 2, 3, 4, 5])
    near, far = found
    assert all(torch.equal(*both) for both in zip(near, far, strict=True))
    torch.testing.assert_close(near[0][2].float(), logits[torch.arange(5), positives])
    # Where all lies within 2^31 but the target is 2^32 columns away, it is not in this tile.
    tile.rows.state.reset()
    if not explicit:
        tile.columns.offset, tile.rows.target_offset = 0, 2**32 + 1
        assert tile.targets is not None
        new_backend(spec).accumulate_statistics(tile)
        assert not tile.rows.state["positive_sum"].any()


def test_partial_statistics_may_lie_beyond_32_bits() -> None:
    """Those of 2^30 rows, of which the first blocks are computed."""
    spec, num_rows, num_columns = specs.clip("ignore", 0.0), 2**30, 96
    tile = new_tile(spec, (32, num_columns))
    tile.rows.target_offset = None
    logits = tile.rows.features @ tile.columns.features.T
    of_rows = reserved((2, 3, 32), (3 * num_rows, num_rows, 1), torch.float32)
    of_columns = reserved((2, num_columns), (num_rows // 32 * num_columns, 1), torch.float32)
    changes = {"num_rows": num_rows, "GROUP_ROWS": 1}
    new_backend(spec, changes)._run(tile, {"x_partials": of_rows, "y_partials": of_columns})
    blocks = logits.view(32, 3, 32)
    max_ = blocks.amax(2)
    torch.testing.assert_close(of_rows, torch.stack([max_, (blocks - max_[:, :, None]).exp().sum(2)]).mT)
    max_ = logits.amax(0)
    torch.testing.assert_close(of_columns, torch.stack([max_, (logits - max_).exp().sum(0)]))


def test_partial_statistics_are_merged_from_beyond_32_bits() -> None:
    spec, length = specs.clip("ignore", 0.0), 2**30
    tile = new_tile(spec, (32, 5))
    tile.rows.target_offset = None
    partials = reserved((2, 3, 32), (3 * length, length, 1), torch.float32)
    partials[0] = torch.randn(3, 32)
    partials[1] = torch.rand(3, 32) + 1
    backend = new_backend(spec, {"x_length": length, "x_blocks": 3, "programs": 1})
    # As if the rest of these rows were there: what belongs to row 32 is read, and written behind what is looked at.
    table = torch.zeros(len(tile.rows.state.names), 64, dtype=torch.float64)
    tile.rows.state = State(tile.rows.state.names, table[:, :32]).reset()
    backend._merge(tile, {"x_partials": partials})
    state = tile.rows.state
    found = state["max"] + state["sum_exp"].log()
    torch.testing.assert_close(found, (partials[0].double() + partials[1].double().log()).logsumexp(0))


# ---- the same bits


def test_programs_may_run_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """None adds to what another wrote: nothing depends on who comes first."""
    from triton.runtime.interpreter import InterpreterBuilder

    set_place = InterpreterBuilder.set_grid_idx

    def backwards(self: Any, x: int, y: int, z: int) -> None:
        set_place(self, self.grid_dim[0] - 1 - x, y, z)

    for loss in LOSSES:
        inputs, found = make_inputs(loss, 40, 20, torch.float32), []
        for place in (set_place, backwards):
            monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", place)
            found.append(results(megabatch, loss, inputs, backend="triton", return_stats=True))
        assert_same_bits(*found)


@pytest.mark.parametrize(("loss", "dtype"), cycled(LOSSES, DTYPES), ids=str)
def test_every_run_gives_the_same_bits(loss: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Whatever was in memory before."""
    inputs, found = cast(make_inputs(loss, 19, 20), dtype), []
    for poisoned in (False, True):
        if poisoned:
            request.getfixturevalue("poison")
        workspace.empty_cache()
        found.append(results(megabatch, loss, inputs, backend="triton", tile=13, return_stats=True))
    assert_same_bits(*found)


# ---- launches


class Operations(TorchDispatchMode):
    """Names of torch's operations that are launches on a GPU: views and fresh memory are not."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [argument.alias_info for argument in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and not func.name().startswith("aten::empty"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels and library products, as they start, for nothing."""
    names: list[str] = []
    monkeypatch.setattr(Triton, "_start", lambda self, kernel, programs, arguments: names.append(kernel.fn.__name__))
    monkeypatch.setattr(backend_module, "multiply", lambda *how, **options: names.append("product"))
    monkeypatch.setattr(triton_backend, "multiply", lambda *how, **options: names.append("product"))
    return names


SPECS = [specs.clip("positive", 0.1), specs.info_nce("mask", 0.0), specs.siglip("ignore"), specs.supcon(0.0)]
PARTS: dict[torch.dtype, tuple[list[str], list[str]]] = {
    torch.bfloat16: (["tile_kernel", "merge_kernel"], ["tile_kernel", "product", "product"]),
    torch.float32: (["product", "tile_kernel", "merge_kernel"], ["product", "tile_kernel", "product", "product"]),
}


def tensor_backend(spec: specs.Spec, dtype: torch.dtype = torch.float32, **options: Any) -> Triton:
    """With scale and bias that only the device knows."""
    scalars = {"scale": torch.tensor(3.0, dtype=torch.float64), "bias": torch.tensor(-0.5, dtype=torch.bfloat16)}
    return new_backend(spec, None, operand_dtype=dtype, sum_for_scale=True, sum_for_bias=True, **scalars | options)


def tile_of(spec: specs.Spec, dtype: torch.dtype, stats: bool = True) -> Tile:
    tile = new_tile(spec, (37, 40))
    names = state_fields(spec, stats)
    for block in (tile.rows, tile.columns):
        block.features, block.ids = block.features.to(dtype), torch.arange(len(block))
        block.state = State(names, torch.zeros(len(names), len(block), dtype=torch.float64)).reset()
    tile.rows.target_offset = 0 if spec.has_targets else None
    return tile


@pytest.mark.parametrize("dtype", PARTS, ids=named)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_tile_is_two_launches_and_its_products(spec: specs.Spec, dtype: torch.dtype, launches: list[str]) -> None:
    """With statistics and sums for scale and bias. Where float32 was kept, its product is not there either."""
    backend, tile = tensor_backend(spec, dtype, stats=True), tile_of(spec, dtype)
    memory, parts = torch.zeros(37 * 48), PARTS[dtype]
    for kept in (None, memory):
        for later in (False, True):
            with Operations() as others:
                backend.accumulate_statistics(tile, kept)
                forward = launches.copy()
                launches.clear()
                backend.accumulate_gradients(tile, kept)
            if later:  # the first tile fills what the blocks and the backend keep
                assert others.names == []
                assert forward == parts[0]
                assert launches == (parts[1] if kept is None else PARTS[torch.bfloat16][1])
            launches.clear()


@pytest.mark.parametrize("dtype", PARTS, ids=named)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.usefixtures("launches")
def test_the_host_reads_no_scale_and_no_bias(spec: specs.Spec, dtype: torch.dtype) -> None:
    backend, tile = tensor_backend(spec, dtype, stats=True), tile_of(spec, dtype)
    with Operations() as operations:
        backend.accumulate_statistics(tile)
        backend.accumulate_gradients(tile)
        backend.scores(tile)
        assert backend.scalar_sums.shape == (2,)
    assert "aten::stack" in operations.names
    assert not {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"} & set(operations.names)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scale_and_bias_may_be_tensors(spec: specs.Spec, dtype: torch.dtype) -> None:
    found = []
    for scalars in ({}, {"scale": 3.0, "bias": -0.5}):
        torch.manual_seed(0)
        backend, tile = tensor_backend(spec, dtype, **scalars), tile_of(spec, dtype, stats=False)
        backend.accumulate_statistics(tile)
        found.append([tile.rows.state.table, backend.dlogits(tile).clone(), backend.scores(tile).clone()])
        found[-1].append(backend.scalar_sums)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert all(value.isfinite().all() for value in found[0])


def test_what_all_tiles_share_is_prepared_once(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def spy(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *how: (asked.append(name), original(*how))[1])

    for name in ("architecture", "defaults", "tuned"):
        spy(triton_settings, name)
    spy(triton_backend, "import_module")
    spy(triton_settings.Settings, "arguments")
    backend, tile = tensor_backend(SPECS[0]), tile_of(SPECS[0], torch.float32, stats=False)
    for index in range(3):
        backend.accumulate_statistics(tile)
        backend.accumulate_gradients(tile)
        if index == 0:
            assert {"architecture", "defaults", "tuned", "import_module", "arguments"} == set(asked)
            asked.clear()
    assert asked == []
    assert launches.count("tile_kernel") == 6


def test_sums_for_the_scale_grow_with_the_tiles() -> None:
    """A later tile has more programs than the first, and one has fewer."""
    spec, backend = specs.siglip("ignore"), tensor_backend(specs.siglip("ignore"))
    expected = torch.zeros(2, dtype=torch.float64)
    for sides in ((5, 7), (70, 90), (40, 3)):
        tile = new_tile(spec, sides)
        dlogits = backend.dlogits(tile).double()
        dots = tile.rows.features.double() @ tile.columns.features.double().T
        expected += torch.stack([(dlogits * dots).sum(), dlogits.sum()])
        torch.testing.assert_close(backend.scalar_sums, expected, rtol=1e-5, atol=1e-5)


def test_float32_is_multiplied_by_a_library_straight_into_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    start = Triton._start
    monkeypatch.setattr(Triton, "_start", lambda self, *how: (given.append(how[2]), start(self, *how))[1])
    tile, kept = tile_of(SPECS[1], torch.float32, stats=False), torch.zeros(37 * 48)
    with Operations() as operations:
        new_backend(SPECS[1]).accumulate_statistics(tile, kept)
    assert operations.names.count("aten::addmm.out") == 1
    assert given[0].get("x") is None
    assert given[0]["dots"].data_ptr() == kept.data_ptr()
    torch.testing.assert_close(given[0]["dots"], tile.rows.features @ tile.columns.features.T)


def test_dlogits_take_the_place_of_products_unless_those_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    start = Triton._start
    monkeypatch.setattr(Triton, "_start", lambda self, *how: (given.append(how[2]), start(self, *how))[1])
    for diagonal in (False, True):
        tile, backend = tile_of(SPECS[3], torch.float32, stats=False), new_backend(SPECS[3])
        tile = Tile(tile.rows, tile.rows, is_diagonal=True) if diagonal else tile
        backend.accumulate_statistics(tile)
        backend.dlogits(tile)
        assert (given[-1]["dots"].data_ptr() == given[-1]["dlogits"].data_ptr()) == (not diagonal)


def test_a_diagonal_tile_is_symmetric_however_a_library_rounds() -> None:
    rows = tile_of(SPECS[3], torch.float32, stats=False).rows
    tile, backend, kept = Tile(rows, rows, is_diagonal=True), new_backend(SPECS[3]), torch.rand(37 * 48)
    backend.accumulate_statistics(tile)
    dlogits = backend.dlogits(tile, kept)
    torch.testing.assert_close(dlogits, dlogits.T)


@pytest.mark.parametrize("gap", [0.0, 40.0, 70.0, 200.0])
@pytest.mark.parametrize("side", ["rows", "columns", "both"])
@pytest.mark.parametrize("spec", [specs.clip("ignore", 0.0), specs.clip("mask", 0.1)], ids=str)
def test_an_exponential_that_rows_and_columns_share_is_as_good(spec: specs.Spec, side: str, gap: float) -> None:
    """In a tile without positives. Every second row, or column, lies so far below the others."""
    tile = tile_of(spec, torch.float32, stats=False)
    tile.rows.target_offset, tile.columns.ids = None, torch.arange(40).roll(7)
    for block, name in ((tile.rows, "rows"), (tile.columns, "columns")):
        block.features[:, 0] = 1.0
        other = 1 if name == "rows" else 2
        block.features[:, 1], block.features[:, 2] = float(other == 2), float(other == 1)
        if side in (name, "both"):
            block.features[::2, other] = -gap
    backend = new_backend(spec)
    backend.accumulate_statistics(tile)
    for block in (tile.rows, tile.columns):
        block.state.table.nan_to_num_()
    logits = tile.rows.features.double() @ tile.columns.features.double().T
    if spec.id_rule == "mask":
        logits.masked_fill_(tile.rows.ids[:, None] == tile.columns.ids[None, :], -torch.inf)
    expected = logits.softmax(1) + logits.softmax(0)
    if spec.label_smoothing:
        there = logits.isfinite()
        expected -= 0.1 * (1 / there.sum(1, keepdim=True) + 1 / there.sum(0, keepdim=True))
        expected.masked_fill_(~there, 0.0)
    ours = backend.dlogits(tile).double()
    assert (ours - expected).abs().max() <= 4 * EPS[torch.float32] * (gap + 4)
    for dim in (0, 1):  # small rows, too, have all their digits
        torch.testing.assert_close(ours.sum(dim), expected.sum(dim), rtol=1e-4, atol=1e-5)


# ---- retrieval, and ranks


@pytest.mark.usefixtures("by_triton")
def test_retrieval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "float32_precision", lambda device: "tf32")  # in full precision no kernel runs
    test_retrieval_.test_ranks_equal_the_dense_answer((70, 130, 65), 64)
    test_retrieval_.test_ranks_equal_the_dense_answer((3, 5, 7), None)
    test_retrieval_.test_equal_keys_tie_wherever_they_lie((20, 130, 65))
    test_retrieval_.test_by_default_row_i_belongs_with_row_i()
    test_retrieval_.test_a_positive_that_scores_nan_is_not_found()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_topk_equals_the_dense_answer(dtype: torch.dtype, normalize: bool) -> None:
    query, key = torch.randn(9, 24).to(dtype), torch.randn(150, 24).to(dtype)
    how = {"normalize": normalize, "tile": 64, "backend": "triton"}
    values, indices = megabatch.similarity_topk(query, key, 4, **how)
    expected, _ = reference.similarity_topk(query.double(), key.double(), 4, normalize=normalize)
    torch.testing.assert_close(values, expected.float())
    query, key = (torch.nn.functional.normalize(x.double(), dim=1) if normalize else x.double() for x in (query, key))
    chosen = torch.stack([key[i] @ q for q, i in zip(query, indices, strict=True)])
    torch.testing.assert_close(chosen.float(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_equal_keys_tie_in_every_dtype(dtype: torch.dtype) -> None:
    query, key = torch.randn(9, 65).to(dtype), torch.randn(1, 65).to(dtype).expand(130, 65)
    ranks = megabatch.retrieval_ranks(query, key, positives=torch.randint(130, (9,)), tile=64, backend="triton")
    assert torch.equal(ranks, torch.zeros_like(ranks))


CASES = [
    test_ranks.Case(loss, 2, rows, gives, {"exchange": exchange, "backend": "triton", **options}, dtype)
    for loss in LOSSES
    for exchange, rows, gives, options, dtype in (
        ("ring", "uneven", () if loss == "supcon_loss" else ("ids",), {"return_stats": True}, torch.float32),
        ("gather", "uneven", ("weight",), {"tile": 4, "normalize": True}, torch.bfloat16),
        ("ring", "empty", (), {"reduction": "none"}, torch.float32),
    )
]


def test_ranks_equal_one_process(pool: Pool) -> None:
    for case, answers in zip(CASES, zip(*pool.run(2, test_ranks.solve, CASES), strict=True), strict=True):
        assert all(isinstance(answer, test_ranks.Answer) for answer in answers), f"{case}: {answers}"
        test_ranks.assert_answers(list(answers), test_ranks.expected_of(case))


def ranks_and_best(rank: int, group: Any, exchange: str) -> tuple[Tensor, Tensor, Tensor]:
    query, key = torch.randn(2, 2, 9, 12)
    how = {"group": group, "exchange": exchange, "backend": "triton"}
    ranks = megabatch.retrieval_ranks(query[rank], key[rank], **how)
    return ranks, *megabatch.similarity_topk(query[rank], key[rank], 4, **how)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_retrieval_on_ranks_equals_one_process(pool: Pool, exchange: str) -> None:
    query, key = torch.randn(2, 2, 9, 12).flatten(1, 2)
    ranks = reference.retrieval_ranks(query, key)
    values, indices = reference.similarity_topk(query, key, 4)
    found = [torch.cat(parts) for parts in zip(*pool.run(2, ranks_and_best, exchange), strict=True)]
    assert torch.equal(found[0], ranks)
    torch.testing.assert_close(found[1], values)
    assert torch.equal(found[2], indices)
