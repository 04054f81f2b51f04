"""What is checked: calls of the losses and of retrieval, their batches, and what each must give.

A batch is made for a number of ranks; one process is one rank. The numbers are the same every time, on every rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import reference
from megabatch.tolerance import summed_in

# Every function that is checked, and what it must be given.
ARGUMENTS = {
    "clip_loss": ("image_features", "text_features", "logit_scale"),
    "siglip_loss": ("image_features", "text_features", "logit_scale", "logit_bias"),
    "info_nce_loss": ("query", "key", "logit_scale"),
    "nt_xent_loss": ("view1", "view2", "logit_scale"),
    "supcon_loss": ("features", "labels", "logit_scale"),
    "retrieval_ranks": ("query", "key"),
    "similarity_topk": ("query", "key"),
}
FUNCTIONS = tuple(ARGUMENTS)
LOSSES, RETRIEVAL = FUNCTIONS[:5], FUNCTIONS[5:]
SCALARS = ("logit_scale", "logit_bias")
GRADIENT = "gradient of "
UPSTREAM = 3.0  # what the caller multiplies a loss by
EXTRA_KEYS = 3

# What one rank brings, by the name of the argument. `upstream` is what the caller multiplies losses per row by.
Share = dict[str, Tensor]
# The loss, statistics and gradients, or what retrieval returns, by name.
Results = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """One call.

    Attributes:
        rows: Of the whole batch, about: ranks get different numbers of them.
        given: Arguments beside those of ARGUMENTS.
        fitted: Positives coincide and the scale is 100.
        absent: On several ranks, the last brings no rows.
    """

    function: str
    title: str
    rows: int
    width: int
    given: tuple[str, ...]
    options: dict[str, Any]
    fitted: bool = False
    absent: bool = False

    @property
    def scale(self) -> float:
        return 100.0 if self.fitted else 7.0

    def shares(self, ranks: int, dtype: torch.dtype) -> list[Share]:
        random = torch.Generator().manual_seed(self.rows * 31 + self.width)
        sizes = [self.rows] if ranks == 1 else [max(self.rows // ranks + 5 * r % 7 - 3, 2) for r in range(ranks)]
        if self.absent and ranks > 1:
            sizes[-1] = 0
        return [self._share(random, rows, rank, sum(sizes), dtype) for rank, rows in enumerate(sizes)]

    def _share(self, random: torch.Generator, rows: int, rank: int, total: int, dtype: torch.dtype) -> Share:
        keys, negatives = rows + EXTRA_KEYS if rows else 0, 5 + 2 * rank
        lengths = {"key": keys, "key_ids": keys, "negatives": negatives, "negative_ids": negatives}

        def integers(count: int, high: int) -> Tensor:
            return torch.randint(high, (count,), generator=random)

        def made(name: str) -> Tensor:
            count = lengths.get(name, rows)
            if name in SCALARS:
                return torch.tensor(self.scale if name == "logit_scale" else [-2.0], dtype=summed_in(dtype))
            if name == "weight":
                return torch.rand(count, generator=random).masked_fill_(torch.arange(count) % 5 == 2, 0)
            if name == "positives":
                return integers(count, max(keys, 1))
            if name == "labels" or name.endswith("ids"):
                return integers(count, max(total // 3, 2))
            if self.function in RETRIEVAL:
                return self._digits(name, count, rank, random).to(dtype)
            return F.normalize(torch.randn(count, self.width, generator=random), dim=1)

        share = {name: made(name) for name in (*ARGUMENTS[self.function], *self.given)}
        if self.fitted:
            share |= self._coincide(share, rows, rank)
        length = 1.3 if self.options.get("normalize") else 1.0
        share = {name: (length * x).to(dtype) if x.dim() == 2 else x for name, x in share.items()}
        return share | {"upstream": torch.linspace(-1, 2, rows) + 0.4 * rank}

    def _digits(self, name: str, count: int, rank: int, random: torch.Generator) -> Tensor:
        """Keys are the digits of numbers in base 32 and queries weigh digits, so that scores are exact in every dtype
        and no two are the same. For ranks every key comes twice: those must tie."""
        if name == "query":
            signs = 2 * torch.randint(2, (count, 1), generator=random) - 1
            return signs * 32 ** torch.rand(count, self.width, generator=random).argsort(1)
        numbers = 512 * rank + torch.randperm(512, generator=random)[:count]
        if self.function == "retrieval_ranks":
            numbers //= 2
        return numbers[:, None] // 32 ** torch.arange(self.width) % 32

    def _coincide(self, share: Share, rows: int, rank: int) -> Share:
        """Positives that are equal; the logits of all other pairs lie about 18 below theirs, at scale 100."""
        names = [name for name, x in share.items() if x.dim() == 2]
        common = math.sqrt((1 / 0.18 - 1) / self.width)
        alike = F.normalize(share[names[0]] + common, dim=1)
        if self.function == "supcon_loss":
            pairs = torch.arange(rows) // 2
            return {"features": alike[pairs], "labels": pairs + 1000 * rank}
        return {name: torch.cat([alike, share[name][rows:]]) for name in names}

    def inputs(self, share: Share, device: torch.device, dtype: torch.dtype | None = None) -> Share:
        """Copies on the device; features, scale and bias require grad."""
        copies = {}
        for name, x in share.items():
            copy = x.to(device, dtype if x.is_floating_point() else None, copy=True)
            learned = x.is_floating_point() and name not in ("weight", "upstream")
            copies[name] = copy.requires_grad_(learned and self.function in LOSSES)
        return copies

    def call(self, library: Any, inputs: Share, **options: Any) -> Results:
        """All results of one call of megabatch, or of its reference."""
        arguments = {name: x for name, x in inputs.items() if name != "upstream"}
        returned = getattr(library, self.function)(**arguments, **self.options, **options)
        if self.function == "retrieval_ranks":
            return {"ranks": returned}
        if self.function == "similarity_topk":
            return dict(zip(("values", "indices"), returned, strict=True))
        value, stats = returned if isinstance(returned, tuple) else (returned, {})
        upstream = inputs["upstream"]
        if self.function == "nt_xent_loss":  # a loss for each view of a row
            upstream = torch.cat([upstream, upstream])
        total = (upstream * value).sum() if value.dim() else UPSTREAM * value
        wanted = {name: x for name, x in inputs.items() if x.requires_grad}
        gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        named = {f"{GRADIENT}{name}": x for name, x in zip(wanted, gradients, strict=True) if x is not None}
        return {"loss": value.detach(), **{f"statistic {name}": x for name, x in stats.items()}, **named}

    def expected(self, shares: list[Share], device: torch.device, dtype: torch.dtype | None = None) -> list[Results]:
        """What every rank must get: from the dense function of all rows together; `dtype` None: in their own."""
        whole = self.call(reference, self.inputs(self._together(shares), device, dtype), group=None)
        ranks, per_row = len(shares), self.options.get("reduction") == "none"
        # grad_reduction "mean": trainers divide gradients by the number of ranks. It says nothing of losses per row.
        of_features, of_scalars = (1.0, 1 / ranks) if per_row else (float(ranks), 1.0)
        expected: list[Results] = [{} for _ in shares]
        for name, x in whole.items():
            argument = name.removeprefix(GRADIENT)
            if argument != name:
                x = x * (of_scalars if argument in SCALARS else of_features)
            for results, part in zip(expected, self._split(argument, x, shares), strict=True):
                results[name] = part
        return expected

    def _together(self, shares: list[Share]) -> Share:
        """The batch of all ranks: rows in rank order, positives as rows of all keys."""
        batch = {name: torch.cat([share[name] for share in shares]) for name in shares[0] if name not in SCALARS}
        batch |= {name: x for name, x in shares[0].items() if name in SCALARS}
        if "key" in batch and self.function != "similarity_topk":
            offsets = [sum(len(share["key"]) for share in shares[:rank]) for rank in range(len(shares))]
            positives = [share.get("positives", torch.arange(len(share["query"]))) for share in shares]
            batch["positives"] = torch.cat([rows + offset for rows, offset in zip(positives, offsets, strict=True)])
        return batch

    def _split(self, argument: str, x: Tensor, shares: list[Share]) -> list[Tensor]:
        """A result of the whole batch as each rank gets it: its rows, or the same as all."""
        if x.dim() == 0 or argument in SCALARS:
            return [x] * len(shares)
        sizes = [len(share.get(argument, share["upstream"])) for share in shares]
        if len(x) == 2 * sum(sizes):
            views = (torch.split(view, sizes) for view in x.chunk(2))
            return [torch.cat(parts) for parts in zip(*views, strict=True)]
        return list(torch.split(x, sizes))


def cases(function: str, quick: bool) -> list[Case]:
    """Calls whose options reach every branch of a kernel: odd sizes, several tiles, and tiles of several blocks."""
    rows, width, tile = (37, 24, {"tile": 16}) if quick else (293, 72, {"tile": 160})
    if function in RETRIEVAL:
        k = {"k": 5} if function == "similarity_topk" else {}
        return [Case(function, "exact scores", rows, 4, (), tile | k)]
    ids = {"info_nce_loss": ("query_ids", "key_ids"), "supcon_loss": ()}.get(function, ("ids",))  # labels are ids
    columns = ("positives", "negatives", "negative_ids") if function == "info_nce_loss" else ()
    bias = ("logit_bias",) if function == "clip_loss" else ()
    mask, positive = ({"same_ids": word} if ids else {} for word in ("mask", "positive"))
    smoothing = {} if function == "siglip_loss" else {"label_smoothing": 0.1}
    stats, as_given, small = {"return_stats": True}, {"normalize": False}, {"memory_budget": 8 * rows * width}
    weighted, all_ids = ("weight", *ids, *columns[:2]), (*ids, *columns)
    smoothed = as_given | tile | smoothing | mask | stats
    per_row = tile | positive | {"reduction": "none", "normalize": True}
    summed = as_given | smoothing | {"reduction": "sum"}
    return [
        Case(function, "plain", rows, width, bias, tile | stats),
        Case(function, "ids masked, smoothing, weights", rows - 2, width + 9, weighted, smoothed),
        Case(function, "ids positive, per row, normalised", rows - 4, width + 1, all_ids, per_row, absent=True),
        Case(function, "fitted, scale 100, small budget", rows + 2, width, (), as_given | small, fitted=True),
        Case(function, "three rows, summed", 3, 5, (), summed, absent=True),
    ]
