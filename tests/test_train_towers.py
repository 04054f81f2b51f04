"""The towers that are trained: built in, open_clip's, and those of a folder in Hugging Face's layout."""

import json
import logging
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import megabatch as mb
from megabatch.train.config import Model
from megabatch.train.towers import Towers, make_towers, small
from megabatch.train.towers.hugging_face import HuggingFaceTowers
from megabatch.train.towers.open_clip import OpenClipTowers
from megabatch.train.towers.small import SmallTowers

from .shims import import_torchvision
from .test_structure import HEAVY, loaded_by
from .training import losses, train, write_shapes

TEXTS = ["a red bicycle", "two cats", "", "naïve café 東京", "a rather long text " * 20, "x"]
KINDS = ["tiny", "small", "clip", "custom", "timm", "hf-clip", "hf-siglip"]

TOWER = {"layers": 2, "width": 16, "heads": 2}
OPEN_CLIP: dict[str, dict[str, Any]] = {
    "clip": {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 9, "vocab_size": 49408, **TOWER},
    },
    "custom": {
        "embed_dim": 8,
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 9, "vocab_size": 49408, **TOWER},
    },
    "timm": {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 32, "timm_model_name": "test_vit2", "timm_pool": "", "timm_proj": "linear"},
        "text_cfg": {"context_length": 9, "vocab_size": 49408, **TOWER},
    },
    "resnet": {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
        "text_cfg": {"context_length": 9, "vocab_size": 49408, **TOWER},
    },
    "hub": {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 9, "vocab_size": 49408, "hf_tokenizer_name": "nobody/nothing", **TOWER},
    },
    "few-tokens": {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 9, "vocab_size": 100, **TOWER},
    },
}


# Sizes of the folders' images, as their processors have them.
SIXTEEN: dict[str, dict[str, Any]] = {
    "hf-clip": {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
    "hf-siglip": {"size": {"height": 16, "width": 16}},
}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models: of open_clip by name, "megabatch-clip" for one, and folders "hf-clip" and "hf-siglip"."""
    import_torchvision()
    import open_clip
    from open_clip.tokenizer import bytes_to_unicode
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, SiglipConfig, SiglipModel

    place = tmp_path_factory.mktemp("models")
    (place / "configs").mkdir()
    for name, config in OPEN_CLIP.items():
        (place / "configs" / f"megabatch-{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(place / "configs")

    letters = list(bytes_to_unicode().values())
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**layers, "vocab_size": len(words), "max_position_embeddings": 12}
    text |= {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    vision = {**layers, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    clip = CLIPModel(CLIPConfig(text_config={**text, "projection_dim": 8}, vision_config=vision, projection_dim=8))
    siglip = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
    siglip.logit_scale.data.fill_(math.log(20))
    for name, model in (("hf-clip", clip), ("hf-siglip", siglip)):
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
        pixels = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "rescale_factor": 1 / 255}
        pixels |= SIXTEEN[name]
        (place / name / "preprocessor_config.json").write_text(json.dumps(pixels))
    return place


@pytest.fixture
def make(models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Towers]:
    """Towers by kind, with the options of make_towers and of Model. `small` is smaller, for the sake of time."""
    monkeypatch.setattr(small, "DEPTH", 2)
    monkeypatch.setattr(small, "BYTES", 48)

    def made(kind: str, *, loss: str = "clip", init_logit_scale: float | None = None, **options: Any) -> Towers:
        torch.manual_seed(1)
        return make_towers(Model(name_of(kind, models), **options), loss=loss, init_logit_scale=init_logit_scale)

    return made


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a folder, for a test to spoil."""

    def copied(kind: str) -> Path:
        for path in (models / kind).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    return copied


def normalisation(towers: Towers) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return towers.preprocessing.mean, towers.preprocessing.std


def name_of(kind: str, models: Path) -> str:
    if kind in ("tiny", "small"):
        return kind
    return str(models / kind) if kind.startswith("hf-") else f"megabatch-{kind}"


def batch(towers: Towers, rows: int = len(TEXTS)) -> tuple[Tensor, Tensor]:
    """uint8 images and tokens."""
    generator = torch.Generator().manual_seed(2)
    shape = (rows, towers.preprocessing.channels, towers.preprocessing.size, towers.preprocessing.size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), towers.tokenizer(TEXTS[:rows])


def step(towers: Towers, encode: Callable[..., Tensor] = lambda encoder, x: encoder(x)) -> dict[str, Tensor]:
    """The gradients of a contrastive loss, by name."""
    towers.zero_grad()
    images, tokens = batch(towers)
    image = normalize(encode(towers.encode_image, towers.pixels(images)), dim=1)
    text = normalize(encode(towers.encode_text, tokens), dim=1)
    mb.clip_loss(image, text, towers.logit_scale.exp(), logit_bias=towers.logit_bias).backward()
    return {name: x.grad.clone() for name, x in towers.named_parameters() if x.grad is not None}


def nodes_of(x: Tensor) -> Iterator[str]:
    """The names of all nodes of a graph."""
    seen, waiting = set(), [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node.name()
            waiting += [before for before, _ in node.next_functions]


def saved_bytes(encoder: Callable[[Tensor], Tensor], x: Tensor) -> int:
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder(x)
    return kept


# ---- what holds for all of them


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_trained_parameter(kind: str, make: Callable[..., Towers]) -> None:
    towers = make(kind)
    assert set(step(towers)) == {name for name, _ in towers.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_the_gradients_of_the_whole(kind: str, make: Callable[..., Towers]) -> None:
    towers = make(kind)
    whole = step(towers)
    got = step(towers, lambda encoder, x: mb.chunked(encoder, x, chunk_size=4))
    for name, wanted in whole.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tiny"])
def test_checkpointing_keeps_gradients_and_saves_memory_without_reentry(kind: str, make: Callable[..., Towers]) -> None:
    plain, towers = make(kind), make(kind, grad_checkpointing=True)
    images, tokens = batch(towers)
    for encoder, before, x in [
        (towers.encode_image, plain.encode_image, towers.pixels(images)),
        (towers.encode_text, plain.encode_text, tokens),
    ]:
        assert "CheckpointFunctionBackward" not in set(nodes_of(encoder(x)))
        assert saved_bytes(encoder, x) < 0.7 * saved_bytes(before, x)
    wanted = step(plain)
    for name, got in step(towers).items():
        torch.testing.assert_close(got, wanted[name], rtol=1e-5, atol=1e-7)


def test_a_reentrant_checkpoint_would_show() -> None:
    """The test above must be able to fail."""
    layer, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    reentrant = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    assert "CheckpointFunctionBackward" in set(nodes_of(reentrant))


@pytest.mark.parametrize("kind", KINDS)
def test_a_locked_image_tower_stays_as_it_is(kind: str, make: Callable[..., Towers]) -> None:
    towers = make(kind, lock_image=True)
    whole = nn.ModuleList([towers]).train()
    assert towers.training
    locked = {id(x) for part in towers.image_parts() for x in part.parameters()}
    assert not any(module.training for part in towers.image_parts() for module in part.modules())
    assert all(x.requires_grad != (id(x) in locked) for x in whole.parameters())
    images, _ = batch(towers)
    assert not mb.chunked(towers.encode_image, towers.pixels(images), chunk_size=4).requires_grad
    assert set(step(towers)) == {name for name, x in towers.named_parameters() if x.requires_grad}
    towers.eval()
    assert not any(module.training for module in towers.modules())


def test_batch_statistics_of_a_locked_image_tower_do_not_move(make: Callable[..., Towers]) -> None:
    for locked in (True, False):
        towers = make("resnet", lock_image=locked)
        before = {name: buffer.clone() for name, buffer in towers.named_buffers()}
        towers.train()
        towers.encode_image(towers.pixels(batch(towers)[0]))
        moved = [name for name, buffer in towers.named_buffers() if not torch.equal(buffer, before[name])]
        assert bool(moved) != locked


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("kind", ["tiny", "small", "clip", "hf-siglip"])
def test_compiled_parts_give_the_same_features_and_names(kind: str, make: Callable[..., Towers]) -> None:
    towers = make(kind)
    names = list(towers.model.state_dict())
    images, tokens = batch(towers)
    pixels = towers.pixels(images)
    wanted = towers.encode_image(pixels), towers.encode_text(tokens)
    calls = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        calls.append(graph)
        return graph.forward

    assert len(towers.compiled_parts()) == 2
    for part, encoder, x, want in zip(
        towers.compiled_parts(), (towers.encode_image, towers.encode_text), (pixels, tokens), wanted, strict=True
    ):
        part.compile(backend=backend)
        calls.clear()
        torch.testing.assert_close(encoder(x), want)
        assert calls
    assert list(towers.model.state_dict()) == names


@pytest.mark.parametrize("kind", ["tiny", "small", "clip", "custom", "timm"])
def test_weights_depend_on_the_seed_alone(kind: str, models: Path) -> None:
    states = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        states.append(make_towers(Model(name_of(kind, models)), loss="clip").state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_travels_and_gives_rows_of_one_length(kind: str, make: Callable[..., Towers]) -> None:
    tokenizer = make(kind).tokenizer
    tokens = tokenizer(TEXTS)
    assert len(tokens) == len(TEXTS)
    assert not tokens.is_floating_point()
    assert tokenizer(["x"]).shape[1] == tokens.shape[1]
    assert torch.equal(pickle.loads(pickle.dumps(tokenizer))(TEXTS), tokens)


@pytest.mark.parametrize("kind", ["tiny", "clip", "hf-clip"])
def test_pixels_are_normalised_in_float32(kind: str, make: Callable[..., Towers]) -> None:
    towers = make(kind)
    images, _ = batch(towers)
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in normalisation(towers))
    wanted = (images.double() / 255 - mean) / std
    with torch.autocast("cpu", torch.bfloat16):
        got = towers.pixels(images)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match=r"pixels: images must be torch\.uint8, .* got torch\.float32"):
        towers.pixels(got)


def test_the_normalisation_is_sent_to_a_device_once_and_not_saved(
    make: Callable[..., Towers], monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = make("tiny")
    images, _ = batch(towers)
    names = list(towers.state_dict())
    wanted = towers.pixels(images)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(towers.pixels(images), wanted)
    assert list(towers.state_dict()) == names


# ---- scale and bias


@pytest.mark.parametrize("kind", ["tiny", "small", "clip", "custom"])
def test_towers_without_weights_start_as_the_papers_do(kind: str, make: Callable[..., Towers]) -> None:
    clip, siglip = make(kind), make(kind, loss="siglip")
    assert clip.logit_scale.exp().item() == pytest.approx(1 / 0.07)
    assert (clip.logit_bias is None) == (kind != "custom")  # whose config has one
    assert siglip.logit_scale.exp().item() == pytest.approx(10)
    assert siglip.logit_bias is not None
    assert siglip.logit_bias.item() == -10


@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_scale_is_taken(kind: str, make: Callable[..., Towers]) -> None:
    assert make(kind, init_logit_scale=33.0).logit_scale.exp().item() == pytest.approx(33)


def test_a_folder_keeps_its_scale(make: Callable[..., Towers]) -> None:
    assert make("hf-siglip", loss="siglip").logit_scale.exp().item() == pytest.approx(20)


def test_a_clip_folder_is_refused_for_siglip(make: Callable[..., Towers]) -> None:
    with pytest.raises(ValueError, match=r"--loss: must be clip or infonce, because .*hf-clip has no logit_bias"):
        make("hf-clip", loss="siglip")


@pytest.mark.parametrize("kind", ["custom", "hf-siglip"])
def test_a_bias_that_the_loss_does_not_use_waits_for_no_gradient(
    kind: str, make: Callable[..., Towers], caplog: pytest.LogCaptureFixture
) -> None:
    clip = make(kind)
    assert clip.logit_bias is not None
    assert clip.logit_bias.requires_grad
    step(clip)
    assert clip.logit_bias.grad is not None
    torch.testing.assert_close(clip.logit_bias.grad, torch.zeros_like(clip.logit_bias), rtol=0, atol=1e-6)
    with caplog.at_level(logging.INFO):
        frozen = make(kind, loss="infonce").logit_bias
    assert frozen is not None
    assert not frozen.requires_grad
    assert "--loss infonce has no bias: the logit_bias of" in caplog.text


def test_locking_random_weights_is_logged(
    make: Callable[..., Towers], models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("hf-clip", lock_image=True)
    assert "--lock-image" not in caplog.text
    make("small", lock_image=True)
    assert "--lock-image: the image tower of small has random weights" in caplog.text


# ---- small


def test_every_parameter_of_small_has_a_gradient_to_speak_of(make: Callable[..., Towers]) -> None:
    towers = make("small", loss="siglip")
    images, tokens = batch(towers)
    image, text = (
        normalize(x, dim=1) for x in (towers.encode_image(towers.pixels(images)), towers.encode_text(tokens))
    )
    assert towers.logit_bias is not None
    mb.siglip_loss(image, text, towers.logit_scale.exp(), logit_bias=towers.logit_bias).backward()
    for name, parameter in towers.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-6, name


def test_padding_reaches_no_feature_of_small(make: Callable[..., Towers]) -> None:
    """Neither by attention nor by the mean: what stands for padding may be anything."""
    towers = make("small")
    assert isinstance(towers, SmallTowers)
    tokens = towers.tokenizer(TEXTS)
    before = towers.encode_text(tokens)
    with torch.no_grad():
        towers.text.bytes.weight[0] = 100.0
    torch.testing.assert_close(towers.encode_text(tokens), before)
    shortened = towers.tokenizer(["naïve"])[0] != 0
    assert shortened.sum() == len("naïve".encode()) + 2


def test_small_takes_images_of_other_sizes(make: Callable[..., Towers]) -> None:
    towers = make("small", force_image_size=24)
    assert towers.encode_image(towers.pixels(batch(towers)[0])).shape == (6, 256)
    for size in (0, -8, 20):
        with pytest.raises(ValueError, match=f"--force-image-size: must be a multiple of 8, .* got {size}"):
            make("small", force_image_size=size)


def test_built_in_towers_need_no_other_package() -> None:
    code = "from megabatch.train.towers import *\nfrom megabatch.train.config import Model\n"
    code += "import megabatch.train.towers.open_clip\nmake_towers(Model('small'), loss='clip')"
    assert loaded_by(code, HEAVY) == []


# ---- open_clip


@pytest.mark.parametrize("kind", ["clip", "custom", "timm"])
def test_features_and_names_are_those_of_open_clip(kind: str, make: Callable[..., Towers]) -> None:
    import open_clip

    towers = make(kind)
    torch.manual_seed(1)
    theirs, _, _ = open_clip.create_model_and_transforms(f"megabatch-{kind}")
    assert list(towers.model.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(towers.model.state_dict())
    images, tokens = batch(towers)
    assert torch.equal(tokens, open_clip.get_tokenizer(f"megabatch-{kind}")(TEXTS))
    pixels = towers.pixels(images)
    assert torch.equal(towers.encode_image(pixels), theirs.encode_image(pixels))
    assert torch.equal(towers.encode_text(tokens), theirs.encode_text(tokens))
    assert normalisation(towers) == (theirs.visual.image_mean, theirs.visual.image_std)
    assert towers.preprocessing.resize_mode == "shortest"
    assert towers.logit_scale is towers.model.logit_scale


def test_weights_of_a_file_are_loaded_and_keep_their_scale(make: Callable[..., Towers], tmp_path: Path) -> None:
    before = make("clip", init_logit_scale=50.0)
    file = tmp_path / "weights.pt"
    torch.save(before.model.state_dict(), file)
    torch.manual_seed(9)
    after = make("clip", pretrained=str(file))
    images, _ = batch(after)
    assert torch.equal(after.encode_image(after.pixels(images)), before.encode_image(before.pixels(images)))
    assert after.logit_scale.exp().item() == pytest.approx(50)
    assert make("clip", pretrained=str(file), init_logit_scale=7.0).logit_scale.exp().item() == pytest.approx(7)


def test_weights_without_a_bias_get_one_for_siglip(
    make: Callable[..., Towers], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(make("clip").model.state_dict(), tmp_path / "weights.pt")
    bias = make("clip", loss="siglip", pretrained=str(tmp_path / "weights.pt")).logit_bias
    assert bias is not None
    assert bias.item() == -10
    assert "the weights have no logit_bias: it starts at -10.0" in caplog.text


def test_open_clip_takes_images_of_other_sizes(make: Callable[..., Towers]) -> None:
    towers = make("clip", force_image_size=32)
    assert towers.preprocessing.size == 32
    assert towers.encode_image(towers.pixels(batch(towers)[0])).shape == (6, 8)
    with pytest.raises(ValueError, match=r"--force-image-size: must be a multiple of 8, the patch of .*, got 20"):
        make("clip", force_image_size=20)
    with pytest.raises(ValueError, match=r"--force-image-size: must be a size that .*resnet' takes, not 16, got "):
        make("resnet", force_image_size=16)
    with pytest.raises(
        ValueError, match="'megabatch-timm' must be one that open_clip makes for images of side 8, got "
    ):
        make("timm", force_image_size=8)


def test_an_unknown_model_names_the_nearest() -> None:
    for name, near in [("ViT-B32", "ViT-B-32"), ("smal", "small"), ("megabatch-clp", "megabatch-clip")]:
        with pytest.raises(ValueError, match=f"--model: must be tiny, small, .* got '{name}'. The nearest: .*{near}"):
            make_towers(Model(name), loss="clip")
    with pytest.raises(ValueError, match=r"got '/nowhere/at/all'\. open_clip\.list_models\(\) names its own"):
        make_towers(Model("/nowhere/at/all"), loss="clip")


def test_a_folder_of_open_clip_is_taken_by_its_prefix(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"local-dir: must be a folder with an open_clip_config.json, got '{tmp_path}'"
    ):
        make_towers(Model(f"local-dir:{tmp_path}"), loss="clip")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": OPEN_CLIP["clip"]}))
    towers = make_towers(Model(f"local-dir:{tmp_path}"), loss="siglip")
    assert towers.encode_text(towers.tokenizer(TEXTS)).shape == (6, 8)


def test_models_that_are_more_than_two_towers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'coca_ViT-B-32', which is a CoCa"):
        make_towers(Model("coca_ViT-B-32"), loss="clip")
    coca = {**OPEN_CLIP["custom"], "multimodal_cfg": {"context_length": 9, "vocab_size": 49408, **TOWER}}
    coca["vision_cfg"] = {**coca["vision_cfg"], "attentional_pool": True, "output_tokens": True}
    coca["text_cfg"] = {**coca["text_cfg"], "embed_cls": True, "output_tokens": True}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": coca}))
    with pytest.raises(ValueError, match="which is a CoCa"):
        make_towers(Model(f"local-dir:{tmp_path}"), loss="clip")


def test_a_tokenizer_of_the_hub_that_cannot_be_had_is_named(make: Callable[..., Towers]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer of 'megabatch-hub' must be at hand, .*Hugging Face hub"):
        make("hub")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(make: Callable[..., Towers]) -> None:
    with pytest.raises(ValueError, match="must know the 49408 tokens of its tokenizer, got vocab_size 100"):
        make("few-tokens")


def test_checkpointing_that_would_do_nothing_is_refused(make: Callable[..., Towers]) -> None:
    with pytest.raises(ValueError, match=r"--grad-checkpointing: must be left out, .* ModifiedResNet"):
        make("resnet", grad_checkpointing=True)
    with pytest.raises(ValueError, match="tiny"):
        make("tiny", grad_checkpointing=True)


def test_open_clip_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'megabatch[open_clip]'")):
        OpenClipTowers("ViT-B-32", 10.0)


@pytest.mark.parametrize(
    "failure",
    [
        "RuntimeError: operator torchvision::nms does not exist",
        "OSError: libcudart.so: cannot open shared object file",
        "ModuleNotFoundError: No module named 'torchvision._C'",
    ],
)
def test_what_is_installed_but_broken_is_reported_as_it_is(failure: str, tmp_path: Path) -> None:
    kind, text = failure.split(": ", 1)
    broken = "import torchvision._C" if "_C" in text else f"raise {kind}({text!r})"
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(broken)
    code = "from megabatch.train.towers.open_clip import OpenClipTowers; OpenClipTowers('ViT-B-32', 10.0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)
    message = done.stderr.splitlines()[-1]
    assert f"--model: open_clip must be importable, got {failure}. It is installed: mend what fails in it" in message
    assert "pip install" not in message


# ---- Hugging Face


@pytest.mark.parametrize("kind", ["hf-clip", "hf-siglip"])
def test_features_are_those_of_transformers(kind: str, make: Callable[..., Towers], models: Path) -> None:
    """With its tokenizer as its processors call it: CLIP with a mask, SigLIP without."""
    from transformers import AutoModel, AutoTokenizer

    towers = make(kind)
    theirs = AutoModel.from_pretrained(models / kind)
    assert list(towers.model.state_dict()) == list(theirs.state_dict())
    given = AutoTokenizer.from_pretrained(models / kind)(
        TEXTS, padding="max_length", max_length=12, truncation=True, return_tensors="pt"
    )
    if kind == "hf-siglip":
        del given["attention_mask"]
    images, tokens = batch(towers)
    assert torch.equal(tokens, given["input_ids"])
    pixels = towers.pixels(images)
    both = theirs(pixel_values=pixels, **given)
    image, text = towers.encode_image(pixels), towers.encode_text(tokens)
    torch.testing.assert_close(normalize(image, dim=1), both.image_embeds)
    torch.testing.assert_close(normalize(text, dim=1), both.text_embeds)
    assert normalisation(towers) == ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    assert towers.model.training


def test_half_precision_weights_are_trained_in_float32(folder: Callable[[str], Path]) -> None:
    from transformers import CLIPModel

    place = folder("hf-clip")
    CLIPModel.from_pretrained(place).bfloat16().save_pretrained(place)
    towers = HuggingFaceTowers(str(place))
    assert {x.dtype for x in towers.parameters()} == {torch.float32}


def test_a_folder_without_the_files_of_a_tokenizer_is_refused(folder: Callable[[str], Path]) -> None:
    place = folder("hf-clip")
    (place / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"most of the 514 tokens of the model, got 2\. .* missing tokenizer\.json"):
        HuggingFaceTowers(str(place))


def test_a_tokenizer_that_lost_its_vocabulary_is_refused(folder: Callable[[str], Path]) -> None:
    place = folder("hf-clip")
    from transformers import CLIPTokenizer

    CLIPTokenizer().save_pretrained(place)
    with pytest.raises(ValueError, match=r"must know most of the 514 tokens of the model, got [23]"):
        HuggingFaceTowers(str(place))


def edit(place: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((place / name).read_text())
    change(content)
    (place / name).write_text(json.dumps(content))


def test_a_token_that_the_model_does_not_know_is_refused(folder: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    place = folder("hf-siglip")
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.add_tokens(["東"])
    tokenizer.save_pretrained(place)
    towers = HuggingFaceTowers(str(place))
    towers.tokenizer(["west"])
    with pytest.raises(ValueError, match="tokens must be below the model's vocab_size 514, got 514"):
        towers.tokenizer(["東"])


@pytest.mark.parametrize(("end", "fits"), [(513, True), (2, True), (512, False), (7, False)])
def test_the_end_mark_of_clip_must_be_where_the_model_looks(
    end: int, fits: bool, folder: Callable[[str], Path]
) -> None:
    """By the number 2 old configs mean the highest token, which it is here."""
    place = folder("hf-clip")
    edit(place, "config.json", lambda config: config["text_config"].update(eos_token_id=end))
    if fits:
        assert HuggingFaceTowers(str(place)).tokenizer(["a"])[0, 2] == 513
    else:
        with pytest.raises(ValueError, match=f"eos_token_id, got {end} there and 513 from the tokenizer"):
            HuggingFaceTowers(str(place))


def test_weights_that_are_missing_are_refused(folder: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file, save_file

    place = folder("hf-clip")
    weights = load_file(place / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1, among them visual_projection\.weight"):
        HuggingFaceTowers(str(place))
    (place / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must be one that transformers loads, got "):
        HuggingFaceTowers(str(place))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "siglip2"}, "got siglip2."),
        ({"model_type": "bert"}, "got bert."),
    ],
)
def test_models_of_other_kinds_are_refused(change: dict[str, Any], message: str, folder: Callable[[str], Path]) -> None:
    place = folder("hf-clip")
    edit(place, "config.json", lambda config: config.update(change))
    with pytest.raises(ValueError, match=message):
        HuggingFaceTowers(str(place))


def test_folders_that_are_none_of_hugging_faces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"with model_type clip or siglip, got None\."):
        HuggingFaceTowers(str(tmp_path))
    (tmp_path / "open_clip_config.json").write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"It is open_clip's: pass --model local-dir:{tmp_path}")):
        HuggingFaceTowers(str(tmp_path))
    for content, message in [("{", "must be a JSON object, got JSON"), ("[]", "must be a JSON object, got Type")]:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            HuggingFaceTowers(str(tmp_path))


def test_pixels_are_normalised_by_the_folder(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    place = folder("hf-siglip")
    file = place / "preprocessor_config.json"
    edit(place, file.name, lambda given: given.update(do_normalize=False))
    towers = HuggingFaceTowers(str(place))
    assert normalisation(towers) == ((0.0,) * 3, (1.0,) * 3)
    edit(place, file.name, lambda given: given.update(do_normalize=True, image_mean=[0.5]))
    with pytest.raises(ValueError, match="must have 3 numbers, as many as channels, got 1 and 3"):
        HuggingFaceTowers(str(place))
    edit(place, file.name, lambda given: given.update(rescale_factor=1 / 127.5))
    with pytest.raises(ValueError, match=r"rescale_factor must be 1/255, got 0\.0078"):
        HuggingFaceTowers(str(place))

    file.rename(place / "processor_config.json")
    edit(
        place,
        "processor_config.json",
        lambda given: given.update(image_processor={"image_mean": [0.1, 0.2, 0.3], **SIXTEEN["hf-siglip"]}),
    )
    towers = HuggingFaceTowers(str(place))
    assert normalisation(towers) == ((0.1, 0.2, 0.3), (0.5,) * 3)
    assert "preprocessor_config" not in caplog.text
    (place / "processor_config.json").unlink()
    towers = HuggingFaceTowers(str(place))
    assert normalisation(towers) == ((0.5,) * 3, (0.5,) * 3)
    assert "has no preprocessor_config.json: images are prepared as usual for siglip" in caplog.text


# ---- what does not go together


@pytest.mark.parametrize("kind", ["tiny", "small", "hf-clip"])
def test_weights_of_open_clip_are_refused_elsewhere(kind: str, make: Callable[..., Towers]) -> None:
    with pytest.raises(ValueError, match=f"--pretrained: must be left out with --model .*{kind}, .* got 'openai'"):
        make(kind, pretrained="openai")


def test_weights_beside_a_model_exclude_others() -> None:
    with pytest.raises(ValueError, match="--pretrained: must be left out with --model local-dir:x"):
        make_towers(Model("local-dir:x", pretrained="openai"), loss="clip")


@pytest.mark.parametrize("kind", ["tiny", "hf-clip", "hf-siglip"])
def test_an_image_size_that_cannot_be_is_refused(kind: str, make: Callable[..., Towers]) -> None:
    own = make(kind).preprocessing.size
    assert make(kind, force_image_size=own).preprocessing.size == own
    with pytest.raises(ValueError, match=f"--force-image-size: must be {own} for --model .* got 40"):
        make(kind, force_image_size=40)


# ---- in the trainer


@pytest.mark.parametrize(("kind", "loss"), [("hf-clip", "clip"), ("hf-siglip", "siglip"), ("hf-siglip", "infonce")])
def test_a_folder_of_hugging_face_trains_and_goes_on(models: Path, tmp_path: Path, kind: str, loss: str) -> None:
    table = write_shapes(tmp_path / "shapes")
    flags = ["--model", str(models / kind), "--loss", loss, "--train-data", str(table), "--global-batch-size", "32"]
    flags += ["--chunk-size", "16", "--workers", "0", "--lr", "1e-3", "--warmup", "0", "--lr-scheduler", "const"]
    whole = train(tmp_path, *flags, "--steps", "4", name="whole")
    assert losses(whole)[-1] < losses(whole)[0]
    train(tmp_path, *flags, "--steps", "2", name="parts")
    assert losses(train(tmp_path, "--resume", "latest", "--steps", "4", name="parts")) == losses(whole)
