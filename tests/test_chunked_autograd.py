"""`chunked` as a citizen of torch: autograd's other doors, hooks, what must not change in between, frozen parts, norms,
checkpoints, and the compiler."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from megabatch import callers, chunked

from .encoders import (
    EXACT,
    Block,
    Mlp,
    Recorded,
    Vit,
    assert_identical,
    assert_same,
    backward,
    contrast,
    loop_step,
    make_encoder,
    make_inputs,
    step,
    trained,
)


def mlp(rows: int = 13, dropout: float = 0.0) -> tuple[nn.Module, Tensor]:
    return make_encoder("mlp", dropout), *make_inputs("mlp", rows)


# ---- torch.autograd.grad, backward(inputs=...), hooks


def test_autograd_grad_equals_for_parameters_and_inputs() -> None:
    model, x = mlp()
    x.requires_grad_()
    wanted_of = [*model.parameters(), x]
    got = torch.autograd.grad(contrast(chunked(model, x, chunk_size=4)), wanted_of)
    torch.testing.assert_close(got, torch.autograd.grad(contrast(model(x)), wanted_of), **EXACT)
    assert all(tensor.grad is None for tensor in wanted_of)


def test_autograd_grad_of_one_parameter_alone() -> None:
    model, x = mlp()
    (got,) = torch.autograd.grad(contrast(chunked(model, x, chunk_size=4)), model.first.bias)
    (wanted,) = torch.autograd.grad(contrast(model(x)), model.first.bias)
    torch.testing.assert_close(got, wanted, **EXACT)


def test_autograd_grad_of_the_output() -> None:
    """As a cached loss takes it: the gradient of the features, and no replay for it."""
    model, x = mlp()
    recorded = Recorded(model)
    features = chunked(recorded, x, chunk_size=4)
    (got,) = torch.autograd.grad(contrast(features), features, retain_graph=True)
    assert got.shape == features.shape
    assert len(recorded.calls) == 4


def test_backward_to_chosen_inputs_leaves_the_others_alone() -> None:
    model, x = mlp()
    contrast(chunked(model, x, chunk_size=4)).backward(inputs=[model.second.weight])
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["second.weight"]
    got = model.second.weight.grad
    model.zero_grad()
    contrast(model(x)).backward()
    torch.testing.assert_close(got, model.second.weight.grad, **EXACT)


def penalty(features: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(contrast(features), x, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize("chunk_size", [13, 4])
def test_second_derivatives_are_right(chunk_size: int) -> None:
    model, x = mlp()
    x.requires_grad_()
    got = backward(penalty(chunked(model, x, chunk_size=chunk_size), x), trained(model))
    assert_same(got, backward(penalty(model(x), x), trained(model)), **EXACT)
    assert got["first.weight"].any()


def test_second_derivatives_with_dropout_draw_the_same_numbers_in_every_run() -> None:
    model, x = mlp(dropout=0.3)
    x.requires_grad_()
    torch.manual_seed(7)
    wanted = backward(penalty(torch.cat([model(part) for part in x.split(4)]), x), trained(model))
    torch.manual_seed(7)
    assert_same(backward(penalty(chunked(model, x, chunk_size=4), x), trained(model)), wanted, **EXACT)


def test_second_derivatives_of_the_loss_by_the_features_pass() -> None:
    """They do not reach the encoder."""
    model, x = mlp()
    features = chunked(model, x, chunk_size=4)
    (gradient,) = torch.autograd.grad(contrast(features), features, create_graph=True)
    features = model(x)
    (wanted,) = torch.autograd.grad(contrast(features), features, create_graph=True)
    torch.testing.assert_close(gradient, wanted, **EXACT)
    assert gradient.requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_forward_mode_derivatives_are_right_or_refused() -> None:
    model, x = mlp()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        wanted = forward_ad.unpack_dual(model(dual)).tangent
        try:
            got = forward_ad.unpack_dual(chunked(model, dual, chunk_size=4)).tangent
        except ValueError as refusal:
            assert str(refusal).startswith("chunked: ")  # noqa: PT017
        else:
            assert got is not None, "the tangent was dropped without a word"
            torch.testing.assert_close(got, wanted, **EXACT)


def test_hooks_on_parameters_fire_once_with_the_whole_gradient() -> None:
    model, x = mlp()
    wanted = step(model, model, x)
    fired: list[Tensor] = []
    handle = model.first.weight.register_hook(lambda gradient: fired.append(gradient.clone()) or gradient * 2)
    got = step(lambda x: chunked(model, x, chunk_size=4), model, x)
    assert len(fired) == 1
    torch.testing.assert_close(fired[0], wanted["first.weight"], **EXACT)
    torch.testing.assert_close(got["first.weight"], wanted["first.weight"] * 2, **EXACT)
    handle.remove()
    assert_same(step(lambda x: chunked(model, x, chunk_size=4), model, x), wanted, **EXACT)
    assert len(fired) == 1


def test_hooks_after_accumulation_fire_once_per_backward() -> None:
    model, x = mlp()
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    loss = contrast(chunked(model, x, chunk_size=4))
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert sorted(fired) == sorted([name for name, _ in model.named_parameters()] * times)


def test_hooks_on_inputs_and_outputs_fire_once() -> None:
    model, x = mlp()
    x.requires_grad_()
    fired: list[str] = []
    x.register_hook(lambda gradient: fired.append(f"x {tuple(gradient.shape)}"))
    features = chunked(model, x, chunk_size=4)
    features.register_hook(lambda gradient: fired.append(f"features {tuple(gradient.shape)}"))
    contrast(features).backward()
    assert fired == ["features (13, 5)", "x (13, 6)"]


def test_hooks_of_the_encoders_modules_run_in_every_chunk() -> None:
    model, x = mlp()
    forwards: list[int] = []
    backwards: list[int] = []
    model.first.register_forward_hook(lambda m, args, out: forwards.append(len(out)))
    model.first.register_full_backward_hook(lambda m, before, after: backwards.append(len(after[0])))
    x.requires_grad_()
    contrast(chunked(model, x, chunk_size=4)).backward()
    assert forwards == [4, 4, 4, 1, 1, 4, 4, 4]
    assert backwards == [1, 4, 4, 4]


def test_parameters_without_a_gradient_stay_without() -> None:
    model, x = mlp()
    model.unused = nn.Linear(3, 3).double()
    contrast(chunked(model, x, chunk_size=4)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["unused.weight", "unused.bias"]


def test_after_a_failed_forward_autograd_is_as_it_was() -> None:
    model, x = mlp()
    calls: list[int] = []

    def broken(x: Tensor) -> Tensor:
        calls.append(len(x))
        raise KeyError(model(x).shape)

    with pytest.raises(KeyError) as caught:  # whose traceback keeps the frames
        chunked(broken, x, chunk_size=4)
    weight = torch.ones(3, requires_grad=True)
    weight.exp().sum().backward()
    assert len(calls) == 1
    assert caught.value.args == (torch.Size((4, 5)),)


def test_after_a_failed_backward_all_is_as_it_was() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.broken = Mlp(0.5), nn.BatchNorm1d(5, momentum=0.5), False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken and len(x) == 1:
                raise KeyError("mine")
            return self.inner(x) if len(x) == 1 else self.norm(self.inner(x))

    model, x = Fails().double(), torch.randn(9, 6, dtype=torch.float64)
    fired: list[int] = []
    model.inner.first.weight.register_hook(lambda gradient: fired.append(1))
    callers.warned.add(("chunked", "batch norm"))
    loss = contrast(chunked(model, x, chunk_size=4))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    model.broken = True
    with pytest.raises(KeyError, match="mine"):
        loss.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not fired
    model.broken = False
    loss.backward()
    assert fired == [1]


# ---- what must not change between forward and backward


def test_writing_to_a_parameter_in_between_is_refused_with_its_shape() -> None:
    model, x = mlp()
    loss = contrast(chunked(model, x, chunk_size=4))
    with torch.no_grad():
        model.first.weight.mul_(1.0)
    words = r"chunked: inputs and parameters must not be written to, .* got one of shape \(16, 6\)"
    with pytest.raises(RuntimeError, match=words):
        loss.backward()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_of_the_optimizer_in_between_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    model, x = mlp()
    optimizer = kind(model.parameters(), lr=1e-6)
    first, second = (contrast(chunked(model, x, chunk_size=4)) for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"step the optimizer after the backward"):
        second.backward()


@pytest.mark.parametrize("whole", [(), "x"])
def test_writing_to_an_input_in_between_is_refused_with_its_shape(whole: Any) -> None:
    x, y = torch.randn(7, 3), torch.randn(7, 3, requires_grad=True)
    out = chunked(lambda x, y: y * x.sum(), x, y, chunk_size=3, whole=whole)
    x.zero_()
    words = rf"inputs and parameters must not be written to, .* shape \({7 if whole else 1}, 3\) .* Copy inputs"
    with pytest.raises(RuntimeError, match=words):
        out.sum().backward()


def test_freezing_in_between_is_refused() -> None:
    model, x = mlp()
    loss = contrast(chunked(model, x, chunk_size=4))
    model.first.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"torch.utils.checkpoint: A different number of tensors was saved"):
        loss.backward()


def test_unfreezing_in_between_is_refused() -> None:
    model, x = mlp()
    model.first.requires_grad_(False)
    loss = contrast(chunked(model, x, chunk_size=4))
    model.first.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"torch.utils.checkpoint: trying to save more tensors"):
        loss.backward()


def test_a_parameter_that_is_replaced_in_between_gets_its_gradient_as_without_chunks() -> None:
    model, x = mlp()
    before = model.first.weight
    loss, wanted = contrast(chunked(model, x, chunk_size=4)), step(model, model, x)
    model.first.weight = nn.Parameter(before.detach().clone())
    loss.backward()
    torch.testing.assert_close(before.grad, wanted["first.weight"], **EXACT)
    assert model.first.weight.grad is None


def test_replacing_a_parameters_data_in_between_is_refused() -> None:
    model, x = mlp()
    loss = contrast(chunked(model, x, chunk_size=4))
    model.first.weight.data = torch.randn(16, 6, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="chunked: "):
        loss.backward()


NOT_OURS: dict[str, Callable[[], Callable[[], float]]] = {
    "numpy": lambda: np.random.default_rng(3).random,
    "random": lambda: random.Random(3).random,
    "a generator of its own": lambda: functools.partial(torch.rand, (), generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("source", NOT_OURS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_random_numbers_that_cannot_be_replayed_are_refused(source: str, dtype: torch.dtype) -> None:
    model, x, draw = Mlp().to(dtype), torch.randn(13, 6, dtype=dtype), NOT_OURS[source]()
    loss = contrast(chunked(lambda x: model(x) * (1 + float(draw())), x, chunk_size=4))
    words = r"must give the same in the backward, .* relative difference of [\d.e-]+ in output: .* random numbers"
    with pytest.raises(RuntimeError, match=words):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_random_numbers_that_cannot_be_replayed_are_refused_in_any_chunk_and_output() -> None:
    (model, x), draw = mlp(), random.Random(3).random

    def encode(x: Tensor) -> dict[str, Tensor]:
        features = model(x)
        return {"a": features, "b": features * (1 + draw()) if len(x) == 1 else features}

    out = chunked(encode, x, chunk_size=4)
    with pytest.raises(RuntimeError, match=r"relative difference of [\d.e-]+ in output\['b'\]"):
        (contrast(out["a"]) + contrast(out["b"])).backward()


def test_another_mode_in_between_is_refused() -> None:
    model, x = mlp(dropout=0.5)
    loss = contrast(chunked(model, x, chunk_size=4))
    model.eval()
    with pytest.raises(RuntimeError, match=r"Do not change parameters, buffers or mode \(train, eval\)"):
        loss.backward()


def test_nan_and_infinity_are_the_same_again() -> None:
    model, x = mlp()
    x[0], x[1], x[5] = torch.nan, torch.inf, -torch.inf
    with torch.no_grad():
        model.second.bias[0] = torch.inf
    chunked(model, x, chunk_size=4).nan_to_num().sum().backward()


def test_a_closure_over_a_tensor_with_a_history_is_right() -> None:
    model, x = mlp()
    parameter = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    tensors = {"parameter": parameter, **trained(model)}
    scale = parameter.exp()
    got = backward(contrast(chunked(lambda x: model(x) * scale, x, chunk_size=4)), tensors)
    assert_same(got, backward(contrast(model(x) * parameter.exp()), tensors), **EXACT)


def test_a_tensor_with_a_history_as_an_argument_is_right() -> None:
    model, x = mlp()
    parameter = nn.Parameter(torch.randn(5, dtype=torch.float64))
    tensors = {"parameter": parameter, **trained(model)}

    def encode(x: Tensor, scale: Tensor) -> Tensor:
        return model(x) * scale

    got = backward(contrast(chunked(encode, x, parameter.exp(), chunk_size=4, whole="scale")), tensors)
    assert_same(got, backward(contrast(encode(x, parameter.exp())), tensors), **EXACT)


def test_a_closure_over_a_leaf_is_right() -> None:
    model, x = mlp()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    tensors = {"scale": scale, **trained(model)}
    got = backward(contrast(chunked(lambda x: model(x) * scale, x, chunk_size=4)), tensors)
    assert_same(got, backward(contrast(model(x) * scale), tensors), **EXACT)


# ---- how often the encoder runs


def test_a_trained_encoder_runs_twice_per_chunk() -> None:
    model, x = Recorded(mlp()[0]), mlp()[1]
    contrast(chunked(model, x, chunk_size=4)).backward()
    assert model.rows == [4, 4, 4, 1, 1, 4, 4, 4]


def test_the_gradient_of_a_scale_alone_takes_one_chunk() -> None:
    model, x = Recorded(mlp()[0]), mlp()[1]
    log_scale = nn.Parameter(torch.tensor(0.5))
    _, scale = chunked(lambda x: (model(x), log_scale.exp()), x, chunk_size=4)
    scale.backward()
    torch.testing.assert_close(log_scale.grad, log_scale.exp().detach())
    assert model.rows == [4, 4, 4, 1, 1]


def test_a_frozen_encoder_runs_once_per_chunk() -> None:
    model, x = Recorded(mlp()[0].requires_grad_(False)), mlp()[1]
    head = nn.Linear(5, 3).double()
    features = chunked(model, x, chunk_size=4)
    assert not features.requires_grad
    contrast(head(features)).backward()
    assert model.rows == [4, 4, 4, 1]


def test_a_frozen_encoder_hands_gradients_on_to_its_input() -> None:
    model, x = mlp()
    model.requires_grad_(False)
    x.requires_grad_()
    got = step(lambda x: chunked(model, x, chunk_size=4), model, x)
    assert_same(got, step(model, model, x), **EXACT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_runs_once_per_chunk(mode: Callable[[], Any]) -> None:
    model, x = Recorded(mlp()[0]), mlp()[1].requires_grad_()
    with mode():
        features = chunked(model, x, chunk_size=4)
        torch.testing.assert_close(features, model.inner(x), **EXACT)
    assert not features.requires_grad
    assert model.calls == [(4, False), (4, False), (4, False), (1, False)]


def test_an_encoder_that_turns_gradients_off_runs_once_per_chunk() -> None:
    model, x = Recorded(mlp()[0]), mlp()[1]
    features = chunked(torch.no_grad()(model.forward), x, chunk_size=4)
    assert not features.requires_grad
    assert len(model.calls) == 4


def test_a_frozen_trunk_under_a_trained_head() -> None:
    model = make_encoder("vit")
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.norm.requires_grad_(True)
    (x,) = make_inputs("vit", 13)
    got = step(lambda x: chunked(model, x, chunk_size=4), model, x)
    assert set(got) == {"loss", "norm.weight", "norm.bias", "head.weight"}
    assert_same(got, step(model, model, x), **EXACT)
    assert model.patches.weight.grad is None


def test_one_chunk_gives_what_the_encoder_gives_to_the_bit() -> None:
    model, x = mlp(dropout=0.5)
    torch.manual_seed(7)
    wanted = step(model, model, x)
    torch.manual_seed(7)
    assert_identical(step(lambda x: chunked(model, x, chunk_size=13), model, x), wanted)


# ---- state that modules keep


class Normed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


@pytest.fixture
def may_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "warned", set())


@pytest.mark.usefixtures("may_warn")
@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm_in_training_warns_once_and_says_what_to_do(tracked: bool) -> None:
    model, x = Normed(track_running_stats=tracked).double(), mlp()[1]
    words = r"chunked: the encoder has BatchNorm in training mode.*\.eval\(\).*GroupNorm.*SyncBatchNorm"
    with pytest.warns(UserWarning, match=words) as caught:
        chunked(model, x, chunk_size=5)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    chunked(model, x, chunk_size=5)  # warnings are errors here


@pytest.mark.usefixtures("may_warn")
def test_batch_norm_does_not_warn_where_it_does_no_harm() -> None:
    model, x = Normed().double(), mlp()[1]
    chunked(model, x, chunk_size=13)  # one chunk
    chunked(model.first, x, chunk_size=5)  # another part
    model.norm.eval()
    chunked(model, x, chunk_size=5)


@pytest.mark.usefixtures("may_warn")
def test_batch_norm_that_keeps_no_statistics_warns_in_eval_mode_too() -> None:
    """It has none but those of the chunk, in every mode."""
    model, x = Normed(track_running_stats=False).double().eval(), mlp()[1]
    with pytest.warns(UserWarning, match="chunked: the encoder has BatchNorm"):
        chunked(model, x, chunk_size=5)


def by_method_of_a_plain_object(model: nn.Module) -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def encode(self, x: Tensor) -> Tensor:
            return self.model(x)

    return Trainer().encode


def by_attribute_of_a_plain_object(model: nn.Module) -> Any:
    trainer = by_method_of_a_plain_object(model).__self__
    return lambda x: trainer.model(x)  # noqa: PLW0108


def by_entry_of_a_dict(model: nn.Module) -> Any:
    towers = {"image": model}
    return lambda x: towers["image"](x)  # noqa: PLW0108


SPELLINGS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "method": lambda model: model.forward,
    "lambda": lambda model: lambda x: model(x),  # noqa: PLW0108
    "partial": lambda model: functools.partial(lambda m, x: m(x), model),
    "list": lambda model: (lambda towers: lambda x: towers[0](x))([model]),  # noqa: PLW0108
    "method of a plain object": by_method_of_a_plain_object,
    "attribute of a plain object": by_attribute_of_a_plain_object,
    "entry of a dict": by_entry_of_a_dict,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.usefixtures("may_warn")
def test_running_statistics_are_updated_by_the_forward_alone(spelling: str) -> None:
    model, x = Normed().double(), mlp()[1][:12]
    twin = Normed().double()
    twin.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="BatchNorm in training mode"):
        features = chunked(SPELLINGS[spelling](model), x, chunk_size=4)
    wanted = loop_step(twin, twin, x, chunk_size=4)
    assert_same(backward(contrast(features), trained(model), retain_graph=True), wanted, **EXACT)
    contrast(features).backward()
    assert model.norm.num_batches_tracked == 3
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=0.0, atol=0.0)


def test_batch_norm_in_eval_mode_is_exact() -> None:
    model, x = Normed().double(), mlp()[1]
    model(x)
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert_same(step(lambda x: chunked(model, x, chunk_size=4), model, x), step(model, model, x), **EXACT)
    assert_same(dict(model.named_buffers()), before, rtol=0.0, atol=0.0)


def test_buffers_stay_the_same_tensors() -> None:
    model, x = Normed().double(), mlp()[1]
    callers.warned.add(("chunked", "batch norm"))
    before = dict(model.named_buffers())
    contrast(chunked(model, x, chunk_size=5)).backward()
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_counts_is_counted_by_the_forward_alone(in_place: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if in_place:
                self.count += len(x)
            else:
                self.count = self.count + len(x)
            return self.inner(x)

    model, x = Counts().double(), mlp()[1]
    contrast(chunked(model, x, chunk_size=4)).backward()
    assert model.count == 13


# ---- checkpoints


class Checkpointed(Vit):
    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], 1) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x)[:, 0])


OF_NO_GRAPH = "ignore:None of the inputs have requires_grad:UserWarning"  # torch's, of chunks that have none


@pytest.mark.filterwarnings(OF_NO_GRAPH)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_encoder_with_checkpoints(reentrant: bool, dropout: float) -> None:
    model, (x,) = Checkpointed(reentrant, dropout).double(), make_inputs("vit", 13)
    torch.manual_seed(7)
    wanted = loop_step(model, model, x, chunk_size=4)
    torch.manual_seed(7)
    got = step(lambda x: chunked(model, x, chunk_size=4), model, x)
    assert_same(got, wanted, **EXACT)


@pytest.mark.filterwarnings(OF_NO_GRAPH)
def test_an_encoder_with_reentrant_checkpoints_gives_gradients_of_inputs_and_accumulates() -> None:
    model, (x,) = Checkpointed(True).double(), make_inputs("vit", 13)
    x.requires_grad_()
    wanted = step(model, model, x)
    for times in (1, 2):
        contrast(chunked(model, x, chunk_size=4)).backward()
        for name, tensor in {**trained(model), "input 0": x}.items():
            torch.testing.assert_close(tensor.grad, wanted[name] * times, **EXACT)


@pytest.mark.filterwarnings(OF_NO_GRAPH)
def test_autograd_grad_through_reentrant_checkpoints_is_refused() -> None:
    model, (x,) = Checkpointed(True).double(), make_inputs("vit", 13)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"use_reentrant=True, .* is incompatible"):
        torch.autograd.grad(contrast(chunked(model, x, chunk_size=4)), x)
    with pytest.raises(RuntimeError, match=r"use_reentrant=True, .* is incompatible"):
        contrast(chunked(model, x, chunk_size=4)).backward(inputs=x)


@pytest.mark.filterwarnings(OF_NO_GRAPH)
@pytest.mark.parametrize(
    "differentiate",
    [
        torch.autograd.grad,
        lambda loss, parameters: torch.autograd.grad(loss, parameters, allow_unused=True),
        lambda loss, parameters: loss.backward(inputs=parameters),
    ],
    ids=["grad", "grad, allow_unused", "backward"],
)
def test_no_parameter_under_reentrant_checkpoints_is_silently_without_its_gradient(differentiate: Any) -> None:
    model, (x,) = Checkpointed(True).double(), make_inputs("vit", 13)
    loss = contrast(chunked(model, x, chunk_size=4))
    with pytest.raises(RuntimeError):
        differentiate(loss, list(model.parameters()))


def test_autograd_grad_through_other_checkpoints_works() -> None:
    model, (x,) = Checkpointed(False).double(), make_inputs("vit", 13)
    got = torch.autograd.grad(contrast(chunked(model, x, chunk_size=4)), list(model.parameters()))
    torch.testing.assert_close(got, torch.autograd.grad(contrast(model(x)), list(model.parameters())), **EXACT)


def test_reentrant_checkpoints_do_not_warn_of_gradients_that_come() -> None:
    model, (x,) = Checkpointed(True).double(), make_inputs("vit", 13)
    contrast(chunked(model, x, chunk_size=4)).backward()  # warnings are errors here


def test_inside_a_checkpoint() -> None:
    model, x = mlp(dropout=0.3)
    torch.manual_seed(7)
    wanted = loop_step(model, model, x, chunk_size=4)
    torch.manual_seed(7)
    got = step(lambda x: checkpoint(lambda x: chunked(model, x, chunk_size=4), x, use_reentrant=False), model, x)
    assert_same(got, wanted, **EXACT)


# ---- the compiler

QUIET = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # torch's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def quietly(test: Any) -> Any:
    return functools.reduce(lambda test, mark: mark(test), QUIET, test)


@quietly
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_encoder(backend: str, dropout: float) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, (x,) = Mlp(dropout), make_inputs("mlp", 12, torch.float32)
    compiled = torch.compile(model, backend=backend)
    torch.manual_seed(7)
    wanted = loop_step(compiled, model, x, chunk_size=4)
    torch.manual_seed(7)
    got = step(lambda x: chunked(compiled, x, chunk_size=4), model, x)
    assert_same(got, wanted, rtol=1e-5, atol=1e-5)
    if not dropout:
        assert_same(got, step(model, model, x), rtol=1e-4, atol=1e-4)


@quietly
def test_a_compiled_encoder_with_a_ragged_last_chunk() -> None:
    torch._dynamo.reset()
    model, x = mlp(14)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(step(lambda x: chunked(compiled, x, chunk_size=4), model, x), step(model, model, x), **EXACT)


@quietly
def test_a_module_compiled_in_place() -> None:
    torch._dynamo.reset()
    model, x = mlp()
    wanted = step(model, model, x)
    model.compile(backend="aot_eager")
    assert_same(step(lambda x: chunked(model, x, chunk_size=4), model, x), wanted, **EXACT)


@quietly
def test_inside_a_compiled_function() -> None:
    torch._dynamo.reset()
    model, x = mlp()

    def run(x: Tensor) -> Tensor:
        return contrast(chunked(model, x * 2, chunk_size=4) * 3)

    got = backward(torch.compile(run, backend="aot_eager")(x), trained(model))
    assert_same(got, backward(run(x), trained(model)), **EXACT)
    assert_same(got, backward(contrast(model(x * 2) * 3), trained(model)), **EXACT)


def test_a_compiled_encoders_names_are_those_of_the_encoder() -> None:
    class Named(nn.Module):
        def forward(self, pixels: Tensor, table: Tensor) -> Tensor:
            return pixels @ table

    torch._dynamo.reset()
    compiled = torch.compile(Named(), backend="eager")
    x, table = torch.randn(7, 3), torch.randn(3, 2)
    torch.testing.assert_close(chunked(compiled, x, table, chunk_size=3, whole="table"), x @ table)


def test_a_block_of_attention_alone() -> None:
    block, x = Block(8, 0.2).double(), torch.randn(7, 5, 8, dtype=torch.float64)
    torch.manual_seed(7)
    wanted = loop_step(lambda x: block(x).flatten(1), block, x, chunk_size=3)
    torch.manual_seed(7)
    got = step(lambda x: chunked(block, x, chunk_size=3).flatten(1), block, x)
    assert_identical(got, wanted)
