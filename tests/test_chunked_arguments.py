"""`chunked`: what is split and what is whole, what comes back, where chunks go, and what is refused in which words."""

import functools
import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megabatch import chunked

from .encoders import EXACT, Mlp, Recorded, assert_same, backward, contrast, make_inputs, step, trained


def linear(rows: int = 6, out: int = 2) -> tuple[nn.Linear, Tensor]:
    return nn.Linear(out, out).double(), torch.randn(rows, out, dtype=torch.float64)


# ---- inputs


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None = None


@dataclass
class Sample:
    x: Tensor
    label: str = "none"


class Reads(nn.Module):
    """An encoder of one argument of any kind, read by a function; remembers what it was given."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.read, self.given = read, []

    def forward(self, inputs: Any, **options: Any) -> Tensor:
        self.given.append(inputs)
        return (self.read(inputs) @ self.weight).tanh() * options.get("factor", 1)


KINDS_OF_INPUT = {
    "tensor": (lambda x, y: x, lambda v: v),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda v: v["x"] + v["y"]),
    "ordered dict": (lambda x, y: OrderedDict(x=x, y=y), lambda v: v["x"] + v["y"]),
    "defaultdict": (lambda x, y: defaultdict(list, {"x": x, "y": y}), lambda v: v["x"] + v["y"]),
    "tuple": (lambda x, y: (x, y), lambda v: v[0] + v[1]),
    "list": (lambda x, y: [x, y], lambda v: v[0] + v[1]),
    "named tuple": (Pair, lambda v: v.left + v.right),
    "named tuple with None": (lambda x, y: Pair(x), lambda v: v.left),
    "dataclass": (lambda x, y: Sample(x, "cat"), lambda v: v.x),
    "nested": (
        lambda x, y: {"a": [x, (y, None)], "n": 3, "b": {"c": Pair(x)}},
        lambda v: v["a"][1][0] + v["b"]["c"][0],
    ),
}


@pytest.mark.parametrize("kind", KINDS_OF_INPUT)
def test_takes_tensors_in_containers_of_any_kind(kind: str) -> None:
    make, read = KINDS_OF_INPUT[kind]
    x, y = (torch.randn(7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs, model = make(x, y), Reads(read)
    tensors = {"x": x, "y": y, **trained(model)}
    got = backward(contrast(chunked(model, inputs, chunk_size=3, factor=2)), tensors)
    assert {type(given) for given in model.given} == {type(inputs)}
    assert [len(read(given)) for given in model.given] == [3, 3, 1, 1, 3, 3]
    assert_same(got, backward(contrast(model(inputs, factor=2)), tensors), **EXACT)


def test_takes_a_batch_encoding() -> None:
    from transformers import BatchEncoding

    table = nn.Embedding(20, 4).double()
    inputs = BatchEncoding({"input_ids": torch.randint(20, (7, 5)), "attention_mask": torch.randint(2, (7, 5))})
    kinds = []

    def encode(inputs: Any) -> Tensor:
        kinds.append(type(inputs))
        return (table(inputs.input_ids) * inputs["attention_mask"][:, :, None]).sum(1)

    got = step(lambda: chunked(encode, inputs, chunk_size=3), table)
    assert_same(got, step(lambda: encode(inputs), table), **EXACT)
    assert set(kinds) == {BatchEncoding}
    unpacked = chunked(lambda input_ids, attention_mask: table(input_ids).sum(1), **inputs, chunk_size=3)
    torch.testing.assert_close(unpacked, table(inputs.input_ids).sum(1), **EXACT)


def test_the_callers_containers_are_left_alone() -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    inputs = {"x": x, "more": [x]}
    more = inputs["more"]

    def encode(inputs: dict[str, Any]) -> Tensor:
        inputs["more"].append(None)
        return inputs.pop("x")

    chunked(encode, inputs, chunk_size=3)
    assert inputs["x"] is x
    assert inputs["more"] is more
    assert len(more) == 1


def test_none_and_options_reach_every_chunk_as_they_are() -> None:
    model, x = linear()
    seen = []

    def encode(x: Tensor, nothing: None, *, mode: str, table: dict[str, Any], scale: Tensor) -> Tensor:
        seen.append((nothing, mode, table["f"], scale.shape))
        return model(x) * scale

    function = len
    chunked(encode, x, None, chunk_size=4, mode="fast", table={"f": function}, scale=torch.tensor(2.0))
    assert seen == [(None, "fast", function, torch.Size())] * 2


def test_zero_dimensional_inputs_get_one_gradient() -> None:
    model, x = linear()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    tensors = {"scale": scale, **trained(model)}

    def encode(x: Tensor, scale: Tensor) -> Tensor:
        return model(x) * scale

    got = backward(contrast(chunked(encode, x, scale, chunk_size=4)), tensors)
    assert_same(got, backward(contrast(encode(x, scale)), tensors), **EXACT)


# ---- which are split


@pytest.mark.parametrize("name", ["table", 1, "args[1]"])
def test_whole_goes_by_name_or_by_position(name: str | int) -> None:
    x, table = torch.randn(7, 3), torch.randn(7, 4)  # that has as many rows as the batch, by chance
    shapes = []

    def encode(x: Tensor, table: Tensor) -> Tensor:
        shapes.append((len(x), len(table)))
        return x

    for whole in (name, [name], (name,)):
        chunked(encode, x, table, chunk_size=3, whole=whole)
    assert shapes == [(3, 7), (3, 7), (1, 7)] * 3


def test_whole_goes_by_the_key_of_a_dict_or_by_the_name_of_the_dict() -> None:
    inputs = {"x": torch.randn(7, 3), "table": torch.randn(2, 4), "rest": [torch.randn(2), {"deep": torch.randn(5)}]}
    shapes = []

    def encode(inputs: dict[str, Any]) -> Tensor:
        shapes.append((len(inputs["table"]), len(inputs["rest"][0]), len(inputs["rest"][1]["deep"])))
        return inputs["x"]

    chunked(encode, inputs, chunk_size=4, whole=["table", "rest"])
    assert shapes == [(2, 2, 5)] * 2


def test_split_cuts_lists_of_texts_and_of_images_of_different_sizes() -> None:
    model = nn.Linear(1, 2).double()
    images = [torch.randn(3, 2 + i, 2 + i, dtype=torch.float64) for i in range(5)]
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]
    seen = []

    def encode(images: list[Tensor], texts: list[str]) -> Tensor:
        seen.append((type(images), [image.shape[-1] for image in images], texts))
        return model(torch.stack([image.mean() * len(t) for image, t in zip(images, texts, strict=True)])[:, None])

    got = step(lambda: chunked(encode, images, texts, chunk_size=2, split=["images", "texts"]), model)
    chunks = [(list, [2, 3], ["a", "bb"]), (list, [4, 5], ["ccc", "dddd"]), (list, [6], ["eeeee"])]
    assert seen == [*chunks, *reversed(chunks)]
    assert_same(got, step(lambda: encode(images, texts), model), **EXACT)


def test_split_goes_by_the_key_of_a_dict_and_takes_a_tuple() -> None:
    seen = []

    def encode(inputs: dict[str, Any]) -> Tensor:
        seen.append(inputs["names"])
        return inputs["x"]

    chunked(encode, {"x": torch.randn(3, 1), "names": ("a", "b", "c")}, chunk_size=2, split="names")
    assert seen == [("a", "b"), ("c",)]


def test_split_takes_an_array() -> None:
    array = np.arange(5)
    seen = []
    chunked(lambda x: seen.append(x.tolist()) or torch.as_tensor(x), array, chunk_size=2, split="x")
    assert seen == [[0, 1], [2, 3], [4]]


def test_a_list_in_split_whose_tensors_want_gradients_gives_them_all() -> None:
    model, x = linear()
    images = [row.clone().requires_grad_() for row in x]
    tensors = {str(i): image for i, image in enumerate(images)} | trained(model)

    def encode(images: list[Tensor]) -> Tensor:
        return model(torch.stack(images))

    got = backward(contrast(chunked(encode, images, chunk_size=2, split="images")), tensors)
    assert_same(got, backward(contrast(encode(images)), tensors), **EXACT)


def test_gradients_pass_on_to_what_made_the_items_of_a_list() -> None:
    model, x = linear()
    stem, _ = linear()
    both = nn.ModuleList([stem, model])

    def encode(images: list[Tensor]) -> Tensor:
        return model(torch.stack(images))

    got = step(lambda x: chunked(encode, [stem(row) for row in x], chunk_size=2, split="images"), both, x)
    assert_same(got, step(lambda x: model(stem(x)), both, x), **EXACT)


def test_an_encoders_own_keyword_named_encoder_passes() -> None:
    model, x = linear()

    def encode(x: Tensor, encoder: str) -> Tensor:
        assert encoder == "bert"
        return model(x)

    torch.testing.assert_close(chunked(encode, x, encoder="bert", chunk_size=4), model(x), **EXACT)


def test_an_encoders_own_option_of_the_same_name_is_bound_first() -> None:
    model, x = linear()

    def encode(x: Tensor, *, chunk_size: int, device: str) -> Tensor:
        return model(x) * chunk_size

    bound = functools.partial(encode, chunk_size=3, device="here")
    torch.testing.assert_close(chunked(bound, x, chunk_size=4, device="cpu"), model(x) * 3, **EXACT)


def test_an_encoders_option_of_the_same_name_that_is_not_used_is_no_collision() -> None:
    model, x = linear()

    def encode(x: Tensor, device: str = "there", select: str = "all") -> Tensor:
        assert (device, select) == ("there", "all")
        return model(x)

    torch.testing.assert_close(chunked(encode, x, chunk_size=4), model(x), **EXACT)


# ---- outputs


@dataclass
class Features:
    x: Tensor
    scale: Tensor | None = None
    label: str = "none"


@dataclass
class Counted:
    x: Tensor
    count: int = field(init=False, default=3)


def model_output(x: Tensor, scale: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=x[:, None] * 2, pooler_output=x, hidden_states=(x * 3, x * 4))


KINDS_OF_OUTPUT = {
    "tensor": (lambda x, s: x, lambda v: [v]),
    "tuple": (lambda x, s: (x, s, None), lambda v: [v[0], v[1]]),
    "list": (lambda x, s: [x, [x * 2]], lambda v: [v[0], v[1][0]]),
    "dict": (lambda x, s: {"x": x, "scale": s, "kind": "dict"}, lambda v: [v["x"], v["scale"]]),
    "named tuple": (Pair, lambda v: [v.left, v.right]),
    "dataclass": (lambda x, s: Features(x, s, "cat"), lambda v: [v.x, v.scale]),
    "dataclass that counts": (lambda x, s: Counted(x), lambda v: [v.x]),
    "ModelOutput": (
        model_output,
        lambda v: [v.last_hidden_state[:, 0], v.pooler_output, v[1], v["hidden_states"][1]],
    ),
}


@pytest.mark.parametrize("kind", KINDS_OF_OUTPUT)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_gives_what_the_encoder_gives(kind: str, shape: tuple[int, ...]) -> None:
    make, read = KINDS_OF_OUTPUT[kind]
    model, x = linear(7)
    scale = nn.Parameter(torch.full(shape, 0.5, dtype=torch.float64))
    tensors = {"scale": scale, **trained(model)}

    def encode(x: Tensor) -> Any:
        return make(model(x), scale.exp())

    def loss(output: Any) -> Tensor:
        features = read(output)
        return contrast(torch.cat([f * (i + 1) for i, f in enumerate(features) if f.dim() == 2], 1)) * sum(
            (f.square().sum() for f in features if f.dim() < 2), start=torch.tensor(1.0)
        )

    ours, theirs = chunked(encode, x, chunk_size=3), encode(x)
    assert type(ours) is type(theirs)
    assert [f.shape for f in read(ours)] == [f.shape for f in read(theirs)]
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
    assert_same(backward(loss(ours), tensors), backward(loss(theirs), tensors), **EXACT)


def test_what_is_no_tensor_passes_through() -> None:
    model, x = linear()
    thing = object()
    out = chunked(lambda x: {"x": model(x), "n": 3, "name": "a", "none": None, "thing": thing}, x, chunk_size=4)
    assert (out["n"], out["name"], out["none"]) == (3, "a", None)
    assert out["thing"] is thing


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_passes_through_with_its_gradient_once(shape: tuple[int, ...], raw: bool) -> None:
    model, x = linear()
    scale = nn.Parameter(torch.full(shape, 0.5, dtype=torch.float64))
    features, got = chunked(lambda x: (model(x), scale if raw else scale.exp()), x, chunk_size=2)
    assert got.shape == shape
    assert got.requires_grad
    (got * 3).sum().backward()
    torch.testing.assert_close(scale.grad, (torch.ones_like(scale) if raw else scale.exp().detach()) * 3)
    assert features.shape == x.shape
    with torch.no_grad():
        got.zero_()
    assert scale.item() == 0.5  # the output is its own tensor


def test_a_scale_that_is_also_used_on_the_features_gets_both_gradients() -> None:
    model, x = linear()
    scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x) * scale, scale.exp()

    def loss(features: Tensor, scale: Tensor) -> Tensor:
        return contrast(features) * scale

    tensors = {"scale": scale, **trained(model)}
    got = backward(loss(*chunked(encode, x, chunk_size=4)), tensors)
    assert_same(got, backward(loss(*encode(x)), tensors), **EXACT)


def test_a_scale_of_nan_passes_too() -> None:
    model, x = linear()
    assert chunked(lambda x: (model(x), torch.tensor(torch.nan)), x, chunk_size=4)[1].isnan()


def test_outputs_without_gradient_have_none() -> None:
    model, x = linear()

    def encode(x: Tensor) -> dict[str, Tensor]:
        y = model(x)
        return {"x": y, "top": y.argmax(1), "kept": y.detach(), "mask": y > 0}

    out = chunked(encode, x, chunk_size=4)
    assert [name for name, value in out.items() if value.requires_grad] == ["x"]
    for name, value in encode(x).items():
        torch.testing.assert_close(out[name], value, **EXACT)
    got = backward(contrast(out["x"]), trained(model))
    assert_same(got, step(model, model, x), **EXACT)


def test_an_output_that_the_loss_does_not_use_gives_no_gradient() -> None:
    heads, x = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).double(), torch.randn(7, 2, dtype=torch.float64)
    features, _ = chunked(lambda x: (heads[0](x), heads[1](x)), x, chunk_size=3)
    got = backward(contrast(features), trained(heads))
    assert got["1.weight"] is None
    assert_same(got, step(heads[0], heads, x), **EXACT)


def test_one_number_per_row() -> None:
    model = nn.Linear(2, 1).double()
    x = torch.randn(7, 2, dtype=torch.float64)
    for chunk_size in (2, 3, 6, 7):  # the last chunk of some has a single row
        got = chunked(lambda x: model(x)[:, 0], x, chunk_size=chunk_size)
        torch.testing.assert_close(got, model(x)[:, 0], **EXACT)
    torch.testing.assert_close(chunked(lambda x: model(x)[:, 0], x[:1], chunk_size=1), model(x[:1])[:, 0], **EXACT)


# ---- select


@pytest.mark.parametrize(
    ("output", "select"),
    [
        (lambda x, y: {"a": x, "b": y}, "b"),
        (lambda x, y: (x, y), 1),
        (lambda x, y: [x, y], 1),
        (Pair, 1),
        (Features, "scale"),
        (lambda x, y: model_output(y, x), "pooler_output"),
    ],
)
def test_select_gives_one_output_by_name_or_position(output: Any, select: str | int) -> None:
    model, x = linear(7)
    got = step(lambda x: chunked(lambda x: output(model(x) * 2, model(x)), x, chunk_size=3, select=select), model, x)
    assert_same(got, step(model, model, x), **EXACT)


def test_select_by_a_list_gives_the_container_with_those_alone() -> None:
    x = torch.randn(7, 2)
    out = chunked(lambda x: {"a": x, "b": x * 2, "c": x * 3}, x, chunk_size=3, select=["c", "a"])
    assert {name: value[0, 0] / x[0, 0] for name, value in out.items()} == {"a": 1, "c": 3}
    assert isinstance(out, dict)
    out = chunked(lambda x: (x, x * 2, x * 3), x, chunk_size=3, select=[0, 2])
    assert isinstance(out, tuple)
    torch.testing.assert_close(out, (x, x * 3))
    out = chunked(lambda x: [x, x * 2], x, chunk_size=3, select=[1])
    assert isinstance(out, list)
    torch.testing.assert_close(out, [x * 2])
    out = chunked(lambda x: Features(x, x * 2, "cat"), x, chunk_size=3, select=["x"])
    assert isinstance(out, Features)
    torch.testing.assert_close(out.x, x)
    assert out.scale is out.label is None
    out = chunked(lambda x: model_output(x, x), x, chunk_size=3, select=["pooler_output"])
    assert list(out.keys()) == ["pooler_output"]
    assert type(out).__name__ == "BaseModelOutputWithPooling"


def test_what_is_not_selected_may_be_anything() -> None:
    x = torch.randn(7, 2)
    odd = nn.Module()
    odd.held = x
    got = chunked(lambda x: {"x": x, "loss": x.mean(), "odd": odd, "mean": x.mean(0)}, x, chunk_size=3, select="x")
    assert torch.equal(got, x)


# ---- transform and device


def test_uint8_images_stay_so_until_their_chunk() -> None:
    model = Recorded(Mlp().double())
    images = torch.randint(256, (10, 2, 3), dtype=torch.uint8)
    seen = []

    def prepare(images: Tensor) -> Tensor:
        seen.append((images.dtype, len(images)))
        return images.flatten(1).double() / 255

    got = step(lambda: chunked(model, images, chunk_size=4, transform=prepare), model)
    assert seen == [(torch.uint8, rows) for rows in (4, 4, 2, 2, 4, 4)]
    assert_same(got, step(lambda: model(prepare(images)), model), **EXACT)


def test_transform_by_name() -> None:
    x, ids, table = torch.randn(7, 3), torch.arange(7), torch.ones(2)
    for names in ({"x": lambda x: x * 2, "ids": lambda ids: ids + 1}, {0: lambda x: x * 2, 1: lambda ids: ids + 1}):
        got = chunked(
            lambda x, ids, table: (x, ids, table[:1]), x, ids, table, chunk_size=3, whole="table", transform=names
        )
        torch.testing.assert_close(got, (x * 2, ids + 1, table[:1]))


def test_transform_by_the_key_of_a_dict_and_of_a_whole_argument() -> None:
    inputs = {"x": torch.randn(7, 3), "scale": torch.tensor(3.0)}
    got = chunked(
        lambda inputs: inputs["x"] * inputs["scale"],
        inputs,
        chunk_size=3,
        transform={"x": torch.neg, "scale": torch.square},
    )
    torch.testing.assert_close(got, -inputs["x"] * 9)


def test_transform_of_a_list_makes_what_the_encoder_takes() -> None:
    model, texts = nn.Embedding(20, 3).double(), ["a", "bb", "ccc"]

    def tokenize(texts: list[str]) -> Tensor:
        return torch.tensor([len(text) for text in texts])

    got = chunked(model, texts, chunk_size=2, split=0, transform=tokenize)
    torch.testing.assert_close(got, model(torch.tensor([1, 2, 3])), **EXACT)


def test_gradients_pass_through_a_transform() -> None:
    model = Mlp().double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    got = step(lambda x: chunked(model, x, chunk_size=3, transform=torch.tanh), model, x)
    assert_same(got, step(lambda x: model(x.tanh()), model, x), **EXACT)


@pytest.mark.parametrize("device", [None, "meta", torch.device("meta")])
def test_chunks_go_one_by_one_to_where_the_encoder_is(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, scale = Recorded(Mlp().to("meta")), torch.randn(10, 6), torch.tensor(2.0)
    moved = []
    to = Tensor.to

    def watched(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.device.type == "cpu":  # torch moves its own on the meta device
            moved.append(tuple(self.shape))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", watched)
    seen = []

    def prepare(x: Tensor) -> Tensor:
        seen.append((x.device.type, len(x)))
        return x

    with torch.no_grad():
        out = chunked(
            lambda x, scale: model(x) * scale, x, scale, chunk_size=4, transform={"x": prepare}, device=device
        )
    assert moved == [(4, 6), (), (4, 6), (), (2, 6), ()]
    assert seen == [("meta", 4), ("meta", 4), ("meta", 2)]
    assert out.device.type == "meta"
    assert out.shape == (10, 5)


def test_device_says_where_chunks_go_when_the_encoder_does_not() -> None:
    seen = []
    chunked(lambda x: seen.append(x.device.type) or x, torch.randn(4, 2), chunk_size=2, device="meta")
    assert seen == ["meta"] * 2


def test_an_encoder_on_two_devices_moves_its_inputs_itself() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    seen = []
    chunked(lambda x: seen.append(x.device.type) or model[0](x), torch.randn(4, 2), chunk_size=2)
    assert seen == ["cpu"] * 2


def test_gradients_come_back_to_where_the_inputs_are() -> None:
    """No second device that holds data is here: from float64 on the CPU to it is what can be seen."""
    model, x = linear()
    x.requires_grad_()
    chunked(model, x, chunk_size=4, device="cpu").sum().backward()
    assert x.grad.device == x.device


# ---- refusals: one test per message, with what is named in it


def refused(kind: type[Exception], message: str, encoder: Any, *args: Any, **options: Any) -> None:
    options.setdefault("chunk_size", 2)
    with pytest.raises(kind) as caught:
        chunked(encoder, *args, **options)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("chunked: ")
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("chunk_size", [2.0, "2", True, [2]])
def test_a_chunk_size_of_another_kind_is_refused(chunk_size: Any) -> None:
    words = rf"chunk_size must be an int, got {re.escape(repr(chunk_size))}\."
    model, x = linear()
    refused(TypeError, words, model, x, chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [0, -3])
def test_a_chunk_size_below_one_is_refused(chunk_size: int) -> None:
    refused(ValueError, rf"chunk_size must be at least 1, got {chunk_size}\.", *linear(), chunk_size=chunk_size)


def test_a_missing_chunk_size_is_an_error() -> None:
    with pytest.raises(TypeError, match="chunk_size"):
        chunked(*linear())


def test_an_encoder_that_cannot_be_called_is_refused() -> None:
    refused(TypeError, r"encoder must be callable, got Tensor\.", *reversed(linear()))


@dataclass
class Labelled:
    inputs: Tensor
    labels: Tensor


def test_mismatched_rows_are_refused_by_name() -> None:
    x, y = torch.randn(4, 2), torch.randn(5, 2)
    words = (
        r"same number of rows, got {}\. Name those that every chunk needs whole in whole=\[\.\.\.\], .*"
        r"split=\{{name: counts\}}\."
    )

    def encode(image: Tensor, text: Any = None) -> Tensor:
        raise AssertionError("must not be reached")

    refused(ValueError, words.format("image: 4, text: 5"), encode, x, y)
    refused(ValueError, words.format("image: 4, text: 5"), encode, x, text=y)
    refused(ValueError, words.format(r"image: 4, text\['ids'\]\[1\]: 5"), encode, x, {"ids": [x[0, 0], y]})
    refused(ValueError, words.format(r"image\.inputs: 4, image\.labels: 5"), encode, Labelled(x, y))
    refused(ValueError, words.format("image: 4, text: 3"), encode, x, ["a", "b", "c"], split="text")
    refused(ValueError, words.format(r"args\[0\]: 4, args\[1\]: 5"), lambda *args: None, x, y)


def test_nothing_to_split_is_refused_with_what_there_is() -> None:
    words = r"at least one argument must be a tensor with rows to split, got {}\. Name a list of samples in split\."

    def encode(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("must not be reached")

    refused(ValueError, words.format("no arguments"), encode)
    refused(
        ValueError,
        words.format(r"args\[0\]: a tensor of shape \(\), name: str, n: NoneType"),
        encode,
        torch.tensor(1.0),
        name="a",
        n=None,
    )
    refused(ValueError, words.format(r"x: a tensor of shape \(3,\)"), encode, x=torch.ones(3), whole="x")
    refused(ValueError, words.format(r"args\[0\]\[0\]: str"), encode, ["a"])


@pytest.mark.parametrize("option", ["whole", "split", "transform"])
def test_an_unknown_name_is_refused(option: str) -> None:
    model, x = linear()
    chosen: Any = {"teble": torch.neg} if option == "transform" else ["teble"]
    words = rf"{option} must name arguments of the call, got 'teble'\. There are input, table\['a'\]\."

    def encode(input: Tensor, table: Any) -> Tensor:
        return model(input)

    refused(ValueError, words, encode, x, {"a": 3}, **{option: chosen})


def test_a_position_that_there_is_not_is_refused() -> None:
    refused(ValueError, r"whole must name arguments of the call, got 1\. There are input\.", *linear(), whole=1)


def test_a_name_in_whole_and_in_split_is_refused() -> None:
    refused(ValueError, r"input must be named in whole or in split, got both\.", *linear(), whole="input", split=0)


@pytest.mark.parametrize(
    ("value", "described"), [(3, "int"), (torch.tensor(2.0), r"a tensor of shape \(\)"), (None, "NoneType")]
)
def test_split_of_what_has_no_rows_is_refused(value: Any, described: str) -> None:
    words = rf"n must have rows to be split, got {described}\."
    refused(ValueError, words, lambda x, n: x, torch.ones(4), value, split="n")


def test_a_transform_for_several_arguments_is_refused() -> None:
    words = (
        r"transform must be a dict where several arguments are split, got a function for x, y\['a'\]\. "
        r"Pass transform=\{'x': \.\.\.\}\."
    )
    refused(ValueError, words, lambda x, y: x, torch.ones(4), {"a": torch.ones(4)}, transform=torch.neg)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chunk_size", 2),
        ("select", 0),
        ("whole", "y"),
        ("split", "x"),
        ("transform", torch.neg),
        ("device", "cpu"),
    ],
)
def test_an_option_that_the_encoder_has_too_is_refused(option: str, value: Any) -> None:
    words = (
        rf"{option} must be an option of chunked alone, but the encoder has a keyword of that name\. "
        rf"Bind the encoder's first: functools\.partial\(encoder, {option}=\.\.\.\)\."
    )
    scope: dict[str, Any] = {}
    exec(f"def by_place(x, y=None, {option}=None): return x\ndef by_name(x, y=None, *, {option}=None): return x", scope)
    for encoder in (scope["by_place"], scope["by_name"]):
        refused(ValueError, words, encoder, torch.ones(4), **{option: value})


def test_an_option_that_a_modules_forward_has_too_is_refused() -> None:
    class Chunky(nn.Module):
        def forward(self, x: Tensor, chunk_size: int = 64) -> Tensor:
            return x

    refused(ValueError, r"chunk_size must be an option of chunked alone", Chunky(), torch.ones(4))
    refused(ValueError, r"chunk_size must be an option of chunked alone", Chunky().forward, torch.ones(4))


def test_sparse_and_nested_tensors_are_refused_by_name() -> None:
    words = r"{} must be a dense tensor, got {}\. Make it dense first\."
    identity, sparse = nn.Identity(), torch.eye(4).to_sparse()
    refused(TypeError, words.format("input", "torch.sparse_coo"), identity, sparse)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    refused(TypeError, words.format(r"x\['a'\]", "a nested one"), lambda x: x, {"a": jagged})


def test_an_unknown_selection_is_refused_with_what_there_is() -> None:
    model, x = linear()
    words = r"select must name outputs of the encoder, got {} for {}\."
    refused(ValueError, words.format("'c'", "'a', 'b'"), lambda x: {"a": x, "b": x}, x, select="c")
    refused(ValueError, words.format("2", "0, 1"), lambda x: (x, x), x, select=[0, 2])
    refused(ValueError, words.format("'a'", "a single Tensor"), model, x, select="a")
    refused(ValueError, words.format("'y'", "'x', 'scale', 'label'"), Features, x, select="y")


def test_an_output_without_the_chunks_rows_is_refused_by_name() -> None:
    words = (
        r"{} must have the chunk's {} rows in dim 0, or be a single number in all chunks, got shape {}\. Name an "
        r"argument that should be split in split, or leave the output out by select\."
    )
    x = torch.randn(6, 3)
    refused(ValueError, words.format(r"output\['mean'\]", 2, r"\(3,\)"), lambda x: {"x": x, "mean": x.mean(0)}, x)
    refused(ValueError, words.format(r"output\[1\]", 2, r"\(3, 2\)"), lambda x: (x, x.T), x)
    refused(ValueError, words.format("output", 4, r"\(1, 1\)"), lambda x: x[:1, :1], x, chunk_size=4)
    # The first chunk may pass by chance: a later one does not.
    refused(
        ValueError, words.format(r"output\[1\]", 1, r"\(4, 3\)"), lambda x: (x, torch.ones(4, 3)), x[:5], chunk_size=4
    )


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_that_differs_between_chunks_is_refused_by_name(shape: tuple[int, ...]) -> None:
    words = (
        r"output\['loss'\] must be the same for every chunk, because it is a single number, got different ones: it "
        r"depends on the rows of the chunk \(a loss, a mean\)\. Leave it out by select\."
    )
    model, x = linear()
    refused(ValueError, words, lambda x: {"x": model(x), "loss": model(x).mean().reshape(shape)}, x)


def test_what_is_no_tensor_and_differs_between_chunks_is_refused_by_name() -> None:
    words = (
        r"output\[1\] must be the same for every chunk, because it is not a tensor and cannot be joined, got 4 and "
        r"2\. Leave it out by select\."
    )
    refused(ValueError, words, lambda x: (x, len(x)), torch.ones(6), chunk_size=4)


def test_a_tensor_where_another_chunk_has_none_is_refused_by_name() -> None:
    words = r"output\[1\] must be the same for every chunk, .* got None and a tensor of shape \(2,\)\."
    refused(ValueError, words, lambda x: (x, None if len(x) == 4 else x), torch.ones(6), chunk_size=4)


def test_other_outputs_for_another_chunk_are_refused_by_name() -> None:
    words = (
        r"the encoder must return the same outputs for every chunk, got output\['x'\] and output\['x'\], "
        r"output\['y'\]\."
    )
    refused(ValueError, words, lambda x: {"x": x} | ({} if len(x) == 4 else {"y": x}), torch.ones(6), chunk_size=4)


def test_other_outputs_that_are_no_tensors_are_refused_in_words_too() -> None:
    words = r"the encoder must return the same outputs for every chunk, got output\[0\], output\[1\] and output\[0\]\."
    refused(ValueError, words, lambda x: (x, "a") if len(x) == 4 else (x,), torch.ones(6), chunk_size=4)


@pytest.mark.parametrize("kind", [type("Cache", (), {"__init__": lambda self, x: None}), Tensor.numpy])
def test_an_object_or_array_of_every_chunk_is_refused_by_name(kind: Any) -> None:
    words = r"output\['cache'\] must be the same for every chunk, .* got (Cache and Cache|ndarray and ndarray)\."
    refused(ValueError, words, lambda x: {"x": x, "cache": kind(x)}, torch.ones(6))


def test_one_number_per_row_in_chunks_of_one_is_refused() -> None:
    words = (
        r"output must tell one number per row from one for all, got shape \(1,\) for a chunk of one row\. Use a "
        r"chunk_size of at least 2, or leave it out by select\."
    )
    refused(ValueError, words, lambda x: x[:, 0], torch.ones(6, 2), chunk_size=1)


def test_an_encoders_own_error_comes_through() -> None:
    def encode(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        chunked(encode, torch.ones(4), chunk_size=2)


def test_empty_batches_keep_all_outputs() -> None:
    model = nn.Linear(2, 3).double()
    scale = nn.Parameter(torch.tensor(0.5))
    out = chunked(lambda x: {"x": model(x), "scale": scale.exp()}, torch.empty(0, 2, dtype=torch.float64), chunk_size=4)
    assert out["x"].shape == (0, 3)
    (out["x"].sum() + out["scale"]).backward()
    torch.testing.assert_close(scale.grad, scale.exp().detach())
    torch.testing.assert_close(model.weight.grad, torch.zeros(3, 2, dtype=torch.float64))


def test_rows_arrive_in_order_in_full_chunks_and_a_rest() -> None:
    model = Recorded(Mlp().double())
    (x,) = make_inputs("mlp", 11)
    chunked(model, x, chunk_size=4).sum().backward()
    assert model.calls == [(4, True), (4, True), (3, True), (3, True), (4, True), (4, True)]


def test_an_output_whose_width_differs_between_chunks_is_refused_by_name() -> None:
    x = torch.randn(6, 4)
    words = (
        r"output\['logits'\] must have the same shape in every chunk, but for its rows, got \[2\] after \[4\]: it is"
    )
    refused(ValueError, words, lambda x: {"features": x, "logits": x @ x.T}, x, chunk_size=4)


def test_messages_do_not_list_thousands_of_items() -> None:
    texts = [f"text {i}" for i in range(10_000)]
    refused(
        ValueError, r"got texts\[0\]: str, .* and 9992 more\. Name a list of samples in split", lambda texts: 1, texts
    )
    with pytest.raises(ValueError) as caught:
        chunked(lambda texts: 1, texts, chunk_size=2, split="text")
    assert len(str(caught.value)) < 300


def test_outputs_of_a_model_output_are_selected_by_position_too() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    model, x = linear()

    def encode(x: Tensor) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=model(x))

    assert torch.equal(
        chunked(encode, x, chunk_size=2, select=1), chunked(encode, x, chunk_size=2, select="pooler_output")
    )
    assert list(chunked(encode, x, chunk_size=2, select=[1])) == ["pooler_output"]
