"""Who is measured: megabatch, its dense twin, what people write today, other packages, and the bare matrix products."""

import contextlib
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
from megabatch import reference

from ..cases import LOSSES, Case, Inputs
from . import rivals
from .rivals import LossFunction

# Forward and backward; leaves the gradients in the inputs and returns the loss, or None where there is none.
Step = Callable[[Inputs], Tensor | None]


class NotInstalled(Exception):
    """The contender is a package that is not here."""


@dataclass(frozen=True)
class Contender:
    """Something that computes losses.

    Attributes:
        make: The step for a case. Raises NotInstalled.
        losses: Those it can do.
        held: Bytes it holds at its peak, about, as far as they grow with the square of the rows or faster: to tell
            whether it would fit.
        ours: Its result is held against the dense loss's own precision; another's need only be the same loss.
        normalizes: Does so whether asked or not, so its gradients are those of features that are normalised inside.
        compiles: Compiled anew for every size, so only a step of the same size warms it up.
        bare: Computes no loss, so there is nothing to check, and holds what it is given, so there is nothing to weigh.
        multiple: Of this the number of rows must be one.
    """

    name: str
    title: str
    make: Callable[[Case], Step]
    losses: tuple[str, ...] = tuple(LOSSES)
    held: Callable[[Case], float] = lambda case: 0
    ours: bool = False
    normalizes: bool = False
    compiles: bool = False
    bare: bool = False
    multiple: int = 1


def step_of(function: LossFunction) -> Step:
    def step(inputs: Inputs) -> Tensor:
        loss = function(*inputs.arguments)
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def ours(case: Case) -> Step:
    return step_of(partial(getattr(megabatch, case.kind.function), normalize=False))


def ours_kept(case: Case) -> Step:
    # The logits, and some room to work in.
    budget = case.memory_budget or case.matrix_bytes + 256 * 2**20
    return step_of(partial(getattr(megabatch, case.kind.function), normalize=False, memory_budget=budget))


def ours_small(case: Case) -> Step:
    return step_of(partial(getattr(megabatch, case.kind.function), normalize=False, memory_budget="48MiB"))


def by_hand(case: Case) -> Step:
    return step_of(rivals.BY_HAND[case.loss])


def dense(case: Case, normalize: bool = False) -> Step:
    return step_of(partial(getattr(reference, case.kind.function), normalize=normalize))


def compiled(case: Case) -> Step:
    # The compiler's own use of what torch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    return step_of(torch.compile(rivals.ONCE[case.loss], fullgraph=True, dynamic=False))


def chunked(case: Case) -> Step:
    return step_of(rivals.CHUNKED[case.loss])


def open_clip_formula(case: Case) -> Step:
    return step_of(rivals.OPEN_CLIP_FORMULA[case.loss])


def open_clip(case: Case) -> Step:
    module = package("open_clip.loss")
    return step_of(module.ClipLoss() if case.loss == "clip" else module.SigLipLoss())


def ours_by(backend: str, case: Case) -> Step:
    return step_of(partial(getattr(megabatch, case.kind.function), normalize=False, backend=backend))


def inf_cl(case: Case) -> Step:
    """Its kernel for one process, once per direction."""
    loss = package("inf_cl").cal_flash_loss
    head_dim = next(size for size in (256, 128, 64, 32, 16) if case.width % size == 0 or size == 16)

    def both(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        options = {"scale": scale, "head_dim": head_dim}
        value: Tensor = (loss(image, text, **options).mean() + loss(text, image, **options).mean()) / 2
        return value

    return step_of(both)


def lightly(case: Case) -> Step:
    loss = package("lightly.loss").NTXentLoss(temperature=1 / case.kind.scale)
    return step_of(lambda view1, view2, scale: loss(view1, view2))


def metric_learning(case: Case) -> Step:
    losses = package("pytorch_metric_learning.losses")
    if case.loss == "supcon":
        supcon = losses.SupConLoss(temperature=1 / case.kind.scale)
        return step_of(lambda features, labels, scale: supcon(features, labels))
    nt_xent = losses.NTXentLoss(temperature=1 / case.kind.scale)
    pair = torch.arange(case.rows, device=case.device).repeat(2)
    return step_of(lambda view1, view2, scale: nt_xent(torch.cat([view1, view2]), pair))


def sentence_transformers(case: Case) -> Step:
    losses = sentence_transformers_losses()
    loss = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=case.kind.scale)
    return step_of(lambda query, key, scale: loss.compute_loss_from_embeddings([query, key], None))


def sentence_transformers_cached(case: Case) -> Step:
    """The stage between its two passes over the encoder, with mini-batches of the size that it has by default."""
    losses = sentence_transformers_losses()
    return step_of_stage(losses.CachedMultipleNegativesRankingLoss([None], scale=case.kind.scale))


def grad_cache(case: Case) -> Step:
    """The loss it comes with, on features that are all there: what it does to encoders is `chunked`'s to measure."""
    loss = package("gradcache.loss").SimpleContrastiveLoss()
    return step_of(lambda query, key, scale: loss(scale * query, key))


def sentence_transformers_drop_in(case: Case) -> Step:
    sentence_transformers_losses()  # with what makes it importable
    losses = package("megabatch.integrations.sentence_transformers")
    return step_of_stage(losses.CachedMultipleNegativesRankingLoss([None], scale=case.kind.scale))


def step_of_stage(loss: Any) -> Step:
    def step(inputs: Inputs) -> Tensor:
        pieces = [
            [piece.detach().requires_grad_() for piece in torch.split(column, loss.mini_batch_size)]
            for column in inputs.features
        ]
        value: Tensor = loss.calculate_loss(pieces, with_backward=True)
        for column, own in zip(inputs.features, pieces, strict=True):
            gradients = [piece.grad for piece in own if piece.grad is not None]
            column.grad = torch.cat(gradients)
        return value

    return step


def products(case: Case) -> Step:
    """The matrix products that a step needs, of the full shape, into outputs made beforehand, and nothing else."""
    rows, columns = (torch.randn(case.side, case.width, device=case.device).to(case.torch_dtype) for _ in range(2))
    logits = torch.empty(case.side, case.side, dtype=rows.dtype, device=case.device)
    row_gradient, column_gradient = torch.empty_like(rows), torch.empty_like(columns)

    def step(inputs: Inputs) -> None:
        for _ in range(case.kind.formed):
            torch.mm(rows, columns.T, out=logits)
        torch.mm(logits, columns, out=row_gradient)
        if not case.kind.joined:
            torch.mm(logits.T, rows, out=column_gradient)

    return step


def package(name: str) -> Any:
    """A module of another package. Raises NotInstalled."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise NotInstalled
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_torchvision_operators()
        return importlib.import_module(name)


def sentence_transformers_losses() -> Any:
    with contextlib.suppress(NotInstalled):
        package("torchvision")  # first, by a way that forgives what its compiled part lacks
    return package("sentence_transformers.sentence_transformer.losses")


_TORCHVISION: list[torch.library.Library] = []


def _declare_torchvision_operators() -> None:
    """Lets torchvision be imported where its compiled operators do not load; no loss calls them."""
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _TORCHVISION.append(library)  # they go when it goes


def _matrices(number: float) -> Callable[[Case], float]:
    """So many matrices of logits."""
    return lambda case: number * case.matrix_bytes


def _pairs_by_pairs(case: Case) -> float:
    """pytorch-metric-learning holds each positive pair of NT-Xent against every negative pair: the cube of the rows."""
    return 18 * case.side**3 if case.loss == "nt_xent" else 14 * case.matrix_bytes


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("megabatch", "megabatch", ours, ours=True),
        Contender("kept", "megabatch, logits kept", ours_kept, ("clip",), held=_matrices(1), ours=True),
        Contender("small", 'megabatch, memory_budget="48MiB"', ours_small, ("clip",), ours=True),
        Contender("by_hand", "by hand, logits formed once", by_hand, held=_matrices(6)),
        Contender("dense", "dense twin (megabatch.reference)", dense, held=_matrices(12)),
        Contender("compiled", "torch.compile, logits formed once", compiled, held=_matrices(4), compiles=True),
        Contender("chunked", f"checkpoint, chunks of {rivals.CHUNK} rows", chunked),
        Contender("formula", "open_clip's formula", open_clip_formula, ("clip", "siglip"), held=_matrices(5)),
        Contender("open_clip", "open_clip", open_clip, ("clip", "siglip"), held=_matrices(5)),
        Contender("lightly", "lightly", lightly, ("nt_xent",), held=_matrices(7), normalizes=True),
        Contender(
            "metric_learning",
            "pytorch-metric-learning",
            metric_learning,
            ("nt_xent", "supcon"),
            held=_pairs_by_pairs,
            normalizes=True,
        ),
        Contender(
            "mnrl",
            "sentence-transformers, plain",
            sentence_transformers,
            ("info_nce",),
            held=_matrices(5),
            normalizes=True,
        ),
        Contender(
            "cached_mnrl",
            "sentence-transformers, cached: loss stage, mini-batches of 32",
            sentence_transformers_cached,
            ("info_nce",),
            normalizes=True,
        ),
        Contender(
            "drop_in",
            "megabatch's drop-in for the latter",
            sentence_transformers_drop_in,
            ("info_nce",),
            normalizes=True,
        ),
        Contender("grad_cache", "GradCache, its loss", grad_cache, ("info_nce",), held=_matrices(3)),
        Contender("products", "plain products, the limit", products, held=_matrices(1), bare=True),
    )
}

# What only a GPU makes possible, or different.
ON_GPU = {
    contender.name: contender
    for contender in (
        Contender("triton", "megabatch, triton", partial(ours_by, "triton"), ours=True),
        Contender("eager", "megabatch, eager", partial(ours_by, "eager"), ours=True),
        Contender("inf_cl", "inf_cl cal_flash_loss", inf_cl, ("clip",), multiple=64),
    )
}
