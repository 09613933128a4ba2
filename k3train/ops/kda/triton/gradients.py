"""The last two kernels of backward: from the chunks' states and errors to the gradients of the inputs.

`values_kernel`, one program a chunk and head, leaves dv, the gradients of both products of pairs, and what
`keys_kernel` takes for each token. That one, one program a chunk, head and BK key channels, holds everything
transposed, channels by tokens of a tile: what the decay scales is then the left operand of every product and
stays in registers, and no product is computed for pairs that it masks by whole tiles. What the L2 norm's
gradient needs of whole rows comes without them: with q^, k^ the unit vectors, q^ . dq^ = o . do and
k^ . dk^ = 2 e . dv - v . dv.
See `reference` for the algorithm. Letters: C tokens of a chunk, TILE tokens of a tile, D, Dv head dims.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .prepare import LOG2E, TILE, log_decay

ROWS = tl.constexpr(5)
"""Numbers of a token: q's reciprocal norm by the scale, dq^ along q^ by its norm, k's two likewise, beta."""


@triton.jit
def values_kernel(  # type: ignore[no-untyped-def]
    v, output, grad_output,  # [tokens, H, Dv]
    beta,  # [tokens, H]
    chunks,  # [N, 4]
    norms,  # [2, N, H, C] FP32
    inverse,  # [N, H, C, C]
    errors, grad_errors,  # [N, H, Dv, C]
    grad_v,  # as v
    grad_pairs,  # [2, N, H, C, C], of Aqk and of Akk
    rows,  # [N, H, ROWS, C] FP32
    N, H, scale,
    C: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = grad_pairs.dtype.element_ty
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = tl.load(chunks + chunk * 4).to(tl.int64), tl.load(chunks + chunk * 4 + 1)
    if length == 0:
        return
    place, room = tl.program_id(0).to(tl.int64), (N * H).to(tl.int64)
    row, value = tl.arange(0, C), tl.arange(0, DV)
    valid = (row < length)[:, None]
    first = (start * H + head) * DV
    at = row[:, None] * (H * DV) + value[None, :]
    tall = value[:, None] * C + row[None, :]
    square = row[:, None] * C + row[None, :]
    numbers = rows + place * ROWS * C + row

    grad_out = tl.load(grad_output + first + at, mask=valid, other=0.0).to(KIND)
    out = tl.load(output + first + at, mask=valid, other=0.0).to(tl.float32)
    norm = tl.load(norms + place * C + row)
    tl.store(numbers, norm * scale)
    tl.store(numbers + C, tl.sum(out * grad_out.to(tl.float32), 1) * norm / scale)
    error = tl.load(errors + place * C * DV + tall)
    grad_Aqk = tl.where(row[:, None] >= row[None, :], tl.dot(grad_out, error), 0.0)
    tl.store(grad_pairs + place * C * C + square, grad_Aqk.to(KIND))

    X = tl.load(inverse + place * C * C + square)
    grad_value = tl.dot(tl.trans(X), tl.trans(tl.load(grad_errors + place * C * DV + tall)))
    tl.store(grad_v + first + at, grad_value.to(grad_v.dtype.element_ty), mask=valid)
    values = tl.load(v + first + at, mask=valid, other=0.0).to(tl.float32)
    joint = tl.dot(grad_value.to(KIND), error)
    along = 2 * tl.sum(tl.where(row[:, None] == row[None, :], joint, 0.0), 1) - tl.sum(values * grad_value, 1)
    norm = tl.load(norms + (room + place) * C + row)
    tl.store(numbers + 2 * C, norm)
    tl.store(numbers + 3 * C, along * norm)
    write = tl.load(beta + (start + row) * H + head, mask=row < length, other=0.0)
    tl.store(numbers + 4 * C, write.to(tl.float32))
    grad_Akk = tl.where(row[:, None] > row[None, :], -joint, 0.0)
    tl.store(grad_pairs + (room + place) * C * C + square, grad_Akk.to(KIND))


@triton.jit
def _rounded(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """To the products' type: pairs of BF16 numbers that the compiler does not take apart again."""
    if KIND == tl.bfloat16:  # noqa: SIM300
        x = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        x = x.to(KIND)
    return x


@triton.jit
def _wide(x):  # type: ignore[no-untyped-def]
    """In FP32, pairs of BF16 numbers likewise."""
    if x.dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def _tile(start, at, valid):  # type: ignore[no-untyped-def]
    """Of a tile's tokens, transposed; zero behind the document's end."""
    return tl.load(start + at, mask=valid[None, :], other=0.0)


@triton.jit
def _numbers(rows, which, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the `ROWS` of a tile [1, TILE]."""
    return tl.load(rows + which * C + tl.arange(0, TILE))[None, :]


@triton.jit
def _slope(logits, bias, steep, bound):  # type: ignore[no-untyped-def]
    """The log-decay's derivative to the logits, and the negated sigmoid's argument to base 2."""
    against = tl.minimum((steep * -LOG2E) * (logits.to(tl.float32) + bias), 100.0)
    spread = tl.exp2(against)
    root = tl.rsqrt(1 + spread)
    square = root * root
    # Not through 1 - sigmoid, of which nothing but rounding is left where the gate is full.
    return (steep * bound) * square * (spread * square), against


@triton.jit
def _sum(x, ones):  # type: ignore[no-untyped-def]
    """Running sum along the tokens, as products with ones: two BF16 parts keep 16 bits of x."""
    high = _rounded(x, ones.dtype)
    low = _rounded(x - _wide(high), ones.dtype)
    return tl.dot(low, ones, tl.dot(high, ones))


@triton.jit
def _column(x, token):  # type: ignore[no-untyped-def]
    """One token's column [BK, 1]."""
    return tl.sum(tl.where(tl.arange(0, TILE)[None, :] == token, x, 0.0), 1)[:, None]


@triton.jit
def _again(total, opposite):  # type: ignore[no-untyped-def]
    """exp2(middle - total) by other steps: of the same ones the compiler would keep the first result."""
    return tl.exp2(0.0 - (total + opposite))


@triton.jit
def _through_state(x, total, state, grads):  # type: ignore[no-untyped-def]
    """Shares of queries or keys x, and of the log-decays, by the state in front of the chunk."""
    share = tl.dot(state, grads) * tl.exp2(total)
    return share, x * share


@triton.jit
def _by_state(  # type: ignore[no-untyped-def]
    q, k, grad_output, grad_v, error, rows, at, at_value, valid, total, end, state, after, last,
    C: tl.constexpr,
):  # fmt: skip
    """A tile's queries, keys, and what the states around the chunk give of their gradients.

    Gives query, key, their gradients so far (the key's negated), that of the written key, shares of the
    log-decays by token, and `last`, those by the end of the chunk, with this tile's.
    """
    norm, write = _numbers(rows, 0, C), _numbers(rows, 4, C)
    key = _tile(k, at, valid).to(tl.float32) * _numbers(rows, 2, C)
    query = _tile(q, at, valid).to(tl.float32) * norm
    grads = _tile(grad_output, at_value, valid).to(state.dtype)
    grad_query, sums = _through_state(query, total, state, grads)
    grads = _tile(grad_v, at_value, valid).to(state.dtype)
    grad_key, by_key = _through_state(key, total, state, grads)
    sums -= by_key
    to_written = tl.dot(after, tl.load(error)) * tl.exp2(end - total)
    by_end = key * write * to_written
    last += tl.sum(by_end, 1)[:, None]
    sums -= by_end
    grad_query = grad_query * norm - query * _numbers(rows, 1, C)
    return query, key, grad_query, grad_key, to_written, sums, last


@triton.jit
def _store_queries(  # type: ignore[no-untyped-def]
    grad_q, at, valid, grad_query, back, left, left_query, norm
):
    """Gives the log-decays' share by the pairs of tokens."""
    grad_query += back * (left * norm)
    tl.store(grad_q + at, grad_query.to(grad_q.dtype.element_ty), mask=valid[None, :])
    return _wide(left_query) * back


@triton.jit
def _store_keys(  # type: ignore[no-untyped-def]
    grad_k, grad_beta, k, rows, at, by_token, valid, grad_key, grad_written, C: tl.constexpr
):
    norm, write = _numbers(rows, 2, C), _numbers(rows, 4, C)
    key = _tile(k, at, valid).to(tl.float32) * norm
    tl.store(grad_beta + by_token, tl.sum(key * grad_written, 0), mask=valid)
    grad_key = (grad_key + write * grad_written) * norm - key * _numbers(rows, 3, C)
    tl.store(grad_k + at, grad_key.to(grad_k.dtype.element_ty), mask=valid[None, :])


@triton.jit
def _second_tile(  # type: ignore[no-untyped-def]
    grad_q, grad_k, grad_beta, q, k, grad_output, grad_v, error, rows, at, at_value, by_token, valid,
    total, end, state, after, last, middle, pairs, pairs_k, written, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the second tile, with keys `written` in the first one, too.

    Gives the log-decays' shares by token, `last` with this tile's, and the first tile's written keys'
    gradient.
    """
    query, key, grad_query, grad_key, to_written, sums, last = _by_state(
        q, k, grad_output, grad_v, error, rows, at, at_value, valid, total, end, state, after, last, C
    )
    norm, write = _numbers(rows, 0, C), _numbers(rows, 4, C)
    left = tl.exp2(total - middle)
    left_query, left_key = _rounded(query * left, written.dtype), _rounded(key * left, written.dtype)
    written_2 = _rounded(key * write * tl.exp2(middle - total), written.dtype)
    # Sums take the operands as the products saw them, so that a pair's two shares cancel beyond it.
    corner, lower = tl.load(pairs + TILE * C + TILE), tl.load(pairs + TILE * C)
    back = tl.dot(written_2, tl.trans(corner), tl.dot(written, tl.trans(lower)))
    sums += _store_queries(grad_q, at, valid, grad_query, back, left, left_query, norm)
    corner_k, lower_k = tl.load(pairs_k + TILE * C + TILE), tl.load(pairs_k + TILE * C)
    back = tl.dot(written_2, tl.trans(corner_k), tl.dot(written, tl.trans(lower_k)))
    sums += _wide(left_key) * back
    grad_key = back * left - grad_key
    back = tl.dot(left_key, corner_k, tl.dot(left_query, corner))
    sums -= _wide(written_2) * back
    to_written += back * _again(total, 0.0 - middle)
    across = tl.dot(left_key, lower_k, tl.dot(left_query, lower))
    _store_keys(grad_k, grad_beta, k, rows, at, by_token, valid, grad_key, to_written, C)
    return sums, last, across


@triton.jit
def _first_tile(  # type: ignore[no-untyped-def]
    grad_q, grad_k, grad_beta, q, k, grad_output, grad_v, error, rows, at, at_value, by_token, valid,
    total, end, state, after, last, middle_2, pairs, pairs_k, written_2, across, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the first tile, of which the second had keys `written_2`, with gradient `across`.

    Gives the log-decays' shares by token, and `last` with this tile's.
    """
    KIND: tl.constexpr = written_2.dtype
    query, key, grad_query, grad_key, to_written, sums, last = _by_state(
        q, k, grad_output, grad_v, error, rows, at, at_value, valid, total, end, state, after, last, C
    )
    to_written += across * _again(total, 0.0 - middle_2)
    sums -= _wide(written_2) * across
    norm, write, middle = _numbers(rows, 0, C), _numbers(rows, 4, C), _column(total, TILE // 2)
    left, right = tl.exp2(total - middle), tl.exp2(middle - total)
    left_query, left_key = _rounded(query * left, KIND), _rounded(key * left, KIND)
    written = _rounded(key * write * right, KIND)
    corner, corner_k = tl.load(pairs), tl.load(pairs_k)
    back = tl.dot(written, tl.trans(corner))
    sums += _store_queries(grad_q, at, valid, grad_query, back, left, left_query, norm)
    back = tl.dot(written, tl.trans(corner_k))
    sums += _wide(left_key) * back
    grad_key = back * left - grad_key
    back = tl.dot(left_key, corner_k, tl.dot(left_query, corner))
    sums -= _wide(written) * back
    to_written += back * right
    _store_keys(grad_k, grad_beta, k, rows, at, by_token, valid, grad_key, to_written, C)
    return sums, last


@triton.jit
def _store_logits(grad_z, z, at, valid, grad_g, bias, steep, bound):  # type: ignore[no-untyped-def]
    """Gives the sums over the tokens for dt_bias and A_log [BK]."""
    slope, against = _slope(_tile(z, at, valid), bias, steep, bound)
    grad = grad_g * slope
    tl.store(grad_z + at, grad.to(grad_z.dtype.element_ty), mask=valid[None, :])
    return tl.sum(grad, 1), tl.sum(grad * against, 1)


@triton.jit
def keys_kernel(  # type: ignore[no-untyped-def]
    q, k, z,  # [tokens, H, D]
    A_log, dt_bias,  # [H], [H * D]
    grad_output, grad_v,  # [tokens, H, Dv]
    chunks,  # [N, 4]
    rows,  # [N, H, ROWS, C] FP32
    grad_pairs,  # [2, N, H, C, C]
    errors, states, behind,  # [N, H, Dv, C], two [N, H, Dv, D]
    grad_q, grad_k, grad_z,  # as q, k, z
    grad_beta,  # [D / BK, tokens, H] FP32, the programs' shares
    grad_A,  # [N, H, D / BK] FP32, likewise
    grad_bias,  # [N, H, D] FP32, likewise
    tokens, N, H, lower_bound,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = states.dtype.element_ty
    PARTS: tl.constexpr = D // BK
    part, unit = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    chunk, head = unit // H, unit % H
    start, length = tl.load(chunks + chunk * 4).to(tl.int64), tl.load(chunks + chunk * 4 + 1)
    place, room = unit.to(tl.int64), (N * H).to(tl.int64)
    channel, row, value = tl.arange(0, BK), tl.arange(0, TILE), tl.arange(0, DV)
    if length == 0:
        tl.store(grad_A + place * PARTS + part, 0.0)
        tl.store(grad_bias + place * D + part * BK + channel, tl.zeros((BK,), tl.float32))
        return
    valid, valid_2 = row < length, row + TILE < length
    bound = tl.where(valid, lower_bound, 0.0)[None, :]
    bound_2 = tl.where(valid_2, lower_bound, 0.0)[None, :]
    rows += place * ROWS * C
    grad_beta += part * (tokens * H).to(tl.int64) + start * H + head
    at = row[None, :] * (H * D) + channel[:, None]
    at_value = row[None, :] * (H * DV) + value[:, None]
    tile = (start * H + head) * D + part * BK
    tile_2 = tile + TILE * H * D
    values = (start * H + head) * DV
    values_2 = values + TILE * H * DV
    error = errors + place * C * DV + value[:, None] * C + row[None, :]
    pairs = grad_pairs + place * C * C + row[:, None] * C + row[None, :]
    pairs_k = pairs + room * C * C

    slab, wide = place * DV * D + part * BK, value[None, :] * D + channel[:, None]
    state, after = tl.load(states + slab + wide), tl.load(behind + slab + wide)
    last = tl.sum(_wide(state) * _wide(after), 1)[:, None]
    steep = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * D + part * BK + channel).to(tl.float32)[:, None]
    ones = (row[:, None] <= row[None, :]).to(KIND)
    total = _sum(log_decay(_tile(z + tile, at, valid), steep, bias, bound), ones)
    carried = _column(total, TILE - 1)
    total_2 = _sum(log_decay(_tile(z + tile_2, at, valid_2), steep, bias, bound_2), ones) + carried
    end = _column(total_2, TILE - 1)
    last *= tl.exp2(end)

    # The second tile's queries and keys, with keys written in both tiles.
    middle = _column(total_2, TILE // 2)
    factor = _numbers(rows, 2, C) * _numbers(rows, 4, C) * tl.exp2(middle - total)
    written = _rounded(_tile(k + tile, at, valid).to(tl.float32) * factor, KIND)
    sums_2, last, across = _second_tile(
        grad_q + tile_2, grad_k + tile_2, grad_beta + TILE * H, q + tile_2, k + tile_2,
        grad_output + values_2, grad_v + values_2, error + TILE, rows + TILE, at, at_value, row * H, valid_2,
        total_2, end, state, after, last, middle, pairs, pairs_k, written, C,
    )  # fmt: skip
    sums, last = _first_tile(
        grad_q + tile, grad_k + tile, grad_beta, q + tile, k + tile,
        grad_output + values, grad_v + values, error, rows, at, at_value, row * H, valid,
        total, end, state, after, last, middle, pairs, pairs_k, written, across, C,
    )  # fmt: skip

    ones = (row[:, None] >= row[None, :]).to(KIND)
    grad_g = _sum(sums_2, ones) + last
    to_bias_2, to_A_2 = _store_logits(grad_z + tile_2, z + tile_2, at, valid_2, grad_g, bias, steep, bound_2)
    last += tl.sum(sums_2, 1)[:, None]
    grad_g = _sum(sums, ones) + last
    to_bias, to_A = _store_logits(grad_z + tile, z + tile, at, valid, grad_g, bias, steep, bound)
    tl.store(grad_bias + place * D + part * BK + channel, to_bias + to_bias_2)
    tl.store(grad_A + place * PARTS + part, tl.sum(to_A + to_A_2, 0) / (steep * -LOG2E))
