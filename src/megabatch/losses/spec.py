"""Spec: the few facts in which the contrastive losses differ.

One engine computes all of them; a loss is five constructor lines here, and its fields are what a kernel branches on.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """What the engine must know of a loss.

    Attributes:
        link: "softmax": every row is a distribution over its columns. "sigmoid": every pair is a coin of its own.
        columns: The columns have a loss too, over their rows.
        same: What pairs of equal ids are, beside the target: "ignore" (negatives), "mask" or "positive".
        symmetric: Both sides of the plane are the same rows, so its upper triangle is enough, and no row meets itself.
        smoothing: Label smoothing.
        targets: Every row has a positive of its own, whatever its id.
    """

    link: str
    columns: bool = False
    same: str = "ignore"
    symmetric: bool = False
    smoothing: float = 0.0
    targets: bool = True

    @property
    def two_sided(self) -> bool:
        """Every tile is about its columns as much as about its rows."""
        return self.columns or self.symmetric

    @property
    def directions(self) -> int:
        return 2 if self.columns else 1


def clip(same: str, smoothing: float) -> Spec:
    return Spec("softmax", columns=True, same=same, smoothing=smoothing)


def info_nce(same: str, smoothing: float) -> Spec:
    return Spec("softmax", same=same, smoothing=smoothing)


def siglip(same: str) -> Spec:
    return Spec("sigmoid", same=same)


def nt_xent(same: str, smoothing: float) -> Spec:
    return Spec("softmax", same=same, symmetric=True, smoothing=smoothing)


def supcon(smoothing: float) -> Spec:
    return Spec("softmax", same="positive", symmetric=True, smoothing=smoothing, targets=False)
