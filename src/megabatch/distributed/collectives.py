"""Ranks: the processes of one group; what all of them say at once, and what one hands to another.

Whatever goes wrong on the way says which function waited for whom, at which step, and what torch said of it.
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

# torch.distributed.nn is imported for the time of it alone. Its functions have the group of all ranks as a default, and
# torch imports it in the first call of an operator: had that group begun by then, its threads would outlive
# destroy_process_group, and could want the interpreter when it has ended.

PAGE = 2048  # bytes of the first message of a handshake; longer ones need a second
DIGITS = 16  # at its beginning: how long it is
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}

Facts = dict[str, Any]  # what JSON can carry

_handshakes: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # so far
_met_on: WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = WeakKeyDictionary()


class Ranks:
    """The ranks of a group, numbered within it. With no group: this process alone.

    Attributes:
        function: The public function that meets, for errors.
        turn: "forward" or "backward".
        place: Where in that turn we are, for errors.
        device: Of the tensors that travel, where it is known.
    """

    def __init__(
        self, function: str, group_name: str = "", turn: str = "forward", device: torch.device | None = None
    ) -> None:
        self.function, self.name, self.turn, self.device = function, group_name, turn, device
        self.place = f"the handshake before the {turn} turn"
        self.group: dist.ProcessGroup | None = None
        if group_name:
            self.group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined,arg-type]
        self.size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0

    # ---- all at once

    @property
    def handshakes(self) -> int:
        """How many there have been in this group: the same number on all ranks."""
        return 0 if self.group is None else _handshakes.get(self.group, 0)

    def agree(self, same: Facts, own: Facts, error: Exception | None = None) -> list[Facts]:
        """What every rank brings of its `own`, once it is sure that all bring the `same` and none has an `error`.

        Otherwise the same exception on every rank.
        """
        if self.group is None:
            if error is not None:
                raise error
            return [own]
        refusal = None if error is None else ("TypeError" if isinstance(error, TypeError) else "ValueError", str(error))
        _handshakes[self.group] = self.handshakes + 1
        here = f"{self.function}, {self.place}"
        said = [json.loads(text) for text in self._share(json.dumps([here, refusal, same, own]))]
        places, refusals, sames, owns = zip(*said, strict=True)
        if difference := first_difference(places):
            raise RuntimeError(
                f"megabatch: the ranks of a group must call the same functions in the same order, got {difference}."
            )
        self._raise_first(refusals, error)
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

    def _share(self, text: str) -> list[str]:
        """Every rank's text: one message where they are short."""
        mine = text.encode()
        first = b"%*d" % (DIGITS, len(mine)) + mine[: PAGE - DIGITS]
        pages = self._gather_bytes(first.ljust(PAGE))
        lengths = [int(page[:DIGITS]) for page in pages]
        longest = max(lengths)
        texts = [page[DIGITS:] for page in pages]
        if longest > PAGE - DIGITS:
            rests = self._gather_bytes(mine[PAGE - DIGITS :].ljust(longest))
            texts = [text + rest for text, rest in zip(texts, rests, strict=True)]
        return [text[:length].decode() for text, length in zip(texts, lengths, strict=True)]

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        everyones = self._gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [ctypes.string_at(each.data_ptr(), len(mine)) for each in everyones]  # without numpy, at once

    def total(self, partial: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks, added in rank order: the same bits on every rank."""
        if self.group is None:
            return partial
        self.place = f"the sum after {self.place}"
        return torch.stack(self._gather(partial)).sum(0)

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's: through the CPU, if the group has a way there."""
        devices = self._devices()
        there = mine.contiguous().to("cpu" if "cpu" in devices else self.device or devices[0])
        everyones = [torch.empty_like(there) for _ in range(self.size)]
        with self._telling("for the other ranks"):
            dist.all_gather(everyones, there, group=self.group)
        return [each.to(mine.device) for each in everyones]

    def _devices(self) -> list[str]:
        """The kinds of device that this group sends from."""
        ways = (way.split(":") for way in str(dist.get_backend_config(self.group)).split(","))
        return [device for device, backend in ways if device == "cpu" or backend != "gloo"]  # which knows the CPU alone

    def check_device(self) -> None:
        if self.group is not None and self.device is not None and self.device.type not in self._devices():
            raise ValueError(
                f"{self.function}: features must be on a device that the group's backend sends from "
                f"({' or '.join(self._devices())}), got {self.device.type}. Pass a group for that device."
            )

    def begin(self) -> None:
        """Before the first transfer: torch wants all ranks of a group in the first message on an accelerator."""
        if self.group is None or self.device is None or self.device.type == "cpu":
            return
        met_on = _met_on.setdefault(self.group, set())
        if self.device not in met_on:
            met_on.add(self.device)
            with self._telling("for the other ranks"):
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    # ---- from one to another

    def transfer(self, to: int, sent: Tensor, source: int, received: Tensor, tag: int) -> "Transfer":
        """Begin to send to one rank and to receive from another: one kind of message, the `tag`. Nothing of size 0
        travels."""
        messages = [("to take", to, dist.isend, sent), ("to send", source, dist.irecv, received)]
        messages = [message for message in messages if message[-1].numel()]
        waits = [f"for rank {peer} {verb} a block" for verb, peer, _, _ in messages]
        if not messages:
            return Transfer(self)
        assert self.group is not None
        operations = [
            dist.P2POp(begin, tensor, group=self.group, tag=tag, group_peer=peer) for _, peer, begin, tensor in messages
        ]
        with self._telling(waits[-1]):
            works = dist.batch_isend_irecv(operations)
        if len(works) < len(waits):  # one for both, on some backends
            waits = [" or ".join(waits)]
        return Transfer(self, list(zip(waits, works, strict=True)))

    @contextmanager
    def _telling(self, whom: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise RuntimeError(
                f"{self.function}: rank {self.rank} of the group's {self.size} waited {whom}, at {self.place}, and "
                f"torch said: {said}. A rank has ended, does not answer or does not make this call; look for the first "
                "one that stopped."
            ) from error


class refused_together:
    """`with refused_together(function, group_name):` bad arguments met inside, on this rank, are raised on all ranks
    of the group, which wait in their handshake. A class, which a compiler can trace."""

    def __init__(self, function: str, group_name: str) -> None:
        self.function, self.group_name = function, group_name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self.group_name and isinstance(error, ValueError | TypeError) and not torch.compiler.is_compiling():
            Ranks(self.function, self.group_name).agree({}, {}, error)


@dataclass
class Transfer:
    """Messages on their way."""

    ranks: Ranks
    works: list[tuple[str, dist.Work]] = field(default_factory=list)

    def wait(self) -> None:
        """Until they have arrived; on an accelerator, have its stream wait. Nothing is waited for twice."""
        works, self.works = self.works, []
        for whom, work in reversed(works):  # what is to come first: it is what the next step needs
            with self.ranks._telling(whom):
                work.wait()


def first_difference(values: Sequence[Any], alike: Callable[[Any, Any], bool] = operator.eq) -> str:
    """Which rank's value is not that of rank 0, in words; "" where all are alike."""
    others = (rank for rank, value in enumerate(values) if not alike(value, values[0]))
    return next((f"{values[0]!r} on rank 0 and {values[other]!r} on rank {other}" for other in others), "")


def kind_of(features: Tensor) -> Facts:
    """What must be the same on all ranks of any features that meet."""
    return {
        "the width of features": features.shape[1],
        "the dtype of features": str(features.dtype).removeprefix("torch."),
        "the kind of device": features.device.type,
    }
