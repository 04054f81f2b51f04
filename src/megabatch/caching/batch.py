"""The arguments of an encoder: which of them are cut along dim 0, and what one chunk of them is.

The rule: every tensor of at least one dimension is cut, and all that are cut have the same number of rows. Everything
else is passed whole: 0-d tensors, and all that is no tensor. `whole` and `split` name the exceptions.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from .arguments import Argument, Counts, Transform, described, listed, pack
from .nested import IsLeaf, Name, Names, Visit, holds_tensors, map_leaves, never, tensors_of
from .state import versions
from .transfer import Transfer


class StandIn(NamedTuple):
    """A leaf in place of an argument's tensor, or of part of it: the index among all tensors, and where in it."""

    of: int
    place: tuple[slice, ...] | None
    leaf: Tensor


class Batch:
    """All arguments of one call.

    Attributes:
        arguments: The leaves, in order.
        rows: The number of rows that are cut into chunks.
        lengths: Of the rows, where chunks are trimmed.
        pad_to: Rows that a chunk has at least, by repeating its last one.
        differentiable: Which of `tensors()` want a gradient.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        positional_names: Sequence[str],
        whole: Collection[Name],
        split: Mapping[Name, Counts],
        transform: Transform | Mapping[Name, Transform] | None,
    ) -> None:
        self.arguments: list[Argument] = []
        lists: list[Argument] = []

        def is_leaf(value: Any, path: str, names: Names) -> bool:
            """A list that is split; others are walked."""
            lists.append(Argument(path, names, value))
            return not names.isdisjoint(split)

        def visit(value: Any, path: str, names: Names) -> Any:
            self.arguments.append(Argument(path, names, value))
            return ...

        self._skeleton = _map_call((args, kwargs), positional_names, visit, is_leaf)
        self._positional_names = positional_names
        self._choose(whole, split)
        self.rows = self._count_rows()
        self._check_items([*lists, *self.arguments], [*whole, *split])
        self._attach(transform)
        self.lengths: list[int] | None = None
        self.pad_to = 0
        self.settle()

    def settle(self) -> None:
        """Look at the tensors, which may have been brought into another order."""
        tensors = self.tensors()
        self.differentiable = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        self._activations = {i for i in self.differentiable if not tensors[i].is_leaf}
        self._versions = versions(argument.value for argument in self.arguments)

    def _check_items(self, arguments: list[Argument], named: Collection[Name]) -> None:
        """What has one item per row and is no tensor would be passed whole, and read from its beginning every time."""
        for argument in arguments:
            unnamed = not argument.split and argument.names.isdisjoint(named)
            array = isinstance(argument.value, list | tuple) or getattr(argument.value, "shape", ()) != ()
            if unnamed and array and len(argument.value) == self.rows > 1 and not holds_tensors(argument.value):
                raise ValueError(
                    f"chunked: {argument.path} must be named in split, to be cut along its items, or in whole, because "
                    f"it is no tensor and has as many items as the batch has rows, got {self.rows}."
                )

    def _choose(self, whole: Collection[Name], split: Mapping[Name, Counts]) -> None:
        self._check_names("whole", whole)
        self._check_names("split", split)
        for argument in self.arguments:
            kept, cut = not argument.names.isdisjoint(whole), [name for name in split if name in argument.names]
            if kept and cut:
                raise ValueError(f"chunked: {argument.path} must be named in whole or in split, got both. Drop one.")
            if checks.have_tangents(argument.value if isinstance(argument.value, Tensor) else None):
                raise ValueError(
                    f"chunked: {argument.path} must not carry a forward-mode tangent, because there is only a "
                    "backward. Use torch.autograd.grad."
                )
            if isinstance(argument.value, Tensor):
                checks.dense("chunked", argument.path, argument.value)
                argument.split = not kept and argument.value.dim() > 0
            if cut:
                if not hasattr(argument.value, "__len__") or getattr(argument.value, "shape", None) == ():
                    raise ValueError(
                        f"chunked: {argument.path} is named in split, so it must have rows, got "
                        f"{described(argument.value)}. Leave it out there."
                    )
                argument.split = True
                pack(argument, split[cut[0]])

    def _check_names(self, option: str, chosen: Collection[Name]) -> None:
        known = {name for argument in self.arguments for name in argument.names}
        for name in chosen:
            if name not in known:
                raise ValueError(
                    f"chunked: {option} must name arguments of the call, got {name!r}. There are "
                    f"{listed([argument.path for argument in self.arguments]) or 'none'}."
                )

    def _count_rows(self) -> int:
        rows = {argument.path: argument.rows for argument in self.arguments if argument.split}
        if not rows:
            got = listed([f"{argument.path}: {described(argument.value)}" for argument in self.arguments])
            raise ValueError(
                "chunked: at least one argument must be a tensor with rows to split, got "
                f"{got or 'no arguments'}. Name a list of samples in split."
            )
        if len(set(rows.values())) > 1:
            raise ValueError(
                "chunked: all tensors that are split along dim 0 must have the same number of rows, got "
                f"{listed([f'{path}: {count}' for path, count in rows.items()])}. Name those that every chunk shall "
                "get as they are, whole=[...]; and those that are packed with their counts, split={name: counts}."
            )
        return next(iter(rows.values()))

    def _attach(self, transform: Transform | Mapping[Name, Transform] | None) -> None:
        if transform is None:
            return
        if isinstance(transform, Mapping):
            self._check_names("transform", transform)
            for name, function in transform.items():
                for argument in self.arguments:
                    if name in argument.names:
                        argument.transform = function
            return
        split = [argument for argument in self.arguments if argument.split]
        if len(split) > 1:
            raise ValueError(
                "chunked: transform must say which argument it is for, because several are split: "
                f"{', '.join(argument.path for argument in split)}. Pass a dict, transform={{{split[0].path!r}: ...}}."
            )
        split[0].transform = transform

    def check_unwritten(self) -> None:
        """By the forward, that is."""
        for argument, before in zip(self.arguments, self._versions, strict=True):
            if versions([argument.value]) != [before]:
                raise ValueError(
                    f"chunked: {argument.path} must not be written to by the encoder or the transform, because the "
                    "backward reads it again, got an operation in place. Use one that is not, or clone first."
                )

    def can_be_padded(self, asked: bool | None) -> bool:
        unfit = [
            a.path for a in self.arguments if a.split and (a.offsets or a.rebased or not isinstance(a.value, Tensor))
        ]
        if unfit and asked:
            raise ValueError(
                f"chunked: pad_last must be left out where lists are split or tensors packed, got {listed(unfit)}."
            )
        return not unfit

    # ---- what a chunk is

    def tensors(self) -> list[Tensor]:
        return [tensor for argument in self.arguments for tensor in tensors_of(argument.value)]

    def with_tensors(self, tensors: Sequence[Any]) -> "Batch":
        """The same with these in place of its own."""
        following, other = iter(tensors), copy.copy(self)
        other.arguments = [replace(argument, value=_filled(argument.value, following)) for argument in self.arguments]
        return other

    def pieces(self, start: int, stop: int) -> list[Any]:
        """Of every argument what these rows are, as views where that can be."""
        pieces = [argument.piece(start, stop) for argument in self.arguments]
        if self.lengths is not None:
            longest = max(self.lengths[start:stop], default=0)
            pieces = [x[:, :longest] if a.trimmed else x for a, x in zip(self.arguments, pieces, strict=True)]
        return pieces

    def chunk(
        self, pieces: Sequence[Any], bounds: tuple[int, int], transfer: Transfer, attached: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[StandIn]]:
        """args and kwargs, and the leaves that stand in them for what is differentiable.

        `attached`: nothing stands in, so that gradients go to the arguments themselves.
        """
        ready: list[Any] = []
        stand_ins: list[StandIn] = []
        index = 0
        for argument, piece in zip(self.arguments, pieces, strict=True):
            listed = argument.split and not isinstance(argument.value, Tensor)
            first = index + (len(tensors_of(argument.value[: bounds[0]])) if listed else 0)
            index += len(tensors_of(argument.value))
            leaves = []
            for i, tensor in enumerate(tensors_of(piece), first):
                leaf = tensor if attached or i not in self.differentiable else tensor.detach().requires_grad_()
                if leaf is not tensor:
                    place = (argument.slice(*bounds), *map(slice, leaf.shape[1:2]))
                    stand_ins.append(StandIn(i, place if argument.split and not listed else None, leaf))
                # The encoder may write to an activation, and must find it unwritten when it runs again.
                leaves.append(transfer.move(leaf.clone() if i in self._activations else leaf))
            piece = self._padded(argument, _filled(piece, iter(leaves)))
            ready.append(piece if argument.transform is None else argument.transform(piece))
        following: Iterator[Any] = iter(ready)
        args, kwargs = _map_call(self._skeleton, self._positional_names, lambda *_: next(following))
        return args, kwargs, stand_ins

    def without_padding(self, output: Any, start: int, stop: int) -> Any:
        """A chunk's output without the rows that were added to it."""
        if stop - start >= self.pad_to:
            return output

        def cut(leaf: Any, *_: Any) -> Any:
            rows = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == self.pad_to
            return leaf[: stop - start] if rows else leaf

        return map_leaves(output, cut, "")

    def _padded(self, argument: Argument, piece: Any) -> Any:
        """With its last row repeated; ones where there is none, which are a token and a mask as well as a pixel."""
        if not argument.split or len(piece) >= self.pad_to:
            return piece
        if not len(piece):
            return piece.new_ones((self.pad_to, *piece.shape[1:]))
        return torch.cat([piece, piece[-1:].expand(self.pad_to - len(piece), *piece.shape[1:])])


def _map_call(
    call: tuple[tuple[Any, ...], dict[str, Any]], names: Sequence[str], visit: Visit, is_leaf: IsLeaf = never
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs with other leaves."""
    args, kwargs = call
    mapped = []
    for i, value in enumerate(args):
        own_name = names[i] if i < len(names) else f"args[{i}]"
        mapped.append(map_leaves(value, visit, own_name, frozenset({own_name, f"args[{i}]", i}), is_leaf))
    named = {name: map_leaves(value, visit, name, frozenset({name}), is_leaf) for name, value in kwargs.items()}
    return tuple(mapped), named


def _filled(value: Any, tensors: Iterator[Any]) -> Any:
    return map_leaves(value, lambda leaf, *_: next(tensors) if isinstance(leaf, Tensor) else leaf, "")
