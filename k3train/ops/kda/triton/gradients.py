"""The last kernel of backward: from the chunks' states and errors to the gradients of the inputs.

One program a chunk and head; key channels go in tiles of BK. What the L2 norm's gradient needs of whole rows
comes without them: with q^, k^ the unit vectors, q^ . dq^ = o . do and k^ . dk^ = 2 e . dv - v . dv.
See `reference` for the algorithm. Letters: C tokens of a chunk, D, Dv head dims.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .prepare import LOG2E, TILE, log_decay, lower_sum, pair_factors, upper_sum


@triton.jit
def _pair_gradients(  # type: ignore[no-untyped-def]
    grad_Aqk, grad_Akk, left_query, left_key, first, second, C: tl.constexpr
):
    """Gradients of the products' four operands [C, BK], before their decay factors."""
    in_first = tl.arange(0, C)[:, None] < TILE
    zero = tl.zeros((C, C), grad_Aqk.dtype)
    grad_query = tl.where(in_first, tl.dot(grad_Aqk, first), tl.dot(grad_Aqk, second))
    grad_key = tl.where(in_first, tl.dot(grad_Akk, first), tl.dot(grad_Akk, second))
    grad_first = tl.dot(tl.trans(tl.where(in_first, grad_Aqk, zero)), left_query)
    grad_first = tl.dot(tl.trans(tl.where(in_first, grad_Akk, zero)), left_key, grad_first)
    grad_second = tl.dot(tl.trans(tl.where(in_first, zero, grad_Aqk)), left_query)
    grad_second = tl.dot(tl.trans(tl.where(in_first, zero, grad_Akk)), left_key, grad_second)
    return grad_query, grad_key, grad_first, grad_second


@triton.jit
def _rows(at, valid):  # type: ignore[no-untyped-def]
    """Of a chunk's tokens, in FP32; zero behind the last."""
    return tl.load(at, mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def _through_values(  # type: ignore[no-untyped-def]
    v, output, grad_output, inverse, errors, grad_errors, grad_v, place, by_value, valid,
    C: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Stores dv. Gives the output's gradient [C, Dv], errors [Dv, C], dv, those of both products [C, C],
    and of queries and keys the shares along themselves, q^ . dq^ and k^ . dk^ [C]."""
    row, value = tl.arange(0, C), tl.arange(0, DV)
    tall = value[:, None] * C + row[None, :]
    square = row[:, None] * C + row[None, :]
    grad_out = tl.load(grad_output + by_value, mask=valid[:, None], other=0.0).to(KIND)
    out = tl.load(output + by_value, mask=valid[:, None], other=0.0).to(tl.float32)
    query_radial = tl.sum(out * grad_out.to(tl.float32), 1)
    X = tl.load(inverse + place * C * C + square)
    error = tl.load(errors + place * C * DV + tall)
    grad_error = tl.load(grad_errors + place * C * DV + tall)
    grad_value = tl.dot(tl.trans(X), tl.trans(grad_error))
    tl.store(grad_v + by_value, grad_value.to(grad_v.dtype.element_ty), mask=valid[:, None])
    values = tl.load(v + by_value, mask=valid[:, None], other=0.0).to(tl.float32)
    key_radial = -tl.sum(values * grad_value, 1)
    grad_value = grad_value.to(KIND)
    joint = tl.dot(grad_value, error)
    key_radial += 2 * tl.sum(tl.where(row[:, None] == row[None, :], joint, 0.0), 1)
    grad_Akk = tl.where(row[:, None] > row[None, :], -joint, 0.0).to(KIND)
    grad_Aqk = tl.where(row[:, None] >= row[None, :], tl.dot(grad_out, error), 0.0).to(KIND)
    return grad_out, error, grad_value, grad_Aqk, grad_Akk, query_radial, key_radial


@triton.jit
def _through_states(  # type: ignore[no-untyped-def]
    grad_out, grad_value, error, state, after, written, total, end
):
    """Shares of queries, keys and written keys [C, BK] by the states around the chunk, and that of the decay
    over the whole chunk [1, BK]."""
    from_start = tl.exp2(total)
    to_query = tl.dot(grad_out, state) * from_start
    to_key = -tl.dot(grad_value, state) * from_start
    to_end = tl.dot(tl.trans(error), after) * tl.exp2(end - total)
    last = tl.sum(written * to_end, 0)[None, :]
    last += tl.exp2(end) * tl.sum(state.to(tl.float32) * after.to(tl.float32), 0)[None, :]
    return to_query, to_key, to_end, last


@triton.jit
def _through_gate(grad_g, g, logits, bias, slope):  # type: ignore[no-untyped-def]
    """The gradient of the decay logits [C, BK] from that of the log-decays to base 2."""
    steep = tl.exp(slope)
    # Not 1 - bent / lower_bound, of which nothing but rounding is left where the gate is full.
    return grad_g * steep * (g / LOG2E) * tl.sigmoid(-steep * (logits + bias[None, :]))


@triton.jit
def gradients_kernel(  # type: ignore[no-untyped-def]
    q, k, v, z,  # [tokens, H, D or Dv]
    beta, A_log, dt_bias,  # [tokens, H], [H], [H * D]
    output, grad_output,  # [tokens, H, Dv]
    chunks,  # [N, 4]
    norms,  # [2, N, H, C] FP32
    inverse,  # [N, H, C, C]
    errors, grad_errors, states, behind,  # two [N, H, Dv, C], two [N, H, Dv, D]
    grad_q, grad_k, grad_v, grad_z,  # as q, k, v, z
    grad_beta,  # [tokens, H] FP32
    grad_A,  # [N, H] FP32, the chunks' shares
    grad_bias,  # [N, H, D] FP32, likewise
    N, H, lower_bound, scale,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = states.dtype.element_ty
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = tl.load(chunks + chunk * 4).to(tl.int64), tl.load(chunks + chunk * 4 + 1)
    place = tl.program_id(0).to(tl.int64)
    if length == 0:
        tl.store(grad_A + place, 0.0)
        tl.store(grad_bias + place * D + tl.arange(0, D), tl.zeros((D,), tl.float32))
        return
    row, value = tl.arange(0, C), tl.arange(0, DV)
    valid = row < length
    token = (start + row) * H + head
    by_value = token[:, None] * DV + value[None, :]
    grad_out, error, grad_value, grad_Aqk, grad_Akk, query_radial, key_radial = _through_values(
        v, output, grad_output, inverse, errors, grad_errors, grad_v, place, by_value, valid, C, DV, KIND
    )
    write = tl.load(beta + token, mask=valid, other=0.0).to(tl.float32)
    query_norm = tl.load(norms + place * C + row)
    key_norm = tl.load(norms + (N * H).to(tl.int64) * C + place * C + row)
    slope = tl.load(A_log + head).to(tl.float32)
    grad_write = tl.zeros((C,), tl.float32)
    grad_slope = 0.0
    for tile in range(0, D, BK):
        column = tile + tl.arange(0, BK)
        at = token[:, None] * D + column[None, :]
        wide = place * DV * D + value[:, None] * D + column[None, :]
        logits = _rows(z + at, valid)
        bias = tl.load(dt_bias + head * D + column).to(tl.float32)
        g = log_decay(logits, slope, bias, lower_bound, valid)
        total = lower_sum(g, C, KIND)
        end = tl.sum(g, 0)[None, :]
        query = _rows(q + at, valid) * (query_norm * scale)[:, None]
        key = _rows(k + at, valid) * key_norm[:, None]
        written = key * write[:, None]

        left, right_first, right_second = pair_factors(total, C)
        first, second = (written * right_first).to(KIND), (written * right_second).to(KIND)
        left_query, left_key = (query * left).to(KIND), (key * left).to(KIND)
        by_query, by_key, by_first, by_second = _pair_gradients(
            grad_Aqk, grad_Akk, left_query, left_key, first, second, C
        )
        # The operands as the products saw them, so that a pair's two shares cancel beyond it to the last bit.
        grad_total = left_query.to(tl.float32) * by_query + left_key.to(tl.float32) * by_key
        grad_total -= first.to(tl.float32) * by_first + second.to(tl.float32) * by_second

        state, after = tl.load(states + wide), tl.load(behind + wide)
        to_query, to_key, to_end, last = _through_states(
            grad_out, grad_value, error, state, after, written, total, end
        )
        grad_total += query * to_query + key * to_key - written * to_end
        grad_written = by_first * right_first + by_second * right_second + to_end
        grad_write += tl.sum(key * grad_written, 1)

        to_query = (by_query * left + to_query) * scale - query * (query_radial / scale)[:, None]
        tl.store(
            grad_q + at, (to_query * query_norm[:, None]).to(grad_q.dtype.element_ty), mask=valid[:, None]
        )
        to_key += by_key * left + write[:, None] * grad_written - key * key_radial[:, None]
        tl.store(grad_k + at, (to_key * key_norm[:, None]).to(grad_k.dtype.element_ty), mask=valid[:, None])
        grad_g = upper_sum(grad_total, C, KIND) + last
        to_logit = _through_gate(grad_g, g, logits, bias, slope)
        tl.store(grad_z + at, to_logit.to(grad_z.dtype.element_ty), mask=valid[:, None])
        tl.store(grad_bias + place * D + column, tl.sum(to_logit, 0))
        grad_slope += tl.sum(to_logit * (logits + bias[None, :]))
    tl.store(grad_A + place, grad_slope)
    tl.store(grad_beta + token, grad_write, mask=valid)
