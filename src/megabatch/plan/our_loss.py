"""Memory, products and traffic of our own loss: COUNTED in its code, and held by tests against what is measured."""

from dataclasses import dataclass

from ..backends.backend import Backend
from ..backends.eager import Eager
from ..losses.spec import clip
from ..losses.state import state_fields
from ..tiling.options import LossOptions, Needs
from ..tiling.plan import Plan, Sizes, make_plan, working_bytes

FLOAT, DOUBLE = 4, 8  # bytes
STATES = len(state_fields(clip("ignore", 0.0), stats=False))  # vectors of statistics of a side


@dataclass(frozen=True)
class OurLoss:
    """A training step of clip_loss on one of n ranks, all of which bring the same number of rows.

    `feature` and `operand`: bytes of a number of the features and of what products multiply, less than 4 where
    bf16/fp16 is multiplied into float32. Tiles depend on the threads of a CPU.
    """

    rows: int
    width: int
    ranks: int
    exchange: str
    feature: int
    operand: int
    backend: type[Backend]
    budget: int | None = None
    threads: int = 2

    @property
    def parts(self) -> dict[str, float]:
        """Bytes at the peak beyond the features themselves, by part: of the backward, which holds more."""
        plan, vector, features, gradients = self.plan, self.rows * DOUBLE, *self._blocks
        exchange = 0
        if self._gathers:
            # The features of all ranks' columns, and their gradients, with those that arrive and those that leave.
            exchange = self.ranks * (features + 3 * gradients)
        elif self.ranks > 1:
            exchange = 2 * (features + STATES * vector) + 3 * gradients  # packed blocks, and the sum that is added to
        tiles = working_bytes(self._options, self._sizes, plan.rows, plan.columns)
        if self.backend is Eager and self.products == 3:  # all logits are kept: no buffer for those of a tile
            tiles -= plan.rows * plan.columns * FLOAT
        rounded = 2 * features if self.feature != FLOAT else 0  # gradients in bf16/fp16, after the last tile
        return {
            "gradients": 2 * gradients,
            "tiles": tiles,
            "kept logits": plan.kept * plan.slot_size * FLOAT,
            # The saved state of both sides, and 1 / sum_exp in half the bytes.
            "vectors": (2 * STATES + 1) * vector * (self.ranks if self._gathers else 1),
            "exchange": max(exchange, rounded),
        }

    @property
    def wire(self) -> float:
        """Bytes that a rank sends. Gathered: its features to all, sums of statistics of all rows twice, gradients to
        their owners. On a ring: features, then the state of its columns; features and state, then gradients."""
        vector, features, gradients = self.rows * DOUBLE, *self._blocks
        if self._gathers:
            return (self.ranks - 1) * (features + 4 * (STATES - 1) * vector + gradients)
        return (self.ranks - 1) * (2 * (features + STATES * vector) + gradients)

    @property
    def products(self) -> float:
        """Of N x N x D multiplications and additions: logits kept need not be formed again."""
        kept = self.plan.kept * self.plan.rows * self.plan.columns
        return 4.0 - min(1.0, kept / (self.rows * self.rows * self.ranks))

    @property
    def plan(self) -> Plan:
        """The one that the library would make."""
        return make_plan(self._options, self._sizes, self.ranks == 1)

    @property
    def _gathers(self) -> bool:
        return self.ranks > 1 and self.exchange == "gather"

    @property
    def _blocks(self) -> tuple[int, int]:
        """Bytes of the features and of the gradients of this rank's rows, one side."""
        return self.rows * self.width * self.feature, self.rows * self.width * FLOAT

    @property
    def _options(self) -> LossOptions:
        needs = Needs(rows=True, columns=True, scale=True)
        return LossOptions("clip_loss", clip("ignore", 0.0), needs, normalize=False, memory_budget=self.budget)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(
            rows=(self.rows,),
            columns=(self.rows * self.ranks,) if self._gathers else (self.rows,),
            remote=() if self._gathers else (self.rows,) * (self.ranks - 1),
            width=self.width,
            element=FLOAT,
            operand=self.operand,
            copied=self.feature != self.operand,
            # Where products are rounded: to bf16/fp16, and on a GPU to tf32.
            sum_for_scale=self.operand != FLOAT or self.backend is not Eager,
            backend=self.backend,
            threads=self.threads,
        )
