"""Drawing tokens from logits."""

from __future__ import annotations

import torch

from k3train.generate import draw


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draw(torch.tensor([0.0, 2.0, 1.0]), 0, 1.0, torch.Generator()) == 1


def test_top_p_leaves_out_the_tail() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    random = torch.Generator().manual_seed(0)
    drawn = {draw(logits, 1.0, 0.7, random) for _ in range(200)}
    assert drawn == {0, 1}


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.7, 0.3]).log()
    random = torch.Generator().manual_seed(0)
    ones = sum(draw(logits, 1.0, 1.0, random) for _ in range(2000))
    assert 520 < ones < 680
