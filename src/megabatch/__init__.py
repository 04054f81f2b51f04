"""Contrastive learning at any batch size: exact losses in linear memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.workspace import empty_cache
    from .caching.chunked import chunked
    from .functional import clip_loss, info_nce_loss, nt_xent_loss, siglip_loss, supcon_loss
    from .loading import load
    from .modules import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss, SupConLoss
    from .retrieval import retrieval_ranks, similarity_topk

__version__ = "0.1.0"

__all__ = [
    "ClipLoss",
    "InfoNCELoss",
    "NTXentLoss",
    "SigLipLoss",
    "SupConLoss",
    "chunked",
    "clip_loss",
    "empty_cache",
    "info_nce_loss",
    "load",
    "nt_xent_loss",
    "retrieval_ranks",
    "siglip_loss",
    "similarity_topk",
    "supcon_loss",
]

_MODULES = {"chunked": "caching.chunked", "empty_cache": "backends.workspace", "load": "loading"}
_MODULES |= dict.fromkeys(("retrieval_ranks", "similarity_topk"), "retrieval")


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `megabatch --help` need not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "functional" if name.endswith("_loss") else "modules")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
