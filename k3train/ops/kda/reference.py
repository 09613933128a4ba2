"""Kimi Delta Attention, token by token: the definition that every other form is held to.

K3 report (arXiv:2607.24653); Kimi Linear (arXiv:2510.26692).
Letters: b batch, s sequence, H heads, D key head dim, Dv value head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """FP64 when any input is FP64, else FP32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log-decay lower_bound * sigmoid(exp(A_log) * (z + dt_bias)); z [b, s, H, D] -> FP32 [b, s, H, D]."""
    dtype = compute_dtype(z)
    H, D = z.shape[-2:]
    logit = z.to(dtype) + dt_bias.to(dtype).view(H, D)
    return lower_bound * torch.sigmoid(A_log.to(dtype).exp()[:, None] * logit)


def recurrent_kda(
    q: Tensor,  # [b, s, H, D]
    k: Tensor,  # [b, s, H, D]
    v: Tensor,  # [b, s, H, Dv]
    g: Tensor,  # [b, s, H, D]
    beta: Tensor,  # [b, s, H]
    *,
    scale: float,
    initial_state: Tensor | None = None,  # [b, H, D, Dv]
    document_ids: Tensor | None = None,  # [b, s]
) -> tuple[Tensor, Tensor]:
    """Outputs [b, s, H, Dv] and the state after the last token [b, H, D, Dv], FP32 (FP64 for FP64 inputs).

    `g` is the log-decay; the state is zeroed before the first token of every document but the row's first.
    """
    dtype = compute_dtype(q, k, v, g, beta)
    q, k, v, g, beta = (t.to(dtype) for t in (q, k, v, g, beta))
    b, s, H, D = q.shape
    state = q.new_zeros(b, H, D, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(s):
        if document_ids is not None and t > 0:
            same = document_ids[:, t] == document_ids[:, t - 1]
            state = state * same[:, None, None, None]
        decayed = g[:, t].exp()[..., None] * state
        error = v[:, t] - torch.einsum("bhdv,bhd->bhv", decayed, k[:, t])
        state = decayed + torch.einsum("bhd,bhv->bhdv", beta[:, t, :, None] * k[:, t], error)
        outputs.append(scale * torch.einsum("bhdv,bhd->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def recurrent_kda_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    grad_output: Tensor,  # [b, s, H, Dv]
    *,
    scale: float,
) -> list[Tensor]:
    """Gradients of one document from a zero state by q, k, v, g and beta, written out by hand."""
    states = [q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])]
    for t in range(q.shape[1]):
        one = slice(t, t + 1)
        inputs = (x[:, one] for x in (q, k, v, g, beta))
        states.append(recurrent_kda(*inputs, scale=scale, initial_state=states[-1])[1])
    grads = [torch.zeros_like(x) for x in (q, k, v, g, beta)]
    grad_state = torch.zeros_like(states[0])
    for t in reversed(range(q.shape[1])):
        q_t, k_t, v_t, g_t, beta_t, grad_t = (x[:, t] for x in (q, k, v, g, beta, grad_output))
        *found, grad_state = _token_backward(
            q_t, k_t, v_t, g_t, beta_t, grad_t, states[t], states[t + 1], grad_state, scale
        )
        for grad, value in zip(grads, found, strict=True):
            grad[:, t] = value
    return grads


def _token_backward(
    q: Tensor,  # [b, H, D], as k and g
    k: Tensor,
    v: Tensor,  # [b, H, Dv], as grad_output
    g: Tensor,
    beta: Tensor,  # [b, H]
    grad_output: Tensor,
    before: Tensor,  # [b, H, D, Dv], as after and grad_state
    after: Tensor,
    grad_state: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    decayed = g.exp()[..., None] * before
    error = v - torch.einsum("bhdv,bhd->bhv", decayed, k)
    grad_state = grad_state + scale * torch.einsum("bhd,bhv->bhdv", q, grad_output)
    grad_q = scale * torch.einsum("bhdv,bhv->bhd", after, grad_output)
    state_error = torch.einsum("bhdv,bhv->bhd", grad_state, error)
    grad_error = beta[..., None] * torch.einsum("bhdv,bhd->bhv", grad_state, k)
    grad_k = beta[..., None] * state_error - torch.einsum("bhdv,bhv->bhd", decayed, grad_error)
    grad_decayed = grad_state - torch.einsum("bhd,bhv->bhdv", k, grad_error)
    grad_g = (grad_decayed * decayed).sum(-1)
    grad_beta = (k * state_error).sum(-1)
    return grad_q, grad_k, grad_error, grad_g, grad_beta, g.exp()[..., None] * grad_decayed


def segment_map(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a segment does to any incoming state: S_out = M S_in + E, with M [b, H, D, D], E [b, H, D, Dv].

    M is the product of (I - beta k k^T) Diag(exp g) over the tokens, E the state that the segment makes from
    zero; so segments can be evaluated apart and chained. A document that starts inside makes M zero.
    """
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(k.shape[0], k.shape[2], -1, -1)
    nothing = k.new_zeros(*k.shape[:3], k.shape[-1])
    _, transition = recurrent_kda(
        k, k, nothing, g, beta, scale=1.0, initial_state=identity, document_ids=document_ids
    )
    _, made = recurrent_kda(k, k, v, g, beta, scale=1.0, document_ids=document_ids)
    return transition, made
