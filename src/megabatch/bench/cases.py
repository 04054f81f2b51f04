"""What the losses are measured on: a loss at a number of rows, a width and a dtype, on one process or over ranks.

`rows` are those of the whole batch everywhere: of all ranks together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import reference

from ..distributed.world import World
from . import formulas

# Forward and backward; leaves gradients behind and returns the loss, or None where there is none.
Step = Callable[[], Tensor | None]
# The loss and its gradients, by name.
Results = dict[str, Tensor]

FEW_ROWS = 300
FEW_IN_CHUNKS = {"rows": 40, "chunk": 16}  # three chunks, the last of them smaller


@dataclass(frozen=True)
class Loss:
    """One of the five losses, as a benchmark sees it: how often a step in linear memory must form the logits (twice
    where dlogits need the sums of a whole column), how many feature tensors it takes, and whether they are joined: rows
    and columns are then all the features together."""

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

    def copy(self, rows: slice = slice(None), dtype: torch.dtype | None = None) -> "Inputs":
        """These rows, perhaps in another dtype, as new leaves."""

        def leaf(x: Tensor) -> Tensor:
            return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()

        features = tuple(leaf(x[rows]) for x in self.features)
        labels = None if self.labels is None else self.labels[rows]
        return Inputs(features, labels, leaf(self.scale), None if self.bias is None else leaf(self.bias))


class Work:
    """What one process computes on."""

    own_rows = False  # gradients are of this rank's rows, else of what all ranks share

    def leaves(self) -> dict[str, Tensor]:
        """What gets a gradient, by name."""
        raise NotImplementedError

    def clear(self) -> None:
        for x in self.leaves().values():
            x.grad = None

    def gradients(self) -> Results:
        return {f"gradient of {name}": x.grad for name, x in self.leaves().items() if x.grad is not None}


@dataclass
class LossWork(Work):
    """A rank's rows of a case."""

    case: "Case"
    world: World
    inputs: Inputs
    start: int = 0
    own_rows = True

    def step(self, function: Callable[..., Tensor]) -> Step:
        """A step through a function that takes the arguments of our losses."""

        def step() -> Tensor:
            loss = function(*self.inputs.arguments)
            torch.autograd.backward(loss)
            return loss.detach()

        return step

    def leaves(self) -> dict[str, Tensor]:
        inputs = self.inputs
        named = {f"features {index}": x for index, x in enumerate(inputs.features, start=1)}
        return named | {"the scale": inputs.scale} | ({} if inputs.bias is None else {"the bias": inputs.bias})


@dataclass(frozen=True)
class Case:
    loss: str
    rows: int
    width: int
    dtype: str = "float32"
    device: str = "cpu"
    ranks: int = 1

    @property
    def kind(self) -> Loss:
        return LOSSES[self.loss]

    @property
    def scale(self) -> float:
        return self.kind.scale

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def side(self) -> int:
        """Rows and columns of the matrix of logits."""
        return self.rows * self.kind.views if self.kind.joined else self.rows

    @property
    def matrix_bytes(self) -> int:
        """The whole matrix of logits, in the precision logits are computed in."""
        return self.side**2 * (8 if self.dtype == "float64" else 4)

    def few(self, multiple: int = 1) -> "Case":
        """The same with few rows, to check results with: a multiple of the ranks, and of `multiple` on each."""
        unit = self.ranks * multiple
        return replace(self, rows=max(min(self.rows, FEW_ROWS) // unit, 1) * unit)

    def work(self, world: World, sizes: list[int] | None = None) -> LossWork:
        """This rank's rows, of which it has as many as the others or what `sizes` says; one process has them all."""
        sizes = sizes or [self.rows // world.size] * world.size
        start = sum(sizes[: world.rank])
        whole = self.inputs()
        inputs = whole if world.size == 1 else whole.copy(slice(start, start + sizes[world.rank]))
        return LossWork(self, world, inputs, start)

    def expected(self, normalizes: bool = False, exact: bool = True) -> Results:
        """What the dense loss of the whole batch gives: in float64 if `exact`, else in the case's own dtype."""
        dense = getattr(reference, self.kind.function)
        return self._computed(partial(dense, normalize=normalizes, group=None), exact)

    def exact(self, normalizes: bool) -> Results:
        """The same in float64 at any size: by chunks of rows."""
        function, views = formulas.CHUNKED[self.loss], self.kind.views

        def normalized(*given: Tensor) -> Tensor:
            return function(*(F.normalize(x, dim=1) for x in given[:views]), *given[views:])

        return self._computed(normalized if normalizes else function, True)

    def _computed(self, function: Callable[..., Tensor], exact: bool) -> Results:
        inputs = self.inputs().copy(dtype=torch.float64) if exact else self.inputs()
        work = LossWork(self, World(torch.device(self.device)), inputs)
        return results(work.step(function), work)

    def inputs(self) -> Inputs:
        """The whole batch: the same numbers every time, in every process, on one kind of device."""
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
        # Scale and bias stay float32 beside bf16/fp16 features, as a model's parameters do.
        scalar_dtype = torch.float64 if self.dtype == "float64" else torch.float32

        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=scalar_dtype, device=self.device, requires_grad=True)

        return Inputs(
            tuple(x.to(self.torch_dtype).requires_grad_() for x in features),
            labels,
            scalar(self.kind.scale),
            None if self.kind.bias is None else scalar(self.kind.bias),
        )

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f", {self.device}"
        return f"{self.kind.function}, N={self.rows}, D={self.width}, {self.dtype}{where}{on_ranks(self.ranks)}"


class InChunks:
    """Of cases whose encoders train: `rows` samples, encoded `chunk` at a time, spread over `ranks`."""

    torch_dtype = torch.float32

    def few(self: Any, multiple: int = 1) -> Any:
        rows, chunk = (min(getattr(self, name), most) for name, most in FEW_IN_CHUNKS.items())
        return replace(self, rows=rows // self.ranks * self.ranks, chunk=chunk)

    def share(self: Any, world: World) -> slice:
        return slice(self.rows * world.rank // world.size, self.rows * (world.rank + 1) // world.size)


def on_ranks(ranks: int) -> str:
    return f", {ranks} ranks" if ranks > 1 else ""


def results(step: Step, work: Work) -> Results:
    """The loss and every gradient, in float64."""
    work.clear()
    loss = step()
    assert loss is not None
    return {name: x.double() for name, x in {"loss": loss, **work.gradients()}.items()}


def average(parameters: Iterable[Tensor], world: World) -> None:
    """Gradients over ranks, as trainers do."""
    for parameter in parameters if world.size > 1 else ():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world.size
