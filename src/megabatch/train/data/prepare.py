"""Samples made tensors: the same tensors whoever makes them, and wherever."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..feature_cache import FeatureCache
from ..preprocessing import Preprocessing
from .captions import drawn
from .images import content_key, decode
from .source import LARGEST_TEXT, BadSample, Sample, Source, Unread, printable
from .storage import StorageError


@dataclass
class Piece:
    """Some rows of a batch.

    Attributes:
        first: Images, uint8 `[n, channels, size, size]`, or tokens of queries.
        second: Tokens of captions or positives, `[n, length]`.
        ids: `[n]`: equal for rows that are not each other's negatives; labels, where samples have them.
        bad: Name of each sample that was left out, and the reason.
        unread: Those that were left out because the disk failed: number among the samples asked for, name and reason.
        negatives: Tokens of all rows' negatives, or of their further captions, `[k, length]`; None where the source
            never has any.
        negative_ids: `[k]`: equal to the id of a row with that text; of a further caption, that of its row.
        keys: `[n, 2]`, of images in a cache of features; None where there is no cache.
        known: `[n]`: whether the row's feature was found there. `first` has the images of all other rows.
        features: Of the rows that are known; None where no row is.
    """

    first: Tensor
    second: Tensor
    ids: Tensor
    bad: list[tuple[str, str]]
    unread: list[tuple[int, str, str]] = field(default_factory=list)
    negatives: Tensor | None = None
    negative_ids: Tensor | None = None
    keys: Tensor | None = None
    known: Tensor | None = None
    features: Tensor | None = None


@dataclass(frozen=True)
class Prepare:
    """What happens to a sample on its way to the towers.

    Attributes:
        tokenizer: Texts to tokens `[n, length]`, of one length for all texts.
        preprocessing: Images to pixels, of one size for all images.
        crop_scale: See `Preprocessing`. At 1 training takes the same part of an image as evaluation.
        seed: Of the crops. Each is drawn from the seed, the number of the pass and the number of the sample.
        duplicates: What rows must share to have one id: "caption" or "image"; with "none" ids tell nothing.
        train: Otherwise nothing is drawn.
        max_pixels: Of an image, by its header; 0: any number.
        cache: Features of images that need not be prepared.
    """

    tokenizer: Callable[[Sequence[str]], Tensor]
    preprocessing: Preprocessing
    crop_scale: float
    seed: int
    duplicates: str
    train: bool
    max_pixels: int = 0
    cache: FeatureCache | None = None

    def __call__(self, source: Source, passes: Sequence[int], indices: Iterable[int]) -> Piece:
        """The samples with these numbers, but for those that are bad. `passes` is how often each was met before."""
        rows: list[_Row] = []
        bad: list[tuple[str, str]] = []
        unread: list[tuple[int, str, str]] = []
        for place, (number, index) in enumerate(zip(passes, indices, strict=True)):
            try:
                rows.append(self._row(source, number, index))
            except Unread as reason:  # noqa: PERF203
                unread.append((place, source.name(index), str(reason)))
            except StorageError as error:  # without the name of the file
                unread.append((place, source.name(index), printable(str(error).rpartition(": ")[2])))
            except BadSample as reason:
                bad.append((source.name(index), str(reason)))
        samples = [row.sample for row in rows]
        queries = [sample.query for sample in samples if sample.query is not None]
        texts = [sample.text for sample in samples]
        negatives = [text for sample in samples for text in (*sample.negatives, *sample.captions)]
        negative_ids = [_hash("text", text) for sample in samples for text in sample.negatives]
        negative_ids += [self._id(sample) for sample in samples for _ in sample.captions]
        query_tokens, tokens, negative_tokens = self._tokens(queries, texts, negatives)
        shape = (0, self.preprocessing.channels, self.preprocessing.size, self.preprocessing.size)
        images = [row.pixels for row in rows if row.pixels is not None]
        pixels = torch.stack(images) if images else torch.zeros(shape, dtype=torch.uint8)
        features = [row.feature for row in rows if row.feature is not None]
        cached = self.cache is not None
        return Piece(
            first=query_tokens if source.texts_only else pixels,
            second=tokens,
            ids=torch.tensor([self._id(sample) for sample in samples], dtype=torch.int64),
            bad=bad,
            unread=unread,
            negatives=negative_tokens if source.has_negatives else None,
            negative_ids=torch.tensor(negative_ids, dtype=torch.int64) if source.has_negatives else None,
            keys=torch.tensor([row.key for row in rows], dtype=torch.int64).view(-1, 2) if cached else None,
            known=torch.tensor([row.feature is not None for row in rows], dtype=torch.bool) if cached else None,
            features=torch.stack(features) if features else None,
        )

    def _row(self, source: Source, number: int, index: int) -> "_Row":
        sample = source[index]
        if not source.has_negatives:  # of several captions, one
            sample = drawn(sample, self.seed, number, index) if self.train else replace(sample, captions=())
        _check_texts(sample)
        key, feature = (0, 0), None
        if self.cache is not None:
            key = self.cache.key(_content_key(sample), sample.rgb_first)
            feature = self.cache.get(key)
        pixels = self._pixels(sample, number, index) if sample.image is not None and feature is None else None
        return _Row(replace(sample, image=None), pixels, key, feature)  # the content of its file is freed

    def _pixels(self, sample: Sample, number: int, index: int) -> Tensor:
        image = sample.image
        if isinstance(image, bytes):
            image = decode(image, self.max_pixels)
        assert image is not None
        random = Random(f"{self.seed}/{number}/{index}") if self.train and self.crop_scale < 1 else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, of transparency that is dropped
                return self.preprocessing(image, rgb_first=sample.rgb_first, crop_scale=self.crop_scale, random=random)
        except (ValueError, OSError):
            raise BadSample(f"image of mode {image.mode}, {image.width} x {image.height}, cannot be resized") from None

    def _tokens(self, *groups: list[str]) -> Sequence[Tensor]:
        """The tokens of each group, of one call of the tokenizer. It is never asked for nothing: some cannot."""
        texts = [text for group in groups for text in group]
        tokens = self.tokenizer(texts) if texts else self.tokenizer([""])[:0]
        return torch.split(tokens, [len(group) for group in groups])

    def _id(self, sample: Sample) -> int:
        if sample.label is not None:
            return sample.label
        by_image = self.duplicates == "image" or sample.captions
        return _hash("image", sample.duplicate_key) if by_image else _hash("text", sample.text)


class _Row(NamedTuple):
    """Of a sample: what is left of it, its pixels unless its feature is known, and its key in the cache of features."""

    sample: Sample
    pixels: Tensor | None
    key: tuple[int, int]
    feature: Tensor | None


def _content_key(sample: Sample) -> str:
    if isinstance(sample.image, Image.Image):  # drawn, and known to others by its name
        return content_key(repr((sample.image.mode, sample.image.size)).encode() + sample.image.tobytes())
    return sample.duplicate_key


def _check_texts(sample: Sample) -> None:
    texts = [sample.text, *sample.captions, *sample.negatives] + ([] if sample.query is None else [sample.query])
    if not all(text.strip() for text in texts):
        raise BadSample("empty caption" if sample.query is None else "empty text")
    if max(map(len, texts)) > LARGEST_TEXT:
        raise BadSample(f"text of more than {LARGEST_TEXT} characters")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise BadSample("text is not valid Unicode") from None


def _hash(kind: str, text: str) -> int:
    """63 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{kind}/{text}".encode(), digest_size=8).digest(), "big") >> 1
