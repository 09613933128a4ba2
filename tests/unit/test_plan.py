"""Letters: d hidden, t tokens of a micro-batch, R payload rows."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from k3train import memory, shapes
from k3train.config import (
    ClusterConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from k3train.flops import train_flops_per_token
from k3train.plan import plan, render
from launch.compose import ready, world_size
from parallel.topology import LayoutError

ROW = 256 * 256 * 4  # FP32 row of the tiny model: 256 tokens of width 256
SMALL = ModelConfig(vocab_size=4096)


def make_config(model: ModelConfig = SMALL, microbatches: int = 4, zero: int = 1, **parallel: Any) -> Config:
    return Config(
        run=RunConfig(microbatches=microbatches),
        model=model,
        data=DataConfig(sequence_length=256),
        parallel=ParallelConfig(zero=zero, **parallel),
        cluster=ClusterConfig(nodes=1),
    )


def summed(entries: list[dict[str, int]], kind: str) -> int:
    return sum(entry[kind] for entry in entries)


def test_states_of_one_rank() -> None:
    held = plan(make_config(), 1)["memory_bytes"]
    entries = list(shapes.compact_parameters(SMALL))
    everything = sum(entry.numel for entry in entries)
    trained = sum(entry.numel for entry in entries if entry.trainable)
    assert trained == everything - 2 * 256
    assert len(held) == 1
    assert held[0]["parameters"] == 4 * everything
    assert held[0]["gradients"] == 4 * trained
    assert held[0]["optimizer_states"] == 8 * trained
    assert held[0]["master_weights"] == 0, "an FP32 model needs no copy"
    assert held[0]["balance_histograms"] == 2 * 9 * 32 * (4 * 1000 + 16)


def test_bf16_keeps_masters_of_all_but_the_fp32_parameters() -> None:
    model = replace(SMALL, dtype="bfloat16")
    [held] = plan(make_config(model), 1)["memory_bytes"]
    fp32 = sum(e.numel for e in shapes.compact_parameters(model) if e.dtype == "fp32")
    bf16 = sum(e.numel for e in shapes.compact_parameters(model)) - fp32
    assert fp32 == 6 * (3 * 256 * 4 + 4 + 256 + 64)
    assert held["parameters"] == 2 * bf16 + 4 * fp32
    assert held["master_weights"] == 4 * (bf16 - 2 * 256)


def test_muon_keeps_one_moment_of_matrices() -> None:
    config = make_config(zero=0)
    config.optim = OptimConfig(name="muon")
    [held] = plan(config, 1)["memory_bytes"]
    matrices = {"embedding", "head"}
    by_muon = sum(
        e.numel for e in shapes.compact_parameters(SMALL) if len(e.shape) == 2 and e.kind not in matrices
    )
    assert held["gradients"] * 2 - held["optimizer_states"] == 4 * by_muon


def test_stages_add_up_to_the_model() -> None:
    whole = plan(make_config(), 1)["memory_bytes"]
    cut = plan(make_config(pipeline=2, virtual=2), 2)["memory_bytes"]
    assert summed(cut, "parameters") == summed(whole, "parameters")
    assert cut[0]["parameters"] != cut[1]["parameters"]
    assert (cut[0]["logits"], cut[1]["logits"]) == (0, whole[0]["logits"])


def test_zero_shards_states_and_expert_parallelism_shards_experts() -> None:
    expert = sum(entry.numel for entry in shapes.compact_parameters(SMALL) if entry.kind == "expert")
    dense = sum(entry.numel for entry in shapes.compact_parameters(SMALL)) - expert
    frozen = 2 * 256
    held = plan(make_config(data=4, expert=2), 4)["memory_bytes"][0]
    assert held["parameters"] == 4 * (dense + expert // 2)
    assert held["gradients"] == 4 * (dense - frozen + expert // 2)
    # Dense states over four ranks, those of the own half of the experts over two; shards are rounded up.
    assert held["optimizer_states"] == pytest.approx(8 * ((dense - frozen) // 4 + expert // 4), rel=1e-4)
    unsharded = plan(make_config(data=4, expert=2, zero=0), 4)["memory_bytes"][0]
    assert unsharded["optimizer_states"] == 2 * unsharded["gradients"]


def test_recomputed_layers_keep_one_row_each() -> None:
    model = replace(SMALL, recompute="layer", mtp_layers=0)
    [held] = plan(make_config(model), 1)["memory_bytes"]
    assert held["attn_res_bank"] == ROW
    assert held["activations"] == (9 + 2) * ROW
    layers = [256 * memory.layer_bytes(model, kind) for kind in shapes.layer_kinds(model)]
    assert held["workspace"] == max(layers)
    kept = plan(make_config(replace(model, recompute="none")), 1)["memory_bytes"][0]
    assert kept["activations"] == 2 * ROW + sum(layers)


def test_payload_rows_stay_with_each_microbatch_in_flight() -> None:
    # Chunks of 5 and 4 layers: before layer 5 lie the embedding, the first block and the running sum.
    planned = plan(make_config(pipeline=2), 2)
    assert planned["pipeline"]["payload_rows"] == 3
    first, last = (entry["attn_res_bank"] for entry in planned["memory_bytes"])
    assert (first, last) == (2 * ROW, 3 * ROW)


def test_payload_rows_of_k3() -> None:
    model = ModelConfig(num_layers=93, attn_res_block_size=12)
    assert shapes.payload_rows(model, [range(0, 12), range(12, 93)]) == 2
    assert shapes.payload_rows(model, [range(0, 13), range(13, 93)]) == 3
    assert shapes.payload_rows(model, [range(start, start + 1) for start in range(93)]) == 9
    assert shapes.payload_rows(model, [range(0, 93)]) == 1


def test_logits_count_both_heads() -> None:
    [with_mtp] = plan(make_config(), 1)["memory_bytes"]
    [without] = plan(make_config(replace(SMALL, mtp_layers=0)), 1)["memory_bytes"]
    assert without["logits"] == 256 * 4096 * (12 + 8)
    assert with_mtp["logits"] == 256 * 4096 * (2 * 12 + 8)


def test_pipeline_traffic_of_uneven_chunks() -> None:
    planned = plan(make_config(pipeline=2, virtual=2, layers_per_chunk=[3, 1, 3, 2]), 2)
    # Four stages, three borders: either rank is left over two of them, one way or the other.
    assert planned["pipeline"]["payload_rows"] == 3
    assert planned["traffic_bytes"]["pipeline_forward"] == 4 * 2 * 3 * ROW
    assert planned["traffic_bytes"]["pipeline_backward"] == 4 * 2 * 3 * ROW


def test_expert_traffic_is_latent_rows_to_the_other_ranks() -> None:
    model = replace(SMALL, mtp_layers=0)
    sent = plan(make_config(model, data=2, expert=2), 2)["traffic_bytes"]
    rows = 256 * 4 // 2  # top-4 of 256 tokens, half of them elsewhere
    assert sent["expert_dispatch"] == sent["expert_combine"] == 4 * 8 * 2 * rows * 128 * 4
    again = plan(make_config(replace(model, recompute="layer"), data=2, expert=2), 2)["traffic_bytes"]
    assert again["expert_dispatch"] == sent["expert_dispatch"] * 3 / 2


def test_gradient_traffic_with_and_without_sharding() -> None:
    trained = sum(entry.numel for entry in shapes.compact_parameters(SMALL) if entry.trainable)
    sharded = plan(make_config(data=4), 4)["traffic_bytes"]
    assert sharded["gradient_reduce_scatter"] == sharded["parameter_all_gather"] == 3 * trained
    assert "gradient_all_reduce" not in sharded
    assert plan(make_config(data=4, zero=0), 4)["traffic_bytes"]["gradient_all_reduce"] == 6 * trained
    assert sharded["balance_histograms"] == 2 * 3 / 4 * 9 * 32 * (4 * 1000 + 16)


def test_bf16_parameters_are_gathered_at_half_the_size_of_their_gradients() -> None:
    model = replace(SMALL, dtype="bfloat16")
    trained = [entry for entry in shapes.compact_parameters(model) if entry.trainable]
    sent = plan(make_config(model, data=4), 4)["traffic_bytes"]
    assert sent["gradient_reduce_scatter"] == 3 * sum(entry.numel for entry in trained)
    assert sent["parameter_all_gather"] == 3 / 4 * sum(entry.nbytes for entry in trained)
    assert sent["parameter_all_gather"] < 0.51 * sent["gradient_reduce_scatter"]


def test_experts_of_their_own_ranks_send_no_gradients() -> None:
    dense = sum(e.numel for e in shapes.compact_parameters(SMALL) if e.trainable and e.kind != "expert")
    sent = plan(make_config(data=2, expert=2), 2)["traffic_bytes"]
    assert sent["gradient_reduce_scatter"] == 4 * dense / 2


def test_bubble_of_one_stage_is_zero_and_shrinks_with_chunks_and_microbatches() -> None:
    model = replace(SMALL, num_layers=16, num_dense_layers=0, mtp_layers=0, vocab_size=64)
    bubbles = [
        plan(make_config(model, microbatches=m, pipeline=p, virtual=v), p)["pipeline"]
        for p, v, m in ((1, 1, 4), (2, 1, 4), (2, 2, 4), (2, 2, 16))
    ]
    assert bubbles[0]["bubble_over_compute"] == 0
    assert [entry["bubble_of_equal_stages"] for entry in bubbles] == [0, 1 / 4, 1 / 8, 1 / 32]
    for entry in bubbles[1:]:
        # Layers of both kinds and the head make stages a little unequal.
        assert entry["bubble_of_equal_stages"] < entry["bubble_over_compute"]
        assert entry["bubble_over_compute"] < entry["bubble_of_equal_stages"] + 0.1


def test_mfu_is_the_efficiency_less_bubble_recompute_and_messages() -> None:
    alone = plan(make_config(), 1)
    assert alone["mfu"] == pytest.approx(0.4)
    assert alone["step_seconds"] == pytest.approx(4 * 256 * train_flops_per_token(SMALL, 256) / 0.4e11)
    spent = alone["flops"]["forward_by_site"]
    forward = sum(spent.values())
    # Heads, MTP's fusion [2d -> d] and the output site's four sources lie outside the recomputed layers.
    again = forward - 2 * spent["head"] - 4 * 256**2 - 6 * 256 * 4
    recomputed = plan(make_config(replace(SMALL, recompute="layer")), 1)
    assert recomputed["mfu"] == pytest.approx(0.4 * 3 * forward / (3 * forward + again))
    assert plan(make_config(pipeline=2), 2)["mfu"] < 0.4 / (1 + 1 / 4)


def test_faster_links_shorten_the_step() -> None:
    config = make_config(data=4, expert=4)
    slow = plan(config, 4)["step_seconds"]
    config.cluster.ranks_per_node = 4
    config.cluster.link_gbps = 1000.0
    config.cluster.network_gbps = 0.001
    inside = plan(config, 4)["step_seconds"]
    config.cluster.ranks_per_node = 2
    assert inside < slow < plan(config, 4)["step_seconds"]


def test_data_parallel_size_is_derived() -> None:
    assert plan(make_config(pipeline=2), 8)["layout"]["data"] == 4
    with pytest.raises(LayoutError, match="layers_per_chunk"):
        plan(make_config(pipeline=2, layers_per_chunk=[5, 5]), 2)


def test_k3_pretrain_has_the_published_sizes() -> None:
    config = ready(["recipe=k3_pretrain"], inputs=False)
    ranks = world_size(config)
    planned = json.loads(json.dumps(plan(config, ranks)))
    assert round(planned["parameters"]["total"] / 1e9, 2) == 2779.48
    assert round(planned["parameters"]["active"] / 1e9, 2) == 104.19
    assert len(planned["memory_bytes"]) == ranks
    assert planned["pipeline"]["payload_rows"] == 9
    layout = planned["layout"]
    assert [layout[name] for name in ("pipeline", "virtual", "expert", "data")] == [8, 2, 128, 128]
    sequences = config.run.microbatches * config.data.micro_batch_size * (config.parallel.data or 0)
    assert planned["tokens_per_step"] == sequences * config.data.sequence_length > 0


def test_k3_pretrain_leaves_room_on_its_fullest_rank() -> None:
    config = ready(["recipe=k3_pretrain"], inputs=False)
    planned = plan(config, world_size(config))
    largest = max(sum(rank.values()) for rank in planned["memory_bytes"])
    assert largest / 2**30 == pytest.approx(112.1, abs=0.1)
    # The process, its libraries and the allocator's unused blocks come on top.
    assert largest < 0.85 * config.cluster.memory_gib * 2**30
    assert planned["pipeline"]["bubble_over_compute"] == pytest.approx(0.043, abs=0.001)
    assert planned["mfu"] == pytest.approx(0.185, abs=0.001)


@pytest.mark.parametrize("recipe", ["tiny", "tiny_dense_check", "h200_small", "h200_slice", "k3_pretrain"])
def test_the_table_shows_the_numbers(recipe: str) -> None:
    config = ready([f"recipe={recipe}"], inputs=False)
    planned = plan(config, world_size(config))
    output = io.StringIO()
    Console(file=output, width=200).print(render(planned))
    text = output.getvalue()
    assert f"Plan of {recipe}" in text
    assert f"{planned['tokens_per_step']:,} tokens" in text
    assert all(line in text for line in planned["assumptions"])


def test_planning_imports_no_torch() -> None:
    program = "import k3train.plan, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
