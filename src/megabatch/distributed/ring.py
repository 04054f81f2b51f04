"""A ring of ranks that pass tensors round, so that every rank sees every other's without holding them all."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class Ring:
    """The ranks of one process group, in rank order. With no group: this process alone, a ring of length one."""

    def __init__(self, group_name: str = "") -> None:
        self.group: dist.ProcessGroup | None = None
        if group_name:
            self.group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined,arg-type]
        self.size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0

    def agree(self, function: str, **header: int) -> None:
        """Make sure that all ranks bring the same numbers, before tensors move whose sizes follow from them."""
        if self.group is None:
            return
        mine = torch.tensor(list(header.values()), dtype=torch.int64)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyones, mine, group=self.group)
        for name, *values in zip(header, *(numbers.tolist() for numbers in everyones), strict=True):
            if len(set(values)) > 1:
                raise ValueError(f"{function}: every rank of the group must bring the same {name}, got {values}.")

    def turn(self, read: list[Tensor], summed: list[Tensor]) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
        """Yield (owner, its read, its summed) of every rank, the own first. What is added to `summed` comes home.

        All ranks bring tensors of the same shapes and dtypes.
        """
        reading, summing = read, summed
        for step in range(self.size):
            yield (self.rank - step) % self.size, reading, summing
            if self.size > 1:
                if step + 1 < self.size:
                    reading = self._pass_on(reading)
                summing = self._pass_on(summing)
        for home, tensor in zip(summed, summing, strict=True):
            if home is not tensor:
                home.copy_(tensor)

    def _pass_on(self, tensors: list[Tensor]) -> list[Tensor]:
        assert self.group is not None
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        preceding = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        sends = [dist.P2POp(dist.isend, tensor.contiguous(), following, self.group) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, preceding, self.group) for tensor in received]
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
        return received

    def total(self, partial: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks, added in rank order: the same bits on every rank."""
        if self.group is None:
            return partial
        parts = [torch.empty_like(partial) for _ in range(self.size)]
        dist.all_gather(parts, partial.contiguous(), group=self.group)
        return torch.stack(parts).sum(0)
