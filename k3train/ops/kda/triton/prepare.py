"""The kernel in front of the walk: everything of a chunk that does not depend on the state.

One program a chunk and head. Forward inverts I + Akk and leaves Aqk; backward is given the inverse and leaves
Aqk^T do. See `reference` for the algorithm. Letters: C tokens of a chunk, D, Dv head dims.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TILE = tl.constexpr(32)
EPS = tl.constexpr(1e-6)


@triton.jit
def log_decay(z, steep, bias, bound):  # type: ignore[no-untyped-def]
    """Log-decay to base 2 of logits z; `bound` is 0 behind the document's end."""
    root = tl.rsqrt(1 + tl.exp2((steep * -LOG2E) * (z.to(tl.float32) + bias)))  # its square is the sigmoid
    return (bound * LOG2E) * (root * root)


@triton.jit
def _between(counts, high, low):  # type: ignore[no-untyped-def]
    """Sums of log-decays [C, D] over the tokens that `counts` [C, C] of -1, 0 and 1 names for each token."""
    counts = counts.to(high.dtype)
    return tl.dot(counts, low, tl.dot(counts, high))


@triton.jit
def _unit(x, at, valid, scale):  # type: ignore[no-untyped-def]
    """Rows of x of length `scale`, zero behind the document's end, and the reciprocal norms of x."""
    x = tl.load(x + at, mask=valid[:, None], other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(x * x, 1) + EPS)
    return x * (norm * scale)[:, None], norm


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + lower)^-1 by doubling the inverted diagonal blocks.

    Of unit keys and beta up to 1 both have entries of at most 1, so FP16 operands keep 11 bits of them.
    """
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, lower, 0.0)
    half = lower.to(KIND)
    for level in tl.static_range(1, 6):
        joint = (row // (2 << level) == column // (2 << level)) & (
            row // (1 << level) != column // (1 << level)
        )
        now = inverse.to(KIND)
        step = tl.dot(now, tl.where(joint, half, 0.0).to(KIND))
        inverse -= tl.dot(step.to(KIND), now)
    return inverse


@triton.jit
def prepare_kernel(  # type: ignore[no-untyped-def]
    q, k, v, z,  # [tokens, H, D or Dv]
    beta,  # [tokens, H]
    A_log, dt_bias,  # [H], [H * D]
    grad_output,  # [tokens, H, Dv], backward only
    chunks,  # [N, 4]: first token, tokens, document, whether it is the document's first
    inverse,  # [N, H, C, C]: written by forward, read by backward
    u,  # [N, H, Dv, C]
    r, keys, queries,  # [N, H, C, D]
    decay,  # [N, H, D] FP32
    pairs,  # forward: Aqk [N, H, C, C]; backward: do^T Aqk [N, H, Dv, C]
    norms,  # [2, N, H, C] FP32, backward only: reciprocal norms of q and k
    N, H, lower_bound, scale,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = keys.dtype.element_ty
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = tl.load(chunks + chunk * 4).to(tl.int64), tl.load(chunks + chunk * 4 + 1)
    if length == 0:
        return
    place = tl.program_id(0).to(tl.int64)
    row, column, value = tl.arange(0, C), tl.arange(0, D), tl.arange(0, DV)
    valid = row < length
    first_token = start * H + head
    at = row[:, None] * (H * D) + column[None, :]
    at_value = row[:, None] * (H * DV) + value[None, :]
    q, k, z = q + first_token * D, k + first_token * D, z + first_token * D
    inner = row[:, None] * D + column[None, :]
    square = row[:, None] * C + row[None, :]

    steep = tl.exp(tl.load(A_log + head).to(tl.float32))
    logits = tl.load(z + at, mask=valid[:, None], other=0.0)
    bias = tl.load(dt_bias + head * D + column).to(tl.float32)
    g = log_decay(logits, steep, bias[None, :], tl.where(valid, lower_bound, 0.0)[:, None])
    tl.store(decay + place * D + column, tl.exp2(tl.sum(g, 0)))
    # Two BF16 parts keep 16 bits of g.
    high = g.to(KIND)
    low = (g - high.to(tl.float32)).to(KIND)

    key, key_norm = _unit(k, at, valid, 1.0)
    query, query_norm = _unit(q, at, valid, scale)
    if BACKWARD:
        tl.store(norms + place * C + row, query_norm)
        tl.store(norms + (N * H).to(tl.int64) * C + place * C + row, key_norm)
    write = tl.load(beta + first_token + row * H, mask=valid, other=0.0).to(tl.float32)

    until = (row[:, None] >= row[None, :]).to(tl.float32)
    from_start = tl.exp2(_between(until, high, low))
    tl.store(queries + place * C * D + inner, (query * from_start).to(KIND))
    start_keys = (key * from_start).to(KIND)
    to_end = tl.exp2(_between(1 - until, high, low))
    tl.store(keys + place * C * D + inner, (key * (write[:, None] * to_end)).to(KIND))

    in_first = row[:, None] < TILE
    first_middle = (row[None, :] <= TILE // 2).to(tl.float32)
    second_middle = (row[None, :] <= TILE + TILE // 2).to(tl.float32)
    second = tl.trans((key * (write[:, None] * tl.exp2(_between(second_middle - until, high, low)))).to(KIND))
    ahead = _between(until - tl.where(in_first, first_middle, second_middle), high, low)
    first = tl.trans(tl.where(in_first, key * (write[:, None] * tl.exp2(-ahead)), 0.0).to(KIND))
    left = tl.exp2(ahead)
    left_query = (query * left).to(KIND)
    Aqk = tl.where(in_first, tl.dot(left_query, first), tl.dot(left_query, second))
    Aqk = tl.where(row[:, None] >= row[None, :], Aqk, 0.0).to(KIND)
    if BACKWARD:
        X = tl.load(inverse + place * C * C + square)
        grad = tl.load(grad_output + first_token * DV + at_value, mask=valid[:, None], other=0.0).to(KIND)
        through = tl.dot(tl.trans(grad), Aqk)
        tl.store(pairs + place * C * DV + value[:, None] * C + row[None, :], through.to(KIND))
    else:
        tl.store(pairs + place * C * C + square, Aqk)
        left_key = (key * left).to(KIND)
        Akk = tl.where(in_first, tl.dot(left_key, first), tl.dot(left_key, second))
        Akk = tl.where(row[:, None] > row[None, :], Akk, 0.0)
        X = unit_lower_inverse(Akk, C, tl.float16 if KIND.is_bf16() else KIND).to(KIND)
        tl.store(inverse + place * C * C + square, X)
    tl.store(r + place * C * D + inner, tl.dot(X, start_keys).to(KIND))
    values = tl.load(v + first_token * DV + at_value, mask=valid[:, None], other=0.0)
    written_value = tl.dot(tl.trans(values.to(KIND)), tl.trans(X))
    tl.store(u + place * C * DV + value[:, None] * C + row[None, :], written_value.to(KIND))
