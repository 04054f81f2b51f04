"""`chunked`: an encoder at any batch, in the memory of one chunk."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler along with us
from torch.nn.parallel import DistributedDataParallel

from ..callers import warn_once
from .arguments import Counts, Transform
from .batch import Batch
from .containers import Name
from .replay import Call, in_float32
from .shards import ShardedCall, Shards, agree_on_chunks
from .state import State
from .wrappers import check_wrapper, is_compiled, modules_of, unwrapped, within_forward

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

    Equals, up to rounding in value and in every gradient, `encoder(*args, **kwargs)`. In the simplest case it is

        torch.cat([checkpoint(encoder, chunk, use_reentrant=False) for chunk in images.split(chunk_size)])

    The forward keeps no activations; the backward runs every chunk again, with the same random numbers and under the
    same autocast. That costs one more forward. The result is an ordinary tensor: any loss, any trainer.

    Args:
        encoder: A module, a method of one, or a function. Rows must not see each other: BatchNorm in training mode
            does, and warns; logits of the batch against itself do, and must not be selected.
        args, kwargs: As the encoder takes them, also tensors nested in tuples, lists, dicts and dataclasses. Every
            tensor of at least one dimension is split along dim 0, and all of these must have the same number of rows.
            0-d tensors and everything else are passed whole.
        chunk_size: Rows per chunk; the last one may have fewer.
        chunk_tokens: Instead of chunk_size, for rows of different lengths: tokens per chunk, counted as rows times the
            longest of them. Rows are sorted by length, and results come back in your order. Lengths are read off a
            tensor named attention_mask, and padding beyond a chunk's longest row is cut off; or off the items of a
            list in `split`, in tokens if its transform is a tokenizer that returns a mask.
        select: Which outputs to keep. A name or position gives that output, a list the container with those alone.
        whole: Names of tensors that every chunk gets whole. A name is an argument's, a key's, or a position.
        split: Names of lists (of texts, of images of different sizes) to split along their items. A dict also says
            how many rows of a packed tensor belong to each sample: {"pixel_values": counts, "image_grid_thw": None}.
            "offsets" for a tensor of cumulative lengths (cu_seqlens), which start at 0 in every chunk.
        transform: Applied to each chunk before it is encoded, on the encoder's device, in both runs: a function of the
            one argument that is split, or a dict of functions by name.
        device: Where chunks go. None: to the device of the encoder's parameters, if they are all on one. The batch may
            stay in (pinned) host memory: the next chunk is copied while this one computes.
        module: The DistributedDataParallel that reduces the gradients, where this call is not inside the forward of
            the module it wraps: `chunked(ddp.module.encode_image, images, chunk_size=64, module=ddp)`. Otherwise the
            module whose parameters a function uses, if it is not among the function's variables.
        pad_last: Fill the last chunk up with copies of its last row, whose outputs are dropped, so that all chunks have
            one shape. None: if the encoder is compiled.

    Returns:
        What the encoder returns for the whole batch: tensors with the batch in dim 0 are joined; tensors of one element
        and anything that is not a tensor must be the same for every chunk, and are returned once.
    """
    options = {"select": select, "whole": whole, "split": split, "transform": transform, "device": device}
    options |= {"chunk_size": chunk_size, "chunk_tokens": chunk_tokens, "module": module, "pad_last": pad_last}
    given = [name for name, value in options.items() if value is not None and value != ()]
    is_named, (inner, module) = module is not None, unwrapped(encoder, module)
    ddp = module if isinstance(module, DistributedDataParallel) else None
    roots = [*modules_of(inner), *modules_of(module if ddp is None else ddp.module)]
    modules = list(dict.fromkeys(each for root in roots for each in root.modules()))
    shards = Shards(modules)

    def plan() -> Batch:
        names = _positional_names(inner, len(args), given)
        counts = split if isinstance(split, Mapping) else dict.fromkeys(_several(split))
        batch = Batch(args, kwargs, names, _several(whole), counts, transform)
        _check_sizes(chunk_size, chunk_tokens, pad_last)
        if chunk_size is not None:
            pad = is_compiled(inner, modules) if pad_last is None else pad_last
            batch.cut(chunk_size, pad, required=bool(pad_last))
        elif chunk_tokens is not None:
            batch.cut_by_tokens(chunk_tokens)
        return batch

    batch, num_chunks = agree_on_chunks(plan, shards, modules)
    if not shards:
        check_wrapper(inner, modules, module)
    parameters = [parameter for each in modules for parameter in each.parameters(recurse=False)]
    devices = {parameter.device for parameter in parameters}
    place = torch.device(device) if device is not None else next(iter(devices)) if len(devices) == 1 else None
    devices |= batch.devices() | ({place} if place is not None else set())

    def run() -> Any:
        state = State(sorted(devices, key=str), modules)
        encode = inner if shards else in_float32(inner, roots)
        call: Call
        if shards:
            call = ShardedCall(encode, batch, place, state, parameters, select, shards, num_chunks - len(batch.sizes))
        else:
            call = Call(encode, batch, place, state, parameters, select)
        result = call.forward()
        if len(batch.sizes) > 1:
            _warn_of_batch_norm(modules, state.written())
        return result

    return within_forward(ddp, run, is_named) if ddp is not None and torch.is_grad_enabled() else run()


def _several(names: Name | Sequence[Name]) -> Sequence[Name]:
    return [names] if isinstance(names, str | int) else names


def _check_sizes(chunk_size: int | None, chunk_tokens: int | None, pad_last: bool | None) -> None:
    if (chunk_size is None) == (chunk_tokens is None):
        raise TypeError(
            f"chunked: chunk_size or chunk_tokens must be given, got {'neither' if chunk_size is None else 'both'}. "
            "Pass the rows of a chunk, or for texts of different lengths its tokens."
        )
    name, value = ("chunk_size", chunk_size) if chunk_tokens is None else ("chunk_tokens", chunk_tokens)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"chunked: {name} must be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"chunked: {name} must be at least 1, got {value}. Take the largest that fits.")
    if pad_last and chunk_tokens is not None:
        raise ValueError(
            "chunked: pad_last must be left out with chunk_tokens, whose chunks differ in shape, got True."
        )


def _positional_names(encoder: Any, count: int, given: Sequence[str]) -> list[str]:
    """The names of the encoder's first arguments. Refuses options of ours that are keywords of the encoder too."""
    if not callable(encoder):
        raise TypeError(f"chunked: encoder must be callable, got {type(encoder).__name__}.")
    target = getattr(encoder, "_orig_mod", encoder)
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


def _warn_of_batch_norm(modules: Sequence[nn.Module], written: Sequence[nn.Module]) -> None:
    norms = [module for module in modules if isinstance(module, NORMS)]
    if any(norm in written or norm.running_mean is None for norm in norms):
        warn_once(
            "chunked",
            "batch norm",
            "the encoder has BatchNorm in training mode, whose statistics are those of each chunk, not of the batch. "
            "Freeze it (.eval() on these layers), replace it by GroupNorm or LayerNorm, or make up for small chunks by "
            "SyncBatchNorm. Running statistics are updated by the forward, once per chunk.",
        )
