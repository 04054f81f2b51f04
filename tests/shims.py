"""Other people's packages, where their wheels do not fit this machine."""

import warnings

import torch

_kept: list[torch.library.Library] = []  # a library is gone when its object is


def import_torchvision() -> None:
    """Its wheels for CUDA cannot load their operators beside a torch for the CPU, and then the import fails.

    Declaring the two operators that it looks for is enough for all that does not use them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision
        except (RuntimeError, ImportError):
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
            import torchvision  # noqa: F401
