"""Who is measured: megabatch, what people write by hand, other packages, and bare matrix products.

A contender makes a step out of its work (`LossWork` here; the benchmarks of encoders and training steps have works of
their own). Everything here is known by module and name, so that it can be sent to another process.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megabatch

from . import formulas
from .cases import LOSSES, LossWork, Step

WHOLE = 2**30  # more rows than any batch has, so that a tile is as large as it gets
ROOM = 256 * 2**20  # bytes, beside kept logits


class NotInstalled(Exception):
    """The contender is a package that is not here."""


class CannotRun(Exception):
    """The package is here, but this machine lacks something; the text says what."""


@dataclass(frozen=True)
class Contender:
    """Something that is measured.

    Attributes:
        make: Its step for a work. Raises NotInstalled or CannotRun.
        losses: Those it can do.
        on: "one" process, "ranks" or "both".
        package: By the name pip knows; "" for what is written here.
        ours: Its result is held to the dense loss's own precision; another's need only be the same loss.
        normalizes: Whether asked or not, so its gradients are those of features that are normalised inside.
        compiles: Again for every size, so only a step of the same size warms it up.
        bare: Computes no loss: nothing to check, nothing to weigh.
        alone: Beside ranks, one process that holds the whole batch and has as many threads as there are ranks.
        multiple: Of this its number of rows must be one.
        needs: A type of device, "cuda", or "" for any.
        grad_reduction: What is done with its gradients over ranks.
    """

    name: str
    title: str
    make: Callable[[Any], Step]
    losses: tuple[str, ...] = tuple(LOSSES)
    on: str = "one"
    package: str = ""
    ours: bool = False
    normalizes: bool = False
    compiles: bool = False
    bare: bool = False
    alone: bool = False
    multiple: int = 1
    needs: str = ""
    grad_reduction: str = "mean"

    def takes_part(self, loss: str, ranks: int, device: str) -> bool:
        return (
            loss in self.losses
            and self.on in ("both", "ranks" if ranks > 1 else "one")
            and self.needs in ("", torch.device(device).type)
        )


# ---- ours


def ours(work: LossWork, **options: Any) -> Step:
    function = getattr(megabatch, work.case.kind.function)
    return work.step(partial(function, normalize=False, group=work.world.group, **options))


def ours_kept(work: LossWork, **options: Any) -> Step:
    """With a budget for this rank's rows of the logits."""
    return ours(work, memory_budget=work.case.matrix_bytes // work.world.size + ROOM, **options)


def pass_per_direction(work: LossWork, **options: Any) -> Step:
    """Images to texts and texts to images apart, each with a ring of its own, as Ring-CL and Inf-CL have it."""
    given = {"normalize": False, "group": work.world.group, "exchange": "ring", **options}
    one_way: Any = partial(megabatch.info_nce_loss, **given)
    return work.step(lambda image, text, scale: (one_way(image, text, scale) + one_way(text, image, scale)) / 2)


# ---- what people write


def by_hand(work: LossWork) -> Step:
    """On ranks all of them have all logits, as CLIP's own loss does."""
    return work.step(_clip_alone(work, formulas.global_clip) or formulas.BY_HAND[work.case.loss])


def compiled(work: LossWork) -> Step:
    # The compiler's own use of what torch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    compile = partial(torch.compile, fullgraph=True, dynamic=False)
    if _clip_alone(work, formulas.local_clip):
        return work.step(partial(formulas.local_clip, work.world.rank, compile(formulas.local_rows)))
    return work.step(compile(formulas.ONCE[work.case.loss]))


def _clip_alone(work: LossWork, function: formulas.LossFunction) -> formulas.LossFunction | None:
    """On ranks, the function; None on one process."""
    if work.world.size == 1:
        return None
    if work.case.loss != "clip":
        raise CannotRun("on ranks it is written for clip alone")
    return function


def checkpointed(work: LossWork) -> Step:
    return work.step(formulas.CHUNKED[work.case.loss])


def open_clip_formula(work: LossWork) -> Step:
    local = partial(formulas.local_clip, work.world.rank, formulas.local_rows)
    return work.step(_clip_alone(work, local) or formulas.OPEN_CLIP_FORMULA[work.case.loss])


def disco(work: LossWork) -> Step:
    return work.step(partial(formulas.disco_clip, work.world.rank))


def products(work: LossWork) -> Step:
    """The matrix products that a step needs, of the full shape, into outputs made beforehand, and nothing else."""
    case = work.case
    side = case.side // work.world.size
    rows, columns = (torch.randn(side, case.width, device=work.world.device).to(case.torch_dtype) for _ in range(2))
    logits = torch.empty(side, side, dtype=rows.dtype, device=rows.device)
    row_gradient, column_gradient = torch.empty_like(rows), torch.empty_like(columns)

    def step() -> None:
        for _ in range(work.world.size):  # a rank's rows against the columns of every rank
            for _ in range(case.kind.formed):
                torch.mm(rows, columns.T, out=logits)
            torch.mm(logits, columns, out=row_gradient)
            if not case.kind.joined:
                torch.mm(logits.T, rows, out=column_gradient)

    return step


# ---- other packages


def package(name: str) -> Any:
    """A module of another package. Raises NotInstalled."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise NotInstalled
    warnings.filterwarnings("ignore", category=FutureWarning)  # others use what torch deprecates
    return importlib.import_module(name)


def open_clip(work: LossWork, **settings: Any) -> Step:
    module, siglip = package("open_clip.loss"), work.case.loss == "siglip"
    settings = settings or ({} if siglip else {"local_loss": True, "gather_with_grad": True})
    kind = module.SigLipLoss if siglip else module.ClipLoss
    return work.step(kind(rank=work.world.rank, world_size=work.world.size, **settings))


def inf_cl(work: LossWork) -> Step:
    """Its kernel for one process, once per direction."""
    loss = package("inf_cl").cal_flash_loss
    head_dim = next(size for size in (256, 128, 64, 32, 16) if work.case.width % size == 0 or size == 16)

    def both(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        options = {"scale": scale, "head_dim": head_dim}
        value: Tensor = (loss(image, text, **options).mean() + loss(text, image, **options).mean()) / 2
        return value

    return work.step(both)


def siglip_kernel(work: LossWork) -> Step:
    """Takes the logarithm of the scale."""
    loss = package("siglip_kernel").fused_siglip_loss
    return work.step(lambda image, text, scale, bias: loss(image, text, scale.log(), bias))


def cut_cross_entropy(work: LossWork) -> Step:
    """Its path through torch.compile, which runs anywhere; for clip once per direction."""
    loss = package("cut_cross_entropy").linear_cross_entropy

    def one_way(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
        target = torch.arange(len(query), device=query.device)
        value: Tensor = loss((scale * query).to(query.dtype), key, target, impl="torch_compile")
        return value

    if work.case.loss == "info_nce":
        return work.step(one_way)
    return work.step(lambda image, text, scale: (one_way(image, text, scale) + one_way(text, image, scale)) / 2)


def lightly(work: LossWork, **settings: Any) -> Step:
    loss = package("lightly.loss").NTXentLoss(temperature=1 / work.case.scale, **settings)
    return work.step(lambda view1, view2, scale: loss(view1, view2))


def metric_learning(work: LossWork, efficient: bool | None = None) -> Step:
    """`efficient`: in its wrapper for ranks, with this setting."""
    losses = package("pytorch_metric_learning.losses")
    kind = losses.SupConLoss if work.case.loss == "supcon" else losses.NTXentLoss
    loss = kind(temperature=1 / work.case.scale)
    if efficient is not None:
        wrapper = package("pytorch_metric_learning.utils.distributed").DistributedLossWrapper
        loss = wrapper(loss, efficient=efficient)
    if work.case.loss == "supcon":
        return work.step(lambda features, labels, scale: loss(features, labels))
    rows = len(work.inputs.features[0])
    pair = (work.start + torch.arange(rows, device=work.world.device)).repeat(2)
    return work.step(lambda view1, view2, scale: loss(torch.cat([view1, view2]), pair))


def sentence_transformers(work: LossWork, **settings: Any) -> Step:
    losses = package("sentence_transformers.sentence_transformer.losses")
    loss = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=work.case.scale, **settings)
    return work.step(lambda query, key, scale: loss.compute_loss_from_embeddings([query, key], None))


def cached_stage(work: LossWork, module: str) -> Step:
    """The stage between its two passes over the encoder, with mini-batches of the size that it has by default."""
    package("sentence_transformers")
    loss = package(module).CachedMultipleNegativesRankingLoss([None], scale=work.case.scale)

    def step() -> Tensor:
        pieces = [
            [piece.detach().requires_grad_() for piece in torch.split(column, loss.mini_batch_size)]
            for column in work.inputs.features
        ]
        value: Tensor = loss.calculate_loss(pieces, with_backward=True)
        for column, own in zip(work.inputs.features, pieces, strict=True):
            column.grad = torch.cat([piece.grad for piece in own if piece.grad is not None])
        return value

    return step


def grad_cache(work: LossWork, kind: str = "SimpleContrastiveLoss") -> Step:
    """The loss it comes with, on features that are all there: what it does to encoders is for `chunked` to measure."""
    loss = getattr(package("gradcache.loss"), kind)()
    return work.step(lambda query, key, scale: loss(scale * query, key))


_CLIP, _PAIRS = ("clip",), ("clip", "siglip")
_RANKS: dict[str, Any] = {"losses": _CLIP, "on": "ranks", "ours": True}
_CACHED = partial(cached_stage, module="sentence_transformers.sentence_transformer.losses")
_DROP_IN = partial(cached_stage, module="megabatch.integrations.sentence_transformers")


def _of(package: str, *losses: str, **more: Any) -> dict[str, Any]:
    return {"package": package, "losses": losses, **more}


_SENTENCES = _of("sentence-transformers", "info_nce", normalizes=True)

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("megabatch", "megabatch", ours, on="both", ours=True),
        Contender("kept", "megabatch, logits kept", ours_kept, _CLIP, ours=True),
        Contender("small", 'megabatch, memory_budget="48MiB"', partial(ours, memory_budget="48MiB"), _CLIP, ours=True),
        Contender("triton", "megabatch, triton", partial(ours, backend="triton"), ours=True, needs="cuda"),
        Contender("eager", "megabatch, eager", partial(ours, backend="eager"), ours=True),
        Contender("alone", "megabatch, one process", ours, alone=True, **_RANKS),
        Contender("ring", "megabatch, ring", partial(ours, exchange="ring"), **_RANKS),
        Contender("blocking", "megabatch, ring, no overlap", partial(ours, exchange="ring", overlap=False), **_RANKS),
        Contender("gather", "megabatch, gather", partial(ours, exchange="gather"), **_RANKS),
        Contender("ring_kept", "megabatch, ring, logits kept", partial(ours_kept, exchange="ring"), **_RANKS),
        Contender("two_passes", "tiles, a pass per direction", pass_per_direction, **_RANKS),
        Contender("ring_only", "no tiles, a pass per direction", partial(pass_per_direction, tile=WHOLE), **_RANKS),
        Contender("by_hand", "dense by hand, logits formed once", by_hand, on="both"),
        Contender("compiled", "torch.compile of the dense loss", compiled, on="both", compiles=True),
        Contender("checkpointed", f"checkpoint, chunks of {formulas.CHUNK} rows", checkpointed),
        Contender("formula", "open_clip's formula", open_clip_formula, _PAIRS, on="both"),
        Contender("disco", "DisCo-CLIP's scheme (sum, not its code's average)", disco, _CLIP, "ranks"),
        Contender("open_clip", "open_clip", open_clip, on="both", **_of("open_clip_torch", *_PAIRS)),
        Contender("inf_cl", "inf_cl", inf_cl, multiple=64, needs="cuda", **_of("inf_cl", "clip")),
        Contender(
            "siglip_kernel", "siglip-kernel", siglip_kernel, multiple=64, needs="cuda", **_of("siglip-kernel", "siglip")
        ),
        Contender(
            "cce",
            "cut-cross-entropy, torch_compile",
            cut_cross_entropy,
            **_of("cut-cross-entropy", "clip", "info_nce", compiles=True),
        ),
        Contender("lightly", "lightly", lightly, **_of("lightly", "nt_xent", normalizes=True)),
        Contender(
            "metric_learning",
            "pytorch-metric-learning",
            metric_learning,
            **_of("pytorch-metric-learning", "nt_xent", "supcon", normalizes=True),
        ),
        Contender("mnrl", "sentence-transformers, plain", sentence_transformers, **_SENTENCES),
        Contender("cached_mnrl", "sentence-transformers, cached, loss stage", _CACHED, **_SENTENCES),
        Contender("drop_in", "megabatch's drop-in for it", _DROP_IN, **_SENTENCES),
        Contender("grad_cache", "GradCache, its loss", grad_cache, **_of("GradCache", "info_nce")),
        Contender("products", "full-size products", products, on="both", bare=True),
    )
}
PACKAGES = tuple(dict.fromkeys(one.package for one in CONTENDERS.values() if one.package))
