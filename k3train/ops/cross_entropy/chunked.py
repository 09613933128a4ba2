"""The loss from logits of some words of the vocabulary at a time, made again in backward.

Of all t x v logits only those of one chunk of words exist at a time. Backward makes them again, one product
more than where the softmax is kept, so that it is exact whatever gradient each token's loss has. The other
way, gradients made in forward and scaled in backward, would hold the weight's from forward to backward:
[v, d] in FP32 is more than the logits of t tokens where t < d. The walk is over words, not over tokens: a
chunk then completes its rows of the weight's gradient, rounded once, and only the features' is summed, in
FP32.

Letters: t tokens, d hidden, v vocabulary, c words of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Steps:
    """What is done with a chunk's logits [t, c], which may be written over; labels count from its start."""

    take_in: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """logits, labels, and three numbers of each token so far [t], to be changed in place: the largest logit,
    the sum of exponentials from it on, the label's own logit."""
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
    """logits, labels, largest logit [t], and gradient over sum, gradient [2, t]: the gradient of the logits
    (softmax - one-hot) gradient, [t, c] in a dtype."""


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, words: int) -> Tensor:
    """See `ops.cross_entropy.token_losses`; `words` is c. Logits are FP32 even of BF16 features."""
    return walk(hidden, weight, labels, words, STEPS)


def walk(hidden: Tensor, weight: Tensor, labels: Tensor, words: int, steps: Steps) -> Tensor:
    """The same by given steps. Raises AssertionError for shapes that do not fit."""
    assert hidden.shape[1:] == weight.shape[1:] and labels.shape == hidden.shape[:1], "shapes do not fit"
    assert words > 0, "words of a chunk"
    losses: Tensor = _TokenLosses.apply(hidden, weight, labels, words, steps)
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, words: int, steps: Steps) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        largest = torch.full_like(labels, float("-inf"), dtype=dtype)  # [t]
        total, own = torch.zeros_like(largest), torch.zeros_like(largest)
        for chunk in _chunks(weight, words):
            logits = _product(hidden, weight[chunk].t())
            steps.take_in(logits, labels - chunk.start, largest, total, own)
            del logits  # or it would be there beside the next one
        # The largest logit is kept beside the sum: their log-sum would lose what large logits differ by.
        ctx.save_for_backward(hidden, weight, labels.clone(), largest, total)
        ctx.words, ctx.steps = words, steps
        return total.log() - (own - largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, largest, total = ctx.saved_tensors
        grad = grads[0].to(largest.dtype)
        scales = torch.stack((grad / total, grad))  # [2, t]
        to_hidden = torch.zeros_like(hidden, dtype=largest.dtype) if ctx.needs_input_grad[0] else None
        to_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(weight, ctx.words):
            logits = _product(hidden, weight[chunk].t())
            found = ctx.steps.gradient(logits, labels - chunk.start, largest, scales, hidden.dtype)
            del logits
            if to_weight is not None:
                torch.mm(found.t(), hidden, out=to_weight[chunk])
            if to_hidden is not None:
                to_hidden.add_(_product(found, weight[chunk]))
            del found
        return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight, None, None, None


def _chunks(weight: Tensor, words: int) -> Iterator[slice]:
    for start in range(0, len(weight), words):
        yield slice(start, min(start + words, len(weight)))


def _take_in(logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, own: Tensor) -> None:
    place, inside = _place(labels, logits.shape[1])
    torch.where(inside, logits.gather(1, place[:, None])[:, 0], own, out=own)
    higher = torch.maximum(largest, logits.amax(1))
    total.mul_((largest - higher).exp_()).add_(logits.sub_(higher[:, None]).exp_().sum(1))
    largest.copy_(higher)


def _gradient(logits: Tensor, labels: Tensor, largest: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    place, inside = _place(labels, logits.shape[1])
    shares = logits.sub_(largest[:, None]).exp_().mul_(scales[0, :, None])
    # One place of each row: nothing is added twice, so the order does not matter.
    rows = torch.arange(len(shares), device=shares.device)
    shares[rows, place] -= torch.where(inside, scales[1], 0)
    return shares.to(dtype)


def _place(labels: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Columns of labels in a chunk [t], some column for those outside, and which are inside."""
    return labels.clamp(0, words - 1), (labels >= 0) & (labels < words)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left right with sums and result in FP32, or FP64 of FP64."""
    if left.dtype in (torch.float32, torch.float64):
        return left.mm(right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float().mm(right.float())


STEPS = Steps(_take_in, _gradient)
