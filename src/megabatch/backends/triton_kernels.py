"""The kernels of the triton backend: one matrix product over a tile, and what its epilogue makes of the block.

Letters: X, Y the features of the tile's rows and columns; P = X Y^T; S = scale * P + bias, its logits, -inf where a
pair does not count; G = d loss / d S, the slope, up to a factor common to all tiles.

The rules that keep them right:
- a block beyond the tile's edge reads the last row again and is hidden before any maximum, sum or store;
- offsets are 64-bit: row * stride passes 2^31 long before memory ends;
- rows and columns have a shift each, so that none underflows because of another;
- forward and backward form P by the same instructions: a fitted positive cancels exactly;
- no atomics: every program writes where no other does, and partial results are added up in a fixed order.
"""

import triton
import triton.language as tl

# Partial results that a block leaves of each of its rows and of its columns, in this order.
PEAK, TOTAL, POSITIVE, COUNT = (tl.constexpr(slot) for slot in range(4))
EVERYTHING, VALID = tl.constexpr(4), tl.constexpr(5)  # only where labels are smoothed
LOWEST = tl.constexpr(float("-inf"))


@triton.jit
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
    LINK: tl.constexpr,
    SAME: tl.constexpr,
    IDS: tl.constexpr,
    TARGETS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    # what is done: products read, rather than formed; or written; statistics; the slope; its sums
    GIVEN: tl.constexpr,
    KEEP: tl.constexpr,
    FOLD: tl.constexpr,
    PUSH: tl.constexpr,
    SUM: tl.constexpr,
    BOTH_FOLD: tl.constexpr,
    BOTH_PUSH: tl.constexpr,
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
    GROUP: tl.constexpr,
):
    """One block of a tile: statistics of its rows and columns (FOLD), its slope (PUSH), its products (KEEP)."""
    down, across, blocks_down, blocks_across = _place(num_rows, num_columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    row = down * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    here = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    row_offset, column_offset = row.to(tl.int64), column.to(tl.int64)
    if GIVEN:
        p = tl.load(products + row_offset[:, None] * products_stride + column_offset[None, :], mask=here, other=0.0)
    else:
        p = _multiply(
            x,
            y,
            tl.minimum(row, num_rows - 1).to(tl.int64),
            tl.minimum(column, num_columns - 1).to(tl.int64),
            width,
            x_stride,
            x_step,
            y_stride,
            y_step,
            EVEN_WIDTH,
            PRECISION,
            WIDEN,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            BLOCK_WIDTH,
        )
        if NORMALIZED:
            row_norm = tl.load(x_norm + row_offset, mask=row < num_rows, other=0.0)
            column_norm = tl.load(y_norm + column_offset, mask=column < num_columns, other=0.0)
            p *= row_norm[:, None] * column_norm[None, :]
    if KEEP:
        tl.store(products + row_offset[:, None] * products_stride + column_offset[None, :], p, mask=here)

    if FOLD or PUSH:
        valid, positive = _relations(
            row, column, x_ids, y_ids, target, num_rows, num_columns, column_start, SAME, IDS, TARGETS, DIAGONAL
        )
        s = p * scale + bias
        if LINK == "softmax":
            s = tl.where(valid, s, LOWEST)
    if FOLD:
        rows_at = x_partials + across.to(tl.int64) * num_rows + row_offset
        row_slot = blocks_across.to(tl.int64) * num_rows
        if BOTH_FOLD:
            columns_at = y_partials + down.to(tl.int64) * num_columns + column_offset
            column_slot = blocks_down.to(tl.int64) * num_columns
        if LINK == "softmax":
            _fold_softmax(s, valid, positive, rows_at, row_slot, row < num_rows, 1, SMOOTHING, STATS)
            if BOTH_FOLD:
                _fold_softmax(s, valid, positive, columns_at, column_slot, column < num_columns, 0, SMOOTHING, STATS)
        else:
            lost = tl.where(valid, _softplus(tl.where(positive, -s, s)), 0.0)
            tl.store(rows_at + TOTAL * row_slot, tl.sum(lost, 1), mask=row < num_rows)
            if STATS:
                s = tl.where(valid, s, LOWEST)
                _fold_best(s, positive, rows_at, row_slot, row < num_rows, 1)
                if BOTH_FOLD:
                    _fold_best(s, positive, columns_at, column_slot, column < num_columns, 0)
    if PUSH:
        if LINK == "softmax":
            g = _softmax_slope(
                s, positive, x_state, x_state_stride, x_pull, row, num_rows, smoothing, 1, SHIFT_AT, TOTAL_AT, COUNT_AT,
                VALID_AT, SMOOTHING,
            )  # fmt: skip
            if BOTH_PUSH:
                g += _softmax_slope(
                    s, positive, y_state, y_state_stride, y_pull, column, num_columns, smoothing, 0, SHIFT_AT, TOTAL_AT,
                    COUNT_AT, VALID_AT, SMOOTHING,
                )  # fmt: skip
        else:
            pull = tl.load(x_pull + row_offset, mask=row < num_rows, other=0.0).to(tl.float32)
            g = tl.where(positive, -_sigmoid(-s), _sigmoid(s)) * pull[:, None]
        g = tl.where(valid, g, 0.0)
        if SUM:
            program = down.to(tl.int64) * blocks_across + across
            tl.store(sums + 2 * program, tl.sum(tl.sum(g, 1), 0))
            tl.store(sums + 2 * program + 1, tl.sum(tl.sum(g * p, 1), 0))
        if LIFT:
            slope_at = slope + row_offset[:, None] * slope_stride + column_offset[None, :]
            tl.store(slope_at, (g * LIFT).to(slope.dtype.element_ty), mask=here)


@triton.jit
def _place(num_rows, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Which block this program has. Neighbours in time share rows and columns, which then are in the cache."""
    blocks_down = tl.cdiv(num_rows, BLOCK_ROWS)
    blocks_across = tl.cdiv(num_columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    band = program // (GROUP * blocks_across)
    first = band * GROUP
    height = tl.minimum(blocks_down - first, GROUP)
    inside = program - band * GROUP * blocks_across
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
    x_at = x + row[:, None] * x_stride + k[None, :].to(tl.int64) * x_step
    y_at = y + column[None, :] * y_stride + k[:, None].to(tl.int64) * y_step
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
        x_at += BLOCK_WIDTH * x_step
        y_at += BLOCK_WIDTH * y_step
    return p


@triton.jit
def _relations(
    row,
    column,
    x_ids,
    y_ids,
    target,
    num_rows,
    num_columns,
    column_start,
    SAME: tl.constexpr,
    IDS: tl.constexpr,
    TARGETS: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """Which pairs count, and which of them are positives."""
    row_here, column_here = row < num_rows, column < num_columns
    valid = row_here[:, None] & column_here[None, :]
    positive = valid & False
    if TARGETS:
        at = tl.load(target + row.to(tl.int64), mask=row_here, other=-1) - column_start
        at = tl.where((at >= 0) & (at < num_columns), at, -1).to(tl.int32)
        positive = at[:, None] == column[None, :]
    if DIAGONAL:
        valid &= row[:, None] != column[None, :]
    if IDS:
        row_id = tl.load(x_ids + row.to(tl.int64), mask=row_here, other=0)
        column_id = tl.load(y_ids + column.to(tl.int64), mask=column_here, other=0)
        same = row_id[:, None] == column_id[None, :]
        if SAME == "mask":
            valid &= positive | (row_id[:, None] != column_id[None, :])
        else:
            positive |= same
    return valid, positive & valid


# ---- forward


@triton.jit
def _fold_softmax(
    s,
    valid,
    positive,
    partials,
    slot,
    mask,
    AXIS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
):
    """What one side keeps of a block. Sums are of logits less the side's own peak, which is where digits are."""
    peak = tl.max(s, AXIS)
    below = s - tl.expand_dims(tl.where(peak == LOWEST, 0.0, peak), AXIS)
    tl.store(partials + PEAK * slot, peak, mask=mask)
    tl.store(partials + TOTAL * slot, tl.sum(tl.exp(below), AXIS), mask=mask)
    tl.store(partials + POSITIVE * slot, tl.sum(tl.where(positive, below, 0.0), AXIS), mask=mask)
    tl.store(partials + COUNT * slot, tl.sum(positive.to(tl.float32), AXIS), mask=mask)
    if SMOOTHING:
        tl.store(partials + EVERYTHING * slot, tl.sum(tl.where(valid, below, 0.0), AXIS), mask=mask)
        tl.store(partials + VALID * slot, tl.sum(valid.to(tl.float32), AXIS), mask=mask)
    if STATS:
        best = tl.max(tl.where(positive, s, LOWEST), AXIS)
        tl.store(partials + (4 + 2 * SMOOTHING) * slot, best, mask=mask)


@triton.jit
def _fold_best(s, positive, partials, slot, mask, AXIS: tl.constexpr):
    """The statistics of a sigmoid loss."""
    tl.store(partials + PEAK * slot, tl.max(s, AXIS), mask=mask)
    tl.store(partials + POSITIVE * slot, tl.sum(tl.where(positive, s, 0.0), AXIS), mask=mask)
    tl.store(partials + COUNT * slot, tl.sum(positive.to(tl.float32), AXIS), mask=mask)
    tl.store(partials + 4 * slot, tl.max(tl.where(positive, s, LOWEST), AXIS), mask=mask)


@triton.jit
def merge_kernel(
    partials,
    state,
    length,
    num_blocks,
    state_stride,
    LINK: tl.constexpr,
    BEST_SLOT: tl.constexpr,
    # where the fields of a state are; -1 where there are none
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
    at = state + row.to(tl.int64)
    step = state_stride.to(tl.int64)
    slot = num_blocks.to(tl.int64) * length
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        mask = (block < num_blocks)[:, None] & here[None, :]
        piece = partials + block[:, None].to(tl.int64) * length + row[None, :].to(tl.int64)
        if SHIFT_AT >= 0 or BEST_AT >= 0:
            peaks = tl.load(piece + PEAK * slot, mask=mask, other=LOWEST)
            peak = tl.max(peaks, 0)
        if LINK == "softmax":
            anchors = tl.where(peaks == LOWEST, 0.0, peaks).to(tl.float64)
            weight = tl.exp(peaks - tl.where(peak == LOWEST, 0.0, peak)[None, :]).to(tl.float64)
            total = tl.sum(_piece(piece, TOTAL, slot, mask) * weight, 0)
            old_shift = tl.load(at + SHIFT_AT * step, mask=here, other=0.0)
            old_total = tl.load(at + TOTAL_AT * step, mask=here, other=0.0)
            shift = tl.maximum(old_shift, peak.to(tl.float64))
            anchor = tl.where(shift == LOWEST, 0.0, shift)
            total = old_total * tl.exp(old_shift - anchor) + total * tl.exp(peak.to(tl.float64) - anchor)
            tl.store(at + SHIFT_AT * step, shift, mask=here)
            tl.store(at + TOTAL_AT * step, total, mask=here)
        elif TOTAL_AT >= 0:
            _add(at + TOTAL_AT * step, tl.sum(_piece(piece, TOTAL, slot, mask), 0), here)
        if COUNT_AT >= 0:
            count = _piece(piece, COUNT, slot, mask)
            positive = _piece(piece, POSITIVE, slot, mask)
            if LINK == "softmax":
                positive += anchors * count
            _add(at + COUNT_AT * step, tl.sum(count, 0), here)
            _add(at + POSITIVE_AT * step, tl.sum(positive, 0), here)
        if VALID_AT >= 0:
            valid = _piece(piece, VALID, slot, mask)
            everything = _piece(piece, EVERYTHING, slot, mask) + anchors * valid
            _add(at + VALID_AT * step, tl.sum(valid, 0), here)
            _add(at + EVERYTHING_AT * step, tl.sum(everything, 0), here)
        if BEST_AT >= 0:
            _raise(at + BEST_AT * step, peak, here)
            best = tl.load(piece + BEST_SLOT * slot, mask=mask, other=LOWEST)
            _raise(at + BEST_POSITIVE_AT * step, tl.max(best, 0), here)


@triton.jit
def _piece(piece, SLOT: tl.constexpr, slot, mask):
    return tl.load(piece + SLOT * slot, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def _add(at, value, mask):
    tl.store(at, tl.load(at, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def _raise(at, value, mask):
    tl.store(at, tl.maximum(tl.load(at, mask=mask, other=0.0), value.to(tl.float64)), mask=mask)


# ---- backward


@triton.jit
def _softmax_slope(
    s,
    positive,
    state,
    stride,
    pull_at,
    index,
    length,
    smoothing,
    AXIS: tl.constexpr,
    SHIFT_AT: tl.constexpr,
    TOTAL_AT: tl.constexpr,
    COUNT_AT: tl.constexpr,
    VALID_AT: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """pull * (p - aim) of one side. Whatever is divided is float32: few GPUs are good at more."""
    here = index < length
    at = state + index.to(tl.int64)
    step = stride.to(tl.int64)
    pull = tl.load(pull_at + index.to(tl.int64), mask=here, other=0.0).to(tl.float32)
    shift = tl.load(at + SHIFT_AT * step, mask=here, other=0.0).to(tl.float32)
    total = tl.load(at + TOTAL_AT * step, mask=here, other=1.0).to(tl.float32)
    count = tl.load(at + COUNT_AT * step, mask=here, other=1.0).to(tl.float32)
    g = tl.exp(s - tl.expand_dims(shift, AXIS)) * tl.expand_dims(pull / total, AXIS)
    share = pull / tl.maximum(count, 1.0)
    if SMOOTHING:
        share *= 1.0 - smoothing
        valid = tl.load(at + VALID_AT * step, mask=here, other=1.0).to(tl.float32)
        g -= tl.expand_dims(smoothing * pull / tl.maximum(valid, 1.0), AXIS)
    return g - tl.where(positive, tl.expand_dims(share, AXIS), 0.0)


@triton.jit
def _sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _softplus(z):
    """log(1 + exp(z)), with all digits where it is small."""
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    rounded = u == 1.0
    return tl.maximum(z, 0.0) + tl.where(rounded, e, tl.log(u) * (e / tl.where(rounded, 1.0, u - 1.0)))
