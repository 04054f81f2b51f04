"""The losses as citizens of torch: autograd, torch.compile, autocast, grad scalers, any strides."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

import megabatch
from megabatch import reference
from megabatch.losses import spec as specs
from megabatch.tiling import call, engine
from megabatch.tiling.operators import contrast, contrast_backward
from megabatch.tiling.options import LossInputs, LossOptions, Needs

from .test_losses import LOSSES, assert_equals_twin, gradients, make_inputs
from .tolerance import slack


class Towers(nn.Module):
    """A small model with one of our losses in its forward."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.image, self.text, self.loss = nn.Linear(12, 8), nn.Linear(10, 8), loss

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.loss(normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, in inductor
@pytest.mark.parametrize(
    "loss", [megabatch.ClipLoss, megabatch.SigLipLoss, megabatch.InfoNCELoss, megabatch.NTXentLoss]
)
def test_a_model_compiles_once_for_all_batch_sizes(loss: type[nn.Module]) -> None:
    torch._dynamo.reset()
    model = Towers(loss(normalize=False))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for num_rows in (16, 24, 40, 7, 33):
        images, texts = torch.randn(num_rows, 12), torch.randn(num_rows, 10)
        expected = model(images, texts)
        wanted = torch.autograd.grad(expected, [p for p in model.parameters() if p.requires_grad])
        value = compiled(images, texts)
        torch.testing.assert_close(value, expected)
        got = torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad])
        for ours, theirs in zip(got, wanted, strict=True):
            allowed = 2 * slack(torch.float32, theirs.abs().max().item(), natural=1.0, logits=1 / 0.07)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=allowed)
    assert counter.frame_count <= 2  # the first size, then any size


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_a_compiler_that_breaks_its_graph_gets_the_same_gradients() -> None:
    torch._dynamo.reset()
    model = Towers(megabatch.ClipLoss(normalize=False))
    images, texts = torch.randn(16, 12), torch.randn(16, 10)
    losses = [step(images, texts) for step in (torch.compile(model, backend="aot_eager"), model)]
    got, wanted = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(got, wanted)


OPERATOR_CASES = {
    "clip": (specs.clip("ignore", 0.0), "mean", None),
    "clip, ids, smoothing, rows": (specs.clip("mask", 0.1), "none", None),
    "clip, kept": (specs.clip("ignore", 0.0), "mean", 2**20),
    "info_nce": (specs.info_nce("ignore", 0.0), "mean", None),
    "siglip": (specs.siglip("ignore"), "sum", None),
    "siglip, float64, rows": (specs.siglip("ignore"), "none", None),
    "nt_xent": (specs.nt_xent("ignore", 0.0), "none", None),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("case", OPERATOR_CASES)
def test_operators_pass_opcheck(case: str) -> None:
    spec, reduction, budget = OPERATOR_CASES[case]
    num_rows = 8  # kept tiles of full size: the rest of a slot is never written nor read
    dtype = torch.float64 if "float64" in case else torch.float32
    first, second = (normalize(torch.randn(num_rows, 5, dtype=dtype), dim=1).requires_grad_() for _ in range(2))
    scale = torch.tensor([4.0], requires_grad=True)
    bias = torch.tensor(-1.0, requires_grad=True) if spec.epilogue == "sigmoid" else None
    ids = torch.arange(num_rows) // 2 if spec.id_rule == "mask" else None
    needs = Needs(True, True, False, True, bias is not None)
    call = LossOptions("test", spec, needs, reduction, normalize=False, tile=(4, 4), memory_budget=budget).encode()
    inputs = (first, second, None, scale, bias, ids, ids, None, None, None, None)
    torch.library.opcheck(contrast, (*inputs, call))
    value, _, *rest = contrast(*inputs, call)
    detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
    torch.library.opcheck(contrast_backward, (torch.ones_like(value), *rest, *detached, call))


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_honours_what_the_caller_multiplies_the_loss_by(loss: str, budget: str | None) -> None:
    for reduction in ("mean", "sum", "none"):
        assert_equals_twin(
            loss, make_inputs(loss, 9, 5), upstream=-1000.0, reduction=reduction, tile=4, memory_budget=budget
        )


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_retained_graph_gives_the_same_gradients_again(loss: str, budget: str | None) -> None:
    inputs = make_inputs(loss, 9, 5)
    value = getattr(megabatch, loss)(**inputs, normalize=False, tile=4, memory_budget=budget)
    needed = [x for x in inputs.values() if x.requires_grad]
    once, again = (torch.autograd.grad(value, needed, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_second_backward_through_the_gradient_is_refused(loss: str) -> None:
    inputs = make_inputs(loss, 6, 4)
    needed = [x for x in inputs.values() if x.requires_grad]
    value = getattr(megabatch, loss)(**inputs, normalize=False)
    grads = torch.autograd.grad(value, needed, create_graph=True)
    with pytest.raises(RuntimeError, match=r"gradient of a loss cannot be differentiated again.*megabatch\.reference"):
        sum(g.square().sum() for g in grads).backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_strides_do_not_matter(loss: str) -> None:
    inputs = make_inputs(loss, 12, 6)
    layouts = {
        "transposed": lambda x: x.T.contiguous().T,
        "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
        "part of wider rows": lambda x: torch.cat([x, x], 1)[:, 3:9].roll(3, 1)[:, : x.shape[1]],
        "one row for all": lambda x: x[:1].expand(x.shape),
    }
    for layout in layouts.values():
        laid_out = {name: layout(x.detach()).requires_grad_() if x.dim() == 2 else x for name, x in inputs.items()}
        assert_equals_twin(loss, laid_out, tile=5)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_grad_and_inference_mode(loss: str) -> None:
    inputs = make_inputs(loss, 9, 5)
    expected = getattr(reference, loss)(**inputs, normalize=False).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            value = getattr(megabatch, loss)(**inputs, normalize=False, tile=4)
        assert not value.requires_grad
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_logits_stay_float32(dtype: torch.dtype) -> None:
    model = Towers(megabatch.ClipLoss(normalize=False))
    images, texts = torch.randn(20, 12), torch.randn(20, 10)
    with torch.autocast("cpu", dtype=dtype):
        image, text = model.image(images), model.text(texts)
        assert image.dtype == dtype
        image, text = normalize(image.float(), dim=1), normalize(text.float(), dim=1)
        value = megabatch.clip_loss(image, text, 50.0, normalize=False)
        mixed = megabatch.clip_loss(image, text.to(dtype), 50.0, normalize=False)
    assert value.dtype == mixed.dtype == torch.float32
    torch.testing.assert_close(value, reference.clip_loss(image, text, 50.0, normalize=False))
    value.backward()
    assert model.image.weight.grad.dtype == torch.float32


def test_in_a_grad_scaler_loop() -> None:
    model = Towers(megabatch.ClipLoss(normalize=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    images = torch.randn(64, 12)
    texts = images[:, :10].clone()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(images, texts)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_inside_activation_checkpointing() -> None:
    inputs = make_inputs("clip_loss", 9, 5)
    names = list(inputs)

    def run(*values: Any) -> Tensor:
        return megabatch.clip_loss(**dict(zip(names, values, strict=True)), normalize=False, tile=4)

    ours = gradients(checkpoint(run, *inputs.values(), use_reentrant=False), inputs)
    expected = gradients(run(*inputs.values()), inputs)
    for name, value in ours.items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale_gradient_has_the_shape_and_dtype_of_the_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = make_inputs("siglip_loss", 9, 5, torch.float32)
    inputs["logit_scale"] = torch.full(shape, 6.0, dtype=dtype, requires_grad=True)
    inputs["logit_bias"] = torch.full(shape, -3.0, dtype=dtype, requires_grad=True)
    megabatch.siglip_loss(**inputs, normalize=False).backward()
    for name in ("logit_scale", "logit_bias"):
        grad = inputs[name].grad
        assert (grad.shape, grad.dtype) == (torch.Size(shape), dtype)


def test_temperature_is_the_inverse_of_the_scale() -> None:
    inputs = make_inputs("clip_loss", 9, 5)
    del inputs["logit_scale"]
    for temperature in (0.07, torch.tensor(0.07, dtype=torch.float64, requires_grad=True)):
        value = megabatch.clip_loss(**inputs, temperature=temperature, normalize=False)
        torch.testing.assert_close(value, megabatch.clip_loss(**inputs, logit_scale=1 / 0.07, normalize=False))
    value.backward()
    assert temperature.grad.isfinite()


def test_clip_takes_what_an_open_clip_model_returns() -> None:
    """A bias in the dict is no error and, being a parameter, gets a gradient: zero."""
    inputs = make_inputs("clip_loss", 9, 5, torch.float32)
    inputs["logit_bias"] = torch.tensor(-10.0, requires_grad=True)
    value = megabatch.clip_loss(**inputs, normalize=False)
    value.backward()
    assert torch.equal(inputs["logit_bias"].grad, torch.zeros(()))
    del inputs["logit_bias"]
    torch.testing.assert_close(value, megabatch.clip_loss(**inputs, normalize=False))


def test_half_inputs_give_float32_results_and_half_gradients() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        image, text = (normalize(torch.randn(9, 5), dim=1).to(dtype).requires_grad_() for _ in range(2))
        value, stats = megabatch.clip_loss(image, text, 5.0, normalize=False, return_stats=True)
        value.backward()
        assert value.dtype == torch.float32
        assert {x.dtype for x in stats.values()} == {torch.float32}
        assert image.grad.dtype == text.grad.dtype == dtype


def test_products_of_bf16_into_float32_as_on_an_accelerator() -> None:
    """What CUDA multiplies in half precision is emulated: same dlogits, same sums, logits and scale float32."""
    rows, columns = (normalize(torch.randn(40, 16), dim=1).bfloat16() for _ in range(2))
    inputs = LossInputs(rows, columns, scale=torch.tensor(20.0))
    options = LossOptions(
        "test", specs.clip("ignore", 0.0), Needs(True, True, False, True), normalize=False, tile=(16, 16)
    )
    results = []
    for operand in (None, torch.bfloat16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call.Call, "_operand_dtype", lambda self, operand=operand: operand or self.layout.dtype)
            value, _, *saved = engine.forward(inputs, options)
            results.append((value, engine.backward(inputs, options, torch.ones(()), *saved)))
    (exact, wanted), (value, got) = results
    torch.testing.assert_close(value, exact)
    allowed = 2 * slack(torch.float32, wanted[3].abs().item(), natural=1.0, logits=20.0)
    torch.testing.assert_close(got[3], wanted[3], rtol=0, atol=allowed)
    for rounded, whole in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(rounded, whole, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_backward_follows_the_plan_of_its_forward(reduction: str, budget: str | None) -> None:
    """A plan depends on the number of threads, and that may change in between."""
    inputs = make_inputs("clip_loss", 600, 160, torch.float32)
    options = {"normalize": False, "reduction": reduction, "memory_budget": budget}
    threads = torch.get_num_threads()
    expected = gradients(reference.clip_loss(**inputs, normalize=False, reduction=reduction), inputs)
    try:
        torch.set_num_threads(1)
        value = megabatch.clip_loss(**inputs, **options)
        torch.set_num_threads(2)
        ours = gradients(value, inputs)
    finally:
        torch.set_num_threads(threads)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5 * expected[name].abs().max().item())


def test_vmap_gives_the_loss_of_every_batch() -> None:
    x, y = (normalize(torch.randn(3, 6, 4), dim=2) for _ in range(2))
    ours, theirs = (partial(module.clip_loss, logit_scale=2.0, normalize=False) for module in (megabatch, reference))
    expected = [theirs(a, b) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(torch.func.vmap(ours)(x, y), torch.stack(expected))
    torch.testing.assert_close(torch.func.vmap(ours, in_dims=(1, None))(x.movedim(0, 1), y[0])[0], expected[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_forward_mode_derivatives_are_refused() -> None:
    x, y = normalize(torch.randn(6, 4), dim=1), normalize(torch.randn(6, 4), dim=1)
    with pytest.raises(ValueError, match="clip_loss: inputs must not carry forward-mode tangents"):
        torch.func.jvp(lambda a: megabatch.clip_loss(a, y, 2.0, normalize=False), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ValueError, match="clip_loss: inputs must not carry forward-mode tangents"):
            megabatch.clip_loss(dual, y, 2.0, normalize=False)


def test_a_call_survives_its_way_through_the_operator() -> None:
    call = LossOptions(
        "f",
        specs.nt_xent("mask", 0.1),
        Needs(True, False, True),
        "none",
        True,
        None,
        (3, 4),
        99,
        "eager",
        "x",
        "y",
        "sum",
        "gather",
        False,
        False,
        "train.py:3, in step",
    )
    assert LossOptions.decode(call.encode()) == call
