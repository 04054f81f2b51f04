"""The kernels of the triton backend: one matrix product over a tile, and what its epilogue makes of every block.

Letters: X, Y the features of the tile's rows and columns; P = X Y^T; S = scale * P + bias, its logits, -inf where a
pair does not count; G = d loss / d S, the slope, up to a factor common to all tiles.

The rules that keep them right:
- a block beyond the tile's edge reads the last row again and is hidden before any maximum, sum or store;
- offsets are 64-bit: row * stride passes 2^31 long before memory ends;
- rows and columns have a shift each, so that none underflows because of another;
- forward and backward form P and S by the same instructions: a fitted positive cancels exactly;
- no atomics: every program writes where no other does, and partial results are added up in a fixed order.

And the one that keeps them fast: an epilogue holds a part of its block at a time, and looks at positives only where
there are some, so that registers are enough.
"""

import triton
import triton.language as tl

# Partial results that a block leaves of each of its rows and of its columns, in this order.
PEAK, TOTAL, POSITIVE, COUNT = (tl.constexpr(slot) for slot in range(4))
EVERYTHING, VALID = tl.constexpr(4), tl.constexpr(5)  # only where labels are smoothed
LOWEST = tl.constexpr(float("-inf"))


# What no instruction gets better by: a launch that differs in nothing else is not compiled anew.
_ANY_NUMBER = ["num_rows", "num_columns", "x_state_stride", "y_state_stride", "column_start", "products_stride"]
_ANY_ADDRESS = ["x_norm", "y_norm", "x_ids", "y_ids", "target", "x_state", "y_state", "x_pull", "y_pull", "products"]
_ANY_ADDRESS += ["x_partials", "y_partials", "sums"]


@triton.jit(do_not_specialize=_ANY_NUMBER, do_not_specialize_on_alignment=_ANY_ADDRESS)
def tile_kernel(
    # of the rows and the columns: features, 1 / lengths, ids, and what the backward knows of them
    x,
    y,
    x_norm,
    y_norm,
    x_ids,
    y_ids,
    target,
    x_state,
    y_state,
    x_pull,
    y_pull,
    # what comes out, or in: P; partial statistics of rows and columns; G; sums of G and of G * P
    products,
    x_partials,
    y_partials,
    slope,
    sums,
    num_rows,
    num_columns,
    width,
    x_stride,
    x_step,
    y_stride,
    y_step,
    x_state_stride,
    y_state_stride,
    products_stride,
    slope_stride,
    column_start,
    scale,
    bias,
    smoothing,
    # the loss, and this tile: do ids or targets matter here, is it on the diagonal
    LINK: tl.constexpr,
    SAME: tl.constexpr,
    IDS: tl.constexpr,
    TARGETS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    # what is done: P read, rather than formed; or written; statistics; the slope; its sums; for rows only, or both
    GIVEN: tl.constexpr,
    KEEP: tl.constexpr,
    FOLD: tl.constexpr,
    PUSH: tl.constexpr,
    SUM: tl.constexpr,
    BOTH: tl.constexpr,
    # where the fields of a state are
    SHIFT_AT: tl.constexpr,
    TOTAL_AT: tl.constexpr,
    COUNT_AT: tl.constexpr,
    VALID_AT: tl.constexpr,
    LIFT: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BAND: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One block of a tile: statistics of its rows and columns (FOLD), its slope (PUSH), its products (KEEP)."""
    down, across, blocks_down, blocks_across = _place(num_rows, num_columns, BLOCK_ROWS, BLOCK_COLUMNS, BAND)
    row = down * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if not GIVEN:
        column = across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        block = _multiply(
            x, y, tl.minimum(row, num_rows - 1), tl.minimum(column, num_columns - 1), width, x_stride, x_step, y_stride,
            y_step, EVEN_WIDTH, PRECISION, WIDEN, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_WIDTH,
        )  # fmt: skip
    POSITIVES: tl.constexpr = TARGETS or (IDS and SAME == "positive")
    PART: tl.constexpr = BLOCK_COLUMNS // PARTS
    nothing, lowest = tl.zeros((BLOCK_ROWS,), tl.float32), tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
    peak, total, found, count, everything, valid, best = lowest, nothing, nothing, nothing, nothing, nothing, lowest
    slopes, weighted = 0.0, 0.0
    for index in tl.static_range(PARTS):
        column = across * BLOCK_COLUMNS + index * PART + tl.arange(0, PART)
        here = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        if GIVEN:
            at = products + row[:, None].to(tl.int64) * products_stride + column[None, :]
            p = tl.load(at, mask=here, other=0.0)
        else:
            p = _part(block, index, PARTS, BLOCK_ROWS, BLOCK_COLUMNS)
            if x_norm is not None:
                norm = tl.load(x_norm + row, mask=row < num_rows, other=0.0)[:, None]
                if y_norm is not None:  # first both, so that (i, j) and (j, i) are rounded alike
                    norm = norm * tl.load(y_norm + column, mask=column < num_columns, other=0.0)[None, :]
                p *= norm
            elif y_norm is not None:
                p *= tl.load(y_norm + column, mask=column < num_columns, other=0.0)[None, :]
        if KEEP:
            tl.store(products + row[:, None].to(tl.int64) * products_stride + column[None, :], p, mask=here)
        if FOLD or PUSH:
            at_target = _target(target, row, num_rows, num_columns, column_start, TARGETS)
            s = _logits(
                p,
                row,
                column,
                at_target,
                x_ids,
                y_ids,
                num_rows,
                num_columns,
                scale,
                bias,
                SAME,
                IDS,
                DIAGONAL,
                TARGETS,
            )
            positive = _positives(s, row, column, at_target, x_ids, y_ids, num_rows, num_columns, SAME, IDS, TARGETS)
        if FOLD:
            if LINK == "sigmoid":
                total += tl.sum(_softplus(tl.where(positive, -s, s)), 1)
            if LINK == "softmax" or STATS:
                # The rows: what they have met in earlier parts is moved to the peak they have now.
                higher = tl.maximum(peak, tl.max(s, 1))
                moved = _finite(peak) - _finite(higher)
                below = s - _finite(higher)[:, None]
                if LINK == "softmax":
                    total = total * tl.exp(peak - _finite(higher)) + tl.sum(tl.exp(below), 1)
                if SMOOTHING:
                    everything += valid * moved + tl.sum(tl.where(s == LOWEST, 0.0, below), 1)
                    valid += tl.sum((s != LOWEST).to(tl.float32), 1)
                peak = higher
                if BOTH:
                    columns_at = y_partials + down.to(tl.int64) * num_columns + column
                    slot = blocks_down.to(tl.int64) * num_columns
                    column_peak = _fold_columns(s, columns_at, slot, column < num_columns, LINK, SMOOTHING)
                if POSITIVES:  # of which most blocks have none
                    found += count * moved
                    if tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0:
                        found += tl.sum(tl.where(positive, below, 0.0), 1)
                        count += tl.sum(positive.to(tl.float32), 1)
                        best = tl.maximum(best, tl.max(tl.where(positive, s, LOWEST), 1))
                        if BOTH:
                            _fold_columns_positives(
                                s, positive, column_peak, columns_at, slot, column < num_columns, SMOOTHING, STATS
                            )
                    elif BOTH:
                        _fold_no_positives(column_peak, columns_at, slot, column < num_columns, SMOOTHING, STATS)
        if PUSH:
            if LINK == "softmax":
                g = _softmax_slope(
                    s, positive, row, column, x_state, y_state, x_state_stride, y_state_stride, x_pull, y_pull,
                    num_rows, num_columns, smoothing, SHIFT_AT, TOTAL_AT, COUNT_AT, VALID_AT, SMOOTHING, BOTH,
                )  # fmt: skip
            else:
                pull = tl.load(x_pull + row, mask=row < num_rows, other=0.0).to(tl.float32)
                g = _sigmoid(s, positive) * pull[:, None]
            if SUM:
                slopes += tl.sum(tl.sum(g, 1), 0)
                weighted += tl.sum(tl.sum(g * p, 1), 0)
            if LIFT != 0:
                at = slope + row[:, None].to(tl.int64) * slope_stride + column[None, :]
                tl.store(at, (g * LIFT).to(slope.dtype.element_ty), mask=here)
    if FOLD:
        at, slot = x_partials + across.to(tl.int64) * num_rows + row, blocks_across.to(tl.int64) * num_rows
        tl.store(at + TOTAL * slot, total, mask=row < num_rows)
        if LINK == "softmax" or STATS:
            tl.store(at + PEAK * slot, peak, mask=row < num_rows)
        if POSITIVES:
            tl.store(at + POSITIVE * slot, found, mask=row < num_rows)
            tl.store(at + COUNT * slot, count, mask=row < num_rows)
            if STATS:
                tl.store(at + (4 + 2 * SMOOTHING) * slot, best, mask=row < num_rows)
        if SMOOTHING:
            tl.store(at + EVERYTHING * slot, everything, mask=row < num_rows)
            tl.store(at + VALID * slot, valid, mask=row < num_rows)
    if SUM:
        at = sums + 2 * (down.to(tl.int64) * blocks_across + across)
        tl.store(at, slopes)
        tl.store(at + 1, weighted)


@triton.jit
def _place(num_rows, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """Which block this program has. Neighbours in time share rows and columns, which then are in the cache."""
    blocks_down = tl.cdiv(num_rows, BLOCK_ROWS)
    blocks_across = tl.cdiv(num_columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    band = program // (BAND * blocks_across)
    first = band * BAND
    height = tl.minimum(blocks_down - first, BAND)
    inside = program - band * BAND * blocks_across
    return first + inside % height, inside // height, blocks_down, blocks_across


@triton.jit
def _multiply(
    x,
    y,
    row,
    column,
    width,
    x_stride,
    x_step,
    y_stride,
    y_step,
    EVEN_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """P, in float32."""
    k = tl.arange(0, BLOCK_WIDTH)
    x_at = x + row[:, None].to(tl.int64) * x_stride + k[None, :].to(tl.int64) * x_step
    y_at = y + column[None, :].to(tl.int64) * y_stride + k[:, None].to(tl.int64) * y_step
    p = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        if EVEN_WIDTH:
            a, b = tl.load(x_at), tl.load(y_at)
        else:
            a = tl.load(x_at, mask=(start + k < width)[None, :], other=0.0)
            b = tl.load(y_at, mask=(start + k < width)[:, None], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        p = tl.dot(a, b, p, input_precision=PRECISION)
        x_at += tl.full((), BLOCK_WIDTH, tl.int64) * x_step
        y_at += tl.full((), BLOCK_WIDTH, tl.int64) * y_step
    return p


@triton.jit
def _part(block, INDEX: tl.constexpr, PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Some columns of a block, which every thread has in its registers already."""
    if PARTS == 1:
        return block
    else:
        HALF: tl.constexpr = PARTS // 2
        WIDTH: tl.constexpr = BLOCK_COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(block, (BLOCK_ROWS, 2, WIDTH)), (0, 2, 1)))
        if INDEX < HALF:
            return _part(left, INDEX, HALF, BLOCK_ROWS, WIDTH)
        else:
            return _part(right, INDEX - HALF, HALF, BLOCK_ROWS, WIDTH)


# ---- pairs


@triton.jit
def _target(target, row, num_rows, num_columns, column_start, TARGETS: tl.constexpr):
    """Of every row, its target among the columns of this tile; -1 where that is elsewhere."""
    if TARGETS:
        at = tl.load(target + row, mask=row < num_rows, other=-1) - column_start
        return tl.where((at >= 0) & (at < num_columns), at, -1).to(tl.int32)
    else:
        return row


@triton.jit
def _logits(
    p,
    row,
    column,
    at_target,
    x_ids,
    y_ids,
    num_rows,
    num_columns,
    scale,
    bias,
    SAME: tl.constexpr,
    IDS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    TARGETS: tl.constexpr,
):
    """S."""
    counts = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    if DIAGONAL:
        counts &= row[:, None] != column[None, :]
    if IDS and SAME == "mask":
        other = _ids(x_ids, row, num_rows)[:, None] != _ids(y_ids, column, num_columns)[None, :]
        if TARGETS:
            other |= at_target[:, None] == column[None, :]
        counts &= other
    return tl.where(counts, p * scale + bias, LOWEST)


@triton.jit
def _positives(
    s,
    row,
    column,
    at_target,
    x_ids,
    y_ids,
    num_rows,
    num_columns,
    SAME: tl.constexpr,
    IDS: tl.constexpr,
    TARGETS: tl.constexpr,
):
    """Which pairs are positives."""
    if IDS and SAME == "positive":
        positive = _ids(x_ids, row, num_rows)[:, None] == _ids(y_ids, column, num_columns)[None, :]
        if TARGETS:
            positive |= at_target[:, None] == column[None, :]
        return positive & (s != LOWEST)
    elif TARGETS:
        return at_target[:, None] == column[None, :]
    else:
        return tl.zeros((1, 1), dtype=tl.int1)


@triton.jit
def _ids(ids, index, length):
    return tl.load(ids + index, mask=index < length, other=0)


# ---- forward


@triton.jit
def _fold_columns(s, at, slot, mask, LINK: tl.constexpr, SMOOTHING: tl.constexpr):
    """What the columns keep of a part of a block, their positives apart. Returns their peaks.

    Sums are of logits less the column's own peak, which is where their digits are.
    """
    peak = tl.max(s, 0)
    tl.store(at + PEAK * slot, peak, mask=mask)
    if LINK == "softmax":
        below = s - _finite(peak)[None, :]
        tl.store(at + TOTAL * slot, tl.sum(tl.exp(below), 0), mask=mask)
        if SMOOTHING:
            tl.store(at + EVERYTHING * slot, tl.sum(tl.where(s == LOWEST, 0.0, below), 0), mask=mask)
            tl.store(at + VALID * slot, tl.sum((s != LOWEST).to(tl.float32), 0), mask=mask)
    return peak


@triton.jit
def _finite(peak):
    """To subtract: where nothing counts there is nothing to subtract from."""
    return tl.where(peak == LOWEST, 0.0, peak)


@triton.jit
def _fold_columns_positives(s, positive, peak, at, slot, mask, SMOOTHING: tl.constexpr, STATS: tl.constexpr):
    below = s - _finite(peak)[None, :]
    tl.store(at + POSITIVE * slot, tl.sum(tl.where(positive, below, 0.0), 0), mask=mask)
    tl.store(at + COUNT * slot, tl.sum(positive.to(tl.float32), 0), mask=mask)
    if STATS:
        tl.store(at + (4 + 2 * SMOOTHING) * slot, tl.max(tl.where(positive, s, LOWEST), 0), mask=mask)


@triton.jit
def _fold_no_positives(peak, at, slot, mask, SMOOTHING: tl.constexpr, STATS: tl.constexpr):
    nothing = tl.zeros_like(peak)
    tl.store(at + POSITIVE * slot, nothing, mask=mask)
    tl.store(at + COUNT * slot, nothing, mask=mask)
    if STATS:
        tl.store(at + (4 + 2 * SMOOTHING) * slot, nothing + LOWEST, mask=mask)


@triton.jit(
    do_not_specialize=["length", "num_blocks", "state_stride"], do_not_specialize_on_alignment=["partials", "state"]
)
def merge_kernel(
    partials,
    state,
    length,
    num_blocks,
    state_stride,
    LINK: tl.constexpr,
    BEST_SLOT: tl.constexpr,
    # where the fields of a state are; -1 where there are none, or nothing to add
    SHIFT_AT: tl.constexpr,
    TOTAL_AT: tl.constexpr,
    POSITIVE_AT: tl.constexpr,
    COUNT_AT: tl.constexpr,
    EVERYTHING_AT: tl.constexpr,
    VALID_AT: tl.constexpr,
    BEST_AT: tl.constexpr,
    BEST_POSITIVE_AT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add all blocks' partial results to the state of every row: `State.merge`, for many pieces at once."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < length
    at, step = state + row, state_stride.to(tl.int64)
    slot = num_blocks.to(tl.int64) * length
    nothing = tl.zeros((BLOCK,), tl.float64)
    shift, total = _read(at, SHIFT_AT, step, here, nothing), _read(at, TOTAL_AT, step, here, nothing)
    positive, count = _read(at, POSITIVE_AT, step, here, nothing), _read(at, COUNT_AT, step, here, nothing)
    everything, valid = _read(at, EVERYTHING_AT, step, here, nothing), _read(at, VALID_AT, step, here, nothing)
    best = _read(at, BEST_AT, step, here, nothing)
    best_positive = _read(at, BEST_POSITIVE_AT, step, here, nothing)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        mask = (block < num_blocks)[:, None] & here[None, :]
        piece = partials + block[:, None].to(tl.int64) * length + row[None, :]
        if SHIFT_AT >= 0 or BEST_AT >= 0:
            peaks = tl.load(piece + PEAK * slot, mask=mask, other=LOWEST)
            peak = tl.max(peaks, 0)
            anchors = _finite(peaks).to(tl.float64)
            best = tl.maximum(best, peak.to(tl.float64))
        if LINK == "softmax":
            weight = tl.exp(peaks - _finite(peak)[None, :]).to(tl.float64)
            met = tl.sum(_piece(piece + TOTAL * slot, mask) * weight, 0)
            higher = tl.maximum(shift, peak.to(tl.float64))
            total = total * tl.exp(shift - _finite(higher)) + met * tl.exp(peak.to(tl.float64) - _finite(higher))
            shift = higher
        elif TOTAL_AT >= 0:
            total += tl.sum(_piece(piece + TOTAL * slot, mask), 0)
        if COUNT_AT >= 0:
            counts = _piece(piece + COUNT * slot, mask)
            count += tl.sum(counts, 0)
            positive += tl.sum(_piece(piece + POSITIVE * slot, mask) + anchors * counts, 0)
        if VALID_AT >= 0:
            valids = _piece(piece + VALID * slot, mask)
            valid += tl.sum(valids, 0)
            everything += tl.sum(_piece(piece + EVERYTHING * slot, mask) + anchors * valids, 0)
        if BEST_POSITIVE_AT >= 0:
            bests = tl.load(piece + BEST_SLOT * slot, mask=mask, other=LOWEST)
            best_positive = tl.maximum(best_positive, tl.max(bests, 0).to(tl.float64))
    _write(at, SHIFT_AT, step, here, shift)
    _write(at, TOTAL_AT, step, here, total)
    _write(at, POSITIVE_AT, step, here, positive)
    _write(at, COUNT_AT, step, here, count)
    _write(at, EVERYTHING_AT, step, here, everything)
    _write(at, VALID_AT, step, here, valid)
    _write(at, BEST_AT, step, here, best)
    _write(at, BEST_POSITIVE_AT, step, here, best_positive)


@triton.jit
def _piece(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def _read(at, FIELD: tl.constexpr, step, mask, nothing):
    if FIELD >= 0:
        return tl.load(at + FIELD * step, mask=mask, other=0.0)
    else:
        return nothing


@triton.jit
def _write(at, FIELD: tl.constexpr, step, mask, value):
    if FIELD >= 0:
        tl.store(at + FIELD * step, value, mask=mask)


# ---- backward


@triton.jit
def _softmax_slope(
    s,
    positive,
    row,
    column,
    x_state,
    y_state,
    x_state_stride,
    y_state_stride,
    x_pull,
    y_pull,
    num_rows,
    num_columns,
    smoothing,
    SHIFT_AT: tl.constexpr,
    TOTAL_AT: tl.constexpr,
    COUNT_AT: tl.constexpr,
    VALID_AT: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BOTH: tl.constexpr,
):
    """pull * (p - aim) of the rows and, where they lose too, of the columns."""
    shift, factor, share, uniform = _side(
        x_state, x_state_stride, x_pull, row, num_rows, smoothing, SHIFT_AT, TOTAL_AT, COUNT_AT, VALID_AT, SMOOTHING
    )
    g = tl.exp(s - shift[:, None]) * factor[:, None]
    aim, everywhere = share[:, None], uniform[:, None]
    if BOTH:
        shift, factor, share, uniform = _side(
            y_state, y_state_stride, y_pull, column, num_columns, smoothing, SHIFT_AT, TOTAL_AT, COUNT_AT, VALID_AT,
            SMOOTHING,
        )  # fmt: skip
        g += tl.exp(s - shift[None, :]) * factor[None, :]
        aim, everywhere = aim + share[None, :], everywhere + uniform[None, :]
    g -= tl.where(positive, aim, 0.0)
    if SMOOTHING:
        g = tl.where(s == LOWEST, 0.0, g - everywhere)
    return g


@triton.jit
def _side(
    state,
    stride,
    pull_at,
    index,
    length,
    smoothing,
    SHIFT_AT: tl.constexpr,
    TOTAL_AT: tl.constexpr,
    COUNT_AT: tl.constexpr,
    VALID_AT: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """Of one side: shift, what turns exponentials into pull * p, and the aims of a positive and of any column.

    What is divided is float32 first: few GPUs are good at more.
    """
    here = index < length
    at, step = state + index, stride.to(tl.int64)
    pull = tl.load(pull_at + index, mask=here, other=0.0).to(tl.float32)
    shift = tl.load(at + SHIFT_AT * step, mask=here, other=0.0).to(tl.float32)
    total = tl.load(at + TOTAL_AT * step, mask=here, other=1.0).to(tl.float32)
    count = tl.load(at + COUNT_AT * step, mask=here, other=1.0).to(tl.float32)
    share, uniform = pull / tl.maximum(count, 1.0), pull
    if SMOOTHING:
        valid = tl.load(at + VALID_AT * step, mask=here, other=1.0).to(tl.float32)
        share, uniform = share * (1.0 - smoothing), smoothing * pull / tl.maximum(valid, 1.0)
    return shift, pull / total, share, uniform


@triton.jit
def _sigmoid(s, positive):
    """sigmoid(s) for a negative, -sigmoid(-s) for a positive."""
    z = tl.where(positive, -s, s)
    e = tl.exp(-tl.abs(z))
    g = tl.where(z >= 0, 1.0, e) / (1.0 + e)
    return tl.where(positive, -g, g)


@triton.jit
def _softplus(z):
    """log(1 + exp(z)), with all digits where it is small."""
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    rounded = u == 1.0
    return tl.maximum(z, 0.0) + tl.where(rounded, e, tl.log(u) * (e / tl.where(rounded, 1.0, u - 1.0)))
