"""Letters: d hidden, t tokens of a micro-batch, R payload rows."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from k3train import activation_bytes, memory, schedule, shapes, vision_shapes
from k3train.activation_policy import recomputes
from k3train.activation_sites import held_bytes
from k3train.config import (
    ClusterConfig,
    Config,
    DataConfig,
    ExpertConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from k3train.flops import layer_flops
from k3train.image_load import ImageLoad, default_load
from k3train.layout import layout_of
from k3train.plan import plan, recomputes_vision, render
from k3train.schedule import simulation
from k3train.vision_config import VisionConfig
from launch.compose import ready, world_size
from parallel.pipeline.table import BACKWARD, FORWARD, VISION_BACKWARD, VISION_FORWARD, Table
from parallel.pipeline.vision_fill import fill
from parallel.topology import LayoutError

ROW = 256 * 256 * 4  # FP32 row of the tiny model: 256 tokens of width 256
TOWER = VisionConfig(
    enabled=True, depth=2, hidden_size=64, num_heads=2, head_dim=32, ffn_size=128, grid_size=8
)
SMALL = ModelConfig(vocab_size=4096)


def make_config(
    model: ModelConfig = SMALL, microbatches: int = 4, zero: int = 1, expert: int = 1, **parallel: Any
) -> Config:
    return Config(
        run=RunConfig(microbatches=microbatches),
        model=model,
        data=DataConfig(sequence_length=256),
        parallel=ParallelConfig(zero=zero, expert=ExpertConfig(size=expert), **parallel),
        cluster=ClusterConfig(nodes=1),
    )


def of_products_alone(config: Config) -> Config:
    """On a machine where nothing but products takes time."""
    config.cluster.memory_gbps, config.cluster.efficiency.newton_schulz = 1e12, 1e9
    return config


def holding(config: Config, **sites: str) -> Config:
    """The configuration with storages of sites, whose dots are written as __."""
    held = {name.replace("__", "."): storage for name, storage in sites.items()}
    return replace(config, offload=replace(config.offload, sites=held))


def with_images(mode: str = "bubbles", **parallel: Any) -> Config:
    """Two items of 8 x 8 patches in every micro-batch: 16 tokens each."""
    config = make_config(**parallel)
    config.vision = replace(TOWER, mode=mode)
    config.data.images, config.data.max_patches = ["digits"], 256
    config.data.micro_batch_size, config.data.image_share = 1, 0.5
    return config


def planned_with(config: Config, ranks: int, count: int = 2) -> dict[str, Any]:
    load = ImageLoad(count, (1, 8, 8), stated=True)
    return plan(config, ranks, simulation(config, layout_of(config, ranks), load=load))


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


def test_per_head_muon_keeps_one_moment_of_what_it_cuts() -> None:
    config = make_config(zero=0)
    config.optim = OptimConfig(name="muon_per_head")
    planned = plan(config, 1)
    [held] = planned["memory_bytes"]
    table = planned["optimizer"]["groups"]
    by_muon = sum(group["numel"] for group in table if group["rule"] == "muon")
    assert held["gradients"] * 2 - held["optimizer_states"] == 4 * by_muon > 0
    assert planned["optimizer"]["newton_schulz_flops"] == sum(group["flops"] for group in table)
    output = io.StringIO()
    Console(file=output, width=100).print(render(planned))
    shown = output.getvalue()
    assert "Groups of the optimizer" in shown and "heads, K and V" in shown
    assert plan(make_config(), 1)["optimizer"] == {"name": "adamw", "groups": []}


def test_per_head_muon_sends_less_than_its_buffers_over_more_ranks() -> None:
    config = make_config(data=4)
    config.optim = OptimConfig(name="muon_per_head")
    sent = plan(config, 4)["traffic_bytes"]
    assert 0 < sent["muon_return"] < sent["muon_gather"] < sent["gradient_reduce_scatter"] / 4
    config.parallel.zero = 0
    assert "muon_gather" not in plan(config, 4)["traffic_bytes"]


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
    model = replace(SMALL, mtp_layers=0)
    [held] = plan(holding(make_config(model), layer="recompute"), 1)["memory_bytes"]
    # Layers 0, 4 and 8 begin a block: what enters them is a row of the bank.
    assert held["attn_res_bank"] == 3 * ROW
    tensors = [activation_bytes.decoder_layer(make_config(model), layer, "cpu") for layer in range(9)]
    layers = [256 * sum(held_bytes(each).values()) for each in tensors]
    end = 256 * sum(held_bytes(activation_bytes.output(make_config(model), "cpu")).values())
    assert held["activations"] == pytest.approx(6 * ROW + end)
    assert held["workspace"] == pytest.approx(max(layers) - 2 * ROW), "but for the sums that are held anyway"
    kept = plan(make_config(model), 1)["memory_bytes"][0]
    assert kept["attn_res_bank"] == 3 * ROW
    assert kept["activations"] == pytest.approx(sum(layers) - 3 * ROW + end)


def test_payload_rows_stay_with_each_microbatch_in_flight() -> None:
    # Chunks of 5 and 4 layers: before layer 5 lie the embedding, the first block and the running sum.
    planned = plan(make_config(pipeline=2), 2)
    assert planned["pipeline"]["payload_rows"] == 3
    first, last = (entry["attn_res_bank"] for entry in planned["memory_bytes"])
    # The rows that layers 0 and 4 begin with, for two micro-batches; the message and the row of layer 8.
    assert (first, last) == (2 * 2 * ROW, (3 + 1) * ROW)


def test_logits_of_one_head_at_a_time_and_the_softmax_of_both() -> None:
    [with_mtp] = plan(make_config(), 1)["memory_bytes"]
    [without] = plan(make_config(replace(SMALL, mtp_layers=0)), 1)["memory_bytes"]
    assert without["logits"] == with_mtp["logits"] == 256 * 4096 * 8
    assert with_mtp["activations"] > without["activations"] + 256 * 4096 * 4


def test_pipeline_traffic_of_uneven_chunks() -> None:
    planned = plan(make_config(pipeline=2, virtual=2, layers_per_chunk=[3, 1, 3, 2]), 2)
    # Rows are made by stages 0, 2 and 3. Into stage 1 goes row 0, into stage 2 none (its rank made row 0),
    # into stage 3 row 1; the running sum with each. Rank 0 is left over the first and the last border.
    assert planned["pipeline"]["payload_rows"] == 3
    assert planned["pipeline"]["message_rows"] == [2, 1, 2]
    assert planned["traffic_bytes"]["pipeline_forward"] == 4 * (2 + 2) * ROW
    assert planned["traffic_bytes"]["pipeline_backward"] == 4 * (2 + 2) * ROW
    assert planned["attn_res_rows"]["row_bytes"] == ROW
    assert planned["attn_res_rows"]["real_cuts"] == {"cached": 2, "published": 3, "naive": 4}
    assert planned["attn_res_rows"]["row_a_stage"] == {"cached": 3, "published": 5, "naive": 6}


def test_expert_traffic_is_latent_rows_to_the_other_ranks() -> None:
    model = replace(SMALL, mtp_layers=0)
    sent = plan(make_config(model, data=2, expert=2), 2)["traffic_bytes"]
    rows = 256 * 4 // 2  # top-4 of 256 tokens, half of them elsewhere
    assert sent["expert_dispatch"] == sent["expert_combine"] == 4 * 8 * 2 * rows * 128 * 4
    again = plan(holding(make_config(model, data=2, expert=2), layer="recompute"), 2)["traffic_bytes"]
    assert again["expert_dispatch"] == sent["expert_dispatch"] * 3 / 2


def test_context_traffic_is_states_halos_latents_and_moved_queries() -> None:
    model = replace(SMALL, mtp_layers=0, full_attention_every=4, num_layers=4)
    config = make_config(model, microbatches=2, context=2)
    sent = plan(config, 2)["traffic_bytes"]
    heads, head = model.num_heads, model.kda_head_dim
    both_ways = 2 * 2  # micro-batches, passes
    assert sent["context_states"] == both_ways * 3 * heads * head * 2 * head * 4
    assert sent["context_halos"] == both_ways * 3 * 3 * 3 * heads * head * 4
    latent = model.kv_lora_rank + model.qk_extra_head_dim
    assert sent["context_latents"] == both_ways * 128 * latent * 4
    # Half of each share changes hands, so that both ranks have early and late queries.
    moved = sent["context_queries"] / both_ways / (model.q_lora_rank + heads * model.v_head_dim) / 4
    assert 32 <= moved <= 64
    longer = replace(config, data=replace(config.data, sequence_length=1024))
    assert plan(longer, 2)["traffic_bytes"]["context_states"] == sent["context_states"]
    assert plan(longer, 2)["traffic_bytes"]["context_latents"] == 4 * sent["context_latents"]
    alone = plan(make_config(model, data=2), 2)
    assert "context_states" not in alone["traffic_bytes"] and "context" not in alone


def test_a_context_group_attends_evenly_and_says_so() -> None:
    planned = plan(make_config(context=4), 4)
    assert planned["context"]["contiguous"] == pytest.approx(2 - 1 / 4, rel=0.01)
    assert planned["context"]["max_over_mean"] < 1.05
    console = Console(file=io.StringIO(), width=200)
    console.print(render(planned))
    assert "if each attended to its own queries" in console.file.getvalue()  # type: ignore[attr-defined]


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


@pytest.mark.parametrize(
    ("pipeline", "virtual", "microbatches"),
    [(2, 1, 4), (4, 1, 8), (2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 3, 9)],
)
def test_bubble_of_equal_chunks_is_exact(pipeline: int, virtual: int, microbatches: int) -> None:
    model = replace(SMALL, num_layers=16)
    config = make_config(model, microbatches, pipeline=pipeline, virtual=virtual)
    equal = simulation(config, layout_of(config, pipeline), equal_chunks=True)
    planned = plan(config, pipeline, equal)
    found = planned["pipeline"]
    assert found["bubble_over_compute"] == (pipeline - 1) / (virtual * microbatches)
    assert found["schedule"] == ("1f1b" if virtual == 1 else "interleaved")
    assert found["unit"] == "units"
    assert found["idle_seconds"] == [3.0 * (pipeline - 1)] * pipeline
    assert found["makespan"] == 3 * (virtual * microbatches + pipeline - 1)
    most = pipeline if virtual == 1 else 2 * (pipeline - 1) + (virtual - 1) * pipeline + 1
    assert found["peak_microbatches"][0] == min(most, virtual * microbatches)
    # The step is still told in seconds, from FLOPs.
    assert planned["step_seconds"] == plan(config, pipeline)["step_seconds"]


def test_idle_shares_are_those_of_the_ranks() -> None:
    pipeline = plan(make_config(pipeline=2, virtual=2), 2)["pipeline"]
    busy = [pipeline["makespan"] - idle for idle in pipeline["idle_seconds"]]
    assert pipeline["bubble_over_compute"] == pytest.approx(sum(pipeline["idle_seconds"]) / sum(busy))
    assert pipeline["idle_share"] == [idle / pipeline["makespan"] for idle in pipeline["idle_seconds"]]


def test_a_v_shape_holds_and_sends_where_its_stages_are() -> None:
    config = make_config(pipeline=2, virtual=2, layers_per_chunk=[3, 1, 3, 2])
    planned = plan(config, 2, simulation(config, layout_of(config, 2), schedule="zbv"))
    # Stages 0 and 3 are on rank 0, which so has the embedding, the head, and no border between 1 and 2.
    assert planned["memory_bytes"][0]["logits"] > 0 == planned["memory_bytes"][1]["logits"]
    assert planned["pipeline"]["message_rows"] == [2, 1, 2]
    assert planned["traffic_bytes"]["pipeline_forward"] == 4 * 2 * ROW
    # Either way crosses once: into stage 1 and, with row 1, into stage 3.
    assert planned["attn_res_rows"]["real_cuts"] == {"cached": 2, "published": 3, "naive": 3}


def test_mfu_is_the_efficiency_less_bubble_recompute_and_messages() -> None:
    config = of_products_alone(make_config())
    alone = plan(config, 1)
    spent = alone["flops"]["forward_by_site"]
    forward = sum(spent.values())
    # AttnRes takes what it moves, here nothing; backwards of the cores take longer than their FLOPs say.
    kda, mla = spent["kda_core"], spent["mla_core"] + layer_flops(SMALL, 8, 256)["mla_core"]
    worked = 3 * (forward - spent["attn_res"]) + 0.6 * kda + 0.5 * mla
    assert alone["step_seconds"] == pytest.approx(4 * 256 * worked / 0.4e11)
    assert sum(alone["step_seconds_by_part"].values()) == pytest.approx(alone["step_seconds"])
    assert alone["mfu"] == pytest.approx(0.4 * 3 * forward / worked)
    # Heads and MTP's fusion [2d -> d] lie outside the recomputed layers.
    again = forward - spent["attn_res"] - 2 * spent["head"] - 4 * 256**2
    recomputed = plan(of_products_alone(holding(make_config(), layer="recompute", mtp__layer="recompute")), 1)
    assert recomputed["mfu"] == pytest.approx(0.4 * 3 * forward / (worked + again), rel=1e-3)
    assert plan(of_products_alone(make_config(pipeline=2)), 2)["mfu"] < 0.4 / (1 + 1 / 4)


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
    assert largest / 2**30 == pytest.approx(106.5, abs=0.1)
    # The process, its libraries and the allocator's unused blocks come on top.
    assert largest < 0.85 * config.cluster.memory_gib * 2**30
    assert planned["pipeline"]["bubble_over_compute"] == pytest.approx(0.053, abs=0.001)
    assert planned["mfu"] == pytest.approx(0.192, abs=0.001)


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


def test_the_tower_is_counted_beside_the_published_sizes() -> None:
    config = with_images()
    found, without = plan(config, 1)["parameters"], plan(make_config(), 1)["parameters"]
    assert (found["total"], found["active"]) == (without["total"], without["active"])
    counts = vision_shapes.count_by_kind(config.vision, 256)
    assert found["by_kind"]["vision_tower"] == counts["vision"]
    assert found["by_kind"]["projector"] == counts["projector"]
    assert (found["vision"], without["vision"]) == (sum(counts.values()), 0)


def test_every_rank_holds_the_tower_and_data_ranks_share_its_states() -> None:
    numel = sum(vision_shapes.count_by_kind(TOWER, 256).values())
    held = planned_with(with_images(pipeline=2, virtual=2), 2)["memory_bytes"]
    assert [rank["vision_states"] for rank in held] == [16 * numel, 16 * numel]
    [shared, *_] = planned_with(with_images(pipeline=2, virtual=2, data=2), 4)["memory_bytes"]
    assert shared["vision_states"] == pytest.approx((8 + 4) * numel, rel=1e-3)
    plain = plan(make_config(pipeline=2, virtual=2), 2)["memory_bytes"]
    assert [{kind: rank[kind] for kind in plain[0]} for rank in held] == plain


def test_tower_activations_are_held_from_forward_to_backward() -> None:
    config = with_images("inline", pipeline=2)
    item = memory.vision_kept(config, [(1, 8, 8)] * 2) // 2
    first, last = planned_with(config, 2)["memory_bytes"]
    # On the first stage beside its two micro-batches in flight, a gradient of features with them.
    assert first["vision_activations"] == 2 * 2 * item
    assert first["vision_features"] == (2 + 1) * 2 * 16 * 256 * 4
    assert last["vision_activations"] == last["vision_features"] == 0
    again_config = holding(config, vit__layer="recompute")
    again, _ = planned_with(again_config, 2)["memory_bytes"]
    block = memory.vision_again(config, []) + memory.vision_again(again_config, [(1, 8, 8)] * 2)
    kept = memory.vision_kept(again_config, [(1, 8, 8)] * 2)
    tensors = activation_bytes.tower_block(config.vision, "fp32", "cpu")
    assert block == 2 * 64 * sum(held_bytes(tensors).values())
    assert 2 * item - kept == config.vision.depth * (block - 2 * 64 * config.vision.hidden_size * 4)
    # The inputs of blocks for both micro-batches, and one block that runs again.
    assert again["vision_activations"] == 2 * kept + block
    phase, other = planned_with(with_images("phase", pipeline=2), 2)["memory_bytes"]
    assert phase["vision_activations"] == other["vision_activations"] == 4 * item


def test_features_travel_to_the_first_stage_and_gradients_are_summed_over_stages() -> None:
    config = with_images(pipeline=2)
    simulated = simulation(config, layout_of(config, 2), load=ImageLoad(2, (1, 8, 8), stated=True))
    sent = plan(config, 2, simulated)["traffic_bytes"]
    away = [
        len(simulated.vision.bundles[microbatch][part])
        for (microbatch, part), rank in simulated.timeline.table.tower_rank.items()
        if rank
    ]
    assert sum(away) > 0
    assert sent["vision_embeddings"] == sent["vision_embedding_gradients"] == sum(away) * 16 * 256 * 4
    numel = sum(vision_shapes.count_by_kind(TOWER, 256).values())
    assert sent["vision_gradient_all_reduce"] == 2 * 1 / 2 * 4 * numel
    assert "vision_embeddings" not in plan(make_config(pipeline=2), 2)["traffic_bytes"]
    sharded = planned_with(with_images(data=4), 4)["traffic_bytes"]
    without = plan(make_config(data=4), 4)["traffic_bytes"]
    assert sharded["gradient_reduce_scatter"] - without["gradient_reduce_scatter"] == 3 * numel
    assert sharded["vision_gradient_all_reduce"] == 0


def test_bubbles_inline_and_phase_stand_side_by_side() -> None:
    config = with_images(pipeline=2, virtual=2)
    found = planned_with(config, 2)["pipeline"]
    spans, hidden = found["makespan_by_mode"], found["hidden_fraction"]
    assert (found["mode"], found["schedule"]) == ("bubbles", "interleaved")
    assert set(spans) == {"bubbles", "inline", "phase", "none"}
    assert spans["none"] < spans["bubbles"] == found["makespan"] <= min(spans["inline"], spans["phase"])
    alone = plan(make_config(pipeline=2, virtual=2), 2)["pipeline"]
    assert spans["none"] == alone["makespan"]
    work = 4 * vision_shapes.train_flops(config.vision, 256, [(1, 8, 8)] * 2) / 0.4e11
    assert found["vision_seconds"] == pytest.approx(work)
    assert hidden == pytest.approx(1 - (spans["bubbles"] - spans["none"]) * 2 / work)
    assert spans["phase"] - spans["none"] == pytest.approx(work / 2)
    assert found["images_at_most"] == pytest.approx(2 * sum(alone["idle_seconds"]) / work)
    inline = planned_with(with_images("inline", pipeline=2, virtual=2), 2)["pipeline"]
    assert inline["makespan"] == spans["inline"] and "bubbles" not in inline["makespan_by_mode"]


def test_a_recomputed_forward_takes_time_and_counts_no_flops() -> None:
    config = with_images()
    plain = planned_with(config, 1)
    again = planned_with(holding(config, vit__layer="recompute"), 1)
    assert again["flops"] == plain["flops"]
    assert again["pipeline"]["vision_seconds"] == pytest.approx(4 / 3 * plain["pipeline"]["vision_seconds"])
    assert again["mfu"] < plain["mfu"]


def test_the_images_of_a_plan_are_told() -> None:
    told = planned_with(with_images(), 1)["assumptions"]
    assert "every micro-batch has 2 images of 8x8 patches (128 patches, 32 of its tokens): as stated" in told
    usual = plan(with_images(), 1)
    assert usual["pipeline"]["images"] == {"count": 1, "grid": [1, 10, 10], "stated": False}
    assert any("data.image_share of data.max_patches" in line for line in usual["assumptions"])


def test_equal_chunks_leave_the_tower_to_the_step() -> None:
    config = with_images(pipeline=2, virtual=2)
    equal = plan(config, 2, simulation(config, layout_of(config, 2), equal_chunks=True))
    assert equal["pipeline"]["bubble_over_compute"] == 1 / 8
    assert "mode" not in equal["pipeline"]
    usual = plan(config, 2)
    for name in ("step_seconds", "mfu", "memory_bytes", "traffic_bytes"):
        assert equal[name] == usual[name]


def test_the_tower_is_recomputed_where_memory_is_short() -> None:
    config = with_images("phase", pipeline=2)
    config.data.image_share, config.data.max_patches = 0.9, 1024
    needed = max(sum(rank.values()) for rank in plan(config, 2)["memory_bytes"])
    enough = needed / 0.9 / 2**30
    config.cluster.memory_gib = enough * 1.001
    assert not recomputes_vision(config, 2)
    config.cluster.memory_gib = enough * 0.999
    assert recomputes_vision(config, 2)
    assert not config.offload.resolved, "the caller's own is left as it is"


def test_one_fill_says_whether_there_is_room_and_gives_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_images(pipeline=2, virtual=2, microbatches=8)
    config.data.image_share, config.data.max_patches = 0.9, 1024
    whole = max(plan(config, 2)["memory_bytes"], key=lambda held: sum(held.values()))
    caps: list[float | None] = []

    def counted(*args: Any, cap: float | None, **others: Any) -> Table:
        caps.append(cap)
        return fill(*args, cap=cap, **others)

    monkeypatch.setattr(schedule, "fill", counted)
    for number, share in enumerate((0.75, 0.5), 1):
        bytes_left = sum(whole.values()) - (1 - share) * whole["vision_activations"]
        config.cluster.memory_gib = bytes_left / 0.9 / 2**30
        assert not recomputes_vision(config, 2)
        plan(config, 2)
        assert len(caps) == number
    assert caps[0] is not None and caps[1] is not None and caps[0] > caps[1]


def test_bubbles_are_filled_within_memory() -> None:
    config = with_images(pipeline=2, virtual=2, microbatches=8)
    load = ImageLoad(4, (1, 8, 8), stated=True)
    topology = layout_of(config, 2)

    def held() -> tuple[int, float]:
        simulated = simulation(config, topology, load=load)
        ranks = plan(config, 2, simulated)["memory_bytes"]
        kinds = {op.kind for ops in simulated.timeline.table.ranks for op in ops}
        assert kinds == {FORWARD, BACKWARD, VISION_FORWARD, VISION_BACKWARD}
        return max(sum(rank.values()) for rank in ranks), max(rank["vision_activations"] for rank in ranks)

    whole, most = held()
    config.cluster.memory_gib = (whole - most / 4) / 0.9 / 2**30
    less, fewer = held()
    assert fewer <= 0.75 * most and less <= 0.9 * config.cluster.memory_gib * 2**30
    config.cluster.memory_gib = 0.001
    assert held() == (whole, most), "where nothing fits, the fastest"


def test_k3_with_its_tower_fits() -> None:
    overrides = ["recipe=k3_pretrain", "vision=moonvit_v2", "data.images=[photos]", "run.microbatches=16"]
    config = ready(overrides, inputs=False)
    assert recomputes(config, "vit.layer")
    planned = plan(config, world_size(config))
    assert round(planned["parameters"]["total"] / 1e9, 2) == 2779.48
    assert round(planned["parameters"]["by_kind"]["vision_tower"] / 1e6, 1) == 401.2
    assert round(planned["parameters"]["by_kind"]["projector"] / 1e6, 1) == 46.1
    assert planned["pipeline"]["images"] == {"count": 8, "grid": [1, 32, 32], "stated": False}
    assert planned["pipeline"]["hidden_fraction"] > 0.78
    largest = max(sum(rank.values()) for rank in planned["memory_bytes"])
    assert largest < 0.9 * config.cluster.memory_gib * 2**30


def test_the_default_load_is_a_share_of_what_a_micro_batch_holds() -> None:
    config = with_images()
    for share, length, sequences, load in (
        (0.25, 256, 1, (1, 8)),  # 64 of 256 patches
        (0.5, 256, 2, (1, 16)),
        (0.5, 16, 1, (2, 4)),  # 16 tokens have 64 patches, half of them
        (0.01, 256, 1, (1, 2)),
    ):
        config.data.image_share, config.data.sequence_length = share, length
        config.data.micro_batch_size = sequences
        assert default_load(config) == ImageLoad(load[0], (1, load[1], load[1]), stated=False)
    config.data.image_share, config.data.sequence_length, config.data.max_patches = 0.5, 8192, 16384
    assert default_load(config) == ImageLoad(8, (1, 32, 32), stated=False)


def test_planning_imports_no_torch() -> None:
    program = "import k3train.plan, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
