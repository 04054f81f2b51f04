"""Tensors inside tuples, lists, dicts and the like: BatchEncoding, ModelOutput, named tuples, dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF_PRECISION = (torch.float16, torch.bfloat16)

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
    leaf, entries = Leaf(path, names, value), entries_of(value)
    if is_leaf(leaf) or entries is None:
        return [leaf], next
    listed = isinstance(value, list | tuple)
    indexed = listed or isinstance(value, MutableMapping)
    leaves: list[Leaf] = []
    builds: dict[Any, Build] = {}
    for key, item in entries.items():
        inner = path + (f"[{key!r}]" if indexed else f".{key}")
        found, builds[key] = flatten(item, inner, names if listed else names | {key}, is_leaf)
        leaves += found
    hollow = with_entries(value, dict.fromkeys(entries))
    return leaves, lambda values: with_entries(hollow, {key: build(values) for key, build in builds.items()})


def tensors_of(value: Any) -> list[Tensor]:
    leaves, _ = flatten(value)
    return [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same containers with function(tensor) in place of every tensor."""
    leaves, build = flatten(value)
    return build(iter([function(x.value) if isinstance(x.value, Tensor) else x.value for x in leaves]))


def is_array(value: Any) -> bool:
    """Of numpy and the like, not a tensor."""
    return not isinstance(value, Tensor) and getattr(value, "shape", ()) != ()


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
