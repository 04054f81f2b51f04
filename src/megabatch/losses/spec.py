"""Spec: the few facts in which the contrastive losses differ.

One engine computes all of them. A loss is one constructor here, and its fields are what a kernel branches on.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """What the engine must know of a loss.

    Attributes:
        epilogue: "softmax": cross-entropy of every row over its columns. "sigmoid": binary cross-entropy of every pair.
        column_loss: The columns have a loss too, over their rows.
        id_rule: What pairs of equal ids are, apart from a row and its target: "ignore" (negatives like any other),
            "mask" (left out) or "positive".
        symmetric: Rows and columns are the same features. The upper triangle is enough, without the diagonal.
        label_smoothing: As in cross-entropy.
        has_targets: Every row has its own positive, whatever its id.
    """

    epilogue: str
    column_loss: bool = False
    id_rule: str = "ignore"
    symmetric: bool = False
    label_smoothing: float = 0.0
    has_targets: bool = True

    @property
    def two_sided(self) -> bool:
        """Columns need the statistics of a softmax as much as rows do."""
        return self.column_loss or self.symmetric

    @property
    def directions(self) -> int:
        return 2 if self.column_loss else 1


def clip(id_rule: str, label_smoothing: float) -> Spec:
    return Spec("softmax", column_loss=True, id_rule=id_rule, label_smoothing=label_smoothing)


def info_nce(id_rule: str, label_smoothing: float) -> Spec:
    return Spec("softmax", id_rule=id_rule, label_smoothing=label_smoothing)


def siglip(id_rule: str) -> Spec:
    return Spec("sigmoid", id_rule=id_rule)


def nt_xent(id_rule: str, label_smoothing: float) -> Spec:
    return Spec("softmax", id_rule=id_rule, symmetric=True, label_smoothing=label_smoothing)


def supcon(label_smoothing: float) -> Spec:
    return Spec("softmax", id_rule="positive", symmetric=True, label_smoothing=label_smoothing, has_targets=False)
