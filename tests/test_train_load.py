"""`megabatch.load` and `megabatch export`: trained towers in Python, and in the libraries that they come from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

import megabatch
from megabatch import cli

from .test_train_towers import models  # noqa: F401
from .training import draw_shape, train, write_shapes

KINDS = ["tiny", "small", "megabatch-clip", "hf-clip", "hf-siglip"]
TEXTS = ["a grey cross", "a bright circle at the left"]
FLAGS = ["--global-batch-size", "16", "--chunk-size", "16", "--workers", "0", "--steps", "1", "--lr", "1e-2"]

Trained = Callable[[str], Path]


@pytest.fixture
def trained(models: Path, tmp_path: Path) -> Trained:  # noqa: F811
    """The folder of a run of a model."""

    def run(kind: str, *flags: str) -> Path:
        model = str(models / kind) if kind.startswith("hf-") else kind
        loss = ["--loss", "siglip"] if kind == "hf-siglip" else []
        shapes = write_shapes(tmp_path / "shapes")
        return train(tmp_path, "--model", model, *loss, "--train-data", str(shapes), *FLAGS, *flags)

    return run


def picture() -> Image.Image:
    """Not a square, and not grey."""
    image = Image.new("RGB", (50, 40), "teal")
    image.paste(draw_shape("cross", "grey", "middle"), (9, 3))
    return image


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_loaded_with_all_that_encodes_images_and_texts(kind: str, trained: Trained) -> None:
    run = trained(kind)
    towers = megabatch.load(run)
    assert not towers.training
    state = torch.load(run / "checkpoints" / "step_00000001.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[name]) for name, value in towers.model.state_dict().items())
    with torch.no_grad():
        images = towers.encode_image(towers.preprocess(picture())[None])
        texts = towers.encode_text(towers.tokenizer(TEXTS))
    assert images.shape[0] == 1
    assert texts.shape == (2, images.shape[1])
    again = megabatch.load(str(run / "checkpoints" / "step_00000001.pt"))
    assert torch.equal(again.encode_text(again.tokenizer(TEXTS)), texts)


def test_what_is_no_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"a file, or a run's folder with checkpoints, got .*nope, which is not there"):
        megabatch.load(tmp_path / "nope")
    with pytest.raises(ValueError, match=r"with checkpoints, got .*, which has none"):
        megabatch.load(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["eval", "--checkpoint", str(tmp_path / "nope"), "--val-data", "icons"])
    assert "a run's folder with checkpoints" in capsys.readouterr().err


def features(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    return normalize(images, dim=1), normalize(texts, dim=1)


@torch.no_grad()
def ours(run: Path) -> tuple[Tensor, Tensor]:
    towers = megabatch.load(run)
    return features(
        towers.encode_image(towers.preprocess(picture())[None]), towers.encode_text(towers.tokenizer(TEXTS))
    )


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_open_clip_loads_what_is_exported(trained: Trained, tmp_path: Path, loss: str) -> None:
    import open_clip

    run = trained("megabatch-clip", "--loss", loss, "--force-image-size", "24")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "open_clip_model.safetensors").is_file()
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")
    model.eval()
    assert preprocess(picture()).equal(megabatch.load(run).preprocess(picture()))
    with torch.no_grad():
        theirs = features(model.encode_image(preprocess(picture())[None]), model.encode_text(tokenizer(TEXTS)))
    for one, other in zip(ours(run), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert (model.logit_bias is None) == (loss == "clip")


@pytest.mark.parametrize("kind", ["hf-clip", "hf-siglip"])
def test_transformers_loads_what_is_exported(trained: Trained, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModel, AutoTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    run = trained(kind)
    out = tmp_path / "out"
    assert cli.main(["export", str(run), str(out)]) == 0
    assert (out / "model.safetensors").is_file()
    model = AutoModel.from_pretrained(out).eval()
    processor = (CLIPImageProcessorPil if kind == "hf-clip" else SiglipImageProcessorPil).from_pretrained(out)
    tokens = AutoTokenizer.from_pretrained(out)(
        TEXTS, padding="max_length", truncation=True, max_length=12, return_tensors="pt"
    )
    pixels = processor(picture(), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        images = model.get_image_features(pixel_values=pixels).pooler_output
        texts = model.get_text_features(input_ids=tokens["input_ids"]).pooler_output
    for one, other in zip(ours(run), features(images, texts), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    # And it is a --model again, with the same preprocessing.
    assert megabatch.load(trained_again(out, tmp_path)).preprocessing == megabatch.load(run).preprocessing


def trained_again(model: Path, tmp_path: Path) -> Path:
    shapes = str(tmp_path / "shapes" / "shapes.csv")
    loss = "siglip" if "siglip" in json.loads((model / "config.json").read_text())["model_type"] else "clip"
    return train(tmp_path, "--model", str(model), "--loss", loss, "--train-data", shapes, *FLAGS, name="again")


def test_export_writes_over_nothing_and_refuses_what_no_library_has(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("tiny")
    for folder, message in ((run, "folder must be new or empty"), (tmp_path / "out", "got one of ours")):
        with pytest.raises(SystemExit):
            cli.main(["export", str(run), str(folder)])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_moving_average_is_what_is_evaluated_loaded_and_resumed(trained: Trained) -> None:
    run = trained("tiny", "--ema-decay", "0.5", "--steps", "3", "--save-steps", "1", "--keep", "0")
    states = [torch.load(run / "checkpoints" / f"step_{step:08}.pt", weights_only=True) for step in (1, 2, 3)]
    expected = states[0]["state_dict"]
    for state in states:
        expected = {name: 0.5 * (value + state["state_dict"][name]) for name, value in expected.items()}
        for name, value in expected.items():
            torch.testing.assert_close(state["state_dict_ema"][name], value, rtol=1e-6, atol=1e-7)
    assert torch.equal(
        megabatch.load(run).model.state_dict()["logit_scale"], states[2]["state_dict_ema"]["logit_scale"]
    )
    (run / "checkpoints" / "step_00000003.pt").unlink()
    again = train(run.parent, "--resume", "latest")
    resumed = torch.load(again / "checkpoints" / "step_00000003.pt", weights_only=True)
    assert all(value.equal(resumed["state_dict_ema"][name]) for name, value in states[2]["state_dict_ema"].items())
