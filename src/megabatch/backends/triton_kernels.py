"""The kernels of the triton backend: a blocked matrix product over a tile, with the loss as its epilogue.

Letters: X, Y the features of the tile's rows and columns; S = scale * X @ Y.T + bias, the logits, -inf where a pair is
masked; dS = d loss / d S, the dlogits, up to a factor common to all tiles.

Rules for correctness:
- A block beyond the edge of the tile loads the last row again, and is masked before any maximum, sum or store.
- Offsets are 64-bit: row * stride exceeds 2^31 long before memory is full.
- Every row and every column has its own maximum, so that none underflows because of another.
- Forward and backward compute S by the same instructions, so that a fitted positive cancels exactly.
- No atomics. Each program writes to its own memory, and partial results are added in a fixed order.

Rules for speed:
- The epilogue holds one subtile of its block at a time, and reduces positives only where a subtile has any, so that
  nothing spills.
- The dlogits of rows and columns share one exponential, exp(s - c), times exp(c - m) for a row of maximum m, and for a
  column alike. Where some c - m reaches SPREAD it might underflow, and in a tile with positives, which must cancel
  exactly, it is not exact enough: there, both have exponentials of their own.
"""

import triton
import triton.language as tl

# Slots for the partial statistics of a row, or a column, of one block; those that the loss has are written. SUM is the
# sum of exp(logit - MAX), or of softplus. The sums of logits are sums of logit - MAX, which keeps their digits; the
# number of those logits comes next. Those of positives are last: a tile may have none.
MAX, SUM, LOGIT_SUM, LOGIT_COUNT = (tl.constexpr(slot) for slot in range(4))
POSITIVE_SUM, POSITIVE_COUNT, TOP_POSITIVE = (tl.constexpr(slot) for slot in range(4, 7))
NEG_INF = tl.constexpr(float("-inf"))
SPREAD = tl.constexpr(60.0)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Specializing on these would compile more kernels, none of them faster.
_ANY_NUMBER = ["num_rows", "num_columns", "target_offset"]
_OF_A_SIDE = ["norm", "ids", "label", "max", "factor", "uniform", "partials"]
_ANY_ADDRESS = ["scalars", "targets", "sums", *(f"{side}_{name}" for side in "xy" for name in _OF_A_SIDE)]


@triton.jit(do_not_specialize=_ANY_NUMBER, do_not_specialize_on_alignment=_ANY_ADDRESS)
def tile_kernel(
    num_rows,
    num_columns,
    scalars,  # scale and bias
    EPILOGUE: tl.constexpr,
    ID_RULE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    DLOGITS_SCALE: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SUBTILES: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    # None where there is none, as all that follows: features and 1 / norms, ids, the columns of targets
    x=None,
    y=None,
    width=None,
    x_stride=None,
    y_stride=None,
    x_norm=None,
    y_norm=None,
    x_ids=None,
    y_ids=None,
    targets=None,
    target_offset=None,
    label_smoothing=None,
    # for gradients, y's of two-sided losses: row_grad as a Block divides it among positives, sum_exp and columns
    x_label=None,
    y_label=None,
    x_max=None,
    y_max=None,
    x_factor=None,
    y_factor=None,
    x_uniform=None,
    y_uniform=None,
    # X @ Y.T: an input where x is None, which dlogits may overwrite; else an output
    dots=None,
    dots_stride=None,
    # outputs: partial statistics in some SLOTS, dS; sums of dS * x.y and of dS (sigmoid: a bias changes no softmax), to
    # which every program adds in a place of its own
    x_partials=None,
    y_partials=None,
    SLOTS: tl.constexpr = None,
    dlogits=None,
    dlogits_stride=None,
    sums=None,
):
    """One block of a tile: the outputs that are not None."""
    STATISTICS: tl.constexpr = x_partials is not None
    GRADIENTS: tl.constexpr = x_label is not None
    SUBTILE: tl.constexpr = BLOCK_COLUMNS // SUBTILES
    SHARED: tl.constexpr = y_max is not None and target_offset is None and ID_RULE != "positive"
    # Which block: grouped as in Triton's matmul tutorial.
    num_down, num_across = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_columns, BLOCK_COLUMNS)
    first_row = tl.program_id(0) // (GROUP_ROWS * num_across) * GROUP_ROWS
    group_rows = tl.minimum(num_down - first_row, GROUP_ROWS)
    in_group = tl.program_id(0) - first_row * num_across
    block_row, block_column = first_row + in_group % group_rows, in_group // group_rows
    first_row = block_row * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_mask = row < num_rows
    columns = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    if x is not None:
        x_at = x + tl.minimum(row, num_rows - 1).to(tl.int64) * x_stride
        y_at = y + tl.minimum(columns, num_columns - 1).to(tl.int64) * y_stride
        block = _multiply(x_at, y_at, width, EVEN_WIDTH, BLOCK_WIDTH)
    scale, bias = tl.load(scalars), tl.load(scalars + 1)
    statistics = _neutral(BLOCK_ROWS)
    scale_sum, bias_sum = 0.0, 0.0
    top, near = 0.0, False
    if SHARED:
        top, x_lowest = _range(x_max, row, row_mask)
        y_lowest = _range(y_max, columns, columns < num_columns)[1]
        near = top - tl.minimum(x_lowest, y_lowest) < SPREAD
    for index in tl.static_range(SUBTILES):
        first_column = block_column * BLOCK_COLUMNS + index * SUBTILE
        column = first_column + tl.arange(0, SUBTILE)
        column_mask = column < num_columns
        in_tile = row_mask[:, None] & column_mask[None, :]
        if dots is not None:
            dots_at = dots + row[:, None].to(tl.int64) * dots_stride + column[None, :]
        if x is None:
            xy = tl.load(dots_at, mask=in_tile, other=0.0)
            if DIAGONAL:  # a library rounds (i, j) and (j, i) differently
                mirrored = dots + column[None, :].to(tl.int64) * dots_stride + row[:, None]
                xy = 0.5 * (xy + tl.load(mirrored, mask=in_tile, other=0.0))
        else:
            xy = _subtile(block, index, SUBTILES, BLOCK_ROWS, BLOCK_COLUMNS)
        if x_norm is not None:
            # The norms are multiplied first, so that (i, j) and (j, i) are rounded alike.
            norm = tl.load(x_norm + row, mask=row_mask, other=0.0)[:, None]
            xy *= norm * tl.load(y_norm + column, mask=column_mask, other=0.0)[None, :]
        if x is not None and dots is not None:
            tl.store(dots_at, xy, mask=in_tile)
        if STATISTICS or GRADIENTS:
            mask = in_tile & (row[:, None] != column[None, :]) if DIAGONAL else in_tile
            mask, positive = _pairs(
                mask, row, column, row_mask, num_columns, targets, target_offset, x_ids, y_ids, ID_RULE
            )
            s = tl.where(mask, xy * scale + bias, NEG_INF)
            if ID_RULE == "positive":
                positive &= s != NEG_INF  # the mask again, without the registers to keep it in
            if ID_RULE == "positive" or targets is not None:
                found = tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0
            elif target_offset is not None:
                to_column = first_row.to(tl.int64) + target_offset - first_column
                found = (to_column < SUBTILE) & (to_column > -BLOCK_ROWS)
            else:
                found = False
        if STATISTICS:
            statistics = _add_subtile(statistics, s, positive, found, EPILOGUE, SLOTS, 1)
            if y_partials is not None:
                of_columns = _add_subtile(_neutral(SUBTILE), s, positive, found, EPILOGUE, SLOTS, 0)
                at = y_partials + block_row.to(tl.int64) * num_columns + column
                _store(of_columns, SLOTS, at, num_down.to(tl.int64) * num_columns, column_mask)
        if GRADIENTS:
            if EPILOGUE == "softmax":
                # row_grad * (probability - label) of the rows and, where columns have a loss too, of the columns.
                x_shift, x_part = _along(x_max, row, row_mask, 1), _along(x_factor, row, row_mask, 1)
                if y_max is None:
                    ds = tl.exp(s - x_shift) * x_part
                else:
                    y_shift, y_part = _along(y_max, column, column_mask, 0), _along(y_factor, column, column_mask, 0)
                    if near:  # SPREAD is for rows that are not there
                        x_part *= tl.exp(tl.minimum(top - x_shift, SPREAD))
                        y_part *= tl.exp(tl.minimum(top - y_shift, SPREAD))
                        ds = tl.exp(s - top) * (x_part + y_part)
                    else:
                        ds = tl.exp(s - x_shift) * x_part + tl.exp(s - y_shift) * y_part
                label, uniform = _labels(row, row_mask, x_label, x_uniform, label_smoothing, 1)
                if y_label is not None:
                    y_labels, y_uniforms = _labels(column, column_mask, y_label, y_uniform, label_smoothing, 0)
                    label, uniform = label + y_labels, uniform + y_uniforms
                if label_smoothing is not None:
                    ds = tl.where(s == NEG_INF, 0.0, ds - uniform)
                ds -= tl.where(positive, label, 0.0)
            else:
                ds = _sigmoid(s, positive) * _along(x_label, row, row_mask, 1)
            if sums is not None:
                scale_sum += tl.sum(tl.sum(ds * xy, 1), 0)
                if EPILOGUE == "sigmoid":
                    bias_sum += tl.sum(tl.sum(ds, 1), 0)
            if dlogits is not None:
                dlogits_at = dlogits + row[:, None].to(tl.int64) * dlogits_stride + column[None, :]
                tl.store(dlogits_at, (ds * DLOGITS_SCALE).to(dlogits.dtype.element_ty), mask=in_tile)
    if STATISTICS:
        at = x_partials + block_column.to(tl.int64) * num_rows + row
        _store(statistics, SLOTS, at, num_across.to(tl.int64) * num_rows, row_mask)
    if sums is not None:
        at = sums + 2 * tl.program_id(0)
        if DIAGONAL:  # whose dlogits serve both triangles, and both are in it
            scale_sum *= 0.5
        tl.store(at, tl.load(at) + scale_sum.to(tl.float64))
        if EPILOGUE == "sigmoid":
            tl.store(at + 1, tl.load(at + 1) + bias_sum.to(tl.float64))


# ---- the matrix product


@triton.jit
def _multiply(x_at, y_at, width, EVEN_WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """A block of X @ Y.T, in float32, from the addresses of its rows and columns."""
    k = tl.arange(0, BLOCK_WIDTH)
    a_at, b_at = x_at[:, None] + k[None, :], y_at[None, :] + k[:, None]
    xy = tl.zeros((x_at.shape[0], y_at.shape[0]), dtype=tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        if EVEN_WIDTH:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(start + k < width)[None, :], other=0.0)
            b = tl.load(b_at, mask=(start + k < width)[:, None], other=0.0)
        if INTERPRETED and a.dtype == tl.bfloat16:  # which it stores as integers, and would multiply those
            a, b = a.to(tl.float32), b.to(tl.float32)
        xy = tl.dot(a, b, xy, input_precision="tf32" if a.dtype == tl.float32 else None)
        a_at += BLOCK_WIDTH
        b_at += BLOCK_WIDTH
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


# ---- the epilogue


@triton.jit
def _pairs(mask, row, column, row_mask, num_columns, targets, target_offset, x_ids, y_ids, ID_RULE: tl.constexpr):
    """Which pairs have a logit, and which of them are positives. Consecutive targets are not loaded."""
    positive = tl.zeros((1, 1), dtype=tl.int1)
    if target_offset is not None:
        if targets is None:
            target = row.to(tl.int64) + target_offset
        else:
            target = tl.load(targets + row, mask=row_mask, other=0) + target_offset
        inside = row_mask & (target >= 0) & (target < num_columns)
        positive = tl.where(inside, target, -1).to(tl.int32)[:, None] == column[None, :]
    if ID_RULE != "ignore":
        x_id = tl.load(x_ids + row, mask=row_mask, other=0)
        y_id = tl.load(y_ids + column, mask=column < num_columns, other=0)
        same = x_id[:, None] == y_id[None, :]
        if ID_RULE == "mask":
            mask &= positive | (same == 0)
        else:
            positive |= same
    return mask, positive


@triton.jit
def _finite(max_):
    """To subtract: 0 where nothing counts, so that -inf - -inf does not become NaN."""
    return tl.where(max_ == NEG_INF, 0.0, max_)


@triton.jit
def _neutral(LENGTH: tl.constexpr):
    """The partial statistics of no logits, by slot."""
    zeros, lowest = tl.zeros((LENGTH,), tl.float32), tl.full((LENGTH,), NEG_INF, tl.float32)
    return lowest, zeros, zeros, zeros, zeros, zeros, lowest


@triton.jit
def _add_subtile(old, s, positive, found, EPILOGUE: tl.constexpr, SLOTS: tl.constexpr, AXIS: tl.constexpr):
    """The partial statistics of rows (axis 1) or columns, with one more subtile, by an online softmax.

    `found`: the subtile has positives. The compiler drops what is computed here and not stored.
    """
    old_max, sum_, logit_sum, logit_count, positive_sum, positive_count, top_positive = old
    max_ = tl.maximum(old_max, tl.max(s, AXIS))
    below = s - tl.expand_dims(_finite(max_), AXIS)
    if AXIS == 1:  # a column has no earlier subtiles
        moved = _finite(old_max) - _finite(max_)
        positive_sum += positive_count * moved
        logit_sum += logit_count * moved
        if EPILOGUE == "softmax":
            sum_ *= tl.exp(old_max - _finite(max_))
    sum_ += tl.sum(tl.exp(below) if EPILOGUE == "softmax" else _softplus(tl.where(positive, -s, s)), AXIS)
    if SLOTS[LOGIT_SUM]:
        logit_sum += tl.sum(tl.where(s == NEG_INF, 0.0, below), AXIS)
        logit_count += tl.sum((s != NEG_INF).to(tl.float32), AXIS)
    if SLOTS[POSITIVE_SUM]:  # noqa: SIM102, known when compiling, unlike the next
        if found:
            positive_sum += tl.sum(tl.where(positive, below, 0.0), AXIS)
            positive_count += tl.sum(positive.to(tl.float32), AXIS)
            top_positive = tl.maximum(top_positive, tl.max(tl.where(positive, s, NEG_INF), AXIS))
    return max_, sum_, logit_sum, logit_count, positive_sum, positive_count, top_positive


@triton.jit
def _store(statistics, SLOTS: tl.constexpr, at, stride, mask):
    for slot in tl.static_range(len(SLOTS)):
        if SLOTS[slot]:
            tl.store(at + slot * stride, statistics[slot], mask=mask)


@triton.jit
def _softplus(z):
    """log(1 + exp(z)), with all digits where it is small."""
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    rounded = u == 1.0
    return tl.maximum(z, 0.0) + tl.where(rounded, e, tl.log(u) * (e / tl.where(rounded, 1.0, u - 1.0)))


@triton.jit
def _sigmoid(s, positive):
    """d softplus: sigmoid(s) for a negative, -sigmoid(-s) for a positive."""
    z = tl.where(positive, -s, s)
    e = tl.exp(-tl.abs(z))
    ds = tl.where(z >= 0, 1.0, e) / (1.0 + e)
    return tl.where(positive, -ds, ds)


@triton.jit
def _labels(row, mask, label, uniform, label_smoothing, AXIS: tl.constexpr):
    """row_grad * label of a positive, and of any pair, of rows (axis 1) or columns."""
    share = _along(label, row, mask, AXIS)
    if label_smoothing is None:
        return share, 0.0
    else:
        return share * (1.0 - label_smoothing), label_smoothing * _along(uniform, row, mask, AXIS)


@triton.jit
def _range(vector, row, mask):
    """The largest and the smallest number of a block."""
    numbers = tl.load(vector + row, mask=mask, other=0.0).to(tl.float32)
    return tl.max(tl.where(mask, numbers, NEG_INF), 0), tl.min(tl.where(mask, numbers, -NEG_INF), 0)


@triton.jit
def _along(vector, row, mask, AXIS: tl.constexpr):
    """A number per row (axis 1) or column, to combine with S."""
    return tl.expand_dims(tl.load(vector + row, mask=mask, other=0.0).to(tl.float32), AXIS)


# ---- merging


# Fields of a State, in the order of the kernels' pointers.
FIELDS = ("max", "sum_exp", "softplus_sum", "logit_sum", "logit_count", "top")
FIELDS = (*FIELDS, "positive_sum", "positive_count", "top_positive")

_NUMBERS = ["positives", *(f"{side}_{name}" for side in "xy" for name in ("blocks", "stride", "length"))]
_ADDRESSES = [f"{side}_{name}" for side in "xy" for name in ("partials", "state")]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ADDRESSES)
def merge_kernel(
    positives,
    x_partials,
    x_blocks,
    x_state,
    x_stride,
    x_length,
    X_PLACES: tl.constexpr,
    Y_PLACES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    y_partials=None,
    y_blocks=None,
    y_state=None,
    y_stride=None,
    y_length=None,
):
    """Add the partial statistics of all blocks to the state of every row, and of every column: `State.merge` for many
    pieces at once. PLACES: the rows of the state's table that are FIELDS; None where there is none."""
    program, x_programs = tl.program_id(0), tl.cdiv(x_length, ROWS)
    if program < x_programs:
        where = (x_state, x_stride, x_partials, program * ROWS + tl.arange(0, ROWS), x_length, x_blocks)
        _merge_side(where, positives, X_PLACES, BLOCKS)
    elif y_partials is not None:
        row = (program - x_programs) * ROWS + tl.arange(0, ROWS)
        _merge_side((y_state, y_stride, y_partials, row, y_length, y_blocks), positives, Y_PLACES, BLOCKS)


@triton.jit
def _merge_side(where, positives, PLACES: tl.constexpr, BLOCKS: tl.constexpr):
    state, stride, _, row, length, _ = where
    if PLACES[1] is not None:
        old_max = tl.load(state + PLACES[0] * stride.to(tl.int64) + row, mask=row < length, other=0.0)
        max_ = _finite(_merge(PLACES[0], MAX, "maximum", where, BLOCKS))
        _merge(PLACES[1], SUM, "exponentials", where, BLOCKS, max_, tl.exp(old_max - max_))
    _merge(PLACES[2], SUM, "sum", where, BLOCKS)
    _merge(PLACES[3], LOGIT_SUM, "logits", where, BLOCKS)
    _merge(PLACES[4], LOGIT_COUNT, "sum", where, BLOCKS)
    _merge(PLACES[5], MAX, "maximum", where, BLOCKS)
    if positives:
        _merge(PLACES[6], POSITIVE_SUM, "logits", where, BLOCKS)
        _merge(PLACES[7], POSITIVE_COUNT, "sum", where, BLOCKS)
        _merge(PLACES[8], TOP_POSITIVE, "maximum", where, BLOCKS)


@triton.jit
def _merge(
    PLACE: tl.constexpr, SLOT: tl.constexpr, KIND: tl.constexpr, where, BLOCKS: tl.constexpr, max_=None, moved=1.0
):
    """Merge one slot of all blocks into a field of the state. Returns the field.

    `max_` is the new maximum of exponentials, and `moved` turns the sum so far into one below it.
    """
    if PLACE is None:
        return None
    else:
        state, stride, partials, row, length, num_blocks = where
        field = state + PLACE * stride.to(tl.int64) + row
        value = tl.load(field, mask=row < length, other=0.0) * moved
        for first in range(0, num_blocks, BLOCKS):
            block = first + tl.arange(0, BLOCKS)[:, None]
            mask = (block < num_blocks) & (row < length)[None, :]
            piece = partials + block.to(tl.int64) * length + row[None, :]
            slot = num_blocks.to(tl.int64) * length
            new = tl.load(piece + SLOT * slot, mask=mask, other=NEG_INF if KIND == "maximum" else 0.0).to(tl.float64)
            if KIND == "maximum":
                value = tl.maximum(value, tl.max(new, 0))
            else:
                if KIND != "sum":
                    block_max = tl.load(piece + MAX * slot, mask=mask, other=NEG_INF)
                if KIND == "exponentials":
                    new *= tl.exp(block_max - max_.to(tl.float32)[None, :]).to(tl.float64)
                if KIND == "logits":  # of which MAX was subtracted
                    count = tl.load(piece + (SLOT + 1) * slot, mask=mask, other=0.0).to(tl.float64)
                    new += _finite(block_max).to(tl.float64) * count
                value += tl.sum(new, 0)
        tl.store(field, value, mask=row < length)
        return value
