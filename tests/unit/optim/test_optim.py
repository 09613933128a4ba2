"""Muon's update size and share of the parameters, the schedule, and clipping."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from k3train.optim.clip import clip_gradients
from tests.dist.launch import run_workers


def test_muon_updates_matrices_with_an_rms_of_a_fifth() -> None:
    (answer,) = run_workers("tests.unit.optim.workers:muon_updates", 1)
    # Newton-Schulz leaves singular values between 0.7 and 1.2; narrow matrices scatter most.
    assert all(0.12 < rms < 0.26 for rms in answer["rms"].values()), answer["rms"]
    assert {"embedding.weight", "head.weight"} <= set(answer["left"])
    vectors = ("norm.weight", "norm_weight", "query", "_conv", "A_log", "dt_bias")
    assert all(
        name.endswith(vectors) or name in ("embedding.weight", "head.weight") for name in answer["left"]
    )


def test_what_per_head_muon_leaves_whole_moves_as_under_megatron_cores_muon() -> None:
    (difference,) = run_workers("tests.unit.optim.workers:difference_to_muon", 1)
    cut = (".q_proj.", ".k_proj.", ".v_proj.", ".q_b_proj.", ".kv_b_proj.", ".linear_fc1.")
    by_heads = {name: value for name, value in difference.items() if any(part in name for part in cut)}
    assert min(by_heads.values()) > 0.1, by_heads
    rest = {name: value for name, value in difference.items() if name not in by_heads}
    # AdamW's are the same to the bit; batched and plain products may round BF16 in different ways.
    adamw = [
        value for name, value in rest.items() if name.endswith(("norm.weight", "_conv", "query", "A_log"))
    ]
    assert len(adamw) > 50 and max(adamw) == 0
    assert len(rest) > 100 and max(rest.values()) < 5e-3, rest


@pytest.mark.parametrize(("steps", "warmup", "peak"), [(200, 0.01, 2), (100, 0.1, 10), (1, 0.01, 1)])
def test_schedule_warms_up_linearly_and_ends_at_a_tenth(steps: int, warmup: float, peak: int) -> None:
    from tests.unit.optim.workers import schedule

    rates = schedule(steps, warmup)
    if steps == 1:
        assert len(rates) == 1 and 0 < rates[0] <= 1
        return
    assert rates[:peak] == pytest.approx([step / peak for step in range(1, peak + 1)])
    assert rates[-1] == pytest.approx(0.1)
    middle = (peak + steps) // 2
    share = (middle - peak) / (steps - peak)
    assert rates[middle - 1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


@pytest.mark.parametrize(("limit", "scale"), [(1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)])
def test_clipping_scales_all_gradients_to_the_limit(limit: float, scale: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([value])
    clip_gradients(SimpleNamespace(get_parameters=lambda: parameters), 5.0, limit)  # type: ignore[arg-type]
    values = [parameter.grad.item() for parameter in parameters if parameter.grad is not None]
    assert values == pytest.approx([3 * scale, 4 * scale], rel=1e-5)
