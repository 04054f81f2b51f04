"""Ranks: the processes of one group; what all of them exchange at once, and what one sends to another.

Every error says which function waited for which rank, at which step, and what torch reported.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor

# torch.distributed.nn is imported early on purpose. Its functions have the default group as a default argument, and
# torch imports it in the first call of an operator. If the group existed by then, it would be kept alive, and its
# threads would outlive destroy_process_group.

NUMBERS = 32  # in a rank's handshake. One size for all: ranks may make different calls by mistake
ERRORS = (ValueError, TypeError, UserWarning)

# Its name before torch 2.13.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Facts = dict[str, Any]  # what JSON can carry
Transfer = list[tuple[str, dist.Work]]  # messages in flight, and what each of them waits for

_handshakes: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # so far


class Ranks:
    """The ranks of a group, numbered within it. With no group: this process alone.

    Attributes:
        function: The public function that communicates, for errors.
        phase: "forward" or "backward".
        where: Where in that phase we are, for errors.
        device: Of the tensors that are sent, where it is known.
        observer: Of observed_waits, for all of them.
    """

    observer: ClassVar[Callable[[], AbstractContextManager[None]]] = nullcontext

    def __init__(
        self, function: str, group_name: str = "", phase: str = "forward", device: torch.device | None = None
    ) -> None:
        self.function, self.phase, self.device = function, phase, device
        self.where = f"the handshake before the {phase} pass"
        self.group: dist.ProcessGroup | None = None
        self.size, self.rank = 1, 0
        if group_name:
            self.group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined,arg-type]
            self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)

    # ---- all at once

    @property
    def num_handshakes(self) -> int:
        """So far, in this group: the same number on all ranks."""
        return 0 if self.group is None else _handshakes.get(self.group, 0)

    def handshake(
        self, same: Facts, own: Sequence[float] = (), errors: list[Exception] | None = None, call_site: str = ""
    ) -> list[list[float]]:
        """Every rank's `own`, if `same` is the same on all ranks and none has errors; else one exception on every rank.

        One collective: what must be the same travels as a hash, and as text only where something is wrong.

        Args:
            call_site: The line that made the call, where it is known: two calls that are alike but swapped on one
                rank would otherwise go unnoticed.
        """
        if self.group is None:
            if errors:
                raise errors.pop()  # out of a list that this frame, and so its traceback, holds
            return [list(own)]
        _handshakes[self.group] = self.num_handshakes + 1
        error = errors.pop() if errors else None
        kind = next((index for index, kind in enumerate(ERRORS) if isinstance(error, kind)), 0)
        refusal = None if error is None else [kind, str(error)]
        facts = [f"{self.function}, {self.where}", refusal, call_site, same]
        digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=6).hexdigest()  # exact in float64
        mine = torch.tensor([int(digest, 16), *own, *[0.0] * (NUMBERS - len(own))], dtype=torch.float64)
        everyones = self._all_gather(mine).tolist()
        if error is not None or len({digest for digest, *_ in everyones}) > 1:
            self._compare(facts, error)
        return [each[1 : 1 + len(own)] for each in everyones]

    @contextmanager
    def deferred_errors(self) -> Iterator[list[Exception]]:
        """An error of this rank, for a handshake to raise it on all."""
        errors: list[Exception] = []
        try:
            yield errors
        except (ValueError, Warning) as error:  # a warning that the user turned into an error
            errors.append(error.with_traceback(None))  # which would hold frames, and with them the features

    def _compare(self, facts: list[Any], error: Exception | None) -> None:
        """Raise, on every rank, the first thing that is wrong."""
        calls, refusals, sites, sames = zip(*self.all_gather_json(facts), strict=True)
        if difference := _first_difference(calls):
            raise RuntimeError(
                f"megabatch: the ranks of a group must call the same functions in the same order, got {difference}."
            )
        for rank, found in enumerate(refusals):
            if found is not None:
                where = "" if refusals.count(found) == self.size else f" (On rank {rank} of the group's {self.size}.)"
                raise ERRORS[found[0]](found[1] + where) from error
        if all(sites) and (difference := _first_difference(sites)):
            raise RuntimeError(
                f"{self.function}: all ranks of a group must make this call from the same line, got {difference}. Two "
                "calls may be in another order on one rank. If ranks take different branches, compute the features in "
                "them and call the loss once after them."
            )
        for name in sames[0]:
            self.check_same(name, [same[name] for same in sames])

    def check_same(self, name: str, values: Sequence[Any], advice: str = "") -> None:
        if difference := _first_difference(values):
            text = f"{self.function}: {name} must be the same on every rank of the group, got {difference}. {advice}"
            raise ValueError(text.rstrip())

    def all_gather_json(self, mine: Any) -> list[Any]:
        """Every rank's. Only after a handshake, which makes sure that all ranks are here."""
        if self.group is None:
            return [mine]
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([len(text)])).flatten().tolist()
        texts = self._all_gather(torch.nn.functional.pad(text, (0, max(lengths) - len(text)))).tolist()
        return [json.loads(bytes(text[:length])) for text, length in zip(texts, lengths, strict=True)]

    def all_gather(self, partial: Tensor) -> Tensor:
        """A small vector of every rank, by rank: added up in this order, it has the same bits on every rank."""
        if self.group is None:
            return partial[None]
        self.where = f"the sum after {self.where}"
        return self._all_gather(partial)

    def all_gather_block(self, mine: Tensor, where: str = "") -> Tensor:
        """Tensors of one size of all ranks, by rank."""
        self.where = where or f"the gather for the {self.phase} pass"
        gathered = mine.new_empty(self.size * mine.numel())
        with self._named_errors("for the other ranks"):
            _all_gather_single(gathered, mine.flatten(), group=self.group)
        return gathered.view(self.size, *mine.shape)

    def all_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        """In place."""
        self.where = f"the sum of the statistics of the {self.phase} pass"
        with self._named_errors("for the other ranks"):
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def all_to_all(self, sent: Tensor) -> Tensor:
        """Row i of every rank arrives at rank i, by rank."""
        self.where = f"the sum of the gradients of the {self.phase} pass"
        received = torch.empty_like(sent)
        with self._named_errors("for the other ranks"):
            dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        return received

    def _all_gather(self, mine: Tensor) -> Tensor:
        """Every rank's vector, from where it is, if the group sends from there, and back."""
        place = self._place(mine.device)
        # Beside the work that is queued on the device, so that the host waits for the ranks and not for that.
        beside = mine.device.type != "cuda" and place.type == "cuda"
        with torch.cuda.stream(_side_stream(place)) if beside else nullcontext():
            return self.all_gather_block(mine.to(place), self.where).to(mine.device)

    def _place(self, device: torch.device) -> torch.device:
        """Where a vector is sent from: where it is, or the CPU, or where the features are."""
        assert self.group is not None
        kinds = self._device_types()
        places = (device, torch.device("cpu"), self.device, self.group.bound_device_id, torch.device(kinds[0]))
        return next(place for place in places if place is not None and place.type in kinds)

    def _device_types(self) -> list[str]:
        """That this group sends from."""
        entries = (entry.split(":") for entry in str(dist.get_backend_config(self.group)).split(","))
        return [device for device, backend in entries if device == "cpu" or backend != "gloo"]  # gloo: the CPU alone

    def check_device(self) -> None:
        kinds = [] if self.group is None else self._device_types()
        if kinds and self.device is not None and self.device.type not in kinds:
            raise ValueError(
                f"{self.function}: features must be on a device that the group's backend sends from "
                f"({' or '.join(kinds)}), got {self.device.type}. Pass a group for that device."
            )

    # ---- from one to another

    def transfer(self, to: int, sent: Tensor, source: int, received: Tensor, tag: int) -> Transfer:
        """Start to send to one rank and to receive as much from another, under one tag per kind of message. Torch wants
        all ranks of a group in its first transfer."""
        if not sent.numel():
            return []
        waits = [f"for rank {to} to receive a block", f"for rank {source} to send a block"]
        either = " or ".join(waits)
        operations = [
            dist.P2POp(dist.isend, sent, group=self.group, tag=tag, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=source),
        ]
        with self._named_errors(either):
            works = dist.batch_isend_irecv(operations)
        return list(zip(waits if len(works) > 1 else [either], works, strict=True))  # one for both on some backends

    def wait(self, transfer: Transfer) -> None:
        """Until its messages have arrived; on an accelerator its stream waits. Each work is waited on once."""
        while transfer:
            peer, work = transfer.pop()  # the receive first: the next step needs it
            with self._named_errors(peer):
                work.wait()

    @contextmanager
    def _named_errors(self, peer: str) -> Iterator[None]:
        try:
            with Ranks.observer():
                yield
        except RuntimeError as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise RuntimeError(
                f"{self.function}: rank {self.rank} of the group's {self.size} waited {peer}, at {self.where}, and "
                f"torch reported: {said}. A rank has ended, does not answer or does not make this call; look for the "
                "first one that stopped."
            ) from error


@contextmanager
def observed_waits(observer: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within it this process waits for other ranks in `with observer():`."""
    before, Ranks.observer = Ranks.observer, observer
    try:
        yield
    finally:
        Ranks.observer = before


class refuse_together:
    """`with refuse_together(function, group_name):` an error of this rank's arguments is raised on all ranks of the
    group, which wait in their handshake. A class, because a compiler can trace it."""

    def __init__(self, function: str, group_name: str, features: object = None) -> None:
        """`features` are on the device that this rank sends from, if nothing is wrong with them."""
        self.function, self.group_name = function, group_name
        self.device = features.device if isinstance(features, Tensor) else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        refused = isinstance(error, (ValueError, TypeError, Warning))  # a warning that the user turned into an error
        if self.group_name and refused and not torch.compiler.is_compiling():
            assert isinstance(error, Exception)
            Ranks(self.function, self.group_name, device=self.device).handshake({}, errors=[error])


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _first_difference(values: Sequence[Any]) -> str:
    """Which rank's value differs from rank 0's, in words; "" where all are alike."""
    others = (rank for rank, value in enumerate(values) if not _alike(value, values[0]))
    return next((f"{values[0]!r} on rank 0 and {values[other]!r} on rank {other}" for other in others), "")


def _alike(one: Any, other: Any) -> bool:
    """NaN is like NaN. Ranks may round differently: the exponential of a logarithm, for one."""
    floats = isinstance(one, float) and isinstance(other, float)
    close = floats and math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12)
    return close or one == other or repr(one) == repr(other)
