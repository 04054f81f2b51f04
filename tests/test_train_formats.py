"""Formats of training data: names of images and captions, tables, JSON lines, folders and Parquet."""

import io
import json
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megabatch import reference
from megabatch.distributed.world import World
from megabatch.train.config import Data, Loss
from megabatch.train.data import open_source, parquet, storage
from megabatch.train.data.captions import Fields, drawn
from megabatch.train.data.folders import CaptionedFolder
from megabatch.train.data.parquet import Parquet
from megabatch.train.data.source import LARGEST_TEXT, BadSample, Sample, Source, Unread
from megabatch.train.data.tables import Table
from megabatch.train.encoding import Features
from megabatch.train.objective import Objective

from .ranks import PATIENCE, Pool
from .training import evaluations, steps, train

pyarrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4), number).save(file, "PNG")
    return file.getvalue()


def write(folder: Path, **files: bytes | str) -> None:
    """Files by their names, with "__" for a dot and "___" for a slash."""
    for name, data in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def texts(source: Source) -> list[str]:
    """Of all samples of a copy, as another process has it."""
    source = pickle.loads(pickle.dumps(source))
    return [source[index].text for index in range(len(source))]


# Files of a sample


def sample(fields: Fields, **files: bytes) -> tuple[bytes, list[str]]:
    found = fields.sample_of(files)
    assert isinstance(found.image, bytes)
    assert found.rgb_first
    return found.image, [found.text, *found.captions]


def as_json(**values: Any) -> bytes:
    return json.dumps(values).encode()


def test_the_first_image_file_and_the_first_caption_file_count() -> None:
    files = {"webp": b"W", "png": b"P", "txt": b"text", "json": as_json(caption="not this"), "cap": b"cap"}
    assert sample(Fields(), **files) == (b"P", ["text"])
    assert sample(Fields(("webp", "png"), ("vtt", "cap", "txt")), **files) == (b"W", ["cap"])


def test_without_a_text_file_the_caption_is_in_the_json_file() -> None:
    assert sample(Fields(), jpg=b"J", json=as_json(caption="c", text="t")) == (b"J", ["c"])


def test_the_first_json_key_with_a_text_counts_instead_of_the_text_file() -> None:
    files = {"jpg": b"J", "txt": b"text", "json": as_json(a=" ", b=5, c="of c", d="of d")}
    assert sample(Fields(json_text_keys=("a", "b", "x", "c", "d")), **files) == (b"J", ["of c"])
    with pytest.raises(BadSample, match=r"^no caption$"):
        Fields(json_text_keys=("a",)).sample_of({"jpg": b"J", "txt": b"text"})


def test_a_json_key_may_have_several_captions() -> None:
    files = {"jpg": b"J", "json": as_json(a=["one", "", "two"], b="three")}
    assert sample(Fields(json_text_keys=("a", "b")), **files) == (b"J", ["one", "two"])


def test_keys_with_a_weight_all_count_and_those_without_only_instead_of_them() -> None:
    fields = Fields(json_text_keys=("a", "b", "c", "d"), probs=(3, 0, 1))
    found = fields.sample_of({"jpg": b"J", "json": as_json(a="A", b="B", c=["C", "D"], d="E")})
    assert ((found.text, *found.captions), found.weights) == (("A", "C", "D"), (3, 0.5, 0.5))
    assert sample(fields, jpg=b"J", json=as_json(b="B", d="E")) == (b"J", ["B"])


BAD_FILES: dict[str, tuple[dict[str, bytes], str]] = {
    "no image": ({"txt": b"t", "gif": b"G"}, "^no image$"),
    "no caption": ({"jpg": b"J"}, "^no caption$"),
    "latin-1": ({"jpg": b"J", "txt": b"\xe4"}, "caption is not UTF-8"),
    "json in latin-1": ({"jpg": b"J", "json": b'{"caption": "\xe4"}'}, "caption is not UTF-8"),
    "broken json": ({"jpg": b"J", "json": b"{"}, "json is not an object"),
    "deep json": ({"jpg": b"J", "json": b"[" * 10**5}, "json is not an object"),
    "array": ({"jpg": b"J", "json": b"[]"}, "json is not an object"),
    "other keys": ({"jpg": b"J", "json": b'{"text": "t"}'}, "no caption in json"),
    "large": ({"jpg": b"J", "txt": bytes(LARGEST_TEXT + 1)}, f"text of more than {LARGEST_TEXT} bytes"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_make_no_sample_are_a_bad_sample(case: str) -> None:
    files, reason = BAD_FILES[case]
    with pytest.raises(BadSample, match=reason):
        Fields().sample_of(files)


def test_flags_have_semicolons_between_names() -> None:
    options = Data(image_key="jpg; png;", text_key="txt", json_text_key="a;b", json_text_key_probs="1")
    assert Fields.of_flags(options) == Fields(("jpg", "png"), ("txt",), ("a", "b"), (1.0,))
    assert Fields.of_flags(Data()) == Fields()


@pytest.mark.parametrize(
    ("keys", "probs", "message"),
    [
        ("a;b", "1 2;3", "--json-text-key-probs.*one per key of --json-text-key, got 3 for 2"),
        (None, "1", "got 1 for 0"),
        ("a;b", "0, 0", r"not all 0, got 0.0 0.0"),
        ("a;b", "1 -1", r"at least 0.*got 1.0 -1.0"),
        ("a", "nan", "finite.*got nan"),
        ("a", "often", "--json-text-key-probs: must be numbers, such as 0.7;0.3, got 'often'"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(keys: str | None, probs: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fields.of_flags(Data(json_text_key=keys, json_text_key_probs=probs))


# Several captions


def draws(sample: Sample, count: int) -> Counter[str]:
    return Counter(drawn(sample, 0, number, 7).text for number in range(count))


def test_a_caption_is_drawn_by_seed_pass_and_sample_and_by_nothing_else() -> None:
    sample = Sample("a", "key", b"J", captions=tuple("bcdefgh"))
    assert [drawn(sample, 0, number, 1).text for number in range(9)] == list("chdeheaca")
    for changed in ([(1, 0, 0)] * 20, [(0, number, 0) for number in range(20)], [(0, 0, index) for index in range(20)]):
        assert [drawn(sample, *key).text for key in changed] != [drawn(sample, 0, 0, 0).text] * 20
    assert drawn(sample, 0, 0, 0).captions == ()
    assert drawn(sample, 0, 0, 0).image == b"J"


def test_captions_are_drawn_equally_often_or_by_their_weights() -> None:
    """Within five standard deviations of the binomial distribution."""
    count = 4000
    equal = draws(Sample("a", "key", captions=("b", "c", "d")), count)
    weighted = draws(Sample("a", "key", captions=("b", "c"), weights=(5, 4, 1)), count)
    for counts, shares in ((equal, dict.fromkeys("abcd", 0.25)), (weighted, {"a": 0.5, "b": 0.4, "c": 0.1})):
        assert set(counts) == set(shares)
        for text, share in shares.items():
            assert abs(counts[text] - share * count) < 5 * (count * share * (1 - share)) ** 0.5


def test_a_sample_with_one_caption_keeps_it() -> None:
    sample = pickle.loads(pickle.dumps(Fields().sample_of({"jpg": b"J", "json": as_json(caption="c")})))
    assert drawn(sample, 0, 0, 0) is sample


# Tables


def test_rows_of_one_image_are_samples_or_captions_of_one(tmp_path: Path) -> None:
    write(tmp_path, a__png=png(1), b__png=png(2))
    write(tmp_path, t__tsv="filepath\ttitle\na.png\tone\nb.png\ttwo\na.png\tthree\n")
    apart = open_source(str(tmp_path / "t.tsv"))
    assert texts(apart) == ["one", "two", "three"]
    assert not apart.has_negatives
    grouped = open_source(str(tmp_path / "t.tsv"), Data(captions="all"))
    assert [(grouped[index].text, grouped[index].captions) for index in (0, 1)] == [("one", ("three",)), ("two", ())]
    assert (len(grouped), grouped.has_negatives) == (2, True)
    assert [grouped[index].image for index in (0, 1)] == [png(1), png(2)]
    assert grouped.name(1) == str(tmp_path / "b.png")
    assert grouped.fingerprint() != apart.fingerprint()


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_the_fingerprint_of_a_table_changes_with_its_texts_and_its_images(tmp_path: Path, suffix: str) -> None:
    def fingerprint(text: str, size: int) -> list[str]:
        write(tmp_path, a__png=bytes(size))
        rows = {"tsv": f"filepath\ttitle\na.png\t{text}\n", "jsonl": json.dumps({"image": "a.png", "text": text})}
        (tmp_path / f"t.{suffix}").write_text(rows[suffix])
        return open_source(str(tmp_path / f"t.{suffix}")).fingerprint()

    assert fingerprint("one", 5) == fingerprint("one", 5)
    assert len({*fingerprint("one", 5), *fingerprint("two", 5), *fingerprint("one", 6)}) == 3


# JSON lines


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_lines_with_images_are_a_table(tmp_path: Path) -> None:
    write(tmp_path, images___a__png=png(1), images___b__png=png(2))
    path = write_lines(
        tmp_path / "t.jsonl",
        {"image": "images/a.png", "caption": "one", "text": "not this"},
        "",
        {"file_name": "images/b.png", "captions": ["two", "three"]},
        {"image": "images/b.png", "caption": None, "title": "four"},
        {"image": "images/b.png", "caption": ""},
    )
    source = pickle.loads(pickle.dumps(Table(path)))
    samples = [source[index] for index in range(3)]
    assert [(sample.text, *sample.captions) for sample in samples] == [("one",), ("two", "three"), ("four",)]
    assert source[1].image == png(2)
    with pytest.raises(BadSample, match=r"^no caption$"):
        source[3]
    assert Table(path, per_image=True)[1].captions == ("three", "four")
    named = write_lines(tmp_path / "named.jsonl", {"photo": "images/a.png", "long": "", "short": "s", "text": "t"})
    assert texts(Table(named, Fields(("photo",), (), ("long", "short")))) == ["s"]
    assert Table(path, Fields(json_text_keys=("caption", "captions"), probs=(1, 3)))[1].weights == (1.5, 1.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"caption": "c"}, r"path of an image \(image, .*has caption. Name them with --image-key"),
        ({"image": 5, "caption": "c"}, "path of an image"),
        ({"image": "a.png", "alt": "c"}, r"and a caption \(caption, .*has image, alt. Name"),
        ("{", "must be a JSON object"),
    ],
)
def test_lines_without_image_or_caption_are_refused(tmp_path: Path, line: Any, message: str) -> None:
    write(tmp_path, a__png=png(1))
    path = write_lines(tmp_path / "t.jsonl", {"image": "a.png", "caption": "c"}, line)
    with pytest.raises(ValueError, match=f"t.jsonl: line 2 .*{message}"):
        Table(path)


def test_lines_without_images_are_pairs_of_texts(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"query": "q0", "positive": "p0", "text": "not this"},
        {"anchor": "q1", "positive": "p1", "negative": "n1"},
        {"query": "q2", "positive": "p2", "negative_1": "n2", "negative_2": ["n3", "n4"], "negatives_from": "not this"},
    )
    source = pickle.loads(pickle.dumps(Table(path)))
    assert source.texts_only
    assert [(source[index].query, source[index].text, source[index].negatives) for index in range(3)] == [
        ("q0", "p0", ()),
        ("q1", "p1", ("n1",)),
        ("q2", "p2", ("n2", "n3", "n4")),
    ]
    with pytest.raises(ValueError, match="must have a record per line, has none"):
        Table(write_lines(tmp_path / "empty.jsonl", " "))


# Folders


def test_a_folder_gives_images_with_the_captions_beside_them(tmp_path: Path) -> None:
    write(tmp_path, b__v2__png=png(1), b__v2__txt="one", b__txt="not this", deep___er___c__JPG=png(2))
    write(tmp_path, deep___er___c__JSON=as_json(caption="two"), a__png=png(3), a__txt="three", README__md="", notes="")
    write(tmp_path, __hidden___d__png=png(4), __hidden___d__txt="not this", __e__png=png(4), __e__txt="not this")
    write(tmp_path, deep___outside___f__png=png(5), deep___outside___f__txt="four")
    outside = (tmp_path / "deep" / "outside").rename(tmp_path.with_name(f"{tmp_path.name}-outside"))
    (tmp_path / "deep" / "round").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(outside)
    source = CaptionedFolder(tmp_path)
    assert texts(source) == ["three", "one", "two", "four"]
    assert [source[index].image for index in range(3)] == [png(3), png(1), png(2)]
    assert [source.name(index) for index in (1, 2)] == [str(tmp_path / "b.v2.png"), str(tmp_path / "deep/er/c.JPG")]
    before = source.fingerprint()
    write(tmp_path, a__png=png(3) + b"longer")
    assert CaptionedFolder(tmp_path).fingerprint() != before


def test_images_of_a_folder_without_captions_are_bad_samples(tmp_path: Path) -> None:
    write(tmp_path, a__png=png(1), b__png=png(2), b__txt="b", c__png=png(3), c__txt="c")
    source = CaptionedFolder(tmp_path)
    (tmp_path / "c.txt").unlink()
    for index, reason in ((0, "^no caption$"), (2, "no such file")):
        with pytest.raises(BadSample, match=reason):
            source[index]
    assert source[1].text == "b"


def test_a_folder_that_has_no_images_or_no_captions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: .*has no images. Put a.txt"):
        CaptionedFolder(tmp_path / "nowhere")
    write(tmp_path, a__png=png(1), a__cap="c", b__png=png(2))
    with pytest.raises(ValueError, match=r"a.png: no caption, and none of .* or name other suffixes with --image-key"):
        CaptionedFolder(tmp_path)
    assert CaptionedFolder(tmp_path, Fields(text_keys=("cap",)))[0].text == "c"


# Parquet


def write_parquet(path: Path, rows: int = 10, row_group_size: int = 4, start: int = 0, **columns: Any) -> Path:
    numbers = range(start, start + rows)
    columns = columns or {"image": [png(n) for n in numbers], "caption": [f"caption {n}" for n in numbers]}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


def test_rows_of_parquet_files_are_samples_and_row_groups_are_shards(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    write_parquet(tmp_path / "sub/b.parquet", 3, start=10)
    source = Parquet(str(tmp_path))
    assert texts(source) == [f"caption {number}" for number in range(13)]
    assert [source[index].image for index in range(13)] == [png(number) for number in range(13)]
    assert (source.counts.tolist(), source.block) == ([4, 4, 2, 3], 4)
    assert (source.texts_only, source.has_negatives) == (False, False)
    assert source.name(9) == f"{tmp_path / 'a.parquet'}: row 9"
    assert source.name(12) == f"{tmp_path / 'sub/b.parquet'}: row 2"
    assert texts(Parquet(str(tmp_path / "*.parquet"))) == [f"caption {number}" for number in range(10)]


def test_the_fingerprint_of_parquet_files_changes_with_their_rows(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    before = Parquet(str(path)).fingerprint()
    assert before == Parquet(str(path)).fingerprint()
    assert before[0].startswith(f"a.parquet: {path.stat().st_size} bytes, 10 samples")
    write_parquet(path, row_group_size=5)
    assert Parquet(str(path)).fingerprint()[0].partition("bytes")[2] != before[0].partition("bytes")[2]


def test_sources_of_parquet_files_have_weights(tmp_path: Path) -> None:
    one, two = write_parquet(tmp_path / "1.parquet"), write_parquet(tmp_path / "2.parquet", 3)
    assert Parquet(f"{one}::{two}", factors="1::3").weights.tolist() == [1, 1, 1, 3]  # type: ignore[union-attr]


IMAGES: dict[str, Callable[[Path], Any]] = {
    "large bytes": lambda folder: pyarrow.array([png(1), png(2)], pyarrow.large_binary()),
    "path": lambda folder: ["one.png", str(folder / "two.png")],
    "struct with bytes": lambda folder: [{"bytes": png(1), "path": "x.png"}, {"bytes": png(2), "path": None}],
    "struct with path": lambda folder: [{"bytes": None, "path": str(folder / "one.png")}, {"bytes": png(2)}],
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_are_bytes_or_paths_or_structs_of_them(tmp_path: Path, kind: str) -> None:
    write(tmp_path, one__png=png(1), two__png=png(2))
    captions = pyarrow.array(["a", "b"]).dictionary_encode()
    source = Parquet(str(write_parquet(tmp_path / "a.parquet", image=IMAGES[kind](tmp_path), caption=captions)))
    assert [(source[index].image, source[index].text) for index in (0, 1)] == [(png(1), "a"), (png(2), "b")]


def test_captions_are_columns_or_lists_in_them(tmp_path: Path) -> None:
    columns = {"jpg": [png(1)] * 3, "long": ["L", None, ""], "short": [["s", "t"], ["u"], []], "text": ["x"] * 3}
    path = str(write_parquet(tmp_path / "a.parquet", **columns))
    assert texts(Parquet(path)) == ["x"] * 3
    source = Parquet(path, Fields(json_text_keys=("long", "short"), probs=(1, 3)))
    assert [(source[index].text, source[index].captions) for index in (0, 1)] == [("L", ("s", "t")), ("u", ())]
    assert source[0].weights == (1, 1.5, 1.5)
    with pytest.raises(BadSample, match="no caption"):
        source[2]


def test_parquet_files_of_texts_have_negatives(tmp_path: Path) -> None:
    columns = {"anchor": ["q0", "q1", None], "positive": ["p0", "p1", "p2"], "score": [1, 2, 3]}
    path = str(write_parquet(tmp_path / "a.parquet", **columns))
    assert not Parquet(path).has_negatives
    columns |= {"negative_1": ["n0", None, "n"], "negative_2": ["n1", "n2", "n"], "negatives": [["n3"], None, []]}
    source = Parquet(str(write_parquet(tmp_path / "a.parquet", **columns)))
    assert (source.texts_only, source.has_negatives) == (True, True)
    assert [(source[index].query, source[index].text, source[index].negatives) for index in (0, 1)] == [
        ("q0", "p0", ("n0", "n1", "n3")),
        ("q1", "p1", ("n2",)),
    ]
    with pytest.raises(BadSample, match="no pair of texts"):
        source[2]


def test_folders_of_hugging_face_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.List(datasets.Value("string"))})
    rows = {
        "image": [{"bytes": png(n), "path": None} for n in range(150)],
        "caption": [[f"{n}", "b"] for n in range(150)],
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(tmp_path / "saved", num_shards=2)
    dataset.to_parquet(tmp_path / "parquet" / "0.parquet", batch_size=40)
    write(tmp_path, saved___cache__arrow="what `map` has left there")
    for folder, counts, block in (("saved", [75, 75], 64), ("parquet", [40, 40, 40, 30], 40)):
        source = Parquet(str(tmp_path / folder))
        assert texts(source) == [f"{number}" for number in range(150)]
        assert (source[149].image, source[149].captions) == (png(149), ("b",))
        assert (source.counts.tolist(), source.block) == (counts, block)
        assert len(source.fingerprint()) == len(set(source.fingerprint())) == (2 if folder == "saved" else 1)
    datasets.DatasetDict(train=dataset, extra=dataset).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"splits: must be one split, holds extra, train\. Name the files or"):
        Parquet(str(tmp_path / "splits"))
    assert len(Parquet(str(tmp_path / "splits/extra"))) == 150


def test_a_folder_with_files_of_several_splits_is_refused(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        write_parquet(tmp_path / "data" / f"{name}.parquet")
    with pytest.raises(ValueError, match="must be one split, holds test, train"):
        Parquet(str(tmp_path))
    assert len(Parquet(str(tmp_path / "data" / "train-*.parquet"))) == 10


def test_parquet_files_may_be_remote(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    for name in ("a", "sub/b"):
        fsspec.filesystem("memory").pipe(f"/formats/{name}.parquet", write_parquet(tmp_path / "x.parquet").read_bytes())
    fsspec.filesystem("memory").pipe("/formats/c.arrow", b"")
    with pytest.raises(ValueError, match=r"memory://formats/c.arrow: must be local.*or write Parquet"):
        Parquet("memory://formats/c.arrow")
    source = Parquet("memory://formats/")
    assert texts(source) == [f"caption {number}" for number in range(10)] * 2
    assert source[19].image == png(9)


def test_each_row_group_is_read_once_and_few_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of two row groups at a time, in turn."""
    source = Parquet(str(write_parquet(tmp_path / "a.parquet", 24)))
    reads: Counter[tuple[int, int]] = Counter()

    def counting(url: str, start: int, stop: int) -> bytes:
        reads[start, stop] += 1
        return read(url, start, stop)

    read = storage.read
    monkeypatch.setattr(storage, "read", counting)
    source.keep(2)
    source = pickle.loads(pickle.dumps(source))
    order = [8 * pair + index for pair in range(3) for index in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert [source[index].text for index in order] == [f"caption {index}" for index in order]
    assert len(reads) == 6
    assert set(reads.values()) == {1}
    reads.clear()
    for index in (0, 4, 0, 8, 0, 12, 0):  # the one that was not used for longest goes
        source[index]
    assert set(reads.values()) == {1}
    source[4]
    assert set(reads.values()) == {1, 2}


def opened_on_a_rank(rank: int, group: Any, path: str) -> list[str]:
    """Its texts, or what is wrong with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_files_of", parquet._files_of if rank == 0 else None)
        patch.setattr(Parquet, "_groups_of", Parquet._groups_of if rank == 0 else None)
        try:
            return texts(open_source(path, world=World(torch.device("cpu"), rank, 2, group)))
        except ValueError as error:
            return [str(error)]


def test_one_rank_lists_parquet_files_and_their_row_groups(tmp_path: Path, pool: Pool) -> None:
    write_parquet(tmp_path / "a.parquet")
    first, second = pool.run(2, opened_on_a_rank, str(tmp_path))
    assert first == second == [f"caption {number}" for number in range(10)]
    write(tmp_path, broken__parquet="")
    first, second = pool.run(2, opened_on_a_rank, str(tmp_path))
    assert first == second
    assert "broken.parquet: must be a whole Parquet file" in first[0]


def test_row_groups_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Parquet(str(write_parquet(tmp_path / "a.parquet", 24)))
    assert not source._tables._held
    source.prefetch([0, 1, 9, 8])
    for group in (0, 2):
        source._tables._held[group].result(PATIENCE)
    assert len(source._tables._held) == 2
    monkeypatch.setattr(storage, "read", None)
    assert [source[index].text for index in (0, 9)] == ["caption 0", "caption 9"]
    with pytest.raises(TypeError):
        source[4]


def test_row_groups_can_be_read_after_a_fork(tmp_path: Path) -> None:
    source = Parquet(str(write_parquet(tmp_path / "a.parquet", 24)))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(texts, (source,)).get(PATIENCE) == texts(source)


def test_row_groups_that_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LARGEST_HELD", 3000)
    captions = ["x" * 99 for _ in range(30)] + ["y" * 99 for _ in range(2)]
    images = [png(number) for number in range(32)]
    path = write_parquet(
        tmp_path / "a.parquet", row_group_size=30, image=images, caption=captions, other=["z" * 9999] * 32
    )
    source = Parquet(str(path))
    source.keep(1)
    with pytest.raises(ValueError, match=r"a.parquet: must have smaller row groups: .*holds 2 .*row_group_size"):
        source.keep(100)


def test_a_damaged_row_group_is_unread_and_the_others_are_not(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", 12)
    source = Parquet(str(path))
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    with path.open("r+b") as file:
        file.seek(column.dictionary_page_offset)
        file.write(bytes(column.total_compressed_size))
    source = pickle.loads(pickle.dumps(source))
    for index in range(12):
        if 4 <= index < 8:
            with pytest.raises(Unread, match=r"a.parquet, row group 1: "):
                source[index]
        else:
            assert source[index].text == f"caption {index}"


def test_a_parquet_file_that_has_gone_is_unread(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    source = pickle.loads(pickle.dumps(Parquet(str(path))))
    path.unlink()
    with pytest.raises(Unread, match=r"a.parquet, row group 2: "):
        source[9]


def test_a_row_group_of_another_length_than_before_is_unread(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", 8)
    source = pickle.loads(pickle.dumps(Parquet(str(path))))
    write_parquet(path, 6)
    source._files = [replace(file, size=path.stat().st_size) for file in source._files]  # as if it had not changed
    assert source[1].text == "caption 1"
    with pytest.raises(Unread, match=r"a.parquet, row group 1: has 2 rows, had 4 when the run began"):
        source[5]


def columns(names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [png(1) if name == "image" else "text"] for name in names}


def test_parquet_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    for data in (b"", whole[:-9], whole[: -8 - footer] + b"\xff" * footer + whole[-8:]):
        write(tmp_path, broken__parquet=data)
        with pytest.raises(ValueError, match=r"broken.parquet: must be a whole Parquet file, got: .*Fetch or write"):
            Parquet(str(tmp_path))
    write_parquet(tmp_path / "broken.parquet", **columns(["image", "text"]))
    (tmp_path / "broken.parquet").rename(tmp_path / "broken.arrow")
    with pytest.raises(ValueError, match=r"broken.arrow: must be an Arrow stream of save_to_disk, got: .*Fetch or"):
        Parquet(str(tmp_path / "broken.arrow"))
    write_parquet(tmp_path / "broken.parquet", **columns(["image", "text"]))
    with pytest.raises(ValueError, match=r"broken.parquet: must have the columns of .*a.parquet, lacks caption"):
        Parquet(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["url", "caption"], "row 0: no pair of texts, .*has the columns url, caption. Name those .* with --image-key"),
        (["image", "alt"], "row 0: no caption, .*has the columns image, alt. Name"),
        (["query", "text"], "row 0: no pair of texts"),
    ],
)
def test_parquet_files_without_the_columns_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"a.parquet: {message}"):
        Parquet(str(write_parquet(tmp_path / "a.parquet", **columns(names))))


def test_images_that_are_pixels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 0: no image, "):
        Parquet(str(write_parquet(tmp_path / "a.parquet", image=[[[0, 1], [2, 3]]], caption=["c"])))


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a.parquet: must have rows, has none"):
        Parquet(str(write_parquet(tmp_path / "a.parquet", image=[], caption=[])))


# ---- all captions of an image


def test_all_captions_of_an_image_are_positives_of_each_other() -> None:
    torch.manual_seed(0)
    first, second, more = (torch.randn(rows, 8, requires_grad=True) for rows in (3, 3, 2))
    ids, owners, scale = torch.tensor([7, 5, 9]), torch.tensor([9, 7]), torch.tensor(10.0)
    objective = Objective(Loss(loss="clip"), World(torch.device("cpu")), several_captions=True)
    found, _ = objective(Features(first, second, more, scale, None), ids, owners)
    rows = torch.tensor([0, 1, 2, 2, 0])
    images, texts = first[rows], torch.cat([second, more])
    expected = reference.clip_loss(images, texts, scale, ids=ids[rows], same_ids="positive", normalize=True, group=None)
    torch.testing.assert_close(found, expected)
    inputs = (first, second, more)
    for got, truth in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("captions", ["one", "all"])
def test_a_run_takes_one_caption_of_an_image_or_all(tmp_path: Path, captions: str) -> None:
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(40 * number))
        (tmp_path / f"{number}.json").write_text(json.dumps({"texts": [f"first {number}", f"second {number}"]}))
    data = [
        "--train-data",
        str(tmp_path),
        "--val-data",
        str(tmp_path),
        "--json-text-key",
        "texts",
        "--captions",
        captions,
    ]
    sizes = ["--global-batch-size", "6", "--steps", "2", "--workers", "0", "--model", "tiny"]
    run = train(tmp_path / "logs", *data, *sizes)
    assert [values["train/samples"] for values in steps(run)] == [6, 12]
    assert evaluations(run)[-1]["val/captions"] == 12
