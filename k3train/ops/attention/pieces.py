"""Long fragments as causal squares, joined by their log-sum-exp.

On Hopper cuDNN's backward of a plain causal square makes 495 TFLOP/s (192 and 128 wide, BF16), that of a
rectangle without a mask 290, those for variable lengths or with a mask aligned to the last query and key 220
to 290 (docs/gpu.md has the table). So a fragment of n queries and m keys is cut into causal squares as far as
that goes: one of its last n keys, and of the rectangle before it squares of two halves each, one of them with
both orders turned.

Each part is a softmax of its own, o_i with log-sum-exp l_i; together l = log(exp l_1 + exp l_2) and
o = sum_i exp(l_i - l) o_i. A kernel's backward needs only o and l of the whole, so each part's gradients come
from the kernel itself.

Letters: n queries, m keys, H heads, D, Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .fragments import Fragments

Short = Callable[[Tensor, Tensor, Tensor, Fragments], Tensor]
"""Attention of fragments that are not worth a kernel each."""

Inputs = tuple[Tensor, ...]
"""q, k and v."""

Results = tuple[Tensor, Tensor, tuple[Tensor, ...]]
"""Output [1, n, H, Dv], natural log-sum-exp of the scaled logits [1, H, n, 1] FP32, and what else backward
wants."""

NARROW = 1024
"""Rectangles are not cut into squares smaller than this."""


class Kernel(Protocol):
    """Attention of n queries to m keys, to all of them or causal with n = m; tensors [1, n or m, H, D]."""

    def forward(self, inputs: Inputs, causal: bool, scale: float) -> Results:
        """The softmax over these keys."""
        ...

    def backward(
        self, grad: Tensor, inputs: Inputs, results: Results, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, where output and log-sum-exp may be those of a larger softmax."""
        ...


class CuDNN:
    """The kernel inside torch."""

    def forward(self, inputs: Inputs, causal: bool, scale: float) -> Results:
        output, logsumexp, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_heads_first(*inputs), None, True, 0.0, causal, scale=scale
        )
        return output.transpose(1, 2), logsumexp, (seed, offset)

    def backward(
        self, grad: Tensor, inputs: Inputs, results: Results, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, logsumexp, randomness = results
        gradient, q, k, v, o = _heads_first(grad, *inputs, output)
        absent = (None,) * 3  # bias, cu_seqlens of queries and of keys
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient, q, k, v, o, logsumexp, *randomness, *absent, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class WrittenOut:
    """The reference: all logits at once, in the dtype of q or FP32."""

    def forward(self, inputs: Inputs, causal: bool, scale: float) -> Results:
        q, k, v = inputs
        logits = self._logits(q, k, causal, scale)
        logsumexp = logits.logsumexp(-1, keepdim=True)
        return torch.einsum("bhij,bjhv->bihv", (logits - logsumexp).exp(), v), logsumexp, ()

    def backward(
        self, grad: Tensor, inputs: Inputs, results: Results, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, v), (output, logsumexp, _) = inputs, results
        weights = (self._logits(q, k, causal, scale) - logsumexp).exp()  # [1, H, n, m]
        towards = torch.einsum("bihv,bjhv->bhij", grad, v)
        own = (grad * output).sum(-1).transpose(1, 2)[..., None]  # [1, H, n, 1]
        slope = scale * weights * (towards - own)
        dq, dk = (
            torch.einsum(rule, slope, x) for rule, x in (("bhij,bjhd->bihd", k), ("bhij,bihd->bjhd", q))
        )
        return dq, dk, torch.einsum("bhij,bihv->bjhv", weights, grad)

    def _logits(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        logits = scale * torch.einsum("bihd,bjhd->bhij", q, k)
        if not causal:
            return logits
        ahead = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return logits.masked_fill(ahead, float("-inf"))


@dataclass(frozen=True)
class Tile:
    """Some queries of a fragment and as many of its keys in a causal square, or any that all see all."""

    queries: slice
    keys: slice
    causal: bool = True
    turned: bool = False
    """Both in the opposite order: each query sees its key and later ones."""

    def of(self, queries: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        """Its parts of tensors [1, n, ...] and [1, m, ...]."""
        parts = [queries[:, self.queries], *(x[:, self.keys] for x in keys)]
        return tuple(x.flip(1) if self.turned else x for x in parts)

    def back(self, part: Tensor) -> Tensor:
        """In the order of the fragment."""
        return part.flip(1) if self.turned else part


def tiles(n: int, m: int) -> list[Tile]:
    """The causal square of the last n keys first, then what is before them."""
    return [Tile(slice(0, n), slice(m - n, m)), *_rectangle(slice(0, n), slice(0, m - n))]


def _rectangle(queries: slice, keys: slice) -> list[Tile]:
    """Cut into squares as Euclid divides, and what is left when it gets too narrow."""
    found: list[Tile] = []
    while (side := min(queries.stop - queries.start, keys.stop - keys.start)) >= NARROW:
        found += _halves(*(slice(x.start, x.start + side) for x in (queries, keys)))
        if queries.stop - queries.start > side:
            queries = slice(queries.start + side, queries.stop)
        else:
            keys = slice(keys.start + side, keys.stop)
    return [*found, Tile(queries, keys, causal=False)] if side else found


def _halves(queries: slice, keys: slice) -> list[Tile]:
    """A square without a mask as two causal ones: its diagonal and what is before, and what is behind."""
    before = Tile(queries, keys)
    if queries.stop - queries.start == 1:
        return [before]
    behind = Tile(slice(queries.start, queries.stop - 1), slice(keys.start + 1, keys.stop), turned=True)
    return [before, behind]


def attend_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, scale: float, fragments: Fragments, kernel: Kernel, short: Short
) -> Tensor:
    """Long fragments one by one, `short` for each stretch of others: [1, n, H, Dv]."""
    if len(fragments.stretches) == 1 and fragments.stretches[0][2] is not None:
        return short(q, k, v, fragments)
    outputs = []
    for queries, keys, stretch in fragments.stretches:
        parts = q[:, queries], k[:, keys], v[:, keys]
        if stretch is None:
            outputs.append(_Piece.apply(*parts, scale, kernel))
        else:  # Copies: Transformer Engine refuses tensors that begin inside others.
            own = [x.clone() for x in parts]
            outputs.append(short(own[0], own[1], own[2], stretch))
    return torch.cat(outputs, dim=1)


class _Piece(torch.autograd.Function):
    """One fragment."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: Kernel) -> Tensor:
        square, *others = tiles(q.shape[1], k.shape[1])
        output, logsumexp, randomness = kernel.forward(square.of(q, k, v), True, scale)
        if others:
            output = output.to(torch.promote_types(output.dtype, torch.float32))
        for tile in others:
            more, its, _ = kernel.forward(tile.of(q, k, v), tile.causal, scale)
            its = tile.back(its.transpose(1, 2))
            _join(output[:, tile.queries], logsumexp.transpose(1, 2)[:, tile.queries], tile.back(more), its)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, logsumexp, *randomness)
        ctx.scale, ctx.kernel = scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp, *randomness = ctx.saved_tensors
        wanted = tiles(q.shape[1], k.shape[1])
        sums = [_sum_for(x, len(wanted)) for x in (q, k, v)]
        for tile in wanted:
            grad, o, by_token = (tile.of(x)[0] for x in (grads[0], output, logsumexp.transpose(1, 2)))
            results = o, by_token.transpose(1, 2).contiguous(), tuple(randomness)
            parts = ctx.kernel.backward(grad.contiguous(), tile.of(q, k, v), results, tile.causal, ctx.scale)
            for total, part, where in zip(sums, parts, (tile.queries, tile.keys, tile.keys), strict=True):
                total[:, where] += tile.back(part)
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True))
        return dq, dk, dv, None, None


def _join(output: Tensor, logsumexp: Tensor, more: Tensor, its: Tensor) -> None:
    """Add a softmax over other keys to one, in place; outputs [1, n, H, Dv], log-sum-exps [1, n, H, 1]."""
    both = torch.logaddexp(logsumexp, its)
    output.mul_((logsumexp - both).exp()).add_(more * (its - both).exp())
    logsumexp.copy_(both)


def _sum_for(x: Tensor, parts: int) -> Tensor:
    """Zeros, FP32 or wider when several parts are added."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32) if parts > 1 else None)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[1, H, n, D] views."""
    return [x.transpose(1, 2) for x in tensors]
