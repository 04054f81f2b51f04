"""The built-in icons: what is drawn, what is joined, and what is held out."""

import hashlib
import importlib.util
import pickle
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from megabatch.train.data import icons as module
from megabatch.train.data.icons import Icons, stem


@pytest.fixture(scope="module")
def train():
    return Icons(held_out=False)


@pytest.fixture(scope="module")
def held_out():
    return Icons(held_out=True)


def captions(icons):
    return [icons[index].text for index in range(len(icons))]


def pictures(icons):
    return [icons[index].image.tobytes() for index in range(len(icons))]


def names(icons):
    return [icons.name(index) for index in range(len(icons))]


def test_there_are_some_17_000_icons_of_which_over_1_000_are_held_out(train, held_out):
    assert 15_000 < len(train) < 17_000
    assert 1_000 < len(held_out) < 2_000


def test_a_sample_is_a_small_grey_picture_with_the_name_as_caption(train):
    index = names(train).index("materialdesignicons6/account-arrow-left-outline")
    sample = train[index]
    assert sample.text == "account arrow left outline"
    assert (sample.image.mode, sample.image.size) == ("L", (32, 32))
    assert sample.duplicate_key == train.name(index)
    assert not train.texts_only
    assert not train.has_negatives


def test_captions_are_words(train, held_out):
    for caption in captions(train) + captions(held_out):
        words = caption.split(" ")
        assert all(word.isalnum() for word in words), caption


def test_every_icon_shows_dark_on_light(train, held_out):
    for picture in pictures(train) + pictures(held_out):
        assert min(picture) < 128 < max(picture)


@pytest.mark.parametrize("variant", ["account outline", "account box", "account off", "account circle outline"])
def test_variants_have_one_stem(variant):
    assert stem(variant) == stem("account") == "account"


@pytest.mark.parametrize("caption", ["account plus", "light bulb", "box", "accounts"])
def test_other_icons_have_other_stems(caption):
    assert stem(caption) not in {stem("account"), stem("bulb"), ""}


def test_no_stem_is_on_both_sides(train, held_out):
    assert not {stem(caption) for caption in captions(train)} & {stem(caption) for caption in captions(held_out)}


def test_no_picture_is_there_twice(train, held_out):
    both = pictures(train) + pictures(held_out)
    assert len(set(both)) == len(both)


def test_nothing_trained_on_looks_the_same_as_what_is_held_out(train, held_out):
    first, second = (
        torch.frombuffer(bytearray().join(pictures(icons)), dtype=torch.uint8).view(len(icons), -1)
        for icons in (train, held_out)
    )
    first, second = (torch.nn.functional.normalize((255 - each).float(), dim=1) for each in (first, second))
    assert (first @ second.T).max() < 0.96


def test_a_caption_is_trained_on_twice_only_where_the_pictures_differ(train):
    under = {}
    for caption, picture in zip(captions(train), pictures(train), strict=True):
        under.setdefault(caption, []).append(255.0 - torch.frombuffer(bytearray(picture), dtype=torch.uint8))
    several = [torch.nn.functional.normalize(torch.stack(each), dim=1) for each in under.values() if len(each) > 1]
    assert len(several) > 1000
    assert max((each @ each.T).fill_diagonal_(0).max() for each in several) < 0.96


def test_held_out_captions_are_all_different(held_out):
    assert len(set(captions(held_out))) == len(held_out)


def test_the_first_held_out_ones_are_of_all_fonts_in_no_order(held_out):
    first = names(held_out)[:1000]
    share = sum(name.startswith("materialdesignicons6/") for name in first) / len(first)
    share_of_all = sum(name.startswith("materialdesignicons6/") for name in names(held_out)) / len(held_out)
    assert abs(share - share_of_all) < 0.05
    assert first != sorted(first)
    assert len({name.split("/")[0] for name in first[:100]}) >= 5


def digest(icons):
    return hashlib.sha256(repr((names(icons), captions(icons))).encode() + b"".join(pictures(icons))).hexdigest()


def test_another_process_with_other_threads_has_the_same_icons_in_the_same_order(train, held_out):
    program = (
        "import torch; torch.set_num_threads(2)\n"
        "from tests.test_train_icons import Icons, digest\n"
        "print(digest(Icons(False)), digest(Icons(True)))"
    )
    folder = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout.split() == [digest(train), digest(held_out)]


def test_icons_can_be_sent_to_other_processes(held_out):
    assert digest(pickle.loads(pickle.dumps(held_out))) == digest(held_out)


def test_one_shard_holds_all(train):
    assert train.counts.tolist() == [len(train)]


def test_qt_is_not_needed(train):
    assert "qtawesome" not in sys.modules


@pytest.fixture
def without_memory(monkeypatch):
    monkeypatch.setattr(module, "_both_sides", module._both_sides.__wrapped__)


@pytest.mark.usefixtures("without_memory")
def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"icons: qtawesome must .*pip install 'megabatch\[train\]'"):
        Icons(held_out=False)


@pytest.mark.usefixtures("without_memory")
def test_a_package_without_its_fonts_is_an_error(monkeypatch, tmp_path):
    spec = ModuleSpec("qtawesome", None)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match="one font materialdesignicons6, got 0"):
        Icons(held_out=False)
