"""Contrastive learning at any batch size: exact losses in linear memory."""

import sys
from importlib import import_module
from pathlib import Path
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
    """Imports a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "functional" if name.endswith("_loss") else "modules")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The command line imports what it uses, so that `megabatch --help` need not import torch. Programs import all of it
# here: see distributed/ranks.py for why that must be before there is a process group.
if not any(Path(word).stem == "megabatch" for word in sys.orig_argv[1:4]):
    for _name in __all__:
        __getattr__(_name)
