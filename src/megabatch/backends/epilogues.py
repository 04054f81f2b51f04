"""The epilogues of the eager backend: what happens to the logits of a tile between its products.

Letters: S the logits of a tile, [r, c], -inf where a pair does not count; dS = d loss / d S, up to a factor common to
all tiles. An epilogue works in place on S and on buffers of the same shape, in as few passes as it can.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec
from ..losses.state import OWN_MAX

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
    def __init__(self, spec: Spec, stats: bool, shift: float, buffer: Callable[[str, tuple[int, int]], Tensor]) -> None:
        self.spec, self.stats, self.shift, self.buffer = spec, stats, shift, buffer

    def id_mask(self, tile: Tile) -> Tensor | None:
        """The pairs of equal ids, if there are any and they mean something."""
        return None if self.spec.id_rule == "ignore" else tile.id_mask()

    def exclude(self, tile: Tile, values: Tensor, id_mask: Tensor | None, fill: float = -math.inf) -> None:
        """Cover the pairs that do not count, before anything takes a maximum or a sum."""
        if id_mask is not None and self.spec.id_rule == "mask":
            values.masked_fill_(id_mask, fill)
        if tile.is_diagonal:
            values.fill_diagonal_(fill)

    def positive_mask(self, id_mask: Tensor | None) -> Tensor | None:
        """The positives by id, apart from the targets."""
        return id_mask if self.spec.id_rule == "positive" else None

    def tops(self, tile: Tile, side: str, logits: Tensor, id_mask: Tensor | None) -> Piece:
        """The largest logit of every row (or column), and of its positives."""
        positives = self.buffer("scratch", tile.shape).fill_(-math.inf)
        if tile.targets is not None:
            tile.targets.put(positives, tile.targets.of(logits))
        mask = self.positive_mask(id_mask)
        if mask is not None:
            torch.where(mask, logits, positives, out=positives)
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
        id_mask = self.id_mask(tile)
        self.exclude(tile, logits, id_mask)
        sides = ("rows", "columns") if tile.has_column_statistics(self.spec) else ("rows",)
        pieces = {side: self.tops(tile, side, logits, id_mask) if self.stats else {} for side in sides}
        if self.shift == OWN_MAX:
            for side, piece in pieces.items():
                piece["max"] = logits.amax(AXIS[side])
                finite = piece["max"].clamp_min(torch.finfo(logits.dtype).min)
                # A mask is summed by way of the scratch buffer.
                buffer = "scratch" if id_mask is None and not self.spec.label_smoothing else "spare"
                shifted = torch.sub(logits, finite.unsqueeze(AXIS[side]), out=self.buffer(buffer, tile.shape))
                self._reduce(tile, {side: piece}, shifted, finite, id_mask)
        else:
            shifted = logits.sub_(self.shift) if self.shift else logits
            self._reduce(tile, pieces, shifted, self.shift, id_mask)

    def _reduce(
        self, tile: Tile, pieces: dict[str, Piece], shifted: Tensor, shift: Tensor | float, id_mask: Tensor | None
    ) -> None:
        """Complete the pieces of a State and merge them. Turns shifted logits into exponentials."""
        mask, targets = self.positive_mask(id_mask), tile.targets
        for side, piece in pieces.items():
            if mask is not None:
                total, count = self.sum_where(tile, side, mask, shifted)
                piece |= {"positive_sum": total + shift * count, "positive_count": count}
            if self.spec.label_smoothing:
                total, count = self.sum_where(tile, side, shifted != -math.inf, shifted)
                piece |= {"logit_sum": total + shift * count, "logit_count": count}
        if targets is not None and self.shift:
            before = targets.of(shifted).to(torch.float64, copy=True)
        shifted.exp_()
        if targets is not None:
            # The logit with the rounding that its exponential has in the sum: the loss log(sum / exponential) is 0
            # where nothing else adds to the sum, and never below.
            exponentials = targets.of(shifted).double()
            target_logits = exponentials.log()
            if self.shift:
                target_logits = torch.where(exponentials >= SMALLEST_SUM, target_logits, before)
        for side, piece in pieces.items():
            piece["sum_exp"] = shifted.sum(AXIS[side])
            state = getattr(tile, side).state
            state.merge(piece)
            if targets is not None:
                own_shift = targets.of_side(side, shift) if isinstance(shift, Tensor) else shift
                logit = target_logits + own_shift if self.shift else target_logits
                targets.add_to_side(side, state["positive_sum"], logit)
                if "positive_count" in state:
                    targets.add_to_side(side, state["positive_count"], 1.0)

    def dlogits(self, tile: Tile, logits: Tensor, fresh: bool) -> Tensor:
        """dS = row_grad * (p - aim) of the rows and of the columns, from what `statistics` left or, `fresh`, from S."""
        id_mask = self.id_mask(tile)
        blocks = [tile.rows, tile.columns] if self.spec.two_sided else [tile.rows]
        out = self.buffer("scratch", tile.shape)
        if fresh:
            self.exclude(tile, logits, id_mask)
        if self.shift == OWN_MAX:
            second = logits if fresh else self.buffer("logits", tile.shape)
            for block, axis, target in zip(blocks, (1, 0), (out, second), strict=False):
                torch.sub(logits, block.state["max"].to(logits.dtype).unsqueeze(axis), out=target).exp_()
                target.mul_(block.probability_factor.unsqueeze(axis))
                if target is not out:
                    out.add_(target)
        else:
            if fresh:
                (logits.sub_(self.shift) if self.shift else logits).exp_()
            torch.mul(logits, _outer([block.probability_factor for block in blocks], out), out=out)
        self._subtract_aim(tile, blocks, out, id_mask)
        return out

    def _subtract_aim(self, tile: Tile, blocks: list[Block], dlogits: Tensor, id_mask: Tensor | None) -> None:
        smoothing, mask = self.spec.label_smoothing, self.positive_mask(id_mask)
        if tile.targets is None and mask is None and not smoothing:
            return
        shares = [_per_count(block, "positive_count", 1 - smoothing) for block in blocks]
        if tile.targets is not None and "positive_count" not in tile.rows.state and tile.rows.has_unit_row_grad:
            tile.targets.add(dlogits, (smoothing - 1) * len(blocks))
        elif tile.targets is not None:
            sides = (tile.targets.of_side(side, share) for side, share in zip(AXIS, shares, strict=False))
            tile.targets.add(dlogits, -sum(sides))
        if mask is not None or smoothing:
            spare = self.buffer("spare", tile.shape)
        if mask is not None:
            dlogits.sub_(torch.where(mask, _outer(shares, spare), dlogits.new_zeros(()), out=spare))
        if smoothing:
            dlogits.sub_(_outer([_per_count(block, "logit_count", smoothing) for block in blocks], spare))
            self.exclude(tile, dlogits, id_mask, 0.0)


class Sigmoid(_Epilogue):
    """Binary cross-entropy of every pair: softplus(S) for a negative, softplus(-S) for a positive."""

    def statistics(self, tile: Tile, logits: Tensor) -> None:
        """Add the tile to the statistics of its rows. Leaves S, negated where a pair is positive."""
        id_mask = self.id_mask(tile)
        self.exclude(tile, logits, id_mask)
        rows, columns, targets = tile.rows.state, tile.columns.state, tile.targets
        if self.stats:
            rows.merge(self.tops(tile, "rows", logits, id_mask))
            columns.merge(self.tops(tile, "columns", logits, id_mask))
            mask = self.positive_mask(id_mask)
            if mask is not None:
                total, count = self.sum_where(tile, "rows", mask, logits)
                rows.merge({"positive_sum": total, "positive_count": count})
            if targets is not None:
                targets.add_to_side("rows", rows["positive_sum"], targets.of(logits).double())
                targets.add_to_side("rows", rows["positive_count"], 1.0)
        self._negate_positives(tile, logits, id_mask)
        scratch = self.buffer("scratch", tile.shape)
        torch.ops.aten.softplus.out(logits, 1, 40, out=scratch)
        rows.merge({"softplus_sum": scratch.sum(1)})

    def dlogits(self, tile: Tile, logits: Tensor, fresh: bool) -> Tensor:
        """dS, from S as `statistics` leaves it, or fresh."""
        id_mask = self.id_mask(tile)
        if fresh:
            self.exclude(tile, logits, id_mask)
            self._negate_positives(tile, logits, id_mask)
        out = torch.sigmoid(logits, out=self.buffer("scratch", tile.shape))
        self._negate_positives(tile, out, id_mask)
        return out if tile.rows.has_unit_row_grad else out.mul_(tile.rows.row_grad.to(out.dtype)[:, None])

    def _negate_positives(self, tile: Tile, values: Tensor, id_mask: Tensor | None) -> None:
        if tile.targets is not None:
            tile.targets.put(values, -tile.targets.of(values))
        mask = self.positive_mask(id_mask)
        if mask is not None:
            torch.where(mask, torch.neg(values, out=self.buffer("spare", tile.shape)), values, out=values)


def _outer(vectors: list[Tensor], out: Tensor) -> Tensor:
    """rows[:, None], plus columns[None, :] where there are any."""
    rows = vectors[0].to(out.dtype)[:, None]
    return rows if len(vectors) == 1 else torch.add(rows, vectors[1].to(out.dtype), out=out)


def _per_count(block: Block, count: str, share: float) -> Tensor:
    row_grad = block.row_grad if share == 1 else block.row_grad * share
    return row_grad / block.state[count].clamp_min(1) if count in block.state else row_grad
