"""Where samples come from and how they become tensors: real files, hostile ones, ranks and workers."""

import contextlib
import errno
import faulthandler
import io
import json
import multiprocessing
import os
import pickle
import queue
import re
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from megabatch.train.config import Data
from megabatch.train.data import loader, open_source, storage, workers
from megabatch.train.data.images import NOT_AN_IMAGE, decode, read_file
from megabatch.train.data.labelled import ImageFolder, read_templates
from megabatch.train.data.loader import RankBatch, Requests, batches
from megabatch.train.data.order import Order
from megabatch.train.data.prepare import Prepare
from megabatch.train.data.source import BadSample, Lost, Sample, Source, Strings
from megabatch.train.data.tables import Table
from megabatch.train.preprocessing import Preprocessing, random_box, to_tensor

from .ranks import PATIENCE, LoggedLines


def picture(number: int, size: tuple[int, int] = (24, 16), mode: str = "RGB") -> Image.Image:
    """A picture with something in every corner."""
    random = Random(number)
    image = Image.new("RGB", size)
    for x in range(0, size[0], 4):
        for y in range(0, size[1], 4):
            image.paste((random.randrange(256), random.randrange(256), random.randrange(256)), (x, y, x + 4, y + 4))
    return image.convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A small file that says it is large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


EXE = b"MZ\x90\x00" + bytes(200) + b"PE\0\0"


def write_tar(path: Path, files: dict[str, bytes] | Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items() if isinstance(files, dict) else files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def shard_of(path: Path, numbers: range) -> Path:
    files = [
        file
        for number in numbers
        for file in (
            (f"{number:05}.jpg", encoded(picture(number), "JPEG")),
            (f"{number:05}.txt", f"caption {number}".encode()),
        )
    ]
    return write_tar(path, files)


def tokenize(texts: Sequence[str]) -> Tensor:
    """Bytes, padded to 16."""
    if not texts:
        raise IndexError("a tokenizer that cannot do nothing")
    return torch.tensor([list(text.encode()[:16].ljust(16, b"\0")) for text in texts], dtype=torch.int32)


def texts_of(tokens: Tensor) -> list[str]:
    return [bytes(row).rstrip(b"\0").decode() for row in tokens.tolist()]


def captions_of(batch: RankBatch) -> list[str]:
    return texts_of(batch.second[: len(batch.ids)])


def make_prepare(**changes: Any) -> Prepare:
    options: dict[str, Any] = {"preprocessing": SMALL, "crop_scale": 0.5, "seed": 0}
    options |= {"duplicates": "caption", "train": True} | changes
    return Prepare(tokenize, **options)


SMALL = Preprocessing(8, mean=(0.0,) * 3, std=(1.0,) * 3)


class Listed(Source):
    """A source of what is given."""

    def __init__(self, samples: Sequence[Sample | BadSample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        if isinstance(sample, BadSample):
            raise sample
        return sample

    def name(self, index: int) -> str:
        return f"sample {index}"

    def fingerprint(self) -> list[str]:
        return []


class Pictures(Listed):
    """Pictures with captions, some of them bad."""

    def __init__(self, count: int, bad: Sequence[int] = ()) -> None:
        super().__init__(
            [
                BadSample("broken image") if i in bad else Sample(f"caption {i}", str(i), picture(i, (16, 12)))
                for i in range(count)
            ]
        )


def requests_for(source: Source, order: Order | None = None, **changes: Any) -> Requests:
    batch_size = changes.pop("batch_size", 8)
    order = order or Order(source.counts, seed=0, batch_size=batch_size, block=source.block)
    return Requests(order, **{"last_step": 3, **changes})


def load(
    source: Source, prepare: Prepare | None = None, order: Order | None = None, *, workers: int = 0, **changes: Any
) -> list[RankBatch]:
    requests = requests_for(source, order, **changes)
    return list(batches(source, prepare or make_prepare(), requests, workers=workers))


# Images


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_the_usual_formats_are_decoded(format: str) -> None:
    image = decode(encoded(picture(1), format))
    assert (image.mode, image.size) == ("P" if format == "GIF" else "RGB", (24, 16))
    error = (to_tensor(image, 3).float() - to_tensor(picture(1), 3).float()).abs().mean()
    assert error < (40 if format in ("JPEG", "WEBP", "GIF") else 1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"])
def test_images_keep_the_mode_of_their_file_until_they_are_pixels(mode: str) -> None:
    image = picture(1).convert("L").convert(mode) if mode in ("LA", "I;16") else picture(1).convert(mode)
    image = decode(encoded(image, "JPEG" if mode == "CMYK" else "PNG"))
    assert image.mode == mode
    assert to_tensor(image, 1).shape == (1, 16, 24)
    assert to_tensor(image, 3).shape == (3, 16, 24)


@pytest.mark.parametrize(("name", "reason"), [("x" * 300 + ".png", "file name too long"), ("a\0b.png", "not a path")])
def test_a_name_that_no_file_can_have_is_a_bad_sample(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "0.png").write_bytes(encoded(picture(0)))
    table = tmp_path / "t.csv"
    table.write_text(f"filepath\ttitle\n0.png\ta\n{name}\tb\n")
    source = open_source(str(table))
    assert source[0].text == "a"
    with pytest.raises(BadSample, match=reason):
        source[1]


def test_a_long_caption_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(encoded(picture(0)))
    (tmp_path / "t.csv").write_text(f"filepath\ttitle\n0.png\t{'long ' * 40_000}\n")
    source = open_source(str(tmp_path / "t.csv"))
    assert len(source[0].text) == 200_000


def test_what_pillow_says_of_dropped_transparency_is_not_heard() -> None:
    data = encoded(picture(1).quantize(8), transparency=bytes(range(8)))
    expected = SMALL(picture(1).quantize(8))
    assert make_prepare(train=False)(Listed([Sample("x", "x", data)]), [0], [0]).first[0].equal(expected)


def test_an_image_too_long_to_be_resized_is_a_bad_sample() -> None:
    """A file of some hundred bytes, which would become gigabytes."""
    piece = make_prepare(crop_scale=1.0)(Listed([Sample("x", "x", encoded(Image.new("1", (10**7, 1))))]), [0], [0])
    assert piece.bad == [("sample 0", "image of mode 1, 10000000 x 1, cannot be resized")]


HOSTILE = {
    "empty": (b"", NOT_AN_IMAGE),
    "exe": (EXE, NOT_AN_IMAGE),
    "html": (b"<html>404</html>", NOT_AN_IMAGE),
    "tiff": (encoded(picture(1), "TIFF"), NOT_AN_IMAGE),
    "truncated jpeg": (encoded(picture(1, (200, 200)), "JPEG")[:-1000], "truncated image"),
    "truncated png": (encoded(picture(1, (200, 200)))[:-1000], "truncated image"),
    "truncated webp": (encoded(picture(1, (200, 200)), "WEBP")[:-500], None),
    "truncated gif": (encoded(picture(1, (200, 200)), "GIF")[:-1000], None),
    "truncated bmp": (encoded(picture(1, (200, 200)), "BMP")[:-1000], None),
    "header of jpeg": (encoded(picture(1), "JPEG")[:20], None),
    "bomb": (png_of_size(100_000, 100_000), "decompression bomb"),
    "bomb that Pillow only warns of": (png_of_size(10_000, 10_000), "decompression bomb"),
    "png with too little in it": (png_of_size(500, 500), "truncated image"),
    "png without pixels": (png_of_size(0, 5), None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_whole_image_is_a_bad_sample(case: str) -> None:
    data, reason = HOSTILE[case]
    with pytest.raises(BadSample, match=re.escape(reason or "image")):
        decode(data)


def test_a_bomb_is_refused_before_its_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(BadSample, match="bomb"):
        decode(png_of_size(10_000, 10_000))


def test_damaged_bytes_are_decoded_or_refused_but_nothing_else() -> None:
    random = Random(0)
    for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        data = encoded(picture(2, (40, 40)), format)
        for _ in range(60):
            damaged = bytearray(data)
            for _ in range(random.randrange(1, 8)):
                damaged[random.randrange(len(data))] = random.randrange(256)
            with contextlib.suppress(BadSample):
                assert decode(bytes(damaged)).size


def test_decoding_leaves_no_warnings_behind_and_no_filters() -> None:
    filters = list(warnings.filters)
    decode(encoded(picture(1)))
    assert warnings.filters == filters


def halves(size: tuple[int, int]) -> Image.Image:
    """Black, with a white square in the middle as high as the image."""
    image = Image.new("L", size)
    side = min(size)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    ImageDraw.Draw(image).rectangle((left, top, left + side - 1, top + side - 1), fill=255)
    return image


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (32, 32), (96, 32)])
def test_the_centre_crop_is_the_square_in_the_middle(size: tuple[int, int]) -> None:
    crop = Preprocessing(16, (0.0,), (1.0,))(halves(size))
    assert crop.shape == (1, 16, 16)
    assert crop[:, 2:-2, 2:-2].min() == 255


def test_random_crops_keep_the_share_of_the_area_they_must() -> None:
    random = Random(0)
    boxes = [random_box((90, 80), 0.5, random) for _ in range(300)]
    shares = [(right - left) * (bottom - top) / (90 * 80) for left, top, right, bottom in boxes]
    ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
    assert min(shares) > 0.49
    assert min(shares) < 0.55
    assert max(shares) > 0.9
    assert min(ratios) == pytest.approx(3 / 4, abs=0.05)
    assert max(ratios) == pytest.approx(4 / 3, abs=0.05)
    assert all(0 <= left < right <= 90 and 0 <= top < bottom <= 80 for left, top, right, bottom in boxes)
    assert len({box[:2] for box in boxes}) > 50


def test_a_scale_of_1_takes_the_part_that_evaluation_takes() -> None:
    source = Pictures(1)
    for resize_mode in ("shortest", "squash", "longest"):
        options = (tokenize, replace(SMALL, resize_mode=resize_mode), 1.0, 0, "caption")
        trained = Prepare(*options, train=True)(source, [5], [0])
        evaluated = Prepare(*options, train=False)(source, [0], [0])
        assert trained.first.equal(evaluated.first)


def test_images_become_squares_by_cutting_or_by_stretching() -> None:
    """White with a black edge on the left, which a cut loses."""
    image = Image.new("L", (32, 16), 255)
    image.paste(0, (0, 0, 6, 16))
    grey = Preprocessing(16, (0.0,), (1.0,))
    assert grey(image).min() == 255
    stretched = replace(grey, resize_mode="squash")(image)
    assert stretched.shape == (1, 16, 16)
    assert stretched[0, :, 0].max() == 0


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 200)])
def test_images_of_any_shape_can_be_cropped(size: tuple[int, int]) -> None:
    image = picture(3, size)
    for random in (None, Random(0)):
        assert SMALL(image, crop_scale=0.9, random=random).shape == (3, 8, 8)


def test_pixels_come_in_the_order_of_channel_row_column() -> None:
    image = Image.new("RGB", (3, 2))
    image.putpixel((2, 1), (10, 20, 30))
    tensor = to_tensor(image, 3)
    assert tensor.dtype == torch.uint8
    assert tensor[:, 1, 2].tolist() == [10, 20, 30]
    assert tensor.sum() == 60


# What sources share


def test_strings_give_back_what_they_were_given() -> None:
    texts = ["", "a", "höher", "", "日本", "\ud800"]
    strings = pickle.loads(pickle.dumps(Strings(texts)))
    assert [strings[i] for i in range(len(strings))] == texts


# Tables


def write_images(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(picture(number), "JPEG"))


def test_a_table_gives_images_and_captions(tmp_path: Path) -> None:
    write_images(tmp_path, "a.jpg", "sub/b.jpg", "c.jpg")
    (tmp_path / "t.csv").write_text(
        "﻿path,caption,id\n"
        'a.jpg,"a dog, a ""good"" one",x\n'
        "\n"
        'sub/b.jpg,"two\nlines",y\n' + f'{tmp_path / "c.jpg"},5" pipe,z\n',
        encoding="utf-8",
    )
    table = open_source(str(tmp_path / "t.csv"), Data(csv_separator=",", csv_img_key="path", csv_caption_key="caption"))
    assert [table[i].text for i in range(len(table))] == ['a dog, a "good" one', "two\nlines", '5" pipe']
    assert table.name(1) == str(tmp_path / "sub/b.jpg")
    for number in range(3):
        assert table[number].image == encoded(picture(number), "JPEG")
    assert len({table[i].duplicate_key for i in range(3)}) == 3
    assert table.counts.tolist() == [3]


def test_the_same_image_under_two_names_has_one_key(tmp_path: Path) -> None:
    write_images(tmp_path, "a.jpg")
    (tmp_path / "b.jpg").write_bytes((tmp_path / "a.jpg").read_bytes())
    (tmp_path / "t.tsv").write_text("filepath\ttitle\na.jpg\tone\nb.jpg\ttwo\n")
    table = open_source(str(tmp_path / "t.tsv"))
    assert table[0].duplicate_key == table[1].duplicate_key


def test_relative_paths_start_at_the_table_or_else_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, "here/images/a.jpg", "there/images/b.jpg", "here/images/c.jpg", "there/images/c.jpg")
    monkeypatch.chdir(tmp_path / "here")
    table = tmp_path / "there" / "t.tsv"
    table.write_text("filepath\ttitle\nimages/missing.jpg\tone\nimages/a.jpg\tone\n")
    assert open_source(str(table)).name(1) == str(tmp_path / "here/images/a.jpg")
    table.write_text("filepath\ttitle\nimages/b.jpg\tone\n")
    assert open_source(str(table)).name(0) == str(tmp_path / "there/images/b.jpg")
    table.write_text("filepath\ttitle\nimages/c.jpg\tone\n")
    with pytest.raises(ValueError, match=r"images/c.jpg' is ambiguous.*there/images/c.jpg and .*here/images/c.jpg"):
        open_source(str(table))


def test_bad_images_of_a_table_are_bad_samples(tmp_path: Path) -> None:
    write_images(tmp_path, "good.jpg")
    (tmp_path / "exe.jpg").write_bytes(EXE)
    (tmp_path / "folder.jpg").mkdir()
    rows = ["good.jpg", "exe.jpg", "folder.jpg", "missing.jpg", "good.jpg/x", ""]
    (tmp_path / "t.tsv").write_text("filepath\ttitle\n" + "".join(f"{row}\tx\n" for row in rows))
    (batch,) = load(open_source(str(tmp_path / "t.tsv")), batch_size=6, last_step=1)
    assert len(batch.ids) == 1
    assert {Path(name).name: reason for name, reason in batch.bad} == {
        "exe.jpg": NOT_AN_IMAGE,
        "folder.jpg": "not a file",
        "missing.jpg": "no such file or directory",
        "x": "not a directory",
        tmp_path.name: "no image",
    }


TABLES = {
    "empty": ("", "line of column names, is empty"),
    "no rows": ("filepath\ttitle\n", "must have a record per line, has none"),
    "no image column": ("file\ttitle\nx\ty\n", r"column 'filepath' \(--csv-img-key\).*Perhaps --csv-img-key file is"),
    "no caption column": ("filepath\tTitle\tx\na\tb\tc\n", r"'title' \(--csv-caption-key\).*--csv-caption-key Title"),
    "commas": ("filepath,title\na,b\n", r"one column, 'filepath,title': --csv-separator may not be '\\t'"),
    "column twice": ("filepath\ttitle\ttitle\na\tb\tc\n", "one column 'title', has 2"),
    "too few fields": ("filepath\ttitle\na\tb\n\nc\n", "line 4 must have 2 fields.*got 1"),
    "too many fields": ("filepath\ttitle\na\tb\tc\n", "line 2 must have 2 fields.*got 3"),
    "open quote": ('filepath\ttitle\na\t"b\nc\td\n', "line 3 must be quoted"),
    "text after quote": ('filepath\ttitle\na\t"b" said c\n', "line 2 must be quoted"),
    "no file at all": ("filepath\ttitle\na\tb\nc\td\n", "none of its first 2 is there, such as 'a'"),
    "latin-1": (b"filepath\ttitle\na\t\xe4\n", "must be UTF-8"),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_malformed_table_is_refused_with_the_place(tmp_path: Path, case: str) -> None:
    content, message = TABLES[case]
    (tmp_path / "t.tsv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        open_source(str(tmp_path / "t.tsv"))
    assert str(tmp_path / "t.tsv") in str(error.value)


# Text pairs


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_text_pairs_come_in_both_dialects(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"query": "q0", "positive": "p0", "negatives": ["n0", "n1"], "score": 3},
        " " * 50,
        {"query": "q1", "pos": ["p1", "other"], "neg": ["n2"], "pos_scores": [1, 2], "prompt": "x"},
        {"query": "q2", "positive": "ü"},
        {"query": "q3", "pos": ["p3"], "neg": None},
    )
    source = pickle.loads(pickle.dumps(open_source(str(path))))
    samples = [source[i] for i in range(len(source))]
    assert [(s.query, s.text, s.negatives) for s in samples] == [
        ("q0", "p0", ("n0", "n1")),
        ("q1", "p1", ("n2",)),
        ("q2", "ü", ()),
        ("q3", "p3", ()),
    ]
    assert all(sample.image is None and sample.duplicate_key == sample.query for sample in samples)
    assert source.texts_only
    assert source.has_negatives
    assert source.name(1) == f"{path}: line 3"


def test_a_source_knows_whether_any_pair_has_negatives(tmp_path: Path) -> None:
    assert not Table(write_lines(tmp_path / "a", {"query": "q", "positive": "p", "negatives": []})).has_negatives


LINES = {
    "no json": ("nonsense", "must be a JSON object, got b'nonsense"),
    "array": ([1], r"must be a JSON object, got b'\[1\]"),
    "no query": ({"positive": "p"}, "must have query and positive, or image and caption, got positive. Rename"),
    "number": ({"query": 5, "positive": "p"}, "query must be a text, got 5"),
    "no positive": ({"query": "q"}, "positive must be a text, got None"),
    "list": ({"query": "q", "positive": ["p"]}, r"positive must be a text, got \['p'\]"),
    "no pos": ({"query": "q", "pos": []}, "positive must be a text, got None"),
    "pos is text": ({"query": "q", "pos": "p"}, "pos must be a list of texts, got 'p'"),
    "negatives are numbers": ({"query": "q", "positive": "p", "negatives": [1]}, "negatives must be a list of texts"),
    "both": ({"query": "q", "positive": "p", "neg": ["n"]}, "either positive and negatives, or pos and neg"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_malformed_line_is_refused_when_the_file_is_opened(tmp_path: Path, case: str) -> None:
    line, message = LINES[case]
    path = write_lines(tmp_path / "p.jsonl", {"query": "q", "positive": "p"}, line)
    with pytest.raises(ValueError, match=f"p.jsonl: line 2.*{message}"):
        Table(path)


def test_an_empty_file_of_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"p\.jsonl: must have a record per line, has none"):
        Table(write_lines(tmp_path / "p.jsonl", ""))


@pytest.mark.parametrize("what", ["a.jsonl::b.jsonl", "a.tar::b.jsonl", "icons::a.tar", "a.tar::b.parquet"])
def test_sources_of_other_kinds_cannot_be_joined(what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{what}: sources joined by :: must all be tar shards, or all")):
        open_source(what)


# Choosing


def test_a_source_is_chosen_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data.xyz: must be icons, a folder, or end in .tar.*--dataset-type: webdataset, parquet, csv"
    ):
        open_source("data.xyz")
    write_images(tmp_path, "a.jpg")
    (tmp_path / "table.txt").write_text("filepath\ttitle\na.jpg\tx\n")
    assert isinstance(open_source(str(tmp_path / "table.txt"), Data(dataset_type="csv")), Table)


def test_options_of_shards_are_refused_elsewhere(tmp_path: Path) -> None:
    pairs = str(write_lines(tmp_path / "p.jsonl", {"query": "q", "positive": "p"}))
    with pytest.raises(ValueError, match=r"--dataset-resampled: must come with tar shards.*jsonl"):
        open_source(pairs, Data(dataset_resampled=True))
    for what in ("icons", "a.csv"):
        with pytest.raises(ValueError, match=r"--image-key, --text-key and --json-text-key: must come with tars"):
            open_source(what, Data(text_key="txt"))
    assert len(open_source(pairs, Data(dataset_resampled=True), held_out=True)) == 1


def test_icons_are_a_source_in_two_parts() -> None:
    train, held_out = open_source("icons"), open_source("icons", held_out=True)
    assert len(train) > 10_000 > len(held_out)
    assert held_out[0].image is not None


# Labelled images


def test_an_image_folder_has_classes_in_order(tmp_path: Path) -> None:
    write_images(tmp_path, "b_c/1.jpg", "a/2.JPEG", "a/1.png", "a/notes.txt", ".hidden/x.jpg")
    folder = ImageFolder(tmp_path)
    assert folder.classnames == ["a", "b c"]
    assert [(Path(folder.name(i)).name, folder[i].label) for i in range(len(folder))] == [
        *(("1.png", 0), ("2.JPEG", 0), ("1.jpg", 1))
    ]
    assert all(template.count("{}") == 1 for template in folder.templates)
    (batch,) = load(folder, make_prepare(train=False), Order(folder.counts, seed=0, batch_size=3, shuffle=False))
    assert batch.ids.tolist() == [0, 0, 1]


def test_class_names_and_templates_can_be_given(tmp_path: Path) -> None:
    write_images(tmp_path, "data/n01/x.jpg", "data/n02/x.jpg")
    names, templates = tmp_path / "names", tmp_path / "templates"
    names.write_text("n02\tgreat white shark\nn03\tnot here\nn01\tgoldfish\n")
    templates.write_text("a {}.\n\nno {} at all\n")
    folder = ImageFolder(tmp_path / "data", names, templates)
    assert folder.classnames == ["goldfish", "great white shark"]
    assert folder.templates == read_templates(templates) == ["a {}.", "no {} at all"]
    names.write_text("tench\ngoldfish, a\n")
    assert ImageFolder(tmp_path / "data", names).classnames == ["tench", "goldfish, a"]
    for content, message in {
        "one\n": "must have 2 names, one per folder, got 1",
        "n01\ta\n": "lacks 1 such as 'n02'",
        "n01\ta\nn02\n": "line 2 must be 'folder<TAB>name'",
        "n01\ta\nn01\tb\n": "line 2 must be 'folder<TAB>name', of another folder than before, got 'n01",
        "": "at least one line",
    }.items():
        names.write_text(content)
        with pytest.raises(ValueError, match=f"--classnames .*{message}"):
            ImageFolder(tmp_path / "data", names)
    for content in ("a photo\n", "{} {}\n"):
        templates.write_text("a {}\n" + content)
        with pytest.raises(ValueError, match=r"--templates .*line 2 must contain \{\} once"):
            read_templates(templates)


def test_a_folder_without_classes_or_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--zeroshot-data .*must have a folder per class"):
        ImageFolder(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="a: must have images"):
        ImageFolder(tmp_path)
    with pytest.raises(ValueError, match="nowhere: must be a folder"):
        ImageFolder(tmp_path / "nowhere")


# Samples made tensors


def test_crops_depend_on_seed_pass_and_sample_alone() -> None:
    source = Listed([Sample("x", "x", picture(7, (32, 32)))] * 4)
    piece = make_prepare()(source, [0, 0, 1, 0], [2, 1, 2, 2])
    assert piece.first.shape == (4, 3, 8, 8)
    assert piece.first.dtype == torch.uint8
    assert piece.first[0].equal(piece.first[3])
    assert not piece.first[0].equal(piece.first[1])
    assert not piece.first[0].equal(piece.first[2])
    assert piece.first[2:3].equal(make_prepare()(source, [1], [2]).first)
    assert not piece.first[2:3].equal(make_prepare(seed=1)(source, [1], [2]).first)


def test_evaluation_draws_nothing() -> None:
    image = picture(7, (32, 20))
    piece = make_prepare(train=False)(Listed([Sample("x", "x", image)]), [3], [0])
    assert piece.first[0].equal(SMALL(image))


def test_grey_towers_get_one_channel() -> None:
    prepare = make_prepare(preprocessing=Preprocessing(8, (0.0,), (1.0,)))
    assert prepare(Pictures(2), [0, 0], [0, 1]).first.shape == (2, 1, 8, 8)


def test_ids_are_shared_by_what_is_a_duplicate() -> None:
    image = picture(0)
    source = Listed([Sample("a", "x", image), Sample("a", "y", image), Sample("b", "x", image)])
    by_caption = make_prepare()(source, [0, 0, 1], [0, 1, 2]).ids.tolist()
    by_image = make_prepare(duplicates="image")(source, [0, 0, 1], [0, 1, 2]).ids.tolist()
    assert by_caption[0] == by_caption[1] != by_caption[2]
    assert by_image[0] == by_image[2] != by_image[1]
    assert min(by_caption + by_image) >= 0
    assert by_caption[0] == 8165759374931043526  # in every process, and every version


def test_negatives_share_ids_with_positives_of_the_same_text(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"query": "q0", "positive": "p0", "negatives": ["p1", "n"]},
        {"query": "q1", "positive": "p1"},
        {"query": "p1", "positive": "p0", "negatives": ["n"]},
        {"query": "q3", "positive": " "},
        {"query": "q4", "positive": "p", "negatives": [""]},
        {"query": "q5", "positive": "\ud800"},
    )
    source = Table(path)
    piece = make_prepare()(source, [0] * 6, range(6))
    assert texts_of(piece.first) == ["q0", "q1", "p1"]
    assert texts_of(piece.second) == ["p0", "p1", "p0"]
    assert piece.negatives is not None
    assert piece.negative_ids is not None
    assert texts_of(piece.negatives) == ["p1", "n", "n"]
    assert piece.negative_ids[0] == piece.ids[1]
    assert piece.negative_ids[1] == piece.negative_ids[2]
    assert len({*piece.ids.tolist(), *piece.negative_ids.tolist()}) == 3
    assert [reason for _, reason in piece.bad] == ["empty text", "empty text", "text is not valid Unicode"]
    assert piece.bad[0][0] == f"{path}: line 4"
    by_query = make_prepare(duplicates="image")(source, [0] * 3, range(3))
    assert by_query.negative_ids is not None
    assert not {*by_query.ids.tolist()} & {*by_query.negative_ids.tolist()}


def test_texts_are_tokenised_in_one_call(tmp_path: Path) -> None:
    calls = []

    def tokenizer(texts: Sequence[str]) -> Tensor:
        calls.append(len(texts))
        return tokenize(texts)

    lines = [{"query": f"q{i}", "positive": f"p{i}", "negatives": ["n"]} for i in range(5)]
    Prepare(tokenizer, SMALL, 1.0, 0, "caption", True)(
        Table(write_lines(tmp_path / "p.jsonl", *lines)), [0] * 5, range(5)
    )
    assert calls == [15]


def test_a_piece_of_bad_samples_has_no_rows_but_its_shapes(tmp_path: Path) -> None:
    piece = make_prepare()(Pictures(3, bad=range(3)), [0] * 3, range(3))
    assert (piece.first.shape, piece.second.shape, piece.ids.shape) == ((0, 3, 8, 8), (0, 16), (0,))
    assert (piece.first.dtype, piece.second.dtype, piece.ids.dtype) == (torch.uint8, torch.int32, torch.int64)
    assert piece.negatives is None
    assert len(piece.bad) == 3


# Batches


def assert_same(ours: Sequence[RankBatch], others: Sequence[RankBatch]) -> None:
    assert [batch.step for batch in ours] == [batch.step for batch in others]
    for mine, other in zip(ours, others, strict=True):
        rows = len(other.ids)
        assert mine.first[:rows].equal(other.first[:rows])
        assert mine.second[:rows].equal(other.second[:rows])
        assert mine.ids.equal(other.ids)
        assert mine.bad == other.bad
        for name in ("negatives", "negative_ids"):
            left, right = getattr(mine, name), getattr(other, name)
            assert (left is None) == (right is None)
            assert left is None or left.equal(right)


def joined(parts: Sequence[RankBatch]) -> RankBatch:
    """The parts of all ranks, as one."""
    tensors = [
        torch.cat([getattr(part, name)[: len(part.ids)] for part in parts]) for name in ("first", "second", "ids")
    ]
    return RankBatch(*tensors, [bad for part in parts for bad in part.bad], step=parts[0].step)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_PIECE", 5)


@pytest.mark.parametrize(("world_size", "workers"), [(1, 3), (2, 0), (3, 2), (13, 0)])
@pytest.mark.usefixtures("small_pieces")
def test_any_number_of_ranks_and_workers_gives_the_same_batches(world_size: int, workers: int) -> None:
    source = Pictures(20, bad=[3, 11])
    whole = load(source, batch_size=12, last_step=4)
    options = {"batch_size": 12, "last_step": 4, "world_size": world_size, "workers": workers}
    ranks = [load(source, rank=rank, **options) for rank in range(world_size)]
    assert_same([joined(parts) for parts in zip(*ranks, strict=True)], whole)
    assert [len(batch.ids) + len(batch.bad) for batch in whole] == [12] * 4
    assert {name for batch in whole for name, _ in batch.bad} == {"sample 3", "sample 11"}


@pytest.mark.usefixtures("small_pieces")
def test_all_sources_give_the_same_in_workers(tmp_path: Path) -> None:
    shard_of(tmp_path / "0.tar", range(6))
    shard_of(tmp_path / "1.tar", range(6, 13))
    lines = [{"query": f"q{i}", "positive": f"p{i}", "negatives": ["n"] * (i % 3)} for i in range(13)]
    write_lines(tmp_path / "p.jsonl", *lines)
    for name in ("{0..1}.tar", "p.jsonl"):
        source = open_source(str(tmp_path / name))
        source[0]  # files are open before the fork
        assert_same(load(source, workers=2), load(source))


@pytest.mark.usefixtures("small_pieces")
def test_resuming_equals_going_on() -> None:
    source = Pictures(20, bad=[4])
    assert_same(load(source, first_step=4, last_step=7), load(source, last_step=7)[4:])
    assert_same(load(source, first_step=4, last_step=7, workers=2), load(source, last_step=7)[4:])


@pytest.mark.usefixtures("small_pieces")
def test_a_batch_larger_than_the_set_repeats_samples_with_other_crops() -> None:
    source = Pictures(6)
    (batch,) = load(source, batch_size=18, last_step=1)
    assert len(batch.ids) == 18
    assert len(batch.ids.unique()) == 6
    assert len({bytes(image.flatten().tolist()) for image in batch.first}) > 12


def test_images_ids_and_tokens_of_a_row_belong_together() -> None:
    source = Pictures(30, bad=[2])
    prepare = make_prepare(train=False)
    for batch in load(source, prepare, workers=2):
        for row, text in enumerate(captions_of(batch)):
            number = int(text.split()[1])
            expected = prepare(source, [0], [number])
            assert batch.first[row].equal(expected.first[0])
            assert batch.ids[row] == expected.ids[0]


@pytest.mark.usefixtures("small_pieces")
def test_negatives_of_all_pieces_are_joined(tmp_path: Path) -> None:
    lines = [{"query": f"q{i}", "positive": f"p{i}", "negatives": [f"n{i}"] * (i % 3)} for i in range(13)]
    source = Table(write_lines(tmp_path / "p.jsonl", *lines))
    (batch,) = load(source, order=Order(source.counts, seed=0, batch_size=13, shuffle=False), last_step=1)
    assert batch.negatives is not None
    assert batch.negative_ids is not None
    assert texts_of(batch.negatives) == [f"n{i}" for i in range(13) for _ in range(i % 3)]
    assert len(batch.negative_ids) == len(batch.negatives)
    assert texts_of(batch.first) == [f"q{i}" for i in range(13)]


def test_evaluation_ends_with_a_partial_batch() -> None:
    source = Pictures(20)
    order = Order(source.counts, seed=0, batch_size=8, shuffle=False)
    parts = [load(source, order=order, rank=r, world_size=3, last_step=None) for r in range(3)]
    assert [[len(batch.ids) for batch in part] for part in parts] == [[2, 2, 1], [3, 3, 1], [3, 3, 2]]
    rows = [text for step in zip(*parts, strict=True) for batch in step for text in captions_of(batch)]
    assert rows == [f"caption {i}" for i in range(20)]


def test_a_rank_without_rows_still_has_a_batch() -> None:
    parts = [load(Pictures(5), batch_size=2, rank=r, world_size=3, last_step=2) for r in range(3)]
    assert [[tuple(batch.first.shape) for batch in part] for part in parts] == [
        *([(0, 3, 8, 8)] * 2, [(1, 3, 8, 8)] * 2, [(1, 3, 8, 8)] * 2)
    ]


def test_tokens_of_different_lengths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_PIECE", 1)

    def ragged(texts: Sequence[str]) -> Tensor:
        return torch.zeros(len(texts), max(map(len, texts)))

    with pytest.raises(ValueError, match=r"tokenizer: must make all texts the same length, got \(\d+,\) and \(\d+,\)"):
        load(Pictures(20), Prepare(ragged, SMALL, 1.0, 0, "caption", True))


def test_loading_draws_nothing_from_the_trainers_generator() -> None:
    before = torch.get_rng_state()
    load(Pictures(5), workers=1)
    load(Pictures(5))
    assert torch.get_rng_state().equal(before)


class Reporting(Pictures):
    """Says in its caption who reads it."""

    def __getitem__(self, index: int) -> Sample:
        ignored = {signal.SIGINT, signal.SIGTERM} <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return Sample(f"{os.getpid()} {torch.get_num_threads()} {ignored}", "", picture(index))


@pytest.mark.usefixtures("small_pieces")
def test_workers_share_a_step_with_one_thread_each_and_leave_signals_to_the_trainer() -> None:
    (batch,) = load(Reporting(64), batch_size=64, last_step=1, workers=2)
    pids, threads, ignored = zip(*(text.split() for text in captions_of(batch)), strict=True)
    assert len(set(pids)) == 2
    assert str(os.getpid()) not in pids
    assert set(threads) == {"1"}
    assert set(ignored) == {"True"}


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def endless(**changes: Any) -> Iterator[RankBatch]:
    source = Pictures(50)
    return batches(source, make_prepare(), requests_for(source, last_step=None, **changes), workers=2)


def test_workers_end_when_the_iterator_is_closed_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not because torch is tired of waiting for them."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60.0)
    before = children()
    for end in ("close", "drop"):
        iterator = endless()
        next(iterator)
        assert len(children() - before) == 2
        started = time.monotonic()
        if end == "close":
            iterator.close()  # type: ignore[attr-defined]
        else:
            del iterator
        assert children() == before
        assert time.monotonic() - started < 30


def test_signals_to_the_group_leave_workers_at_work() -> None:
    before = children()
    iterator = endless()
    next(iterator)
    workers = children() - before
    for name in ("-INT", "-TERM"):
        subprocess.run(["kill", name, *map(str, workers)], check=True)
    for _ in range(20):
        next(iterator)
    assert children() - before == workers


def test_the_trainer_still_gets_its_signals() -> None:
    iterator = endless()
    next(iterator)
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_trainer_that_fails_while_it_holds_its_batches_can_exit() -> None:
    code = "from tests.test_train_data import endless\nheld = endless()\nnext(held)\nraise OSError('given up')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert "given up" in ended.stderr


def test_the_next_batch_is_put_together_beside_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the trainer holds the first and asks for nothing."""
    made: queue.Queue[tuple[int, threading.Thread]] = queue.Queue()
    original = loader._Assembly.batch

    def batch(self: loader._Assembly, step: int) -> RankBatch:
        made.put((step, threading.current_thread()))
        return original(self, step)

    monkeypatch.setattr(loader._Assembly, "batch", batch)
    iterator = endless()
    assert next(iterator).step == 0
    for step in range(2):
        assert made.get(timeout=PATIENCE)[0] == step
    assert next(iterator).step == 1
    assert made.get(timeout=PATIENCE)[1] is not threading.main_thread()


class Unpicklable(Pictures):
    def __reduce__(self) -> Any:
        raise TypeError("copied")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere forks are not safe")
def test_workers_share_the_index_whatever_python_s_default_is() -> None:
    """From 3.14 on it is a server, to which an index of gigabytes would be sent once per worker."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert_same(load(Unpicklable(8), workers=2), load(Pictures(8)))
    finally:
        multiprocessing.set_start_method(before, force=True)


class Deadly(Pictures):
    """Some samples kill who reads them."""

    def __init__(self, count: int, deadly: dict[int, signal.Signals]) -> None:
        super().__init__(count)
        self.deadly = deadly

    def __getitem__(self, index: int) -> Sample:
        if index in self.deadly:
            faulthandler.disable()  # pytest's, which prints
            os.kill(os.getpid(), self.deadly[index])
        return super().__getitem__(index)


DEADLY = {3: signal.SIGSEGV, 4: signal.SIGKILL, 11: signal.SIGBUS}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.usefixtures("small_pieces")
def test_a_sample_that_kills_its_worker_is_named_and_left_out(workers: int, logged: LoggedLines) -> None:
    found = load(Deadly(20, DEADLY), workers=workers, batch_size=12, last_step=4)
    expected = load(Pictures(20, bad=list(DEADLY)), batch_size=12, last_step=4)
    assert_same([replace(batch, bad=[]) for batch in found], [replace(batch, bad=[]) for batch in expected])
    for batch, other in zip(found, expected, strict=True):
        assert sorted(name for name, _ in batch.bad) == sorted(name for name, _ in other.bad)
        assert sorted(batch.bad) == sorted((lost.name, lost.reason) for lost in batch.lost)
    reasons = {name: reason for batch in found for name, reason in batch.bad}
    assert reasons == {f"sample {index}": f"its worker was killed by {DEADLY[index].name}" for index in DEADLY}
    assert any(re.fullmatch(r"data: worker \d+ was killed by SIGSEGV at sample 3; restarted", line) for line in logged)


@pytest.mark.usefixtures("small_pieces")
def test_a_replay_leaves_out_what_was_lost_and_nothing_else() -> None:
    """Though it could read it, with any number of ranks and workers; and another pass tries the sample again."""
    (killed, *_) = load(Deadly(20, DEADLY), workers=2, batch_size=12, last_step=1)
    lost = {(each.position, each.index): each.reason for each in killed.lost}
    assert len(lost) in (1, 2)
    later = load(Pictures(20), batch_size=12, first_step=1, last_step=4)
    for world_size, count in ((1, 0), (2, 0), (3, 1)):
        options = {"batch_size": 12, "last_step": 4, "lost": lost, "world_size": world_size, "workers": count}
        ranks = [load(Pictures(20), rank=rank, **options) for rank in range(world_size)]
        first, *others = [joined(parts) for parts in zip(*ranks, strict=True)]
        assert_same([replace(first, bad=[])], [replace(killed, bad=[])])
        assert sorted(first.bad) == sorted(killed.bad)
        assert_same(others, later)
    elsewhere = {(position, index + 1): "" for position, index in lost}  # other data than there was
    assert_same(load(Pictures(20), lost=elsewhere), load(Pictures(20)))


def test_workers_that_die_of_every_sample_end_the_run(logged: LoggedLines) -> None:
    with pytest.raises(
        RuntimeError, match=r"workers must live, but 9 in a row were killed by SIGKILL, the last at sample"
    ):
        load(Deadly(50, dict.fromkeys(range(50), signal.SIGKILL)), workers=1, batch_size=20)


def test_a_worker_that_is_dead_can_be_sent_requests_and_restarted(logged: LoggedLines) -> None:
    worker = workers.Worker(Pictures(8), make_prepare())
    worker._process.kill()
    worker._process.join()
    worker.send(workers.Request(0, 1, True, [workers.Row(0, 0, 3)]))
    with pytest.raises(workers.WorkerDied):
        worker.receive()
    worker.restart()
    assert texts_of(worker.receive()[1].second) == ["caption 3"]
    worker.end()


def deadly_tokenizer(texts: Sequence[str]) -> Tensor:
    os._exit(3)


def test_workers_that_die_of_no_sample_end_the_run(logged: LoggedLines) -> None:
    prepare = Prepare(deadly_tokenizer, SMALL, 1.0, 0, "caption", True)
    with pytest.raises(RuntimeError, match=r"workers must live, but 3 in a row were ended with exit code 3, the last"):
        load(Pictures(8), prepare, workers=1)
    assert any("at no sample; restarted" in line for line in logged)


class Slow(Pictures):
    def __getitem__(self, index: int) -> Sample:
        if index == 5:
            time.sleep(1)
        return super().__getitem__(index)


def test_a_slow_worker_is_not_called_dead(monkeypatch: pytest.MonkeyPatch, logged: LoggedLines) -> None:
    monkeypatch.setattr(workers, "SLOW_SECONDS", 0.2)
    assert_same(load(Slow(8), workers=1, last_step=1), load(Pictures(8), last_step=1))
    assert any(
        re.fullmatch(r"data: worker \d+ is alive and slow: .* s without an answer, at sample 5", x) for x in logged
    )
    assert not any("restarted" in line for line in logged)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("small_pieces")
def test_a_disk_that_fails_is_asked_again_before_a_sample_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(storage, "PAUSE_SECONDS", 0.0)
    write_images(tmp_path, *(f"{number}.jpg" for number in range(20)))
    rows = "".join(f"{number}.jpg\tcaption {number}\n" for number in range(20))
    (tmp_path / "t.csv").write_text(f"filepath\ttitle\n{rows}")
    source = open_source(str(tmp_path / "t.csv"))
    (whole,) = load(source, batch_size=20, last_step=1)
    failures, real = {"3.jpg": 5, "11.jpg": 1}, Path.open

    def failing(path: Path, *options: Any) -> Any:
        failures[path.name] = left = failures.get(path.name, 0) - 1
        if left >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *options)

    monkeypatch.setattr(Path, "open", failing)
    assert_same(load(source, workers=workers, batch_size=20, last_step=1), [whole])
    failures |= {"3.jpg": 99, "7.jpg": 99, "11.jpg": 5, "12.jpg": 99, "13.jpg": 99}
    (batch,) = load(source, workers=workers, batch_size=20, last_step=1)
    order = Order(torch.tensor([20]), seed=0, batch_size=20).of_step(0)[1].tolist()
    lost = [(order.index(sample), sample, source.name(sample)) for sample in (3, 7, 12, 13)]
    expected = [Lost(*sample, "Input/output error") for sample in lost]
    assert sorted(batch.lost, key=lambda lost: lost.index) == expected
    assert sorted(batch.bad) == sorted((lost.name, lost.reason) for lost in expected)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many open files"), KeyError("type")])
def test_what_the_process_lacks_is_no_fault_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    attempts = []

    def failing(path: Path, *options: Any) -> Any:
        attempts.append(path)
        raise error

    write_images(tmp_path, "a.jpg")
    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(type(error)):
        read_file(tmp_path / "a.jpg")
    assert len(attempts) == 1


@pytest.mark.usefixtures("small_pieces")
def test_shapes_stay_whatever_is_skipped() -> None:
    """Rows beyond those with an id repeat others, as if drawn anew: a compiler sees one shape."""
    (batch,) = load(Pictures(12, bad=[3, 4, 9]), batch_size=12, last_step=1)
    assert (len(batch.ids), len(batch.first), len(batch.second)) == (9, 12, 12)
    assert batch.first[9:].equal(batch.first[:3])
    assert batch.second[9:].equal(batch.second[:3])


class Faulty(Pictures):
    def __getitem__(self, index: int) -> Sample:
        raise OSError("disk on fire")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_is_no_property_of_the_sample_is_not_skipped(workers: int) -> None:
    with pytest.raises(OSError, match="disk on fire"):
        load(Faulty(8), workers=workers)


@pytest.mark.parametrize("what", ["fifo", "/dev/zero", "/dev/tty", "huge", "folder"])
def test_a_row_that_names_no_plain_file_is_a_bad_sample(tmp_path: Path, what: str) -> None:
    write_images(tmp_path, "a.jpg")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(6 * 2**30)
    (tmp_path / "t.csv").write_text(f"filepath\ttitle\na.jpg\ta\n{what}\tb\n")
    (batch,) = load(open_source(str(tmp_path / "t.csv")), batch_size=2, last_step=1)
    assert captions_of(batch) == ["a"]
    assert [reason for _, reason in batch.bad] == [
        "file of more than 268435456 bytes" if what == "huge" else "not a file"
    ]


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    """6 GiB without an end of line, of which the disk holds nothing."""
    for name in ("a.csv", "a.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(6 * 2**30)
        with pytest.raises(ValueError, match=rf"{name}: line 1 must have at most 67108864 characters"):
            open_source(str(tmp_path / name))
    os.rename(tmp_path / "a.csv", tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json: must have at most 2147483648 bytes, has 6442450944"):
        open_source(str(tmp_path / "a.json"))
    os.mkfifo(tmp_path / "fifo.csv")
    with pytest.raises(ValueError, match=r"fifo\.csv: must be a file, is something else"):
        open_source(str(tmp_path / "fifo.csv"))


def test_texts_of_any_length_are_not_tokenised() -> None:
    piece = make_prepare()(Listed([Sample("x" * (2**20 + 1), "x", picture(0))]), [0], [0])
    assert [reason for _, reason in piece.bad] == ["text of more than 1048576 characters"]


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    image = encoded(picture(0))
    name = "\x1b]0;owned\x07\x1b[2J\u202egpj\nfake"
    source = open_source(str(write_tar(tmp_path / "a.tar", {f"{name}.jpg": image, f"{name}.txt": b"a"})))
    source[0]
    assert source.name(0) == f"{tmp_path / 'a.tar'}: \\x1b]0;owned\\x07\\x1b[2J\\u202egpj\\nfake"
    (tmp_path / "t.csv").write_text(f'filepath\ttitle\n"{name}"\ta\n{tmp_path}/b.jpg\tb\n')
    write_images(tmp_path, "b.jpg")
    assert open_source(str(tmp_path / "t.csv")).name(0).isprintable()
