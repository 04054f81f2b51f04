"""The arguments of an encoder: which of them are cut along dim 0, and what one chunk of them is.

The rule: every tensor of at least one dimension is cut, and all that are cut have the same number of rows. Everything
else is passed whole: 0-d tensors, and all that is no tensor. `whole` and `split` name the exceptions.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .conditions import versions
from .nested import Name, Names, Visit, holds_tensors, leaves_of, map_leaves

Transform = Callable[[Any], Any]


@dataclass
class Argument:
    """A leaf of the arguments.

    Attributes:
        path: How one would write it, for errors.
        names: All words that mean it.
        split: Cut along dim 0; otherwise passed whole.
        transform: Applied to every chunk of it, on the encoder's device.
    """

    path: str
    names: Names
    value: Any
    split: bool = False
    transform: Transform | None = None

    @property
    def differentiable(self) -> bool:
        return isinstance(self.value, Tensor) and self.value.requires_grad

    @property
    def items(self) -> list[Tensor]:
        return [] if isinstance(self.value, Tensor) else [x for x in leaves_of(self.value) if isinstance(x, Tensor)]

    def piece(self, start: int, stop: int) -> Any:
        return self.value[start:stop] if self.split else self.value


class Batch:
    """All arguments of one call.

    Attributes:
        arguments: The leaves, in order.
        rows: The number of rows that are cut into chunks.
        differentiable: The tensors among them that want a gradient.
        items: Those inside of lists that are split, one per row.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        positional_names: Sequence[str],
        whole: Collection[Name],
        split: Collection[Name],
        transform: Transform | Mapping[Name, Transform] | None,
    ) -> None:
        self._call = (args, kwargs)
        self._positional_names = positional_names
        self._split = split
        self.arguments: list[Argument] = []
        lists: list[Argument] = []
        self._map(
            lambda value, path, names: self.arguments.append(Argument(path, names, value)),
            lambda value, path, names: lists.append(Argument(path, names, value)),
        )
        self._choose(whole, split)
        self.rows = self._count_rows()
        self._check_items([*lists, *self.arguments], whole)
        self._attach(transform)
        self.differentiable = [argument for argument in self.arguments if argument.differentiable]
        self._versions = versions(argument.value for argument in self.arguments)
        # In lists that are split: passed as they are, and their gradients collected as parameters' are.
        self.items = [item for argument in self.arguments for item in argument.items if item.requires_grad]

    def _map(self, visit: Visit, note: Visit = lambda *_: None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs with other leaves. Lists that are split are leaves; others are walked, and noted."""

        def is_leaf(value: Any, path: str, names: Names) -> bool:
            split = not names.isdisjoint(self._split)
            if not split:
                note(value, path, names)
            return split

        args, kwargs = self._call
        mapped = []
        for i, value in enumerate(args):
            own_name = self._positional_names[i] if i < len(self._positional_names) else f"args[{i}]"
            mapped.append(map_leaves(value, visit, own_name, frozenset({own_name, f"args[{i}]", i}), is_leaf))
        return tuple(mapped), {
            name: map_leaves(value, visit, name, frozenset({name}), is_leaf) for name, value in kwargs.items()
        }

    def _check_items(self, arguments: list[Argument], whole: Collection[Name]) -> None:
        """What has one item per row and is no tensor would be passed whole, and read from its beginning every time."""
        for argument in arguments:
            named = argument.split or not argument.names.isdisjoint(whole)
            array = isinstance(argument.value, list | tuple) or getattr(argument.value, "shape", ()) != ()
            if not named and array and len(argument.value) == self.rows > 1 and not holds_tensors(argument.value):
                raise ValueError(
                    f"chunked: {argument.path} must be named in split, to be cut along its items, or in whole, because "
                    f"it is no tensor and has as many items as the batch has rows, got {self.rows}."
                )

    def _choose(self, whole: Collection[Name], split: Collection[Name]) -> None:
        for option, chosen in (("whole", whole), ("split", split)):
            self._check_names(option, chosen)
        for argument in self.arguments:
            kept, cut = not argument.names.isdisjoint(whole), not argument.names.isdisjoint(split)
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
                        f"{_described(argument.value)}. Leave it out there."
                    )
                argument.split = True

    def _check_names(self, option: str, chosen: Collection[Name]) -> None:
        known = {name for argument in self.arguments for name in argument.names}
        for name in chosen:
            if name not in known:
                raise ValueError(
                    f"chunked: {option} must name arguments of the call, got {name!r}. There are "
                    f"{_listed([argument.path for argument in self.arguments]) or 'none'}."
                )

    def _count_rows(self) -> int:
        rows = {argument.path: len(argument.value) for argument in self.arguments if argument.split}
        if not rows:
            got = _listed([f"{argument.path}: {_described(argument.value)}" for argument in self.arguments])
            raise ValueError(
                "chunked: at least one argument must be a tensor with rows to split, got "
                f"{got or 'no arguments'}. Name a list of samples in split."
            )
        if len(set(rows.values())) > 1:
            raise ValueError(
                "chunked: all tensors that are split along dim 0 must have the same number of rows, got "
                f"{_listed([f'{path}: {count}' for path, count in rows.items()])}. Name those that every chunk shall "
                "get as they are, whole=[...]."
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

    def chunk(
        self, start: int, stop: int, device: torch.device | None
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """args and kwargs for these rows, and the leaves that stand in them for what is differentiable."""
        pieces: list[Any] = []
        stand_ins: list[Tensor] = []
        for argument in self.arguments:
            piece = argument.piece(start, stop)
            if argument.differentiable:
                stand_ins.append(piece.detach().requires_grad_())
                piece = stand_ins[-1] if argument.value.is_leaf else stand_ins[-1].clone()  # which may be written to
            if device is not None:
                piece = map_leaves(piece, lambda leaf, *_: _moved(leaf, device), argument.path)
            pieces.append(piece if argument.transform is None else argument.transform(piece))
        following: Iterator[Any] = iter(pieces)
        args, kwargs = self._map(lambda *_: next(following))
        return args, kwargs, stand_ins


def _moved(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor) or leaf.device == device:
        return leaf
    return leaf.to(device, non_blocking=leaf.device.type == "cpu")


def _listed(words: Sequence[str], most: int = 8) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
