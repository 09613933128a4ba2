"""What a configuration will need and how long a step will take, before anything is allocated.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallel.pipeline.check import check
from parallel.pipeline.draw import duration
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.vision_fill import CapError
from parallel.topology import Topology
from parallel.zero2 import SLOTS

from . import (
    activation_view,
    calibration,
    host_plan,
    loss_plan,
    plan_view,
    quant_plan,
    step_time,
    vision_shapes,
)
from .activation_policy import TOWER_LAYER, with_storage
from .config import Config
from .context_plan import mla_bytes
from .expert_plan import assumptions
from .flops import forward_flops_per_token, train_flops_per_token
from .gradient_plan import Gradients, costs_more, equal_chunks
from .image_load import bundled, default_load, load_assumptions
from .layout import layout_of
from .log.stacks import Series
from .memory import gradient_ledgers, memory_for_plan, rank_memory, vision_bytes
from .microbatch import row_bytes
from .optim.groups import groups, total_flops
from .schedule import (
    Simulation,
    VisionPlan,
    attn_res_rows,
    layer_cuts,
    pipeline_table,
    policy_costs,
    row_plan,
    simulation,
    stage_costs,
    step_parts,
    vision_table,
)
from .shapes import active, count_by_kind, total
from .traffic import link_of, rank_traffic

FULLY_CHECKED = 8192
"""Operations up to which the plan also runs the table's messages under every transport, in half a second."""

ASSUMPTIONS = (
    "experts are evenly loaded, and every sequence is one document",
    "expert exchanges and gradient sums do not overlap with computation; pipeline messages do, and ZeRO-2's "
    "sums but for the last",
    "states are exact to padding; activations, as autograd keeps them with fast backends, are an estimate",
    "the process itself, its libraries and the allocator's unused blocks come on top of memory_bytes",
    "traffic is what the busiest rank sends in a training step, with collectives as rings",
    "model FLOPs count the head and MTP, causal attention by half, no recomputation and no optimizer",
)


MOST_COLUMNS = 5
"""Kinds of rank that the memory table shows side by side, the fullest ones."""


def plan(config: Config, world_size: int, simulated: Simulation | None = None) -> dict[str, Any]:
    """Parameters, memory, traffic, bubble and step time of a resolved configuration, ready for JSON.

    `memory_bytes` has one entry for each rank, by kind; `traffic_bytes` is sent by the busiest rank in one
    step; FLOPs are of one token, but for the tower's, which are of a step; lists under `pipeline` have one
    entry for each pipeline rank or stage, and its times are in `pipeline.unit`.

    Args:
        simulated: the pipeline's timeline, where it is not the default one of the configuration.

    Raises:
        LayoutError, UserError: what `validate` would refuse.
        TableError: the schedule is wrong, which no configuration should bring about.
    """
    topology = layout_of(config, world_size)
    model, length = config.model, config.data.sequence_length
    simulated = simulated or simulation(config, topology)
    timed = _in_seconds(config, topology, simulated)
    cuts, table, parts = layer_cuts(config, topology), timed.timeline.table, step_parts(timed)
    rows = row_plan(config, topology, cuts, vee=table.layout.vee)
    buffers = SLOTS if config.parallel.zero == 2 else None
    check(table, rows=rows, buffers=buffers, transport=sum(map(len, table.ranks)) <= FULLY_CHECKED)
    memory = rank_memory(config, topology, cuts, table, rows, parts)
    host = host_plan.host_ledgers(config, topology, cuts, table, rows, parts)
    traffic = rank_traffic(config, topology, cuts, table, rows, parts)
    stage_ranks = world_size // topology.pipeline
    tokens = config.run.microbatches * config.data.micro_batch_size * length * topology.data
    flops = train_flops_per_token(model, length)
    grids = timed.vision.load.grids if timed.vision else ()
    tower = step_time.vision_flops(config, grids) * topology.data
    step = step_time.of_simulation(config, topology, timed)
    return {
        "recipe": config.recipe,
        "world_size": world_size,
        "layout": {
            **vars(topology),
            "zero": config.parallel.zero,
            "layers_per_chunk": [len(cut) for cut in cuts],
        },
        "parameters": _sizes(config),
        "flops": {
            "per_token": flops,
            "forward_by_site": forward_flops_per_token(model, length),
            "vision_per_step": tower,
        },
        "memory_bytes": [memory[rank // stage_ranks] for rank in range(world_size)],
        "memory_limit_bytes": int(config.cluster.memory_gib * 2**30),
        "host_bytes": [host[rank // stage_ranks] for rank in range(world_size)],
        "gradients": _gradients(config, topology, gradient_ledgers(config, topology, cuts, table.layout)),
        "activations": activation_view.describe(
            config, cuts, table, rows, parts, policy_costs(config, topology, cuts, rows)
        ),
        **({"context": _context(config)} if topology.context > 1 else {}),
        "traffic_bytes": {name: int(max(part[name] for part in traffic)) for name in traffic[0]},
        "traffic_links": {name: link_of(config, topology, name) for name in traffic[0]},
        "pipeline": _pipeline(simulated, rows),
        "attn_res_rows": {**attn_res_rows(rows), "row_bytes": row_bytes(config)},
        "tokens_per_step": tokens,
        "step_seconds": step.seconds,
        "step_seconds_by_part": step.parts,
        "exposed": {name: {"seconds": part, "why": why} for name, (part, why) in step.exposed.items()},
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "optimizer": _optimizer(config, flops * tokens),
        "assumptions": [
            *ASSUMPTIONS,
            calibration.assumption(config),
            *assumptions(config, topology),
            *quant_plan.assumptions(config),
            *loss_plan.assumptions(config),
            *_vision_assumptions(config, simulated, timed),
            *filter(None, [host_plan.warning(config, host)]),
        ],
    }


def step_series(config: Config, topology: Topology, simulated: Simulation) -> list[Series]:
    """What each pipeline rank holds of activations behind each operation of a step in seconds."""
    cuts, timeline = layer_cuts(config, topology), simulated.timeline
    rows = row_plan(config, topology, cuts, vee=timeline.table.layout.vee)
    return activation_view.planned_series(config, cuts, rows, timeline, step_parts(simulated))


def _optimizer(config: Config, step_flops: float) -> dict[str, Any]:
    """The rule, and for Per-Head Muon its groups of parameters and the FLOPs of Newton-Schulz in a step."""
    if config.optim.name != "muon_per_head":
        return {"name": config.optim.name, "groups": []}
    found = groups(config)
    return {
        "name": config.optim.name,
        "groups": [asdict(group) for group in found],
        "newton_schulz_flops": total_flops(found),
        "over_model_flops": total_flops(found) / step_flops,
    }


def recomputes_vision(config: Config, world_size: int) -> bool:
    """Whether the fullest rank has no room for the tower's activations unless its layers are run again.

    With the images of `image_load.default_load`. Places the tower only where a rank that held all of its
    activations at once would have no room. Raises what `plan` does.
    """
    kept = with_storage(config, {TOWER_LAYER: "keep"})
    config = replace(config, offload=replace(config.offload, resolved=kept))
    topology, limit = layout_of(config, world_size), memory_for_plan(config)
    cuts, grids = layer_cuts(config, topology), default_load(config).grids
    rows, table = row_plan(config, topology, cuts), pipeline_table(config, topology)
    language = replace(config, vision=replace(config.vision, enabled=False))
    alone = _fullest(rank_memory(language, topology, cuts, table, rows))
    if alone + vision_bytes(config, topology, grids) <= limit:
        return False
    every = [grids] * config.run.microbatches
    costs = stage_costs(config, topology, cuts, rows)
    try:
        table, _, bundles = vision_table(config, table, costs, every, topology, strict=True)
    except CapError:
        return True
    return _fullest(rank_memory(config, topology, cuts, table, rows, bundled(grids, bundles))) > limit


def _fullest(memory: list[dict[str, int]]) -> int:
    return max(sum(held.values()) for held in memory)


def _in_seconds(config: Config, topology: Topology, simulated: Simulation) -> Simulation:
    """The simulation, or where its chunks were taken as equal the same schedule with times, and the tower."""
    if simulated.unit == "s":
        return simulated
    return simulation(config, topology, schedule=simulated.schedule)


def _sizes(config: Config) -> dict[str, Any]:
    """Parameters; `total` and `active` are the language model's, as published."""
    model, vision = config.model, config.vision
    kinds = count_by_kind(model)
    tower = vision_shapes.count_by_kind(vision, model.hidden_size) if vision.enabled else {}
    if tower:
        kinds |= {"vision_tower": tower["vision"], "projector": tower["projector"]}
    return {
        "total": total(model),
        "active": active(model),
        "vision": sum(tower.values()),
        "by_kind": kinds,
    }


def _gradients(config: Config, topology: Topology, ranks: list[Gradients]) -> dict[str, Any]:
    """ZeRO-2's device memory for gradients against ZeRO-1's, on the rank with the most; the tower's apart."""
    fullest = max(ranks, key=lambda rank: rank.whole)
    return {
        "zero1_bytes": fullest.whole,
        "zero2_bytes": fullest.on_device("device"),
        "zero2_host_bytes": fullest.on_device("host"),
        "relative": fullest.relative,
        "relative_of_equal_chunks": equal_chunks(topology),
        "warning": costs_more(config, ranks),
    }


def _vision_assumptions(config: Config, simulated: Simulation, timed: Simulation) -> list[str]:
    if timed.vision is None:
        return []
    lines = load_assumptions(config, timed.vision.load, measured=timed.vision.measured)
    if simulated.vision is None:
        lines.append("the pipeline of equal chunks is the language model's alone; the step has the tower too")
    return lines


def _context(config: Config) -> dict[str, Any]:
    """How even MLA is over a context group, and the bytes of a layer beyond a rank's share, for one row."""
    found = mla_bytes(config.model, config.data.sequence_length, config.parallel.context)
    return asdict(found)


def _pipeline(simulated: Simulation, rows: RowPlan) -> dict[str, Any]:
    """Idle time and activations held, by pipeline rank, and what travels, by stage."""
    timeline, layout = simulated.timeline, rows.layout
    ranks, stages = range(layout.pipeline), range(1, layout.stages)
    idle = [float(timeline.idle(rank)) for rank in ranks]
    span = float(timeline.makespan)
    return {
        "schedule": simulated.schedule,
        "unit": simulated.unit,
        "bubble_over_compute": float(timeline.bubble_over_compute),
        "bubble_of_equal_stages": (layout.pipeline - 1) / (layout.virtual * layout.microbatches),
        "makespan": span,
        "idle_seconds": idle,
        "idle_share": [part / span for part in idle],
        "idle_within_own_span": [float(timeline.span_idle(rank)) for rank in ranks],
        "peak_microbatches": [int(timeline.peak_held(rank, [1] * layout.stages)) for rank in ranks],
        "payload_rows": max((rows.known(stage) + 1 for stage in stages), default=1),
        "message_rows": [rows.width(stage) for stage in stages],
        **(_vision(simulated.vision) if simulated.vision else {}),
    }


def _vision(vision: VisionPlan) -> dict[str, Any]:
    return {
        "mode": vision.mode,
        "images": {"count": vision.load.count, "grid": list(vision.load.grid), "stated": vision.load.stated},
        "images_at_most": vision.room,
        "vision_seconds": vision.seconds,
        "hidden_fraction": vision.hidden_fraction,
        "makespan_by_mode": vision.makespans,
    }


def render(planned: dict[str, Any]) -> RenderableType:
    """A plan for the terminal: the model, the pipeline, memory of each kind of rank, traffic and time."""
    notes = "\n".join(f"- {line}" for line in planned["assumptions"])
    summary = Table(title=f"Plan of {planned['recipe']}", show_header=False, title_justify="left")
    for name, line in facts(planned).items():
        summary.add_row(name, line)
    parts: list[RenderableType] = [summary, plan_view.time_table(planned)]
    if planned["layout"]["pipeline"] > 1:
        parts += [_pipeline_table(planned["pipeline"]), _rows_table(planned["attn_res_rows"])]
    parts += [_memory_table(planned), *activation_view.render(planned["activations"])]
    parts.append(plan_view.traffic_table(planned))
    if planned["optimizer"]["groups"]:
        parts.append(_groups_table(planned["optimizer"]))
    return Group(*parts, Text(notes, style="dim"))


def facts(planned: dict[str, Any]) -> dict[str, str]:
    """The plan in a few lines, by name."""
    layout, pipeline = planned["layout"], planned["pipeline"]
    sizes = planned["parameters"]
    sides = ("pipeline", "virtual", "expert", "context", "data")
    axes = ", ".join(f"{name} {layout[name]}" for name in sides)
    tower = f"; {_count(sizes['vision'])} of vision tower and projector" if sizes["vision"] else ""
    return {
        "parameters": f"{_count(sizes['total'])} total, {_count(sizes['active'])} active, without MTP{tower}",
        "layout": f"{planned['world_size']} ranks: {axes}, ZeRO-{layout['zero']}",
        "step": f"{planned['step_seconds']:.3g} s ({plan_view.largest(planned)}), "
        f"{planned['tokens_per_step']:,} tokens",
        "speed": f"{planned['tokens_per_second']:,.0f} tokens/s, MFU {planned['mfu']:.1%}",
        "FLOPs": f"{_count(planned['flops']['per_token'])} for each token, forward and backward",
        "bubble": f"{pipeline['bubble_over_compute']:.1%} of compute, {pipeline['schedule']}"
        f" ((p - 1) / (v m) is {pipeline['bubble_of_equal_stages']:.1%})",
        **(_context_facts(planned["context"]) if "context" in planned else {}),
        **activation_view.facts(planned["activations"]),
        **(_zero2_facts(planned["gradients"]) if layout["zero"] else {}),
        **(_vision_facts(pipeline) if "mode" in pipeline else {}),
    }


def _context_facts(context: dict[str, Any]) -> dict[str, str]:
    gib = {name: context[name] / 2**30 for name in ("forward", "backward", "kept")}
    return {
        "context": f"attention of the slowest rank over the mean {context['max_over_mean']:.3f}"
        f" ({context['contiguous']:.2f} if each attended to its own queries); an MLA layer takes up to"
        f" {gib['forward']:.3g} GiB in forward and {gib['backward']:.3g} in backward where mla.key is run"
        f" again, else {gib['kept']:.3g} from one to the other"
    }


def _zero2_facts(gradients: dict[str, Any]) -> dict[str, str]:
    """Whether sharded gradients pay, and a warning where they are used and do not."""
    real, equal = gradients["relative"], gradients["relative_of_equal_chunks"]
    line = (
        f"gradients take {real['device']:.2f} of ZeRO-1's memory (1/DP + 2/V is {equal['device']:.2f}), "
        f"{real['host']:.2f} with shards on the host (2/V is {equal['host']:.2f})"
    )
    warning = gradients["warning"]
    return {"ZeRO-2": line, **({"warning": warning} if warning else {})}


MODES = {
    "bubbles": "in bubbles",
    "inline": "on the first stage",
    "phase": "in a phase of its own",
    "none": "without images",
}


def _vision_facts(pipeline: dict[str, Any]) -> dict[str, str]:
    """How much of the tower is hidden, and the pipeline's time under each way to place it."""
    unit, images = pipeline["unit"], pipeline["images"]
    spans = ", ".join(
        f"{duration(span, unit)} {MODES[mode]}" for mode, span in pipeline["makespan_by_mode"].items()
    )
    _, rows, columns = images["grid"]
    return {
        "vision": f"{images['count']} x {rows}x{columns} patches a micro-batch: "
        f"{duration(pipeline['vision_seconds'], unit)} of work, {pipeline['hidden_fraction']:.1%} hidden; "
        f"the bubble has room for {pipeline['images_at_most']:.1f} of them",
        "tower placed": spans,
    }


def _pipeline_table(pipeline: dict[str, Any]) -> Table:
    """Idle time of each pipeline rank and what it holds; neighbours that agree share a row."""
    span = duration(pipeline["makespan"], pipeline["unit"])
    tower = f" with the vision tower {MODES[pipeline['mode']]}" if "mode" in pipeline else ""
    table = Table(title=f"Pipeline, {pipeline['schedule']}{tower}, {span}", title_justify="left")
    for name in ("pipeline ranks", "idle", "share", "chunk activations at most"):
        table.add_column(name, justify="left" if name == "pipeline ranks" else "right")
    lines = [
        (duration(idle, pipeline["unit"]), f"{share:.1%}", str(held))
        for idle, share, held in zip(
            pipeline["idle_seconds"], pipeline["idle_share"], pipeline["peak_microbatches"], strict=True
        )
    ]
    for line, members in groupby(enumerate(lines), key=lambda pair: pair[1]):
        table.add_row(_span([rank for rank, _ in members]), *line)
    return table


def _rows_table(sent: dict[str, Any]) -> Table:
    """Rows that cross ranks under each way to send them, on the real cuts and if each stage made a row."""
    caption = "cached: what is new to a rank; published: and what it made itself; naive: all at every cut"
    table = Table(title="AttnRes rows sent forward for a micro-batch", title_justify="left", caption=caption)
    for name in ("way", "rows", "MB", "one row a stage", "MB"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way in sent["real_cuts"]:
        counts = sent["real_cuts"][way], sent["row_a_stage"][way]
        cells = [cell for rows in counts for cell in (f"{rows}", f"{rows * sent['row_bytes'] / 1e6:,.2f}")]
        table.add_row(way, *cells)
    return table


def _memory_table(planned: dict[str, Any]) -> Table:
    """One column for neighbouring ranks that hold equally much; red where it exceeds the rank's memory."""
    limit, ranks_held = planned["memory_limit_bytes"], planned["memory_bytes"]
    kinds = [kind for kind in ranks_held[0] if any(part[kind] for part in ranks_held)]
    small = max(sum(part.values()) for part in ranks_held) < 2**30
    unit, name = (2**20, "MiB") if small else (2**30, "GiB")
    groups = [
        (_span([rank for rank, _ in members]), held)
        for held, members in groupby(enumerate(ranks_held), key=lambda pair: pair[1])
    ]
    fullest = sorted(groups, key=lambda group: -sum(group[1].values()))[:MOST_COLUMNS]
    shown = [group for group in groups if group in fullest]
    left_out = f", the {MOST_COLUMNS} fullest of {len(groups)} kinds" if len(shown) < len(groups) else ""
    title = f"{name} on a rank, of {limit / unit:,.1f}{left_out}"
    table = Table(title=title, title_justify="left")
    table.add_column("ranks", no_wrap=True)
    for label, held in shown:
        table.add_column(label, justify="right", style="red" if sum(held.values()) > limit else None)
    for kind in kinds:
        table.add_row(kind.replace("_", " "), *(f"{held[kind] / unit:.2f}" for _, held in shown))
    table.add_section()
    table.add_row("sum", *(f"{sum(held.values()) / unit:.2f}" for _, held in shown))
    return table


def _groups_table(optimizer: dict[str, Any]) -> Table:
    """What updates which parameters, and the blocks that Newton-Schulz runs on."""
    flops, share = optimizer["newton_schulz_flops"], optimizer["over_model_flops"]
    caption = f"Newton-Schulz: {flops:.3g} FLOPs in a step of all ranks, {share:.2%} of the model's"
    table = Table(title="Groups of the optimizer", title_justify="left", caption=caption)
    for name in ("parameters", "Muon's cut", "block", "blocks", "elements"):
        table.add_column(name, justify="left" if name in ("parameters", "Muon's cut") else "right")
    for group in optimizer["groups"]:
        shapes = ["x".join(map(str, shape)) for shape in group["shapes"]]
        cut = group["split"] if group["rule"] == "muon" else "AdamW"
        sizes = (f"{group['blocks']:,}", _count(group["numel"]))
        table.add_row(group["name"].replace("linear_", ""), cut, "\n".join(shapes), *sizes)
    return table


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _count(value: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:,.2f}{name}"
    return f"{value:.0f}"
