"""Who is put side by side: megabatch, the tools of the field, what people write themselves; and what each is on ranks.

Nobody is new here: who computes a loss in one process is in `loss/contenders`, over ranks in `ring/contenders`, and
whose gradients are looked at in `gradients/contenders`.
"""

from ..cases import LOSSES
from ..gradients.contenders import PEERS

# Of `loss/contenders`, in the order of the tables.
FIELD = (
    "megabatch",
    "open_clip",
    "mnrl",
    "cached_mnrl",
    "grad_cache",
    "lightly",
    "metric_learning",
    "compiled",
    "chunked",
    "dense",
)

# A contender and a loss, and the title of the one of PEERS that is the same tool over ranks, in the setting that it
# recommends or has by default. The others have no way of their own to spread a batch.
OVER_RANKS = {
    **{("megabatch", name): f"megabatch {loss.function}" for name, loss in LOSSES.items()},
    ("open_clip", "clip"): "open_clip ClipLoss, local_loss=True, gather_with_grad=True",
    ("open_clip", "siglip"): "open_clip SigLipLoss, dist_impl=bidir",
    ("mnrl", "info_nce"): ("sentence-transformers MultipleNegativesRankingLoss, one direction, gather_across_devices"),
    ("grad_cache", "info_nce"): "GradCache DistributedContrastiveLoss",
    ("lightly", "nt_xent"): "lightly NTXentLoss, gather_distributed",
    ("metric_learning", "nt_xent"): "pytorch-metric-learning NTXentLoss, DistributedLossWrapper(efficient=False)",
    ("metric_learning", "supcon"): "pytorch-metric-learning SupConLoss, DistributedLossWrapper(efficient=False)",
}

# Of `ring/contenders`: what a batch spread over ranks makes possible, or different. The first is what the others are
# held against.
SPREAD = ("ring", "gather", "open_clip", "disco")


def peer_of(contender: str, loss: str) -> int | None:
    """Its place in PEERS."""
    title = OVER_RANKS.get((contender, loss))
    return None if title is None else [peer.title for peer in PEERS].index(title)
