"""Every mistake has a message that names the function, the argument, the rule and what came in instead.

And none of the checks stands in the way of a compiler.
"""

import math
import re
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import megabatch
from megabatch import callers, checks, functional

N, D = 4, 8
LOSSES = ("clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss", "supcon_loss")
FIRST = {
    "clip_loss": "image_features",
    "info_nce_loss": "query",
    "siglip_loss": "image_features",
    "nt_xent_loss": "view1",
    "supcon_loss": "features",
}
SECOND = {"clip_loss": "text_features", "info_nce_loss": "key", "siglip_loss": "text_features", "nt_xent_loss": "view2"}
PAIRS = [*((loss, FIRST[loss], SECOND[loss]) for loss in SECOND), ("info_nce_loss", "query", "negatives")]
FEATURES = [*FIRST.items(), *SECOND.items(), ("info_nce_loss", "negatives")]
VECTORS = [  # loss, a vector of integers, whose rows it counts
    *((loss, "ids", FIRST[loss]) for loss in ("clip_loss", "siglip_loss", "nt_xent_loss")),
    ("info_nce_loss", "query_ids", "query"),
    ("info_nce_loss", "key_ids", "key"),
    ("info_nce_loss", "negative_ids", "negatives"),
    ("info_nce_loss", "positives", "query"),
    ("supcon_loss", "labels", "features"),
]
CONVERTIBLE = [
    (numpy.arange(4), "torch.from_numpy"),
    ([0, 1, 2, 3], "torch.as_tensor"),
    ((0, 1, 2, 3), "torch.as_tensor"),
]
FLOATS = "(float64, float32, bfloat16 or float16)"
INTEGERS = "(int64, int32, int16, int8 or uint8)"

every_loss = pytest.mark.parametrize("loss", LOSSES)
every_feature = pytest.mark.parametrize(("loss", "argument"), FEATURES)
every_pair = pytest.mark.parametrize(("loss", "first", "second"), PAIRS)
every_vector = pytest.mark.parametrize(("loss", "argument", "rows_of"), VECTORS)
smoothed_loss = pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "siglip_loss"])


@pytest.fixture(autouse=True)
def nothing_was_seen_or_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "warned", set())


def unit_rows(rows: int = N, width: int = D) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, width), dim=1)


def good(loss: str, rows: int = N, width: int = D) -> dict[str, Any]:
    """What a loss accepts, the same at every call."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {FIRST[loss]: unit_rows(rows, width), "logit_scale": 5.0, "normalize": False}
    if loss == "supcon_loss":
        return arguments | {"labels": torch.arange(rows) // 2}
    return arguments | {SECOND[loss]: unit_rows(rows, width)}


def run(loss: str, **changes: Any) -> Any:
    return getattr(megabatch, loss)(**{**good(loss), **changes})


def assert_refused(loss: str, kind: type[Exception], *said: str, **changes: Any) -> None:
    with pytest.raises(kind) as caught:
        run(loss, **changes)
    message = str(caught.value)
    assert caught.type is kind
    assert message.startswith(f"{loss}: ")
    for words in said:
        assert words in message


@every_loss
def test_good_input_is_accepted(loss: str) -> None:
    assert run(loss).isfinite()


# Features.


@every_feature
@pytest.mark.parametrize(
    ("shape", "help"),
    [
        ((), "got shape ()."),
        ((D,), "got shape (8,). Perhaps {}[None] is meant."),
        ((2, 3, 4, D), "got shape (2, 3, 4, 8). Perhaps {}.flatten(0, -2) is meant."),
    ],
)
def test_wrong_rank_is_met_with_the_reshape_that_helps(
    loss: str, argument: str, shape: tuple[int, ...], help: str
) -> None:
    rule = f"{argument} must have 2 dimensions, one row per sample"
    assert_refused(loss, ValueError, rule, help.format(argument), **{argument: torch.randn(shape)})


@pytest.mark.parametrize(("loss", "argument"), FEATURES[:-1])
def test_three_dimensions_are_met_with_flatten(loss: str, argument: str) -> None:
    said = f"{argument} must have 2 dimensions, one row per sample, got shape (2, 3, 8). "
    said += f"Perhaps {argument}.flatten(0, 1) is meant."
    assert_refused(loss, ValueError, said, **{argument: torch.randn(2, 3, D)})


def test_negatives_of_each_query_are_met_with_flatten() -> None:
    said = "negatives must have 2 dimensions, because each is a negative for every query, got shape (4, 3, 8). "
    said += "Pass negatives.flatten(0, 1)."
    assert_refused("info_nce_loss", ValueError, said, negatives=torch.randn(N, 3, D))


@every_feature
@pytest.mark.parametrize("value", [[[1.0, 2.0]], "features", 3.0], ids=lambda x: type(x).__name__)
def test_features_must_be_tensors(loss: str, argument: str, value: object) -> None:
    said = f"{argument} must be a tensor, got {type(value).__name__}."
    assert_refused(loss, TypeError, said, **{argument: value})


@every_feature
@pytest.mark.parametrize(("value", "use"), CONVERTIBLE, ids=lambda x: type(x).__name__)
def test_features_of_other_kinds_are_met_with_the_conversion(loss: str, argument: str, value: Any, use: str) -> None:
    said = f"{argument} must be a tensor, got {type(value).__name__}. Use {use}({argument})."
    assert_refused(loss, TypeError, said, **{argument: value})


@every_loss
@pytest.mark.parametrize(("value", "use"), CONVERTIBLE, ids=lambda x: type(x).__name__)
def test_weights_of_other_kinds_are_met_with_the_conversion(loss: str, value: Any, use: str) -> None:
    said = f"weight must be a tensor, got {type(value).__name__}. Use {use}(weight)."
    assert_refused(loss, TypeError, said, weight=value)


@every_vector
@pytest.mark.parametrize(("value", "use"), CONVERTIBLE, ids=lambda x: type(x).__name__)
def test_vectors_of_other_kinds_are_met_with_the_conversion(
    loss: str, argument: str, rows_of: str, value: Any, use: str
) -> None:
    said = f"{argument} must be a tensor, got {type(value).__name__}. Use {use}({argument})."
    assert_refused(loss, TypeError, said, **with_vector(argument, value))


@pytest.mark.parametrize(("loss", "argument"), [*FIRST.items(), *SECOND.items(), ("supcon_loss", "labels")])
def test_features_must_not_be_none(loss: str, argument: str) -> None:
    assert_refused(loss, TypeError, f"{argument} must be a tensor, got None", **{argument: None})


@every_feature
@pytest.mark.parametrize(
    ("dtype", "convert"),
    [
        (torch.int64, ".float()"),
        (torch.uint8, ".float()"),
        (torch.bool, ".float()"),
        (torch.float8_e4m3fn, ".float()"),
        (torch.complex64, "torch.view_as_real and .flatten(1)"),
    ],
    ids=str,
)
def test_features_must_be_floating_point(loss: str, argument: str, dtype: torch.dtype, convert: str) -> None:
    said = f"{argument} must be floating point {FLOATS}, got {dtype}. Convert it with {convert}."
    assert_refused(loss, TypeError, said, **{argument: unit_rows().to(dtype)})


@every_feature
def test_features_must_be_dense(loss: str, argument: str) -> None:
    said = f"{argument} must be a dense tensor, got torch.sparse_coo."
    assert_refused(loss, TypeError, said, **{argument: unit_rows().to_sparse()})


@pytest.mark.parametrize(("loss", "argument"), FEATURES[:-1])
def test_features_must_not_be_nested(loss: str, argument: str) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, D), torch.randn(3, D)], layout=torch.jagged)
    said = f"{argument} must be a dense tensor, got a nested one."
    assert_refused(loss, TypeError, said, **{argument: nested})


@every_feature
def test_features_must_have_columns(loss: str, argument: str) -> None:
    said = f"{argument} must have at least one column, got shape (4, 0)."
    assert_refused(loss, ValueError, said, **{argument: torch.randn(N, 0)})


@every_loss
def test_features_must_hold_data(loss: str) -> None:
    on_meta = {name: x.to("meta") for name, x in good(loss).items() if isinstance(x, Tensor)}
    assert_refused(loss, ValueError, f"{FIRST[loss]} must hold data, got a tensor on the meta device.", **on_meta)


@every_loss
def test_an_empty_batch_is_refused_without_a_group(loss: str) -> None:
    empty = {name: x[:0] for name, x in good(loss).items() if isinstance(x, Tensor)}
    said = f"{FIRST[loss]} must have at least one row, got shape (0, 8). Only a rank of a group may have none."
    assert_refused(loss, ValueError, said, **empty)


def test_a_batch_without_queries_is_refused() -> None:
    said = "query must have at least one row, got shape (0, 8)."
    assert_refused("info_nce_loss", ValueError, said, query=torch.randn(0, D))


@every_pair
def test_width_mismatch_names_both_widths(loss: str, first: str, second: str) -> None:
    said = f"{first} and {second} must have the same width, got 8 and 6. Project one of them first."
    assert_refused(loss, ValueError, said, **{second: torch.randn(N, 6)})


@pytest.mark.parametrize(("loss", "first", "second"), [pair for pair in PAIRS if pair[0] != "info_nce_loss"])
def test_mismatch_of_rows_names_both_numbers(loss: str, first: str, second: str) -> None:
    said = f"{first} and {second} must have the same number of rows, because row i of one belongs with row i of the "
    said += "other; got 4 and 3. Drop the ragged last batch in the loader, or pass the pairs that exist."
    assert_refused(loss, ValueError, said, **{second: unit_rows(3)})


def test_fewer_keys_than_queries_need_positives() -> None:
    said = "key must have at least as many rows as query, because row i of key belongs with query i; got 3 and 4. "
    said += "Pass positives to say which row belongs with which query."
    assert_refused("info_nce_loss", ValueError, said, key=unit_rows(3))
    assert run("info_nce_loss", key=unit_rows(3), positives=torch.tensor([0, 1, 2, 0])).isfinite()


@every_pair
@pytest.mark.parametrize("swapped", [False, True])
def test_device_mismatch_names_both_devices(loss: str, first: str, second: str, swapped: bool) -> None:
    moved, got = (first, "meta and cpu") if swapped else (second, "cpu and meta")
    if swapped and second == "negatives":
        second = "key"  # the first to differ
    said = f"{first} and {second} must be on the same device, got {got}. Move one with .to()."
    assert_refused(loss, ValueError, said, **{moved: torch.randn(N, D, device="meta")})


@every_pair
def test_dtype_mismatch_names_both_dtypes(loss: str, first: str, second: str) -> None:
    said = f"{first} and {second} must have the same dtype, got torch.float32 and torch.bfloat16. "
    said += "Convert one, or run under torch.autocast."
    assert_refused(loss, TypeError, said, **{second: unit_rows().bfloat16()})


@every_pair
def test_mixed_dtypes_are_accepted_under_autocast(loss: str, first: str, second: str) -> None:
    half = unit_rows().bfloat16()
    with torch.autocast("cpu"):
        mixed = run(loss, **{second: half})
    assert mixed == run(loss, **{second: half.float()})


# Scale, temperature, bias.


@every_loss
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_scale_must_be_finite(loss: str, value: float, kind: Any) -> None:
    said = f"logit_scale (1 / temperature) must be finite, got {value}. Clamp it, as CLIP does at 100"
    assert_refused(loss, ValueError, said, logit_scale=kind(value))


@every_loss
@pytest.mark.parametrize("shape", [(2,), (1, 1), (0,)], ids=str)
@pytest.mark.parametrize("argument", ["logit_scale", "temperature"])
def test_scale_must_be_a_scalar(loss: str, argument: str, shape: tuple[int, ...]) -> None:
    said = f"{argument} must be a scalar, 0-d or of shape [1], got shape {shape}."
    assert_refused(loss, ValueError, said, **{"logit_scale": None, argument: torch.ones(shape)})


@every_loss
@pytest.mark.parametrize("value", ["5", True, [5.0]], ids=repr)
@pytest.mark.parametrize("argument", ["logit_scale", "temperature"])
def test_scale_must_be_a_number(loss: str, argument: str, value: object) -> None:
    said = f"{argument} must be a number or a tensor, got {type(value).__name__}."
    assert_refused(loss, TypeError, said, **{"logit_scale": None, argument: value})


@every_loss
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("argument", ["logit_scale", "temperature"])
def test_scale_must_be_real(loss: str, argument: str, dtype: torch.dtype) -> None:
    said = f"{argument} must be a real number, got {dtype}. Convert it with .float()."
    assert_refused(loss, TypeError, said, **{"logit_scale": None, argument: torch.ones((), dtype=dtype)})


@every_loss
@pytest.mark.parametrize("argument", ["logit_scale", "temperature"])
def test_scale_must_hold_data(loss: str, argument: str) -> None:
    said = f"{argument} must hold data, got a tensor on the meta device."
    assert_refused(loss, ValueError, said, **{"logit_scale": None, argument: torch.ones((), device="meta")})


@every_loss
@pytest.mark.parametrize("value", [5, torch.tensor(5), torch.tensor([5.0]), torch.tensor(5.0).bfloat16()], ids=repr)
def test_scale_may_be_any_real_scalar(loss: str, value: Any) -> None:
    assert run(loss, logit_scale=value) == run(loss)


@every_loss
@pytest.mark.parametrize(("changes", "got"), [({"temperature": 0.1}, "both"), ({"logit_scale": None}, "neither")])
def test_scale_or_temperature_must_be_given(loss: str, changes: dict[str, Any], got: str) -> None:
    said = f"exactly one of logit_scale and temperature must be given, got {got}. "
    said += "logit_scale = 1 / temperature."
    assert_refused(loss, ValueError, said, **changes)


@every_loss
@pytest.mark.parametrize("value", [0, 0.0, -0.5, -10.0, math.inf, math.nan], ids=repr)
def test_temperature_must_be_positive_and_finite(loss: str, value: float) -> None:
    said = f"temperature must be positive and finite, got {value}."
    assert_refused(loss, ValueError, said, logit_scale=None, temperature=value)


@every_loss
@pytest.mark.parametrize("value", [0.0, -0.5, math.inf, math.nan], ids=repr)
def test_temperature_tensor_must_be_positive_and_finite(loss: str, value: float) -> None:
    said = f"temperature must be positive and finite, got {value}."
    temperature = torch.tensor(value, requires_grad=True)
    assert_refused(loss, ValueError, said, logit_scale=None, temperature=temperature)


@every_loss
def test_a_temperature_that_the_host_cannot_read_is_refused_inside(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where it arrives as a scale."""
    monkeypatch.setattr(checks, "_is_readable", lambda value: False)
    said = "logit_scale (1 / temperature) must be finite, got nan."
    temperature = torch.tensor(-0.5)
    assert_refused(loss, ValueError, said, "a temperature must be positive.", logit_scale=None, temperature=temperature)


@every_loss
@pytest.mark.parametrize("value", [0.07, torch.tensor(0.07)], ids=repr)
def test_scale_below_one_is_warned_of_once(loss: str, value: Any) -> None:
    said = f"{loss}: logit_scale=0.07 is below 1 and looks like a temperature. It multiplies the logits; "
    said += "if 1 / 0.07 is meant, pass logit_scale=1 / 0.07."
    with pytest.warns(UserWarning, match=re.escape(said)) as caught:
        getattr(megabatch, loss)(**good(loss) | {"logit_scale": value})
    assert [warning.filename for warning in caught] == [__file__]
    run(loss, logit_scale=0.07)
    run(loss, logit_scale=0.08)  # a schedule does not warn at every step


@every_loss
def test_temperature_above_one_is_warned_of_once(loss: str) -> None:
    said = f"{loss}: temperature=20 is above 1 and looks like a logit_scale. It divides the logits; "
    said += "if 1 / 20 is meant, pass temperature=1 / 20."
    with pytest.warns(UserWarning, match=re.escape(said)) as caught:
        getattr(megabatch, loss)(**good(loss) | {"logit_scale": None, "temperature": 20.0})
    assert [warning.filename for warning in caught] == [__file__]
    run(loss, logit_scale=None, temperature=20.0)
    run(loss, logit_scale=None, temperature=30)


@every_loss
@pytest.mark.parametrize("value", [0.07, 1, 1.0], ids=repr)
def test_other_temperatures_are_not_warned_of(loss: str, value: float) -> None:
    assert run(loss, logit_scale=None, temperature=value).isfinite()


def test_one_warning_does_not_hide_another() -> None:
    with pytest.warns(UserWarning, match=r"^clip_loss: logit_scale=0\.5 is below 1"):
        run("clip_loss", logit_scale=0.5)
    with pytest.warns(UserWarning, match=r"^clip_loss: temperature=2 is above 1"):
        run("clip_loss", logit_scale=None, temperature=2.0)
    with pytest.warns(UserWarning, match=r"^siglip_loss: logit_scale=0\.5 is below 1"):
        run("siglip_loss", logit_scale=0.5)


@pytest.mark.parametrize(
    ("scale", "given_as", "said"),
    [
        (0.07, "logit_scale", "logit_scale=0.07 is below 1 and looks like a temperature"),
        (
            torch.tensor(20.0).reciprocal().item(),
            "temperature",
            "temperature=20 is above 1 and looks like a logit_scale",
        ),
    ],
)
def test_a_scale_is_told_as_it_was_given(scale: float, given_as: str, said: str) -> None:
    with pytest.warns(UserWarning, match=f"^f: {re.escape(said)}"):
        checks.warn_scale("f", scale, given_as)
    for other in (1.0, 14.0, 0.0, -0.5, math.nan):
        checks.warn_scale("g", other, given_as)


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_a_module_that_starts_below_one_is_warned_of(name: str) -> None:
    said = f"{name}: init_logit_scale=0.07 is below 1 and looks like a temperature. It multiplies the logits; "
    said += "if 1 / 0.07 is meant, pass init_logit_scale=1 / 0.07."
    with pytest.warns(UserWarning, match=re.escape(said)) as caught:
        getattr(megabatch, name)(0.07)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("name", ["InfoNCELoss", "NTXentLoss", "SupConLoss"])
def test_a_module_of_a_temperature_above_one_is_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name}: temperature=20 is above 1 and looks like a logit_scale"):
        getattr(megabatch, name)(temperature=20.0)


@every_loss
@pytest.mark.parametrize("changes", [{"logit_scale": 0.07}, {"logit_scale": None, "temperature": 20.0}], ids=repr)
@pytest.mark.filterwarnings("error")
def test_warnings_are_issued_where_all_ranks_hear_of_an_error(
    loss: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under -W error a warning is one, and must not leave the other ranks waiting."""
    heard = []

    class Recorded(functional.refuse_together):
        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            heard.append(kind)

    monkeypatch.setattr(functional, "refuse_together", Recorded)
    with pytest.raises(UserWarning, match="looks like a"):
        run(loss, **changes)
    assert heard == [UserWarning]


@every_loss
@pytest.mark.parametrize("value", [0.0, -0.5, 1.0, torch.tensor(1.0)], ids=repr)
def test_other_scales_are_not_warned_of(loss: str, value: Any) -> None:
    assert run(loss, logit_scale=value).isfinite()


@every_loss
@pytest.mark.parametrize(("given", "said"), [("logit_scale", "is below 1"), ("temperature", "is above 1")])
def test_a_tensor_that_looks_like_the_other_is_warned_of_as_a_number_is(loss: str, given: str, said: str) -> None:
    value = torch.tensor(0.07 if given == "logit_scale" else 14.0)
    with pytest.warns(UserWarning, match=said):
        run(loss, **{"logit_scale": None, given: value})


@pytest.mark.parametrize("given", ["logit_scale", "temperature"])
def test_a_fake_scale_is_not_looked_at(given: str) -> None:
    """It holds no value: reading one would raise."""
    with FakeTensorMode():
        both = {"logit_scale": None, "temperature": None, given: torch.empty(())}
        assert checks.resolve_scale("f", **both).shape == ()


@every_loss
def test_a_scale_that_was_trained_below_one_is_not_warned_of(loss: str) -> None:
    run(loss, logit_scale=torch.tensor(-2.0, requires_grad=True).exp())


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_bias_must_be_finite(value: float, kind: Any) -> None:
    assert_refused("siglip_loss", ValueError, f"logit_bias must be finite, got {value}.", logit_bias=kind(value))


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_bias_must_be_a_scalar(loss: str) -> None:
    said = "logit_bias must be a scalar, 0-d or of shape [1], got shape (2,)."
    assert_refused(loss, ValueError, said, logit_bias=torch.zeros(2))


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_bias_must_be_a_number(loss: str) -> None:
    assert_refused(loss, TypeError, "logit_bias must be a number or a tensor, got str.", logit_bias="-10")


# Unit length.


@every_loss
def test_rows_not_of_unit_length_are_warned_of_once(loss: str) -> None:
    rows = 3 * torch.eye(N, D)
    rows[1] *= 0.5
    changes = {FIRST[loss]: rows, "normalize": None}
    if loss in SECOND:
        changes[SECOND[loss]] = rows
    said = f"{loss}: rows are not of unit length, but from 1.5 to 3. Pass normalize=True for cosine similarity, or "
    said += "normalize=False if dot products are meant."
    run(loss, normalize=None)  # a first batch that is as it should be
    with pytest.warns(UserWarning, match=re.escape(said)) as caught:
        run(loss, **changes)
    assert len(caught) == 1
    run(loss, **changes)


@every_loss
def test_rows_not_of_unit_length_are_warned_of_when_they_first_appear(loss: str) -> None:
    run(loss, normalize=None)
    with pytest.warns(UserWarning, match="rows are not of unit length, but from 1 to 3"):
        run(loss, normalize=None, **{FIRST[loss]: torch.eye(N, D) * torch.linspace(1, 3, N)[:, None]})


@every_pair
def test_every_feature_input_is_looked_at(loss: str, first: str, second: str) -> None:
    with pytest.warns(UserWarning, match="are not of unit length, but from 1 to 3"):
        run(loss, normalize=None, **{first: torch.eye(N, D), second: 3 * torch.eye(N, D)})


@every_loss
def test_rows_of_unit_length_are_not_warned_of(loss: str) -> None:
    run(loss, normalize=None)


@every_loss
@pytest.mark.parametrize("normalize", [True, False])
def test_who_says_whether_to_normalise_is_not_warned(loss: str, normalize: bool) -> None:
    run(loss, normalize=normalize, **{FIRST[loss]: 3 * unit_rows()})


def test_a_warning_is_of_the_line_that_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="unit length") as found:
        megabatch.clip_loss(3 * unit_rows(), unit_rows(), 5.0)
    assert [warning.filename for warning in found] == [__file__]


# Vectors: weights, ids, labels, positives.


def warns_of_equal_ids(rows: int = 8, **keywords: Any) -> bool:
    """Whether a loss of so many pairs, by default of one id, says so."""
    ids = keywords.pop("ids", torch.full((rows,), 7))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        megabatch.clip_loss(unit_rows(rows), unit_rows(rows), 5.0, ids=ids, **keywords)
    return any("all ids are equal (7)" in str(warning.message) for warning in found)


def test_ids_that_are_all_equal_are_warned_of_once() -> None:
    assert warns_of_equal_ids()
    assert not warns_of_equal_ids()


def test_ids_that_mask_nothing_or_not_all_are_not_warned_of() -> None:
    assert not warns_of_equal_ids(rows=7)  # so few may have one id by chance
    assert not warns_of_equal_ids(same_ids="positive")
    assert not warns_of_equal_ids(ids=torch.tensor([7] * 7 + [8]))
    assert not warns_of_equal_ids(ids=torch.tensor([7] * 7 + [6]))
    assert warns_of_equal_ids()


def test_negatives_without_ids_are_never_masked_so_equal_ids_are_not_warned_of() -> None:
    ids, rows = torch.full((8,), 7), unit_rows(8)
    query = {"query": rows, "key": rows, "query_ids": ids, "key_ids": ids, "logit_scale": 5.0}
    megabatch.info_nce_loss(**query, negatives=rows)
    with pytest.warns(UserWarning, match="all ids are equal"):
        megabatch.info_nce_loss(**query, negatives=rows, negative_ids=ids)


@every_loss
@pytest.mark.parametrize(
    ("values", "got"),
    [
        ([1.0, -0.5, 2.0, 1.0], "-0.5 to 2.0"),
        ([1.0, math.nan, 2.0, 1.0], "nan to nan"),
        ([1.0, math.inf, 2.0, 1.0], "1.0 to inf"),
    ],
)
def test_weight_must_be_finite_and_not_negative(loss: str, values: list[float], got: str) -> None:
    said = f"weight must be finite and not negative, got {got}. Use 0 to leave a row out."
    assert_refused(loss, ValueError, said, weight=torch.tensor(values))


@every_loss
def test_weight_must_not_be_all_zero(loss: str) -> None:
    said = "weight must have a positive, finite sum, got 0.0."
    assert_refused(loss, ValueError, said, weight=torch.zeros(N))


@every_loss
@pytest.mark.parametrize("shape", [(3,), (N, 1), (1,), ()], ids=str)
def test_weight_must_have_one_entry_per_row(loss: str, shape: tuple[int, ...]) -> None:
    said = f"weight must have one entry for every row of {FIRST[loss]}, shape (4,), got {shape}."
    assert_refused(loss, ValueError, said, weight=torch.ones(shape))


@every_loss
@pytest.mark.parametrize("value", [[1.0] * N, 1.0], ids=lambda x: type(x).__name__)
def test_weight_must_be_a_tensor(loss: str, value: object) -> None:
    assert_refused(loss, TypeError, f"weight must be a tensor, got {type(value).__name__}.", weight=value)


@every_loss
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.uint16], ids=str)
def test_weight_must_be_real(loss: str, dtype: torch.dtype) -> None:
    said = "weight must be real numbers (float64, float32, bfloat16, float16, int64, int32, int16, int8 or uint8), "
    said += f"got {dtype}. Convert it with .float()."
    assert_refused(loss, TypeError, said, weight=torch.ones(N, dtype=dtype))


@every_loss
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weight_may_be_of_any_other_dtype(loss: str, dtype: torch.dtype) -> None:
    assert run(loss, weight=torch.tensor([1, 0, 2, 1]).to(dtype)).isfinite()


@every_loss
def test_weight_must_be_on_the_device_of_the_features(loss: str) -> None:
    said = f"weight must be on the device of {FIRST[loss]}, cpu, got meta. Move it with .to()."
    assert_refused(loss, ValueError, said, weight=torch.ones(N, device="meta"))


def with_vector(argument: str, value: object) -> dict[str, Any]:
    """The vector, with what must come with it."""
    negatives = {"negatives": unit_rows()} if argument == "negative_ids" else {}
    others = {"query_ids": torch.arange(N), "key_ids": torch.arange(N)} if argument.endswith("_ids") else {}
    return negatives | others | {argument: value}


@every_vector
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integers_of_every_kind_are_accepted(loss: str, argument: str, rows_of: str, dtype: torch.dtype) -> None:
    assert run(loss, **with_vector(argument, torch.arange(N).to(dtype))).isfinite()


@every_vector
@pytest.mark.parametrize("shape", [(3,), (5,), (N, 1), ()], ids=str)
def test_vectors_must_have_one_entry_per_row(loss: str, argument: str, rows_of: str, shape: tuple[int, ...]) -> None:
    said = f"{argument} must have one entry for every row of {rows_of}, shape (4,), got {shape}."
    assert_refused(loss, ValueError, said, **with_vector(argument, torch.zeros(shape, dtype=torch.int64)))


@every_vector
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint16], ids=str)
def test_vectors_must_be_integers(loss: str, argument: str, rows_of: str, dtype: torch.dtype) -> None:
    said = f"{argument} must be integers {INTEGERS}, got {dtype}. Convert it with .long()."
    assert_refused(loss, TypeError, said, **with_vector(argument, torch.zeros(N, dtype=dtype)))


@every_vector
def test_vectors_must_be_on_the_device_of_the_features(loss: str, argument: str, rows_of: str) -> None:
    said = f"{argument} must be on the device of {rows_of}, cpu, got meta. Move it with .to()."
    assert_refused(loss, ValueError, said, **with_vector(argument, torch.arange(N, device="meta")))


@pytest.mark.parametrize(("values", "got"), [([0, 1, 2, 4], "0 to 4"), ([0, -1, 2, 3], "-1 to 3")])
def test_positives_must_be_rows_of_key(values: list[int], got: str) -> None:
    said = f"positives must be rows of key, 0 to 3, got {got}."
    assert_refused("info_nce_loss", ValueError, said, positives=torch.tensor(values))


def test_several_positives_per_query_are_met_with_ids() -> None:
    said = "positives must have one entry for every row of query, shape (4,), got (4, 2). For several positives per "
    said += "query, give query_ids and key_ids with same_ids='positive'."
    assert_refused("info_nce_loss", ValueError, said, positives=torch.zeros(N, 2, dtype=torch.int64))


def test_several_positives_per_query_are_refused_by_ranks() -> None:
    said = r"positives must have one entry .*, shape \(4,\), got \(4, 2\)\. For several positives per query, rank each"
    with pytest.raises(ValueError, match=f"^retrieval_ranks: {said}"):
        megabatch.retrieval_ranks(unit_rows(), unit_rows(), positives=torch.zeros(N, 2, dtype=torch.int64))


def test_positives_must_not_be_rows_of_negatives() -> None:
    said = "positives must be rows of key, 0 to 3, got 0 to 5."
    positives = torch.tensor([0, 1, 2, 5])
    assert_refused("info_nce_loss", ValueError, said, positives=positives, negatives=unit_rows())


@pytest.mark.parametrize(("argument", "got"), [("query_ids", "query_ids alone"), ("key_ids", "no query_ids")])
def test_ids_must_be_given_for_both_sides(argument: str, got: str) -> None:
    said = "ids must be given for both sides of a pair, query_ids with key_ids or negative_ids, "
    assert_refused("info_nce_loss", ValueError, f"{said}got {got}.", **{argument: torch.arange(N)})


def test_ids_of_negatives_need_ids_of_queries() -> None:
    said = "ids must be given for both sides of a pair, query_ids with key_ids or negative_ids, got no query_ids."
    assert_refused("info_nce_loss", ValueError, said, negatives=unit_rows(), negative_ids=torch.arange(N))


def test_ids_of_negatives_need_negatives() -> None:
    said = "negative_ids must come with negatives, got none."
    ids = {"query_ids": torch.arange(N), "negative_ids": torch.arange(N)}
    assert_refused("info_nce_loss", ValueError, said, **ids)


def test_no_negatives_may_have_no_ids() -> None:
    """A step that mined none is not a mistake; ids for negatives that are not there are."""
    nothing = {"negatives": torch.randn(0, D), "query_ids": torch.arange(N)}
    assert run("info_nce_loss", **nothing, negative_ids=torch.arange(0)) == run("info_nce_loss")
    said = "negative_ids must have one entry for every row of negatives, shape (0,), got (3,)."
    assert_refused("info_nce_loss", ValueError, said, **nothing, negative_ids=torch.arange(3))


# Words and numbers that choose how.


@every_loss
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("reduction", "'mean', 'sum', 'none'"),
        ("backend", "'auto', 'eager', 'triton'"),
        ("grad_reduction", "'mean', 'sum'"),
        ("exchange", "'auto', 'ring', 'gather'"),
        ("normalize", "True, False, None"),
        ("overlap", "True, False"),
        ("return_stats", "True, False"),
    ],
)
@pytest.mark.parametrize("value", ["average", 1, torch.tensor(True)], ids=repr)
def test_unknown_words_are_met_with_the_known(loss: str, option: str, words: str, value: object) -> None:
    said = f"{option} must be one of {words}, got {value!r}."
    assert_refused(loss, ValueError, said, **{option: value})


@pytest.mark.parametrize("loss", SECOND)
@pytest.mark.parametrize("value", ["ignore", None], ids=repr)
def test_unknown_meaning_of_same_ids_is_met_with_the_known(loss: str, value: object) -> None:
    said = f"same_ids must be one of 'mask', 'positive', got {value!r}."
    assert_refused(loss, ValueError, said, same_ids=value)


@every_loss
def test_a_backend_that_cannot_run_is_refused_with_the_reason(loss: str) -> None:
    """Or with all of them: test_triton_choice.py."""
    said = "  the features are float64. Its kernels compute in float32.\nPass backend='auto' to let the library choose."
    double = {name: x.double() for name, x in good(loss).items() if isinstance(x, Tensor) and x.is_floating_point()}
    assert_refused(loss, ValueError, "backend 'triton' cannot run this call:\n", said, **double, backend="triton")


@smoothed_loss
@pytest.mark.parametrize("value", [-0.1, 1.1, math.inf, math.nan], ids=str)
def test_label_smoothing_must_be_a_share(loss: str, value: float) -> None:
    assert_refused(loss, ValueError, f"label_smoothing must be from 0 to 1, got {value}.", label_smoothing=value)


@smoothed_loss
@pytest.mark.parametrize("value", ["0.1", True, None, torch.tensor(0.1)], ids=repr)
def test_label_smoothing_must_be_a_number(loss: str, value: object) -> None:
    said = f"label_smoothing must be a number, got {type(value).__name__}."
    assert_refused(loss, TypeError, said, label_smoothing=value)


@every_loss
@pytest.mark.parametrize("value", [0, -1, (0, 1), (2, -3)], ids=str)
def test_tile_must_be_at_least_one(loss: str, value: object) -> None:
    said = f"tile must be at least 1, got {value}. Leave it out to let the plan choose."
    assert_refused(loss, ValueError, said, tile=value)


@every_loss
@pytest.mark.parametrize("value", ["big", (1, 2, 3), (), 2.0, (2.0, 2.0), True, {2, 3}, torch.tensor(2)], ids=repr)
def test_tile_must_be_one_or_two_whole_numbers(loss: str, value: object) -> None:
    said = f"tile must be a whole number or a pair of them, got {value!r}."
    assert_refused(loss, TypeError, said, tile=value)


@pytest.mark.parametrize("loss", ["nt_xent_loss", "supcon_loss"])
def test_tile_of_a_symmetric_plane_must_be_square(loss: str) -> None:
    said = "tile must be square, because the logits are symmetric, got (2, 3)."
    assert_refused(loss, ValueError, said, tile=(2, 3))


@every_loss
@pytest.mark.parametrize("value", ["12 parsecs", "", "MiB", "1.2.3MB", "-1MB", "²MB"], ids=repr)
def test_memory_budget_must_be_words_that_are_known(loss: str, value: str) -> None:
    said = f"memory_budget must be a whole number of bytes or a size like '512MiB', '2G' or '2GB', got {value!r}."
    assert_refused(loss, ValueError, said, memory_budget=value)


@every_loss
@pytest.mark.parametrize("value", [1.5e6, True, [1]], ids=repr)
def test_memory_budget_must_be_a_whole_number_or_words(loss: str, value: object) -> None:
    said = f"memory_budget must be a whole number of bytes or a size like '512MiB', '2G' or '2GB', got {value!r}."
    assert_refused(loss, TypeError, said, memory_budget=value)


@every_loss
@pytest.mark.parametrize("value", [0, -5, "0 MiB"], ids=repr)
def test_memory_budget_must_be_positive(loss: str, value: object) -> None:
    assert_refused(loss, ValueError, f"memory_budget must be at least 1 byte, got {value!r}.", memory_budget=value)


@every_loss
@pytest.mark.parametrize("value", ["1MiB", "1M", "0.5 MiB", " 800 kb ", "64k", "20000", 20000], ids=repr)
def test_memory_budget_may_be_words(loss: str, value: object) -> None:
    assert run(loss, memory_budget=value).isfinite()


@pytest.mark.parametrize(
    ("size", "number"),
    [
        ("64k", 64 * 2**10),
        ("512M", 512 * 2**20),
        ("512 m", 512 * 2**20),
        ("512MiB", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("2G", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("1T", 2**40),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("3KB", 3000),
        ("100B", 100),
        ("100", 100),
    ],
)
def test_sizes_without_a_b_are_powers_of_1024(size: str, number: int) -> None:
    assert checks.parse_budget("f", size) == number


LARGER = 45  # rows: more than the smallest tile the plan makes by itself


def larger(loss: str, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs that a tile does not hold, and that need gradients."""
    arguments = good(loss, LARGER, 6)
    for name in FIRST[loss], SECOND.get(loss, FIRST[loss]):
        arguments[name] = arguments[name].to(dtype).requires_grad_()
    return arguments


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_budget_too_small_names_the_smallest_that_works(loss: str, dtype: torch.dtype) -> None:
    arguments = larger(loss, dtype)
    rule = r"memory_budget must be at least (\d+) bytes for features of width 6, got 100\. The default is \d+\."
    with pytest.raises(ValueError, match=rule) as caught:
        getattr(megabatch, loss)(**arguments, memory_budget=100)
    assert str(caught.value).startswith(f"{loss}: ")
    smallest = int(re.search(rule, str(caught.value)).group(1))
    with pytest.raises(ValueError, match=f"must be at least {smallest} bytes .* got {smallest - 1}"):
        getattr(megabatch, loss)(**arguments, memory_budget=smallest - 1)
    value = getattr(megabatch, loss)(**arguments, memory_budget=smallest)
    value.backward()
    torch.testing.assert_close(value, getattr(megabatch, loss)(**arguments))
    assert arguments[FIRST[loss]].grad.isfinite().all()


@every_loss
def test_tile_beyond_the_memory_budget_is_refused_with_what_it_needs(loss: str) -> None:
    arguments = larger(loss, torch.float32) | {"tile": 20}
    rule = r"memory_budget must hold one tile, and a tile of 20 x 20 needs (\d+) bytes, got 100\. "
    rule += r"Raise it, or pass a smaller tile\."
    with pytest.raises(ValueError, match=rule) as caught:
        getattr(megabatch, loss)(**arguments, memory_budget=100)
    assert str(caught.value).startswith(f"{loss}: ")
    needed = int(re.search(rule, str(caught.value)).group(1))
    getattr(megabatch, loss)(**arguments, memory_budget=needed).backward()
    assert arguments[FIRST[loss]].grad.isfinite().all()


# Options of a call that was made before.


@every_loss
def test_an_equal_call_gets_the_same_options(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, contrastive_loss = [], functional.contrastive_loss

    def recorded(inputs: Any, options: Any) -> Any:
        seen.append(options)
        return contrastive_loss(inputs, options)

    monkeypatch.setattr(functional, "contrastive_loss", recorded)
    for reduction in ("mean", "sum", "mean", "sum"):
        run(loss, reduction=reduction, weight=torch.rand(N) + 1)
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    assert [options.reduction for options in seen] == ["mean", "sum", "mean", "sum"]


@every_loss
@pytest.mark.parametrize(
    ("option", "accepted", "refused"),
    [
        ("tile", 1, True),
        ("tile", (2, 2), (2.0, 2.0)),
        ("overlap", True, 1),
        ("normalize", False, 0),
        ("memory_budget", 10**6, 1e6),
        ("reduction", "mean", ["mean"]),
    ],
)
def test_what_equals_a_value_accepted_before_is_checked_all_the_same(
    loss: str, option: str, accepted: Any, refused: Any
) -> None:
    run(loss, **{option: accepted})
    with pytest.raises((TypeError, ValueError), match=f"^{loss}: {option} must be .*, got {re.escape(repr(refused))}"):
        run(loss, **{option: refused})


# Groups.


@every_loss
@pytest.mark.parametrize("value", ["world", 3, False, object()], ids=lambda x: type(x).__name__)
def test_group_must_be_a_group(loss: str, value: object) -> None:
    said = f"group must be a ProcessGroup, a DeviceMesh or None, got {type(value).__name__}."
    assert_refused(loss, TypeError, said, group=value)


@every_loss
def test_group_must_have_one_dimension(loss: str) -> None:
    said = "group must be a DeviceMesh of one dimension, got 2."
    assert_refused(loss, ValueError, said, group=Mock(spec=DeviceMesh, ndim=2))


@every_loss
def test_group_must_be_chosen_where_several_ranks_run(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    said = "group must be given, because torch.distributed runs with 3 ranks. Pass group=torch.distributed.group.WORLD "
    said += "for the rows of all ranks together, or group=None for those of this rank alone."
    assert_refused(loss, ValueError, said)
    assert run(loss, group=None).isfinite()


@every_loss
def test_group_may_be_left_out_where_one_rank_runs(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert run(loss).isfinite()


# Under a compiler.


@pytest.fixture
def backend() -> Iterator[CompileCounterWithBackend]:
    """Traces forward and backward, and counts how often."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def compilable(loss: str, mix: str) -> dict[str, Any]:
    """Arguments with all options that apply, in one spelling or another."""
    rows = 6
    arguments = good(loss, rows)
    if loss == "info_nce_loss":
        arguments |= {"negatives": unit_rows(3), "positives": torch.arange(rows).flip(0)}
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.requires_grad_()
    arguments["weight"] = torch.rand(rows)
    if loss == "info_nce_loss":
        arguments |= {"query_ids": torch.arange(rows) // 2, "key_ids": torch.arange(rows) // 2}
        arguments |= {"negative_ids": torch.arange(3)}
    elif loss != "supcon_loss":
        arguments["ids"] = torch.arange(rows) // 2
    if loss != "siglip_loss":
        arguments["label_smoothing"] = 0.1
    if mix == "words":
        arguments |= {"logit_scale": None, "temperature": 0.2, "normalize": True, "memory_budget": "1MiB"}
        arguments |= {"backend": "eager", "group": None, "reduction": "sum"}
        if loss in ("clip_loss", "siglip_loss"):
            arguments["logit_bias"] = -2.0
    else:
        temperature = mix == "tensors and temperature"
        name = "temperature" if temperature else "logit_scale"
        arguments |= {
            "logit_scale": None,
            name: torch.tensor([0.5 if temperature else 2.0], requires_grad=True),
            "tile": 4,
            "normalize": None,
        }
        arguments |= {"return_stats": True, "reduction": "none" if temperature else "mean", "memory_budget": 10**6}
        if loss in ("clip_loss", "siglip_loss"):
            arguments["logit_bias"] = torch.tensor(-2.0, requires_grad=True)
        if loss != "supcon_loss":
            arguments["same_ids"] = "positive"
    return arguments


@every_loss
@pytest.mark.parametrize("mix", ["tensors and scale", "tensors and temperature", "words"])
def test_compiled_whole_it_gives_the_same(loss: str, mix: str, backend: CompileCounterWithBackend) -> None:
    function, arguments = getattr(megabatch, loss), compilable(loss, mix)
    leaves = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]

    def both(run: Any) -> tuple[Any, tuple[Tensor, ...]]:
        result = run(**arguments)
        value = result[0] if isinstance(result, tuple) else result
        return result, torch.autograd.grad((value * torch.linspace(1, 2, value.numel())).sum(), leaves)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(both(compiled), both(function), rtol=0, atol=0)
    assert backend.frame_count == 1


@every_loss
@pytest.mark.parametrize("argument", ["logit_scale", "temperature"])
def test_another_scale_and_batch_size_compile_nothing_anew(
    loss: str, argument: str, backend: CompileCounterWithBackend
) -> None:
    function = getattr(megabatch, loss)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    numbers = (2.0, 2.5, 3.0) if argument == "logit_scale" else (0.5, 0.4, 0.3)
    for rows, number in zip((6, 8, 10), numbers, strict=True):
        arguments = good(loss, rows) | {"logit_scale": None, argument: number}
        assert compiled(**arguments) == function(**arguments)
    assert backend.frame_count == 2  # once for the first, once for any other


@pytest.mark.parametrize("loss", ["clip_loss", "supcon_loss"])
@pytest.mark.parametrize(
    ("option", "values"), [("label_smoothing", (0.1, 0.2)), ("tile", (2, 3)), ("memory_budget", (5000, 6000))]
)
def test_another_constant_compiles(
    loss: str, option: str, values: tuple[float, float], backend: CompileCounterWithBackend
) -> None:
    """A compiler traces a number that it has seen change as a symbol: this one is compiled for all the same."""
    function, arguments = getattr(megabatch, loss), good(loss)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for value in values:
        assert compiled(**arguments | {option: value}) == function(**arguments | {option: value})


def test_compiled_it_still_looks_at_the_data(backend: CompileCounterWithBackend) -> None:
    compiled = torch.compile(megabatch.clip_loss, fullgraph=True, backend=backend)
    with pytest.raises(ValueError, match=r"clip_loss: weight must be finite and not negative, got -1\.0 to -1\.0"):
        compiled(**good("clip_loss"), weight=-torch.ones(N))


def test_compiled_it_does_not_warn_of_a_scale(backend: CompileCounterWithBackend) -> None:
    """A warning would end the graph; whoever compiles has run the loss as it is before."""
    compiled = torch.compile(megabatch.clip_loss, fullgraph=True, backend=backend)
    for scale in 5.0, 0.07:
        assert compiled(**good("clip_loss") | {"logit_scale": scale}).isfinite()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_that_requires_grad_is_refused(loss: str) -> None:
    weight = torch.ones(N, requires_grad=True)
    assert_refused(loss, ValueError, "weight must not require grad", "weight.detach()", weight=weight)
