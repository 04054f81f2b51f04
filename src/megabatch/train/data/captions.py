"""What of a record is its image, its captions or its texts, and which of several captions a pass takes.

A record is the files of a sample, by suffix, or a row of a table, by column.
"""

import json
import math
import re
import reprlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from ..config import Data
from .images import content_key, read_file
from .source import LARGEST_FILE, LARGEST_TEXT, BadSample, Sample, Source

IMAGE_SUFFIXES = ("jpg", "png", "jpeg", "webp")
IMAGE_COLUMNS = ("image", "filepath", "file_name", *IMAGE_SUFFIXES)
CAPTION_COLUMNS = ("caption", "captions", "text", "title", "txt")
PAIR = re.compile(r"query|anchor|positive|pos|neg|negatives?(_\d+)?")  # columns of a pair of texts
_FIRST = 64  # samples, to find out whether any can be used


@dataclass(frozen=True)
class Fields:
    """Names of images and captions, as OpenCLIP 4's flags give them. Of several names, the first that is there counts.

    Attributes:
        image_keys: Suffixes of files, or columns. Default: `IMAGE_SUFFIXES`, `IMAGE_COLUMNS`.
        text_keys: The same of captions. Default: txt, or else the "caption" of a json file; `CAPTION_COLUMNS`.
        json_text_keys: Keys of a sample's json file, or columns, instead of `text_keys`. A value is a caption or a list
            of captions. The first key with a caption counts.
        probs: Weights of the first of these keys. Captions of all keys with a weight count, and are drawn by it. Keys
            of weight 0 count where there are none.
    """

    image_keys: tuple[str, ...] = ()
    text_keys: tuple[str, ...] = ()
    json_text_keys: tuple[str, ...] = ()
    probs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.probs) > len(self.json_text_keys):
            counts = f"{len(self.probs)} for {len(self.json_text_keys)}"
            raise ValueError(f"--json-text-key-probs: must be at most one per key of --json-text-key, got {counts}.")
        if self.probs and not (all(0 <= prob < math.inf for prob in self.probs) and any(self.probs)):
            got = " ".join(map(str, self.probs))
            raise ValueError(f"--json-text-key-probs: must be finite, at least 0, and not all 0, got {got}.")

    @classmethod
    def of_flags(cls, options: Data) -> "Fields":
        """Of names with semicolons between them."""
        flags = (options.image_key, options.text_key, options.json_text_key)
        image, text, json_text = (tuple(filter(None, map(str.strip, (flag or "").split(";")))) for flag in flags)
        try:
            probs = tuple(map(float, re.findall(r"[^\s;,]+", options.json_text_key_probs or "")))
        except ValueError:
            got = repr(options.json_text_key_probs)
            raise ValueError(f"--json-text-key-probs: must be numbers, such as 0.7;0.3, got {got}.") from None
        return cls(image, text, json_text, probs)

    def image_key(self, suffixes: Container[str]) -> str:
        """Which of a sample's files is the image. Suffixes are in lower case, without the dot."""
        return _first(self.image_keys or IMAGE_SUFFIXES, suffixes, "no image")

    def text_key(self, suffixes: Container[str]) -> str:
        """Which of a sample's files has the captions."""
        texts = () if self.json_text_keys else self.text_keys or ("txt",)
        return _first([*texts, "json"], suffixes, "no caption")

    def sample_of(self, files: Mapping[str, bytes]) -> Sample:
        """Of its files by their suffixes. Those that `image_key` and `text_key` do not name need not be there."""
        text_key = self.text_key(files)
        image, text = files[self.image_key(files)], files[text_key]
        if len(image) > LARGEST_FILE or len(text) > LARGEST_TEXT:
            raise BadSample(f"image of more than {LARGEST_FILE} or text of more than {LARGEST_TEXT} bytes")
        try:
            if text_key != "json":
                return Sample(text.decode(), content_key(image), image, rgb_first=True)
            values = json.loads(text.decode())
        except UnicodeDecodeError:
            raise BadSample("caption is not UTF-8") from None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise BadSample("json is not an object")
        return self._captioned(image, [values], self.json_text_keys or ("caption",), "no caption in json")

    @property
    def columns(self) -> tuple[Sequence[str], Sequence[str]]:
        """Of images and of captions, in tables."""
        return self.image_keys or IMAGE_COLUMNS, self.json_text_keys or self.text_keys or CAPTION_COLUMNS

    def image_of(self, row: Mapping[str, Any]) -> Any:
        """The bytes or the path of an image, where a row has either, or a struct with either."""
        value = next(filter(None, map(row.get, self.columns[0])), None)
        return value.get("bytes") or value.get("path") if isinstance(value, dict) else value

    def sample_of_rows(self, rows: Sequence[Mapping[str, Any]], folder: Path) -> Sample:
        """Of the rows of an image. A path starts at the folder."""
        image = self.image_of(rows[0])
        if isinstance(image, str):
            image = read_file(folder / image)
        if not isinstance(image, bytes):
            raise BadSample("no image")
        return self._captioned(image, rows, self.columns[1], "no caption")

    def _captioned(self, image: bytes, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], missing: str) -> Sample:
        weighted = [caption for row in rows for caption in self._weighted(row, keys)]
        if not weighted:
            raise BadSample(missing)
        (text, *others), weights = zip(*weighted, strict=True)
        return Sample(text, content_key(image), image, rgb_first=True, captions=tuple(others), weights=weights)

    def _weighted(self, row: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[str, float]]:
        """The captions of a row, with their weights. What is no text does not count."""
        groups = [_texts(row.get(key)) for key in keys]
        weights_of_groups = zip(groups, self.probs, strict=False)
        weighted = [(text, prob / len(group)) for group, prob in weights_of_groups for text in group if prob]
        return weighted or [(text, 1.0) for text in next(filter(None, groups), [])]


def pair_of(row: Mapping[str, Any], where: str) -> Sample:
    """Of `{"query": ..., "positive": ..., "negatives": [...]}`, or FlagEmbedding's `{"query": ..., "pos": [...],
    "neg": [...]}`, of which the first of `pos` is the positive.

    Negatives may be left out, or be "negative", "negative_1" and so on. "anchor" is another name of "query". Other keys
    are not used. Raises ValueError.
    """
    if not {"positive", "negatives"}.isdisjoint(row) and not {"pos", "neg"}.isdisjoint(row):
        raise ValueError(f"{where} must have either positive and negatives, or pos and neg, got {', '.join(row)}.")
    if row.keys().isdisjoint(("query", "anchor")):
        raise ValueError(
            f"{where} must have query and positive, or image and caption, got {', '.join(row)}. Rename its keys, or "
            "name those of an image and a caption with --image-key and --text-key."
        )
    query = _text(row.get("query", row.get("anchor")), f"{where}: query")
    positives = _all_texts(row["pos"], f"{where}: pos") if "pos" in row else [row.get("positive")]
    positive = _text(positives[0] if positives else None, f"{where}: positive")
    negatives: list[str] = []
    for key, value in row.items():
        if key.startswith("neg") and PAIR.fullmatch(key) and value is not None:
            negatives += [value] if isinstance(value, str) else _all_texts(value, f"{where}: {key}")
    return Sample(positive, duplicate_key=query, query=query, negatives=tuple(negatives))


def drawn(sample: Sample, seed: int, number: int, index: int) -> Sample:
    """The sample with one of its captions, drawn by the seed, the number of the pass and that of the sample."""
    if not sample.captions:
        return sample
    random, texts = Random(f"{seed}/{number}/{index}/caption"), (sample.text, *sample.captions)
    (text,) = random.choices(texts, sample.weights or None)
    return replace(sample, text=text, captions=(), weights=())


def check_first(source: Source, advice: str) -> None:
    """Raises ValueError where none of the first samples can be used."""
    reason = None
    for index in range(min(_FIRST, len(source))):
        try:
            source[index]
            return
        except BadSample as error:  # noqa: PERF203
            reason = reason or error
    raise ValueError(f"{source.name(0)}: {reason}, and none of the samples after it can be used. {advice}")


def _first(keys: Sequence[str], suffixes: Container[str], missing: str) -> str:
    key = next((key for key in keys if key in suffixes), None)
    if key is None:
        raise BadSample(missing)
    return key


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text.strip()]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, got {reprlib.repr(value)}.")
    return value


def _all_texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{what} must be a list of texts, got {reprlib.repr(value)}.")
    return value
