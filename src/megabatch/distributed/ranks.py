"""Ranks: the processes of one group; what all of them exchange at once, and what one sends to another.

Every error says which function waited for which rank, at which step, and what torch reported.
"""

import ctypes
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor

# torch.distributed.nn is imported early on purpose. Its functions have the default group as a default argument, and
# torch imports it in the first call of an operator. If the group existed by then, it would be kept alive, and its
# threads would outlive destroy_process_group.

PAGE = 2048  # bytes of the first message of a handshake; longer ones need a second
DIGITS = 16  # at its beginning: its length
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "UserWarning": UserWarning}

Facts = dict[str, Any]  # what JSON can carry

_handshakes: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # so far
_connected: WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = WeakKeyDictionary()


class Ranks:
    """The ranks of a group, numbered within it. With no group: this process alone.

    Attributes:
        function: The public function that communicates, for errors.
        phase: "forward" or "backward".
        where: Where in that phase we are, for errors.
        device: Of the tensors that are sent, where it is known.
    """

    def __init__(
        self, function: str, group_name: str = "", phase: str = "forward", device: torch.device | None = None
    ) -> None:
        self.function, self.name, self.phase, self.device = function, group_name, phase, device
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

    def handshake(self, same: Facts, own: Facts, error: Exception | None = None, call_site: str = "") -> list[Facts]:
        """Every rank's `own`, if all ranks bring the `same` and none has an `error`; else one exception on every rank.

        Args:
            call_site: The line that made the call, where it is known: two calls that are alike but swapped on one
                rank would otherwise go unnoticed.
        """
        if self.group is None:
            if error is not None:
                raise error
            return [own]
        refusal = None if error is None else (_kind(error), str(error))
        _handshakes[self.group] = self.num_handshakes + 1
        here = f"{self.function}, {self.where}"
        messages = [
            json.loads(text) for text in self._all_gather_text(json.dumps([here, call_site, refusal, same, own]))
        ]
        calls, sites, refusals, sames, owns = zip(*messages, strict=True)
        if difference := first_difference(calls):
            raise RuntimeError(
                f"megabatch: the ranks of a group must call the same functions in the same order, got {difference}."
            )
        self._raise_first(refusals, error)
        if all(sites) and (difference := first_difference(sites)):
            raise RuntimeError(
                f"{self.function}: all ranks of a group must make this call from the same line, got {difference}. Two "
                "calls may be in another order on one rank. If ranks take different branches, compute the features in "
                "them and call the loss once after them."
            )
        for name in same:
            if difference := first_difference([rank[name] for rank in sames]):
                raise ValueError(
                    f"{self.function}: {name} must be the same on every rank of the group, got {difference}."
                )
        return list(owns)

    def _raise_first(self, refusals: Sequence[tuple[str, str] | None], own: Exception | None) -> None:
        refusing = [rank for rank, refusal in enumerate(refusals) if refusal]
        if refusing:
            kind, message = refusals[refusing[0]] or ("", "")
            all_alike = all(refusal == refusals[0] for refusal in refusals)
            where = "" if all_alike else f" (On rank {refusing[0]} of the group's {self.size}.)"
            raise ERRORS[kind](message + where) from own

    def _all_gather_text(self, text: str) -> list[str]:
        """Every rank's text: one message where they are short."""
        mine = text.encode()
        first = b"%*d" % (DIGITS, len(mine)) + mine[: PAGE - DIGITS]
        pages = self._all_gather_bytes(first.ljust(PAGE))
        lengths = [int(page[:DIGITS]) for page in pages]
        longest = max(lengths)
        texts = [page[DIGITS:] for page in pages]
        if longest > PAGE - DIGITS:
            rests = self._all_gather_bytes(mine[PAGE - DIGITS :].ljust(longest))
            texts = [text + rest for text, rest in zip(texts, rests, strict=True)]
        return [text[:length].decode() for text, length in zip(texts, lengths, strict=True)]

    def _all_gather_bytes(self, mine: bytes) -> list[bytes]:
        gathered = self._all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [ctypes.string_at(each.data_ptr(), len(mine)) for each in gathered]  # without numpy, at once

    def all_sum(self, partial: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks, added in rank order: the same bits on every rank."""
        if self.group is None:
            return partial
        self.where = f"the sum after {self.where}"
        return torch.stack(self._all_gather(partial)).sum(0)

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's: through the CPU, if the group has a backend for it."""
        devices = self._devices()
        there = mine.contiguous().to("cpu" if "cpu" in devices else self.device or devices[0])
        gathered = [torch.empty_like(there) for _ in range(self.size)]
        with self._named_errors("for the other ranks"):
            dist.all_gather(gathered, there, group=self.group)
        return [each.to(mine.device) for each in gathered]

    def _devices(self) -> list[str]:
        """The kinds of device that this group sends from."""
        entries = (entry.split(":") for entry in str(dist.get_backend_config(self.group)).split(","))
        return [device for device, backend in entries if device == "cpu" or backend != "gloo"]  # gloo: the CPU alone

    def check_device(self) -> None:
        if self.group is not None and self.device is not None and self.device.type not in self._devices():
            raise ValueError(
                f"{self.function}: features must be on a device that the group's backend sends from "
                f"({' or '.join(self._devices())}), got {self.device.type}. Pass a group for that device."
            )

    def connect(self) -> None:
        """Before the first transfer: torch wants all ranks of a group in the first message on an accelerator."""
        if self.group is None or self.device is None or self.device.type == "cpu":
            return
        connected = _connected.setdefault(self.group, set())
        if self.device not in connected:
            connected.add(self.device)
            with self._named_errors("for the other ranks"):
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    # ---- from one to another

    def transfer(self, to: int, sent: Tensor, source: int, received: Tensor, tag: int) -> "Transfer":
        """Start to send to one rank and to receive from another, under one tag per kind of message. Nothing of size 0
        is sent."""
        messages = [("to receive", to, dist.isend, sent), ("to send", source, dist.irecv, received)]
        messages = [message for message in messages if message[-1].numel()]
        waits = [f"for rank {peer} {verb} a block" for verb, peer, _, _ in messages]
        if not messages:
            return Transfer(self)
        assert self.group is not None
        operations = [
            dist.P2POp(begin, tensor, group=self.group, tag=tag, group_peer=peer) for _, peer, begin, tensor in messages
        ]
        with self._named_errors(waits[-1]):
            works = dist.batch_isend_irecv(operations)
        if len(works) < len(waits):  # one for both, on some backends
            waits = [" or ".join(waits)]
        return Transfer(self, list(zip(waits, works, strict=True)))

    @contextmanager
    def _named_errors(self, whom: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise RuntimeError(
                f"{self.function}: rank {self.rank} of the group's {self.size} waited {whom}, at {self.where}, and "
                f"torch reported: {said}. A rank has ended, does not answer or does not make this call; look for the "
                "first one that stopped."
            ) from error


class refuse_together:
    """`with refuse_together(function, group_name):` an error of this rank's arguments is raised on all ranks of the
    group, which wait in their handshake. A class, because a compiler can trace it."""

    def __init__(self, function: str, group_name: str) -> None:
        self.function, self.group_name = function, group_name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        refused = isinstance(error, ValueError | TypeError | Warning)  # a warning that the user turned into an error
        if self.group_name and refused and not torch.compiler.is_compiling():
            assert isinstance(error, Exception)
            Ranks(self.function, self.group_name).handshake({}, {}, error)


def _kind(error: Exception) -> str:
    return next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "ValueError")


@dataclass
class Transfer:
    """Messages in flight."""

    ranks: Ranks
    works: list[tuple[str, dist.Work]] = field(default_factory=list)

    def wait(self) -> None:
        """Until they have arrived; on an accelerator its stream waits. Each work is waited on once."""
        works, self.works = self.works, []
        for whom, work in reversed(works):  # the receive first: the next step needs it
            with self.ranks._named_errors(whom):
                work.wait()


def first_difference(values: Sequence[Any], alike: Callable[[Any, Any], bool] = operator.eq) -> str:
    """Which rank's value differs from rank 0's, in words; "" where all are alike."""
    others = (rank for rank, value in enumerate(values) if not alike(value, values[0]))
    return next((f"{values[0]!r} on rank 0 and {values[other]!r} on rank {other}" for other in others), "")


def feature_facts(features: Tensor) -> Facts:
    """What must be the same on all ranks of a group."""
    return {
        "the width of features": features.shape[1],
        "the dtype of features": str(features.dtype).removeprefix("torch."),
        "the kind of device": features.device.type,
    }
