"""AttnRes for all sites of a block: the finished rows once, the running sum merged site by site.

A query does not depend on the data, so every site of a block can attend to the bank in one pass over it.
Attention Residuals (arXiv:2603.15031). Letters: L bank rows, S sites, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor, Tensor]
"""Largest logit [...], sum of exponentials below it [...], and the values they weigh [..., d]; FP32."""


def _logits(source: Tensor, keys: Tensor, eps: float) -> Tensor:
    """[..., d] and [S, d] -> [S, ...]."""
    normed = source * (source.square().mean(-1, keepdim=True) + eps).rsqrt()
    return torch.stack([(normed * key).sum(-1) for key in keys])


def bank_phase(
    bank: Sequence[Tensor], queries: Tensor, norm_weights: Tensor, *, eps: float = 1e-5
) -> list[Partial]:
    """What each of S sites (queries and norm_weights [S, d]) reads from the bank's rows, each [..., d]."""
    dtype = torch.promote_types(bank[0].dtype, torch.float32)
    rows = [row.to(dtype) for row in bank]
    keys = queries.to(dtype) * norm_weights.to(dtype)
    logits = torch.stack([_logits(row, keys, eps) for row in rows], dim=1)  # [S, L, ...]
    partials = []
    for site in logits:
        largest = site.amax(0)
        weights = (site - largest).exp()  # [L, ...]
        weighted = sum(w[..., None] * row for w, row in zip(weights, rows, strict=True))
        partials.append((largest, weights.sum(0), weighted))
    return partials


def merge_running(
    partial: Partial, running: Tensor, query: Tensor, norm_weight: Tensor, *, eps: float = 1e-5
) -> Tensor:
    """Add the running sum [..., d] to what a site read from the bank; the mix in running's dtype."""
    largest, total, weighted = partial
    value = running.to(weighted.dtype)
    key = query.to(value.dtype) * norm_weight.to(value.dtype)
    logit = _logits(value, key[None], eps)[0]
    top = torch.maximum(largest, logit)
    old, new = (largest - top).exp(), (logit - top).exp()
    mixed = (old[..., None] * weighted + new[..., None] * value) / (old * total + new)[..., None]
    return mixed.to(running.dtype)


def two_phase(
    bank: Sequence[Tensor],
    running: Sequence[Tensor],
    queries: Tensor,
    norm_weights: Tensor,
    *,
    eps: float = 1e-5,
) -> list[Tensor]:
    """`attn_res(bank + [running[i]], queries[i], norm_weights[i])` for every i, reading the bank once."""
    partials = bank_phase(bank, queries, norm_weights, eps=eps)
    sites = zip(partials, running, queries, norm_weights, strict=True)
    return [merge_running(partial, p, query, weight, eps=eps) for partial, p, query, weight in sites]
