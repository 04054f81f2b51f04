"""`chunked`: an encoder at any batch, in the memory of one chunk."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler along with us
from torch.nn.parallel import DistributedDataParallel

from ..callers import warn_once
from . import ddp, shards
from .arguments import Counts, Transform
from .batch import Batch
from .modules import is_compiled, modules_of, parameters_of, uncompiled
from .nested import Name
from .outputs import Gathered, selected
from .replay import ChunkedCall
from .shards import Shards
from .state import Buffers
from .tokens import cut_by_tokens

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@_disable_dynamo  # a compiler leaves its graph here; the encoder itself may be compiled
def chunked(
    encoder: Callable[..., Any],
    /,
    *args: Any,
    chunk_size: int | None = None,
    chunk_tokens: int | None = None,
    select: Name | Sequence[Name] | None = None,
    whole: Name | Sequence[Name] = (),
    split: Name | Sequence[Name] | Mapping[Name, Counts] = (),
    transform: Transform | Mapping[Name, Transform] | None = None,
    device: torch.device | str | None = None,
    module: nn.Module | None = None,
    pad_last: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Encode a batch of any size, holding the activations of one chunk at a time.

    Equals, up to rounding in value and in every gradient,

        encoder(*args, **kwargs)

    The forward keeps the outputs and no activations; the backward runs every chunk again, with the same random numbers
    and under the same autocast, and hands the summed gradients on as one. That costs one more forward. The result is an
    ordinary tensor: any loss, any number of calls, any trainer.

    Args:
        encoder: A module, a method of one, or a function. Rows must not see each other: BatchNorm in training does,
            and warns; logits of the batch against itself do, and must not be selected.
        args, kwargs: As the encoder takes them: tensors, also nested in tuples, lists, dicts and their relatives, and
            anything else. Every tensor of at least one dimension is split along dim 0, and all of these must have
            the same number of rows; 0-d tensors and all that is no tensor are passed whole.
        chunk_size: Rows per chunk; the last one may have fewer.
        chunk_tokens: In place of chunk_size, for rows of different lengths: tokens per chunk, counted as rows times the
            longest of them. Rows are sorted by length, and results come back in your order. The length is read off a
            tensor named attention_mask, and what is padded beyond a chunk's longest row is cut off; or that of the
            items of a list in `split`, in tokens if its transform is a tokenizer that returns a mask.
        select: Which outputs to keep. A name or position gives that output itself, a list the container with those
            alone. What is not selected is dropped with its chunk.
        whole: Names of tensors that every chunk gets as they are, though they have dimensions. A name is an argument's,
            a key's, or a position.
        split: Names of lists (of texts, of images of different sizes) to split along their items. A dict also says
            how many rows of a packed tensor belong to each sample: {"pixel_values": counts, "image_grid_thw": None}.
            "offsets" for a tensor of cumulative lengths (cu_seqlens), which start at 0 in every chunk.
        transform: Applied to each chunk before it is encoded, and again in the backward, on the encoder's device: a
            function of the one argument that is split, or a dict of them by name.
        device: Where chunks go. None: to the device of the encoder's parameters, if they are all on one. The batch may
            stay in (pinned) host memory: the next chunk is copied while this one computes.
        module: Who reduces the gradients, where this call is not made by the forward of what is wrapped:
            `chunked(ddp.module.encode_image, images, chunk_size=64, module=ddp)`. Otherwise, the module whose
            parameters a function uses, if it cannot be seen.
        pad_last: Fill the last chunk up with copies of its last row, whose outputs are dropped, so that all chunks have
            one shape. None: if the encoder is compiled.

    Returns:
        What the encoder returns for the whole batch: tensors with the batch in dim 0 put together; tensors of one
        element and what is no tensor, which must be the same for every chunk, once.
    """
    options = {"select": select, "whole": whole, "split": split, "transform": transform, "device": device}
    options |= {"chunk_size": chunk_size, "chunk_tokens": chunk_tokens, "module": module, "pad_last": pad_last}
    given = [name for name, value in options.items() if value is not None and value != ()]
    inner, module = ddp.unwrapped(encoder, module)
    modules = modules_of(inner, module)
    sharded = Shards(modules)

    def plan() -> tuple[Batch, list[tuple[int, int]], list[int] | None]:
        names = _positional_names(inner, len(args), given)
        counts = split if isinstance(split, Mapping) else dict.fromkeys(_several(split))
        batch = Batch(args, kwargs, names, _several(whole), counts, transform)
        _check_sizes(chunk_size, chunk_tokens)
        if chunk_tokens is not None:
            return batch, *cut_by_tokens(batch, chunk_tokens)
        assert chunk_size is not None
        if pad_last or (pad_last is None and is_compiled(inner, modules)):
            batch.pad_to = chunk_size if batch.can_be_padded(pad_last) else 0
        bounds = [(start, min(start + chunk_size, batch.rows)) for start in range(0, max(batch.rows, 1), chunk_size)]
        return batch, bounds, None

    (batch, bounds, order), sharded.spare = _planned(modules, sharded, plan)
    place = _device_of(modules) if device is None else torch.device(device)
    buffers = Buffers(modules, copied=torch.is_grad_enabled())
    encode = lambda *args, **kwargs: selected(inner(*args, **kwargs), select)  # noqa: E731
    call = ChunkedCall(encode, batch, bounds, place, _devices(modules, batch, place), buffers, sharded)
    gathered = Gathered(batch.rows, bounds, batch.pad_to)
    ddp.check_calls(inner, modules, module, call)

    def run() -> tuple[Tensor, ...]:
        attached = call.forward(gathered)
        gathered.settle(shards.agreed(gathered.kinds, sharded.groups, gathered.difference, shards.known_kinds))
        if len(bounds) > 1:
            _warn_of_batch_norm(modules, buffers.written)
        outputs = tuple(output.release() for output in gathered.outputs)
        if not any(call.wanted):
            return outputs
        ddp.check_seen(modules, call)
        return call.connect(outputs, attached, gathered, parameters_of(modules))  # type: ignore[no-any-return]

    wrapped = isinstance(module, DistributedDataParallel) and torch.is_grad_enabled()
    outputs = ddp.within_forward(module, run, call) if wrapped else run()  # type: ignore[arg-type]
    return gathered.structure(outputs, order)


def _planned(modules: Sequence[nn.Module], sharded: Shards, plan: Callable[[], Any]) -> tuple[Any, int]:
    """The plan, and how many chunks are to be added to it for the sake of other ranks.

    What is wrong with the arguments on one rank is raised on all that would wait for it.
    """
    error: Exception | None = None
    planned: Any = (None, [], None)
    try:
        planned = plan()
    except (ValueError, TypeError) as refusal:
        error = refusal
    try:
        own = len(planned[1])
        shards.check_same_chunks(own, modules, error)
        return planned, shards.agreed(own, sharded.groups, error, max) - own
    finally:
        error = None  # as in `agreed`


def _several(names: Name | Sequence[Name]) -> Sequence[Name]:
    return [names] if isinstance(names, str | int) else names


def _check_sizes(chunk_size: int | None, chunk_tokens: int | None) -> None:
    if (chunk_size is None) == (chunk_tokens is None):
        raise TypeError(
            f"chunked: chunk_size or chunk_tokens must be given, got {'neither' if chunk_size is None else 'both'}. "
            "Pass the rows of a chunk, or for texts of different lengths its tokens."
        )
    name, value = ("chunk_size", chunk_size) if chunk_tokens is None else ("chunk_tokens", chunk_tokens)
    if isinstance(value, bool) or not isinstance(value, int):
        unit = "rows" if chunk_tokens is None else "tokens"
        raise TypeError(f"chunked: {name} must be a whole number of {unit}, got {value!r}. Pass an int.")
    if value < 1:
        raise ValueError(f"chunked: {name} must be at least 1, got {value}. Take the largest that fits.")


def _positional_names(encoder: Any, count: int, given: Sequence[str]) -> list[str]:
    """Those of the encoder's first arguments, once it is sure that no option of ours is one of its keywords."""
    if not callable(encoder):
        raise TypeError(
            f"chunked: encoder must be callable, got {type(encoder).__name__}. Pass a module or a function."
        )
    target = uncompiled(encoder)
    bound = set(target.keywords) if isinstance(target, partial) else set()
    try:
        parameters = inspect.signature(target.forward if isinstance(target, nn.Module) else target).parameters.values()
    except (ValueError, TypeError):  # built in
        return []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_keyword = {*named[count:], *(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)} - bound
    for option in given:
        if option in by_keyword:
            raise ValueError(
                f"chunked: {option} must be an option of chunked alone, but the encoder has a keyword of that name. "
                f"Bind the encoder's first: functools.partial(encoder, {option}=...)."
            )
    return named[:count]


def _device_of(modules: Sequence[nn.Module]) -> torch.device | None:
    devices = {parameter.device for parameter in parameters_of(modules)}
    return devices.pop() if len(devices) == 1 else None


def _devices(modules: Sequence[nn.Module], batch: Batch, place: torch.device | None) -> list[torch.device]:
    tensors = [*batch.tensors(), *parameters_of(modules), *(b for m in modules for b in m.buffers(recurse=False))]
    devices = {tensor.device for tensor in tensors} | ({place} if place is not None else set())
    return sorted(devices, key=str)


def _warn_of_batch_norm(modules: Sequence[nn.Module], written: Sequence[nn.Module]) -> None:
    norms = [module for module in modules if isinstance(module, NORMS)]
    if any(norm in written or norm.running_mean is None for norm in norms):
        warn_once(
            "chunked",
            "batch norm",
            "the encoder has BatchNorm in training mode, which takes its statistics from each chunk, not from "
            "the whole batch, so chunks give other results than the batch would. Freeze it (.eval() on these layers), "
            "replace it by GroupNorm or LayerNorm, or synchronise it over ranks (SyncBatchNorm) to make up for small "
            "chunks. Running statistics are updated by the forward, once per chunk.",
        )
