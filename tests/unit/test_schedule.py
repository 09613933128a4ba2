from dataclasses import replace

import pytest

from k3train.config import (
    ClusterConfig,
    Config,
    DataConfig,
    ExpertConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from k3train.errors import UserError
from k3train.expert_plan import layer_traffic
from k3train.flops import forward_flops_per_token, layer_flops
from k3train.image_load import ImageLoad
from k3train.schedule import (
    attn_res_rows,
    layer_cuts,
    pipeline_table,
    row_plan,
    simulation,
    stage_costs,
    vision_table,
)
from k3train.stage_time import stage_work
from k3train.traffic import moe_layers
from k3train.vision_config import VisionConfig
from k3train.vision_shapes import image_cost
from parallel.pipeline.rows import cached_rows, naive_rows, published_rows
from parallel.pipeline.simulate import Costs, simulate, uniform
from parallel.pipeline.table import VISION_BACKWARD, VISION_FORWARD
from parallel.topology import Topology

EFFICIENCY = 0.4
"""Of every class of operators, where nothing is known of the machine."""
CORES = ("kda_core", "mla_core")
MODEL = ModelConfig(vocab_size=4096, num_layers=24, attn_res_block_size=4)


def make(pipeline=2, virtual=2, microbatches=4, model=MODEL, **parallel) -> tuple[Config, Topology]:
    config = Config(
        run=RunConfig(microbatches=microbatches),
        model=model,
        data=DataConfig(sequence_length=256),
        parallel=ParallelConfig(pipeline=pipeline, virtual=virtual, **parallel),
        # Memory so fast that FLOPs alone take time.
        cluster=ClusterConfig(nodes=1, memory_gbps=1e12),
    )
    return config, Topology(pipeline=pipeline, virtual=virtual)


def test_the_schedule_follows_the_number_of_chunks() -> None:
    assert pipeline_table(*make(virtual=1)).name == "1f1b"
    table = pipeline_table(*make())
    assert (table.name, table.layout.stages, table.layout.microbatches) == ("interleaved", 4, 4)
    assert pipeline_table(*make(pipeline=1, virtual=1)).layout.stages == 1
    assert pipeline_table(*make(), "zbv").layout.vee


@pytest.mark.parametrize(
    ("virtual", "schedule", "told"),
    [(1, "zb2p", "choose one of gpipe, 1f1b"), (2, "zb1p", "virtual is 2"), (1, "zbv", "virtual is 1")],
)
def test_a_schedule_that_does_not_fit_is_refused(virtual, schedule, told) -> None:
    with pytest.raises(UserError, match=f"schedule={schedule}: .*{told}"):
        pipeline_table(*make(virtual=virtual), schedule)


def test_rows_are_made_where_their_blocks_begin() -> None:
    config, topology = make(layers_per_chunk=[5, 3, 9, 7])
    cuts = layer_cuts(config, topology)
    rows = row_plan(config, topology, cuts)
    # Layers 0 and 4 lie in stage 0, 8, 12 and 16 in stage 2, 20 in stage 3.
    assert rows.made == (0, 0, 2, 2, 2, 3)
    assert rows.layout == pipeline_table(config, topology).layout
    assert [rows.width(stage) for stage in range(4)] == [1, 3, 1, 4]


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3)])
def test_a_row_a_stage_gives_the_closed_formulas(pipeline, virtual) -> None:
    stages = pipeline * virtual
    model = replace(MODEL, num_layers=2 * stages, attn_res_block_size=2)
    config, topology = make(pipeline, virtual, 12, model)
    sent = attn_res_rows(row_plan(config, topology, layer_cuts(config, topology)))
    formulas = {
        "cached": cached_rows(pipeline, virtual),
        "published": published_rows(pipeline, virtual),
        "naive": naive_rows(stages),
    }
    assert sent == {"real_cuts": formulas, "row_a_stage": formulas}


def test_costs_are_the_time_of_the_flops() -> None:
    config, topology = make(pipeline=1, virtual=1)
    costs = stage_costs(config, topology, [range(24)])
    second = EFFICIENCY * config.cluster.peak_tflops * 1e12
    spent = forward_flops_per_token(MODEL, 256)
    # The mixtures of AttnRes take what they move.
    spent["attn_res"] = 0.0
    kda, mla = (sum(layer_flops(MODEL, layer, 256).get(core, 0.0) for layer in range(24)) for core in CORES)
    mtp_core = layer_flops(MODEL, 23, 256)["mla_core"]
    assert costs.forward[0] == pytest.approx(256 * sum(spent.values()) / second)
    backward = 2 * sum(spent.values()) + 0.6 * kda + 0.5 * (mla + mtp_core)
    assert costs.backward[0] == pytest.approx(256 * backward / second)
    assert costs.hop == 0
    cut = stage_costs(*make(), [range(6), range(6, 12), range(12, 18), range(18, 24)])
    assert sum(cut.forward) == pytest.approx(costs.forward[0])
    # The widest message has rows 0 and 1 (into stage 1) and the running sum.
    assert cut.hop == pytest.approx(3 * 256 * 256 * 4 / (config.cluster.link_gbps * 1e9))


@pytest.mark.parametrize("storage", ["keep", "recompute"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "moonep"])
def test_every_byte_of_the_expert_exchanges_takes_its_time(dispatcher: str, storage: str) -> None:
    config, _ = make(1, 1, expert=ExpertConfig(size=4, dispatcher=dispatcher), data=4)
    config.cluster = replace(config.cluster, ranks_per_node=4, gpus_per_node=4)
    config.offload.sites = {"layer": storage}
    alone, spread = (stage_costs(config, Topology(expert=size, data=4), [range(24)]) for size in (1, 4))
    sent = sum(layer_traffic(config, Topology(expert=4, data=4), 256).values())
    seconds = moe_layers(MODEL, range(24)) * sent / (config.cluster.link_gbps * 1e9)
    added = spread.forward[0] + spread.backward[0] - alone.forward[0] - alone.backward[0]
    assert added == pytest.approx(seconds)
    again = storage == "recompute"
    if dispatcher == "alltoall":
        assert spread.backward[0] - alone.backward[0] == pytest.approx(seconds * (1 + again) / (2 + again))


def test_the_weights_part_leaves_the_cores_of_attention_out() -> None:
    config, topology = make()
    works = stage_work(config, topology, layer_cuts(config, topology), layered=False)
    second = EFFICIENCY * config.cluster.peak_tflops * 1e12
    spent = [layer_flops(MODEL, layer, 256) for layer in range(6)]
    products = sum(
        time for sites in spent for site, time in sites.items() if site not in (*CORES, "attn_res")
    )
    assert works[0].weight == pytest.approx(256 * products / second)
    assert all(0 < work.weight < work.seconds[1] for work in works)


def test_measured_whole_backwards_are_split_as_planned_ones() -> None:
    config, topology = make(virtual=1)
    measured = Costs(forward=[1.0, 1.0], backward=[2.0, 4.0])
    made = simulation(config, topology, schedule="zb1p", measured=measured)
    assert made.unit == "s"
    ops = made.timeline.table.ranks[1]
    times = dict(zip(ops, zip(made.timeline.starts[1], made.timeline.ends[1], strict=True), strict=True))
    spans = {kind: {round(e - s, 9) for op, (s, e) in times.items() if op.kind == kind} for kind in "FBW"}
    assert spans["F"] == {1.0}
    [ahead], [weight] = spans["B"], spans["W"]
    assert ahead + weight == pytest.approx(4.0)
    work = stage_work(config, topology, layer_cuts(config, topology), layered=False)[1]
    assert weight / 4 == pytest.approx(work.weight / work.seconds[1])


def test_measured_parts_are_taken_as_they_are() -> None:
    config, topology = make(virtual=1)
    measured = uniform(pipeline_table(config, topology).layout, 1, 5, 2)
    made = simulation(config, topology, schedule="zb1p", measured=measured)
    kinds = [op.kind for op in made.timeline.table.ranks[0]]
    first = kinds.index("W")
    assert made.timeline.ends[0][first] - made.timeline.starts[0][first] == 2


def with_tower(**changes) -> tuple[Config, Topology]:
    config, topology = make(virtual=1)
    config.vision = VisionConfig(enabled=True, depth=2, hidden_size=64, num_heads=2, head_dim=32, **changes)
    return config, topology


@pytest.mark.parametrize("mode", ["bubbles", "inline", "phase"])
def test_every_part_costs_the_flops_of_its_items(mode) -> None:
    config, topology = with_tower(mode=mode)
    grids = [[(1, 4, 4), (1, 8, 8), (1, 2, 6)], [], [(1, 8, 4)], [(2, 4, 4)] * 2]
    table = pipeline_table(config, topology)
    costs = stage_costs(config, topology, layer_cuts(config, topology))
    placed, spent, bundles = vision_table(config, table, costs, grids, topology)
    assert placed.parts == tuple(map(len, bundles)) and placed.parts[1] == 0
    assert [sorted(item for part in parts for item in part) for parts in bundles] == [
        [0, 1, 2],
        [],
        [0],
        [0, 1],
    ]
    assert max(placed.parts) == (1 if mode == "inline" else 2)
    second = 1 / (EFFICIENCY * config.cluster.peak_tflops * 1e12)
    for row, parts, forward, backward in zip(
        grids, bundles, spent.vision_forward, spent.vision_backward, strict=True
    ):
        flops = [sum(image_cost(config.vision, 256, row[item]) for item in part) for part in parts]
        assert forward == pytest.approx([second * work for work in flops])
        assert backward == pytest.approx([2 * second * work for work in flops])
    kinds = [op.kind for ops in placed.ranks for op in ops]
    assert kinds.count(VISION_FORWARD) == kinds.count(VISION_BACKWARD) == sum(placed.parts)


def test_a_recomputing_tower_runs_forward_again() -> None:
    config, topology = with_tower()
    config.offload.sites = {"vit.layer": "recompute"}
    grids = [[(1, 4, 4)]] * 4
    table, costs = pipeline_table(config, topology), stage_costs(*make(virtual=1), [range(12), range(12, 24)])
    _, spent, _ = vision_table(config, table, costs, grids, topology)
    assert spent.vision_backward[0] == pytest.approx([3 * cost for cost in spent.vision_forward[0]])


def test_measured_seconds_are_those_of_the_mean_micro_batch() -> None:
    config, topology = with_tower()
    grids = [[(1, 4, 4)] * 2, [], [(1, 4, 4)], [(1, 4, 4)]]
    table, costs = pipeline_table(config, topology), stage_costs(*make(virtual=1), [range(12), range(12, 24)])
    _, spent, _ = vision_table(config, table, costs, grids, topology, measured=(0.5, 2.0))
    assert [sum(row) for row in spent.vision_forward] == pytest.approx([1.0, 0.0, 0.5, 0.5])
    assert [sum(row) for row in spent.vision_backward] == pytest.approx([4.0, 0.0, 2.0, 2.0])


def test_the_plan_keeps_the_table_of_its_own_mode() -> None:
    config, topology = with_tower(mode="phase")
    made = simulation(config, topology, load=ImageLoad(2, (1, 8, 8), stated=True), measured_vision=(1.0, 2.0))
    assert made.schedule == "1f1b" and made.vision is not None
    assert made.vision.seconds == pytest.approx(4 * 3.0)
    assert made.vision.hidden_fraction == pytest.approx(0, abs=1e-9)
    assert (
        made.vision.makespans["phase"]
        == made.timeline.makespan
        == simulate(made.timeline.table, made_costs(config, topology)).makespan
    )


def made_costs(config: Config, topology: Topology) -> Costs:
    costs = stage_costs(config, topology, layer_cuts(config, topology))
    grids = [[(1, 8, 8)] * 2] * 4
    table = pipeline_table(config, topology)
    return vision_table(config, table, costs, grids, topology, measured=(1.0, 2.0))[1]
