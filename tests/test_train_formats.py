"""Formats of training data: names of images and captions, tables, JSON lines, folders and Parquet."""

import json
import pickle
from collections import Counter
from typing import Any

import pytest

from megabatch.train.data.captions import Captioned, Fields, drawn
from megabatch.train.data.source import LARGEST_TEXT, BadSample, Sample

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
    assert isinstance(found, Captioned)
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
    assert Fields.of_flags("jpg; png;", "txt", "a;b", [1.0]) == Fields(("jpg", "png"), ("txt",), ("a", "b"), (1.0,))
    assert Fields.of_flags(None, None, None, None) == Fields()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((None, None, "a;b", [1.0, 2.0, 3.0]), "--json-text-key-probs.*one per key of --json-text-key, got 3 for 2"),
        ((None, "txt", None, [1.0]), "got 1 for 0"),
        ((None, None, "a;b", [0.0, 0.0]), r"not all 0, got 0.0 0.0"),
        ((None, None, "a;b", [1.0, -1.0]), r"at least 0.*got 1.0 -1.0"),
        ((None, None, "a", [float("nan")]), "finite.*got nan"),
        ((" ; ", None, None, None), r"--image-key: must have a name.*got ' ; '"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fields.of_flags(*flags)


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
    weighted = draws(Captioned("a", "key", captions=("b", "c"), weights=(5, 4, 1)), count)
    for counts, shares in ((equal, dict.fromkeys("abcd", 0.25)), (weighted, {"a": 0.5, "b": 0.4, "c": 0.1})):
        assert set(counts) == set(shares)
        for text, share in shares.items():
            assert abs(counts[text] - share * count) < 5 * (count * share * (1 - share)) ** 0.5


def test_a_sample_with_one_caption_keeps_it() -> None:
    sample = pickle.loads(pickle.dumps(Fields().sample_of({"jpg": b"J", "json": as_json(caption="c")})))
    assert drawn(sample, 0, 0, 0) is sample
