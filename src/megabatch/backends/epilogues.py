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
from .backend import Buffers

# Between exp(-60) and exp(60) float32 sums of any length keep their digits: no shift, and no check, is needed.
SAFE_LOGIT = 60.0
# Below it a sum of exponentials has lost digits to underflow, also where denormal numbers are flushed to zero.
SMALLEST_SUM = 1e-27

AXIS = {"rows": 1, "columns": 0}  # the axis that is summed away
Piece = dict[str, Tensor | float]  # of a State


def epilogue_of(spec: Spec, stats: bool, buffer: Buffers) -> "Softmax | Sigmoid":
    return (Softmax if spec.epilogue == "softmax" else Sigmoid)(spec, stats, buffer)


class _Epilogue:
    def __init__(self, spec: Spec, stats: bool, buffer: Buffers) -> None:
        self.spec, self.stats, self.buffer = spec, stats, buffer

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
            tile.targets.copy(logits, positives)
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

    def statistics(self, tile: Tile, logits: Tensor, bound: float, recompute: Callable[[], Tensor]) -> float:
        """Add the tile to the statistics of its rows and columns.

        Leaves exp(S - shift) in `logits` and returns the shift. Where no single shift serves all rows and columns, S is
        computed again, every row and column is shifted by its own maximum, S is left and NaN returned.
        """
        id_mask = self.id_mask(tile)
        self.exclude(tile, logits, id_mask)
        sides = ("rows", "columns") if tile.has_column_statistics(self.spec) else ("rows",)
        tops = {side: self.tops(tile, side, logits, id_mask) for side in sides} if self.stats else {}
        shift, is_safe = 0.0, bound <= SAFE_LOGIT
        if not is_safe:
            low, high = (bound.item() for bound in logits.aminmax())
            is_safe = low >= -SAFE_LOGIT and high <= SAFE_LOGIT
            shift = 0.0 if is_safe else _shift(high, logits.dtype)
        if shift:
            logits.sub_(shift)
        pieces = self._reduce(tile, sides, logits, shift, id_mask, is_safe)
        if not is_safe and not all(map(_is_sound, pieces)):
            shift, logits = math.nan, recompute()
            self.exclude(tile, logits, id_mask)
            pieces = [self._reduce_by_own_maximum(tile, side, logits, id_mask) for side in sides]
        for side, piece in zip(sides, pieces, strict=True):
            self._merge(tile, side, piece | tops.get(side, {}))
        return shift

    def _reduce_by_own_maximum(self, tile: Tile, side: str, logits: Tensor, id_mask: Tensor | None) -> Piece:
        peaks = logits.amax(AXIS[side], keepdim=True)
        shifted = logits - peaks.masked_fill(peaks == -math.inf, 0.0)
        return self._reduce(tile, (side,), shifted, peaks.view(-1), id_mask)[0]

    def _reduce(
        self,
        tile: Tile,
        sides: tuple[str, ...],
        shifted: Tensor,
        shift: Tensor | float,
        id_mask: Tensor | None,
        is_safe: bool = False,
    ) -> list[Piece]:
        """The statistics of each side. Turns shifted logits into exponentials; `is_safe`: of which none underflows."""
        pieces: list[Piece] = [self._sums(tile, side, shifted, shift, id_mask) for side in sides]
        targets = tile.targets
        if targets is not None and not is_safe:
            before = targets.of(shifted).to(torch.float64, copy=True)
        shifted.exp_()
        if targets is not None:
            # The logit with the rounding that its exponential has in the sum: the loss log(sum / exponential) is 0
            # where nothing else adds to the sum, and never below.
            exponentials = targets.of(shifted).double()
            target_logits = exponentials.log()
            if not is_safe:
                target_logits = torch.where(exponentials >= SMALLEST_SUM, target_logits, before)
        for side, piece in zip(sides, pieces, strict=True):
            piece["max"], piece["sum_exp"] = shift, shifted.sum(AXIS[side])
            if targets is not None:
                own = targets.of_side(side, shift) if isinstance(shift, Tensor) else shift
                piece["target"] = target_logits + own if not is_safe else target_logits
        return pieces

    def _sums(self, tile: Tile, side: str, shifted: Tensor, shift: Tensor | float, id_mask: Tensor | None) -> Piece:
        """Sums of logits: of the positives by id and, for smoothing, of all that count."""
        piece: Piece = {}
        mask = self.positive_mask(id_mask)
        if mask is not None or self.spec.label_smoothing:
            # Where nothing counts, the shift is -inf and counts are 0.
            finite = shift.double().clamp_min(torch.finfo(torch.float64).min) if isinstance(shift, Tensor) else shift
        if mask is not None:
            total, piece["positive_count"] = self.sum_where(tile, side, mask, shifted)
            piece["positive_sum"] = total + finite * piece["positive_count"]
        if self.spec.label_smoothing:
            total, piece["logit_count"] = self.sum_where(tile, side, shifted != -math.inf, shifted)
            piece["logit_sum"] = total + finite * piece["logit_count"]
        return piece

    def _merge(self, tile: Tile, side: str, piece: Piece) -> None:
        state = getattr(tile, side).state
        target_logits = piece.pop("target", None)
        state.merge(piece)
        if target_logits is not None:
            assert tile.targets is not None
            tile.targets.add_to_side(side, state["positive_sum"], target_logits)
            if "positive_count" in state:
                tile.targets.add_to_side(side, state["positive_count"], 1.0)

    def dlogits(self, tile: Tile, logits: Tensor, shift: float, bound: float, fresh: bool) -> Tensor:
        """dS = row_grad * (p - aim) of the rows and of the columns, from exp(S - shift), or from S (shift NaN).

        `fresh`: S was just computed and may be overwritten.
        """
        id_mask = self.id_mask(tile)
        if fresh:
            self.exclude(tile, logits, id_mask)
        blocks = [tile.rows, tile.columns] if self.spec.two_sided else [tile.rows]
        out = self.buffer("scratch", tile.shape)
        if math.isnan(shift):
            logits = logits if fresh else logits.clone()
            shift = _backward_shift(blocks, bound, logits.dtype)
            if not math.isnan(shift):
                (logits.sub_(shift) if shift else logits).exp_()
        if math.isnan(shift):
            _probabilities_by_own_maximum(blocks, logits, out)
        else:
            rows, *columns = (block.probability_factor(shift, logits.dtype) for block in blocks)
            if columns:
                torch.add(rows[:, None], columns[0], out=out).mul_(logits)
            else:
                torch.mul(logits, rows[:, None], out=out)
        self._subtract_aim(tile, blocks, out, id_mask)
        return out

    def _subtract_aim(self, tile: Tile, blocks: list[Block], dlogits: Tensor, id_mask: Tensor | None) -> None:
        smoothing, mask = self.spec.label_smoothing, self.positive_mask(id_mask)
        if tile.targets is None and mask is None and not smoothing:
            return
        shares = [_per_count(block, "positive_count", 1 - smoothing) for block in blocks]
        if tile.targets is not None:
            share = tile.targets.of_side("rows", shares[0])
            if len(shares) == 2:
                share = share + tile.targets.of_side("columns", shares[1])
            tile.targets.subtract(dlogits, share)
        if mask is not None or smoothing:
            spare = self.buffer("spare", tile.shape)
        if mask is not None:
            dlogits.sub_(torch.where(mask, _outer(shares, spare), dlogits.new_zeros(()), out=spare))
        if smoothing:
            dlogits.sub_(_outer([_per_count(block, "logit_count", smoothing) for block in blocks], spare))
            self.exclude(tile, dlogits, id_mask, 0.0)


class Sigmoid(_Epilogue):
    """Binary cross-entropy of every pair: softplus(S) for a negative, softplus(-S) for a positive."""

    def statistics(self, tile: Tile, logits: Tensor, bound: float, recompute: Callable[[], Tensor]) -> float:
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
        return math.nan

    def dlogits(self, tile: Tile, logits: Tensor, shift: float, bound: float, fresh: bool) -> Tensor:
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
            tile.targets.negate(values)
        mask = self.positive_mask(id_mask)
        if mask is not None:
            torch.where(mask, torch.neg(values, out=self.buffer("spare", tile.shape)), values, out=values)


def _shift(peak: float, dtype: torch.dtype) -> float:
    """Subtracted from the logits of a tile before their exponential. A whole number is subtracted from any logit near
    it without rounding, so a fitted positive cancels exactly."""
    if not math.isfinite(peak) or -20 <= peak <= SAFE_LOGIT:
        return 0.0
    return torch.tensor(math.ceil(peak - SAFE_LOGIT if peak > 0 else peak), dtype=dtype).item()


def _is_sound(piece: Piece) -> bool:
    assert isinstance(piece["sum_exp"], Tensor)
    low, high = piece["sum_exp"].aminmax()
    return low.item() >= SMALLEST_SUM and high.item() < math.inf


def _backward_shift(blocks: list[Block], bound: float, dtype: torch.dtype) -> float:
    """One shift for all exponentials of a tile, about the middle of the log-sum-exps; NaN where they lie too far apart
    for float32."""
    if bound <= SAFE_LOGIT:
        return 0.0
    lows, highs = zip(*(block.log_sum_exp_range for block in blocks), strict=True)
    low, high = min(lows), max(highs)
    if not high - low <= SAFE_LOGIT:
        return math.nan
    if -20 <= high <= SAFE_LOGIT:
        return 0.0
    return torch.tensor(math.ceil((low + high) / 2), dtype=dtype).item()


def _outer(vectors: list[Tensor], out: Tensor) -> Tensor:
    """rows[:, None], plus columns[None, :] where there are any."""
    rows = vectors[0].to(out.dtype)[:, None]
    return rows if len(vectors) == 1 else torch.add(rows, vectors[1].to(out.dtype), out=out)


def _per_count(block: Block, count: str, share: float) -> Tensor:
    row_grad = block.row_grad if share == 1 else block.row_grad * share
    return row_grad / block.state[count].clamp_min(1) if count in block.state else row_grad


def _probabilities_by_own_maximum(blocks: list[Block], logits: Tensor, out: Tensor) -> None:
    """row_grad * p with a shift for every row and one for every column: two exponentials per logit, for any spread.
    Overwrites the logits."""
    for block, shape, target in zip(blocks, [(-1, 1), (1, -1)], [out, logits], strict=False):
        shift, factor = block.state["max"], block.row_grad / block.state["sum_exp"]
        torch.sub(logits, shift.to(logits.dtype).view(shape), out=target).exp_()
        target.mul_(factor.to(logits.dtype).view(shape))
    if len(blocks) == 2:
        out.add_(logits)
