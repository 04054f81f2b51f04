"""Is it exact? Values, statistics and every gradient against `megabatch.reference` in float64, on the same inputs.

The error may exceed that of the dense loss in the same dtype by the slack of `bench/tolerance.py` only.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megabatch
from megabatch import reference
from megabatch.bench.tolerance import slack, summed_in

from ..distributed.world import World
from .cases import SCALARS, Case, Share, of_ranks, together

RETRIEVAL = ("retrieval_ranks", "similarity_topk")
# Triton's interpreter cuts bfloat16 off where a GPU rounds: twice a rounding, always to one side, so errors add up.
TRUNCATION = 3
UPSTREAM = 3.0
REFUSED = "cannot run this call"  # the library's words
ALONE, ALL_ALIKE, TWICE = "one process", "same on all ranks", "same bits twice"

# By name: the loss, statistics, gradients.
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How a call is carried out: by which backend, on one process or with which exchange between ranks."""

    backend: str
    exchange: str = ""
    interpreted: bool = False

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

    def record(self) -> dict[str, Any]:
        known = asdict(self) | {"ok": self.ok}
        del known["value"]
        return {name: float(f"{x:.3g}") if isinstance(x, float) else x for name, x in known.items()}


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
        options = {"normalize": False, **case.options, **way.options, "group": None if alone else world.group}
        returned = getattr(megabatch, case.loss)(**inputs, **options)
        value, stats = returned if isinstance(returned, tuple) else (returned, {})
        torch.autograd.backward((_upstream(value, rank) * value).sum())
        gradients = {f"gradient of {name}": x.grad for name, x in inputs.items() if x.grad is not None}
        return {"loss": value.detach(), **{f"statistic {name}": x for name, x in stats.items()}, **gradients}

    for way in ways:
        allowed = _allowances(case, kind, truths, peers, TRUNCATION if way.interpreted else 1)
        about = (case.loss, case.title, dtype, str(way))
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

    def comparable(found: Results) -> Results:
        """Equal scores may come in any order: of indices, their scores, and that they are distinct."""
        if "indices" in found:
            indices = found.pop("indices").cpu()
            found["scores of the indices"] = (query.double()[:, None] * keys[indices]).sum(2)
            found["distinct indices"] = torch.tensor([float(row.unique().numel()) for row in indices])
        return found

    def results(way: Way) -> Results:
        options = {"group": None if alone else world.group, "tile": 64, **way.options}
        return comparable(_retrieve(megabatch, function, query.to(world.device), key.to(world.device), **options))

    truth = _retrieve(reference, function, query.double(), keys, positives=start + torch.arange(len(query)))
    truth = comparable(truth)
    for way in ways:
        about = (function, "whole numbers", dtype, str(way))
        if alone or world.in_step:
            yield from _compared(about, world, alone, partial(results, way), truth, dict.fromkeys(truth, 0.0))


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
        complaint = f"raised {type(raised).__name__}: {' '.join(str(raised).split())}"
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
        finite = math.isfinite(error)
        note = "" if finite else "is not finite"
        yield Comparison(*about, name, error if finite else None, allowed[name], note, rank, value)
    differing = [name for name, x in ours.items() if not torch.equal(x, again[name])]
    note = f"{', '.join(differing)}: another result in a second run" if differing else ""
    yield Comparison(*about, TWICE, None if differing else 0.0, note=note, rank=rank)


def leaves(tensors: Share, device: torch.device, dtype: torch.dtype | None = None) -> Share:
    """Copies on the device; those of features, scale and bias collect gradients."""
    copies = {}
    for name, x in tensors.items():
        copy = x.to(device, dtype if x.is_floating_point() else None, copy=True)
        copies[name] = copy.requires_grad_(x.is_floating_point() and name != "weight")
    return copies


def _upstream(value: Tensor, rank: int) -> Tensor:
    """What a caller makes of the loss: the same on all ranks, or with one loss per row something of its own."""
    if value.dim() == 0:
        return torch.full_like(value, UPSTREAM)
    return torch.linspace(-1, 2, len(value), dtype=value.dtype, device=value.device) + 0.4 * rank


def _expected(
    case: Case, shares: list[Share], scalars: Share, device: torch.device, dtype: torch.dtype | None
) -> list[Results]:
    """What every rank must get, from the dense loss of all rows together; `dtype` None: in that of the features."""
    copies, numbers = [leaves(share, device, dtype) for share in shares], leaves(scalars, device, dtype)
    options = {name: x for name, x in case.options.items() if name not in ("tile", "memory_budget")}
    given = {**together(copies), **numbers, "normalize": False, **options}
    returned = getattr(reference, case.loss)(**given, group=None)
    value, stats = returned if isinstance(returned, tuple) else (returned, {})
    ranks, sizes = len(shares), [len(next(iter(share.values()))) for share in shares]
    per_row = value.dim() == 1
    values = of_ranks(case.loss, value, sizes) if per_row else [value] * ranks
    total = torch.stack([(_upstream(own, rank) * own).sum() for rank, own in enumerate(values)]).sum()
    torch.autograd.backward(total if per_row else total / ranks)
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
    case: Case, dtype: torch.dtype, truths: list[Results], peers: list[Results], factor: int
) -> dict[str, float]:
    """What each result may be off by: the dense loss's own error on any rank, and the slack."""
    summed = case.options.get("reduction", "mean") != "mean"
    allowed = {}
    for name in truths[0]:
        pairs = [(peer[name].double().cpu(), truth[name].cpu()) for peer, truth in zip(peers, truths, strict=True)]
        dense, largest = (max(map(_largest, found)) for found in ([a - b for a, b in pairs], [b for _, b in pairs]))
        of_features = name.startswith("gradient of ") and name.removeprefix("gradient of ") not in SCALARS
        # dlogits are of size 1 / rows, and the scale comes on top.
        rows = sum(len(truth[name]) for truth in truths) if of_features and not summed else 1
        natural = case.scale * len(truths) / rows if of_features else 1.0
        kind = dtype if of_features else summed_in(dtype)
        times = factor if kind == torch.bfloat16 else 1
        allowed[name] = dense + times * UPSTREAM * slack(kind, largest / UPSTREAM, natural, case.scale)
    return allowed


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def merged(everyones: list[list[Comparison]]) -> list[Comparison]:
    """The ranks' comparisons as one list: each as it was on the rank where it was worst."""
    worst: dict[tuple[str, ...], Comparison] = {}
    values: dict[tuple[str, ...], set[float]] = {}
    for found in (one for comparisons in everyones for one in comparisons):
        key = (found.function, found.case, found.dtype, found.way, found.result)
        if key not in worst or found.share > worst[key].share:
            worst[key] = found
        if found.value is not None and not found.way.endswith(ALONE):
            values.setdefault(key, set()).add(found.value)
    alike = []
    for (function, case, dtype, way, _), seen in values.items() if len(everyones) > 1 else ():
        spread = max(seen) - min(seen)
        note = f"ranks got {' and '.join(map(repr, sorted(seen)))}" if spread else ""
        alike.append(Comparison(function, case, dtype, way, ALL_ALIKE, spread, note=note))
    return [*worst.values(), *alike]
