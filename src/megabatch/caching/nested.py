"""Tensors inside of tuples, lists, dicts and their relatives: BatchEncoding, ModelOutput, named tuples, dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Name = str | int
Names = frozenset[Name]
Visit = Callable[[Any, str, Names], Any]
IsLeaf = Callable[[Any, str, Names], bool]

NO_NAMES: Names = frozenset()


def never(*_: Any) -> bool:
    return False


def map_leaves(value: Any, visit: Visit, path: str, names: Names = NO_NAMES, is_leaf: IsLeaf = never) -> Any:
    """The same structure in new containers, with `visit(leaf, path, names)` in place of every leaf.

    `path` is how one would write the leaf ("inputs['input_ids']"), `names` are all words that mean it: those of the
    containers it lies in, and its own key. Lists of which `is_leaf(list, path, names)` is true are leaves.
    """
    if isinstance(value, list | tuple) and is_leaf(value, path, names):
        return visit(value, path, names)
    if isinstance(value, Mapping):
        items = {
            key: map_leaves(item, visit, f"{path}[{key!r}]", names | {key}, is_leaf) for key, item in value.items()
        }
        return _mapping_like(value, items)
    if isinstance(value, list | tuple):
        listed = [map_leaves(item, visit, f"{path}[{i}]", names, is_leaf) for i, item in enumerate(value)]
        return type(value)(*listed) if hasattr(value, "_fields") else type(value)(listed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        found = {
            name: map_leaves(getattr(value, name), visit, f"{path}.{name}", names | {name}, is_leaf) for name in fields
        }
        return _dataclass_like(value, found)
    return visit(value, path, names)


def _mapping_like(model: Any, items: dict[Any, Any]) -> Any:
    kind = type(model)
    if dataclasses.is_dataclass(model):  # a ModelOutput
        return kind(**items)
    try:
        return kind(items)
    except TypeError:  # a defaultdict, say
        made = copy.copy(model)
        made.update(items)
        return made


def _dataclass_like(model: Any, fields: dict[str, Any]) -> Any:
    made = copy.copy(model)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # also of a frozen one, and without what its __init__ may do
    return made


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    map_leaves(value, lambda leaf, *_: found.append(leaf) if isinstance(leaf, Tensor) else None, "")
    return found


def holds_tensors(value: Any, depth: int = 4) -> bool:
    """Also out of sight: in the attributes of objects."""
    if isinstance(value, Tensor) or depth == 0:
        return isinstance(value, Tensor)
    if isinstance(value, Mapping):
        return any(holds_tensors(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(holds_tensors(item, depth - 1) for item in value)
    return any(holds_tensors(item, depth - 1) for item in getattr(value, "__dict__", {}).values())


def entries_of(value: Any) -> dict[Name, Any] | None:
    """The outermost entries by name, None where there are none."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def with_entries(value: Any, entries: dict[Any, Any]) -> Any:
    """The same kind of container with these entries only; fields that a dataclass must have are None."""
    if isinstance(value, Mapping):
        return _mapping_like(value, entries) if dataclasses.is_dataclass(value) else dict(entries)
    if isinstance(value, list | tuple):
        return list(entries.values()) if isinstance(value, list) else tuple(entries.values())
    dropped = {field.name: None for field in dataclasses.fields(value) if field.name not in entries}
    return _dataclass_like(value, {**dropped, **entries})
