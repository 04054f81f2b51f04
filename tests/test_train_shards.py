"""Tar shards: headers, the index, blocks, and what is left of them when they are damaged."""

import errno
import gc
import io
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megabatch import cli
from megabatch.distributed.world import World
from megabatch.train.config import Data
from megabatch.train.data import index, open_source, storage, tars
from megabatch.train.data.listing import Listed, expand
from megabatch.train.data.order import Order
from megabatch.train.data.source import BadSample, Source, Strings

from .ranks import LoggedLines, Pool
from .test_train_data import (
    EXE,
    NOT_AN_IMAGE,
    captions_of,
    encoded,
    load,
    make_prepare,
    picture,
    png_of_size,
    shard_of,
    write_tar,
)


def texts(source: Source) -> list[str]:
    return [source[i].text for i in range(len(source))]


# ---- samples


def test_shards_give_images_and_captions(tmp_path: Path) -> None:
    image = encoded(picture(0))
    long_name = "deep/" * 30 + "long"
    write_tar(
        tmp_path / "00.tar",
        {
            "a.jpg": image,
            "a.txt": b"text of a",
            "a.json": b'{"caption": "not this"}',
            "sub/b.PNG": image,
            "sub/b.json": b'{"caption": "text of b", "url": "x"}',
            f"{long_name}.webp": image,
            f"{long_name}.txt": "größer".encode(),
        },
    )
    shard_of(tmp_path / "01.tar", range(3))
    source = pickle.loads(pickle.dumps(open_source(str(tmp_path / "{00..01}.tar"))))
    assert texts(source) == ["text of a", "text of b", "größer", "caption 0", "caption 1", "caption 2"]
    assert source[0].duplicate_key == source[1].duplicate_key != source[4].duplicate_key
    assert source[1].image == encoded(picture(0))
    assert source.name(1) == f"{tmp_path / '00.tar'}: sub/b"
    assert source.counts.tolist() == [3, 3]
    assert open_source(str(tmp_path / "{00..01}.tar")).name(4) == f"{tmp_path / '01.tar'}: sample 1"  # not read


def test_shards_that_webdataset_wrote_are_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "0.tar")) as tar:
        for number in range(5):
            image = encoded(picture(number), "JPEG")
            tar.write({"__key__": f"{number:09}", "jpg": image, "json": {"caption": f"{number}"}, "txt": f"t{number}"})
    source = open_source(str(tmp_path / "0.tar"))
    assert texts(source) == [f"t{number}" for number in range(5)]
    for number in range(5):
        assert source[number].image == encoded(picture(number), "JPEG")


def by_webdataset(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Key and files of every sample, as its own pipeline groups them."""
    webdataset = pytest.importorskip("webdataset")
    found = []
    with path.open("rb") as stream:
        files = webdataset.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
        for sample in webdataset.tariterators.group_by_keys(files):
            parts = {name: data for name, data in sample.items() if not name.startswith("__")}
            found.append((sample["__key__"], parts))
    return found


def by_us(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    data = path.read_bytes()
    return [
        (group.key, {name: data[offset : offset + size] for name, (offset, size) in group.files.items()})
        for group in tars.groups(lambda start, stop: data[start:stop], len(data))
    ]


ODD = {
    "plain": [("a.jpg", b"1"), ("a.txt", b"2"), ("b.jpg", b"3"), ("b.txt", b"4")],
    "folders and dots": [("x/y.z/a.b.jpg", b"1"), ("x/y.z/a.txt", b"2"), ("x/b.JPG", b"3"), ("x/b.Txt", b"4")],
    "without a suffix": [("README", b""), ("a.jpg", b"1"), ("noise", b"x"), ("a.txt", b"2")],
    "long names": [("d/" * 100 + "a.jpg", b"1"), ("d/" * 100 + "a.txt", b"2"), ("é" * 60 + ".jpg", b"3")],
    "metadata": [("__meta__.json", b"{}"), ("a.jpg", b"1"), ("a.txt", b"2")],
    "apart": [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3"), ("b.txt", b"4")],
    "empty files": [("a.jpg", b""), ("a.txt", b""), ("b.txt", b"x" * 512)],
}


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("end", ["as written", "no end blocks", "one end block"])
@pytest.mark.parametrize("case", ODD)
def test_samples_are_those_of_webdataset(tmp_path: Path, case: str, end: str, kind: int) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in ODD[case]:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5  # a fraction: a header of its own for every file, in PAX
            tar.addfile(member, io.BytesIO(data))
        length = tar.offset
    if end != "as written":
        os.truncate(path, length + (512 if end == "one end block" else 0))
    assert by_us(path) == by_webdataset(path) != []


def test_equal_keys_make_two_samples_where_webdataset_fails(tmp_path: Path) -> None:
    """As open_clip reads them: LAION-400M has equal keys at the borders of its shards."""
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.txt", b"2"), ("a.jpg", b"3"), ("a.txt", b"4")])
    assert by_us(path) == [("a", {"jpg": b"1", "txt": b"2"}), ("a", {"jpg": b"3", "txt": b"4"})]
    with pytest.raises(ValueError, match="duplicate file name"):
        by_webdataset(path)


def test_samples_without_image_or_caption_are_bad(tmp_path: Path) -> None:
    image = encoded(picture(0))
    files = {"a.jpg": image, "b.txt": b"b", "c.jpg": image, "c.txt": b"c", "d.json": b"{}", "README": b""}
    path = write_tar(tmp_path / "0.tar", files)
    (batch,) = load(open_source(str(path)), batch_size=4, last_step=1)
    assert captions_of(batch) == ["c"]
    assert dict(batch.bad) == {f"{path}: a": "no caption", f"{path}: b": "no image", f"{path}: d": "no image"}
    with pytest.raises(ValueError, match=r"1\.tar: a: no caption, and none of the samples after it.*--text-key"):
        open_source(str(write_tar(tmp_path / "1.tar", {"a.jpg": image, "a.cls": b"3"})))


def test_bad_samples_of_a_shard_are_skipped_and_named(tmp_path: Path) -> None:
    image = encoded(picture(0))
    files = {
        "a.jpg": EXE,
        "a.txt": b"a",
        "b.jpg": image,
        "b.txt": b"\xff",
        "c.jpg": image,
        "c.json": b'{"caption": null}',
        "d.jpg": image,
        "d.json": b"[]",
        "e.jpg": image,
        "e.txt": b" \n",
        "f.jpg": png_of_size(100_000, 100_000),
        "f.txt": b"f",
        "g.jpg": image[:-30],
        "g.txt": b"g",
        "h.jpg": image,
        "h.txt": b"h",
    }
    path = write_tar(tmp_path / "0.tar", files)
    (batch,) = load(open_source(str(path)), last_step=1)
    assert captions_of(batch) == ["h"]
    assert dict(batch.bad) == {
        f"{path}: a": NOT_AN_IMAGE,
        f"{path}: b": "caption is not UTF-8",
        f"{path}: c": "no caption in json",
        f"{path}: d": "json is not an object",
        f"{path}: e": "empty caption",
        f"{path}: f": "decompression bomb",
        f"{path}: g": "truncated image",
    }
    (batch,) = load(open_source(str(path)), make_prepare(max_pixels=24 * 16 - 1), last_step=1)
    assert dict(batch.bad)[f"{path}: h"] == "image of more than 383 pixels"


def test_sources_are_mixed_by_their_factors(tmp_path: Path) -> None:
    shard_of(tmp_path / "a0.tar", range(2))
    shard_of(tmp_path / "a1.tar", range(2, 4))
    shard_of(tmp_path / "b.tar", range(4, 9))
    what = f"{tmp_path}/a{{0..1}}.tar::{tmp_path}/b.tar"
    source = open_source(what, Data(dataset_resampled=True, train_data_upsampling_factors="1::2.5"))
    assert source.weights is not None
    assert (source.counts.tolist(), source.weights.tolist()) == ([2, 2, 5], [1, 1, 2.5])
    for factors, message in [("1", "got 1 for 2"), ("1::2::3", "got 3 for 2"), ("1::x", "got '1::x'")]:
        with pytest.raises(ValueError, match=f"--train-data-upsampling-factors: must .*{message}"):
            open_source(what, Data(dataset_resampled=True, train_data_upsampling_factors=factors))


def test_a_member_larger_than_memory_is_a_bad_sample(tmp_path: Path) -> None:
    """6 GiB, of which the disk holds nothing."""
    size, image = 6 * 2**30, encoded(picture(0))
    blocks = [(b"a.jpg", size), (b"a.txt", 1), (b"b.jpg", len(image)), (b"b.txt", size), (b"c.jpg", len(image))]
    with (tmp_path / "a.tar").open("wb") as file:
        for name, length in [*blocks, (b"c.txt", 1)]:
            file.write(header_of(name, sized(length)))
            place = file.tell()
            file.write(image if length == len(image) else b"c" if length == 1 else b"")
            file.truncate(place + -(-length // 512) * 512)
            file.seek(0, os.SEEK_END)
        file.write(bytes(1024))
    (batch,) = load(open_source(str(tmp_path / "a.tar")), batch_size=3, last_step=1)
    assert captions_of(batch) == ["c"]
    assert {reason for _, reason in batch.bad} == {"file of more than 268435456 bytes"}


# ---- blocks


@pytest.fixture
def many(tmp_path: Path) -> str:
    """Shards of 150, 64 and 10 samples."""
    start = 0
    for number, count in enumerate((150, 64, 10)):
        shard_of(tmp_path / f"{number}.tar", range(start, start + count))
        start += count
    return str(tmp_path / "{0..2}.tar")


def test_every_sample_of_every_block_is_the_right_one(many: str) -> None:
    source = open_source(many)
    assert texts(source) == [f"caption {i}" for i in range(224)]
    assert [source[i].text for i in reversed(range(224))] == [f"caption {i}" for i in reversed(range(224))]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The ranges that are read."""
    found: list[tuple[str, int, int]] = []
    real = storage.read

    def read(url: str, start: int, stop: int) -> bytes:
        found.append((url, start, stop))
        return real(url, start, stop)

    monkeypatch.setattr(storage, "read", read)
    return found


def test_each_byte_is_read_once_a_pass_and_in_whole_blocks(many: str, reads: list[tuple[str, int, int]]) -> None:
    source = open_source(many)
    reads.clear()
    order = Order(source.counts, seed=0, batch_size=32, block=source.block)
    assert order.of_step(6)[0].max() == 0  # 7 steps are one pass
    load(source, make_prepare(), order, last_step=7)
    assert len(reads) == 3 + 1 + 1
    assert len(set(reads)) == 5
    assert sum(stop - start for _, start, stop in reads) == sum(
        Path(url).stat().st_size for url in {r[0] for r in reads}
    )


def test_ranks_read_different_blocks(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    for number in range(4):
        shard_of(tmp_path / f"{number}.tar", range(1000 * number, 1000 * number + 256))
    source = open_source(str(tmp_path / "{0..3}.tar"))
    order = Order(source.counts, seed=0, batch_size=16, block=source.block)  # 16 lanes of one block each
    assert order.window_blocks == 256  # so this is less than a window, and lanes are strips of blocks
    of_ranks = []
    for rank in range(4):
        source, _ = open_source(str(tmp_path / "{0..3}.tar")), reads.clear()
        load(source, make_prepare(), order, rank=rank, world_size=4, last_step=64)
        of_ranks.append(set(reads))
    assert sum(map(len, of_ranks)) == len(set.union(*of_ranks)) == 16


def test_used_blocks_are_dropped_and_few_are_kept(many: str) -> None:
    source: Any = open_source(many)
    for i in range(224):
        source[i]
        assert len(source._blocks._held) <= 1  # read in order: the last sample of a block drops it
    source.keep(2)
    source.prefetch(range(0, 224, 10))
    assert len(source._blocks._held) == 2
    assert source[0].text == "caption 0"


def test_blocks_survive_a_fork(many: str) -> None:
    source = open_source(many)
    assert source[0].text == "caption 0"  # its threads are started
    found = load(source, workers=2, batch_size=32, last_step=7)
    assert sorted(text for batch in found for text in captions_of(batch)) == sorted(f"caption {i}" for i in range(224))


# ---- the index


def lines_of(folder: Path) -> list[tuple[str, int, str, int, int]]:
    """Of an index: name, size, tag, samples and first offset of each shard."""
    lines = [
        json.loads(line) for file in (folder / index.NAME).glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    return [(name, size, tag, samples, first) for name, size, tag, samples, _, first in lines]


def test_an_index_is_made_once(many: str, reads: list[tuple[str, int, int]]) -> None:
    folder = Path(many).parent
    open_source(many)
    assert len({url for url, _, _ in reads}) == 3
    reads.clear()
    open_source(many)
    assert len(reads) == 1  # of the first block, to see that it has what is asked for
    assert [(line[0], *line[3:]) for line in lines_of(folder)] == [
        ("0.tar", 150, 0),
        ("1.tar", 64, 3),
        ("2.tar", 10, 4),
    ]
    (offsets,) = (folder / index.NAME).glob("*.offsets")
    assert offsets.stat().st_size == 4 * (3 + 1 + 1)


def test_shards_that_changed_or_are_new_are_read_again(many: str, reads: list[tuple[str, int, int]]) -> None:
    folder = Path(many).parent
    open_source(str(folder / "{0..1}.tar"))
    shard_of(folder / "1.tar", range(500, 570))
    reads.clear()
    source = open_source(many)
    names = [Path(url).name for url, *_ in reads if url.endswith(".tar")]
    assert list(dict.fromkeys(names)) == ["1.tar", "2.tar", "0.tar"]
    assert texts(source)[150:] == [
        *(f"caption {i}" for i in range(500, 570)),
        *(f"caption {i}" for i in range(214, 224)),
    ]
    assert [name for name, *_ in lines_of(folder)].count("0.tar") == 1


def test_where_nobody_may_write_the_index_is_in_a_cache(
    many: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(open_source(many)) == 224
    assert not (tmp_path / index.NAME).exists()
    assert len(list((tmp_path / "cache" / "megabatch").glob("*.index"))) == 1


def test_names_without_a_folder_are_of_the_current_one(many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(many).parent)
    assert len(open_source("{0..2}.tar")) == 224
    assert (Path(many).parent / index.NAME).exists()


def test_the_command_makes_the_index_and_says_where(many: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["index", many]) == 0
    said = capsys.readouterr().out
    assert "224 samples in 3 shards, " in said
    assert said.endswith(f"\n{Path(many).parent / index.NAME}\n")
    assert sum(samples for _, _, _, samples, _ in lines_of(Path(many).parent)) == 224
    (Path(many).parent / "3.tar").write_bytes(b"x" * 1024)
    with pytest.raises(SystemExit) as ended:
        cli.main(["index", str(Path(many).parent)])
    assert ended.value.code == 2
    assert "3.tar: it has no header" in capsys.readouterr().err
    assert cli.main(["index", str(Path(many).parent), "--skip-bad-shards"]) == 0


@pytest.mark.parametrize("damage", ["lines cut", "offsets cut", "no lines", "no offsets", "other lines"])
def test_shards_that_a_damaged_index_has_lost_are_read_again(
    many: str, damage: str, reads: list[tuple[str, int, int]]
) -> None:
    open_source(many)
    path = next((Path(many).parent / index.NAME).glob("*.offsets" if "offsets" in damage else "*.jsonl"))
    content = path.read_bytes()
    if damage.startswith("no"):
        path.unlink()
    else:
        path.write_bytes(content[:-2] if "cut" in damage else b"[1]\n{}\n3\n\xff\n")
    reads.clear()
    assert texts(open_source(many)) == [f"caption {i}" for i in range(224)]
    ends = {index._LOCAL_PART, *(Path(url).stat().st_size for url, *_ in reads)}
    scanned = {Path(url).name for url, start, stop in reads if start == 0 and stop in ends}
    assert scanned >= ({"2.tar"} if "cut" in damage else {"0.tar", "1.tar", "2.tar"})
    reads.clear()
    open_source(many)
    assert len(reads) == 1


def test_what_is_no_index_is_not_overwritten(many: str) -> None:
    (Path(many).parent / index.NAME).write_bytes(b"x" * 5000)
    with pytest.raises(
        ValueError, match=r"megabatch\.index: must be an index of megabatch, is something else\. Remove"
    ):
        open_source(many)


def test_an_index_that_may_not_grow_is_used_and_grows_in_a_cache(
    many: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_source(str(Path(many).parent / "{0..1}.tar"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert texts(open_source(many)) == [f"caption {i}" for i in range(224)]
    assert [name for name, *_ in lines_of(tmp_path)] == ["0.tar", "1.tar"]
    (lines,) = (tmp_path / "cache").glob("megabatch/*.index/*.jsonl")
    assert [json.loads(line)[0] for line in lines.read_text().splitlines()] == ["2.tar"]


def test_an_index_that_somebody_else_wrote_is_used_and_grows_in_a_cache(
    many: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the data may be written to, the index in it may not."""
    open_source(str(Path(many).parent / "{0..1}.tar"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / index.NAME)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(open_source(many)) == 224
    assert [name for name, *_ in lines_of(tmp_path)] == ["0.tar", "1.tar"]


def test_an_index_that_grew_is_mapped_again(tmp_path: Path) -> None:
    file, key = tmp_path / "x.offsets", ("", "a", 1024, "")
    first = index._added(file, key, 1, 0, np.array([0], np.uint32))
    table = torch.tensor([[1024, 1, 0, 0, first.first]])
    assert index.Index(Strings(["a"]), torch.ones(1), table, [file]).block(0, 0) == (0, 1024)
    second = index._added(file, key, 65, 0, np.array([0, 1], np.uint32))
    table = torch.tensor([[1024, 65, 0, 0, second.first]])
    assert index.Index(Strings(["a"]), torch.ones(1), table, [file]).block(0, 1) == (512, 1024)


def test_local_shards_are_scanned_by_their_headers(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    size = 2**20
    write_tar(tmp_path / "a.tar", {f"{n}.{end}": bytes(size) for n in range(4) for end in ("jpg", "txt")})
    index.make(expand(str(tmp_path / "a.tar")))
    assert sum(stop - start for _, start, stop in reads) < size


def _index_and_die(what: str, after: int) -> None:
    def told(done: int, total: int) -> None:
        if done == after:
            os.kill(os.getpid(), signal.SIGKILL)

    index.make(expand(what), told=told)


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_index_that_was_killed_goes_on(
    tmp_path: Path, reads: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    for number in range(10):
        shard_of(tmp_path / f"{number}.tar", range(10 * number, 10 * number + 10))
    what = str(tmp_path / "{0..9}.tar")
    process = multiprocessing.get_context("fork").Process(target=_index_and_die, args=(what, after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    known = [name for name, *_ in lines_of(tmp_path)]
    assert len(known) == after
    with next((tmp_path / index.NAME).glob("*.jsonl")).open("a") as file:
        file.write('["9.tar", 1, "tag"')  # as a line that was not finished
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(index, "_FEW", 10)  # in this process, whose reads are seen
    found = index.make(expand(what), told=lambda *numbers: told.append(numbers))
    assert found.samples.tolist() == [10] * 10
    assert told[-1] == (10 - after, 10 - after)
    assert {Path(url).name for url, _, _ in reads} == {f"{number}.tar" for number in range(10)} - set(known)
    assert texts(open_source(what)) == [f"caption {i}" for i in range(100)]


def test_offsets_of_energon_are_taken_and_checked(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    path = shard_of(tmp_path / "0.tar", range(150))
    data = path.read_bytes()
    starts = [group.start for group in tars.groups(lambda start, stop: data[start:stop], len(data))]
    with tarfile.open(path) as tar:
        tar.getmembers()
        end = tar.offset
    np.array([*starts, end], dtype=np.uint64).tofile(tmp_path / "0.tar.idx")
    source = open_source(str(path))
    assert [(Path(url).suffix, start) for url, start, _ in reads] == [(".idx", 0), (".tar", 0)]  # not read through
    assert texts(source) == [f"caption {i}" for i in range(150)]
    shutil.rmtree(tmp_path / index.NAME)
    np.array([*starts[:10], starts[10]], dtype=np.uint64).tofile(tmp_path / "0.tar.idx")  # of another tar
    assert len(open_source(str(path))) == 150


def test_a_shard_with_fewer_samples_than_img2dataset_wrote_is_bad(tmp_path: Path) -> None:
    shard_of(tmp_path / "00000.tar", range(20))
    (tmp_path / "00000_stats.json").write_text(json.dumps({"count": 30, "successes": 20}))
    assert len(open_source(str(tmp_path / "00000.tar"))) == 20
    shutil.rmtree(tmp_path / index.NAME)
    (tmp_path / "00000_stats.json").write_text(json.dumps({"count": 30, "successes": 25}))
    with pytest.raises(ValueError, match=r"00000\.tar: it has 20 samples where img2dataset counted 25"):
        open_source(str(tmp_path / "00000.tar"))


def test_all_bad_shards_are_named_at_once_and_can_be_left_out(tmp_path: Path, logged: LoggedLines) -> None:
    whole = shard_of(tmp_path / "0.tar", range(20)).read_bytes()
    with tarfile.open(tmp_path / "0.tar") as tar:
        members = tar.getmembers()
    damaged = bytearray(whole)
    damaged[members[10].offset] ^= 1
    cases = {
        "1": whole[: members[11].offset_data + 5],
        "2": whole[: members[10].offset + 100],
        "3": bytes(damaged),
        "4": b"",
        "5": b"hello" * 1000,
    }
    for name, data in cases.items():
        (tmp_path / f"{name}.tar").write_bytes(data)
    with pytest.raises(ValueError, match=r"6\.tar: must be a file, but 1 of 7 shards are not.*--skip-bad-shards"):
        open_source(str(tmp_path / "{0..6}.tar"))
    assert len(open_source(str(tmp_path / "{0..6}.tar"), Data(skip_bad_shards=True))) == 20
    logged.clear()
    what = str(tmp_path / "{0..5}.tar")
    with pytest.raises(ValueError, match=r"5 of 6 shards must be whole, uncompressed tars.*") as error:
        open_source(what)
    for name in cases:
        assert f"{tmp_path}/{name}.tar: it has" in str(error.value)
    assert "--skip-bad-shards" in str(error.value)
    assert len(open_source(what, Data(skip_bad_shards=True))) == 20
    assert sum("left out" in line for line in logged) == 5


def test_an_index_of_two_billion_samples_opens_in_little_memory(tmp_path: Path) -> None:
    """Of 200,000 shards: what is held is a line of each, and its offsets are not read."""
    shards_, samples = 200_000, 10_000
    blocks = -(-samples // 64)
    offsets = np.arange(blocks, dtype=np.uint32) * 4000
    (tmp_path / index.NAME).mkdir()
    with (tmp_path / index.NAME / "a.offsets").open("wb") as file:
        for _ in range(shards_):
            file.write(offsets.tobytes())
    lines = [json.dumps([f"{i:06}.tar", 5 * 10**8, '"tag"', samples, i, i * blocks]) for i in range(shards_)]
    (tmp_path / index.NAME / "a.jsonl").write_text("\n".join(lines))
    shards = [Listed(f"{tmp_path}/{i:06}.tar", 1.0, 5 * 10**8, '"tag"') for i in range(shards_)]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    found = index.make(shards)
    assert int(found.samples.sum()) == 2 * 10**9
    assert found.block(123_456, 7) == (28_000 * 512, 32_000 * 512)
    gc.collect()
    assert resident() - before < 100 * 2**20  # the offsets alone are 126 MB


# ---- damage


def test_a_shard_that_is_gone_or_cut_makes_batches_smaller_and_moves_nothing(many: str) -> None:
    folder = Path(many).parent
    whole = load(open_source(many), make_prepare(), batch_size=32, last_step=7)
    source = open_source(many)
    (folder / "1.tar").unlink()
    os.truncate(folder / "0.tar", (folder / "0.tar").stat().st_size // 2)
    found = load(source, make_prepare(), batch_size=32, last_step=7)
    gone = {f"caption {i}" for i in range(150, 214)}
    lost = 0
    for before, after in zip(whole, found, strict=True):
        kept = [text for text in captions_of(before) if text in captions_of(after)]
        assert kept == captions_of(after)
        assert gone.isdisjoint(kept)
        assert len(after.lost) == 32 - len(kept)
        lost += len(after.lost)
    assert 64 + 64 <= lost <= 64 + 150
    reasons = {loss.reason for batch in found for loss in batch.lost}
    assert any("1.tar from byte 0" in reason for reason in reasons)


def test_a_shard_that_was_replaced_is_not_read_as_if_it_had_not(many: str) -> None:
    source = open_source(many)
    folder = Path(many).parent
    content = bytearray((folder / "1.tar").read_bytes())
    (folder / "1.tar").write_bytes(bytes(len(content)))
    with pytest.raises(BadSample, match="has 0 samples, had 64 when it was indexed"):
        source[160]


def test_a_disk_that_fails_for_a_moment_is_asked_again(many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(many)
    real, failures = os.pread, [errno.EIO, errno.ESTALE]

    def failing(descriptor: int, size: int, offset: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "it failed")
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    assert source[70].text == "caption 70"
    assert not failures


def test_a_run_that_loses_too_many_samples_ends_and_names_them(many: str, tmp_path: Path) -> None:
    flags = ["--steps", "100", "--global-batch-size", "64", "--chunk-size", "64", "--workers", "0", "--model", "tiny"]
    words = ["train", "--train-data", many, *flags, "--logs", str(tmp_path / "logs"), "--name", "run", "--lr", "0"]
    assert cli.main([*words[:-4], "--name", "indexed", "--steps", "1"]) == 0
    (Path(many).parent / "1.tar").write_bytes(bytes((Path(many).parent / "1.tar").stat().st_size))
    os.utime(Path(many).parent / "1.tar", ns=(0, int(lines_of(Path(many).parent)[1][2])))
    assert cli.main(words) == 1  # 64 of 224 samples
    assert re.search(r"data: indexed 3 shards in \d+\.\d s", (tmp_path / "logs" / "indexed" / "out.log").read_text())
    log = (tmp_path / "logs" / "run" / "out.log").read_text()
    assert re.search(r"--max-skipped must be at least .* got 0.1, and \d+ of \d+ were: \d+ x .*1\.tar from byte 0", log)
    assert "had 64 when it was indexed" in (tmp_path / "logs" / "run" / "skipped.jsonl").read_text()
    assert cli.main([*words, "--name", "allowed", "--steps", "20", "--max-skipped", "0.5"]) == 0


# ---- headers of tars


def members_of(path: Path) -> list[tuple[str, int, int]]:
    data = path.read_bytes()
    found = tars.members(lambda start, stop: data[start:stop], len(data))
    return [(member.name, member.offset, member.size) for member in found]


def members_by_tarfile(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as tar:
        return [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]


def write_members(path: Path, *names: str, **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 700 * number, 1.5  # a fraction, for which Python writes a header of its own
            tar.addfile(member, io.BytesIO(bytes(700 * number)))
    return path


NAMES = ["0.jpg", "folder/" * 12 + "0.jpg", "folder/" * 40 + "0.jpg", "é.jpg", "x" * 90 + ".jpg", "x" * 120 + ".jpg"]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
FITTING = [(name, kind) for name in NAMES for kind in FORMATS if kind or (len(name) < 250 and "x" * 120 not in name)]


@pytest.mark.parametrize(("name", "kind"), FITTING, ids=range(len(FITTING)))
def test_headers_are_read_as_tarfile_reads_them(tmp_path: Path, name: str, kind: int) -> None:
    path = write_members(tmp_path / "a.tar", "1.txt", name, "1.jpg", "b/1.txt", format=kind)
    assert members_of(path) == members_by_tarfile(path)
    assert [member[0] for member in members_of(path)] == ["1.txt", name, "1.jpg", "b/1.txt"]


def test_folders_links_and_what_is_said_of_all_files_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    headers = {"comment": "of all"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
        for name, kind in (("f", tarfile.DIRTYPE), ("l", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE), ("0.jpg", b"0")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "0.jpg"
            tar.addfile(member)
    assert [name for name, _, _ in members_of(path)] == ["0.jpg"]


@pytest.mark.parametrize("place", [0, 100, 124, 130, 150, 156, 257])
def test_a_damaged_header_is_refused(tmp_path: Path, place: int) -> None:
    path = write_members(tmp_path / "a.tar", "0.jpg", "0.txt", format=tarfile.GNU_FORMAT)
    data = bytearray(path.read_bytes())
    data[512 + place] ^= 1  # the second header
    path.write_bytes(data)
    with pytest.raises(tars.BadTar, match="no header and no end at byte 512"):
        members_of(path)


def header_of(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """With a right sum, whatever it says."""
    header = bytearray(name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size.ljust(12, b"\0"))
    header += b"00000000000\0" + b" " * 8 + kind + bytes(100) + b"ustar\x0000" + bytes(512 - 265)
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def sized(size: int) -> bytes:
    return b"%011o\0" % size


HOSTILE_TARS = {
    "negative size": (header_of(b"0.jpg", b"-0000001000"), "a file of -512 bytes at byte 0"),
    "negative binary size": (header_of(b"0.jpg", b"\xff" * 10 + b"\xfe\x00"), "a file of -512 bytes at byte 0"),
    "size beyond the end": (header_of(b"0.jpg", sized(2**33 - 1)), "a file of 8589934591 bytes at byte 0 of"),
    "huge binary size": (header_of(b"0.jpg", b"\x80" + b"\xff" * 11), "a file of [0-9]+ bytes at byte 0 of"),
    "no number": (header_of(b"0.jpg", b"zz"), "a file of None bytes"),
    "sparse": (header_of(b"0.jpg", sized(0), b"S"), "a sparse file at byte 0"),
    "sparse by a record": (
        header_of(b"x", sized(22), b"x") + b"22 GNU.sparse.major=1\n".ljust(512, b"\0") + header_of(b"a", sized(0)),
        "a sparse file at byte 1024",
    ),
    "negative size by a record": (
        header_of(b"x", sized(13), b"x") + b"13 size=-512\n".ljust(512, b"\0") + header_of(b"a", sized(0)),
        "a file of None bytes at byte 1024",
    ),
    "a name for all": (
        header_of(b"g", sized(11), b"g") + b"11 path=ab\n".ljust(512, b"\0") + header_of(b"a", sized(0)),
        "a header at byte 0 that names all files after it",
    ),
    "record without end": (header_of(b"x", sized(9), b"x") + b"999 path=".ljust(512, b"\0"), "a damaged header"),
    "record of no length": (header_of(b"x", sized(9), b"x") + b"0 path=a\n".ljust(512, b"\0"), "a damaged header"),
    "huge header": (header_of(b"x", sized(2**21), b"L") + bytes(2**21), "a header of 2097152 bytes at byte 0"),
}


@pytest.mark.parametrize("case", HOSTILE_TARS)
def test_tars_that_lie_are_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE_TARS[case]
    (tmp_path / "a.tar").write_bytes(content + bytes(1024))
    with pytest.raises(ValueError, match=rf"a\.tar: it has {message}"):
        open_source(str(tmp_path / "a.tar"))


# ---- ranks


def opened_on_a_rank(rank: int, group: Any, folder: str, own_disk: bool) -> tuple[list[str], str]:
    """What rank 1 sees, which may have another disk than rank 0: only the shards are on both."""
    world = World(torch.device("cpu"), rank, 2, group)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache{rank}"
    real = index._has

    def only_own(file: Path, size: int) -> bool:
        return not (own_disk and f"cache{1 - rank}" in str(file)) and real(file, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # so that the index is in the cache
        patch.setattr(index, "_has", only_own)
        patch.setattr(index, "make", index.make if rank == 0 else None)
        source: Any = open_source(f"{folder}/{{0..2}}.tar", world=world)
    return texts(source), str(source._index.files[0])


@pytest.mark.parametrize("own_disk", [False, True])
def test_one_rank_makes_the_index_and_others_are_given_it(many: str, pool: Pool, own_disk: bool) -> None:
    (first, at_first), (second, at_second) = pool.run(2, opened_on_a_rank, str(Path(many).parent), own_disk)
    assert first == second == [f"caption {i}" for i in range(224)]
    assert "cache0" in at_first
    assert ("cache1" if own_disk else "cache0") in at_second


def failing_on_a_rank(rank: int, group: Any, folder: str) -> str:
    with pytest.raises(ValueError, match="must be whole") as error:
        open_source(f"{folder}/{{0..3}}.tar", world=World(torch.device("cpu"), rank, 2, group))
    return str(error.value)


def test_bad_shards_are_an_error_on_all_ranks(many: str, pool: Pool) -> None:
    (Path(many).parent / "3.tar").write_bytes(b"x" * 1024)
    first, second = pool.run(2, failing_on_a_rank, str(Path(many).parent))
    assert "3.tar" in first
    assert first == second
