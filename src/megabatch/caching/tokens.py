"""Chunks of a budget of tokens: rows in the order of their lengths, each chunk as wide as its longest."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .arguments import Argument
from .batch import Batch

MASK = "attention_mask"


def cut_by_tokens(batch: Batch, chunk_tokens: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The bounds of chunks of at most so many tokens, and the order that the batch has been brought into for them."""
    masks = [a for a in batch.arguments if MASK in a.names and isinstance(a.value, Tensor) and a.value.dim() == 2]
    lengths = _used(masks[0].value) if masks else _lengths_of_texts(batch)
    if lengths and max(lengths) > chunk_tokens:
        raise ValueError(
            f"chunked: chunk_tokens must hold the longest row, got {chunk_tokens} for one of {max(lengths)} tokens."
        )
    order = sorted(range(batch.rows), key=lambda i: -lengths[i])
    lengths = [lengths[i] for i in order]
    for argument in batch.arguments:
        if masks and isinstance(argument.value, Tensor) and argument.value.shape[:2] == masks[0].value.shape:
            argument.trimmed = argument.split
    for argument in batch.arguments:
        argument.reorder(order)
    batch.lengths = lengths
    batch.settle()
    bounds, start = [], 0
    while start < max(batch.rows, 1):
        rows = chunk_tokens // max(lengths[start], 1) if lengths else 1
        bounds.append((start, min(start + rows, batch.rows)))
        start += rows
    return bounds, order


def _used(mask: Tensor) -> list[int]:
    """Columns up to the last one that a row uses."""
    used = mask.ne(0).flip(1).int()
    lengths = (mask.shape[1] - used.argmax(1)) * used.any(1) if mask.shape[1] else used.sum(1)
    return lengths.tolist()


def _lengths_of_texts(batch: Batch) -> list[int]:
    """By the tokenizer, if the transform is one; otherwise the number of items, or of characters."""
    listed = [a for a in batch.arguments if a.split and isinstance(a.value, list | tuple)]
    if not listed:
        raise ValueError(
            f"chunked: chunk_tokens must find the lengths of rows, in a tensor named {MASK} or in a list that is named "
            "in split, got neither. Use chunk_size."
        )
    tokens: Any = _tokenized(listed[0])
    if isinstance(tokens, Mapping) and MASK in tokens:
        return _used(tokens[MASK])
    return [len(item) for item in listed[0].value]


def _tokenized(argument: Argument) -> Any:
    return argument.transform(argument.value) if argument.transform is not None else None
