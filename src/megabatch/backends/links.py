"""The epilogues of the eager backend: what happens to a tile's logits between its products.

Letters: S the tile's logits, [r, c], -inf where a pair does not count; G = d loss / d S, up to a factor common to all
tiles. Both links work in place on S with one scratch buffer of the same shape, and make as few passes as they can.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..losses.block import Block, Tile
from ..losses.spec import Spec

# A sum of exponentials below this has lost digits to gradual underflow: its row lies too far under the tile's shift.
SMALLEST_TOTAL = 1e-30
# Log-sum-exps this far apart can share one shift: float32 still holds what lies 27 below the lower one.
WIDEST_SPREAD = 60.0

AXIS = {"rows": 1, "columns": 0}  # the axis that is summed away


def link_of(spec: Spec, stats: bool) -> "Softmax | Sigmoid":
    return Softmax(spec, stats) if spec.link == "softmax" else Sigmoid(spec, stats)


class _Link:
    def __init__(self, spec: Spec, stats: bool) -> None:
        self.spec = spec
        self.stats = stats

    def same(self, tile: Tile) -> Tensor | None:
        """The mask of equal ids, if there are any and they mean something."""
        return None if self.spec.same == "ignore" else tile.same()

    def hide(self, tile: Tile, values: Tensor, same: Tensor | None, by: float = -math.inf) -> None:
        """Cover the pairs that do not count, before anything takes a maximum or a sum."""
        if same is not None and self.spec.same == "mask":
            values.masked_fill_(same, by)
        if tile.diagonal:
            values.fill_diagonal_(by)

    def _positive_mask(self, same: Tensor | None) -> Tensor | None:
        return same if self.spec.same == "positive" else None

    def _positives(
        self, tile: Tile, values: Tensor, same: Tensor | None, side: str, scratch: Tensor
    ) -> dict[str, Tensor]:
        """Sum and number of every row's (or column's) positives, targets not included."""
        mask = self._positive_mask(same)
        if mask is None:
            nothing = torch.zeros(tile.shape[1 - AXIS[side]], dtype=torch.float64, device=values.device)
            return {"positive": nothing, "count": nothing}
        total = torch.where(mask, values, values.new_zeros(()), out=scratch).sum(AXIS[side]).double()
        return {"positive": total, "count": scratch.copy_(mask).sum(AXIS[side]).double()}

    def _at_targets(self, tile: Tile, values: Tensor) -> Tensor:
        """Of every row, the value at its target, or at any column where its target is not here."""
        if tile.targets is None:
            return values.new_empty(0)
        return values.gather(1, tile.targets[0][:, None])[:, 0].double()

    def _add_targets(self, tile: Tile, side: str, piece: dict[str, Tensor], logits: Tensor) -> None:
        if tile.targets is None:
            return
        column, here = tile.targets
        found = torch.where(here, logits, 0.0)
        if side == "rows":
            piece["positive"] = piece["positive"] + found
            piece["count"] = piece["count"] + here
        else:
            piece["positive"] = piece["positive"].index_add(0, column, found)
            piece["count"] = piece["count"].index_add(0, column, here.double())

    def _best(self, tile: Tile, logits: Tensor, same: Tensor | None, side: str, scratch: Tensor) -> dict[str, Tensor]:
        """Largest logit of every row (or column), and of its positives."""
        best = logits.amax(AXIS[side])
        scratch.fill_(-math.inf)
        if tile.targets is not None:
            column, here = tile.targets
            found = torch.where(here, logits.gather(1, column[:, None])[:, 0], -math.inf)
            scratch.scatter_(1, column[:, None], found[:, None])
        mask = self._positive_mask(same)
        if mask is not None:
            torch.where(mask, logits, scratch, out=scratch)
        return {"best": best, "best_positive": scratch.amax(AXIS[side])}


class Softmax(_Link):
    """Rows, and columns where they have a loss too, as distributions."""

    def _sides(self, tile: Tile) -> tuple[str, ...]:
        return ("rows", "columns") if tile.folds_columns(self.spec) else ("rows",)

    def fold(self, tile: Tile, logits: Tensor, scratch: Tensor, again: Callable[[], Tensor]) -> float:
        """Add the tile to the statistics of its rows and columns.

        Leaves exp(S - shift) in `logits` and returns the shift. Where no single shift serves all rows and columns, S is
        formed once more (`again`), every row and column is shifted by its own maximum, S is left and NaN returned.
        """
        same = self.same(tile)
        self.hide(tile, logits, same)
        sides = self._sides(tile)
        extra = {side: self._best(tile, logits, same, side, scratch) if self.stats else {} for side in sides}
        peak = logits.amax().item()
        shift = _shift(peak, peak, logits.dtype)
        if shift:
            logits.sub_(shift)
        at_targets = self._at_targets(tile, logits)
        pieces = {side: self._piece(logits, tile, same, side, scratch) for side in sides}
        logits.exp_()
        at_targets = self._as_summed(tile, at_targets, logits)
        for side in sides:
            self._complete(pieces[side], tile, side, at_targets, logits, shift)
        if not all(_sound(piece["total"]) for piece in pieces.values()):
            shift = math.nan
            logits = again()
            self.hide(tile, logits, same)
            for side in sides:
                peaks = logits.amax(AXIS[side], keepdim=True)
                own = torch.sub(logits, peaks.masked_fill(peaks == -math.inf, 0.0), out=scratch)
                at_targets = self._at_targets(tile, own)
                pieces[side] = self._piece(own, tile, same, side, scratch=torch.empty_like(own))
                own.exp_()
                self._complete(pieces[side], tile, side, self._as_summed(tile, at_targets, own), own, peaks.view(-1))
        for side in sides:
            getattr(tile, side).state.merge(pieces[side] | extra[side])
        return shift

    def _piece(self, shifted: Tensor, tile: Tile, same: Tensor | None, side: str, scratch: Tensor) -> dict[str, Tensor]:
        """What one side keeps of its shifted logits, as long as they are not exponentials yet."""
        piece = self._positives(tile, shifted, same, side, scratch)
        if self.spec.smoothing:
            counts = shifted != -math.inf
            piece["valid"] = scratch.copy_(counts).sum(AXIS[side]).double()
            torch.where(counts, shifted, shifted.new_zeros(()), out=scratch)
            piece["everything"] = scratch.sum(AXIS[side]).double()
        return piece

    def _as_summed(self, tile: Tile, at_targets: Tensor, exponentials: Tensor) -> Tensor:
        """The targets' logits with the rounding that their exponentials have in a total.

        A row's loss is log(total / exponential of its target): from the same numbers it is 0 where nothing else adds to
        the total, and never below.
        """
        powers = self._at_targets(tile, exponentials)
        return torch.where(powers >= SMALLEST_TOTAL, powers.log(), at_targets)

    def _complete(
        self,
        piece: dict[str, Tensor],
        tile: Tile,
        side: str,
        at_targets: Tensor,
        exponentials: Tensor,
        shift: Tensor | float,
    ) -> None:
        """Add the exponentials to a piece, and the shift to the sums of what was shifted."""
        self._add_targets(tile, side, piece, at_targets)
        piece["total"] = exponentials.sum(AXIS[side])
        piece["shift"] = torch.full_like(piece["count"], shift) if isinstance(shift, float) else shift.double()
        if isinstance(shift, Tensor) or shift:
            finite = piece["shift"].clamp_min(torch.finfo(torch.float64).min)  # where nothing counts, counts are 0
            piece["positive"] = piece["positive"] + finite * piece["count"]
            if self.spec.smoothing:
                piece["everything"] = piece["everything"] + finite * piece["valid"]

    def slope(self, tile: Tile, logits: Tensor, scratch: Tensor, shift: float, fresh: bool, out: Tensor) -> Tensor:
        """Turn S (or, with a shift, exp(S - shift)) into G = pull * (p - aim), of the rows and of the columns."""
        same = self.same(tile)
        if fresh:
            self.hide(tile, logits, same)
        blocks = [tile.rows, tile.columns] if self.spec.two_sided else [tile.rows]
        if math.isnan(shift):
            low, high = zip(*(block.log_sum_exp_range for block in blocks), strict=True)
            if max(high) - min(low) <= WIDEST_SPREAD:
                shift = _shift(max(high), (max(high) + min(low)) / 2, logits.dtype)
                logits = torch.exp(torch.sub(logits, shift, out=out) if shift else logits, out=out)
        if math.isnan(shift):
            _own_slopes(blocks, logits, scratch, out)
        else:
            factors = [block.pull * block.state.exponential(shift) for block in blocks]
            torch.mul(logits, _outer(factors, scratch), out=out)
        self._subtract_aim(tile, blocks, out, scratch, same)
        return out

    def _subtract_aim(
        self, tile: Tile, blocks: list[Block], slope: Tensor, scratch: Tensor, same: Tensor | None
    ) -> None:
        smoothing, mask = self.spec.smoothing, self._positive_mask(same)
        if tile.targets is None and mask is None and not smoothing:
            return
        shares = [(1 - smoothing) * block.pull / block.state["count"].clamp_min(1) for block in blocks]
        if tile.targets is not None:
            column, here = tile.targets
            share = shares[0] + shares[1][column] if len(shares) == 2 else shares[0]
            slope.scatter_add_(1, column[:, None], torch.where(here, -share, 0.0).to(slope.dtype)[:, None])
        if mask is not None:
            slope.sub_(torch.where(mask, _outer(shares, scratch), slope.new_zeros(()), out=scratch))
        if smoothing:
            slope.sub_(_outer([smoothing * b.pull / b.state["valid"].clamp_min(1) for b in blocks], scratch))
            self.hide(tile, slope, same, 0.0)


class Sigmoid(_Link):
    """Every pair by itself: softplus(S) for a negative, softplus(-S) for a positive."""

    def fold(self, tile: Tile, logits: Tensor, scratch: Tensor, again: Callable[[], Tensor]) -> float:
        """Add the tile to the statistics of its rows. Leaves S, negated where a pair is positive."""
        same = self.same(tile)
        self.hide(tile, logits, same)
        rows, columns = tile.rows.state, tile.columns.state
        piece: dict[str, Tensor] = {}
        if self.stats:
            piece = self._best(tile, logits, same, "rows", scratch)
            columns.merge(self._best(tile, logits, same, "columns", scratch))
            piece |= self._positives(tile, logits, same, "rows", scratch)
            self._add_targets(tile, "rows", piece, self._at_targets(tile, logits))
        self._negate_positives(tile, logits, same, scratch)
        torch.ops.aten.softplus.out(logits, 1, 40, out=scratch)
        rows.merge(piece | {"total": scratch.sum(1)})
        return math.nan

    def slope(self, tile: Tile, logits: Tensor, scratch: Tensor, shift: float, fresh: bool, out: Tensor) -> Tensor:
        """Turn S, as `fold` leaves it or fresh, into G."""
        same = self.same(tile)
        if fresh:
            self.hide(tile, logits, same)
            self._negate_positives(tile, logits, same, scratch)
        torch.sigmoid(logits, out=out)
        self._negate_positives(tile, out, same, scratch)
        return out.mul_(tile.rows.pull.to(out.dtype)[:, None])

    def _negate_positives(self, tile: Tile, values: Tensor, same: Tensor | None, scratch: Tensor) -> None:
        if tile.targets is not None:
            column, here = tile.targets
            found = values.gather(1, column[:, None])
            values.scatter_(1, column[:, None], torch.where(here[:, None], -found, found))
        mask = self._positive_mask(same)
        if mask is not None:
            torch.where(mask, torch.neg(values, out=scratch), values, out=values)


def _shift(highest: float, wanted: float, dtype: torch.dtype) -> float:
    """What to subtract from a tile's logits before their exponential: about `wanted`, or nothing where nothing will do.

    Whole numbers: one is subtracted without rounding from any logit near it, so a fitted positive cancels exactly, and
    the backward walk may shift by another number and still see the same exponentials.
    """
    if not math.isfinite(wanted) or -20 <= highest <= 60:
        return 0.0
    return torch.tensor(math.ceil(wanted), dtype=dtype).item()


def _sound(total: Tensor) -> bool:
    low, high = total.aminmax()
    return low.item() >= SMALLEST_TOTAL and high.item() < math.inf


def _outer(vectors: list[Tensor], scratch: Tensor) -> Tensor:
    """rows[:, None], plus columns[None, :] where there are any."""
    rows = vectors[0].to(scratch.dtype)[:, None]
    return rows if len(vectors) == 1 else torch.add(rows, vectors[1].to(scratch.dtype), out=scratch)


def _own_slopes(blocks: list[Block], logits: Tensor, scratch: Tensor, out: Tensor) -> None:
    """pull * p with a shift for every row and one for every column: two exponentials per logit, for any spread."""
    for block, shape, target in zip(blocks, [(-1, 1), (1, -1)], [scratch, out], strict=False):
        shift, factor = block.state["shift"], block.pull / block.state["total"]
        torch.sub(logits, shift.to(logits.dtype).view(shape), out=target).exp_()
        target.mul_(factor.to(logits.dtype).view(shape))
    if len(blocks) == 1:
        out.copy_(scratch)
    else:
        out.add_(scratch)
