"""The algorithm of the kernels, step by step in plain PyTorch: one function for each kernel.

One document from any state. Tokens go in chunks of 64, and a chunk is halved into tiles of 32, so that with
g >= -5 no factor below leaves exp(+-80). Letters: N chunks, H heads, C = 64 tokens of a chunk, D key head
dim, Dv value head dim. q carries the scale D^-0.5. Inside a chunk G is the running sum of g, m(i) the middle
of token i's tile, and w = beta k the key that is written:

    left_i = exp(G_i - G_m(i))      right_ij = exp(G_m(i) - G_j), for j not beyond i's tile
    Akk_ij = k_i left_i . w_j right_ij  for j < i        Aqk_ij = q_i left_i . w_j right_ij  for j <= i
    X = (I + Akk)^-1      U = X v      R = X (exp(G) k)      K = exp(G_C - G) w      Q = exp(G) q
    e = U - R S           o = Q S + Aqk e                    S <- exp(G_C) S + K^T e

beta is inside w alone. Backward, with E the gradient of the state behind the chunk:

    de = Aqk^T do + K E       Y = X^T de       dv = Y       E <- exp(G_C) E + Q^T do - R^T de
    dAqk = tril(do e^T)       dAkk = -tril(Y e^T, -1)
    dQ = do S^T               d(exp(G) k) = -Y S^T          dK = e E^T
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

C = 64
TILE = 32


class Chunks(NamedTuple):
    """What of the chunks does not depend on the state."""

    Akk: Tensor  # [N, H, C, C], strictly lower
    Aqk: Tensor  # [N, H, C, C], lower
    inverse: Tensor  # X, [N, H, C, C]
    u: Tensor  # [N, H, C, Dv]
    r: Tensor  # [N, H, C, D]
    keys: Tensor  # K, [N, H, C, D]
    queries: Tensor  # Q, [N, H, C, D]
    decay: Tensor  # exp(G_C), [N, H, D]


class Factors(NamedTuple):
    """Decays between tokens of a chunk, [N, H, C, D]."""

    left: Tensor
    rights: tuple[Tensor, Tensor]  # for rows of the first and of the second tile
    from_start: Tensor  # exp(G)
    to_end: Tensor  # exp(G_C - G)


def factors(g: Tensor) -> Factors:
    """Of the log-decay [N, H, C, D]."""
    total = g.cumsum(-2)
    first, second = (total[..., row, None, :] for row in (TILE // 2, TILE + TILE // 2))
    in_first = torch.arange(C, device=g.device)[:, None] < TILE
    left = (total - torch.where(in_first, first, second)).exp()
    rights = (torch.where(in_first, (first - total).exp(), 0), (second - total).exp())
    return Factors(left, rights, total.exp(), (total[..., -1:, :] - total).exp())


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Chunks:
    """The first kernel: all in front of the walk. q, k, g [N, H, C, D]; v [N, H, C, Dv]; beta [N, H, C]."""
    left, rights, from_start, to_end = factors(g)
    written = beta[..., None] * k
    Akk = _pairs(k * left, written, rights).tril(-1)
    Aqk = _pairs(q * left, written, rights).tril()
    inverse = unit_lower_inverse(Akk)
    r = inverse @ (k * from_start)
    return Chunks(Akk, Aqk, inverse, inverse @ v, r, written * to_end, q * from_start, g.sum(-2).exp())


def _pairs(left: Tensor, written: Tensor, rights: tuple[Tensor, Tensor]) -> Tensor:
    in_first = torch.arange(C, device=left.device)[:, None] < TILE
    first, second = (left @ (written * right).transpose(-1, -2) for right in rights)
    return torch.where(in_first, first, second)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of strictly lower [..., C, C], by doubling the inverted diagonal blocks."""
    index = torch.arange(C, device=lower.device)
    inverse = torch.eye(C, dtype=lower.dtype, device=lower.device)
    size = 1
    while size < C:
        same, apart = (index // (2 * size), index // size)
        joint = (same[:, None] == same) & (apart[:, None] != apart)
        inverse = inverse - inverse @ torch.where(joint, lower, 0) @ inverse
        size *= 2
    return inverse


def walk(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The second kernel: outputs and errors e [N, H, C, Dv], states before each chunk, and the last one."""
    outputs, errors, states = [], [], []
    for n in range(chunks.u.shape[0]):
        states.append(state)
        error = chunks.u[n] - chunks.r[n] @ state
        outputs.append(chunks.queries[n] @ state + chunks.Aqk[n] @ error)
        state = chunks.decay[n][..., None] * state + chunks.keys[n].transpose(-1, -2) @ error
        errors.append(error)
    return torch.stack(outputs), torch.stack(errors), torch.stack(states), state


def walk_back(chunks: Chunks, grad_output: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the errors [N, H, C, Dv], of the states behind each chunk, and of the first state."""
    through = chunks.Aqk.transpose(-1, -2) @ grad_output
    grad_errors, behind = [], []
    for n in reversed(range(grad_output.shape[0])):
        behind.append(grad_state)
        grad_error = through[n] + chunks.keys[n] @ grad_state
        grad_state = chunks.decay[n][..., None] * grad_state
        grad_state = grad_state + chunks.queries[n].transpose(-1, -2) @ grad_output[n]
        grad_state = grad_state - chunks.r[n].transpose(-1, -2) @ grad_error
        grad_errors.append(grad_error)
    return torch.stack(grad_errors[::-1]), torch.stack(behind[::-1]), grad_state


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    inverse: Tensor,
    grad_output: Tensor,
    errors: Tensor,
    grad_errors: Tensor,
    states: Tensor,  # [N, H, D, Dv], before each chunk
    behind: Tensor,  # [N, H, D, Dv], gradients of the states behind each chunk
) -> tuple[Tensor, ...]:
    """The last kernel of backward: gradients of q, k, v, g and beta."""
    left, rights, from_start, to_end = factors(g)
    written = beta[..., None] * k
    in_first = torch.arange(C, device=g.device)[:, None] < TILE
    grad_v = inverse.transpose(-1, -2) @ grad_errors
    grad_Aqk = (grad_output @ errors.transpose(-1, -2)).tril()
    grad_Akk = -(grad_v @ errors.transpose(-1, -2)).tril(-1)
    first, second = (written * right for right in rights)
    grad_q, grad_k = (
        torch.where(in_first, grad @ first, grad @ second) * left for grad in (grad_Aqk, grad_Akk)
    )
    grad_written = torch.zeros_like(k)
    for right, rows in zip(rights, (in_first, ~in_first), strict=True):
        back = torch.where(rows, grad_Aqk, 0).transpose(-1, -2) @ (q * left)
        back = back + torch.where(rows, grad_Akk, 0).transpose(-1, -2) @ (k * left)
        grad_written = grad_written + back * right
    grad_q = grad_q + grad_output @ states.transpose(-1, -2) * from_start
    grad_k = grad_k - grad_v @ states.transpose(-1, -2) * from_start
    grad_end = errors @ behind.transpose(-1, -2) * to_end
    grad_written = grad_written + grad_end
    grad_total = q * grad_q + k * grad_k - written * grad_written
    last = (written * grad_end).sum(-2) + g.sum(-2).exp() * (states * behind).sum(-1)
    grad_total[..., -1, :] += last
    grad_g = grad_total.flip(-2).cumsum(-2).flip(-2)
    grad_beta = (k * grad_written).sum(-1)
    return grad_q, grad_k + beta[..., None] * grad_written, grad_v, grad_g, grad_beta
