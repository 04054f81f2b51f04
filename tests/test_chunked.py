"""`chunked` is exact: the values and all gradients of the step in one piece, with the same random numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megabatch
from megabatch import chunked

from .encoders import (
    EXACT,
    KINDS,
    Mlp,
    assert_identical,
    assert_same,
    backward,
    contrast,
    in_float64,
    loop_step,
    make_encoder,
    make_inputs,
    step,
    trained,
    worst,
)
from .tolerance import HALF_PRECISION, eps

SIZES = [(12, 4), (13, 4), (12, 12), (3, 8), (1, 4), (1, 1), (5, 1), (0, 4)]


# ---- float64


@pytest.mark.parametrize(("rows", "chunk_size"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_every_gradient_equal_the_step_in_one_piece(kind: str, rows: int, chunk_size: int) -> None:
    model, inputs = make_encoder(kind), make_inputs(kind, rows)
    wanted = step(model, model, *inputs)
    got = step(lambda *x: chunked(model, *x, chunk_size=chunk_size), model, *inputs)
    assert_same(got, wanted, **EXACT)
    assert rows == 0 or all(value is not None and value.any() for value in got.values())


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_an_ordinary_tensor_like_the_encoders(kind: str) -> None:
    model, inputs = make_encoder(kind), make_inputs(kind, 13)
    wanted, got = model(*inputs), chunked(model, *inputs, chunk_size=4)
    assert type(got) is Tensor
    assert (got.shape, got.dtype, got.device, got.requires_grad) == (wanted.shape, wanted.dtype, wanted.device, True)
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("rows", [0, 9])
def test_a_step_without_rows_leaves_zero_gradients_as_torch_does(rows: int) -> None:
    model, x = Mlp().double(), torch.randn(rows, 6, dtype=torch.float64)
    features = chunked(model, x, chunk_size=4)
    assert features.shape == (rows, 5)
    features.sum().backward()
    assert all((p.grad is not None) and (p.grad.any() == (rows > 0)) for p in model.parameters())


@pytest.mark.parametrize("upstream", [-1000.0, 2.0**16, 0.0])
def test_gradient_honours_what_the_caller_multiplies_the_loss_by(upstream: float) -> None:
    model, inputs = make_encoder("vit"), make_inputs("vit", 13)
    wanted = step(model, model, *inputs, loss=lambda features: contrast(features) * upstream)
    got = step(
        lambda x: chunked(model, x, chunk_size=4), model, *inputs, loss=lambda features: contrast(features) * upstream
    )
    assert_same(got, wanted, rtol=1e-10, atol=1e-10 * max(1.0, abs(upstream)))


def scaled_sum(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (x * 2 + y.tanh()) @ weight


@pytest.mark.parametrize("chunk_size", [4, 5, 100])
def test_gradients_of_split_and_of_whole_inputs(chunk_size: int) -> None:
    x, y = (torch.randn(12, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    tensors = {"x": x, "y": y, "weight": weight}
    wanted = backward(contrast(scaled_sum(x, y, weight)), tensors)
    got = backward(contrast(chunked(scaled_sum, x, y, weight, chunk_size=chunk_size, whole="weight")), tensors)
    assert_same(got, wanted, **EXACT)


def test_gradients_of_an_input_that_is_two_arguments() -> None:
    x, weight = torch.randn(12, 6, dtype=torch.float64, requires_grad=True), torch.randn(6, 3, dtype=torch.float64)
    wanted = backward(contrast(scaled_sum(x, x, weight)), {"x": x})
    got = backward(contrast(chunked(scaled_sum, x, x, weight, chunk_size=5, whole="weight")), {"x": x})
    assert_same(got, wanted, **EXACT)


def test_gradients_pass_on_to_what_made_the_inputs() -> None:
    stem, model = nn.Linear(6, 6).double(), Mlp().double()
    both, x = nn.ModuleList([stem, model]), torch.randn(13, 6, dtype=torch.float64)
    wanted = step(lambda x: model(stem(x).tanh()), both, x)
    got = step(lambda x: chunked(model, stem(x).tanh(), chunk_size=4), both, x)
    assert_same(got, wanted, **EXACT)


def test_an_encoder_may_return_its_input() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    got = backward(contrast(chunked(nn.Identity(), x, chunk_size=3)), {"x": x})
    assert_same(got, backward(contrast(x), {"x": x}), **EXACT)


def test_inputs_of_any_strides() -> None:
    model = make_encoder("vit")
    images = torch.randn(8, 8, 3, 26, dtype=torch.float64)[..., ::2].permute(3, 2, 0, 1).requires_grad_()
    got = step(lambda x: chunked(model, x, chunk_size=4), model, images)
    assert_same(got, step(model, model, images), **EXACT)


def test_parameters_of_any_layout_keep_it_in_their_gradients() -> None:
    model = make_encoder("vit").to(memory_format=torch.channels_last)
    (images,) = make_inputs("vit", 9)
    got = step(lambda x: chunked(model, x, chunk_size=4), model, images)
    assert_same(got, step(model, model, images), **EXACT)
    assert got["patches.weight"].is_contiguous(memory_format=torch.channels_last)


def test_sparse_gradients_of_an_embedding_stay_sparse() -> None:
    table = nn.Embedding(20, 4, sparse=True).double()
    ids = torch.randint(20, (13,))
    got = step(lambda x: chunked(table, x, chunk_size=4), table, ids)
    wanted = step(table, table, ids)
    assert got["weight"].is_sparse
    torch.testing.assert_close(got["weight"].to_dense(), wanted["weight"].to_dense(), **EXACT)


@pytest.mark.usefixtures("poison")
def test_rows_that_their_chunk_does_not_use_have_zero_gradient() -> None:
    model, bias = Mlp().double(), nn.Parameter(torch.ones(5, dtype=torch.float64))
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    contrast(chunked(lambda x: model(x) + bias if len(x) > 1 else bias.expand(1, 5), x, chunk_size=4)).backward()
    assert x.grad[:8].all()
    assert torch.equal(x.grad[8], torch.zeros(6, dtype=torch.float64))


def test_parameters_whose_gradients_are_one_tensor_get_their_own() -> None:
    pair = nn.ParameterList(torch.randn(6, dtype=torch.float64) for _ in range(2))
    x = torch.randn(13, 6, dtype=torch.float64)

    def encode(x: Tensor) -> Tensor:
        return x * (pair[0] + pair[1])

    assert_same(step(lambda x: chunked(encode, x, chunk_size=4), pair, x), step(encode, pair, x), **EXACT)


# ---- several calls, several backwards


def clip_parts() -> tuple[nn.ModuleDict, Tensor, tuple[Tensor, ...]]:
    towers = nn.ModuleDict({"image": make_encoder("vit"), "text": make_encoder("text")})
    towers.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    return towers, *make_inputs("vit", 13), make_inputs("text", 13)


def test_two_towers_with_the_real_loss_and_a_learnable_scale() -> None:
    towers, images, texts = clip_parts()
    image, text = towers.image(images), towers.text(*texts)
    wanted = backward(megabatch.clip_loss(image, text, towers.scale.exp(), normalize=True), trained(towers))
    image, text = chunked(towers.image, images, chunk_size=4), chunked(towers.text, *texts, chunk_size=5)
    got = backward(megabatch.clip_loss(image, text, towers.scale.exp(), normalize=True), trained(towers))
    assert_same(got, wanted, **EXACT)


def test_one_tower_for_both_sides() -> None:
    model, (first,), (second,) = make_encoder("mlp"), make_inputs("mlp", 13), make_inputs("mlp", 13)
    one, other = chunked(model, first, chunk_size=4), chunked(model, second, chunk_size=3)
    got = backward(megabatch.clip_loss(one, other, 3.0, normalize=True), trained(model))
    wanted = backward(megabatch.clip_loss(model(first), model(second), 3.0, normalize=True), trained(model))
    assert_same(got, wanted, **EXACT)


def test_a_chunked_call_beside_a_plain_one() -> None:
    model, (x,) = make_encoder("mlp"), make_inputs("mlp", 13)
    got = backward(contrast(torch.cat([chunked(model, x[:9], chunk_size=4), model(x[9:])])), trained(model))
    assert_same(got, step(model, model, x), **EXACT)


def test_a_chunked_call_of_a_chunked_calls_output() -> None:
    first, second = Mlp(out=6).double(), Mlp().double()
    both, (x,) = nn.ModuleList([first, second]), make_inputs("mlp", 13)
    got = step(lambda x: chunked(second, chunked(first, x, chunk_size=4), chunk_size=5), both, x)
    assert_same(got, step(lambda x: second(first(x)), both, x), **EXACT)


def test_a_chunked_call_inside_the_encoder_of_another() -> None:
    model, (x,) = make_encoder("mlp"), make_inputs("mlp", 13)
    got = step(lambda x: chunked(lambda x: chunked(model, x, chunk_size=2), x, chunk_size=5), model, x)
    assert_same(got, step(model, model, x), **EXACT)


def test_backwards_of_two_forwards_in_either_order() -> None:
    model, (x,), (y,) = make_encoder("mlp"), make_inputs("mlp", 13), make_inputs("mlp", 7)
    wanted = [step(model, model, x), step(model, model, y)]
    for order in ((0, 1), (1, 0)):
        losses = [contrast(chunked(model, z, chunk_size=4)) for z in (x, y)]
        for i in order:
            assert_same(backward(losses[i], trained(model)), wanted[i], **EXACT)


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    model, inputs = make_encoder("text", dropout=0.3), make_inputs("text", 13)
    loss = contrast(chunked(model, *inputs, chunk_size=4))
    once = backward(loss, trained(model), retain_graph=True)
    assert_identical(backward(loss, trained(model)), once)


def test_gradients_accumulate_over_steps() -> None:
    model, (x,) = make_encoder("mlp"), make_inputs("mlp", 13)
    contrast(chunked(model, x[:6], chunk_size=4)).backward()
    kept = {name: p.grad for name, p in trained(model).items()}
    contrast(chunked(model, x[6:], chunk_size=4)).backward()
    for name, p in trained(model).items():
        assert p.grad is kept[name]  # added to in place, as torch does
    got = {name: p.grad for name, p in trained(model).items()}
    model.zero_grad()
    wanted = backward(contrast(model(x[:6])) + contrast(model(x[6:])), trained(model))
    assert_same({"loss": wanted["loss"], **got}, wanted, **EXACT)


def test_training_with_it_is_training_without() -> None:
    plain = make_encoder("vit")
    ours = copy.deepcopy(plain)
    for encode, model in ((plain, plain), (lambda x: chunked(ours, x, chunk_size=5), ours)):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            contrast(encode(*make_inputs("vit", 13))).backward()
            optimizer.step()
    assert_same(dict(ours.named_parameters()), dict(plain.named_parameters()), rtol=1e-7, atol=1e-8)


def test_outputs_may_be_written_to() -> None:
    model, (x,) = make_encoder("mlp"), make_inputs("mlp", 13)
    wanted = step(lambda x: model(x) / 2, model, x)
    features = chunked(model, x, chunk_size=4)
    features /= 2
    assert_same(backward(contrast(features), trained(model)), wanted, **EXACT)


# ---- parameters that not every chunk uses


class Experts(nn.Module):
    """Every row goes through one of three."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 5)
        for i, expert in enumerate(self.experts):
            chosen = (route == i).nonzero()[:, 0]
            if len(chosen):
                out = out.index_add(0, chosen, expert(x[chosen]))
        return out


@pytest.mark.parametrize("route", [[0, 0, 1, 1, 2, 2], [2, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]])
def test_a_parameter_that_only_some_chunks_use_gets_its_gradient(route: list[int]) -> None:
    model, (x,) = Experts().double(), make_inputs("mlp", 6)
    got = step(lambda x: chunked(model, x, torch.tensor(route), chunk_size=2), model, x)
    assert_same(got, step(lambda x: model(x, torch.tensor(route)), model, x), **EXACT)


class LayerDrop(nn.Module):
    """Skips layers at random, as speech encoders do in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = x + layer(x)
        return x


def test_layers_that_a_chunk_skips_at_random_get_the_gradients_of_the_others() -> None:
    model, (x,) = LayerDrop().double(), make_inputs("mlp", 12)
    torch.manual_seed(1)
    wanted = loop_step(model, model, x, chunk_size=3)
    torch.manual_seed(1)
    assert_same(step(lambda x: chunked(model, x, chunk_size=3), model, x), wanted, **EXACT)


class RawExperts(nn.Module):
    """Parameters that belong to no module which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.scales = nn.ParameterList(torch.randn(5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scales[len(x) % 2]


def leaf() -> Tensor:
    return torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", ["parameters", "a leaf in a closure", "another leaf in a closure"])
def test_a_leaf_that_only_a_later_chunk_uses_is_never_silently_without_its_gradient(kind: str) -> None:
    model, (x,) = RawExperts().double(), make_inputs("mlp", 9)
    late, always = leaf(), leaf()
    encode = {
        "parameters": model,
        "a leaf in a closure": lambda x: model.linear(x) * (late if len(x) == 1 else 1),
        "another leaf in a closure": lambda x: model.linear(x) * always * (late if len(x) == 1 else 1),
    }[kind]
    tensors = trained(model) | {"late": late, "always": always}
    wanted = backward(contrast(encode(x[:8])) + contrast(encode(x[8:])), tensors)
    features = chunked(encode, x, chunk_size=4)
    try:
        got = backward(contrast(features[:8]) + contrast(features[8:]), tensors)
    except RuntimeError as refusal:
        assert "must use the same parameters" in str(refusal)  # noqa: PT017
    else:
        assert_same(got, wanted, **EXACT)


@pytest.mark.parametrize("constant", [0, 1, 2])
def test_a_chunk_without_any_gradient_among_others(constant: int) -> None:
    model, (x,) = Mlp().double(), make_inputs("mlp", 12)
    x[:, 0] = 1.0
    x[4 * constant : 4 * constant + 4, 0] = -1.0

    def encode(x: Tensor) -> Tensor:
        return model(x) if x[0, 0] > 0 else x.new_ones(len(x), 5)

    got = step(lambda x: chunked(encode, x, chunk_size=4), model, x)
    assert_same(got, step(lambda x: torch.cat([encode(part) for part in x.split(4)]), model, x), **EXACT)


def test_an_output_that_has_a_gradient_in_later_chunks_only() -> None:
    model, (x,) = nn.ModuleList([Mlp(), Mlp()]).double(), make_inputs("mlp", 9)

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        return model[0](x), model[1](x) if len(x) == 1 else x.new_ones(len(x), 5)

    def whole(x: Tensor) -> Tensor:
        first, second = zip(*(encode(part) for part in x.split(4)), strict=True)
        return torch.cat([*first, *second], 0)

    got = step(lambda x: torch.cat(chunked(encode, x, chunk_size=4)), model, x)
    assert_same(got, step(whole, model, x), **EXACT)


class FromTheSecondOn(nn.Module):
    """Leaves rows as they are that begin with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x if x[0, 0] < 0 else self.inner(x)


def test_parameters_that_the_first_chunks_do_not_use_at_all_get_their_gradient() -> None:
    model, (x,) = FromTheSecondOn().double(), make_inputs("mlp", 8)
    x[:, 0] = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    got = step(lambda x: chunked(model, x, chunk_size=2), model, x)
    assert_same(got, step(lambda x: torch.cat([model(part) for part in x.split(2)]), model, x), **EXACT)
    assert got["inner.weight"].abs().max() > 0


# ---- randomness


@pytest.mark.parametrize(("rows", "chunk_size"), [(8, 4), (13, 4), (16, 2), (3, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_with_dropout_equals_to_the_bit_a_loop_over_chunks(
    kind: str, dtype: torch.dtype, rows: int, chunk_size: int
) -> None:
    model, inputs = make_encoder(kind, 0.3, dtype), make_inputs(kind, rows, dtype)
    torch.manual_seed(7)
    wanted = loop_step(model, model, *inputs, chunk_size=chunk_size)
    torch.manual_seed(7)
    got = step(lambda *x: chunked(model, *x, chunk_size=chunk_size), model, *inputs)
    assert_identical(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_with_dropout_two_chunks_equal_to_the_bit_what_autograd_makes_of_their_cat(kind: str) -> None:
    model, inputs = make_encoder(kind, 0.3), make_inputs(kind, 8)
    torch.manual_seed(7)
    wanted = step(
        lambda *x: torch.cat([model(*(t[:4] for t in x)), model(*(t[4:] for t in x))]),
        model,
        *inputs,
    )
    torch.manual_seed(7)
    assert_identical(step(lambda *x: chunked(model, *x, chunk_size=4), model, *inputs), wanted)


def test_the_callers_random_numbers_go_on_as_if_nothing_was_replayed() -> None:
    model, (x,) = make_encoder("mlp", dropout=0.5), make_inputs("mlp", 13)
    torch.manual_seed(7)
    for part in x.split(4):
        model(part)
    wanted = [torch.rand(3) for _ in range(3)]
    torch.manual_seed(7)
    loss = contrast(chunked(model, x, chunk_size=4))
    got = [torch.rand(3)]
    loss.backward(retain_graph=True)
    got.append(torch.rand(3))
    loss.backward()
    got.append(torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_random_numbers_that_the_caller_draws_or_seeds_in_between_change_nothing() -> None:
    model, (x,) = make_encoder("mlp", dropout=0.5), make_inputs("mlp", 13)
    torch.manual_seed(7)
    wanted = loop_step(model, model, x, chunk_size=4)
    torch.manual_seed(7)
    loss = contrast(chunked(model, x, chunk_size=4))
    torch.manual_seed(123)
    torch.rand(10)
    assert_identical(backward(loss, trained(model)), wanted)


def test_every_chunk_draws_its_own_random_numbers() -> None:
    features = chunked(nn.Dropout(0.5), torch.ones(8, 64), chunk_size=4)
    assert not torch.equal(features[:4], features[4:])


def test_a_random_transform_is_replayed_too() -> None:
    model, (x,) = make_encoder("mlp"), make_inputs("mlp", 13)

    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    torch.manual_seed(7)
    wanted = loop_step(lambda x: model(noisy(x)), model, x, chunk_size=4)
    torch.manual_seed(7)
    assert_identical(step(lambda x: chunked(model, x, chunk_size=4, transform=noisy), model, x), wanted)


# ---- halves and autocast


@pytest.mark.parametrize("dtype", HALF_PRECISION)
@pytest.mark.parametrize("kind", ["mlp", "vit"])
def test_gradients_of_half_parameters_are_no_worse_over_many_chunks(kind: str, dtype: torch.dtype) -> None:
    """Nor as bad as in one piece, where torch adds up 512 rows in half precision for the ViT (bfloat16: 0.7 off)."""
    model, inputs = make_encoder(kind, dtype=dtype), make_inputs(kind, 512, dtype)

    def mean(features: Tensor) -> Tensor:
        return features.double().square().mean()

    twin = make_encoder(kind)
    twin.load_state_dict(model.state_dict())
    exact = step(twin, twin, *(x.double() for x in inputs), loss=mean)
    got = step(lambda x: chunked(model, x, chunk_size=2), model, *inputs, loss=mean)
    assert {value.dtype for name, value in got.items() if name != "loss"} == {dtype}
    # One rounding more than in one piece, and no more than one for each of the 16 half operations of the ViT's blocks.
    rounding, in_one_piece = eps(dtype) / 2, worst(step(model, model, *inputs, loss=mean), exact)
    assert worst(got, exact) <= min(in_one_piece + rounding, 16 * eps(dtype))


def test_gradients_of_half_whole_inputs_are_added_up_in_float32() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    chunked(lambda x, weight: x * weight, torch.ones(1000, 4), weight, chunk_size=1, whole="weight").sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [1000.0] * 4  # in bfloat16, 256 + 1 is 256


class Watched(nn.Module):
    """An encoder that writes down under which autocast it runs, and what its products are."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = Mlp(dropout)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        features = self.inner(x)
        kind = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        self.seen.append((*kind, features.dtype))
        return features


WHERE = {
    "inside": lambda dtype: torch.autocast("cpu", dtype=dtype),
    "outside": lambda dtype: torch.autocast("cpu", enabled=False),
    "inside of another": lambda dtype: torch.autocast(
        "cpu", dtype=torch.float16 if dtype == torch.bfloat16 else torch.bfloat16, cache_enabled=False
    ),
}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replays_under_the_autocast_of_the_forward(dtype: torch.dtype, where: str, cached: bool) -> None:
    model, (x,) = Watched(0.2), make_inputs("mlp", 13, torch.float32)
    with torch.autocast("cpu", dtype=dtype, cache_enabled=cached):
        torch.manual_seed(7)
        loop = torch.cat([model(part) for part in x.split(4)])
        model.seen.clear()
        torch.manual_seed(7)
        features = chunked(model, x, chunk_size=4)
        assert torch.equal(features, loop)
        loss = contrast(features)
    with WHERE[where](dtype):
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        got = backward(loss, trained(model))
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == before
    assert model.seen == [(True, dtype, cached, dtype)] * 8
    wanted = backward(contrast(loop), trained(model))
    # Under autocast torch takes the backward's products in its dtype.
    within = torch.bfloat16 if where == "inside of another" else dtype
    assert worst(got, wanted) <= (2e-2 if within == torch.bfloat16 else 2e-3)


def test_replays_without_autocast_what_ran_without() -> None:
    """Though torch takes the backward's products, as without chunks, in the dtype of an autocast round it."""
    model, (x,) = Watched(), make_inputs("mlp", 13, torch.float32)
    plain, loss = contrast(model(x)), contrast(chunked(model, x, chunk_size=4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got = (backward(each, trained(model)) for each in (plain, loss))
    assert worst(got, wanted) <= 2 * eps(torch.bfloat16)
    assert {seen[-1] for seen in model.seen} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_under_autocast_are_no_worse_than_in_one_piece(kind: str, dtype: torch.dtype) -> None:
    model, inputs = make_encoder(kind, dtype=torch.float32), make_inputs(kind, 64, torch.float32)
    exact = in_float64(model, lambda: make_encoder(kind), inputs)
    errors = []
    for encode in (model, lambda *x: chunked(model, *x, chunk_size=4)):
        with torch.autocast("cpu", dtype=dtype):
            loss = contrast(encode(*inputs))
        errors.append(worst(backward(loss, trained(model)), exact))
    assert errors[1] <= errors[0] + eps(dtype) / 2  # a rounding more


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("order", ["plain first", "chunked first", "both sides"])
def test_plain_calls_in_the_same_autocast_region_keep_their_gradients(order: str, inside: bool) -> None:
    """Autocast keeps the weights it has cast: without a graph, if they were cast in a chunk that had none."""
    model, (x,) = make_encoder("mlp", dtype=torch.float32), make_inputs("mlp", 24, torch.float32)
    exact = in_float64(model, lambda: make_encoder("mlp"), [x])
    first, middle, last = x.split(8)

    def piece(x: Tensor, plain: bool) -> Tensor:
        return model(x) if plain else chunked(model, x, chunk_size=3)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = [
            piece(first, order != "chunked first"),
            piece(middle, order == "chunked first"),
            piece(last, order == "both sides"),
        ]
        loss = contrast(torch.cat(features))
        got = backward(loss, trained(model)) if inside else {}
    got = got or backward(loss, trained(model))
    assert worst(got, exact) <= 3e-2


def test_with_a_grad_scaler() -> None:
    model, (x,) = make_encoder("mlp", dtype=torch.float32), make_inputs("mlp", 24, torch.float32)
    exact = in_float64(model, lambda: make_encoder("mlp"), [x])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = contrast(chunked(model, x, chunk_size=5))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    got = {"loss": loss.detach(), **{name: p.grad for name, p in trained(model).items()}}
    assert worst(got, exact) <= 1e-2
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**8


def test_an_overflow_reaches_the_grad_scaler() -> None:
    model, (x,) = make_encoder("mlp", dtype=torch.float32), make_inputs("mlp", 24, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", dtype=torch.float16):
        loss = contrast(chunked(model, x, chunk_size=5))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**29
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
