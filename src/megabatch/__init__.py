"""Contrastive learning at any batch size: exact losses in linear memory."""

from .functional import clip_loss, info_nce_loss, nt_xent_loss, siglip_loss, supcon_loss

__all__ = [
    "clip_loss",
    "info_nce_loss",
    "nt_xent_loss",
    "siglip_loss",
    "supcon_loss",
]
