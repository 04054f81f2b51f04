"""The outputs of an encoder, chunk by chunk, written into what the whole batch would have given.

A tensor whose dim 0 is the chunk's rows is a piece of one with the batch's. A tensor of one element (a learnable scale)
and what is no tensor must be the same in every chunk, and is passed on once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .nested import Name, entries_of, holds_tensors, map_leaves, with_entries
from .state import versions

NOTHING = object()  # yet

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def selected(output: Any, select: Name | Sequence[Name] | None) -> Any:
    """One output by its name or position, or the container with the named ones alone."""
    if select is None:
        return output
    entries = entries_of(output)
    if entries is None:
        raise ValueError(
            f"chunked: select must name outputs of the encoder, got {select!r} for a single {type(output).__name__}. "
            "Leave select out."
        )
    keys = [_key(name, entries) for name in ([select] if isinstance(select, str | int) else select)]
    if isinstance(select, str | int):
        return entries[keys[0]]
    return with_entries(output, {key: entries[key] for key in keys})


def _key(name: Name, entries: dict[Name, Any]) -> Name:
    """The key of an entry that is meant by its key or its position."""
    if name in entries:
        return name
    if isinstance(name, int) and 0 <= name < len(entries):
        return list(entries)[name]
    raise ValueError(
        f"chunked: select must name outputs of the encoder, got {name!r} for {', '.join(map(repr, entries))}. Choose "
        "among these."
    )


@dataclass
class Output:
    """A tensor among the outputs: of the whole batch where it has `rows`, otherwise one element."""

    path: str
    value: Tensor
    rows: bool
    either: bool = False  # of shape (1,) in a batch of one: which of the two cannot be seen
    differs: Tensor | None = None  # from another chunk's, where it is one element
    version: int = 0
    apart: Tensor | None = None  # how far the replay is, relative to the largest value

    @property
    def kind(self) -> str:
        return "either" if self.either else "rows" if self.rows else "one"

    def part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[start:stop] if self.rows else tensor

    def release(self) -> Tensor:
        """The tensor, for the caller. What is kept of it here has no part in its graph."""
        value, self.value = self.value, self.value.detach()
        (self.version,) = versions([value])
        return value

    def compare(self, again: Tensor, start: int, stop: int) -> None:
        """Look at a chunk's output of the replay. What the caller has written to since cannot be compared."""
        if (
            not (again.is_floating_point() or again.is_complex())
            or versions([self.value]) != [self.version]
            or not again.numel()
        ):
            return
        both = self.part(self.value, start, stop), again.detach()
        before, now = (torch.view_as_real(x) if x.is_complex() else x for x in both)
        same = (before == now) | (before.isnan() & now.isnan())
        distance = torch.where(same, 0, (before - now).abs()).max() / _largest(before)
        self.apart = distance if self.apart is None else torch.maximum(self.apart, distance)

    def check(self, tolerance: float) -> None:
        apart, self.apart = self.apart, None
        if apart is not None and not bool(apart <= tolerance):
            raise RuntimeError(
                f"chunked: the encoder must give the same in the backward, which runs it again, as in the forward, got "
                f"a relative difference of {apart.item():.2g} in {self.path}: its gradients would be wrong. Either its "
                "parameters, buffers or mode (train, eval) were changed in between, or it draws random numbers that do "
                "not come from torch's default generators, or keeps state outside of buffers. Mend that, or call it "
                "without chunks."
            )


class Gathered:
    """What the chunks have given so far."""

    def __init__(self, rows: int, bounds: Sequence[tuple[int, int]], pad_to: int) -> None:
        self._rows, self._pad_to = rows, pad_to
        self._single = all(stop - start <= 1 for start, stop in bounds)
        self._skeleton: Any = NOTHING
        self._plain: list[tuple[str, Any]] = []
        self.outputs: list[Output] = []

    def add(self, output: Any, start: int, stop: int) -> None:
        found: list[tuple[str, Any]] = []
        skeleton = map_leaves(output, lambda leaf, path, _: _emptied(found, leaf, path), "output")
        tensors = [(path, leaf.detach()) for path, leaf in found if isinstance(leaf, Tensor)]
        plain = [(path, leaf) for path, leaf in found if not isinstance(leaf, Tensor)]
        if self._skeleton is NOTHING:
            self._skeleton, self._plain = skeleton, plain
            self.outputs = [self._begin(path, value, stop - start) for path, value in tensors]
        first = [output.path for output in self.outputs] + [path for path, _ in self._plain]
        now = [path for path, _ in (*tensors, *plain)]
        if first != now:
            raise ValueError(
                f"chunked: the encoder must return the same outputs for every chunk, got {', '.join(first)} for the "
                f"first and {', '.join(now)} for rows {start} to {stop}. Keep those that are always there by select."
            )
        self._check_plain(plain)
        for into, (path, value) in zip(self.outputs, tensors, strict=True):
            if into.rows:
                if not value.dim() or len(value) != stop - start:
                    raise _not_rows(path, value, stop - start)
                if value.shape[1:] != into.value.shape[1:]:
                    raise ValueError(
                        f"chunked: {path} must have the same shape in every chunk, but for its rows, got "
                        f"{[*value.shape[1:]]} after {[*into.value.shape[1:]]}: it is padded chunk by chunk, or "
                        "compares rows with each other. Leave it out by select, or pad to one length."
                    )
                into.value[start:stop] = value
            else:
                differs = (into.value != value) & (into.value == into.value)  # NaN stays NaN
                into.differs = differs if into.differs is None else into.differs | differs

    def _begin(self, path: str, value: Tensor, rows: int) -> Output:
        if value.dim() and len(value) == rows:
            if value.shape == (1,) and self._single and self._rows > 1:
                raise ValueError(
                    f"chunked: {path} must tell one number per row from one for all, got shape (1,) for a chunk of one "
                    "row. Use a chunk_size of at least 2, or leave it out by select."
                )
            either = value.shape == (1,) and self._rows == 1
            return Output(path, value.new_empty((self._rows, *value.shape[1:])), rows=True, either=either)
        if value.numel() == 1 and value.dim() <= 1:
            return Output(path, value.clone(), rows=False)
        raise _not_rows(path, value, rows)

    def _check_plain(self, plain: list[tuple[str, Any]]) -> None:
        for (path, first), (_, value) in zip(self._plain, plain, strict=True):
            if isinstance(value, PLAIN) and (type(value) is not type(first) or value != first) and value == value:
                raise ValueError(
                    f"chunked: {path} must be the same for every chunk, because it is no tensor and cannot be put "
                    f"together, got {first!r} and {value!r}. Leave it out by select."
                )

    @property
    def kinds(self) -> list[str]:
        return [output.kind for output in self.outputs]

    def settle(self, kinds: Sequence[str]) -> None:
        for output, kind in zip(self.outputs, kinds, strict=True):
            output.rows = kind == "rows"

    @property
    def difference(self) -> ValueError | None:
        """What is wrong with single numbers, when all chunks have given theirs."""
        for output in self.outputs:
            if output.differs is not None and bool(output.differs.any()):
                return ValueError(
                    f"chunked: {output.path} must be the same for every chunk, because it is a single number, got "
                    "different ones: it depends on the rows of the chunk (a loss, a mean). Leave it out by select."
                )
        return None

    def structure(self, tensors: Sequence[Tensor], order: Sequence[int] | None) -> Any:
        """As the encoder returns it, with these tensors in place of its own, and rows where they were in the batch."""
        if order is not None:
            places = torch.tensor(order, dtype=torch.long).argsort()
            both = zip(tensors, self.outputs, strict=True)
            tensors = [tensor[places.to(tensor.device)] if into.rows else tensor for tensor, into in both]
        following: Iterator[Tensor] = iter(tensors)
        return map_leaves(
            self._skeleton, lambda leaf, *_: next(following) if isinstance(leaf, Tensor) else leaf, "output"
        )


def _largest(values: Tensor) -> Tensor:
    """In size, among finite ones; not zero, to be divided by."""
    return torch.where(values.isfinite(), values.abs(), 0).max().clamp(min=torch.finfo(values.dtype).tiny)


def _emptied(found: list[tuple[str, Any]], leaf: Any, path: str) -> Any:
    """Remember a leaf; stand an empty tensor in for one, so that what is kept of a chunk holds none of its memory."""
    if not isinstance(leaf, Tensor) and not isinstance(leaf, PLAIN) and holds_tensors(leaf):
        raise TypeError(
            f"chunked: {path} must be a tensor, a tuple, list, dict or dataclass of them, or hold none, got a "
            f"{type(leaf).__name__} with tensors in it. Leave it out by select."
        )
    found.append((path, leaf))
    return leaf.new_empty(0) if isinstance(leaf, Tensor) else leaf


def _not_rows(path: str, value: Tensor, rows: int) -> ValueError:
    return ValueError(
        f"chunked: {path} must have the chunk's {rows} rows in dim 0, or be a single number, got shape "
        f"{tuple(value.shape)}. If an argument shall be split that is not, name it in split; if the output is not "
        "needed, leave it out by select."
    )
