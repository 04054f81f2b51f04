"""Pairs of texts, with or without texts that do not belong to them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from .source import Sample

PAIR = re.compile(r"query|anchor|positive|pos|neg|negatives?(_\d+)?")  # keys that are used


def pair_of(values: Mapping[str, Any], where: str) -> Sample:
    """Of `{"query": ..., "positive": ..., "negatives": [...]}`, or FlagEmbedding's `{"query": ..., "pos": [...],
    "neg": [...]}`, of which the first of `pos` is the positive.

    Negatives may be left out, or be "negative", "negative_1" and so on. "anchor" is another name of "query". Other keys
    are not used. Raises ValueError.
    """
    if not {"positive", "negatives"}.isdisjoint(values) and not {"pos", "neg"}.isdisjoint(values):
        raise ValueError(f"{where} must have either positive and negatives, or pos and neg, got {', '.join(values)}.")
    query = _text(values.get("query", values.get("anchor")), "query", where)
    positives = _texts(values["pos"], "pos", where) if "pos" in values else [values.get("positive")]
    if not positives:
        raise ValueError(f"{where}: pos must have at least one text, got [].")
    negatives: list[str] = []
    for key, value in values.items():
        if key.startswith("neg") and PAIR.fullmatch(key) and value is not None:
            negatives += [value] if isinstance(value, str) else _texts(value, key, where)
    positive = _text(positives[0], "positive", where)
    return Sample(positive, duplicate_key=query, query=query, negatives=tuple(negatives))


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
