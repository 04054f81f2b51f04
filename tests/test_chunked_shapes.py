"""Chunks by shape: a last one that is filled up for a compiler, budgets of tokens, samples whose rows are packed."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch import chunked

from .encoders import EXACT, Mlp, Recorded, Text, assert_same, backward, contrast, make_inputs, step, trained
from .shims import import_torchvision

QUIET = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own


# ---- a compiled encoder


class Compiled:
    """An encoder for a compiler that counts how often it is asked to compile."""

    def __init__(self, model: nn.Module, in_place: bool = False) -> None:
        torch._dynamo.reset()
        self.count = 0
        self.model = model
        if in_place:
            model.compile(backend=self._compile)
            self.encoder: Any = model
        else:
            self.encoder = torch.compile(model, backend=self._compile)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


ROWS = (8, 13, 3, 9, 16, 1, 0, 12)


@QUIET
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "text"])
def test_steps_of_any_number_of_rows_compile_once(kind: str, in_place: bool) -> None:
    """With an attention mask, too. The forward and the replay are one graph."""
    model: nn.Module = (Mlp() if kind == "mlp" else Text()).double()
    compiled = Compiled(model, in_place)
    for rows in ROWS:
        inputs = make_inputs(kind, rows)
        got = step(lambda *x: chunked(compiled.encoder, *x, chunk_size=4), model, *inputs)
        assert compiled.count == 1, f"{rows} rows"
        plain = type(model)().double()
        plain.load_state_dict(model.state_dict())
        assert_same(got, step(plain, plain, *inputs), **EXACT)


@QUIET
def test_padding_of_the_last_chunk_can_be_turned_off() -> None:
    compiled, (x,) = Compiled(Mlp().double()), make_inputs("mlp", 13)
    contrast(chunked(compiled.encoder, x, chunk_size=4, pad_last=False)).backward()
    assert compiled.count > 1


@pytest.mark.parametrize(("pad_last", "rows"), [(None, [4, 4, 4, 1]), (True, [4, 4, 4, 4]), (False, [4, 4, 4, 1])])
def test_the_last_chunk_is_filled_up_if_asked_for(pad_last: bool | None, rows: list[int]) -> None:
    model, (x,) = Recorded(Mlp().double()), make_inputs("mlp", 13)
    x.requires_grad_()
    got = step(lambda x: chunked(model, x, chunk_size=4, pad_last=pad_last), model, x)
    assert model.rows == [*rows, *reversed(rows)]
    assert_same(got, step(model, model, x), **EXACT)


def test_a_list_cannot_be_filled_up() -> None:
    with pytest.raises(ValueError, match=r"chunked: pad_last must be left out for lists .* got texts\."):
        chunked(lambda texts: torch.ones(len(texts)), ["a", "b", "c"], chunk_size=2, split="texts", pad_last=True)


# ---- budgets of tokens


def texts_of(rows: int, longest: int = 7) -> dict[str, Tensor]:
    """With the lengths of captions: most are short."""
    lengths = torch.tensor([1 + min(int(random.Random(i).expovariate(0.5)), longest - 1) for i in range(rows)])
    mask = torch.arange(longest) < lengths[:, None]
    return {"input_ids": torch.randint(20, (rows, longest)) * mask, "attention_mask": mask}


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Text().double()
        self.shapes: list[tuple[int, int]] = []

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        self.shapes.append(tuple(inputs["input_ids"].shape))  # type: ignore[arg-type]
        assert inputs["attention_mask"].shape == inputs["input_ids"].shape
        assert inputs["attention_mask"].any(0).all(), "a column that no row uses"
        return self.inner(**inputs)


@pytest.mark.parametrize("rows", [1, 2, 19, 64])
def test_a_budget_of_tokens_is_exact_and_kept(rows: int) -> None:
    model, inputs = Watched(), texts_of(rows)
    got = step(lambda: chunked(model, inputs, chunk_tokens=14), model)
    shapes = model.shapes[: len(model.shapes) // 2]
    assert model.shapes == [*shapes, *reversed(shapes)]
    assert all(count * longest <= 14 for count, longest in shapes)
    assert sum(count for count, _ in shapes) == rows
    torch.testing.assert_close(chunked(model, inputs, chunk_tokens=14), model.inner(**inputs), **EXACT)
    assert_same(got, step(lambda: model.inner(**inputs), model), **EXACT)


def test_a_budget_of_tokens_trims_texts_on_two_sides_to_the_longer_of_each_pair() -> None:
    first, second = texts_of(19), {name: tensor.flip(0) for name, tensor in texts_of(19).items()}
    model = Watched().inner

    def pairs(first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
        return torch.cat([model(**first), model(**second)], 1)

    got = step(lambda: chunked(pairs, first, second, chunk_tokens=14), model)
    assert_same(got, step(lambda: pairs(first, second), model), **EXACT)


def cells_of(inputs: dict[str, Tensor], **options: int) -> int:
    """Tokens and padding that are encoded."""
    shapes: list[torch.Size] = []

    def encode(inputs: dict[str, Tensor]) -> Tensor:
        shapes.append(inputs["input_ids"].shape)
        return inputs["input_ids"][:, :1]

    chunked(encode, inputs, **options)
    return sum(shape.numel() for shape in shapes)


def test_a_budget_of_tokens_encodes_less_padding_than_rows_do() -> None:
    """At the same largest chunk: 8 rows of the longest."""
    inputs, cells = texts_of(256), {}
    for options in ({"chunk_tokens": 56}, {"chunk_size": 8}):
        model = Watched()
        model.forward = lambda inputs, model=model: (
            model.shapes.append(inputs["input_ids"].shape) or model.inner(**inputs)
        )
        chunked(model, inputs, **options)
        cells[next(iter(options))] = sum(rows * width for rows, width in model.shapes)
    assert cells["chunk_size"] == 256 * 7
    assert cells["chunk_tokens"] <= 0.6 * cells["chunk_size"]


def test_inputs_that_want_gradients_get_them_in_the_callers_order() -> None:
    weight = torch.randn(6, 5, dtype=torch.float64)
    mask = texts_of(12)["attention_mask"]
    embeds = torch.randn(12, 7, 6, dtype=torch.float64, requires_grad=True)

    def encode(inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        return (inputs_embeds * attention_mask[..., None]).sum(1).tanh() @ weight

    got = backward(contrast(chunked(encode, embeds, mask, chunk_tokens=14)), {"embeds": embeds})
    assert_same(got, backward(contrast(encode(embeds, mask)), {"embeds": embeds}), **EXACT)


def tokenize(texts: list[str]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(text.split()) for text in texts])
    ids = torch.tensor([[*map(len, text.split()), *[0] * (max(lengths) - len(text.split()))] for text in texts])
    return {"input_ids": ids, "attention_mask": torch.arange(int(max(lengths))) < lengths[:, None]}


@pytest.mark.parametrize("tokenized_by", ["transform", "the encoder"])
def test_a_budget_of_tokens_for_lists_of_texts(tokenized_by: str) -> None:
    """Counted by the tokenizer where it is the transform, in characters otherwise."""
    texts = [" ".join(["ab"] * (1 + i % 5)) for i in range(13)]
    model, seen = Text().double(), []

    def encode(texts: Any) -> Tensor:
        tokens = texts if tokenized_by == "transform" else tokenize(texts)
        seen.append((*tokens["input_ids"].shape, tokens is texts or len(texts) * max(map(len, texts)) <= 30))
        return model(**tokens)

    options: dict[str, Any] = {"transform": tokenize, "chunk_tokens": 10} if tokenized_by == "transform" else {}
    got = step(lambda: chunked(encode, texts, split="texts", **({"chunk_tokens": 30} | options)), model)
    assert all(kept for *_, kept in seen)
    assert tokenized_by != "transform" or all(rows * width <= 10 for rows, width, _ in seen)
    assert len({width for _, width, _ in seen}) > 1
    assert_same(got, step(lambda: model(**tokenize(texts)), model), **EXACT)


def test_a_budget_below_the_longest_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chunked: chunk_tokens must hold the longest row, got 2 for one of 7 tokens"):
        chunked(Watched(), texts_of(64), chunk_tokens=2)


def test_a_budget_without_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chunked: chunk_tokens must find the lengths of rows.* Use chunk_size\."):
        chunked(Mlp(), torch.randn(4, 6), chunk_tokens=2)


def test_a_mask_that_every_chunk_gets_whole_gives_no_lengths() -> None:
    with pytest.raises(ValueError, match=r"chunked: chunk_tokens must find the lengths of rows, .* got neither"):
        chunked(
            lambda input_ids, attention_mask: input_ids,
            torch.ones(4, 3),
            attention_mask=torch.ones(1, 3),
            whole="attention_mask",
            chunk_tokens=6,
        )


def test_padding_of_the_last_chunk_is_refused_under_a_budget_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"chunked: pad_last must be left out with chunk_tokens"):
        chunked(Watched(), texts_of(4), chunk_tokens=14, pad_last=True)


def test_rows_and_tokens_together_are_refused() -> None:
    with pytest.raises(TypeError, match=r"chunked: chunk_size or chunk_tokens must be given, got both\."):
        chunked(Watched(), texts_of(4), chunk_tokens=20, chunk_size=2)


# ---- packed samples


COUNTS = [3, 1, 4, 2, 5, 1, 2]


def pooled(model: nn.Module) -> Callable[..., Tensor]:
    """The mean over every sample's rows."""

    def encode(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        encoded, ends = model(rows), cu_seqlens.tolist()
        return torch.stack([encoded[a:b].mean(0) for a, b in itertools.pairwise(ends)])

    return encode


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("chunk_size", [1, 3, 7])
def test_samples_that_are_packed_by_counts_and_offsets(kind: Any, chunk_size: int) -> None:
    model, (x,) = Mlp().double(), make_inputs("mlp", sum(COUNTS))
    x.requires_grad_()
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    encode = pooled(model)
    split = {"rows": kind(COUNTS), "cu_seqlens": "offsets"}
    got = step(lambda x: chunked(encode, x, offsets, chunk_size=chunk_size, split=split), model, x)
    assert_same(got, step(lambda x: encode(x, offsets), model, x), **EXACT)


def test_counts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"counts of rows in split must add up to its 5 rows, got 4\."):
        chunked(lambda rows: rows, torch.ones(5, 2), chunk_size=1, split={"rows": [1, 3]})


@pytest.mark.parametrize(("value", "counts"), [(torch.ones(5), "lengths"), (["a"], [1])])
def test_counts_of_another_kind_are_refused(value: Any, counts: Any) -> None:
    with pytest.raises(ValueError, match=r"chunked: rows must be a tensor, packed by a count of rows per sample"):
        chunked(lambda rows: rows, value, chunk_size=1, split={"rows": counts})


@pytest.fixture(scope="module")
def qwen() -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """A vision-language model, and samples with an image each: of 4, 8, 16, 8 and 4 patches."""
    import_torchvision()
    from transformers import Qwen2VLConfig, Qwen2VLModel

    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 64, "rope_parameters": None}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=60, vision_start_token_id=61, vision_end_token_id=62
    )
    torch.manual_seed(0)
    model = Qwen2VLModel(config).double().eval()
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4], [1, 4, 2], [1, 2, 2]])
    patches = grid.prod(1)
    rows = [[61, *[60] * (int(n) // 4), 62, *range(3, 4 + i)] for i, n in enumerate(patches)]
    longest = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "pixel_values": torch.randn(int(patches.sum()), 3 * 2 * 2 * 2, dtype=torch.float64),
        "image_grid_thw": grid,
    }
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 60).long()
    return model, inputs, patches


@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"chunk_size": 1}, {"chunk_tokens": 20}], ids=str)
def test_a_vision_language_model_with_packed_images(qwen: Any, options: dict[str, int]) -> None:
    model, inputs, patches = qwen

    def embed(**inputs: Tensor) -> Tensor:
        states = model(**inputs).last_hidden_state
        last = inputs["attention_mask"].sum(1) - 1
        return states[torch.arange(len(states)), last]

    features = chunked(embed, **inputs, split={"pixel_values": patches}, **options)
    torch.testing.assert_close(features, embed(**inputs), rtol=1e-6, atol=1e-6)
    got = backward(contrast(features), trained(model))
    wanted = backward(contrast(embed(**inputs)), trained(model))
    assert_same(got, wanted, rtol=1e-6, atol=1e-6)  # rotations of positions are float32 inside of the model
    assert got["visual.patch_embed.proj.weight"].abs().max() > 0
