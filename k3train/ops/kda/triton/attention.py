"""Kimi Delta Attention through the kernels of this package.

Kept for backward: the inputs, the output, the chunks' inverses (128 bytes a token and head) and the state in
front of every eighth chunk (as much again); everything else is computed anew.
Letters: b batch, s sequence, T tokens of all rows, H heads, D, Dv head dims, n documents, N chunks, C tokens
of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ....errors import UserError
from ...packing import Packing
from .chunks import ChunkTable, chunk_table
from .gradients import ROWS, keys_kernel, values_kernel
from .prepare import prepare_kernel
from .reference import C
from .walk import walk_back_kernel, walk_kernel

STRIDE = 8
"""Chunks between two states that forward keeps."""
VALUES = 64
"""Values of the state that one program carries."""
WARPS = {"prepare": 4, "prepare_again": 4, "values": 4, "keys": 4}
STAGES = {"walk": 2, "again": 2, "back": 3}
"""Launch choices, those of `prepare` and the walks the fastest tried on an H200 at D = Dv = 128."""
KEYS = 64
"""Key channels of one program of the last kernel."""
WIDTHS = (64, 128)
"""Head widths that the kernels take."""


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float,
    packing: Packing,
) -> Tensor:
    """See `ops.kda.delta_attention`; raises UserError for what these kernels do not take."""
    if reason := _refusal(q.shape[-1], v.shape[-1], lower_bound, packing):
        raise UserError(f"model.backends.kda=triton: {reason}; use auto")
    q, k, values, z, beta = (x.flatten(0, 1) for x in (q, k, v, z, beta))
    chunks = chunk_table(packing)
    output, _ = attend(q, k, values, z, beta, A_log, dt_bias, lower_bound=lower_bound, chunks=chunks)
    return output.view(v.shape)


def _refusal(D: int, DV: int, lower_bound: float, packing: Packing) -> str | None:
    if packing.span is not None:
        return "rows spread over a context group are not taken"
    if D not in WIDTHS or DV not in WIDTHS:
        return f"head widths of {' or '.join(map(str, WIDTHS))} are taken, not {D} and {DV}"
    if not -5 <= lower_bound < 0:
        return f"a gate's lower bound from -5 to below 0 is taken, not {lower_bound}"
    return None


def attend(
    q: Tensor,  # [T, H, D]
    k: Tensor,
    v: Tensor,  # [T, H, Dv]
    z: Tensor,  # [T, H, D]
    beta: Tensor,  # [T, H]
    A_log: Tensor,  # [H]
    dt_bias: Tensor,  # [H * D]
    *,
    lower_bound: float,
    chunks: ChunkTable,
    initial_state: Tensor | None = None,  # [n, H, D, Dv] FP32
    want_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output [T, H, Dv], and with `want_state` the documents' last states [n, H, D, Dv] FP32."""
    assert -5 <= lower_bound < 0, f"the tiles overflow beyond a log-decay of -5: {lower_bound}"
    assert q.shape[-1] in WIDTHS and v.shape[-1] in WIDTHS, (q.shape, v.shape)
    tokens = [x.contiguous() for x in (q, k, v, z, beta)]
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    output, state = _Attend.apply(*tokens, A_log, dt_bias, initial_state, lower_bound, chunks, want_state)
    return output, state


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        initial_state: Tensor | None,
        lower_bound: float,
        chunks: ChunkTable,
        want_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = (q, k, v, z, beta, A_log, dt_bias)
        keep = any(ctx.needs_input_grad)
        prepared = Prepared(q, v, chunks, backward=False)
        prepared.run(inputs, None, lower_bound)
        output, final, marks = _walk(prepared, v, initial_state, want_state=want_state, keep=keep)
        if keep:
            ctx.save_for_backward(*inputs, initial_state, output, prepared.inverse, marks)
            ctx.lower_bound, ctx.chunks = lower_bound, chunks
        return output, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, initial_state, output, inverse, marks = ctx.saved_tensors
        q, _, v = inputs[:3]
        grad_output = torch.zeros_like(output) if grads[0] is None else grads[0].contiguous()
        prepared = Prepared(q, v, ctx.chunks, backward=True)
        prepared.inverse = inverse
        prepared.run(tuple(inputs), grad_output, ctx.lower_bound)
        states, errors = _walk_again(prepared, initial_state, marks)
        behind, grad_errors, grad_initial = _walk_back(
            prepared, grad_output, grads[1], want_initial=ctx.needs_input_grad[7]
        )
        walked = (errors, grad_errors, states, behind)
        found = _gradients(prepared, tuple(inputs), output, grad_output, walked, ctx.lower_bound)
        return *found, grad_initial, None, None, None


class Prepared:
    """Buffers between the kernels, and their sizes."""

    def __init__(self, q: Tensor, v: Tensor, chunks: ChunkTable, *, backward: bool) -> None:
        self.H, self.D, self.DV = q.shape[1], q.shape[2], v.shape[2]
        self.chunks, self.backward, self.device = chunks, backward, q.device
        self.kind = torch.bfloat16 if q.is_cuda else torch.float32  # the CPU is the interpreter's
        self.u = self.per_chunk(self.DV, C)
        self.r, self.keys, self.queries = (self.per_chunk(C, self.D) for _ in range(3))
        self.decay = self.per_chunk(self.D, dtype=torch.float32)
        self.pairs = self.per_chunk(self.DV, C) if backward else self.per_chunk(C, C)
        self.norms = _fp32(q, 2, chunks.room, self.H, C) if backward else self.decay
        self.inverse = self.decay if backward else self.per_chunk(C, C)

    def per_chunk(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for something of every chunk and head."""
        return torch.empty(self.chunks.room, self.H, *shape, dtype=dtype or self.kind, device=self.device)

    def run(self, inputs: tuple[Tensor, ...], grad_output: Tensor | None, lower_bound: float) -> None:
        """Fill the buffers."""
        prepare_kernel[(self.chunks.room * self.H,)](
            *inputs, inputs[2] if grad_output is None else grad_output, self.chunks.table, self.inverse,
            self.u, self.r, self.keys, self.queries, self.decay, self.pairs, self.norms,
            self.chunks.room, self.H, lower_bound, self.D**-0.5,
            C=C, D=self.D, DV=self.DV, BACKWARD=self.backward,
            num_warps=WARPS["prepare_again" if self.backward else "prepare"],
        )  # fmt: skip

    def grid(self, units: int) -> tuple[int, int, int]:
        """Of the kernels that carry the state."""
        return self.DV // VALUES, self.H, units


def _walk(
    prepared: Prepared, v: Tensor, initial_state: Tensor | None, *, want_state: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Outputs, last states, and the states that backward starts from."""
    chunks, H, D, DV = prepared.chunks, prepared.H, prepared.D, prepared.DV
    output, nothing = torch.empty_like(v), prepared.decay
    strides = triton.cdiv(chunks.room, STRIDE)
    final = _fp32(v, chunks.documents, H, D, DV) if want_state else None
    marks = _fp32(v, strides, H, DV, D) if keep else None
    walk_kernel[prepared.grid(chunks.documents)](
        prepared.u, prepared.r, prepared.keys, prepared.queries, prepared.pairs, prepared.decay,
        chunks.table, chunks.offsets, _or(initial_state, nothing), output, _or(final, nothing),
        _or(marks, nothing), nothing, nothing, H, chunks.documents,
        C=C, D=D, DV=DV, BV=VALUES, STRIDE=STRIDE, AGAIN=False, HAS_INITIAL=initial_state is not None,
        WANT_FINAL=want_state, KEEP_MARKS=keep, STAGES=STAGES["walk"], num_warps=4,
    )  # fmt: skip
    return output, final, marks


def _walk_again(prepared: Prepared, initial_state: Tensor | None, marks: Tensor) -> tuple[Tensor, Tensor]:
    """States in front of all chunks [N, H, Dv, D], and errors [N, H, Dv, C]."""
    chunks, nothing = prepared.chunks, prepared.decay
    states, errors = prepared.per_chunk(prepared.DV, prepared.D), prepared.per_chunk(prepared.DV, C)
    walk_kernel[prepared.grid(marks.shape[0])](
        prepared.u, prepared.r, prepared.keys, prepared.queries, prepared.pairs, prepared.decay,
        chunks.table, chunks.offsets, _or(initial_state, nothing), nothing, nothing, marks, states, errors,
        prepared.H, chunks.documents,
        C=C, D=prepared.D, DV=prepared.DV, BV=VALUES, STRIDE=STRIDE, AGAIN=True,
        HAS_INITIAL=initial_state is not None, WANT_FINAL=False, KEEP_MARKS=False,
        STAGES=STAGES["again"], num_warps=4,
    )  # fmt: skip
    return states, errors


def _walk_back(
    prepared: Prepared, grad_output: Tensor, grad_final: Tensor | None, *, want_initial: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the states behind the chunks, of the errors, and of the first states."""
    chunks, nothing, H, D, DV = prepared.chunks, prepared.decay, prepared.H, prepared.D, prepared.DV
    behind, grad_errors = prepared.per_chunk(DV, D), prepared.per_chunk(DV, C)
    grad_initial = None
    if want_initial:
        grad_initial = _fp32(grad_output, chunks.documents, H, D, DV)
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    walk_back_kernel[prepared.grid(chunks.documents)](
        grad_output, prepared.pairs, prepared.r, prepared.keys, prepared.queries, prepared.decay,
        chunks.table, chunks.offsets, _or(grad_final, nothing), _or(grad_initial, nothing), behind,
        grad_errors, H,
        C=C, D=D, DV=DV, BV=VALUES, HAS_FINAL=grad_final is not None, WANT_INITIAL=want_initial,
        STAGES=STAGES["back"], num_warps=4,
    )  # fmt: skip
    return behind, grad_errors, grad_initial


def _gradients(
    prepared: Prepared,
    inputs: tuple[Tensor, ...],
    output: Tensor,
    grad_output: Tensor,
    walked: tuple[Tensor, ...],
    lower_bound: float,
) -> list[Tensor]:
    """Gradients of q, k, v, z, beta, A_log and dt_bias."""
    q, k, v, z, beta, A_log, dt_bias = inputs
    errors, grad_errors, states, behind = walked
    chunks, H, D, parts = prepared.chunks, prepared.H, prepared.D, prepared.D // KEYS
    grad_q, grad_k, grad_z = (torch.empty_like(x) for x in (q, k, z))
    grad_v, grad_pairs, rows = _through_values(prepared, v, output, grad_output, beta, errors, grad_errors)
    grad_beta = _fp32(q, parts, *beta.shape)
    grad_A = prepared.per_chunk(parts, dtype=torch.float32)
    grad_bias = prepared.per_chunk(D, dtype=torch.float32)
    keys_kernel[(chunks.room * H * parts,)](
        q, k, z, A_log, dt_bias, grad_output, grad_v, chunks.table, rows, grad_pairs, errors, states, behind,
        grad_q, grad_k, grad_z, grad_beta, grad_A, grad_bias, q.shape[0], chunks.room, H, lower_bound,
        C=C, D=D, DV=prepared.DV, BK=KEYS, num_warps=WARPS["keys"],
    )  # fmt: skip
    sums = grad_beta.sum(0), grad_A.sum((0, 2)), grad_bias.sum(0).view(dt_bias.shape)
    small = [found.to(x.dtype) for found, x in zip(sums, (beta, A_log, dt_bias), strict=True)]
    return [grad_q, grad_k, grad_v.to(v.dtype), grad_z, *small]


def _through_values(
    prepared: Prepared,
    v: Tensor,
    output: Tensor,
    grad_output: Tensor,
    beta: Tensor,
    errors: Tensor,
    grad_errors: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v and of the pairs' products, and each token's numbers, for the last kernel."""
    chunks, H = prepared.chunks, prepared.H
    grad_v = torch.empty_like(v, dtype=prepared.kind)
    grad_pairs = torch.empty(2, chunks.room, H, C, C, dtype=prepared.kind, device=v.device)
    rows = prepared.per_chunk(ROWS.value, C, dtype=torch.float32)
    values_kernel[(chunks.room * H,)](
        v, output, grad_output, beta, chunks.table, prepared.norms, prepared.inverse, errors, grad_errors,
        grad_v, grad_pairs, rows, chunks.room, H, prepared.D**-0.5,
        C=C, DV=prepared.DV, num_warps=WARPS["values"],
    )  # fmt: skip
    return grad_v, grad_pairs, rows


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _or(tensor: Tensor | None, nothing: Tensor) -> Tensor:
    """A kernel's unused pointer has to be some tensor."""
    return nothing if tensor is None else tensor
