"""Expert outputs weighted and summed where their tokens live, as megatron-core's `unpermute` does it."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from k3train.model.dispatch import _weighted_sums
from k3train.model.router import entries

TOKENS, EXPERTS, CHOSEN, LATENT = 29, 7, 3, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_sums_are_unpermutes_without_waiting_for_the_device(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[:, 4] = -1  # an expert without rows
    choice = scores.topk(CHOSEN).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(-1, choice, True)
    probs = torch.where(routing_map, scores, 0)
    tokens = torch.randn(TOKENS, LATENT, generator=generator).to(dtype)
    rows, _, order, *_ = permute(tokens, routing_map, num_out_tokens=TOKENS * CHOSEN)
    up = torch.randn(TOKENS, LATENT, generator=generator).to(dtype)

    def results(ours: bool) -> list[torch.Tensor]:
        leaves = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        if ours:
            counts = routing_map.sum(0)
            sums = _weighted_sums(*leaves, order=order, shape=tokens.shape, counts=counts)
        else:
            options = {"probs": leaves[1], "routing_map": routing_map}
            sums = unpermute(leaves[0].float(), order, restore_shape=tokens.shape, **options).to(dtype)
        return [sums, *torch.autograd.grad(sums, leaves, up)]

    for one, other in zip(results(ours=True), results(ours=False), strict=True):
        assert torch.equal(one, other) and one.abs().sum() > 0


def test_entries_count_valid_tokens() -> None:
    choice = torch.tensor([[0, 2], [2, 3], [3, 0], [2, 0]])
    assert entries(choice, 5).tolist() == [3, 0, 3, 2, 0]
    valid = torch.tensor([True, False, True, True])
    assert entries(choice, 5, valid).tolist() == [3, 0, 2, 1, 0]
