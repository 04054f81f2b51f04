"""`chunked`: an encoder at any batch, in the memory of one chunk."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing the compiler
from torch.nn.parallel import DistributedDataParallel

from ..callers import warn_once
from . import wrappers
from .batch import Batch, Transform
from .conditions import Autocast, Buffers, Randomness
from .nested import Name
from .outputs import Gathered, selected
from .replay import Call


@_disable_dynamo  # a compiler leaves its graph here; the encoder itself may be compiled
def chunked(
    encoder: Callable[..., Any],
    /,
    *args: Any,
    chunk_size: int,
    select: Name | Sequence[Name] | None = None,
    whole: Name | Sequence[Name] = (),
    split: Name | Sequence[Name] = (),
    transform: Transform | Mapping[Name, Transform] | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Any:
    """Encode a batch of any size, holding the activations of one chunk at a time.

    Equals, up to rounding in value and in every gradient,

        encoder(*args, **kwargs)

    The forward keeps the outputs and no graph; the backward runs every chunk again, with the same random numbers and
    under the same autocast, and hands the summed gradients on as one. That costs one more forward. The result is an
    ordinary tensor: any loss, any number of calls, any trainer.

    Args:
        encoder: A module, a method of one, or a function. Under DistributedDataParallel: the wrapper, or, for the
            towers of a wrapped model, `ddp.module.encode_image`. Rows must not see each other: BatchNorm in training
            does, and warns; logits of the batch against itself do, and must not be selected.
        args, kwargs: As the encoder takes them: tensors, also nested in tuples, lists, dicts and their relatives, and
            anything else. Every tensor of at least one dimension is split along dim 0, and all of these must have
            the same number of rows; 0-d tensors and all that is no tensor are passed whole.
        chunk_size: Rows per chunk; the last one may have fewer.
        select: Which outputs to keep. A name or position gives that output itself, a list the container with those
            alone. What is not selected is dropped with its chunk.
        whole: Names of tensors that every chunk gets as they are, though they have dimensions. A name is an argument's,
            a key's, or a position.
        split: Names of lists (of texts, of images of different sizes) to split along their items.
        transform: Applied to each chunk before it is encoded, and again in the backward, on the encoder's device: a
            function of the one argument that is split, or a dict of them by name.
        device: Where chunks go. None: to the device of the encoder's parameters, if they are all on one. The batch may
            stay in (pinned) host memory.

    Returns:
        What the encoder returns for the whole batch: tensors with the batch in dim 0 put together; tensors of one
        element and what is no tensor, which must be the same for every chunk, once.
    """
    options = {"select": select, "whole": whole, "split": split, "transform": transform, "device": device}
    given = ["chunk_size", *(name for name, value in options.items() if value is not None and value != ())]
    modules = wrappers.modules_of(encoder)
    sharded = wrappers.is_sharded(modules)
    groups = wrappers.groups_of_shards(modules) if sharded else []
    batch, bounds, padding = _plan(
        modules,
        groups,
        chunk_size,
        lambda: Batch(
            args, kwargs, _positional_names(encoder, len(args), given), _several(whole), _several(split), transform
        ),
    )
    place = _device_of(modules) if device is None else torch.device(device)
    devices = _devices(modules, batch, place)
    inner = wrappers.inner(encoder)
    call = Call(
        encoder=lambda *args, **kwargs: selected(inner(*args, **kwargs), select),
        batch=batch,
        device=place,
        bounds=bounds,
        padding=padding,
        by_side_effect=sharded,
        modules=modules,
        quieted=wrappers.ddps_below(modules),
        reducers=_reducers(modules, sharded) if torch.is_grad_enabled() else [],
        randomness=Randomness(devices),
        autocast=Autocast.now(devices),
        buffers=Buffers(modules, copied=torch.is_grad_enabled()),
    )
    gathered = Gathered(batch.rows, chunk_size)
    wrappers.share_buffers(call.reducers)
    call.forward(gathered)
    gathered.settle(wrappers.agreed(gathered.kinds, groups, gathered.difference, wrappers.known_kinds))
    if len(bounds) > 1:
        _warn_of_batch_norm(modules, call.buffers.written)
    outputs = tuple(output.release() for output in gathered.outputs)
    if any(call.wanted(gathered.outputs)):
        outputs = _connected(call, gathered, outputs)
    return gathered.structure(outputs)


def _plan(
    modules: Sequence[nn.Module], groups: Sequence[str], chunk_size: int, make_batch: Callable[[], Batch]
) -> tuple[Batch, list[tuple[int, int]], int]:
    """The batch, the bounds of its chunks, and how many are to be added for the sake of other ranks of the groups.

    What is wrong with the arguments on one rank is raised on all that would wait for it.
    """
    error: Exception | None = None
    bounds: list[tuple[int, int]] = []
    try:
        _check_chunk_size(chunk_size)
        batch = make_batch()
        bounds = [(start, min(start + chunk_size, batch.rows)) for start in range(0, max(batch.rows, 1), chunk_size)]
    except (ValueError, TypeError) as refusal:
        error = refusal
    try:
        wrappers.check_same_chunks(len(bounds), modules, error)
        most = wrappers.agreed(len(bounds), groups, error, max)
    finally:
        error = None  # as in `agreed`
    return batch, bounds, most - len(bounds)


def _reducers(modules: Sequence[nn.Module], sharded: bool) -> list[DistributedDataParallel]:
    """The wrappers that reduce gradients of these modules."""
    trained = [p for p in wrappers.parameters_of(modules) if p.requires_grad and not hasattr(p, "device_mesh")]
    reducers = wrappers.ddps_around(trained, wrappers.ddps_below(modules))
    if reducers and sharded:
        raise ValueError(
            "chunked: encoder must be under DistributedDataParallel or fully_shard, got one that holds modules "
            "of both. Call chunked for each."
        )
    return reducers


def _connected(call: Call, gathered: Gathered, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs with their place in autograd's graph, and known to who reduces gradients."""
    if not call.by_side_effect:
        if not call.unused.all_seen:
            wrappers.check_not_sharded(call.trace.leaves)
            call.reducers = wrappers.ddps_around(call.leaves, call.reducers)
            call.quieted = list({*call.quieted, *call.reducers})
        if call.trace.hides_leaves and call.reducers:
            raise ValueError(
                "chunked: an encoder inside DistributedDataParallel must not have reentrant checkpoints, because their "
                "gradients would be reduced once per chunk. Checkpoint with use_reentrant=False."
            )
        call.by_side_effect = call.trace.hides_leaves
        call.reducers = wrappers.reducing(call.leaves, call.reducers)
    call.remember(gathered.outputs)
    return call.connect(outputs)


def _several(names: Name | Sequence[Name]) -> Sequence[Name]:
    return [names] if isinstance(names, str | int) else names


def _check_chunk_size(chunk_size: int) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunked: chunk_size must be a whole number of rows, got {chunk_size!r}. Pass an int.")
    if chunk_size < 1:
        raise ValueError(f"chunked: chunk_size must be at least 1, got {chunk_size}. Take the largest that fits.")


def _positional_names(encoder: Any, count: int, given: Sequence[str]) -> list[str]:
    """Those of the encoder's first arguments, once it is sure that no option of ours is one of its keywords."""
    if not callable(encoder):
        raise TypeError(
            f"chunked: encoder must be callable, got {type(encoder).__name__}. Pass a module or a function."
        )
    target: Any = wrappers.inner(encoder)
    target = getattr(target, "_orig_mod", target)  # of a compiled module
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
    devices = {parameter.device for parameter in wrappers.parameters_of(modules)}
    return devices.pop() if len(devices) == 1 else None


def _devices(modules: Sequence[nn.Module], batch: Batch, place: torch.device | None) -> list[torch.device]:
    tensors = [argument.value for argument in batch.arguments if isinstance(argument.value, Tensor)]
    tensors += [*wrappers.parameters_of(modules), *(b for module in modules for b in module.buffers(recurse=False))]
    devices = {tensor.device for tensor in tensors} | ({place} if place is not None else set())
    return sorted(devices, key=str)


def _warn_of_batch_norm(modules: Sequence[nn.Module], written: Sequence[nn.Module]) -> None:
    norms = [module for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if any(norm in written or norm.running_mean is None for norm in norms):
        warn_once(
            "chunked",
            "batch norm",
            "the encoder has BatchNorm in training mode, which takes its statistics from each chunk, not from "
            "the whole batch, so chunks give other results than the batch would. Freeze it (.eval() on these layers), "
            "replace it by GroupNorm or LayerNorm, or synchronise it over ranks (SyncBatchNorm) to make up for small "
            "chunks. Running statistics are updated by the forward, once per chunk.",
        )
