"""The losses as modules: what they own, how it is kept, and that they equal the functions."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import megabatch

MODULES = {
    "ClipLoss": (megabatch.ClipLoss, 1 / 0.07, megabatch.clip_loss),
    "SigLipLoss": (megabatch.SigLipLoss, 10, megabatch.siglip_loss),
    "InfoNCELoss": (megabatch.InfoNCELoss, 1 / 0.05, megabatch.info_nce_loss),
    "NTXentLoss": (megabatch.NTXentLoss, 1 / 0.5, megabatch.nt_xent_loss),
    "SupConLoss": (megabatch.SupConLoss, 1 / 0.1, megabatch.supcon_loss),
}
FIXED = ("InfoNCELoss", "NTXentLoss", "SupConLoss")


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(12, 6)
    if name in ("ClipLoss", "SigLipLoss"):
        rows = normalize(rows, dim=1)
    return rows.requires_grad_(), torch.arange(12) // 3 if name == "SupConLoss" else normalize(
        torch.randn(12, 6), dim=1
    )


@pytest.mark.parametrize("name", MODULES)
def test_equals_the_function_at_its_default_scale(name: str) -> None:
    kind, scale, function = MODULES[name]
    inputs = batch(name)
    bias = {"logit_bias": -10.0} if name == "SigLipLoss" else {}
    expected = function(*inputs, logit_scale=float(scale), normalize=name in FIXED, **bias)
    options: dict[str, Any] = {} if name in FIXED else {"normalize": False}
    torch.testing.assert_close(kind(**options)(*inputs), expected)


@pytest.mark.parametrize("name", MODULES)
def test_owns_the_logarithm_as_a_float32_parameter_of_shape_1(name: str) -> None:
    kind, scale, _ = MODULES[name]
    module = kind()
    assert module.logit_scale.shape == (1,)
    assert module.logit_scale.dtype == torch.float32
    assert module.logit_scale.requires_grad == (name not in FIXED)
    assert module.logit_scale.item() == pytest.approx(math.log(scale))
    assert module.no_weight_decay() == {"logit_scale", "logit_bias"} if name == "SigLipLoss" else {"logit_scale"}


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, lambda m: m.to(torch.float16)])
def test_stays_float32_and_unrounded_when_the_model_is_cast(cast: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), megabatch.SigLipLoss(init_logit_scale=11.37))
    before = copy.deepcopy(model[1].state_dict())
    cast(model)
    assert model[0].weight.dtype != torch.float32
    for name, value in model[1].state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])


def test_follows_the_model_to_another_device() -> None:
    assert megabatch.ClipLoss().to("meta").logit_scale.device.type == "meta"


def test_a_learnable_scale_learns() -> None:
    module = megabatch.ClipLoss(init_logit_scale=2.0, normalize=False)
    rows = normalize(torch.randn(12, 6), dim=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = module.logit_scale.item()
    module(rows, rows).backward()
    optimizer.step()
    assert module.logit_scale.item() > before


def test_is_clamped_in_training_only_and_outside_of_the_graph() -> None:
    module = megabatch.ClipLoss(max_logit_scale=50, normalize=False)
    rows = normalize(torch.randn(8, 4), dim=1).requires_grad_()
    with torch.no_grad():
        module.logit_scale.fill_(math.log(80))
    module.eval()
    module(rows, rows)
    assert module.logit_scale.item() == pytest.approx(math.log(80))
    module.train()
    module(rows, rows + 0.1).backward()
    assert module.logit_scale.item() == pytest.approx(math.log(50))
    assert module.logit_scale.grad.abs() > 0  # a clamp in the graph would have stopped it


def test_two_forwards_before_one_backward() -> None:
    module = megabatch.ClipLoss(normalize=False)
    rows = normalize(torch.randn(8, 4), dim=1).requires_grad_()
    (module(rows, rows.roll(1, 0)) + module(rows, rows.roll(2, 0))).backward()
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_loads_a_0d_scale_as_other_libraries_save_it(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(megabatch.SigLipLoss())
    model.load_state_dict({"0.logit_scale": torch.full(shape, 3.0), "0.logit_bias": torch.full(shape, -4.0)})
    assert model[0].logit_scale.tolist() == [3.0]
    assert model[0].logit_bias.tolist() == [-4.0]


def test_saved_state_is_loaded_again() -> None:
    module, other = megabatch.ClipLoss(init_logit_scale=33.0), megabatch.ClipLoss()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.logit_scale, module.logit_scale)


@pytest.mark.parametrize("name", MODULES)
def test_without_a_scale_of_its_own_it_takes_one_in_forward(name: str) -> None:
    kind, scale, _ = MODULES[name]
    inputs = batch(name)
    own, none = kind(normalize=True), kind(None, normalize=True)
    assert list(none.parameters()) == []
    bias = {"logit_bias": -10.0} if name == "SigLipLoss" else {}
    torch.testing.assert_close(none(*inputs, logit_scale=float(scale), **bias), own(*inputs))
    with pytest.raises(ValueError, match=f"{name}: logit_scale must be passed"):
        none(*inputs)
    with pytest.raises(ValueError, match=f"{name}: logit_scale must not be passed, because this module owns one"):
        own(*inputs, logit_scale=1.0)


def test_a_siglip_module_that_owns_a_bias_refuses_another() -> None:
    with pytest.raises(ValueError, match="SigLipLoss: logit_bias must not be passed"):
        megabatch.SigLipLoss()(*batch("SigLipLoss"), logit_bias=1.0)


@pytest.mark.parametrize("name", MODULES)
def test_output_dict(name: str) -> None:
    kind, _, _ = MODULES[name]
    inputs = batch(name)
    value = kind(normalize=True)(*inputs)
    assert kind(normalize=True)(*inputs, output_dict=True).keys() == {"contrastive_loss"}
    named, stats = kind(normalize=True, return_stats=True)(*inputs, output_dict=True)
    torch.testing.assert_close(named["contrastive_loss"], value)
    assert "accuracy" in stats


def test_takes_the_arguments_that_open_clip_passes_by_position() -> None:
    image, text = batch("ClipLoss")
    module = megabatch.ClipLoss(None, normalize=False)
    scale, bias = torch.tensor(14.0), torch.tensor(-3.0)
    assert torch.equal(module(image, text, scale, bias, True)["contrastive_loss"], module(image, text, scale))


def test_options_of_a_batch_go_to_forward() -> None:
    image, text = batch("ClipLoss")
    module = megabatch.ClipLoss(normalize=False, label_smoothing=0.1, same_ids="positive", reduction="sum")
    weight, ids = torch.rand(12), torch.arange(12) // 2
    expected = megabatch.clip_loss(
        image,
        text,
        module.logit_scale.exp(),
        normalize=False,
        label_smoothing=0.1,
        same_ids="positive",
        reduction="sum",
        weight=weight,
        ids=ids,
    )
    torch.testing.assert_close(module(image, text, weight=weight, ids=ids), expected)
    query, key = batch("InfoNCELoss")
    negatives = torch.randn(5, 6)
    torch.testing.assert_close(
        megabatch.InfoNCELoss()(query, key, negatives, positives=torch.arange(12).flip(0)),
        megabatch.info_nce_loss(
            query, key, 20.0, negatives=negatives, positives=torch.arange(12).flip(0), normalize=True
        ),
    )


@pytest.mark.parametrize(
    ("construct", "error", "message"),
    [
        (lambda: megabatch.ClipLoss(smoothing=0.1), TypeError, "ClipLoss: smoothing is not an option. Perhaps"),
        (
            lambda: megabatch.ClipLoss(ids=None),
            TypeError,
            "ClipLoss: ids is not an option of the module. Pass it to forward",
        ),
        (
            lambda: megabatch.SigLipLoss(label_smoothing=0.1),
            TypeError,
            "SigLipLoss: label_smoothing is not an option. Options are: learnable, max_logit_scale, normalize, same",
        ),
        (lambda: megabatch.ClipLoss(temperature=0.1), TypeError, "Pass init_logit_scale=1 / temperature"),
        (lambda: megabatch.ClipLoss(0.0), ValueError, "ClipLoss: the scale must be positive and finite, got 0.0"),
        (lambda: megabatch.ClipLoss(200.0), ValueError, "at or below max_logit_scale, got 200.0 and 100"),
        (lambda: megabatch.ClipLoss(max_logit_scale=0), ValueError, "max_logit_scale must be positive, got 0"),
        (
            lambda: megabatch.InfoNCELoss(-1.0),
            ValueError,
            "InfoNCELoss: temperature must be positive and finite, got -1.0",
        ),
    ],
)
def test_bad_construction_is_named(construct: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        construct()


def test_a_small_fixed_temperature_is_not_clamped() -> None:
    module = megabatch.InfoNCELoss(0.005)
    module(*batch("InfoNCELoss"))
    assert module.logit_scale.exp().item() == pytest.approx(200)


def test_repr_shows_scale_and_options() -> None:
    assert repr(megabatch.ClipLoss(label_smoothing=0.1)) == "ClipLoss(logit_scale=14.29, label_smoothing=0.1)"


def test_a_module_made_on_the_meta_device_starts_where_it_should() -> None:
    with torch.device("meta"):
        module = megabatch.SigLipLoss(7.0, -3.0)
    assert "logit_scale=meta" in repr(module)
    module.to_empty(device="cpu").reset_parameters()
    assert module.logit_scale.exp().item() == pytest.approx(7)
    assert module.logit_bias.item() == -3


def test_a_copy_has_parameters_of_its_own_and_the_same_group() -> None:
    class Group:
        def __deepcopy__(self, memo: Any) -> None:
            raise TypeError("cannot be copied, as a process group")

    module = megabatch.ClipLoss()
    module.options["group"] = group = Group()
    copied = copy.deepcopy(module)
    assert copied.options["group"] is group
    assert copied.logit_scale is not module.logit_scale
    assert torch.equal(copied.logit_scale, module.logit_scale)
