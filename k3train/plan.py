"""What a configuration will need and how long a step will take, before anything is allocated.

Imports no torch.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallel.pipeline.simulate import makespan
from parallel.topology import Topology, split_layers

from .config import Config
from .flops import (
    BACKWARD_OVER_FORWARD,
    forward_flops_per_token,
    layer_flops,
    output_flops,
    train_flops_per_token,
)
from .memory import rank_memory, tokens_per_microbatch
from .shapes import active, count_by_kind, payload_rows, total
from .traffic import exchange_seconds, hop_seconds, moe_layers, rank_traffic, ring_bandwidth

EFFICIENCY = 0.4
"""Share of a rank's peak that computation is to reach; public MoE runs on H100 end at 0.16 to 0.40."""

TERA = 1e12

ASSUMPTIONS = (
    "experts are evenly loaded, and every sequence is one document",
    f"computation reaches {EFFICIENCY:.0%} of cluster.peak_tflops; the optimizer's own time is left out",
    "expert exchanges and gradient sums do not overlap with computation; pipeline messages do",
    "states are exact to padding; activations, as autograd keeps them with fast backends, are an estimate",
    "the process itself, its libraries and the allocator's unused blocks come on top of memory_bytes",
    "traffic is what the busiest rank sends in a training step, with collectives as rings",
    "model FLOPs count the head and MTP, causal attention by half, no recomputation and no optimizer",
)


def plan(config: Config, world_size: int) -> dict[str, Any]:
    """Parameters, memory, traffic, bubble and step time of a resolved configuration, ready for JSON.

    `memory_bytes` has one entry for each rank, by kind; `traffic_bytes` is sent by the busiest rank in one
    step; FLOPs are of one token. Raises LayoutError or UserError for what `validate` would refuse.
    """
    topology = _topology(config, world_size)
    model, parallel, run = config.model, config.parallel, config.run
    cuts = split_layers(model.num_layers, topology.num_chunks, parallel.layers_per_chunk)
    rows = payload_rows(model, cuts)
    memory = rank_memory(config, topology, cuts, rows)
    traffic = rank_traffic(config, topology, cuts, rows)
    stage_ranks = world_size // topology.pipeline
    tokens = run.microbatches * config.data.micro_batch_size * config.data.sequence_length * topology.data
    flops = train_flops_per_token(model, config.data.sequence_length)
    seconds = _step_seconds(config, topology, cuts, rows, traffic)
    step = sum(seconds.values())
    return {
        "recipe": config.recipe,
        "world_size": world_size,
        "layout": {**vars(topology), "zero": parallel.zero, "layers_per_chunk": [len(cut) for cut in cuts]},
        "parameters": {"total": total(model), "active": active(model), "by_kind": count_by_kind(model)},
        "flops": {
            "per_token": flops,
            "forward_by_site": forward_flops_per_token(model, config.data.sequence_length),
        },
        "memory_bytes": [memory[rank // stage_ranks] for rank in range(world_size)],
        "memory_limit_bytes": int(config.cluster.memory_gib * 2**30),
        "traffic_bytes": {name: int(max(part[name] for part in traffic)) for name in traffic[0]},
        "pipeline": {
            "bubble_over_compute": _bubble(config, topology, cuts),
            "bubble_of_equal_stages": (topology.pipeline - 1) / (topology.virtual * run.microbatches),
            "payload_rows": rows,
        },
        "tokens_per_step": tokens,
        "step_seconds": step,
        "step_seconds_by_part": seconds,
        "tokens_per_second": tokens / step,
        "mfu": flops * tokens / (step * world_size * config.cluster.peak_tflops * TERA),
        "assumptions": list(ASSUMPTIONS),
    }


def _topology(config: Config, world_size: int) -> Topology:
    parallel = config.parallel
    return Topology(
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        expert=parallel.expert,
        context=parallel.context,
        data=parallel.data or world_size // (parallel.pipeline * parallel.context),
    )


def _stage_flops(config: Config, cuts: list[range]) -> tuple[list[float], list[float]]:
    """FLOPs of each stage's forward and of its backward, recomputation in it, for one token."""
    model, length = config.model, config.data.sequence_length
    layers = [sum(sum(layer_flops(model, layer, length).values()) for layer in cut) for cut in cuts]
    output = output_flops(model, length)
    forward = list(layers)
    forward[-1] += sum(output.values())
    repeated = list(layers)
    if model.mtp_layers:
        # Its fusion and its head are not recomputed.
        repeated[-1] += output["mtp"] - output["head"] - 4 * model.hidden_size**2
    again = model.recompute == "layer"
    return forward, [
        BACKWARD_OVER_FORWARD * ahead + again * repeat
        for ahead, repeat in zip(forward, repeated, strict=True)
    ]


def _bubble(config: Config, topology: Topology, cuts: list[range]) -> float:
    """Idle time of all ranks over their work, counted in FLOPs: (p - 1) / (v m) where stages are equal."""
    forward, backward = _stage_flops(config, cuts)
    span = makespan(forward, backward, topology.pipeline, config.run.microbatches)
    work = config.run.microbatches * (sum(forward) + sum(backward))
    return topology.pipeline * span / work - 1


def _step_seconds(
    config: Config, topology: Topology, cuts: list[range], rows: int, traffic: list[dict[str, float]]
) -> dict[str, float]:
    """Seconds of one step: the pipeline with its expert exchanges, then what waits for its end."""
    again = config.model.recompute == "layer"
    token_seconds = tokens_per_microbatch(config) / (config.cluster.peak_tflops * TERA * EFFICIENCY)
    exchange = [2 * moe_layers(config.model, cut) * exchange_seconds(config, topology) for cut in cuts]
    forward, backward = _stage_flops(config, cuts)
    span = makespan(
        [token_seconds * work + travel for work, travel in zip(forward, exchange, strict=True)],
        [
            token_seconds * work + travel * (1 + again)
            for work, travel in zip(backward, exchange, strict=True)
        ],
        topology.pipeline,
        config.run.microbatches,
        hop_seconds(config, topology, rows),
    )
    ranks = topology.data * topology.context
    dense = ring_bandwidth(config, ranks, 1)
    expert = ring_bandwidth(config, topology.expert_data, topology.expert)
    slowest = min(dense, expert) if config.model.num_experts else dense
    names = ("gradient_reduce_scatter", "parameter_all_gather", "gradient_all_reduce")
    return {
        "pipeline": span,
        "gradients": max(sum(part.get(name, 0) for name in names) for part in traffic) / slowest,
        "balance": max(part["balance_histograms"] for part in traffic) / dense,
    }


def render(planned: dict[str, Any]) -> RenderableType:
    """A plan for the terminal: the model, memory of each kind of rank, traffic and time."""
    memory = _memory_table(planned)
    notes = "\n".join(f"- {line}" for line in planned["assumptions"])
    return Group(_summary(planned), memory, _traffic_table(planned), Text(notes, style="dim"))


def _summary(planned: dict[str, Any]) -> Table:
    layout, pipeline = planned["layout"], planned["pipeline"]
    sizes = planned["parameters"]
    sides = ("pipeline", "virtual", "expert", "context", "data")
    axes = ", ".join(f"{name} {layout[name]}" for name in sides)
    spent = planned["step_seconds_by_part"].items()
    parts = ", ".join(f"{name} {part:.3g} s" for name, part in spent if part)
    lines = {
        "parameters": f"{_count(sizes['total'])} total, {_count(sizes['active'])} active, without MTP",
        "layout": f"{planned['world_size']} ranks: {axes}, ZeRO-{layout['zero']}",
        "step": f"{planned['step_seconds']:.3g} s ({parts}), {planned['tokens_per_step']:,} tokens",
        "speed": f"{planned['tokens_per_second']:,.0f} tokens/s, MFU {planned['mfu']:.1%}",
        "FLOPs": f"{_count(planned['flops']['per_token'])} for each token, forward and backward",
        "bubble": f"{pipeline['bubble_over_compute']:.1%} of compute"
        f" ({pipeline['bubble_of_equal_stages']:.1%} with equal stages)",
    }
    table = Table(title=f"Plan of {planned['recipe']}", show_header=False, title_justify="left")
    for name, line in lines.items():
        table.add_row(name, line)
    return table


def _memory_table(planned: dict[str, Any]) -> Table:
    """One row for neighbouring ranks that hold equally much; red where it exceeds the rank's memory."""
    limit, ranks_held = planned["memory_limit_bytes"], planned["memory_bytes"]
    kinds = [kind for kind in ranks_held[0] if any(part[kind] for part in ranks_held)]
    small = max(sum(part.values()) for part in ranks_held) < 2**30
    unit, name = (2**20, "MiB") if small else (2**30, "GiB")
    table = Table(title=f"{name} on a rank, of {limit / unit:,.1f}", title_justify="left")
    table.add_column("ranks")
    for kind in [*kinds, "sum"]:
        table.add_column(kind.replace("_", " "), justify="right")
    for held, members in groupby(enumerate(ranks_held), key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in members]
        label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        needed = sum(held.values())
        cells = [f"{size / unit:.2f}" for size in [*(held[kind] for kind in kinds), needed]]
        table.add_row(label, *cells, style="red" if needed > limit else None)
    return table


def _traffic_table(planned: dict[str, Any]) -> Table:
    table = Table(title="Sent by the busiest rank in a step", title_justify="left")
    table.add_column("what", min_width=24)
    table.add_column("MB", justify="right", min_width=8)
    for name, size in planned["traffic_bytes"].items():
        if size:
            table.add_row(name.replace("_", " "), f"{size / 1e6:,.2f}")
    return table


def _count(value: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:,.2f}{name}"
    return f"{value:.0f}"
