# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the token statistics: one read of the logits forward, one read and one write backward.

A program walks along a row, or a part, in tiles of [LANES, PER_LANE] logits. A lane is 16 bytes of one thread, loaded at once
if possible, with its own sums relative to its own running maximum; lanes are joined once, at the row's end. Exponentials have
base 2, as in hardware. Without atomic sums a repeat gives the same bits.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)  # below any exponent that matters, yet finite: 0 · _LOWEST is 0 where a logit is −inf
_NO_MASS = tl.constexpr(-2048.0)  # 2^x is 0 below it, and no loss scale makes p's factor infinite (0 · ∞)


@triton.jit
def _above(x, lowest):
    return tl.maximum(x, lowest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite_base(top):
    return tl.where(top == float("-inf"), 0.0, top)  # if all is −inf, e^(z − base) must be 0, not NaN


@triton.jit
def _log2_e_over(inv_t, BOTH: tl.constexpr):
    """Return log2 e / temperature in two parts: rounded to one, it makes every sum of a row too small."""
    exact = inv_t.to(tl.float64) * _LOG2_E
    # if BOTH multiply a logit both are above 0, so −inf stays −inf without a bound, one instruction a logit less
    high = (exact * 0.99999988 if BOTH else exact).to(tl.float32)
    return high, (exact - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _log2(u, lowest, high, low, BOTH: tl.constexpr):
    """Return log2 of e^(u / temperature); from `high` alone it is finite even if u is −inf."""
    return tl.fma(u, high, u * low) if BOTH else _above(u, lowest) * high  # fused: a rounded product would lose `low`


@triton.jit
def _sums_of_both_parts(a, b, high, low):
    """Compute Σ 2^x and Σ 2^x·x, x = u·(high + low), from lane sums of u·high; float64 keeps the gain.

    2^(u·low) is 1 + ln 2·u·low, so the first sum gains a multiple of the second, and the second that of Σ 2^x·x², for which
    b²/a stands; the error is low / high ≤ 6e-8 of the variance of x in a lane. Σ 2^2x stays as it is.
    """
    part = low / high
    root = b * tl.rsqrt(tl.maximum(a, 1e-30))  # a division takes three times as long
    b = b.to(tl.float64) + _LN_2 * part * root * root
    total, moment = tl.split(tl.sum(tl.join(a.to(tl.float64), b), 0))  # joining the lanes once
    return total + _LN_2 * part * moment, moment + part * moment


@triton.jit
def _local_column(targets, row, start, valid):
    y = tl.load(targets + row).to(tl.int64) - start
    return tl.where((y >= 0) & (y < valid), y, -1).to(tl.int32)


@triton.jit
def _in_lanes(x, PER_LANE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return x, marked as whole lanes: the compiler looks for multiples of 16, and 8 half floats are wide."""
    return x // PER_LANE * PER_LANE if ALIGNED else x


@triton.jit
def _columns(LANES: tl.constexpr, PER_LANE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a tile's columns: adjacent in a lane if aligned, else spread so a warp loads neighbours."""
    lane, number = tl.arange(0, LANES)[:, None], tl.arange(0, PER_LANE)[None, :]
    # narrow adjacent loads of a lane would be spread over threads, which would then meet in each tile
    apart = lane // 32 * (32 * PER_LANE) + lane % 32 + 32 * number
    return (lane * PER_LANE + number if ALIGNED else apart).to(tl.int64)  # in 32 bits each address is another sum


@triton.jit
def _add_tile(z, lowest, high, low, m, a, b, q, BOTH: tl.constexpr, ENTROPY: tl.constexpr, SQUARES: tl.constexpr):
    """Add a tile to the lanes' m, a = Σ 2^u, b = Σ 2^u·u, q = Σ 2^2u; u = (z − m)·(high + low·BOTH)."""
    top = tl.maximum(m, tl.max(z, 1))
    base = _finite_base(top)
    fall = _log2(m - base, lowest, high, low, BOTH)
    shrink = tl.exp2(fall)
    u = _log2(z - base[:, None], lowest, high, low, BOTH)
    p = tl.exp2(u)
    if ENTROPY:
        b = shrink * (b + a * fall) + tl.sum(p * u, 1)
    if SQUARES:
        q = shrink * shrink * q + tl.sum(p * p, 1)
    a = shrink * a + tl.sum(p, 1)
    return top, a, b, q


@triton.jit
def _store_half(z, at, columns, last, out, tops, MASKED: tl.constexpr, PER_TOP: tl.constexpr):
    """Store a tile as distances from the maximum of every PER_TOP columns, lanes of one warp: no barrier."""
    LANES: tl.constexpr = z.shape[0]
    PER_GROUP: tl.constexpr = PER_TOP // z.shape[1]
    top = _finite_base(tl.max(tl.reshape(tl.max(z, 1), [LANES // PER_GROUP, PER_GROUP]), 1))
    top = tl.reshape(tl.broadcast_to(top[:, None], [LANES // PER_GROUP, PER_GROUP]), [LANES])
    lane = tl.arange(0, LANES)
    first = lane % PER_GROUP == 0
    if MASKED:
        first &= at + lane * z.shape[1] < last
    tl.store(out + (at + columns), z - top[:, None], mask=at + columns < last if MASKED else None)
    tl.store(tops + at // PER_TOP + lane // PER_GROUP, top, mask=first)


@triton.jit(do_not_specialize=["start", "tokens"])
def stats_kernel(
    logits, targets, keep, inv_t, parts, half, tops,
    start, valid, tokens, row_stride, column_stride, half_stride, tops_stride, inv_t_stride, columns_per_program,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, PER_TOP: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
    ALIGNED_ROWS: tl.constexpr, ALIGNED_ENDS: tl.constexpr,
):  # fmt: skip
    """Compute (m, a, t, b, q) of a row's part, [splits, tokens, 3 + ENTROPY + SQUARES], of kept rows only.

    With PER_TOP also store the logits as `half`: distances from `tops`, the maxima of every PER_TOP columns.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCK: tl.constexpr = LANES * PER_LANE
    BOTH: tl.constexpr = not ENTROPY  # b corrects for `low`, which saves a multiplication a logit
    first = split * columns_per_program
    end = tl.minimum(first + columns_per_program, _in_lanes(valid, PER_LANE, ALIGNED_ENDS))
    last = tl.where(tl.load(keep + row) != 0, end, first)
    full_end = first + (last - first) // BLOCK * BLOCK
    z_row = logits + _in_lanes(row * row_stride, PER_LANE, ALIGNED_ROWS)
    # before the loop, which hides the latency of two loads
    y = _local_column(targets, row, start, valid)
    z_y = tl.load(z_row + y.to(tl.int64) * column_stride, mask=(y >= first) & (y < last), other=float("-inf"))
    step = tl.load(inv_t + row * inv_t_stride)
    high, low = _log2_e_over(step, BOTH)
    # Triton 3.8's interpreter takes no maximum of a division with a constant on the left
    lowest = tl.maximum(tl.full([], _LOWEST, tl.float32) / high, _LOWEST * 1e8)
    columns = _columns(LANES, PER_LANE, ALIGNED_ROWS)

    m, none = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    a, b, q = none, none, none
    if PER_TOP:
        half_row = half + _in_lanes(row * half_stride, PER_LANE, ALIGNED_ROWS)
        tops_row = tops + row * tops_stride
    for at in range(first, full_end, BLOCK):  # no mask: it would prevent wide loads
        z = tl.load(z_row + (at + columns) * column_stride).to(tl.float32)
        m, a, b, q = _add_tile(z, lowest, high, low, m, a, b, q, BOTH, ENTROPY, SQUARES)
        if PER_TOP:
            _store_half(z, at, columns, last, half_row, tops_row, False, PER_TOP)
    if full_end < last:
        inside = columns < last - full_end
        z = tl.load(z_row + (full_end + columns) * column_stride, mask=inside, other=float("-inf")).to(tl.float32)
        m, a, b, q = _add_tile(z, lowest, high, low, m, a, b, q, BOTH, ENTROPY, SQUARES)
        if PER_TOP:
            _store_half(z, full_end, columns, last, half_row, tops_row, True, PER_TOP)

    top = tl.max(m, 0)
    base = _finite_base(top)
    fall = _log2(m - base, lowest, high, low, BOTH)
    shrink = tl.exp2(fall)
    out = parts + (split.to(tl.int64) * tokens + row) * (3 + ENTROPY + SQUARES)
    tl.store(out, top)
    tl.store(out + 2, (z_y.to(tl.float32) - base) * step)
    if ENTROPY:
        total, moment = _sums_of_both_parts(shrink * a, shrink * (b + a * fall), high, low)
        tl.store(out + 3, (moment * _LN_2).to(tl.float32))
    else:
        total = tl.sum(shrink * a, 0)
    tl.store(out + 1, total.to(tl.float32))
    if SQUARES:
        tl.store(out + 4, tl.sum(shrink * shrink * q, 0))


@triton.jit
def _sum_parts(parts, row, tokens, count, step, ENTROPY: tl.constexpr, SQUARES: tl.constexpr):
    """Combine (m, a, t, b, q) of some rows from `count` parts, with loads of eight parts in flight."""
    WIDTH: tl.constexpr = 3 + ENTROPY + SQUARES
    place, next_part = parts + row * WIDTH, tokens.to(tl.int64) * WIDTH
    top = tl.full(row.shape, float("-inf"), tl.float32)
    for at in range(0, count, 8):
        for i in tl.static_range(8):
            here = row < tl.where(at + i < count, tokens, 0)
            top = tl.maximum(top, tl.load(place + (at + i) * next_part, mask=here, other=float("-inf")))
    base = _finite_base(top)
    none = tl.zeros(row.shape, tl.float32)
    total, moment, squares = none, none, none
    target = tl.full(row.shape, float("-inf"), tl.float32)
    for at in range(0, count, 8):
        for i in tl.static_range(8):
            part, here = place + (at + i) * next_part, row < tl.where(at + i < count, tokens, 0)
            a = tl.load(part + 1, mask=here, other=0.0)
            fall = _above((tl.load(part, mask=here, other=float("-inf")) - base) * step, _LOWEST)
            shrink = tl.exp(fall)
            total += a * shrink
            logit = tl.load(part + 2, mask=here, other=float("-inf"))
            target = tl.maximum(target, logit + fall, propagate_nan=tl.PropagateNan.ALL)
            if ENTROPY:
                moment += shrink * (tl.load(part + 3, mask=here, other=0.0) + a * fall)
            if SQUARES:
                squares += shrink * shrink * tl.load(part + 4, mask=here, other=0.0)
    return top, total, target, moment, squares


@triton.jit(do_not_specialize=["count", "tokens"])
def merge_kernel(
    parts, inv_t, merged, tokens, count, inv_t_stride,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge [count, tokens, W] parts of a shard's rows to [tokens, W]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tokens
    step = tl.load(inv_t + row * inv_t_stride, mask=inside, other=1.0)
    top, total, target, moment, squares = _sum_parts(parts, row, tokens, count, step, ENTROPY, SQUARES)
    out = merged + row * (3 + ENTROPY + SQUARES)
    tl.store(out, top, mask=inside)
    tl.store(out + 1, total, mask=inside)
    tl.store(out + 2, target, mask=inside)
    if ENTROPY:
        tl.store(out + 3, moment, mask=inside)
    if SQUARES:
        tl.store(out + 4, squares, mask=inside)


@triton.jit(do_not_specialize=["count", "tokens"])
def combine_kernel(
    parts, keep, inv_t, logprobs, entropies, lses, rows, sums, tokens, count, inv_t_stride,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine parts [count, tokens, W] to log-prob, entropy, lse and Σπ², and the rows for the backward."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tokens
    step = tl.load(inv_t + row * inv_t_stride, mask=inside, other=1.0)
    kept = tl.load(keep + row, mask=inside, other=0) != 0
    top, total, target, moment, squares = _sum_parts(parts, row, tokens, count, step, ENTROPY, SQUARES)
    top, total = tl.where(kept, top, 0.0), tl.where(kept, total, 1.0)  # finite, also where never read
    log_a = tl.log(total)
    SAVED: tl.constexpr = 2 + ENTROPY
    tl.store(logprobs + row, tl.where(kept, target - log_a, 0.0), mask=inside)
    tl.store(lses + row, tl.where(kept, top * step + log_a, 0.0), mask=inside)
    tl.store(rows + row * SAVED, top, mask=inside)
    tl.store(rows + row * SAVED + 1, log_a, mask=inside)
    if ENTROPY:
        entropy = tl.where(kept, log_a - moment / total, 0.0)
        tl.store(entropies + row, entropy, mask=inside)
        tl.store(rows + row * SAVED + 2, entropy, mask=inside)
    if SQUARES:
        tl.store(sums + row, tl.where(kept, squares / (total * total), 0.0), mask=inside)


@triton.jit
def _gradient_of_tile(z, column, y, top, scale, log2_a, c0, c1, ct, ENTROPY: tl.constexpr):
    log2_p = (z - top) * scale - log2_a
    p = tl.exp2(log2_p)
    dz = p * (c0 + c1 * tl.maximum(log2_p, _NO_MASS, propagate_nan=tl.PropagateNan.ALL)) if ENTROPY else p * c0
    return tl.where(column == y, dz + ct, dz)


@triton.jit(do_not_specialize=["start"])
def gradient_kernel(
    logits, tops, targets, keep, inv_t, rows, g_logprobs, g_entropies, g_lses, out,
    start, valid, width, row_stride, column_stride, tops_stride, out_row_stride, out_column_stride, inv_t_stride,
    columns_per_program, SAVED: tl.constexpr, LOGPROB: tl.constexpr, ENTROPY: tl.constexpr, LSE: tl.constexpr,
    PER_TOP: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr, ALIGNED_ROWS: tl.constexpr, ALIGNED_ENDS: tl.constexpr,
):  # fmt: skip
    """Compute dz = [g_logp·(1[y] − p) − g_ent·p·(log p + H) + g_lse·p] / T; `out` may be `logits`.

    Rows that are not kept, and padding from `valid` to `width`, get an exact 0 unread. With PER_TOP the logits are distances
    from `tops`, see `stats_kernel`.
    """
    # backwards: the forward's last rows are still cached
    row = tl.num_programs(0) - 1 - tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = LANES * PER_LANE
    first = tl.program_id(1) * columns_per_program
    last = tl.minimum(first + columns_per_program, _in_lanes(width, PER_LANE, ALIGNED_ENDS))
    kept = tl.load(keep + row) != 0
    z_row = logits + _in_lanes(row * row_stride, PER_LANE, ALIGNED_ROWS)
    out_row = out + _in_lanes(row * out_row_stride, PER_LANE, ALIGNED_ROWS)
    columns = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]

    step = tl.load(inv_t + row * inv_t_stride)
    scale = step * _LOG2_E
    top = tl.load(rows + row * SAVED)
    log2_a = tl.load(rows + row * SAVED + 1) * _LOG2_E
    c0, c1, ct = 0.0, 0.0, 0.0
    if LSE:
        c0 += tl.load(g_lses + row) * step
    if LOGPROB:
        ct += tl.load(g_logprobs + row) * step
        c0 -= ct
    if ENTROPY:
        c1 -= tl.load(g_entropies + row) * step
        c0 += c1 * tl.load(rows + row * SAVED + 2)
        c1 *= _LN_2
    y = _local_column(targets, row, start, valid)
    real = tl.where(kept, tl.maximum(tl.minimum(last, _in_lanes(valid, PER_LANE, ALIGNED_ENDS)), first), first)
    full_end = first + (real - first) // BLOCK * BLOCK
    tops_row = tops + row * tops_stride if PER_TOP else tops
    lane = tl.arange(0, LANES) * PER_LANE
    for at in range(first, full_end, BLOCK):
        column = at + columns
        z = tl.load(z_row + column.to(tl.int64) * column_stride).to(tl.float32)
        base = (top - tl.load(tops_row + (at + lane) // PER_TOP))[:, None] if PER_TOP else top
        dz = _gradient_of_tile(z, column, y, base, scale, log2_a, c0, c1, ct, ENTROPY)
        tl.store(out_row + column.to(tl.int64) * out_column_stride, dz)
    for at in range(full_end, last, BLOCK):
        column = at + columns
        z = tl.load(z_row + column.to(tl.int64) * column_stride, mask=column < real, other=float("-inf")).to(tl.float32)
        inside = at + lane < real
        base = (top - tl.load(tops_row + (at + lane) // PER_TOP, mask=inside, other=0.0))[:, None] if PER_TOP else top
        dz = _gradient_of_tile(z, column, y, base, scale, log2_a, c0, c1, ct, ENTROPY)
        dz = tl.where(column < real, dz, 0.0)
        tl.store(out_row + column.to(tl.int64) * out_column_stride, dz, mask=column < last)
