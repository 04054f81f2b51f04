"""`chunked` on other people's models as they are: transformers, sentence-transformers, open_clip."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megabatch
from megabatch import chunked

from .encoders import EXACT, assert_identical, assert_same, backward, contrast, loop_step, trained
from .shims import import_torchvision

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["a cat sat", "the dog ran under a tree", "red", "a blue mat", "the cat ran", "dog on mat", "tree"]
WORDS = SPECIAL + sorted({word for text in TEXTS for word in text.split()})


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> None:
    """Before all that imports it."""
    import_torchvision()


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    BertTokenizerFast({word: place for place, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


@pytest.fixture
def sentence_model(bert_folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    transformer = modules.Transformer(str(bert_folder), max_seq_length=16)
    return SentenceTransformer(modules=[transformer, modules.Pooling(16), modules.Normalize()], device="cpu").double()


@pytest.fixture
def bert(bert_folder: Path) -> tuple[nn.Module, Any]:
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(bert_folder)(TEXTS, padding=True, return_tensors="pt")
    return AutoModel.from_pretrained(bert_folder).double(), tokens


def make_clip(**options: Any) -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=16, head_width=8, patch_size=4, image_size=8)
    text = CLIPTextCfg(context_length=7, vocab_size=20, width=16, heads=2, layers=2)
    return CLIP(8, vision, text, **options).double()


def pairs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 8, 8, dtype=torch.float64), torch.randint(1, 20, (rows, 7))


# ---- transformers


def test_a_transformers_model_on_its_batch_encoding(bert: tuple[nn.Module, Any]) -> None:
    model, tokens = bert
    model.eval()
    wanted, got = model(**tokens), chunked(model, **tokens, chunk_size=3)
    assert type(got) is type(wanted)
    assert list(got) == list(wanted)
    losses = [contrast(out.pooler_output) + contrast(out.last_hidden_state[:, 0]) for out in (got, wanted)]
    assert_same(*(backward(loss, trained(model)) for loss in losses), **EXACT)


def test_a_transformers_model_with_all_its_hidden_states(bert: tuple[nn.Module, Any]) -> None:
    model, tokens = bert
    model.eval()
    got = chunked(model, **tokens, chunk_size=3, output_hidden_states=True, select=["pooler_output", "hidden_states"])
    wanted = model(**tokens, output_hidden_states=True)
    assert list(got) == ["pooler_output", "hidden_states"]
    assert got.last_hidden_state is None
    torch.testing.assert_close(got.hidden_states, wanted.hidden_states, **EXACT)


def test_a_transformers_model_in_training_equals_a_loop_to_the_bit(bert: tuple[nn.Module, Any]) -> None:
    model, tokens = bert
    model.train()
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    torch.manual_seed(7)
    wanted = loop_step(lambda i, m: model(input_ids=i, attention_mask=m).pooler_output, model, ids, mask, chunk_size=3)
    torch.manual_seed(7)
    pooled = chunked(model, ids, attention_mask=mask, chunk_size=3, select="pooler_output")
    assert_identical(backward(contrast(pooled), trained(model)), wanted)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # has a test of its own
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_transformers_model_with_gradient_checkpointing(bert: tuple[nn.Module, Any], reentrant: bool) -> None:
    model, tokens = bert
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config._attn_implementation = "eager"
    wanted = backward(contrast(model(**tokens).pooler_output), trained(model))
    newer = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    pooled = chunked(model, **tokens, chunk_size=3, select="pooler_output")
    assert_same(backward(contrast(pooled), trained(model)), wanted, **EXACT)


# ---- sentence-transformers


def test_a_sentence_transformer_on_its_feature_dict(sentence_model: Any) -> None:
    sentence_model.eval()
    features = sentence_model.preprocess(TEXTS)
    keys = set(features)
    got = chunked(sentence_model, features, chunk_size=3, select="sentence_embedding")
    assert set(features) == keys  # though the model writes its outputs into what it is given
    assert got.shape == (7, 16)
    wanted = sentence_model(dict(features))["sentence_embedding"]
    tensors = trained(sentence_model)
    assert_same(backward(contrast(got), tensors), backward(contrast(wanted), tensors), **EXACT)


def test_a_sentence_transformer_in_training_equals_a_loop_to_the_bit(sentence_model: Any) -> None:
    sentence_model.train()
    features = dict(sentence_model.preprocess(TEXTS))
    ids, mask = features["input_ids"], features["attention_mask"]

    def encode(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        given = features | {"input_ids": input_ids, "attention_mask": attention_mask}
        given["token_type_ids"] = torch.zeros_like(input_ids)
        return sentence_model(given)["sentence_embedding"]

    torch.manual_seed(7)
    wanted = loop_step(encode, sentence_model, ids, mask, chunk_size=3)
    torch.manual_seed(7)
    got = chunked(sentence_model, features, chunk_size=3, select="sentence_embedding")
    assert_identical(backward(contrast(got), trained(sentence_model)), wanted)


def test_a_sentence_transformer_tokenizes_chunk_by_chunk(sentence_model: Any) -> None:
    """Texts are split as a list; every chunk is padded to its own longest."""
    sentence_model.eval()
    got = chunked(
        sentence_model,
        TEXTS,
        chunk_size=3,
        split="input",
        transform=sentence_model.preprocess,
        select="sentence_embedding",
    )
    wanted = sentence_model(dict(sentence_model.preprocess(TEXTS)))["sentence_embedding"]
    tensors = trained(sentence_model)
    assert_same(backward(contrast(got), tensors), backward(contrast(wanted), tensors), rtol=1e-6, atol=1e-6)


def test_all_outputs_of_a_sentence_transformer(sentence_model: Any) -> None:
    sentence_model.eval()
    features = sentence_model.preprocess(TEXTS)
    got, wanted = chunked(sentence_model, features, chunk_size=3), sentence_model(dict(features))
    assert set(got) == set(wanted)
    torch.testing.assert_close(got["token_embeddings"], wanted["token_embeddings"], **EXACT)


# ---- open_clip


@pytest.mark.parametrize("normalized", [True, False])
def test_the_two_encoders_of_an_open_clip_model(normalized: bool) -> None:
    model, (images, texts) = make_clip(), pairs(7)
    image = chunked(model.encode_image, images, chunk_size=3, normalize=normalized)
    text = chunked(model.encode_text, texts, chunk_size=4, normalize=normalized)
    ours = megabatch.clip_loss(image, text, model.logit_scale.exp(), normalize=not normalized)
    image, text = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
    theirs = megabatch.clip_loss(image, text, model.logit_scale.exp(), normalize=False)
    assert_same(backward(ours, trained(model)), backward(theirs, trained(model)), **EXACT)


@pytest.mark.parametrize("bias", [None, -10.0])
@pytest.mark.parametrize("shape", ["0-d", "[1]"])
def test_the_forward_of_an_open_clip_model_with_its_scale(bias: float | None, shape: str) -> None:
    options = {"output_dict": True, "init_logit_bias": bias, "nonscalar_logit_scale": shape == "[1]"}
    model, (images, texts) = make_clip(**options), pairs(7)
    outputs = chunked(model, images, texts, chunk_size=3), model(images, texts)
    assert [(name, value.shape) for name, value in outputs[0].items()] == [
        (name, value.shape) for name, value in outputs[1].items()
    ]
    loss = megabatch.clip_loss if bias is None else megabatch.siglip_loss
    ours, theirs = (loss(**output, normalize=False).sum() for output in outputs)
    assert_same(backward(ours, trained(model)), backward(theirs, trained(model)), **EXACT)


def test_the_forward_of_an_open_clip_model_as_a_tuple() -> None:
    model, (images, texts) = make_clip(), pairs(7)
    outputs = chunked(model, images, texts, chunk_size=3), model(image=images, text=texts)
    ours, theirs = (megabatch.clip_loss(*output, normalize=False) for output in outputs)
    assert_same(backward(ours, trained(model)), backward(theirs, trained(model)), **EXACT)


def test_an_open_clip_model_with_images_alone_gives_none_for_texts() -> None:
    model, (images, _) = make_clip(output_dict=True), pairs(7)
    got = chunked(model, images, chunk_size=3)
    assert got["text_features"] is None
    torch.testing.assert_close(got["image_features"], model(images)["image_features"], **EXACT)


def test_an_open_clip_model_with_grad_checkpointing() -> None:
    model, (images, texts) = make_clip(output_dict=True), pairs(7)
    wanted = backward(megabatch.clip_loss(**model(images, texts), normalize=False), trained(model))
    model.set_grad_checkpointing(True)
    got = chunked(model, images, texts, chunk_size=3)
    assert_same(backward(megabatch.clip_loss(**got, normalize=False), trained(model)), wanted, **EXACT)


def test_a_locked_open_clip_tower_runs_once() -> None:
    model, (images, _) = make_clip(), pairs(7)
    model.lock_image_tower()
    calls = []
    model.visual.register_forward_hook(lambda *_: calls.append(1))
    features = chunked(model.encode_image, images, chunk_size=3)
    assert not features.requires_grad
    assert len(calls) == 3
