"""The loss in chunks with each chunk's logits read once by a Triton kernel of ours, forward and backward.

Plain PyTorch goes over FP32 logits seven times forward and over them and their gradient eight times backward;
these read them once each and write the gradient once. Letters: t tokens, d hidden, v vocabulary, c words of a
chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunked import Steps, walk

BLOCK, WARPS = 4096, 8


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, words: int) -> Tensor:
    """See `ops.cross_entropy.token_losses`; `words` is c. Logits are FP32 even of BF16 features."""
    return walk(hidden, weight, labels, words, STEPS)


@triton.jit
def _take_in_kernel(logits, labels, largest, total, own, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * words
    high, exponentials = tl.load(largest + token), tl.load(total + token)
    for first in range(0, words, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(row + column, mask=column < words, other=float("-inf"))
        higher = tl.maximum(high, tl.max(logit, axis=0))
        exponentials = exponentials * tl.exp(high - higher) + tl.sum(tl.exp(logit - higher), axis=0)
        high = higher
    tl.store(largest + token, high)
    tl.store(total + token, exponentials)
    label = tl.load(labels + token)
    inside = (label >= 0) & (label < words)
    tl.store(own + token, tl.load(row + label, mask=inside, other=0.0), mask=inside)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits, labels, largest, scales, gradient, tokens, words, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < words
    logit = tl.load(logits + token * words + column, mask=inside, other=float("-inf"))
    share = tl.exp(logit - tl.load(largest + token)) * tl.load(scales + token)
    own = column == tl.load(labels + token)
    share = tl.where(own, share - tl.load(scales + tokens + token), share)
    tl.store(gradient + token * words + column, share.to(gradient.dtype.element_ty), mask=inside)


def _take_in(logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, own: Tensor) -> None:
    tokens, words = logits.shape
    if tokens:
        _take_in_kernel[(tokens,)](logits, labels, largest, total, own, words, BLOCK=BLOCK, num_warps=WARPS)


def _gradient(logits: Tensor, labels: Tensor, largest: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, words = logits.shape
    found = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    if tokens:
        grid = tokens, triton.cdiv(words, BLOCK)
        _gradient_kernel[grid](
            logits, labels, largest, scales, found, tokens, words, BLOCK=BLOCK, num_warps=WARPS
        )
    return found


STEPS = Steps(_take_in, _gradient)
