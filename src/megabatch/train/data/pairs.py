"""Pairs of texts, with or without texts that do not belong to them: a JSON object per line."""

import json
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..fingerprint import data_line, numbers
from . import storage
from .source import Sample, Source, check_file, lines_of

PAIR = re.compile(r"query|anchor|positive|pos|neg|negatives?(_\d+)?")  # keys that are used


class TextPairs(Source):
    """Lines of `{"query": ..., "positive": ..., "negatives": [...]}`, or FlagEmbedding's
    `{"query": ..., "pos": [...], "neg": [...]}`, of which the first of `pos` is the positive.

    Negatives may be left out, or be "negative", "negative_1" and so on. "anchor" is another name of "query". Other keys
    are not used. All lines are checked when the file is opened; what is kept is where each begins.
    """

    texts_only = True

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        places = array("q")  # offset, size and number of each line
        offset = 0
        check_file(self._path)
        with self._path.open("rb") as file:
            for number, line in enumerate(lines_of(file, self._path), start=1):
                if line.strip():
                    self.has_negatives |= bool(_parsed(line, f"{path}: line {number}").negatives)
                    places.extend((offset, len(line), number))
                offset += len(line)
        if not places:
            raise ValueError(f"{path}: must have a JSON object per line, is empty.")
        self._places = torch.frombuffer(places, dtype=torch.int64).view(-1, 3)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        offset, size, _ = self._places[index].tolist()
        return _parsed(storage.read(str(self._path), offset, offset + size), self.name(index))

    def name(self, index: int) -> str:
        return f"{self._path}: line {int(self._places[index, 2])}"

    def fingerprint(self) -> list[str]:
        return [data_line(self._path, len(self), numbers(self._places))]


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        values = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a JSON object, got {line[:40]!r}: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a JSON object, got {_short(values)}.")
    return values


def pair_of(values: Mapping[str, Any], where: str) -> Sample:
    """Raises ValueError."""
    if not {"positive", "negatives"}.isdisjoint(values) and not {"pos", "neg"}.isdisjoint(values):
        raise ValueError(f"{where} must have either positive and negatives, or pos and neg, got {', '.join(values)}.")
    query = _text(values.get("query", values.get("anchor")), "query", where)
    positives = _texts(values["pos"], "pos", where) if "pos" in values else [values.get("positive")]
    if not positives:
        raise ValueError(f"{where}: pos must have at least one text, got [].")
    negatives: list[str] = []
    for key in values:
        if key.startswith("neg") and PAIR.fullmatch(key):
            is_text = isinstance(values[key], str) and key not in ("neg", "negatives")
            negatives += [values[key]] if is_text else _texts(values[key] or [], key, where)
    positive = _text(positives[0], "positive", where)
    return Sample(positive, duplicate_key=query, query=query, negatives=tuple(negatives))


def _parsed(line: bytes, where: str) -> Sample:
    return pair_of(json_object(line, where), where)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a text, got {_short(value)}.")
    return value


def _texts(value: Any, key: str, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where}: {key} must be a list of texts, got {_short(value)}.")
    return value


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
