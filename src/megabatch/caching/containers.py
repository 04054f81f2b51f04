"""Tensors inside tuples, lists, dicts and the like: BatchEncoding, ModelOutput, named tuples, dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)

Name = str | int
Build = Callable[[Iterator[Any]], Any]


class Leaf(NamedTuple):
    path: str  # how one would write it: "inputs['input_ids']"
    names: frozenset[Name]  # of the argument and of the keys that lead to it
    value: Any


IsLeaf = Callable[[Leaf], bool]


def flatten(
    value: Any, path: str = "", names: frozenset[Name] = frozenset(), is_leaf: IsLeaf = lambda _: False
) -> tuple[list[Leaf], Build]:
    """The leaves, and a function that builds the same containers around others. It keeps no tensor alive."""
    leaves, build = _flatten(value, path, names, is_leaf)
    hollow = build(iter([torch.empty(0)] * len(leaves)))
    return leaves, _flatten(hollow, path, names, lambda _: False)[1]


def _flatten(value: Any, path: str, names: frozenset[Name], is_leaf: IsLeaf) -> tuple[list[Leaf], Build]:
    entries, leaf = entries_of(value), Leaf(path, names, value)
    if entries is None or is_leaf(leaf):
        return [leaf], next
    listed = isinstance(value, list | tuple)
    indexed = listed or isinstance(value, MutableMapping)
    parts = {
        key: _flatten(
            item, path + (f"[{key!r}]" if indexed else f".{key}"), names if listed else names | {key}, is_leaf
        )
        for key, item in entries.items()
    }
    leaves = [leaf for found, _ in parts.values() for leaf in found]
    return leaves, lambda values: with_entries(value, {key: build(values) for key, (_, build) in parts.items()})


def tensors_of(value: Any) -> list[Tensor]:
    leaves, _ = _flatten(value, "", frozenset(), lambda _: False)
    return [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)]


def hides_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object that is no container has tensors in its attributes, as a cache of keys and values does."""
    held = list(getattr(value, "__dict__", {}).values())
    leaves, _ = _flatten(held, "", frozenset(), lambda _: False)
    return any(isinstance(x.value, Tensor) or (depth > 0 and hides_tensors(x.value, depth - 1)) for x in leaves)


def entries_of(value: Any) -> dict[Any, Any] | None:
    """The items of a container by key, position or field; None for anything else."""
    if isinstance(value, MutableMapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def with_entries(like: Any, entries: dict[Any, Any]) -> Any:
    """A container of the same kind with these entries alone. Missing fields of a dataclass are None."""
    kind: Any = type(like)
    values = list(entries.values())
    if hasattr(like, "_fields"):  # a named tuple
        return kind(*values) if len(values) == len(like) else tuple(values)
    if isinstance(like, list | tuple):
        return kind(values)
    is_mapping, made = isinstance(like, MutableMapping), copy.copy(like)
    if is_mapping and dataclasses.is_dataclass(like):  # a ModelOutput
        return kind(**entries)
    if is_mapping:  # the copy keeps the factory of a defaultdict
        made.clear()
        made.update(entries)
        return made
    for field in dataclasses.fields(like):
        object.__setattr__(made, field.name, entries.get(field.name))  # also of a frozen one
    return made
