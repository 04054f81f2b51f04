"""Is it exact? Values, statistics and every gradient against `megabatch.reference` in float64, on the same inputs.

The error may exceed that of the dense loss in the same dtype by a small slack only: a few roundings of the natural size
of a result.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megabatch
from megabatch import reference

from ..distributed.world import World
from .cases import SCALARS, Case, Share, of_ranks, together

RETRIEVAL = ("retrieval_ranks", "similarity_topk")
# Roundings: a few of what is computed, and some of what passes through half precision. In float64 the dense loss is the
# truth, or nearly, and its own error nothing.
SLACK = {torch.float64: 4e-15, torch.float32: 4e-7, torch.bfloat16: 1e-2, torch.float16: 1e-3}
# Cutting off is twice a rounding, and always to one side: errors add up.
TRUNCATION = 3
UPSTREAM = 3.0
# What select() says when it refuses a backend.
REFUSED = "cannot run this call"
ALONE = "one process"
ALL_ALIKE = "same on all ranks"
TWICE = "same bits twice"

# By name: the loss, statistics, gradients.
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How a call is carried out: by which backend, on one process or with which exchange between ranks.

    `truncates`: bfloat16 is cut off where a GPU rounds, as Triton's interpreter does.
    """

    backend: str
    exchange: str = ""
    truncates: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": self.backend, **({"exchange": self.exchange} if self.exchange else {})}

    def __str__(self) -> str:
        return f"{self.backend}, {self.exchange or ALONE}"


@dataclass
class Comparison:
    """One number that was held against another. `error` is None where there was none to be had; `note` says why."""

    function: str
    case: str
    dtype: str
    way: str
    result: str
    error: float | None
    allowed: float = 0.0
    note: str = ""
    rank: int = 0
    value: float | None = None

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.allowed < math.inf

    @property
    def share(self) -> float:
        """The error as a share of what is allowed."""
        if self.error is None or not math.isfinite(self.allowed):
            return math.inf
        return self.error / self.allowed if self.allowed else (0.0 if self.error == 0 else math.inf)

    def __str__(self) -> str:
        found = self.note or f"off by {self.error:.2e}, allowed {self.allowed:.2e}"
        return f"{self.function} ({self.case}, {self.dtype}, {self.way}, rank {self.rank}) {self.result}: {found}"


def refusal(function: str, backend: str, dtype: str, device: torch.device) -> str:
    """The library's own words why a backend cannot run here; "" where it can."""
    x = torch.eye(3, device=device).to(getattr(torch, dtype))
    try:
        if function in RETRIEVAL:
            _retrieve(megabatch, function, x, x, backend=backend, group=None)
        else:
            megabatch.clip_loss(
                image_features=x, text_features=x, logit_scale=2.0, normalize=False, backend=backend, group=None
            )
    except ValueError as error:
        return str(error) if REFUSED in str(error) else ""
    except Exception:
        return ""  # whatever it is, the checks will meet it and report it
    return ""


def compare_loss(case: Case, dtype: str, ways: list[Way], world: World, alone: bool) -> Iterator[Comparison]:
    """The case in every way. `alone`: this process holds the whole batch, whatever ranks there are."""
    rank, ranks = (0, 1) if alone else (world.rank, world.size)
    kind: torch.dtype = getattr(torch, dtype)
    shares, scalars = case.shares(ranks, kind), case.scalars(kind)
    truths = _expected(case, shares, scalars, torch.device("cpu"), torch.float64)
    peers = _expected(case, shares, scalars, world.device, None)

    def step(way: Way) -> Results:
        inputs = leaves(shares[rank] | scalars, world.device)
        group = None if alone else world.group
        return _step(getattr(megabatch, case.loss), inputs, rank, case.options | way.options | {"group": group})

    for way in ways:
        about = (case.loss, case.title, dtype, str(way))
        slack = SLACK[kind] * (TRUNCATION if way.truncates and kind == torch.bfloat16 else 1)
        allowed = _allowances(case, kind, truths, peers, slack)
        if alone or world.in_step:
            yield from _compared(about, world, alone, partial(step, way), truths[rank], allowed)


def compare_retrieval(function: str, dtype: str, ways: list[Way], world: World, alone: bool) -> Iterator[Comparison]:
    """On whole numbers, whose scores are exact in every dtype, with many ties: nothing may be off at all."""
    rank, ranks = (0, 1) if alone else (world.rank, world.size)
    random = torch.Generator().manual_seed(7)

    def whole_numbers(count: int) -> Tensor:
        return torch.randint(-2, 3, (count, 21), generator=random).to(getattr(torch, dtype))

    brought = [(whole_numbers(65 + 4 * r), whole_numbers(130 + 9 * r)) for r in range(ranks)]
    keys = torch.cat([key for _, key in brought]).double()
    query, key = brought[rank]
    start = sum(len(theirs) for _, theirs in brought[:rank])
    truth = _retrieve(reference, function, query.double(), keys, positives=start + torch.arange(len(query)))

    def results(way: Way) -> Results:
        here = (query.to(world.device), key.to(world.device))
        options = {"group": None if alone else world.group, "tile": 64, **way.options}
        found = _retrieve(megabatch, function, *here, **options)
        if "indices" in found:  # equal scores may come in any order
            indices = found.pop("indices").cpu()
            found["scores of the indices"] = (query.double()[:, None] * keys[indices]).sum(2)
            found["distinct indices"] = torch.stack([row.unique().numel() * torch.ones(()) for row in indices])
        return found

    if "indices" in truth:
        indices = truth.pop("indices")
        truth["scores of the indices"] = truth["values"]
        truth["distinct indices"] = torch.full((len(query),), float(indices.shape[1]))
    exact = dict.fromkeys(truth, 0.0)
    for way in ways:
        about = (function, "whole numbers", dtype, str(way))
        if alone or world.in_step:
            yield from _compared(about, world, alone, partial(results, way), truth, exact)


def _retrieve(library: Any, function: str, query: Tensor, key: Tensor, **options: Any) -> Results:
    if function == "retrieval_ranks":
        return {"ranks": library.retrieval_ranks(query, key, **options)}
    options.pop("positives", None)
    values, indices = library.similarity_topk(query, key, min(5, len(key)), **options)
    return {"values": values, "indices": indices}


def _compared(
    about: tuple[str, str, str, str],
    world: World,
    alone: bool,
    run: Callable[[], Results],
    truth: Results,
    allowed: dict[str, float],
) -> Iterator[Comparison]:
    """Every result of two runs: the first against the truth, the second against the first."""
    rank, ours, again, complaint = world.rank, {}, {}, ""
    try:
        ours, again = run(), run()
    except Exception as raised:
        text = " ".join(str(raised).split())
        complaint = f"raised {type(raised).__name__}: {text}"
    if not alone:
        complaints = world.gather(complaint)
        if any(said != complaint for said in complaints):
            world.in_step = False
            # Whoever waited in vain knows least of the cause.
            told = [f"rank {r} {said}" for r, said in enumerate(complaints) if said]
            complaint = "; ".join(sorted(told, key=lambda said: " waited for " in said))
    if complaint:
        yield Comparison(*about, "the call", None, note=complaint, rank=rank)
        return
    for name, exact in truth.items():
        if name not in ours or ours[name].shape != exact.shape:
            got = f"shape {tuple(ours[name].shape)}" if name in ours else "nothing"
            note = f"got {got} instead of shape {tuple(exact.shape)}"
            yield Comparison(*about, name, None, note=note, rank=rank)
            continue
        error = _largest(ours[name].double().cpu() - exact.cpu())
        value = ours[name].item() if name == "loss" and exact.dim() == 0 else None
        note = "" if math.isfinite(error) else "is not finite"
        found = error if math.isfinite(error) else None
        yield Comparison(*about, name, found, allowed[name], note, rank, value)
    differing = [name for name, x in ours.items() if not torch.equal(x, again[name])]
    note = f"{', '.join(differing)}: another result in a second run" if differing else ""
    yield Comparison(*about, TWICE, None if differing else 0.0, note=note, rank=rank)


# A step with ours, and what it must give.


def leaves(tensors: Share, device: torch.device, dtype: torch.dtype | None = None) -> Share:
    """Copies on the device; those of features, scale and bias collect gradients."""
    copies = {}
    for name, x in tensors.items():
        copy = x.to(device, dtype if x.is_floating_point() else None, copy=True)
        copies[name] = copy.requires_grad_(x.is_floating_point() and name != "weight")
    return copies


def _step(function: Callable[..., Any], inputs: Share, rank: int, options: dict[str, Any]) -> Results:
    returned = function(**inputs, **{"normalize": False, **options})
    value, stats = returned if isinstance(returned, tuple) else (returned, {})
    torch.autograd.backward((_upstream(value, rank) * value).sum())
    gradients = {f"gradient of {name}": x.grad for name, x in inputs.items() if x.grad is not None}
    return {"loss": value.detach(), **{f"statistic {name}": x for name, x in stats.items()}, **gradients}


def _upstream(value: Tensor, rank: int) -> Tensor:
    """What a caller makes of the loss: the same on all ranks, or with one loss per row something of its own."""
    if value.dim() == 0:
        return torch.full_like(value, UPSTREAM)
    return torch.linspace(-1, 2, len(value), dtype=value.dtype, device=value.device) + 0.4 * rank


def _expected(
    case: Case, shares: list[Share], scalars: Share, device: torch.device, dtype: torch.dtype | None
) -> list[Results]:
    """What every rank must get, from the dense loss of all rows together; `dtype` None: in that of the features."""
    copies = [leaves(share, device, dtype) for share in shares]
    numbers = leaves(scalars, device, dtype)
    options = {name: x for name, x in case.options.items() if name not in ("tile", "memory_budget")}
    returned = getattr(reference, case.loss)(
        **together(copies), **numbers, **{"normalize": False, **options}, group=None
    )
    value, stats = returned if isinstance(returned, tuple) else (returned, {})
    ranks, sizes = len(shares), [len(next(iter(share.values()))) for share in shares]
    per_row = value.dim() == 1
    values = of_ranks(case.loss, value, sizes) if per_row else [value] * ranks
    if per_row:
        total = torch.stack([(_upstream(own, rank) * own).sum() for rank, own in enumerate(values)]).sum()
    else:
        total = _upstream(value, 0) * value
    torch.autograd.backward(total)
    # grad_reduction "mean": trainers divide gradients by the number of ranks. Per-row losses are the caller's affair.
    of_features, of_scalars = (1.0, 1 / ranks) if per_row else (float(ranks), 1.0)
    expected = []
    for own, share in zip(values, copies, strict=True):
        results = {"loss": own.detach(), **{f"statistic {name}": x for name, x in stats.items()}}
        results |= {f"gradient of {name}": of_features * _grad(x) for name, x in share.items() if x.requires_grad}
        results |= {f"gradient of {name}": of_scalars * _grad(x) for name, x in numbers.items()}
        expected.append(results)
    return expected


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _allowances(
    case: Case, dtype: torch.dtype, truths: list[Results], peers: list[Results], slack: float
) -> dict[str, float]:
    """What each result may be off by: the dense loss's own error on any rank, and the slack, of gradients `slack`."""
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    single = SLACK[computed]
    batch = sum(len(x) for x in (truth[next(n for n in truth if _of_features(n))] for truth in truths))
    summed = case.options.get("reduction", "mean") != "mean"
    # A logit is off by roundings of its size, and every probability by that share.
    conditioning = 2 * torch.finfo(computed).eps * case.scale
    allowed = {}
    for name in truths[0]:
        pairs = [(peer[name].double().cpu(), truth[name].cpu()) for peer, truth in zip(peers, truths, strict=True)]
        dense = max(_largest(peer - truth) for peer, truth in pairs)
        largest = max(_largest(truth) for _, truth in pairs)
        if _of_features(name):  # dlogits are of size 1 / rows, and the scale comes on top
            natural, rounding = case.scale * len(truths) / (1 if summed else batch), max(slack, 5 * single)
        else:
            natural, rounding = 1.0, 5 * single
        allowed[name] = dense + single * natural + (rounding + conditioning) * largest
    return allowed


def _of_features(name: str) -> bool:
    return name.startswith("gradient of ") and name.removeprefix("gradient of ") not in SCALARS


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def merged(everyones: list[list[Comparison]]) -> list[Comparison]:
    """The ranks' comparisons as one list: each as it was on the rank where it was worst."""
    worst: dict[tuple[str, str, str, str, str], Comparison] = {}
    values: dict[tuple[str, str, str, str, str], set[float]] = {}
    for comparisons in everyones:
        for found in comparisons:
            key = (found.function, found.case, found.dtype, found.way, found.result)
            if key not in worst or found.share > worst[key].share:
                worst[key] = found
            if found.value is not None and not found.way.endswith(ALONE):
                values.setdefault(key, set()).add(found.value)
    alike = []
    if len(everyones) > 1:
        for about, seen in values.items():
            spread = max(seen) - min(seen)
            note = f"ranks got {' and '.join(map(repr, sorted(seen)))}" if spread else ""
            alike.append(Comparison(*about[:4], ALL_ALIKE, spread, note=note))
    return [*worst.values(), *alike]
