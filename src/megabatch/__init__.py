"""Contrastive learning at any batch size: exact losses in linear memory."""

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
