"""What fla's, Transformer Engine's and torch's kernels keep for backward, as the plan counts it."""

from __future__ import annotations

import pytest

from k3train.vision_config import VisionConfig
from tests.dist.launch import run_workers
from tests.parity.worker import PLAIN
from tests.unit.model.workers import saved_by_tower

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# The head shape is that of h200_small, so that kernels compiled for it serve here.
FAST = [
    *(f"{each.partition('=')[0]}=auto" for each in PLAIN),
    "run.device=cuda", "model.dtype=bfloat16", "model.num_layers=3", "model.full_attention_every=3",
    "model.mtp_layers=1", "model.hidden_size=1024", "model.num_heads=16", "model.kda_head_dim=128",
    "model.q_lora_rank=384", "model.kv_lora_rank=256", "model.qk_nope_head_dim=128", "model.v_head_dim=128",
    "model.qk_extra_head_dim=64", "model.latent_size=512", "model.expert_ffn_size=448",
    "model.dense_ffn_size=1024", "data.sequence_length=2048", "data.micro_batch_size=1",
]  # fmt: skip
TOWER = VisionConfig(enabled=True, depth=2, hidden_size=256, num_heads=4, head_dim=64, ffn_size=512)


@pytest.mark.parametrize("dispatcher", ["alltoall", "moonep"])
def test_every_site_holds_what_the_plan_counts(dispatcher: str) -> None:
    overrides = [*FAST, f"parallel.expert.dispatcher={dispatcher}"]
    (answer,) = run_workers(
        "tests.unit.model.workers:saved_by_site", 1, {"overrides": overrides}, timeout=400
    )
    wrong = {
        (unit, site): pair
        for unit, found in answer.items()
        for site, pair in found.items()
        # MoonEP rounds each expert's rows up.
        if pair[0] != pytest.approx(pair[1], rel=0.05 if site.endswith("moe.experts") else 0.01)
    }
    assert not wrong, "measured, planned bytes of a token"


def test_the_tower_holds_what_the_plan_counts() -> None:
    measured, expected = saved_by_tower(TOWER, "bf16", "cuda")
    assert measured == pytest.approx(expected, rel=0.01)
