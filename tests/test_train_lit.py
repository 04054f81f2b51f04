"""LiT: features of a locked image tower come from disk, and change nothing."""

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from megabatch.train.config import Model
from megabatch.train.feature_cache import FeatureCache
from megabatch.train.towers import make_towers
from megabatch.train.towers.tiny import TinyTowers

from .training import draw_shape, losses, train, write_shapes

# Three passes, the last step of each of which takes rows of the next; chunks that a step does not fill.
FLAGS = ["--global-batch-size", "40", "--chunk-size", "16", "--workers", "0", "--steps", "8", "--lr", "5e-3"]
FLAGS += ["--lock-image", "--crop-scale", "1", "--log-every-n-steps", "100"]


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    return str(write_shapes(tmp_path / "shapes"))


def state_of(run: Path) -> dict[str, torch.Tensor]:
    last = max((run / "checkpoints").glob("step_*.pt"))
    state: dict[str, torch.Tensor] = torch.load(last, weights_only=True)["state_dict"]
    return state


SMALL = ["--model", "small", "--force-image-size", "32", "--global-batch-size", "20", "--steps", "2"]


@pytest.mark.parametrize("flags", [[], ["--workers", "2"], ["--precision", "amp_bf16"], SMALL], ids=str)
def test_a_cache_changes_no_bit(shapes: str, tmp_path: Path, flags: list[str]) -> None:
    words = ["--train-data", shapes, *FLAGS, *flags]
    plain = train(tmp_path, *words, name="plain")
    filled = train(tmp_path, *words, "--feature-cache", str(tmp_path / "cache"), name="filled")
    found = train(tmp_path, *words, "--feature-cache", str(tmp_path / "cache"), name="found")
    assert losses(filled) == losses(plain)
    assert losses(found) == losses(plain)
    expected = state_of(plain)
    for run in (filled, found):
        assert all(value.equal(expected[name]) for name, value in state_of(run).items())


def test_what_is_in_the_cache_is_neither_decoded_nor_encoded(
    shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--train-data", shapes, *FLAGS, "--feature-cache", str(tmp_path / "cache")]
    first = train(tmp_path, *words, name="first")
    encoded: list[int] = []

    def decode(*_: object) -> Image.Image:
        raise AssertionError("decoded")

    monkeypatch.setattr("megabatch.train.data.prepare.decode", decode)
    monkeypatch.setattr(
        "megabatch.train.encoding.Encoder._encode_images", lambda self, images: encoded.append(len(images))
    )
    assert losses(train(tmp_path, *words, name="second")) == losses(first)
    assert not encoded


def test_a_changed_image_is_another_image(shapes: str, tmp_path: Path) -> None:
    words = ["--train-data", shapes, *FLAGS]
    cache = ["--feature-cache", str(tmp_path / "cache")]
    before = losses(train(tmp_path, *words, *cache, name="before"))
    for path in Path(shapes).parent.glob("grey-*.png"):
        draw_shape("circle", "black", "corner").save(path)
    changed = losses(train(tmp_path, *words, *cache, name="changed"))
    assert changed == losses(train(tmp_path, *words, name="plain")) != before


def test_other_weights_preprocessing_or_precision_have_other_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    towers = make_towers(Model(lock_image=True), loss="clip")
    folders = {FeatureCache.of(tmp_path, towers, "fp32").folder, FeatureCache.of(tmp_path, towers, "amp_bf16").folder}
    towers.logit_scale.data.add_(1)  # is no part of the image tower
    assert FeatureCache.of(tmp_path, towers, "fp32").folder in folders
    assert isinstance(towers, TinyTowers)
    next(iter(towers.image.parameters())).data.flatten()[0].add_(1e-6)
    folders.add(FeatureCache.of(tmp_path, towers, "fp32").folder)
    object.__setattr__(towers.preprocessing, "interpolation", "bilinear")
    folders.add(FeatureCache.of(tmp_path, towers, "fp32").folder)
    assert len(folders) == 4


def test_features_are_found_by_other_processes_once_they_are_written(tmp_path: Path) -> None:
    cache, other = FeatureCache(tmp_path / "f"), pickle.loads(pickle.dumps(FeatureCache(tmp_path / "f")))
    keys = [FeatureCache.key(str(number), False) for number in range(9)]
    assert len(set(keys)) == 9
    assert FeatureCache.key("1", True) != keys[1]
    features = torch.randn(9, 4).bfloat16()
    for part in (slice(0, 4), slice(4, 9)):
        cache.put(torch.tensor(keys[part]), features[part])
        assert all(other.get(key) is None for key in keys[part])
        cache.flush()
        assert all(other.get(key).equal(row) for key, row in zip(keys[part], features[part], strict=True))
    assert other.get((keys[3][0], 5)) is None
    assert other.get(FeatureCache.key("0", False)).equal(features[0])
    assert len(list((tmp_path / "f").iterdir())) == 2


@pytest.mark.parametrize("flags", [["--crop-scale", "0.9"], ["--no-lock-image"]], ids=str)
def test_features_that_are_new_each_time_are_not_cached(
    shapes: str, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, "--train-data", shapes, *FLAGS, "--feature-cache", str(tmp_path / "c"), *flags)
    assert "--feature-cache must come with --lock-image and --crop-scale 1" in capsys.readouterr().err
