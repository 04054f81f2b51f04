"""The kernels of the triton backend: a blocked matrix product over a tile, with the loss as its epilogue.

Letters: X, Y the features of the tile's rows and columns; S = scale * X @ Y.T + bias, the logits, -inf where a pair is
masked; dS = d loss / d S, the dlogits, up to a factor common to all tiles.

Rules for correctness:
- A block beyond the edge of the tile loads the last row again, and is masked before any maximum, sum or store.
- Offsets are 64-bit: row * stride exceeds 2^31 long before memory is full.
- Every row and every column has its own maximum, so that none underflows because of another.
- Forward and backward compute S by the same instructions, so that a fitted positive cancels exactly.
- No atomics. Each program writes to memory of its own, and partial results are added in a fixed order.

Rule for speed: the epilogue holds one subtile of its block at a time, and reduces positives only where a subtile has
any, so that nothing spills.
"""

import triton
import triton.language as tl

# Partial statistics of a row, or a column, of one block. SUM is the sum of exp(logit - MAX), or of softplus. The sums
# of logits are sums of logit - MAX, which keeps their digits. TOP_POSITIVE is there with stats, what follows with
# label smoothing.
MAX, SUM, POSITIVE_SUM, POSITIVE_COUNT = (tl.constexpr(slot) for slot in range(4))
TOP_POSITIVE, LOGIT_SUM, LOGIT_COUNT = (tl.constexpr(slot) for slot in range(4, 7))
NEG_INF = tl.constexpr(float("-inf"))

# Specializing on these would compile more kernels, none of them faster.
_ANY_NUMBER = ["num_rows", "num_columns", "x_state_stride", "y_state_stride", "dots_stride", "target_offset"]
_ANY_ADDRESS = ["x_norm", "y_norm", "x_ids", "y_ids", "targets", "x_state", "y_state", "x_row_grad", "y_row_grad"]
_ANY_ADDRESS += ["dots", "x_partials", "y_partials", "sums"]


@triton.jit(do_not_specialize=_ANY_NUMBER, do_not_specialize_on_alignment=_ANY_ADDRESS)
def tile_kernel(
    # inputs: features, 1 / norms and ids; the state and the row_grad of the backward, y's for two-sided losses
    x,
    y,
    x_norm,
    y_norm,
    x_ids,
    y_ids,
    targets,
    x_state,
    y_state,
    x_row_grad,
    y_row_grad,
    # outputs, each None if it is not wanted: partial statistics, dS, and sums of dS * x.y and of dS
    x_partials,
    y_partials,
    dlogits,
    sums,
    # X @ Y.T: an input where x is None, else an output
    dots,
    num_rows,
    num_columns,
    width,
    x_row_stride,
    x_feature_stride,
    y_row_stride,
    y_feature_stride,
    x_state_stride,
    y_state_stride,
    dlogits_stride,
    dots_stride,
    target_offset,
    scale,
    bias,
    label_smoothing,
    # the loss, and what this tile holds
    EPILOGUE: tl.constexpr,
    ID_RULE: tl.constexpr,
    TARGETS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    # positions of the fields in a state; -1: not there
    MAX_AT: tl.constexpr,
    SUM_EXP_AT: tl.constexpr,
    POSITIVE_COUNT_AT: tl.constexpr,
    LOGIT_COUNT_AT: tl.constexpr,
    SUM_FOR_SCALE: tl.constexpr,
    SUM_FOR_BIAS: tl.constexpr,
    DLOGITS_SCALE: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """One block of a tile. Computes the outputs that are not None; dlogits and their sums need row_grad."""
    STATISTICS: tl.constexpr = x_partials is not None
    GRADIENTS: tl.constexpr = x_row_grad is not None
    POSITIVES: tl.constexpr = TARGETS or ID_RULE == "positive"
    SUBTILE: tl.constexpr = BLOCK_COLUMNS // SUBTILES
    block_row, block_column, num_down, num_across = _swizzle(
        num_rows, num_columns, BLOCK_ROWS, BLOCK_COLUMNS, GROUP_ROWS
    )
    row = block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < num_rows
    if x is not None:
        column = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        block = _multiply(
            x, y, tl.minimum(row, num_rows - 1), tl.minimum(column, num_columns - 1), width, x_row_stride,
            x_feature_stride, y_row_stride, y_feature_stride, EVEN_WIDTH, PRECISION, UPCAST, BLOCK_WIDTH,
        )  # fmt: skip
    zeros, lowest = tl.zeros((BLOCK_ROWS,), tl.float32), tl.full((BLOCK_ROWS,), NEG_INF, tl.float32)
    row_max, row_sum, positive_sum, positive_count, top_positive = lowest, zeros, zeros, zeros, lowest
    logit_sum, logit_count = zeros, zeros
    scale_sum, bias_sum = 0.0, 0.0
    for index in tl.static_range(SUBTILES):
        column = block_column * BLOCK_COLUMNS + index * SUBTILE + tl.arange(0, SUBTILE)
        column_mask = column < num_columns
        mask = row_mask[:, None] & column_mask[None, :]
        if x is None:
            xy = tl.load(dots + row[:, None].to(tl.int64) * dots_stride + column[None, :], mask=mask, other=0.0)
        else:
            xy = _subtile(block, index, SUBTILES, BLOCK_ROWS, BLOCK_COLUMNS)
            if x_norm is not None:
                norm = tl.load(x_norm + row, mask=row_mask, other=0.0)[:, None]
                if y_norm is not None:  # multiplied first, so that (i, j) and (j, i) are rounded alike
                    norm = norm * tl.load(y_norm + column, mask=column_mask, other=0.0)[None, :]
                xy *= norm
            elif y_norm is not None:
                xy *= tl.load(y_norm + column, mask=column_mask, other=0.0)[None, :]
            if dots is not None:
                tl.store(dots + row[:, None].to(tl.int64) * dots_stride + column[None, :], xy, mask=mask)
        if STATISTICS or GRADIENTS:
            target = _target_column(targets, target_offset, row, num_rows, num_columns, TARGETS)
            s, positive = _logits(
                xy, mask, row, column, target, x_ids, y_ids, num_rows, num_columns, scale, bias, ID_RULE, TARGETS,
                DIAGONAL,
            )  # fmt: skip
        if STATISTICS:
            if EPILOGUE == "sigmoid":
                row_sum += tl.sum(_softplus(tl.where(positive, -s, s)), 1)
            if EPILOGUE == "softmax" or STATS:
                # Online softmax: the sums of earlier subtiles are moved to the new maximum.
                new_max = tl.maximum(row_max, tl.max(s, 1))
                moved = _finite(row_max) - _finite(new_max)
                below = s - _finite(new_max)[:, None]
                if EPILOGUE == "softmax":
                    row_sum = row_sum * tl.exp(row_max - _finite(new_max)) + tl.sum(tl.exp(below), 1)
                if SMOOTHING:
                    logit_sum += logit_count * moved + tl.sum(tl.where(s == NEG_INF, 0.0, below), 1)
                    logit_count += tl.sum((s != NEG_INF).to(tl.float32), 1)
                row_max = new_max
                if y_partials is not None:
                    column_at = y_partials + block_row.to(tl.int64) * num_columns + column
                    slot = num_down.to(tl.int64) * num_columns
                    column_max = _store_columns(s, column_at, slot, column_mask, EPILOGUE, SMOOTHING)
                if POSITIVES:
                    positive_sum += positive_count * moved
                    if tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0:
                        positive_sum += tl.sum(tl.where(positive, below, 0.0), 1)
                        positive_count += tl.sum(positive.to(tl.float32), 1)
                        top_positive = tl.maximum(top_positive, tl.max(tl.where(positive, s, NEG_INF), 1))
                        if y_partials is not None:
                            _store_column_positives(s, positive, column_max, column_at, slot, column_mask, STATS)
                    elif y_partials is not None:
                        _store_no_column_positives(column_max, column_at, slot, column_mask, STATS)
        if GRADIENTS:
            if EPILOGUE == "softmax":
                # row_grad * (probability - aim) of the rows and, where columns have a loss too, of the columns.
                max_, factor, aim, uniform = _row_terms(
                    x_state, x_state_stride, x_row_grad, row, row_mask, label_smoothing, MAX_AT, SUM_EXP_AT,
                    POSITIVE_COUNT_AT, LOGIT_COUNT_AT,
                )  # fmt: skip
                ds = tl.exp(s - max_[:, None]) * factor[:, None]
                aim, uniform = aim[:, None], uniform[:, None]
                if y_state is not None:
                    max_, factor, y_aim, y_uniform = _row_terms(
                        y_state, y_state_stride, y_row_grad, column, column_mask, label_smoothing, MAX_AT, SUM_EXP_AT,
                        POSITIVE_COUNT_AT, LOGIT_COUNT_AT,
                    )  # fmt: skip
                    ds += tl.exp(s - max_[None, :]) * factor[None, :]
                    aim, uniform = aim + y_aim[None, :], uniform + y_uniform[None, :]
                ds -= tl.where(positive, aim, 0.0)
                if SMOOTHING:
                    ds = tl.where(s == NEG_INF, 0.0, ds - uniform)
            else:
                row_grad = tl.load(x_row_grad + row, mask=row_mask, other=0.0).to(tl.float32)
                ds = _sigmoid(s, positive) * row_grad[:, None]
            if SUM_FOR_SCALE:
                scale_sum += tl.sum(tl.sum(ds * xy, 1), 0)
            if SUM_FOR_BIAS:
                bias_sum += tl.sum(tl.sum(ds, 1), 0)
            if dlogits is not None:
                at = dlogits + row[:, None].to(tl.int64) * dlogits_stride + column[None, :]
                tl.store(at, (ds * DLOGITS_SCALE).to(dlogits.dtype.element_ty), mask=mask)
    if STATISTICS:
        at, slot = x_partials + block_column.to(tl.int64) * num_rows + row, num_across.to(tl.int64) * num_rows
        tl.store(at + SUM * slot, row_sum, mask=row_mask)
        if EPILOGUE == "softmax" or STATS:
            tl.store(at + MAX * slot, row_max, mask=row_mask)
            if POSITIVES:
                tl.store(at + POSITIVE_SUM * slot, positive_sum, mask=row_mask)
                tl.store(at + POSITIVE_COUNT * slot, positive_count, mask=row_mask)
            if POSITIVES and STATS:
                tl.store(at + TOP_POSITIVE * slot, top_positive, mask=row_mask)
        if SMOOTHING:
            tl.store(at + LOGIT_SUM * slot, logit_sum, mask=row_mask)
            tl.store(at + LOGIT_COUNT * slot, logit_count, mask=row_mask)
    if sums is not None:
        at = sums + 2 * (block_row.to(tl.int64) * num_across + block_column)
        tl.store(at, scale_sum)
        tl.store(at + 1, bias_sum)


# ---- the matrix product


@triton.jit
def _swizzle(num_rows, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """Which block this program computes, and how many there are. Grouped as in Triton's matmul tutorial."""
    num_down, num_across = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    group = program // (GROUP_ROWS * num_across)
    first = group * GROUP_ROWS
    height = tl.minimum(num_down - first, GROUP_ROWS)
    inside = program - group * GROUP_ROWS * num_across
    return first + inside % height, inside // height, num_down, num_across


@triton.jit
def _multiply(
    x,
    y,
    row,
    column,
    width,
    x_row_stride,
    x_feature_stride,
    y_row_stride,
    y_feature_stride,
    EVEN_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """A block of X @ Y.T, in float32."""
    k = tl.arange(0, BLOCK_WIDTH)
    x_at = x + row[:, None].to(tl.int64) * x_row_stride + k[None, :].to(tl.int64) * x_feature_stride
    y_at = y + column[None, :].to(tl.int64) * y_row_stride + k[:, None].to(tl.int64) * y_feature_stride
    xy = tl.zeros((row.shape[0], column.shape[0]), dtype=tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        if EVEN_WIDTH:
            a, b = tl.load(x_at), tl.load(y_at)
        else:
            a = tl.load(x_at, mask=(start + k < width)[None, :], other=0.0)
            b = tl.load(y_at, mask=(start + k < width)[:, None], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        xy = tl.dot(a, b, xy, input_precision=PRECISION)
        x_at += tl.full((), BLOCK_WIDTH, tl.int64) * x_feature_stride
        y_at += tl.full((), BLOCK_WIDTH, tl.int64) * y_feature_stride
    return xy


@triton.jit
def _subtile(block, INDEX: tl.constexpr, SUBTILES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Some columns of a block. Every thread already has them in its registers."""
    if SUBTILES == 1:
        return block
    else:
        HALF: tl.constexpr = SUBTILES // 2
        WIDTH: tl.constexpr = BLOCK_COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(block, (BLOCK_ROWS, 2, WIDTH)), (0, 2, 1)))
        if INDEX < HALF:
            return _subtile(left, INDEX, HALF, BLOCK_ROWS, WIDTH)
        else:
            return _subtile(right, INDEX - HALF, HALF, BLOCK_ROWS, WIDTH)


# ---- logits and positives


@triton.jit
def _target_column(targets, target_offset, row, num_rows, num_columns, TARGETS: tl.constexpr):
    """The column of this tile that holds each row's target; -1 if none does. Consecutive targets are not loaded."""
    if TARGETS:
        if targets is None:
            column = row.to(tl.int64) + target_offset
        else:
            column = tl.load(targets + row, mask=row < num_rows, other=0) + target_offset
        return tl.where((row < num_rows) & (column >= 0) & (column < num_columns), column, -1).to(tl.int32)
    else:
        return row


@triton.jit
def _logits(
    xy,
    mask,
    row,
    column,
    target,
    x_ids,
    y_ids,
    num_rows,
    num_columns,
    scale,
    bias,
    ID_RULE: tl.constexpr,
    TARGETS: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """S, and which pairs are positives."""
    if DIAGONAL:
        mask &= row[:, None] != column[None, :]
    positive = tl.zeros((1, 1), dtype=tl.int1)
    if TARGETS:
        positive = target[:, None] == column[None, :]
    if ID_RULE != "ignore":
        x_id = tl.load(x_ids + row, mask=row < num_rows, other=0)
        y_id = tl.load(y_ids + column, mask=column < num_columns, other=0)
        same = x_id[:, None] == y_id[None, :]
        if ID_RULE == "mask":
            mask &= positive | (same == 0)
    s = tl.where(mask, xy * scale + bias, NEG_INF)
    if ID_RULE == "positive":
        positive = (positive | same) & (s != NEG_INF)
    return s, positive


@triton.jit
def _finite(max_):
    """To subtract: 0 where nothing counts, so that -inf - -inf does not become NaN."""
    return tl.where(max_ == NEG_INF, 0.0, max_)


@triton.jit
def _sigmoid(s, positive):
    """d softplus: sigmoid(s) for a negative, -sigmoid(-s) for a positive."""
    z = tl.where(positive, -s, s)
    e = tl.exp(-tl.abs(z))
    ds = tl.where(z >= 0, 1.0, e) / (1.0 + e)
    return tl.where(positive, -ds, ds)


@triton.jit
def _softplus(z):
    """log(1 + exp(z)), with all digits where it is small."""
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    rounded = u == 1.0
    return tl.maximum(z, 0.0) + tl.where(rounded, e, tl.log(u) * (e / tl.where(rounded, 1.0, u - 1.0)))


# ---- statistics


@triton.jit
def _store_columns(s, at, slot, mask, EPILOGUE: tl.constexpr, SMOOTHING: tl.constexpr):
    """Partial statistics of the columns of a subtile, apart from their positives. Returns their maxima."""
    max_ = tl.max(s, 0)
    tl.store(at + MAX * slot, max_, mask=mask)
    if EPILOGUE == "softmax":
        below = s - _finite(max_)[None, :]
        tl.store(at + SUM * slot, tl.sum(tl.exp(below), 0), mask=mask)
        if SMOOTHING:
            tl.store(at + LOGIT_SUM * slot, tl.sum(tl.where(s == NEG_INF, 0.0, below), 0), mask=mask)
            tl.store(at + LOGIT_COUNT * slot, tl.sum((s != NEG_INF).to(tl.float32), 0), mask=mask)
    return max_


@triton.jit
def _store_column_positives(s, positive, max_, at, slot, mask, STATS: tl.constexpr):
    below = s - _finite(max_)[None, :]
    tl.store(at + POSITIVE_SUM * slot, tl.sum(tl.where(positive, below, 0.0), 0), mask=mask)
    tl.store(at + POSITIVE_COUNT * slot, tl.sum(positive.to(tl.float32), 0), mask=mask)
    if STATS:
        tl.store(at + TOP_POSITIVE * slot, tl.max(tl.where(positive, s, NEG_INF), 0), mask=mask)


@triton.jit
def _store_no_column_positives(max_, at, slot, mask, STATS: tl.constexpr):
    zeros = tl.zeros_like(max_)
    tl.store(at + POSITIVE_SUM * slot, zeros, mask=mask)
    tl.store(at + POSITIVE_COUNT * slot, zeros, mask=mask)
    if STATS:
        tl.store(at + TOP_POSITIVE * slot, zeros + NEG_INF, mask=mask)


@triton.jit(
    do_not_specialize=["length", "num_blocks", "state_stride"], do_not_specialize_on_alignment=["partials", "state"]
)
def merge_kernel(
    partials,
    state,
    length,
    num_blocks,
    state_stride,
    # positions of the fields in the state; -1: not there, or nothing to add
    MAX_AT: tl.constexpr,
    SUM_EXP_AT: tl.constexpr,
    SOFTPLUS_SUM_AT: tl.constexpr,
    POSITIVE_SUM_AT: tl.constexpr,
    POSITIVE_COUNT_AT: tl.constexpr,
    LOGIT_SUM_AT: tl.constexpr,
    LOGIT_COUNT_AT: tl.constexpr,
    TOP_AT: tl.constexpr,
    TOP_POSITIVE_AT: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the partial statistics of all blocks to the state of every row: `State.merge` for many pieces at once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < length
    at, step = state + row, state_stride.to(tl.int64)
    slot = num_blocks.to(tl.int64) * length
    zeros = tl.zeros((ROWS,), tl.float64)
    max_, sum_exp = _read(at, MAX_AT, step, row_mask, zeros), _read(at, SUM_EXP_AT, step, row_mask, zeros)
    softplus_sum = _read(at, SOFTPLUS_SUM_AT, step, row_mask, zeros)
    positive_sum = _read(at, POSITIVE_SUM_AT, step, row_mask, zeros)
    positive_count = _read(at, POSITIVE_COUNT_AT, step, row_mask, zeros)
    logit_sum = _read(at, LOGIT_SUM_AT, step, row_mask, zeros)
    logit_count = _read(at, LOGIT_COUNT_AT, step, row_mask, zeros)
    top, top_positive = _read(at, TOP_AT, step, row_mask, zeros), _read(at, TOP_POSITIVE_AT, step, row_mask, zeros)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        mask = (block < num_blocks)[:, None] & row_mask[None, :]
        piece = partials + block[:, None].to(tl.int64) * length + row[None, :]
        if MAX_AT >= 0 or TOP_AT >= 0:
            block_max = tl.load(piece + MAX * slot, mask=mask, other=NEG_INF)
            new_max = tl.max(block_max, 0)
            top = tl.maximum(top, new_max.to(tl.float64))
            subtracted = _finite(block_max).to(tl.float64)  # from every logit of a sum of logits
        if SUM_EXP_AT >= 0:
            factor = tl.exp(block_max - _finite(new_max)[None, :]).to(tl.float64)
            new_sum = tl.sum(_piece(piece + SUM * slot, mask) * factor, 0)
            higher = tl.maximum(max_, new_max.to(tl.float64))
            new_sum *= tl.exp(new_max.to(tl.float64) - _finite(higher))
            sum_exp = sum_exp * tl.exp(max_ - _finite(higher)) + new_sum
            max_ = higher
        if SOFTPLUS_SUM_AT >= 0:
            softplus_sum += tl.sum(_piece(piece + SUM * slot, mask), 0)
        if POSITIVE_SUM_AT >= 0:
            counts = _piece(piece + POSITIVE_COUNT * slot, mask)
            positive_count += tl.sum(counts, 0)
            positive_sum += tl.sum(_piece(piece + POSITIVE_SUM * slot, mask) + subtracted * counts, 0)
        if LOGIT_COUNT_AT >= 0:
            counts = _piece(piece + LOGIT_COUNT * slot, mask)
            logit_count += tl.sum(counts, 0)
            logit_sum += tl.sum(_piece(piece + LOGIT_SUM * slot, mask) + subtracted * counts, 0)
        if TOP_POSITIVE_AT >= 0:
            tops = tl.load(piece + TOP_POSITIVE * slot, mask=mask, other=NEG_INF)
            top_positive = tl.maximum(top_positive, tl.max(tops, 0).to(tl.float64))
    _write(at, MAX_AT, step, row_mask, max_)
    _write(at, SUM_EXP_AT, step, row_mask, sum_exp)
    _write(at, SOFTPLUS_SUM_AT, step, row_mask, softplus_sum)
    _write(at, POSITIVE_SUM_AT, step, row_mask, positive_sum)
    _write(at, POSITIVE_COUNT_AT, step, row_mask, positive_count)
    _write(at, LOGIT_SUM_AT, step, row_mask, logit_sum)
    _write(at, LOGIT_COUNT_AT, step, row_mask, logit_count)
    _write(at, TOP_AT, step, row_mask, top)
    _write(at, TOP_POSITIVE_AT, step, row_mask, top_positive)


@triton.jit
def _piece(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def _read(at, FIELD: tl.constexpr, step, mask, default):
    if FIELD >= 0:
        return tl.load(at + FIELD * step, mask=mask, other=0.0)
    else:
        return default


@triton.jit
def _write(at, FIELD: tl.constexpr, step, mask, value):
    if FIELD >= 0:
        tl.store(at + FIELD * step, value, mask=mask)


# ---- gradients


@triton.jit
def _row_terms(
    state,
    state_stride,
    row_grad_at,
    row,
    mask,
    label_smoothing,
    MAX_AT: tl.constexpr,
    SUM_EXP_AT: tl.constexpr,
    POSITIVE_COUNT_AT: tl.constexpr,
    LOGIT_COUNT_AT: tl.constexpr,
):
    """What dS takes from a row: its maximum, row_grad / sum_exp, and row_grad * aim of a positive and of any column.

    Converted to float32 before the divisions: float64 is slow on most GPUs.
    """
    at, step = state + row, state_stride.to(tl.int64)
    row_grad = tl.load(row_grad_at + row, mask=mask, other=0.0).to(tl.float32)
    max_ = tl.load(at + MAX_AT * step, mask=mask, other=0.0).to(tl.float32)
    sum_exp = tl.load(at + SUM_EXP_AT * step, mask=mask, other=1.0).to(tl.float32)
    aim, uniform = row_grad, row_grad
    if POSITIVE_COUNT_AT >= 0:
        aim = row_grad / tl.maximum(tl.load(at + POSITIVE_COUNT_AT * step, mask=mask, other=1.0).to(tl.float32), 1.0)
    if LOGIT_COUNT_AT >= 0:
        count = tl.load(at + LOGIT_COUNT_AT * step, mask=mask, other=1.0).to(tl.float32)
        aim, uniform = aim * (1.0 - label_smoothing), label_smoothing * row_grad / tl.maximum(count, 1.0)
    return max_, row_grad / sum_exp, aim, uniform
