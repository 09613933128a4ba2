"""What the plan says of the loss: memory, time and the backend that training takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3train import activation_costs, loss_plan
from k3train.config import BackendConfig, Config, DataConfig, ModelConfig, ParallelConfig
from k3train.operators import Operators, peak
from k3train.plan import plan
from launch.compose import ready, world_size

T, V, D = 4096, 163840, 7168


def make(backend: str = "chunked", dtype: str = "bfloat16", mib: int = 512, mtp: int = 1) -> Config:
    """A small model with Kimi K3's width and vocabulary."""
    backends = BackendConfig(cross_entropy=backend, logits_mib=mib)
    model = ModelConfig(
        num_layers=1, hidden_size=D, vocab_size=V, mtp_layers=mtp, dtype=dtype, backends=backends
    )
    return Config(model=model, data=DataConfig(sequence_length=T), parallel=ParallelConfig(data=1))


def test_bytes_of_a_pass_through_the_head() -> None:
    assert loss_plan.logits_bytes(make("megatron")) == T * V * (2 + 4)
    assert loss_plan.logits_bytes(make("reference")) == T * V * (2 + 4 + 4)
    # 512 MiB are the FP32 logits of 32,768 words; their gradient in BF16; the features' in FP32, twice.
    chunk = T * 32768
    assert loss_plan.logits_bytes(make()) == 4 * chunk + 2 * chunk + 2 * 4 * T * D
    assert loss_plan.logits_bytes(make(dtype="float32")) == 4 * chunk + 2 * 4 * T * D
    assert loss_plan.logits_bytes(make("chunked", mib=1 << 20)) == T * V * 6 + 2 * 4 * T * D, "one chunk"


def test_a_context_rank_has_its_share_of_the_tokens() -> None:
    config = make()
    shared = replace(config, parallel=replace(config.parallel, context=4))
    assert loss_plan.chosen(shared) == "chunked"
    assert loss_plan.logits_bytes(shared) == 1024 * (V // 2 * 6 + 2 * 4 * D), "two chunks, not five"


@pytest.mark.parametrize("mtp", [0, 1])
def test_backward_makes_logits_again(mtp: int) -> None:
    """One product more for each pass through the head; what forward moves stays the same."""
    chunked, whole = (Operators(make(backend, mtp=mtp)).output() for backend in ("chunked", "megatron"))
    product = (1 + mtp) * 2.0 * T * V * D / peak(make(), "dense_gemm")
    more = chunked.backward["dense_gemm"] - whole.backward["dense_gemm"]
    assert more == pytest.approx(product)
    assert chunked.forward["dense_gemm"] == whole.forward["dense_gemm"]
    assert chunked.forward["memory"] == pytest.approx(whole.forward["memory"], rel=1e-3)
    assert chunked.weight == whole.weight


def test_running_the_head_again_costs_as_much_in_chunks() -> None:
    chunked, whole = (
        activation_costs.output_costs(make(name), "cuda")["head"] for name in ("chunked", "megatron")
    )
    assert chunked.flops == whole.flops == 2.0 * V * D
    assert chunked.bytes == pytest.approx(whole.bytes, rel=1e-3)


def test_chunks_spare_the_last_stage_of_k3_what_the_softmax_takes() -> None:
    held = {}
    for name in ("auto", "chunked"):
        config = ready(["recipe=k3_pretrain", f"model.backends.cross_entropy={name}"], inputs=False)
        ranks = plan(config, world_size(config))["memory_bytes"]
        held[loss_plan.chosen(config)] = sum(ranks[-1].values()) / 2**30
    assert held == {"megatron": pytest.approx(94.5, abs=0.1), "chunked": pytest.approx(86.7, abs=0.1)}


def test_the_plan_says_so() -> None:
    (line,) = loss_plan.assumptions(make())
    assert line.startswith("the loss takes logits of 32,768 of 163,840 words at a time")
    assert loss_plan.assumptions(make("megatron")) == []
