"""What is measured: a loss, at a number of rows, a width and a dtype; and the inputs that go with it."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """One of the five losses, as a benchmark sees it.

    Attributes:
        formed: How often a step in linear memory must form the logits: twice where dlogits need the sums of a whole
            column. Each forming is a matrix product, and the gradient of each side is another.
        views: Feature tensors it takes.
        joined: Its rows and columns are all the features together, so the plane is `views` times as high and wide.
    """

    name: str
    scale: float
    formed: int = 1
    views: int = 2
    joined: bool = False
    bias: float | None = None

    @property
    def function(self) -> str:
        return f"{self.name}_loss"

    @property
    def products(self) -> int:
        return self.formed + (1 if self.joined else 2)


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("clip", scale=1 / 0.07, formed=2),
        Loss("siglip", scale=10.0, bias=-10.0),
        Loss("info_nce", scale=20.0),
        Loss("nt_xent", scale=2.0, joined=True),
        Loss("supcon", scale=10.0, views=1, joined=True),
    )
}
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass
class Inputs:
    """Unit-length features, the rows of two views alike; all but the labels require grad."""

    features: tuple[Tensor, ...]
    labels: Tensor | None
    scale: Tensor
    bias: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """In the order in which the losses take them."""
        return tuple(x for x in (*self.features, self.labels, self.scale, self.bias) if x is not None)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self.arguments if x.requires_grad)

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def cut(self, mine: slice) -> "Inputs":
        """These rows, as leaves of their own."""
        features = tuple(x.detach()[mine].clone().requires_grad_() for x in self.features)
        return Inputs(features, None if self.labels is None else self.labels[mine], self.scale, self.bias)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another dtype, scale and bias too."""

        def convert(x: Tensor) -> Tensor:
            return x.detach().to(dtype, copy=True).requires_grad_()

        features = tuple(convert(x) for x in self.features)
        return Inputs(features, self.labels, convert(self.scale), None if self.bias is None else convert(self.bias))


@dataclass(frozen=True)
class Case:
    """One table of the benchmark. `memory_budget` is for the contender that keeps the logits."""

    loss: str
    rows: int
    width: int
    dtype: str = "float32"
    memory_budget: str | None = None
    device: str = "cpu"

    @property
    def kind(self) -> Loss:
        return LOSSES[self.loss]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def side(self) -> int:
        """Rows and columns of the plane of logits."""
        return self.rows * self.kind.views if self.kind.joined else self.rows

    @property
    def matrix_bytes(self) -> int:
        """The whole matrix of logits, in the precision logits are computed in."""
        return self.side**2 * (8 if self.dtype == "float64" else 4)

    def with_rows(self, rows: int) -> "Case":
        return replace(self, rows=rows)

    def inputs(self) -> Inputs:
        """The same numbers every time, in every process, on one kind of device."""
        random = torch.Generator(self.device).manual_seed(self.rows * 31 + self.width)

        def unit_rows() -> Tensor:
            return F.normalize(torch.randn(self.rows, self.width, generator=random, device=self.device), dim=1)

        first = unit_rows()
        features = [first]
        if self.kind.views == 2:
            # A cosine of about 0.3 between the two of a pair: somewhere in the middle of a training.
            features.append(F.normalize(unit_rows().mul_(3).add_(first), dim=1))
        labels = None
        if self.loss == "supcon":
            labels = torch.randint(-(-self.rows // 8), (self.rows,), generator=random, device=self.device)
        # Scale and bias stay float32 beside half features, as a model's parameters do.
        scalar_dtype = torch.float64 if self.dtype == "float64" else torch.float32
        bias = self.kind.bias
        return Inputs(
            tuple(x.to(self.torch_dtype).requires_grad_() for x in features),
            labels,
            torch.tensor(self.kind.scale, dtype=scalar_dtype, device=self.device, requires_grad=True),
            None if bias is None else torch.tensor(bias, dtype=scalar_dtype, device=self.device, requires_grad=True),
        )

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f", {self.device}"
        return f"{self.kind.function}, N={self.rows}, D={self.width}, {self.dtype}{where}"
