"""Quantile Balancing: the router bias that gives every expert its share of the global batch.

Each expert's bias is the k/E quantile, over the tokens of one optimizer step, of the bias it would have
needed to be chosen. K3 report (arXiv:2607.24653), Quantile Balancing.

Letters: t tokens, E experts, k active experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route(scores: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose experts by scores + bias: indices [t, k] int64, best first, and the biased runner-up [t].

    scores [t, E] FP32 in [0, 1]; bias [E].
    """
    assert top_k < scores.shape[-1], "routing needs more experts than it activates"
    best, indices = (scores + bias).topk(top_k + 1, dim=-1)
    return indices[:, :top_k], best[:, top_k]


def required_bias_histogram(
    scores: Tensor, cutoff: Tensor, bias: Tensor, bins: int = 1000, valid: Tensor | None = None
) -> Tensor:
    """Count cutoff - score, the bias that would have let a token in: [E, bins] int32.

    The bins cut [min(bias) - 1, max(bias) + 1] evenly, which holds every value when scores lie in [0, 1]; so
    histograms made with one bias can be added over micro-batches and ranks. scores [t, E]; cutoff [t];
    valid [t] bool marks the tokens that count (all when left out). Does not wait for the device.
    """
    experts = scores.shape[-1]
    low, width = _bin_edges(bias, bins)
    required = cutoff[:, None] - scores  # [t, E]
    index = ((required - low) / width).long().clamp_(0, bins - 1)
    index += bins * torch.arange(experts, device=scores.device)
    ones = torch.ones_like(index, dtype=torch.int32)
    if valid is not None:
        ones *= valid[:, None]
    counts = torch.zeros(experts * bins, dtype=torch.int32, device=scores.device)
    return counts.scatter_add_(0, index.flatten(), ones.flatten()).view(experts, bins)


def bias_from_histogram(histogram: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The next step's bias [E], centred, in bias's dtype; the same bias when nothing was counted.

    `histogram` [E, bins] is pooled over the global batch and was counted with `bias`.
    """
    quantile = histogram_quantile(histogram, bias, top_k)
    counted = histogram.sum(-1) > 0
    return torch.where(counted.all(), quantile - quantile.mean(), bias.double()).to(bias.dtype)


def bias_exact(scores: Tensor, cutoff: Tensor, top_k: int) -> Tensor:
    """The next step's bias from the scores themselves, centred [E]: the oracle of the histogram.

    As many tokens as an expert should get have scores that exceed cutoff - bias before centring.
    """
    tokens, experts = scores.shape
    required = cutoff[:, None] - scores
    target = -(-tokens * top_k // experts)
    quantile = required.kthvalue(target + 1, dim=0).values
    return quantile - quantile.mean()


def histogram_quantile(histogram: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The k/E quantile of each expert's required bias [E] FP64, within one bin width of the exact one."""
    experts, bins = histogram.shape
    low, width = _bin_edges(bias, bins)
    upto = histogram.cumsum(-1)  # int64
    assignments = upto[:, -1:] * top_k  # experts times the target load
    position = (upto * experts < assignments).sum(-1, keepdim=True).clamp_(max=bins - 1)
    inside = histogram.gather(-1, position).clamp(min=1)
    before = upto.gather(-1, position) - histogram.gather(-1, position)
    share = ((assignments.double() / experts - before) / inside).clamp(0, 1)
    return (low + (position + share) * width).squeeze(-1)


def _bin_edges(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Lower edge of the first bin and the width of all, FP64 scalars."""
    least, most = bias.double().aminmax()
    return least - 1, (most - least + 2) / bins
