"""Pixels are those that open_clip and transformers make of the same file, to the bit, and stay so in checkpoints."""

import dataclasses
import io
import json
import types
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from megabatch.train import checkpoint, loading
from megabatch.train.config import Model
from megabatch.train.data.images import decode
from megabatch.train.data.prepare import Prepare
from megabatch.train.data.source import Sample
from megabatch.train.preprocessing import Preprocessing, random_box
from megabatch.train.towers import hugging_face, make_towers
from megabatch.train.towers import open_clip as open_clip_towers
from megabatch.train.towers.tiny import TinyTowers
from tools import pixels as tool

from .shims import import_torchvision
from .test_train_data import Listed, tokenize
from .training import train, write_shapes

import_torchvision()


def files() -> dict[str, bytes]:
    pytest.importorskip("sklearn.datasets")
    return tool.files()


def pixels(preprocessing: Preprocessing, data: bytes, *, rgb_first: bool = False) -> Tensor:
    """On the way that samples go in training and evaluation, to the floats that a tower gets."""
    prepare = Prepare(tokenize, preprocessing, 1.0, 0, "caption", train=True)
    piece = prepare(Listed([Sample("x", "x", data, rgb_first)]), [0], [0])
    assert not piece.bad
    towers = TinyTowers()
    towers.preprocessing = preprocessing
    (image,) = towers.pixels(piece.first)
    return image


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of transparency that their code drops
        yield


# ---- open_clip


def preprocessings_of_open_clip() -> dict[str, dict[str, Any]]:
    """Those of its tags that differ, by the first tag that has each, and what no tag has."""
    import open_clip

    fields = {each.name for each in dataclasses.fields(open_clip.transform.PreprocessCfg)}
    found: dict[str, dict[str, Any]] = {}
    for model, tag in open_clip.list_pretrained():
        options = {k: v for k, v in open_clip.get_pretrained_cfg(model, tag).items() if k in fields and v is not None}
        if options not in found.values():
            found[f"{model}, {tag}"] = options
    for fill in (0, 7):
        found[f"longest, filled with {fill}"] = {"resize_mode": "longest", "fill_color": fill, "size": 225}
    return found


@pytest.mark.parametrize("rgb_first", [False, True], ids=["csv", "tar"])
@pytest.mark.parametrize("name", preprocessings_of_open_clip())
def test_pixels_are_those_of_open_clip(name: str, rgb_first: bool) -> None:
    """Its CSV files are transformed as they are opened, its shards and class folders after `convert("RGB")`."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    config = PreprocessCfg(**preprocessings_of_open_clip()[name])
    transform = image_transform_v2(config, is_train=False)
    ours = open_clip_towers._preprocessing(asdict(config))
    for kind, data in files().items():
        image = Image.open(io.BytesIO(data))
        theirs = transform(image.convert("RGB") if rgb_first else image)
        assert pixels(ours, data, rgb_first=rgb_first).equal(theirs), kind


def test_all_that_open_clip_lists_is_among_them() -> None:
    """Eight, at the time of open_clip 3.3."""
    found = list(preprocessings_of_open_clip().values())
    assert len(found) >= 10
    assert {each.get("interpolation") for each in found} >= {"bicubic", "bilinear"}
    assert {each.get("resize_mode") for each in found} == {"shortest", "squash", "longest"}


def test_a_random_part_is_cut_and_resized_as_torchvision_does() -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resized_crop

    preprocessing = Preprocessing(64, (0.0,) * 3, (1.0,) * 3)
    for kind, data in files().items():
        image = decode(data)
        left, top, right, bottom = random_box(image.size, 0.9, Random(3))
        theirs = resized_crop(image, top, left, bottom - top, right - left, [64, 64], InterpolationMode.BICUBIC)
        expected = torch.frombuffer(bytearray(theirs.convert("RGB").tobytes()), dtype=torch.uint8).view(64, 64, 3)
        ours = preprocessing(image, crop_scale=0.9, random=Random(3))
        assert ours.permute(1, 2, 0).equal(expected), kind


# ---- transformers

HUGGING_FACE: dict[str, tuple[str, dict[str, Any], int]] = {
    "clip": ("clip", {}, 224),
    "bilinear": ("clip", {"resample": 2}, 224),
    "smaller crop": ("clip", {"size": {"shortest_edge": 256}}, 224),
    "numbers": ("clip", {"size": 256, "crop_size": 225, "resample": 1}, 225),
    "padded": ("clip", {"size": {"shortest_edge": 201}}, 224),
    "not resized": ("clip", {"do_resize": False}, 224),
    "not cropped": ("clip", {"size": {"height": 224, "width": 224}, "do_center_crop": False}, 224),
    "squashed and cropped": ("clip", {"size": {"height": 299, "width": 299}}, 224),
    "siglip": ("siglip", {}, 224),
    "siglip 384": ("siglip", {"size": {"height": 384, "width": 384}, "resample": 2, "do_convert_rgb": True}, 384),
}


def write_processor(folder: Path, kind: str, options: dict[str, Any]) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    processor = (CLIPImageProcessorPil if kind == "clip" else SiglipImageProcessorPil)(**options)
    processor.save_pretrained(folder)
    return processor


def vision(side: int) -> Any:
    return types.SimpleNamespace(num_channels=3, image_size=side)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, options, side = HUGGING_FACE[name]
    processor = write_processor(tmp_path, kind, options)
    ours = hugging_face._preprocessing(str(tmp_path), kind, vision(side))
    for file, data in files().items():
        (theirs,) = processor(Image.open(io.BytesIO(data)), return_tensors="pt")["pixel_values"]
        for rgb_first in (False, True):
            assert pixels(ours, data, rgb_first=rgb_first).equal(theirs), file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_center_crop": False}, "do_center_crop must be true where size is that of one edge, got false"),
        ({"crop_size": {"height": 200, "width": 200}}, "must be prepared to the model's 224 pixels, got .*200"),
        ({"crop_size": {"height": 224, "width": 200}}, "crop_size must be a square's height and width"),
        (
            {"size": {"longest_edge": 224}},
            "size must be a square's height and width, or .*, got .*longest",
        ),
        (
            {"image_processor_type": "ViTImageProcessor"},
            "must be CLIP's or SigLIP's .*, got ViTImageProcessor",
        ),
        ({"do_pad": True}, "must be CLIP's or SigLIP's and not pad"),
    ],
)
def test_a_processor_that_cannot_be_followed_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_processor(tmp_path, "clip", {})
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"--model: .*{message}.* in "):
        hugging_face._preprocessing(str(tmp_path), "clip", vision(224))


def test_pixels_differ_only_from_those_that_are_not_resized_by_pillow() -> None:
    """The table of the changelog. Cutting before resizing, which megabatch once did, would show in every row."""
    assert files()
    rows = tool.differences()
    for library, kind, _, ours in rows:
        assert ours < (1 if "torchvision" in library else 1e-4), (library, kind)  # of 255; rounding of floats
    for library in {row[0] for row in rows}:
        assert max(cut_first for each, _, cut_first, _ in rows if each == library) > 1


# ---- in checkpoints

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
OTHER = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "interpolation": "bilinear", "resize_mode": "squash"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose --pretrained tag has a preprocessing of its own, which open_clip knows by the tag alone."""
    import open_clip

    (tmp_path / "megabatch-pixels.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(tmp_path)
    weights = tmp_path / "weights.pt"
    torch.save(open_clip.create_model("megabatch-pixels").state_dict(), weights)
    tags = {"megabatch-pixels": {"ours": {"url": "", "quick_gelu": False, **OTHER}}}
    monkeypatch.setattr(open_clip.pretrained, "_PRETRAINED", open_clip.pretrained._PRETRAINED | tags)
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *_, **__: str(weights))
    flags = ["--model", "megabatch-pixels", "--pretrained", "ours", "--train-data", str(write_shapes(tmp_path / "s"))]
    flags += ["--val-data", str(tmp_path / "s" / "shapes.csv"), "--global-batch-size", "48", "--workers", "0"]
    return train(tmp_path, *flags, "--steps", "2", "--lr", "1e-3")


def test_a_checkpoint_knows_the_pixels_of_its_tag(run: Path) -> None:
    saved = loading.load_checkpoint(run)
    towers = loading.restored_towers(loading.config_of(*saved), *saved)
    expected = Preprocessing(32, **OTHER)
    assert towers.preprocessing == expected
    assert make_towers(Model("megabatch-pixels"), loss="clip").preprocessing != expected


def test_evaluation_of_a_checkpoint_gives_the_figures_of_its_training(run: Path, capsys: Any) -> None:
    from megabatch import cli

    from .training import evaluations

    (trained,) = evaluations(run)
    assert cli.main(["eval", "--checkpoint", str(run), "--json", str(run / "figures.json"), "--workers", "0"]) == 0
    figures = json.loads((run / "figures.json").read_text())
    assert figures["val/loss"] == pytest.approx(trained["val/loss"], abs=1e-6)


def test_a_run_that_goes_on_keeps_its_pixels(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its tag should say something else by now."""
    import open_clip

    open_clip.pretrained._PRETRAINED["megabatch-pixels"]["ours"]["mean"] = (0.1, 0.2, 0.3)
    train(run.parent, "--resume", "latest", "--steps", "3")
    state = checkpoint.load(run / "checkpoints" / "step_00000003.pt")
    assert Preprocessing(**state["megabatch"]["preprocessing"]) == Preprocessing(32, **OTHER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interpolation": "cubic"}, "interpolation must be one of nearest, .*, got 'cubic'"),
        ({"resize_mode": "crop"}, "resize_mode must be one of shortest, longest, squash, none, got 'crop'"),
        ({"std": (1.0,)}, "mean and std must have one number per channel, 1 or 3, got 3 and 1"),
    ],
)
def test_a_preprocessing_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"preprocessing: {message}"):
        replace(Preprocessing(8, (0.0,) * 3, (1.0,) * 3), **change)
