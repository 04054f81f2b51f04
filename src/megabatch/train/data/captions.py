"""What of a sample is its image and what are its captions, and which of several captions a pass takes."""

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .images import content_key
from .source import LARGEST_FILE, LARGEST_TEXT, BadSample, Sample

IMAGE_SUFFIXES = ("jpg", "png", "jpeg", "webp")
IMAGE_COLUMNS = ("image", "filepath", "file_name", *IMAGE_SUFFIXES)
CAPTION_COLUMNS = ("caption", "captions", "text", "title", "txt")


@dataclass(frozen=True)
class Captioned(Sample):
    """A sample with weights of `text` and of each of `captions`, where they are not drawn equally often."""

    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Fields:
    """Names of image and captions, as OpenCLIP 4's flags give them. Of several names, the first that is there counts.

    Attributes:
        image_keys: Suffixes of image files, or columns. Default: `IMAGE_SUFFIXES`, `IMAGE_COLUMNS`.
        text_keys: Suffixes of caption files, or columns. Default: txt, or else the caption in a sample's json file;
            `CAPTION_COLUMNS`.
        json_text_keys: Keys of a sample's json file, or columns, instead of `text_keys`. Each value is a caption or a
            list of captions; the first key that has any counts.
        probs: Weights of the first of `json_text_keys`. Keys with a weight all count, each caption is drawn as often
            as its key's weight says; keys of weight 0 count where no key with a weight has a caption.
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
    def of_flags(
        cls, image_key: str | None, text_key: str | None, json_text_key: str | None, probs: Sequence[float] | None
    ) -> "Fields":
        """Of names with semicolons between them."""
        return cls(
            _split("--image-key", image_key),
            _split("--text-key", text_key),
            _split("--json-text-key", json_text_key),
            tuple(probs or ()),
        )

    def image_key(self, suffixes: Container[str]) -> str:
        """Which of a sample's files is the image. Suffixes are in lower case, without the dot."""
        return _first(self.image_keys or IMAGE_SUFFIXES, suffixes, "no image")

    def text_key(self, suffixes: Container[str]) -> str:
        """Which of a sample's files has the captions."""
        if self.json_text_keys:
            return _first(["json"], suffixes, "no caption")
        return _first([*(self.text_keys or ["txt"]), "json"], suffixes, "no caption")

    def sample_of(self, files: Mapping[str, bytes]) -> Sample:
        """Of its files by their suffixes. It reads those that `image_key` and `text_key` name, and no others."""
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
        return self.captioned(image, values, self.json_text_keys or ("caption",), "no caption in json")

    def captioned(
        self, image: bytes, values: Mapping[str, Any], keys: Sequence[str], missing: str = "no caption"
    ) -> Sample:
        """An image with the captions that are the values of these keys. Values that are no texts do not count."""
        groups = [_texts(values.get(key)) for key in keys]
        probs = self.probs + (0.0,) * (len(keys) - len(self.probs))
        weighted = [
            (text, prob / len(group)) for group, prob in zip(groups, probs, strict=True) for text in group if prob
        ]
        if not weighted:
            weighted = [(text, 1.0) for text in next(filter(None, groups), [])]
        if not weighted:
            raise BadSample(missing)
        (text, *others), weights = zip(*weighted, strict=True)
        return Captioned(text, content_key(image), image, rgb_first=True, captions=tuple(others), weights=weights)


def drawn(sample: Sample, seed: int, number: int, index: int) -> Sample:
    """The sample with one of its captions, drawn by the seed, the number of the pass and that of the sample."""
    if not sample.captions:
        return sample
    weights = sample.weights if isinstance(sample, Captioned) else None
    random = Random(f"{seed}/{number}/{index}/caption")
    (text,) = random.choices((sample.text, *sample.captions), weights)
    return replace(sample, text=text, captions=())


def _split(flag: str, keys: str | None) -> tuple[str, ...]:
    names = tuple(key.strip() for key in (keys or "").split(";") if key.strip())
    if keys is not None and not names:
        raise ValueError(f"{flag}: must have a name, or several with ; between them, got {keys!r}.")
    return names


def _first(keys: Sequence[str], suffixes: Container[str], missing: str) -> str:
    key = next((key for key in keys if key in suffixes), None)
    if key is None:
        raise BadSample(missing)
    return key


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text.strip()]
