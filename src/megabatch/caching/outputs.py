"""The outputs of an encoder, chunk by chunk, joined into what the whole batch would have given.

A tensor whose dim 0 is the chunk's rows is joined along them. A tensor of one element (a learnable scale), and anything
that is not a tensor, must be the same in every chunk and is returned once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .containers import HALVES, Leaf, Name, entries_of, flatten, hides_tensors, with_entries
from .state import versions

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


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
    by_position = {**dict(enumerate(entries)), **{key: key for key in entries}}
    names = [select] if isinstance(select, str | int) else list(select)
    for name in names:
        if name not in by_position:
            raise ValueError(
                f"chunked: select must name outputs of the encoder, got {name!r} for {', '.join(map(repr, entries))}. "
                "Choose among these."
            )
    kept = {by_position[name]: entries[by_position[name]] for name in names}
    return kept.popitem()[1] if isinstance(select, str | int) else with_entries(output, kept)


class Outputs:
    """The outputs of all chunks, joined, and compared with those of the second run."""

    def __init__(self, sizes: Sequence[int], order: Sequence[int] | None) -> None:
        self._sizes, self._order = sizes, order
        self._expected: list[list[tuple[str, Tensor, int]]] = [[] for _ in sizes]  # of every chunk, with its version
        self._apart: dict[str, Tensor] = {}

    def join(self, outputs: list[Any]) -> Any:
        """What the encoder would return for the whole batch."""
        flat = [flatten(output, "output") for output in outputs]
        outputs.clear()
        first, build = flat[0]
        for k, (leaves, _) in enumerate(flat):
            self._check_leaves(k, [leaf.path for leaf in first], leaves)
        joined = []
        for leaf, values in zip(
            first, zip(*([x.value for x in leaves] for leaves, _ in flat), strict=True), strict=True
        ):
            if not all(isinstance(value, Tensor) for value in values):
                joined.append(_the_same(leaf.path, values))
                continue
            has_rows = all(x.dim() and len(x) == size for x, size in zip(values, self._sizes, strict=True))
            value = (_joined_rows if has_rows else _the_same_number)(leaf.path, values, self._sizes)
            parts: Any = (
                torch.split(value.detach(), list(self._sizes)) if has_rows else [value.detach() for _ in values]
            )
            for expected, part in zip(self._expected, parts, strict=True):
                expected.append((leaf.path, part, *versions([part])))
            joined.append(value if self._order is None or not has_rows else value[_inverse(self._order, value.device)])
        return build(iter(joined))

    def _check_leaves(self, index: int, first: list[str], leaves: Sequence[Leaf]) -> None:
        paths, start = [leaf.path for leaf in leaves], sum(self._sizes[:index])
        if paths != first:
            raise ValueError(
                f"chunked: the encoder must return the same outputs for every chunk, got {', '.join(first)} for the "
                f"first and {', '.join(paths)} for rows {start} to {start + self._sizes[index]}. Keep those that are "
                "always there by select."
            )
        for path, _, value in leaves:
            if not isinstance(value, (Tensor, *PLAIN)) and hides_tensors(value):
                raise TypeError(
                    f"chunked: {path} must be a tensor, a tuple, list, dict or dataclass of them, or hold none, got a "
                    f"{type(value).__name__} with tensors in it. Leave it out by select."
                )

    def compare(self, index: int, again: Sequence[Tensor], autocast: bool) -> None:
        """Check a replayed chunk against the forward's; on GPUs one chunk late, so that the host does not wait."""
        self.check(autocast)
        for (path, before, version), now in zip(self._expected[index], again, strict=True):
            inexact = now.is_floating_point() or now.is_complex()
            if not inexact or not now.numel() or versions([before]) != [version]:
                continue  # nothing to compare, or the caller has written to it
            before, now = (torch.view_as_real(x) if x.is_complex() else x for x in (before, now.detach()))
            same = (before == now) | (before.isnan() & now.isnan())
            largest = torch.where(before.isfinite(), before.abs(), 0).max().clamp(min=torch.finfo(before.dtype).tiny)
            apart = torch.where(same, 0, (before - now).abs()).max() / largest
            self._apart[path] = apart
        if index == 0 or not any(apart.is_cuda for apart in self._apart.values()):
            self.check(autocast)

    def check(self, autocast: bool) -> None:
        """Whether it was more than rounding: another order of sums is nearer, other random numbers are farther."""
        distances, self._apart = self._apart, {}
        for path, apart in distances.items():
            dtype = apart.dtype
            tolerance = 0.05 if autocast or dtype in HALVES else 1e-5 if dtype == torch.float64 else 0.01
            if not bool(apart <= tolerance):
                raise RuntimeError(
                    "chunked: the encoder must give the same in the backward, which runs it again, as in the forward, "
                    f"got a relative difference of {apart.item():.2g} in {path}: its gradients would be wrong. Either "
                    "its parameters, buffers or mode (train, eval) were changed in between, or it draws random numbers "
                    "that do not come from torch's default generators, or keeps state outside of buffers. Mend that, "
                    "or call it without chunks."
                )


def _joined_rows(path: str, values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    widths = [list(value.shape[1:]) for value in values]
    if len(values) > 1 and max(sizes) == 1 and values[0].dim() == 1:
        raise ValueError(
            f"chunked: {path} must tell one number per row from one for all, got shape (1,) for a chunk of one row. "
            "Use a chunk_size of at least 2, or leave it out by select."
        )
    for width in widths:
        if width != widths[0]:
            raise ValueError(
                f"chunked: {path} must have the same shape in every chunk, but for its rows, got {width} after "
                f"{widths[0]}: it is padded chunk by chunk, or compares rows with each other. Leave it out by select, "
                "or pad to one length."
            )
    return torch.cat(list(values))


def _inverse(order: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(order, dtype=torch.long).argsort().to(device)


def _the_same(path: str, values: Sequence[Any]) -> Any:
    for value in values:
        if isinstance(value, PLAIN) and (type(value) is not type(values[0]) or value != values[0]) and value == value:
            raise ValueError(
                f"chunked: {path} must be the same for every chunk, because it is not a tensor and cannot be joined, "
                f"got {values[0]!r} and {value!r}. Leave it out by select."
            )
    return values[0]


def _the_same_number(path: str, values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    pairs = zip(values, sizes, strict=True)
    for value, size in sorted(pairs, key=lambda pair: pair[0].shape[:1] == (pair[1],)):  # those without rows first
        if value.numel() != 1 or value.dim() > 1:
            raise ValueError(
                f"chunked: {path} must have the chunk's {size} rows in dim 0, or be a single number, got shape "
                f"{tuple(value.shape)}. If an argument that should be split is not, name it in split; if the output is "
                "not needed, leave it out by select."
            )
    numbers = torch.stack([value.detach().reshape(()) for value in values])
    if bool(((numbers != numbers[-1]) & (numbers == numbers)).any()):
        raise ValueError(
            f"chunked: {path} must be the same for every chunk, because it is a single number, got different ones: it "
            "depends on the rows of the chunk (a loss, a mean). Leave it out by select."
        )
    return values[-1].clone()
