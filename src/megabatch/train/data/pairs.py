"""Pairs of texts, with or without texts that do not belong to them: a JSON object per line."""

import json
from pathlib import Path
from typing import Any

import torch

from ..fingerprint import data_line, numbers
from .source import OpenFiles, Sample, Source, check_file, lines_of


class TextPairs(Source):
    """Lines of `{"query": ..., "positive": ..., "negatives": [...]}`, or FlagEmbedding's
    `{"query": ..., "pos": [...], "neg": [...]}`, of which the first of `pos` is the positive.

    Negatives may be left out. Other keys are not used. All lines are checked when the file is opened; what is kept is
    where each begins.
    """

    texts_only = True

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._open_files = OpenFiles()
        places: list[tuple[int, int, int]] = []  # offset, size, number of the line
        offset = 0
        check_file(self._path)
        with self._path.open("rb") as file:
            for number, line in enumerate(lines_of(file, self._path), start=1):
                if line.strip():
                    _, _, negatives = _parsed(line, f"{path}: line {number}")
                    self.has_negatives |= bool(negatives)
                    places.append((offset, len(line), number))
                offset += len(line)
        if not places:
            raise ValueError(f"{path}: must have a JSON object per line, is empty.")
        self._places = torch.tensor(places, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        offset, size, _ = self._places[index].tolist()
        query, positive, negatives = _parsed(self._open_files.read(self._path, offset, size), self.name(index))
        return Sample(positive, duplicate_key=query, query=query, negatives=tuple(negatives))

    def name(self, index: int) -> str:
        return f"{self._path}: line {int(self._places[index, 2])}"

    def fingerprint(self) -> list[str]:
        return [data_line(self._path, len(self), numbers(self._places))]


def _parsed(line: bytes, where: str) -> tuple[str, str, list[str]]:
    try:
        pair = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a JSON object, got {line[:40]!r}: {error}.") from None
    if not isinstance(pair, dict):
        raise ValueError(f"{where} must be a JSON object, got {_short(pair)}.")
    if "negative" in pair or "positives" in pair:
        wrong = "negative" if "negative" in pair else "positives"
        raise ValueError(f"{where} must call its texts query, positive and negatives, got {wrong!r}.")
    if ("positive" in pair or "negatives" in pair) and ("pos" in pair or "neg" in pair):
        raise ValueError(f"{where} must have either positive and negatives, or pos and neg, got {', '.join(pair)}.")
    query = _text(pair.get("query"), "query", where)
    if "pos" in pair:
        positives = _texts(pair["pos"], "pos", where)
        if not positives:
            raise ValueError(f"{where}: pos must have at least one text, got [].")
        return query, positives[0], _texts(pair.get("neg") or [], "neg", where)
    positive = _text(pair.get("positive"), "positive", where)
    return query, positive, _texts(pair.get("negatives") or [], "negatives", where)


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
