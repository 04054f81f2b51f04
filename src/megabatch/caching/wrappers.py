"""What stands round an encoder: functions and methods that reach its modules, and trainers that reduce its gradients.

DistributedDataParallel reduces a parameter when its gradient arrives, which is once in a backward here as elsewhere; it
only has to be told that a forward took place. A function that reaches round its forward (`ddp.module.encode_image`) is
known by the parameters it used. Modules under `fully_shard` gather their parameters in every forward, so all ranks must
run as many.
"""

import dis
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.ranks import Ranks

_known_ddps: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()
_known_groups: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()

_EMPTY_CELL = types.CellType()  # of a name that has no value yet


# ---- functions and modules


def modules_of(encoder: Any) -> list[nn.Module]:
    """The modules that a callable is, is a method of, or holds (in a partial, a closure, the globals it names), and all
    below them, each once."""
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    waiting = [encoder]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found |= dict.fromkeys(value.modules())
        elif isinstance(value, types.MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.FunctionType):
            waiting += _held_by(value)
        elif isinstance(value, dict | list | tuple):
            items = value.values() if isinstance(value, dict) else value
            waiting += [item for item in items if isinstance(item, nn.Module)]
        elif not isinstance(value, type):
            waiting += [held for held in getattr(value, "__dict__", {}).values() if _is_or_lists_modules(held)]
    return list(found)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Of these modules alone, each once."""
    return list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))


def _held_by(function: types.FunctionType) -> list[Any]:
    held = [function.__dict__.get("_torchdynamo_orig_callable"), function.__dict__.get("__wrapped__")]
    held += [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL]
    codes = [function.__code__, *(c for c in function.__code__.co_consts if isinstance(c, types.CodeType))]
    names = [step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    held += [function.__globals__.get(name) for name in names]
    return [value for value in held if _may_hold_modules(value)]


def _is_or_lists_modules(value: Any) -> bool:
    return isinstance(value, nn.Module | dict | list | tuple)


def _may_hold_modules(value: Any) -> bool:
    if isinstance(value, types.ModuleType | type):
        return False
    of_torch = (getattr(value, "__module__", None) or "").split(".")[0] == "torch"
    compiled = "_torchdynamo_orig_callable" in getattr(value, "__dict__", {})
    return isinstance(value, nn.Module) or compiled or not of_torch


def inner(encoder: Any) -> Callable[..., Any]:
    """What to call for one chunk: not DistributedDataParallel's forward, which would take every chunk for a step."""
    if isinstance(encoder, types.MethodType) and isinstance(encoder.__self__, DistributedDataParallel):
        encoder = encoder.__self__
    while isinstance(encoder, DistributedDataParallel):
        encoder = encoder.module
    return encoder  # type: ignore[no-any-return]


# ---- DistributedDataParallel


def ddps_below(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def ddps_around(tensors: Iterable[Tensor], below: Sequence[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """Those that reduce the gradients of the tensors: among the ones `below`, and wherever else they are kept."""
    if not dist.is_initialized():
        return []
    tensors = list(tensors)
    found = reducing(tensors, below)
    wanted = {id(tensor) for tensor in tensors} - set().union(*map(_parameters, found))
    unknown = wanted - set().union(*_known_ddps.values())
    if any(_is_watched(tensor) for tensor in tensors if id(tensor) in unknown):
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):
                _known_ddps[thing] = _parameters(thing)
    if _twice(wanted):
        gc.collect()  # one of them may be a wrapper that nobody uses any more
    if _twice(wanted):
        raise ValueError(
            "chunked: encoder must be inside of one DistributedDataParallel, got parameters that several of them wrap. "
            "Delete the wrappers that are not used, or pass the one that is."
        )
    return found + [ddp for ddp, parameters in _known_ddps.items() if wanted & parameters]


def _is_watched(tensor: Tensor) -> bool:
    """Whether somebody keeps the node of autograd's graph that accumulates its gradient: who reduces it does."""

    def notes() -> Any:
        return torch.autograd.graph.get_gradient_edge(tensor).node.metadata

    notes()["megabatch"] = True
    return bool(notes().pop("megabatch", False))


def reducing(tensors: Iterable[Tensor], ddps: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """Those among them that reduce the gradients of the tensors."""
    wanted = {id(tensor) for tensor in tensors}
    return [ddp for ddp in ddps if wanted & _parameters(ddp)]


def _parameters(ddp: DistributedDataParallel) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in ddp._module_parameters)


def _twice(wanted: set[int]) -> bool:
    held = [wanted & parameters for parameters in _known_ddps.values()]
    return sum(map(len, held)) > len(set().union(*held))


@contextmanager
def quiet(ddps: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Their forward, should a chunk call it, sends nothing."""
    before = [(ddp.require_backward_grad_sync, ddp.require_forward_param_sync) for ddp in ddps]
    for ddp in ddps:
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    try:
        yield
    finally:
        for ddp, (backward, forward) in zip(ddps, before, strict=True):
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = backward, forward


def share_buffers(ddps: Iterable[Any]) -> None:
    """Before a forward, as DistributedDataParallel does it: all ranks take those of the first."""
    for ddp in ddps:
        if DistributedDataParallel._active_ddp_module is not ddp and ddp._check_sync_bufs_pre_fwd():
            with torch.no_grad():
                ddp._sync_buffers()


def passed_through(ddp: Any, outputs: tuple[Tensor, ...], earlier: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs, as if the module's forward had given them: one forward for DistributedDataParallel's books.

    A parameter that is used neither by them nor by those of `earlier` calls can be one that it must not wait for.
    """
    if DistributedDataParallel._active_ddp_module is ddp:  # its forward is what calls us
        return outputs
    ddp.require_forward_param_sync = False  # done before the first chunk, or too late now; forward sets it again
    ddp._run_ddp_forward = lambda *_: (*outputs, *earlier)
    try:
        given: tuple[Tensor, ...] = ddp.forward(None)[: len(outputs)]  # it expects to be given something
        return given
    finally:
        del ddp._run_ddp_forward


# ---- fully_shard, and what else meets in every forward


def is_sharded(modules: Sequence[nn.Module]) -> bool:
    """Whether `fully_shard` keeps parameters of these. Its module is looked at only if something has imported it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        raise TypeError(
            "chunked: encoder must not be a FullyShardedDataParallel, whose parameters change place in every forward. "
            "Use torch.distributed.fsdp.fully_shard."
        )
    return any(isinstance(module, fsdp.FSDPModule) for module in modules)


def check_idle(modules: Iterable[nn.Module]) -> None:
    """`fully_shard` takes a forward in the middle of its own backward for a checkpoint's."""
    for module in modules:
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is not None and state._training_state.name != "IDLE":
            raise RuntimeError(
                "chunked: an encoder under fully_shard must not be called both in chunks and without in one backward, "
                f"got a {type(module).__name__} that is busy with its own. Call it by chunked everywhere in the step."
            )


def check_not_sharded(leaves: Sequence[Tensor]) -> None:
    """None of these, which belong to no module that was seen, is one that `fully_shard` fills for a forward."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    wanted = {id(leaf) for leaf in leaves}
    shards = [thing for thing in gc.get_objects() if issubclass(type(thing), fsdp.FSDPModule)]
    emptied = any(leaf.numel() and not leaf.is_meta and not leaf.untyped_storage().size() for leaf in leaves)
    if emptied or any(id(parameter) in wanted for module in shards for parameter in module.parameters()):
        raise ValueError(
            "chunked: encoder must be a module, a method of one, or a function that holds it in a variable, where "
            "parameters are sharded by fully_shard, got something whose modules cannot be seen."
        )


def groups_of_shards(modules: Sequence[nn.Module]) -> list[str]:
    """The names of the groups over which parameters are sharded."""
    shards: list[Any] = [module for module in modules if hasattr(module, "reshard")]
    if any(shard not in _known_groups for shard in shards):
        for shard in shards:
            shard.reshard()  # it may be whole since its last forward
        for shard in shards:
            _known_groups[shard] = _groups_of(shard)
    return list(dict.fromkeys(name for shard in shards for name in _known_groups[shard]))


def _groups_of(shard: nn.Module) -> list[str]:
    kept_on = [getattr(parameter, "device_mesh", None) for parameter in shard.parameters()]
    meshes = dict.fromkeys(mesh for mesh in kept_on if mesh is not None)  # in the same order on all ranks
    groups = [mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)]
    return list(dict.fromkeys(group.group_name for group in groups if dist.get_world_size(group) > 1))


def agreed(fact: Any, group_names: Sequence[str], error: Exception | None, merge: Callable[[list[Any]], Any]) -> Any:
    """What the ranks of these groups make of their facts; the same error on all of them where one has an `error`."""
    for name in group_names:
        try:
            ranks = Ranks("chunked", name)
            ranks.handshake({}, errors=[] if error is None else [error])
            fact = merge(ranks.all_gather_json(fact))
        except (ValueError, TypeError) as refusal:  # noqa: PERF203
            error = refusal  # and on to the next group, where others wait
    try:
        if error is not None:
            raise error
    finally:
        error = None  # its traceback holds this frame: together they would keep the encoder and its group
    return fact


def known_kinds(ranks: list[list[str]]) -> list[str]:
    """What each output is: a rank with a single row may not know, and takes the word of another."""
    return [next((kind for kind in each if kind != "either"), "either") for each in zip(*ranks, strict=True)]


def check_same_chunks(own: int, modules: Iterable[nn.Module], error: Exception | None) -> None:
    """Norms that synchronise their statistics meet in every forward. An `error` is raised on all ranks that would."""
    norms = [module for module in modules if isinstance(module, nn.SyncBatchNorm) and module.training]
    groups: Any = dict.fromkeys(norm.process_group or dist.group.WORLD for norm in norms)
    for group in (group for group in groups if group is not None and dist.get_world_size(group) > 1):
        Ranks("chunked", group.group_name).handshake(
            {"the number of chunks under SyncBatchNorm": own}, errors=[] if error is None else [error]
        )
