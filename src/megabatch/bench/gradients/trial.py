"""What a loss goes through: one step on ranks with equal rows, one with uneven rows, each held against one process."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import reference

from ..cases import Case
from ..instruments import processes
from ..instruments.ranks import Crew, Member
from ..loss.contenders import NotInstalled
from .contenders import PEERS, CannotRun, Part

# Figures this near to what they should be are equal to it: they are float32.
NEAR = 1e-3
# For a process to start and to load a package.
START_SECONDS = 60
WORKS = "works"


@dataclass(frozen=True)
class Setting:
    """How many ranks, how many rows each, how wide, and the seconds after which a silent rank is given up."""

    ranks: int
    rows: int
    width: int
    timeout: float

    @property
    def equal(self) -> list[int]:
        return [self.rows] * self.ranks

    @property
    def uneven(self) -> list[int]:
        """Every other rank has about a third less."""
        return [self.rows - (rank % 2) * max(self.rows * 3 // 8, 1) for rank in range(self.ranks)]

    def crew(self) -> Crew:
        return Crew(self.ranks, patience=self.timeout, deadline=self.timeout + START_SECONDS, quiet=True)


class Step(NamedTuple):
    """The loss on one process and its gradients; None for what got none. Or, instead, what went wrong."""

    loss: float = math.nan
    encoder: Tensor | None = None
    scale: float | None = None
    bias: float | None = None
    error: str = ""


class Ratios(NamedTuple):
    """What a trainer makes of the ranks' gradients, over one process's."""

    encoder: float
    cosine: float
    scale: float | None
    bias: float | None

    @property
    def right(self) -> bool:
        return all(value is None or abs(value - 1) <= NEAR for value in self)


@dataclass
class Row:
    """What is known of one loss. `status` is ok, or why there is nothing to know."""

    title: str
    package: str
    loss: str
    trainer: str
    ours: bool
    status: str = "ok"
    encoder: float | None = None
    cosine: float | None = None
    scale: float | None = None
    bias: float | None = None
    value: str = ""
    uneven: str = ""

    @property
    def wrong(self) -> bool:
        """Only ours can be: others do what they say, whatever that is."""
        ratios = (self.encoder, self.cosine, self.scale)
        right = all(value is not None and abs(value - 1) <= NEAR for value in ratios)
        right &= self.bias is None or abs(self.bias - 1) <= NEAR
        return self.ours and not (self.status == "ok" and right and self.value == "global" and self.uneven == WORKS)


def contest(setting: Setting, peers: list[int]) -> list[Row]:
    """A row for each of these of PEERS, all of one package: with equal rows in one set of ranks, uneven in one each."""
    rows = [Row(PEERS[i].title, PEERS[i].package, PEERS[i].loss, PEERS[i].trainer, PEERS[i].ours) for i in peers]
    if not peers:
        return rows
    try:
        ranks = setting.crew().run(steps, peers, setting.equal, setting.width)
    except processes.Failed as failure:
        for row in rows:
            row.status = str(failure)
        return rows
    for i, row, found in zip(peers, rows, zip(*ranks, strict=True), strict=True):
        row.status = next((step.error for step in found if step.error), "ok")
        if row.status == "ok":
            truth = one_process(PEERS[i].loss, setting.equal, setting.width)
            row.encoder, row.cosine, row.scale, row.bias = ratios(PEERS[i].trainer, list(found), truth)
            row.value = value_of([step.loss for step in found], truth.loss)
            row.uneven = _uneven(setting, i)
    return rows


def _uneven(setting: Setting, peer: int) -> str:
    """In short: whether uneven rows work."""
    try:
        found = setting.crew().run(step, peer, setting.uneven, setting.width)
    except processes.Failed as failure:
        return str(failure)
    truth = one_process(PEERS[peer].loss, setting.uneven, setting.width)
    got = ratios(PEERS[peer].trainer, found, truth)
    if got.right:
        return WORKS
    return f"runs; encoder {got.encoder:.3f}, cosine {got.cosine:.3f}"


def steps(member: Member, peers: list[int], sizes: list[int], width: int) -> list[Step]:
    """One step of each on this rank."""
    return [_attempt(member, i, sizes, width) for i in peers]


def _attempt(member: Member, peer: int, sizes: list[int], width: int) -> Step:
    try:
        return step(member, peer, sizes, width)
    except Exception as error:  # the next may do better
        return Step(error=str(processes.failure_of(error)))


def step(member: Member, index: int, sizes: list[int], width: int) -> Step:
    """One step of one of PEERS on this rank."""
    peer = PEERS[index]
    try:
        loss = peer.make(member)
    except NotInstalled:
        return Step(error="not installed")
    except CannotRun as reason:
        return Step(error=str(reason))
    encoder, part = _part(peer.loss, sizes, width, member.rank)
    value = loss(part)
    torch.autograd.backward(value)
    return _step(value, encoder, part)


def one_process(loss: str, sizes: list[int], width: int) -> Step:
    """The dense loss of all rows, in float64."""
    encoder, part = _part(loss, [sum(sizes)], width, 0, torch.float64)
    value = getattr(reference, f"{loss}_loss")(*part.arguments, normalize=False, group=None)
    torch.autograd.backward(value)
    return _step(value, encoder, part)


def _part(
    loss: str, sizes: list[int], width: int, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Part]:
    """The encoder, a matrix, and what a rank that holds so many rows gets out of it. The same numbers everywhere."""
    inputs = Case(loss, sum(sizes), width).inputs().to(dtype)
    encoder = torch.randn(width, width, generator=torch.Generator().manual_seed(width)).to(dtype).requires_grad_()
    start = [0, *accumulate(sizes)][rank]
    mine = slice(start, start + sizes[rank])
    features = tuple(F.normalize(x.detach()[mine] @ encoder, dim=1) for x in inputs.features)
    labels = None if inputs.labels is None else inputs.labels[mine]
    return encoder, Part(features, labels, inputs.scale, inputs.bias, start)


def _step(value: Tensor, encoder: Tensor, part: Part) -> Step:
    def number(x: Tensor | None) -> float | None:
        return None if x is None or x.grad is None else x.grad.item()

    gradient = None if encoder.grad is None else encoder.grad.double()
    return Step(value.detach().item(), gradient, number(part.scale), number(part.bias))


def ratios(trainer: str, found: list[Step], truth: Step) -> Ratios:
    """Of gradients that a trainer has averaged or summed over the ranks, to those of one process."""
    over = len(found) if trainer == "mean" else 1

    def combined(name: str) -> float | None:
        values, exact = [getattr(step, name) for step in found], getattr(truth, name)
        if exact is None or any(value is None for value in values):
            return None
        ratio: float = sum(values) / over / exact
        return ratio

    assert truth.encoder is not None
    gradients = [torch.zeros_like(truth.encoder) if step.encoder is None else step.encoder for step in found]
    encoder = torch.stack(gradients).sum(0) / over
    length = (encoder.norm() / truth.encoder.norm()).item()
    cosine = F.cosine_similarity(encoder.flatten(), truth.encoder.flatten(), dim=0).item()
    return Ratios(length, cosine, combined("scale"), combined("bias"))


def value_of(losses: list[float], whole: float) -> str:
    """What the ranks' losses are, seen from the loss of the whole batch."""

    def near(a: float, b: float) -> bool:
        return abs(a - b) <= NEAR * abs(b)

    mean, size = sum(losses) / len(losses), len(losses)
    kind = "global" if all(near(loss, losses[0]) for loss in losses) else "local rows"
    if near(mean, whole):
        return kind
    return f"{kind} × {size}" if near(mean, size * whole) else f"{kind} × {mean / whole:.2f}"
