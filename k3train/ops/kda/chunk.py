"""Kimi Delta Attention in chunks: matrix products inside a chunk, one state hand-over per chunk.

Chunk form of the recurrence (Kimi Linear, arXiv:2510.26692) with its gradient written out by hand, so that
both directions are batched products and one short loop over chunks.

Letters: b batch, s sequence, H heads, D key head dim, Dv value head dim, N chunks, C tokens of a chunk.
Inside a chunk G is the running sum of the log-decay g. Pair terms need exp(G_i - G_j) for j <= i; it is split
into exp(G_i - G_m) exp(G_m - G_j) around the chunk's middle token m, so with g >= -5 and C = 16 no factor
leaves exp(+-40).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .context import Handover
from .reference import compute_dtype

CHUNK_SIZE = 16


class _Borders(NamedTuple):
    """Which terms survive the document borders, as 0/1 factors that broadcast over heads."""

    pairs: Tensor  # [N, b, 1, C, C], same document
    incoming: Tensor  # [N, b, 1, C, 1], token continues the document that the incoming state belongs to
    outgoing: Tensor  # [N, b, 1, C, 1], token belongs to the chunk's last document


class _Chunks(NamedTuple):
    """Everything about the chunks that does not depend on the incoming state."""

    late: Tensor  # exp(G_i - G_m)   [N, b, H, C, D]
    early: Tensor  # exp(G_m - G_j)
    from_start: Tensor  # exp(G_i), zero where the incoming state does not reach
    to_end: Tensor  # exp(G_C - G_j), zero where the token does not reach the outgoing state
    decay: Tensor  # exp(G_C), zero where a border lies between  [N, b, H, D, 1]
    key_pairs: Tensor  # Akk, strictly lower  [N, b, H, C, C]
    query_pairs: Tensor  # Aqk, lower
    inverse: Tensor  # (I + Diag(beta) Akk)^-1


def chunk_kda(
    q: Tensor,  # [b, s, H, D]
    k: Tensor,  # [b, s, H, D]
    v: Tensor,  # [b, s, H, Dv]
    g: Tensor,  # [b, s, H, D]
    beta: Tensor,  # [b, s, H]
    *,
    scale: float,
    initial_state: Tensor | None = None,  # [b, H, D, Dv]
    document_ids: Tensor | None = None,  # [b, s], non-decreasing along a row
    handover: Handover | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.recurrent_kda`, for log-decays g >= -5 and a chunk of at most 32 tokens.

    With a `handover` these are this rank's columns, and the initial state is what the ranks before leave.
    """
    assert 1 <= chunk_size <= 32, "longer chunks overflow FP32 at g = -5"
    assert handover is None or initial_state is None, "the ranks before give the initial state"
    dtype = compute_dtype(q, k, v, g, beta)
    b, s, H, D = q.shape
    if initial_state is None:
        initial_state = q.new_zeros(b, H, D, v.shape[-1], dtype=dtype)
    inputs = [_split(x.to(dtype), chunk_size) for x in (q, k, v, g, beta[..., None])]
    borders = None if document_ids is None else _borders(document_ids, chunk_size, dtype)
    output, state = _ChunkKDA.apply(*inputs, initial_state.to(dtype), scale, borders, handover)
    return output.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :s], state


def _split(x: Tensor, chunk_size: int) -> Tensor:
    """[b, s, H, D] -> [N, b, H, C, D], zero-padded: a token of zeros leaves the state as it is."""
    if padding := -x.shape[1] % chunk_size:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.unflatten(1, (-1, chunk_size)).permute(1, 0, 3, 2, 4).contiguous()


def _borders(document_ids: Tensor, chunk_size: int, dtype: torch.dtype) -> _Borders:
    if padding := -document_ids.shape[1] % chunk_size:
        document_ids = torch.cat((document_ids, document_ids[:, -1:].expand(-1, padding)), dim=1)
    ids = document_ids.unflatten(1, (-1, chunk_size)).transpose(0, 1)  # [N, b, C]
    owner = torch.cat((ids[:1, :, :1], ids[:-1, :, -1:]))  # document of the incoming state  [N, b, 1]
    pairs = ids[..., :, None] == ids[..., None, :]
    incoming, outgoing = ids == owner, ids == ids[..., -1:]
    factors = (pairs[:, :, None], incoming[:, :, None, :, None], outgoing[:, :, None, :, None])
    return _Borders(*(x.to(dtype) for x in factors))


def _prepare(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, borders: _Borders | None) -> _Chunks:
    total = g.cumsum(-2)
    middle = total[..., total.shape[-2] // 2, None, :]
    late, early = (total - middle).exp(), (middle - total).exp()
    from_start, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    decay = from_start[..., -1, :, None]
    early_keys_t = (k * early).transpose(-1, -2)
    key_pairs = torch.matmul(k * late, early_keys_t).tril_(-1)
    query_pairs = torch.matmul(q * late, early_keys_t).tril_()
    if borders is not None:
        key_pairs *= borders.pairs
        query_pairs *= borders.pairs
        from_start = from_start * borders.incoming
        to_end = to_end * borders.outgoing
        decay = from_start[..., -1, :, None]
    inverse = _unit_lower_inverse(beta * key_pairs)
    return _Chunks(late, early, from_start, to_end, decay, key_pairs, query_pairs, inverse)


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for a strictly lower triangular matrix [..., C, C]."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)


class _ChunkKDA(torch.autograd.Function):
    """Arguments in chunks, [N, b, H, C, *]; the state is [b, H, D, Dv]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        scale: float,
        borders: _Borders | None,
        handover: Handover | None,
    ) -> tuple[Tensor, Tensor]:
        chunks = _prepare(q, k, g, beta, borders)
        mix = chunks.inverse * beta.transpose(-1, -2)
        written = torch.matmul(mix, v)  # becomes "v minus what the state already holds", chunk by chunk
        read_keys = torch.matmul(mix, k * chunks.from_start)
        end_keys_t = (k * chunks.to_end).transpose(-1, -2)
        transition = None
        if handover is not None:
            maps = _segment_map(written, read_keys, end_keys_t, chunks.decay)
            initial_state = handover.incoming(handover.gather(maps))
            transition = maps[..., v.shape[-1] :].clone()
        states = [initial_state]
        for n in range(q.shape[0]):
            written[n] -= torch.matmul(read_keys[n], states[n])
            states.append(chunks.decay[n] * states[n] + torch.matmul(end_keys_t[n], written[n]))
        incoming = torch.stack(states[:-1])  # [N, b, H, D, Dv]
        output = torch.matmul(q * chunks.from_start, incoming) + torch.matmul(chunks.query_pairs, written)
        ctx.save_for_backward(q, k, v, g, beta, incoming, written, read_keys, transition, *(borders or ()))
        ctx.scale, ctx.handover = scale, handover
        return output.mul_(scale), states[-1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, incoming, written, read_keys, transition, *factors = ctx.saved_tensors
        borders = _Borders(*factors) if factors else None
        chunks = _prepare(q, k, g, beta, borders)
        grad_output = grad_output * ctx.scale
        q_start = q * chunks.from_start
        end_keys = k * chunks.to_end
        grad_written = torch.matmul(chunks.query_pairs.transpose(-1, -2), grad_output)
        grad_incoming = torch.matmul(q_start.transpose(-1, -2), grad_output)
        read_keys_t = read_keys.transpose(-1, -2)
        if ctx.handover is not None:
            made = _start_gradient(
                grad_written, grad_incoming, grad_state, end_keys, read_keys_t, chunks.decay
            )
            maps = torch.cat((made, transition.transpose(-1, -2)), dim=-1)
            gathered = ctx.handover.gather(maps, backward=True)
            grad_state = grad_state + ctx.handover.outgoing_gradient(gathered)
        grad_outgoing = torch.empty_like(incoming)
        for n in reversed(range(q.shape[0])):
            grad_outgoing[n] = grad_state
            grad_written[n] += torch.matmul(end_keys[n], grad_state)
            grad_state = chunks.decay[n] * grad_state + grad_incoming[n]
            grad_state -= torch.matmul(read_keys_t[n], grad_written[n])
        incoming_t = incoming.transpose(-1, -2)
        grad_end_keys = torch.matmul(written, grad_outgoing.transpose(-1, -2))
        grad_q_start = torch.matmul(grad_output, incoming_t)
        grad_read_keys = torch.matmul(grad_written, incoming_t).neg_()
        grad_decay = (incoming * grad_outgoing).sum(-1)  # [N, b, H, D]

        grad_query_pairs = torch.matmul(grad_output, written.transpose(-1, -2)).tril_()
        grad_v, grad_start_keys, grad_beta, grad_key_pairs = _mix_backward(
            chunks, k, v, beta, grad_written, grad_read_keys
        )
        if borders is not None:
            grad_query_pairs *= borders.pairs
            grad_key_pairs *= borders.pairs
        grad_q_late = torch.matmul(grad_query_pairs, k * chunks.early)
        grad_k_late = torch.matmul(grad_key_pairs, k * chunks.early)
        grad_k_early = torch.matmul(grad_query_pairs.transpose(-1, -2), q * chunks.late)
        grad_k_early += torch.matmul(grad_key_pairs.transpose(-1, -2), k * chunks.late)

        grad_q = grad_q_late.mul_(chunks.late).addcmul_(grad_q_start, chunks.from_start)
        grad_k = grad_k_late.mul_(chunks.late).addcmul_(grad_start_keys, chunks.from_start)
        grad_k_end = grad_end_keys.mul_(chunks.to_end)
        grad_k_back = grad_k_early.mul_(chunks.early).add_(grad_k_end)
        grad_total = q * grad_q + k * (grad_k - grad_k_back)
        grad_total[..., -1, :] += (k * grad_k_end).sum(-2) + grad_decay * chunks.decay[..., 0]
        grad_g = grad_total.flip(-2).cumsum(-2).flip(-2)
        return grad_q, grad_k.add_(grad_k_back), grad_v, grad_g, grad_beta, grad_state, None, None, None


def _segment_map(written: Tensor, read_keys: Tensor, end_keys_t: Tensor, decay: Tensor) -> Tensor:
    """[E | M] of all chunks: what they make of [zero | identity] [b, H, D, Dv + D].

    `written` is here what the chunks would write on a state of zero.
    """
    D, Dv = read_keys.shape[-1], written.shape[-1]
    state = F.pad(torch.eye(D, dtype=written.dtype, device=written.device), (Dv, 0))
    state = state.repeat(*written.shape[1:3], 1, 1)
    for n in range(written.shape[0]):
        change = -torch.matmul(read_keys[n], state)
        change[..., :Dv] += written[n]
        state = decay[n] * state + torch.matmul(end_keys_t[n], change)
    return state


def _start_gradient(
    grad_written: Tensor,
    grad_incoming: Tensor,
    grad_state: Tensor,
    end_keys: Tensor,
    read_keys_t: Tensor,
    decay: Tensor,
) -> Tensor:
    """Gradient of the state before all chunks, of outputs and of the state behind them alone."""
    for n in reversed(range(grad_written.shape[0])):
        change = grad_written[n] + torch.matmul(end_keys[n], grad_state)
        grad_state = decay[n] * grad_state + grad_incoming[n] - torch.matmul(read_keys_t[n], change)
    return grad_state


def _mix_backward(
    chunks: _Chunks, k: Tensor, v: Tensor, beta: Tensor, grad_written: Tensor, grad_read_keys: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of v, exp(G) k, beta and Akk through written = M v and read_keys = M (exp(G) k)."""
    beta_row = beta.transpose(-1, -2)
    mix_t = (chunks.inverse * beta_row).transpose(-1, -2)
    grad_v = torch.matmul(mix_t, grad_written)
    grad_start_keys = torch.matmul(mix_t, grad_read_keys)
    grad_mix = torch.matmul(grad_written, v.transpose(-1, -2))
    grad_mix += torch.matmul(grad_read_keys, (k * chunks.from_start).transpose(-1, -2))
    inverse_t = chunks.inverse.transpose(-1, -2)
    grad_lower = torch.matmul(torch.matmul(inverse_t, grad_mix * beta_row), inverse_t).neg_().tril_(-1)
    grad_beta = (grad_mix * chunks.inverse).sum(-2)[..., None]
    grad_beta += (grad_lower * chunks.key_pairs).sum(-1, keepdim=True)
    return grad_v, grad_start_keys, grad_beta, grad_lower * beta
