"""The arguments of an encoder: which of them are split into chunks, and what a chunk of them is.

The rule: every tensor of at least one dimension is split along dim 0, and all of these have the same number of rows.
0-d tensors and everything else are passed whole. `whole` and `split` name the exceptions.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .arguments import Argument, Counts, Transform, described, listed, pack
from .containers import Leaf, Name, flatten, is_array, map_tensors, tensors_of

MASK = "attention_mask"


class Batch:
    """All arguments of one call.

    Attributes:
        rows: Of the batch.
        order: Of the rows, where they are sorted by length.
        sizes: Of the chunks, in rows. At least one chunk, which may be empty.
        pad_to: Rows that a chunk has at least; its last row is repeated.
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
        lists: list[Leaf] = []  # and arrays, which are not named in whole or split

        def is_split_list(leaf: Leaf) -> bool:
            is_list = isinstance(leaf.value, list | tuple)
            if (is_list or is_array(leaf.value)) and leaf.names.isdisjoint({*whole, *split}):
                lists.append(leaf)
            return is_list and not leaf.names.isdisjoint(split)

        positional = [*positional_names, *(f"args[{i}]" for i in range(len(positional_names), len(args)))]
        names: list[frozenset[Name]] = [frozenset({name, f"args[{i}]", i}) for i, name in enumerate(positional)]
        names += [frozenset({name}) for name in kwargs]
        given = zip((*positional, *kwargs), (*args, *kwargs.values()), names, strict=True)
        parts = [flatten(value, path, known_as, is_split_list) for path, value, known_as in given]
        self._builds, self._num_positional, self._keywords = [build for _, build in parts], len(args), list(kwargs)
        self._arguments = [Argument(*leaf) for leaves, _ in parts for leaf in leaves]
        self._choose(whole, split)
        self.rows = self._count_rows()
        for leaf in lists:
            if len(leaf.value) == self.rows > 1 and not tensors_of(leaf.value):
                raise ValueError(
                    f"chunked: {leaf.path} must be named in split or in whole, because it is not a tensor and has as "
                    f"many items as the batch has rows, got {self.rows}."
                )
        if transform is not None:
            self._set_transforms(transform)
        self._lengths: list[int] | None = None
        self.order: list[int] | None = None
        self.sizes: list[int] = []
        self.pad_to = 0

    def _choose(self, whole: Collection[Name], split: Mapping[Name, Counts]) -> None:
        self._check_names("whole", whole)
        self._check_names("split", split)
        for argument in self._arguments:
            path, value = argument.path, argument.value
            kept, cut = not argument.names.isdisjoint(whole), [name for name in split if name in argument.names]
            if kept and cut:
                raise ValueError(f"chunked: {path} must be named in whole or in split, got both. Drop one.")
            if cut and (not hasattr(value, "__len__") or getattr(value, "shape", None) == ()):
                raise ValueError(f"chunked: {path} must have rows to be split, got {described(value)}.")
            if isinstance(value, Tensor):
                checks.dense("chunked", path, value)
            argument.split = bool(cut) or (isinstance(value, Tensor) and value.dim() > 0 and not kept)
            counts = split[cut[0]] if cut else None
            if counts is not None:
                pack(argument, counts)

    def _check_names(self, option: str, chosen: Iterable[Name]) -> None:
        known = {name for argument in self._arguments for name in argument.names}
        for name in chosen:
            if name not in known:
                raise ValueError(
                    f"chunked: {option} must name arguments of the call, got {name!r}. There are "
                    f"{listed([argument.path for argument in self._arguments]) or 'none'}."
                )

    def _count_rows(self) -> int:
        rows = {argument.path: argument.rows for argument in self._arguments if argument.split}
        if not rows:
            got = listed([f"{argument.path}: {described(argument.value)}" for argument in self._arguments])
            raise ValueError(
                "chunked: at least one argument must be a tensor with rows to split, got "
                f"{got or 'no arguments'}. Name a list of samples in split."
            )
        if len(set(rows.values())) > 1:
            raise ValueError(
                "chunked: all tensors that are split along dim 0 must have the same number of rows, got "
                f"{listed([f'{path}: {count}' for path, count in rows.items()])}. Name those that every chunk needs "
                "whole in whole=[...], and packed ones with their counts in split={name: counts}."
            )
        return next(iter(rows.values()))

    def _set_transforms(self, transform: Transform | Mapping[Name, Transform]) -> None:
        split = [argument for argument in self._arguments if argument.split]
        if isinstance(transform, Mapping):
            self._check_names("transform", transform)
            for argument in self._arguments:
                argument.transform = next((f for name, f in transform.items() if name in argument.names), None)
        elif len(split) > 1:
            raise ValueError(
                "chunked: transform must be a dict where several arguments are split, got a function for "
                f"{listed([argument.path for argument in split])}. Pass transform={{{split[0].path!r}: ...}}."
            )
        else:
            split[0].transform = transform

    # ---- chunks

    def cut(self, chunk_size: int, pad: bool, required: bool) -> None:
        """`pad`: the last chunk to the size of the others, where that is possible or `required`."""
        starts = range(0, max(self.rows, 1), chunk_size)
        self.sizes = [min(chunk_size, self.rows - start) for start in starts]
        unfit = [argument.path for argument in self._arguments if argument.split and not argument.can_be_padded]
        if unfit and required:
            raise ValueError(f"chunked: pad_last must be left out for lists and packed tensors, got {listed(unfit)}.")
        self.pad_to = chunk_size if pad and not unfit else 0

    def cut_by_tokens(self, chunk_tokens: int) -> None:
        """Longest rows first, so that memory runs out in the first chunk or never."""
        split = [argument for argument in self._arguments if argument.split]
        masks = [a.value for a in split if MASK in a.names and isinstance(a.value, Tensor) and a.value.dim() == 2]
        lengths = [max(used) for used in zip(*map(_used, masks), strict=True)] if masks else self._lengths_of_texts()
        if max(lengths, default=0) > chunk_tokens:
            raise ValueError(
                f"chunked: chunk_tokens must hold the longest row, got {chunk_tokens} for one of {max(lengths)} tokens."
            )
        self.order = sorted(range(self.rows), key=lambda i: -lengths[i])
        self._lengths = [lengths[i] for i in self.order]
        for argument in split:
            is_tensor = isinstance(argument.value, Tensor)
            argument.trimmed = is_tensor and any(argument.value.shape[:2] == mask.shape for mask in masks)
            argument.reorder(self.order)
        start = 0
        while start < self.rows or not self.sizes:
            size = chunk_tokens // max(self._lengths[start], 1) if self.rows else 0
            self.sizes.append(min(size, self.rows - start))
            start += size

    def _lengths_of_texts(self) -> list[int]:
        """In tokens where the transform is a tokenizer; otherwise in items or characters."""
        lists = [a for a in self._arguments if a.split and isinstance(a.value, list | tuple)]
        if not lists:
            raise ValueError(
                f"chunked: chunk_tokens must find the lengths of rows, in a tensor named {MASK} or in a list that is "
                "named in split, got neither. Use chunk_size."
            )
        texts, tokenize = lists[0].value, lists[0].transform
        tokens = tokenize(texts) if tokenize is not None else None
        return _used(tokens[MASK]) if isinstance(tokens, Mapping) and MASK in tokens else [len(text) for text in texts]

    def chunks(self) -> list[list[Any]]:
        """The pieces of all arguments, chunk by chunk."""
        return [list(chunk) for chunk in zip(*(a.pieces(self.sizes) for a in self._arguments), strict=True)]

    def devices(self) -> set[torch.device]:
        return {x.device for argument in self._arguments for x in tensors_of(argument.value)}

    def call(self, index: int, pieces: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs of a chunk: trimmed, padded and transformed."""
        start, ready = sum(self.sizes[:index]), []
        longest = max(self._lengths[start : start + self.sizes[index]], default=0) if self._lengths is not None else 0
        for argument, piece in zip(self._arguments, pieces, strict=True):
            if isinstance(piece, Tensor):
                piece = piece[:, :longest] if argument.trimmed else piece.to(argument.value.dtype)
            piece = self._padded(piece) if argument.split and self.pad_to else piece
            ready.append(piece if argument.transform is None else argument.transform(piece))
        following = iter(ready)
        built = [build(following) for build in self._builds]
        return tuple(built[: self._num_positional]), dict(
            zip(self._keywords, built[self._num_positional :], strict=True)
        )

    def _padded(self, piece: Tensor) -> Tensor:
        """With its last row repeated. Ones where there is none: a token and a mask as well as a pixel."""
        missing = self.pad_to - len(piece)
        last = piece[-1:] if len(piece) else piece.new_ones((1, *piece.shape[1:]))
        return torch.cat([piece, last.expand(missing, *piece.shape[1:])]) if missing else piece

    def without_padding(self, output: Any, index: int) -> Any:
        size = self.sizes[index]
        if size >= self.pad_to:
            return output
        return map_tensors(lambda x: x[:size] if x.dim() and len(x) == self.pad_to else x, output)


def _used(mask: Tensor) -> list[int]:
    """Columns up to the last one that a row uses."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.ne(0) * positions).amax(1).tolist() if mask.numel() else [0] * len(mask)
