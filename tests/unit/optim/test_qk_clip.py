"""QK-Clip brings the largest logit of a head to the bound and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from k3train.config import ModelConfig
from k3train.optim.qk_clip import row_scales
from tests.dist.launch import run_workers

NOPE, EXTRA, VALUE = 16, 8, 16
LAYOUTS = {
    "one rank": (1, ["parallel.zero=0", "run.microbatches=1"]),
    "two shards": (2, ["parallel.data=2", "parallel.zero=1", "run.microbatches=1"]),
    "recompute": (1, ["offload.policy=recompute", "run.microbatches=1"]),
}


def test_rows_of_one_head_share_its_factor() -> None:
    model = ModelConfig(num_heads=3, qk_nope_head_dim=2, qk_extra_head_dim=1, v_head_dim=2)
    scales = row_scales("layers.3.self_attention", model, torch.tensor([400.0, 50.0, 100.0]), 100.0)
    assert {name: scale.tolist() for name, scale in scales.items()} == {
        "layers.3.self_attention.q_b_proj.weight": [0.5, 0.5, 0.25, *[1.0] * 6],
        "layers.3.self_attention.kv_b_proj.weight": [0.5, 0.5, 1.0, 1.0, *[1.0] * 8],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_end_at_the_bound(layout: str) -> None:
    world_size, overrides = LAYOUTS[layout]
    free = run_workers(
        "tests.unit.optim.workers:clipped_logits", world_size, {"overrides": overrides, "bound": 1e-9}
    )[0]
    # Between the two heads of the first Gated MLA layer: one is scaled and one is not.
    low, high = sorted(free["steps"][0][0])
    assert 0 < low < high
    bound = (low + high) / 2
    answers = run_workers(
        "tests.unit.optim.workers:clipped_logits", world_size, {"overrides": overrides, "bound": bound}
    )
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    assert answer["names"][0] == "layers.3.self_attention"
    (first, *_), (second, *_) = answer["steps"]
    head = first.index(max(first))
    assert first[head] == pytest.approx(high, rel=1e-6)
    assert second[head] == pytest.approx(bound, rel=1e-5)
    gamma = bound / high
    query = answer["ratios"]["layers.3.self_attention.q_b_proj.weight"]
    key = answer["ratios"]["layers.3.self_attention.kv_b_proj.weight"]
    own = [gamma**0.5] * NOPE
    rest = slice(head * (NOPE + EXTRA), (head + 1) * (NOPE + EXTRA))
    assert query[rest] == pytest.approx([*own, *[gamma] * EXTRA], rel=1e-5)
    assert key[head * (NOPE + VALUE) :][:NOPE] == pytest.approx(own, rel=1e-5)
    others = [value for place, value in enumerate(query) if not rest.start <= place < rest.stop]
    assert others == pytest.approx([1.0] * (NOPE + EXTRA), abs=0)
    assert all(name.endswith(("q_b_proj.weight", "kv_b_proj.weight")) for name in answer["ratios"])
