"""What an encoder keeps, writes to, or takes from elsewhere, and that none of it makes a replay silently wrong."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import DynamicCache

from megabatch import callers, chunked

from .encoders import EXACT, Mlp, assert_same, backward, contrast, loop_step, make_inputs, step, trained


def batch(rows: int = 6) -> Tensor:
    return make_inputs("mlp", rows)[0]


# ---- arguments with one entry per row that are no tensors


def scaled_by(model: nn.Module) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, factors: torch.stack([model(row) * float(f) for row, f in zip(x, factors, strict=False)])


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_what_has_an_item_per_row_and_is_no_tensor_must_be_named(kind: Callable[[list[float]], Any]) -> None:
    model, x, factors = Mlp().double(), batch(), kind([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    encode = scaled_by(model)
    with pytest.raises(ValueError, match=r"chunked: factors must be named in split or in whole, .* got 6\."):
        chunked(encode, x, factors, chunk_size=2)
    got = step(lambda x: chunked(encode, x, factors, chunk_size=2, split="factors"), model, x)
    assert_same(got, step(lambda x: encode(x, factors), model, x), **EXACT)
    whole = chunked(encode, x, factors, chunk_size=2, whole="factors")
    torch.testing.assert_close(whole, torch.cat([encode(x[i : i + 2], factors) for i in (0, 2, 4)]))


def test_lists_of_another_length_need_no_name() -> None:
    model, x = Mlp().double(), batch()
    features = chunked(lambda x, sizes: model(x) * sizes[0], x, [2, 2], chunk_size=2)
    torch.testing.assert_close(features, model(x) * 2)


# ---- outputs that hold more than they show


def test_a_cache_of_keys_and_values_among_the_outputs_is_refused_by_name() -> None:
    def decode(x: Tensor) -> dict[str, Any]:
        cache = DynamicCache()
        cache.update(x[:, None, None], x[:, None, None], 0)
        return {"features": x * 2, "past_key_values": cache}

    x = batch().requires_grad_()
    with pytest.raises(ValueError, match=r"chunked: output\['past_key_values'\] must be the same .* got DynamicCache"):
        chunked(decode, x, chunk_size=2)
    assert torch.equal(chunked(decode, x, chunk_size=2, select="features"), x * 2)


# ---- state in buffers


def test_a_norm_that_only_a_later_chunk_reaches_is_updated_once_and_warns() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = Mlp(), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            features = self.inner(x)
            return self.norm(features) if x[0, 0] > 0 else features

    callers.warned.discard(("chunked", "batch norm"))
    model, x = Late().double(), batch()
    x[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    with pytest.warns(UserWarning, match="BatchNorm"):
        features = chunked(model, x, chunk_size=2)
    contrast(features).backward()
    assert model.norm.num_batches_tracked == 1


@pytest.mark.parametrize("warm", [0, 3])
def test_an_encoder_whose_outputs_depend_on_the_state_it_keeps_replays_it_from_the_start(warm: int) -> None:
    """Spectral norm takes a step of its power iteration in every forward."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 5)).double()
        for _ in range(warm):
            model(batch())
        return model

    model, twin, x = make(), make(), batch()
    wanted = loop_step(twin, twin, x, chunk_size=2)
    got = step(lambda x: chunked(model, x, chunk_size=2), model, x)
    assert_same(got, wanted, **EXACT)
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=0.0, atol=0.0)


def test_a_buffer_that_comes_into_being_in_the_forward() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "factor"):
                self.register_buffer("factor", torch.full((), 2.0, dtype=x.dtype))
            return self.inner(x) * self.factor

    model, x = Lazy().double(), batch()
    got = step(lambda x: chunked(model, x, chunk_size=2), model, x)
    assert_same(got, step(model, model, x), **EXACT)


# ---- what cannot be replayed


@pytest.mark.parametrize(
    "noisy", [lambda y: y * (1 + 0.008 * np.random.rand()), lambda y: torch.complex(y, y) * np.random.rand()]
)
def test_small_noise_from_elsewhere_is_seen_in_float64_and_in_complex_numbers(
    noisy: Callable[[Tensor], Tensor],
) -> None:
    model, x = Mlp().double(), batch()
    features = chunked(lambda x: noisy(model(x)), x, chunk_size=2)
    with pytest.raises(RuntimeError, match="chunked: the encoder must give the same in the backward"):
        features.abs().sum().backward()


@pytest.mark.parametrize("where", ["transform", "encoder"])
def test_writing_to_the_batch_is_refused_by_the_forward(where: str) -> None:
    model, x = Mlp().double(), batch()
    options = {"transform": lambda x: x.mul_(2)} if where == "transform" else {}
    encode = model if where == "transform" else lambda images: model(images.mul_(2))
    with pytest.raises(RuntimeError, match=r"chunked: inputs and parameters must not be written to, by the encoder"):
        chunked(encode, x, chunk_size=2, **options)


def test_an_encoder_may_write_to_an_input_that_is_an_activation() -> None:
    model, x = nn.Sequential(nn.ReLU(inplace=True), Mlp()).double(), batch().requires_grad_()
    got = step(lambda x: chunked(model, x * 2, chunk_size=4), model, x)
    assert_same(got, step(lambda x: model(x * 2), model, x), **EXACT)


def test_torchs_transformer_in_eval_mode_with_padding_gives_what_it_gives_in_one_piece() -> None:
    """Without a graph it would take another path, which fills what is padded with zeros."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).double().eval()
    x, padded = (
        torch.randn(6, 5, 8, dtype=torch.float64),
        torch.arange(5) >= torch.tensor([[5], [3], [4], [2], [5], [1]]),
    )

    def encode(x: Tensor) -> Tensor:
        return chunked(model, x, src_key_padding_mask=padded, chunk_size=2).flatten(1)

    got = step(encode, model, x)
    assert_same(got, step(lambda x: model(x, src_key_padding_mask=padded).flatten(1), model, x), **EXACT)
    assert torch.backends.mha.get_fastpath_enabled()


def test_autocast_is_off_in_the_backward_of_what_the_encoder_keeps_in_float32() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.second(x.float())

    model, x = Careful(), batch(8).float()
    gradients = []
    for encode in (model, lambda x: chunked(model, x, chunk_size=8)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = contrast(encode(x))
        gradients.append(backward(loss, trained(model)))
    assert_same(*gradients, rtol=0.0, atol=0.0)


def test_items_of_a_list_that_is_split_go_to_the_encoders_device_with_their_chunk() -> None:
    model = nn.Linear(6, 5, device="meta")
    seen: list[tuple[int, str]] = []

    def encode(images: list[Tensor]) -> Tensor:
        seen.append((len(images), images[0].device.type))
        return model(torch.stack(images))

    with torch.no_grad():
        features = chunked(encode, [torch.randn(6) for _ in range(5)], chunk_size=2, split="images")
    assert features.shape == (5, 5)
    assert seen == [(2, "meta"), (2, "meta"), (1, "meta")]


# ---- who holds the encoder


@pytest.mark.parametrize("refused", ["its arguments", "its outputs"])
def test_a_refused_call_holds_no_encoder(refused: str) -> None:
    """Nor the group of an encoder in DistributedDataParallel, whose threads would outlive it."""

    def call() -> weakref.ref[nn.Module]:
        model = Mlp().double()
        encode = model if refused == "its arguments" else lambda x: model(x).sum()
        with suppress(ValueError):
            chunked(encode, batch(), chunk_size=0 if refused == "its arguments" else 2)
            pytest.fail("it was not refused")
        return weakref.ref(model)

    call()  # what torch imports with a first call, it holds until a collection
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
