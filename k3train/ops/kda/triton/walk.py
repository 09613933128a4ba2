"""The kernels that carry the state from chunk to chunk, forward and backward.

A program holds the transposed state of a head for 64 of the Dv values, [BV, D] in FP32 registers: both
products of a step take it, and what it makes, from registers. See `reference` for the algorithm.
Letters: N chunks, C tokens of a chunk, D, Dv head dims, BV values of a program, n documents.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def walk_kernel(  # type: ignore[no-untyped-def]
    u,  # [N, H, Dv, C]
    r, keys, queries,  # [N, H, C, D]
    pairs,  # Aqk [N, H, C, C]
    decay,  # [N, H, D] FP32
    chunks,  # [N, 4]
    offsets,  # [n + 1], each document's first chunk
    initial,  # [n, H, D, Dv] FP32
    output,  # [tokens, H, Dv]
    final,  # [n, H, D, Dv] FP32
    marks,  # [ceil(N / STRIDE), H, Dv, D] FP32, the state in front of every STRIDE-th chunk
    states, errors,  # [N, H, Dv, D] and [N, H, Dv, C]
    H, documents,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
    AGAIN: tl.constexpr, HAS_INITIAL: tl.constexpr, WANT_FINAL: tl.constexpr, KEEP_MARKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs, one document a program. AGAIN: states and errors of one stride of chunks, from its mark."""
    KIND: tl.constexpr = keys.dtype.element_ty
    part, head, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, C), tl.arange(0, D)
    value = part * BV + tl.arange(0, BV)
    wide = value[:, None] * D + column[None, :]
    tall = value[:, None] * C + row[None, :]
    inner = row[:, None] * D + column[None, :]
    by_key = column[None, :] * DV + value[:, None]
    if AGAIN:
        begin = unit * STRIDE
        stop = tl.minimum(begin + STRIDE, tl.load(offsets + documents))
        if begin >= stop:
            return
        state = tl.load(marks + (unit * H + head).to(tl.int64) * DV * D + wide)
        token, limit = 0, 0
    else:
        begin, stop = tl.load(offsets + unit), tl.load(offsets + unit + 1)
        state = tl.zeros((BV, D), tl.float32)
        if HAS_INITIAL:
            state = tl.load(initial + (unit * H + head).to(tl.int64) * DV * D + by_key)
        token = tl.load(chunks + begin * 4)
        last = chunks + (stop - 1) * 4
        limit = tl.load(last) + tl.load(last + 1)

    for chunk in tl.range(begin, stop, num_stages=STAGES):
        place = (chunk * H + head).to(tl.int64)
        shrink = tl.load(decay + place * D + column)
        if AGAIN:
            fresh = tl.load(chunks + chunk * 4 + 3) != 0
            if HAS_INITIAL:
                document = tl.load(chunks + chunk * 4 + 2)
                first = tl.load(
                    initial + (document * H + head).to(tl.int64) * DV * D + by_key, mask=fresh, other=0.0
                )
                state = tl.where(fresh, first, state)
            else:
                state = tl.where(fresh, 0.0, state)
        rounded = state.to(KIND)
        taken = tl.dot(rounded, tl.trans(tl.load(r + place * C * D + inner)))
        error = (tl.load(u + place * C * DV + tall).to(tl.float32) - taken).to(KIND)
        if AGAIN:
            tl.store(states + place * DV * D + wide, rounded)
            tl.store(errors + place * C * DV + tall, error)
        else:
            if KEEP_MARKS:
                mark = marks + ((chunk // STRIDE) * H + head).to(tl.int64) * DV * D + wide
                tl.store(mark, state, mask=chunk % STRIDE == 0)
            seen = tl.dot(rounded, tl.trans(tl.load(queries + place * C * D + inner)))
            weights = tl.load(pairs + place * C * C + row[:, None] * C + row[None, :])
            seen = tl.dot(error, tl.trans(weights), seen)
            out = ((token + row).to(tl.int64)[None, :] * H + head) * DV + value[:, None]
            tl.store(output + out, seen.to(output.dtype.element_ty), mask=(token + row)[None, :] < limit)
            token += C
        state = tl.dot(error, tl.load(keys + place * C * D + inner), state * shrink[None, :])
    if WANT_FINAL:
        tl.store(final + (unit * H + head).to(tl.int64) * DV * D + by_key, state)


@triton.jit
def walk_back_kernel(  # type: ignore[no-untyped-def]
    grad_output,  # [tokens, H, Dv]
    through,  # do^T Aqk [N, H, Dv, C]
    r, keys, queries,  # [N, H, C, D]
    decay,  # [N, H, D] FP32
    chunks,  # [N, 4]
    offsets,  # [n + 1]
    grad_final, grad_initial,  # [n, H, D, Dv] FP32
    behind,  # [N, H, Dv, D], gradients of the states behind the chunks
    grad_errors,  # [N, H, Dv, C]
    H,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    HAS_FINAL: tl.constexpr, WANT_INITIAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One document a program, from its last chunk to its first."""
    KIND: tl.constexpr = keys.dtype.element_ty
    part, head, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, C), tl.arange(0, D)
    value = part * BV + tl.arange(0, BV)
    wide = value[:, None] * D + column[None, :]
    tall = value[:, None] * C + row[None, :]
    inner = row[:, None] * D + column[None, :]
    by_key = column[None, :] * DV + value[:, None]
    begin, stop = tl.load(offsets + unit), tl.load(offsets + unit + 1)
    grad_state = tl.zeros((BV, D), tl.float32)
    if HAS_FINAL:
        grad_state = tl.load(grad_final + (unit * H + head).to(tl.int64) * DV * D + by_key)
    first = tl.load(chunks + begin * 4)
    last = chunks + (stop - 1) * 4
    limit = tl.load(last) + tl.load(last + 1)

    for back in tl.range(0, stop - begin, num_stages=STAGES):
        chunk = stop - 1 - back
        token = first + (chunk - begin) * C + row
        place = (chunk * H + head).to(tl.int64)
        shrink = tl.load(decay + place * D + column)
        rounded = grad_state.to(KIND)
        tl.store(behind + place * DV * D + wide, rounded)
        at = (token.to(tl.int64)[:, None] * H + head) * DV + value[None, :]
        grad = tl.load(grad_output + at, mask=token[:, None] < limit, other=0.0).to(KIND)
        grad_state = tl.dot(
            tl.trans(grad), tl.load(queries + place * C * D + inner), grad_state * shrink[None, :]
        )
        error = tl.dot(rounded, tl.trans(tl.load(keys + place * C * D + inner)))
        error = (error + tl.load(through + place * C * DV + tall).to(tl.float32)).to(KIND)
        tl.store(grad_errors + place * C * DV + tall, error)
        grad_state -= tl.dot(error, tl.load(r + place * C * D + inner))
    if WANT_INITIAL:
        tl.store(grad_initial + (unit * H + head).to(tl.int64) * DV * D + by_key, grad_state)
