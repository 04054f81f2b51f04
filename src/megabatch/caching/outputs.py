"""The outputs of an encoder, chunk by chunk, joined into what the whole batch would have given.

A tensor whose dim 0 is the chunk's rows is joined along them. A tensor of one element (a learnable scale), and anything
that is not a tensor, must be the same in every chunk and is returned once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import described
from .containers import HALF_PRECISION, Leaf, Name, entries_of, flatten, is_array, with_entries
from .state import versions

PLAIN = (type(None), bool, int, float, str)  # short in an error


def selected(output: Any, select: Name | Sequence[Name] | None) -> Any:
    """One output by its name or position, or the container with the named ones alone."""
    if select is None:
        return output
    entries = entries_of(output) or {}
    keys = {**dict(enumerate(entries)), **{key: key for key in entries}}
    names = [select] if isinstance(select, str | int) else list(select)
    for name in names:
        if name not in keys:
            there = ", ".join(map(repr, entries)) or f"a single {type(output).__name__}"
            raise ValueError(f"chunked: select must name outputs of the encoder, got {name!r} for {there}.")
    if isinstance(select, str | int):
        return entries[keys[select]]
    return with_entries(output, {keys[name]: entries[keys[name]] for name in names})


class Outputs:
    """The outputs of all chunks, joined, and compared with those of the second run."""

    def __init__(self, sizes: Sequence[int], order: Sequence[int] | None, autocast: bool) -> None:
        self._sizes, self._order, self._autocast = sizes, order, autocast
        self._expected: list[list[tuple[str, Tensor, int]]] = [[] for _ in sizes]  # of every chunk, with its version
        self._differences: dict[str, Tensor] = {}

    def join(self, outputs: Sequence[Any]) -> Any:
        """What the encoder would return for the whole batch."""
        (first, build), *others = [flatten(output, "output") for output in outputs]
        chunks = [first, *(leaves for leaves, _ in others)]
        paths = [leaf.path for leaf in first]
        for leaves in chunks:
            if [leaf.path for leaf in leaves] != paths:
                raise ValueError(
                    "chunked: the encoder must return the same outputs for every chunk, got "
                    f"{', '.join(paths)} and {', '.join(leaf.path for leaf in leaves)}. Keep those that are always "
                    "there by select."
                )
        return build(iter([self._join(leaves) for leaves in zip(*chunks, strict=True)]))

    def _join(self, leaves: Sequence[Leaf]) -> Any:
        """One output of all chunks."""
        path, values = leaves[0].path, [leaf.value for leaf in leaves]
        if not all(isinstance(value, Tensor) for value in values):
            return _equal_object(path, values)
        has_rows = all(x.dim() and len(x) == size for x, size in zip(values, self._sizes, strict=True))
        value = _joined_rows(path, values, self._sizes) if has_rows else _equal_number(path, values, self._sizes)
        parts: Any = torch.split(value.detach(), list(self._sizes)) if has_rows else [value.detach()] * len(values)
        for expected, part in zip(self._expected, parts, strict=True):
            expected.append((path, part, *versions([part])))
        if self._order is None or not has_rows:
            return value
        return value[torch.tensor(self._order, dtype=torch.long).argsort().to(value.device)]

    def compare(self, index: int, again: Sequence[Tensor]) -> None:
        """Check a replayed chunk against the forward's; on GPUs one chunk late, so that the host does not wait."""
        self.check()
        for (path, before, version), now in zip(self._expected[index], again, strict=True):
            inexact = now.is_floating_point() or now.is_complex()
            if not inexact or not now.numel() or versions([before]) != [version]:
                continue  # nothing to compare, or the caller has written to it
            before, now = (torch.view_as_real(x) if x.is_complex() else x for x in (before, now.detach()))
            same = (before == now) | (before.isnan() & now.isnan())
            largest = torch.where(before.isfinite(), before.abs(), 0).max().clamp(min=torch.finfo(before.dtype).tiny)
            self._differences[path] = torch.where(same, 0, (before - now).abs()).max() / largest
        if index == 0 or not any(difference.is_cuda for difference in self._differences.values()):
            self.check()

    def check(self) -> None:
        """Refuse more than rounding: another order of sums differs by less, other random numbers by more."""
        differences, self._differences = self._differences, {}
        for path, difference in differences.items():
            dtype = difference.dtype
            tolerance = 0.05 if self._autocast or dtype in HALF_PRECISION else 1e-5 if dtype == torch.float64 else 0.01
            if not bool(difference <= tolerance):
                raise RuntimeError(
                    "chunked: the encoder must give the same in the backward, which runs it again, as in the forward, "
                    f"got a relative difference of {difference.item():.2g} in {path}: its gradients would be wrong. "
                    "Do not change parameters, buffers or mode (train, eval) in between, draw random numbers from "
                    "torch's default generators, and keep state in buffers."
                )


def _joined_rows(path: str, values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if len(values) > 1 and max(sizes) == 1 and values[0].dim() == 1:
        raise ValueError(
            f"chunked: {path} must tell one number per row from one for all, got shape (1,) for a chunk of one row. "
            "Use a chunk_size of at least 2, or leave it out by select."
        )
    shapes = list(dict.fromkeys(tuple(value.shape[1:]) for value in values))
    if len(shapes) > 1:
        raise ValueError(
            f"chunked: {path} must have the same shape in every chunk, but for its rows, got {list(shapes[1])} after "
            f"{list(shapes[0])}: it is padded chunk by chunk, or compares rows with each other. Leave it out by "
            "select, or pad to one length."
        )
    return torch.cat(list(values))


def _equal_number(path: str, values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if any(value.shape not in ((), (1,)) for value in values):
        pairs = zip(values, sizes, strict=True)
        shape, size = next((tuple(x.shape), size) for x, size in pairs if x.shape[:1] != (size,))
        raise ValueError(
            f"chunked: {path} must have the chunk's {size} rows in dim 0, or be a single number in all chunks, got "
            f"shape {shape}. Name an argument that should be split in split, or leave the output out by select."
        )
    numbers = torch.stack([value.detach().reshape(()) for value in values])
    if bool(((numbers != numbers[-1]) & (numbers == numbers)).any()):
        raise ValueError(
            f"chunked: {path} must be the same for every chunk, because it is a single number, got different ones: it "
            "depends on the rows of the chunk (a loss, a mean). Leave it out by select."
        )
    return values[-1].clone()


def _equal_object(path: str, values: Sequence[Any]) -> Any:
    first = values[0]
    for value in values[1:]:
        comparable = type(value) is type(first) and not is_array(value)
        if value is not first and not (comparable and value == first):
            got = " and ".join(repr(x) if isinstance(x, PLAIN) else described(x) for x in (first, value))
            raise ValueError(
                f"chunked: {path} must be the same for every chunk, because it is not a tensor and cannot be joined, "
                f"got {got}. Leave it out by select."
            )
    return first
