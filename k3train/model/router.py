"""Sigmoid router balanced by Quantile Balancing.

Source: Kimi K3 report. A token goes to the top-k of score + bias; the bias never enters the weights and
is not trained by gradient: once a step it becomes the quantile of what each expert would have needed,
estimated from a histogram over the global batch. Shapes: t tokens, d hidden, E experts, k top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from ..ops.backends import current_device
from ..ops.quantile import bias_from_histogram, required_bias_histogram, route
from .linear import linear_fp32
from .memo import LayerMemo
from .transformer_config import K3TransformerConfig


class Routing(NamedTuple):
    """Where each token goes."""

    choice: Tensor
    """int64 [t, k], experts by their number in the whole model."""
    weights: Tensor
    """FP32 [t, k], differentiable."""


class QuantileRouter(Router):
    """Router with a histogram of required biases and counts of expert loads.

    Buffers: `expert_bias` FP32 [E], saved; `histogram` int32 [E, bins], `load` and `unbiased_load`
    int64 [E], emptied at every optimizer step.
    """

    config: K3TransformerConfig

    def __init__(self, config: K3TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        model = config.k3
        self.top_k = model.top_k
        device = current_device()
        self.weight.data = self.weight.data.to(device)

        def count(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        experts = model.num_experts
        self.register_buffer("expert_bias", count(experts, dtype=torch.float32))
        self.register_buffer(
            "histogram", count(experts, model.balance_bins, dtype=torch.int32), persistent=False
        )
        self.register_buffer("load", count(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("unbiased_load", count(experts, dtype=torch.int64), persistent=False)
        self.traced: list[Tensor] | None = None
        """Where a list: entries [E] of each micro-batch, padding included, are added to it in training."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits in FP32 from FP32 input and weight: input [t, d] to [t, E]."""
        return linear_fp32(input, self.weight)

    def routing(self, logits: Tensor, valid: Tensor | None = None, memo: LayerMemo | None = None) -> Routing:  # type: ignore[override]
        """The choice and weights for logits [t, E]; a filled `memo` holds the choice of an earlier pass."""
        scores = torch.sigmoid(logits)
        if memo is not None and memo.choice is not None:
            return self._weigh(scores, memo.choice)
        choice, cutoff = route(scores.detach(), self.expert_bias, self.top_k)
        if self.training:
            self._count(scores.detach(), choice, cutoff, valid)
        if memo is not None:
            memo.choice = choice
        return self._weigh(scores, choice)

    def forward(self, input: Tensor, valid: Tensor | None = None, memo: LayerMemo | None = None) -> Routing:
        """Route input [..., d]; `valid` [...] is False for padding, which is routed but not counted."""
        flat = input.reshape(-1, input.shape[-1])
        return self.routing(self.gating(flat), None if valid is None else valid.reshape(-1), memo)

    def _weigh(self, scores: Tensor, choice: Tensor) -> Routing:
        chosen = scores.gather(-1, choice)
        weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.config.k3.routed_scaling_factor
        return Routing(choice, weights)

    def _count(self, scores: Tensor, indices: Tensor, cutoff: Tensor, valid: Tensor | None) -> None:
        if self.traced is not None:
            self.traced.append(entries(indices, self.load.numel()))
        self.histogram += required_bias_histogram(
            scores, cutoff, self.expert_bias, bins=self.histogram.shape[1], valid=valid
        )
        unbiased = scores.topk(self.top_k, dim=-1).indices
        for load, chosen in ((self.load, indices), (self.unbiased_load, unbiased)):
            load += entries(chosen, load.numel(), valid)

    def reset_counts(self) -> None:
        """Forget the tokens counted so far."""
        for counter in (self.histogram, self.load, self.unbiased_load):
            counter.zero_()

    def update_bias(self) -> None:
        """Set the bias from the histogram, which must already hold the whole global batch."""
        fresh = bias_from_histogram(self.histogram, self.expert_bias, self.top_k)
        ema = self.config.k3.balance_ema
        blended = ema * self.expert_bias + (1 - ema) * fresh
        self.expert_bias.copy_(blended - blended.mean())


def entries(choice: Tensor, experts: int, valid: Tensor | None = None) -> Tensor:
    """How often each expert was chosen, int64 [E], by the tokens of choice [t, k] that `valid` [t] marks.

    Does not wait for the device, as `torch.bincount` does.
    """
    ones = torch.ones_like(choice)
    if valid is not None:
        ones *= valid[:, None]
    return choice.new_zeros(experts).scatter_add_(0, choice.flatten(), ones.flatten())
