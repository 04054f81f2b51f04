"""The epilogues of the eager backend: what happens to the logits of a tile between its products.

Letters: S the logits of a tile, [r, c], -inf where a pair does not count; dS = d loss / d S, up to a factor common to
all tiles; `same` the positives by id, apart from targets. An epilogue works in place on S and on buffers of the same
shape, in as few passes as it can.
"""

import math

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from ..losses.state import OWN_MAX
from .workspace import Buffers

# Between exp(-60) and exp(60) float32 sums of any length keep their digits.
SAFE_LOGIT = 60.0
# Up to here one shift for all logits keeps most rows' sums in that range. CLIP's scale ends at 100.
LARGEST_SHIFTED = 100.5
# Below it a sum of exponentials has lost digits to underflow, also where denormal numbers are flushed to zero.
SMALLEST_SUM = 1e-24

AXIS = {"rows": 1, "columns": 0}  # the axis that is summed away
Piece = dict[str, Tensor]  # of a State


def common_shift(largest_logit: float) -> float:
    """What is subtracted from all logits before their exponential, or OWN_MAX. It is a whole number, so that it is
    subtracted without rounding."""
    if largest_logit <= SAFE_LOGIT:
        return 0.0
    return math.ceil(largest_logit - SAFE_LOGIT) if largest_logit <= LARGEST_SHIFTED else OWN_MAX


class _Epilogue:
    def __init__(self, spec: Spec, stats: bool, shift: float, buffer: Buffers) -> None:
        self.spec, self.stats, self.shift, self.buffer = spec, stats, shift, buffer

    def masks(self, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
        """The pairs of equal ids, where a tile has any: those that do not count, and those that are positives."""
        same = None if self.spec.id_rule == "ignore" else tile.id_mask()
        return (same, None) if self.spec.id_rule == "mask" else (None, same)

    def exclude(self, tile: Tile, values: Tensor, masked: Tensor | None, fill: float = -math.inf) -> None:
        """Cover the pairs that do not count, before anything takes a maximum or a sum."""
        if masked is not None:
            values.masked_fill_(masked, fill)
        if tile.is_diagonal:
            values.fill_diagonal_(fill)

    def tops(self, tile: Tile, side: str, logits: Tensor, same: Tensor | None) -> Piece:
        """The largest logit of every row (or column), and of its positives."""
        positives = self.buffer("scratch", tile.shape).fill_(-math.inf)
        if tile.targets is not None:
            tile.targets.put(positives, tile.targets.of(logits))
        if same is not None:
            torch.where(same, logits, positives, out=positives)
        return {"top": logits.amax(AXIS[side]), "top_positive": positives.amax(AXIS[side])}

    def sum_where(self, tile: Tile, side: str, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and number of the masked values of every row (or column)."""
        scratch = self.buffer("scratch", tile.shape)
        count = scratch.copy_(mask).sum(AXIS[side]).double()
        return torch.where(mask, values, values.new_zeros(()), out=scratch).sum(AXIS[side]).double(), count


class Softmax(_Epilogue):
    """Cross-entropy of rows and, where they have a loss too, of columns."""

    def statistics(self, tile: Tile, logits: Tensor) -> None:
        """Add the tile to the statistics of its rows and columns. Leaves exp(S - shift), or S with OWN_MAX."""
        masked, same = self.masks(tile)
        self.exclude(tile, logits, masked)
        sides = ("rows", "columns") if tile.has_column_statistics(self.spec) else ("rows",)
        pieces = {side: self.tops(tile, side, logits, same) if self.stats else {} for side in sides}
        if self.shift == OWN_MAX:
            may_be_empty = masked is not None or tile.is_diagonal
            positive = None if tile.targets is None else tile.targets.of(logits).to(torch.float64, copy=True)
            for side, piece in pieces.items():
                piece["max"] = finite = logits.amax(AXIS[side])
                if may_be_empty:
                    finite = finite.clamp_min(torch.finfo(logits.dtype).min)
                # A mask is summed by way of the scratch buffer.
                buffer = "scratch" if same is None and not self.spec.label_smoothing else "spare"
                shifted = torch.sub(logits, finite.unsqueeze(AXIS[side]), out=self.buffer(buffer, tile.shape))
                self._reduce(tile, {side: piece}, shifted, finite, same, positive)
        else:
            shifted = logits.sub_(self.shift) if self.shift else logits
            self._reduce(tile, pieces, shifted, self.shift, same)

    def _reduce(
        self,
        tile: Tile,
        pieces: dict[str, Piece],
        shifted: Tensor,
        shift: Tensor | float,
        same: Tensor | None,
        target_logits: Tensor | None = None,
    ) -> None:
        """Complete the pieces of a State and merge them. Turns shifted logits into exponentials."""
        targets = tile.targets
        for side, piece in pieces.items():
            if same is not None:
                total, count = self.sum_where(tile, side, same, shifted)
                piece |= {"positive_sum": total + shift * count, "positive_count": count}
            if self.spec.label_smoothing:
                total, count = self.sum_where(tile, side, shifted != -math.inf, shifted)
                piece |= {"logit_sum": total + shift * count, "logit_count": count}
        if targets is not None and self.shift > 0:
            before = targets.of(shifted).to(torch.float64, copy=True)
        shifted.exp_()
        if targets is not None and self.shift != OWN_MAX:
            # The logit with the rounding that its exponential has in the sum: the loss log(sum / exponential) is 0
            # where nothing else adds to the sum, and never below.
            exponentials = targets.of(shifted).double()
            target_logits = exponentials.log()
            if self.shift > 0:
                target_logits = torch.where(exponentials >= SMALLEST_SUM, target_logits, before) + self.shift
        for side, piece in pieces.items():
            piece["sum_exp"] = shifted.sum(AXIS[side])
            block = getattr(tile, side)
            block.merge(piece)
            state = block.state
            if targets is not None and target_logits is not None:
                targets.add_to_side(side, state["positive_sum"], target_logits)
                if "positive_count" in state:
                    targets.add_to_side(side, state["positive_count"], 1.0)

    def dlogits(self, tile: Tile, logits: Tensor, fresh: bool) -> Tensor:
        """dS = row_grad * (probability - label) of rows and columns, from what `statistics` left or, if fresh, S."""
        masked, same = self.masks(tile)
        blocks = [tile.rows, tile.columns] if self.spec.two_sided else [tile.rows]
        out = self.buffer("scratch", tile.shape)
        if fresh:
            self.exclude(tile, logits, masked)
        if self.shift == OWN_MAX:
            second = logits if fresh else self.buffer("logits", tile.shape)
            for block, axis, target in zip(blocks, (1, 0), (out, second), strict=False):
                max_ = block.state["max"].to(logits.dtype) if block.float_max is None else block.float_max
                torch.sub(logits, max_.unsqueeze(axis), out=target).exp_()
                factor = block.probability_factor.unsqueeze(axis)
                target.mul_(factor) if target is out else out.addcmul_(target, factor)
        else:
            if fresh:
                (logits.sub_(self.shift) if self.shift else logits).exp_()
            torch.mul(logits, _outer([block.probability_factor for block in blocks], out), out=out)
        self._subtract_labels(tile, blocks, out, same)
        if self.spec.label_smoothing:
            self.exclude(tile, out, masked, 0.0)
        return out

    def _subtract_labels(self, tile: Tile, blocks: list[Block], dlogits: Tensor, same: Tensor | None) -> None:
        smoothing, targets = self.spec.label_smoothing, tile.targets
        if targets is not None and "positive_count" not in tile.rows.state and tile.rows.row_grad is None:
            targets.add(dlogits, (smoothing - 1) * len(blocks))
        elif targets is not None:
            shares = (targets.of_side(side, getattr(tile, side).positive_share) for side in list(AXIS)[: len(blocks)])
            targets.add(dlogits, (smoothing - 1) * sum(shares))
        if same is not None:
            spare = self.buffer("spare", tile.shape)
            share = _outer([block.positive_share for block in blocks], spare)
            dlogits.sub_(torch.where(same, share, dlogits.new_zeros(()), out=spare), alpha=1 - smoothing)
        if smoothing:
            share = _outer([block.uniform_share for block in blocks], self.buffer("spare", tile.shape))
            dlogits.sub_(share, alpha=smoothing)


class Sigmoid(_Epilogue):
    """Binary cross-entropy of every pair: softplus(S) for a negative, softplus(-S) for a positive."""

    def statistics(self, tile: Tile, logits: Tensor) -> None:
        """Add the tile to the statistics of its rows. Leaves S, negated where a pair is positive."""
        masked, same = self.masks(tile)
        self.exclude(tile, logits, masked)
        targets, piece = tile.targets, {}
        if self.stats:
            piece = self.tops(tile, "rows", logits, same)
            tile.columns.merge(self.tops(tile, "columns", logits, same))
            if same is not None:
                total, count = self.sum_where(tile, "rows", same, logits)
                piece |= {"positive_sum": total, "positive_count": count}
        if self.stats and targets is not None:
            positive_logits = targets.of(logits).to(torch.float64, copy=True)
        self._negate_positives(tile, logits, same)
        softplus = torch.ops.aten.softplus.out(logits, 1, 40, out=self.buffer("scratch", tile.shape))
        tile.rows.merge({**piece, "softplus_sum": softplus.sum(1)})
        if self.stats and targets is not None:
            targets.add_to_side("rows", tile.rows.state["positive_sum"], positive_logits)
            targets.add_to_side("rows", tile.rows.state["positive_count"], 1.0)

    def dlogits(self, tile: Tile, logits: Tensor, fresh: bool) -> Tensor:
        """dS, from S as `statistics` leaves it, or fresh."""
        masked, same = self.masks(tile)
        if fresh:
            self.exclude(tile, logits, masked)
            self._negate_positives(tile, logits, same)
        out = torch.sigmoid(logits, out=self.buffer("scratch", tile.shape))
        self._negate_positives(tile, out, same)
        return out if tile.rows.row_grad is None else out.mul_(tile.rows.row_grad.to(out.dtype)[:, None])

    def _negate_positives(self, tile: Tile, values: Tensor, same: Tensor | None) -> None:
        if tile.targets is not None:
            tile.targets.put(values, -tile.targets.of(values))
        if same is not None:
            torch.where(same, torch.neg(values, out=self.buffer("spare", tile.shape)), values, out=values)


def _outer(vectors: list[Tensor], out: Tensor) -> Tensor:
    """rows[:, None], plus columns[None, :] where there are any."""
    rows = vectors[0].to(out.dtype)[:, None]
    return rows if len(vectors) == 1 else torch.add(rows, vectors[1].to(out.dtype), out=out)
