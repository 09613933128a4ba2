"""The pipeline of a configuration: its table, the AttnRes rows that travel in it, what its operations cost.

The planner simulates what stands here, the training loop executes it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel.pipeline.build import ScheduleError, build, usual, with_reductions
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.simulate import Costs, Timeline, recalled, simulate, uniform
from parallel.pipeline.table import Layout, Table
from parallel.pipeline.vision_fill import (
    CapError,
    Progress,
    fill,
    hidden_share,
    inline,
    phase,
    plan_parts,
)
from parallel.topology import Topology, split_layers

from .activation_policy import LAYER, TOWER_LAYER, recomputes
from .activation_time import Added, added
from .config import Config
from .errors import UserError
from .flops import BACKWARD_OVER_FORWARD
from .image_load import ImageLoad, bundled, default_load
from .memory import Parts, memory_for_plan, rank_memory, vision_sizes
from .operators import peak
from .stage_time import Work, stage_work
from .traffic import hop_seconds
from .vision_context import assign, key_price
from .vision_shapes import Grid, image_cost

Bundles = list[list[list[int]]]
"""For each micro-batch, for each part of its images: the items of that part."""


@dataclass(frozen=True)
class VisionPlan:
    """The tower's share of a timeline."""

    load: ImageLoad
    """Images of every micro-batch."""
    bundles: Bundles
    mode: str
    seconds: float
    """Of all the tower's operations in a step, over all pipeline ranks."""
    hidden_fraction: float
    makespans: dict[str, float]
    """Of `vision.mode`, of "inline" and "phase" where compared, and of "none": the language model alone."""
    room: float
    """Images of a micro-batch whose work takes as long as the language model idles: no more can be hidden."""
    measured: bool
    """Whether `seconds` are those of a run."""


@dataclass(frozen=True)
class Simulation:
    """A table's timeline; `unit` is "s", or "units" where chunks were taken as equal."""

    timeline: Timeline
    unit: str
    vision: VisionPlan | None = None

    @property
    def schedule(self) -> str:
        """Name of the language model's order, without what vision adds to the table's."""
        return self.timeline.table.name.partition(" + ")[0]


def step_parts(simulated: Simulation) -> Parts:
    """Images of the table's vision operations; () where it has none."""
    vision = simulated.vision
    return bundled(vision.load.grids, vision.bundles) if vision else ()


def layer_cuts(config: Config, topology: Topology) -> list[range]:
    """Layers of each stage in the order of the forward pass. Raises LayoutError."""
    return split_layers(config.model.num_layers, topology.num_chunks, config.parallel.layers_per_chunk)


def pipeline_table(
    config: Config, topology: Topology, schedule: str | None = None, *, microbatches: int | None = None
) -> Table:
    """The order of a training step: 1F1B with one chunk on a rank, interleaved 1F1B with more.

    Args:
        schedule: one of `parallel.pipeline.build.SCHEDULES`, to look at another one.
        microbatches: `run.microbatches`, where left out.

    Raises:
        UserError: the schedule does not exist, or needs another number of chunks.
    """
    name = schedule or usual(topology.virtual)
    group = config.parallel.microbatch_group if name == "interleaved" else None
    count = microbatches or config.run.microbatches
    try:
        return build(name, topology.pipeline, topology.virtual, count, group)
    except ScheduleError as error:
        raise UserError(f"schedule={name}: {error}") from error


def with_bursts(config: Config, table: Table) -> Table:
    """The table with ZeRO-2's gradient sums, on which memory depends; other sums come at the step's end."""
    return with_reductions(table, bursts=True) if config.parallel.zero == 2 else table


def vision_table(
    config: Config,
    table: Table,
    costs: Costs,
    grids: Sequence[Sequence[Grid]],
    topology: Topology,
    *,
    measured: tuple[float, float] | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> tuple[Table, Costs, Bundles]:
    """The table with the vision tower where `vision.mode` puts it.

    In bubbles it holds no more activations at once than `memory.memory_for_plan` leaves, if that can be.

    Args:
        costs: of the language model's stages, seconds.
        grids: (t, h, w) of every item, by micro-batch.
        measured: mean seconds of the tower's forward and backward of a micro-batch in a run, spread over the
            parts by FLOPs; their FLOPs as dense products where left out.
        progress: told how far the filling of bubbles has come.
        strict: refuse a table that holds more, instead of taking the fastest one.

    Returns:
        the table, the costs with those of every part, and which items are in which part.

    Raises:
        CapError: `strict`, and no fill keeps within memory.
    """
    vision, out_size = config.vision, config.model.hidden_size
    work = [[image_cost(vision, out_size, grid) for grid in row] for row in grids]
    bundles = (
        [[list(range(len(row)))] if row else [] for row in work]
        if vision.mode == "inline"
        else plan_parts(work, table.layout.pipeline)
    )
    forward_rate, backward_rate = _vision_rates(config, work, measured)
    flops = [
        [_part_flops(config, [row[item] for item in part]) for part in parts]
        for row, parts in zip(grids, bundles, strict=True)
    ]
    costs = replace(
        costs,
        vision_forward=[[forward_rate * cost for cost in row] for row in flops],
        vision_backward=[[backward_rate * cost for cost in row] for row in flops],
    )
    if vision.mode == "inline":
        return inline(table, [len(row) for row in bundles]), costs, bundles
    if vision.mode == "phase":
        return phase(table, costs), costs, bundles
    sizes, cap = _vision_cap(config, table, grids, bundles, topology)
    try:
        return _filled(table, costs, cap, sizes, progress), costs, bundles
    except CapError:
        if strict:
            raise
        return _filled(table, costs, None, None, progress), costs, bundles


def _part_flops(config: Config, grids: Sequence[Grid]) -> float:
    """Forward FLOPs of a part, of the busiest rank where a context group shares it."""
    vision, out_size, ranks = config.vision, config.model.hidden_size, config.parallel.context
    if ranks > 1 and grids:
        return max(assign(vision, out_size, grids, ranks, key_price(config)).loads)
    return sum(image_cost(vision, out_size, grid) for grid in grids)


class _Latest:
    """The arguments of the last fill, and what it gave: a plan asks if there is room, then for the table."""

    value: tuple[Any, Table] | None = None


def _filled(
    table: Table,
    costs: Costs,
    cap: float | None,
    sizes: Sequence[Sequence[float]] | None,
    progress: Progress | None,
) -> Table:
    """`fill`, unless it was the last one."""
    asked, latest = (table, costs, cap, sizes), _Latest.value
    if latest is None or latest[0] != asked:
        latest = _Latest.value = asked, fill(table, costs, cap=cap, sizes=sizes, progress=progress)
    return latest[1]


def _vision_cap(
    config: Config, table: Table, grids: Sequence[Sequence[Grid]], bundles: Bundles, topology: Topology
) -> tuple[list[list[int]], int | None]:
    """Bytes that each part holds, and what any rank has left for them; None where all of them fit on one."""
    parts = [
        [[row[item] for item in part] for part in each] for row, each in zip(grids, bundles, strict=True)
    ]
    sizes, again = vision_sizes(config, parts)
    cuts = layer_cuts(config, topology)
    rows = row_plan(config, topology, cuts, vee=table.layout.vee)
    ledgers = rank_memory(config, topology, cuts, table, rows, parts)
    room = memory_for_plan(config) - max(sum(held.values()) for held in ledgers) - again
    return sizes, None if sum(map(sum, sizes)) <= room else max(room, 0)


def _vision_rates(
    config: Config, work: Sequence[Sequence[float]], measured: tuple[float, float] | None
) -> tuple[float, float]:
    """Seconds of the tower's forward and of its backward for each forward FLOP."""
    if measured is not None:
        mean = sum(map(sum, work)) / len(work)
        return measured[0] / mean, measured[1] / mean
    second = 1 / peak(config, "dense_gemm")
    return second, second * (BACKWARD_OVER_FORWARD + recomputes(config, TOWER_LAYER))


def row_plan(config: Config, topology: Topology, cuts: list[range], *, vee: bool = False) -> RowPlan:
    """Row j of the AttnRes bank is made where layer j * model.attn_res_block_size is, row 0 the embedding."""
    starts = range(0, config.model.num_layers, config.model.attn_res_block_size)
    made = tuple(next(stage for stage, cut in enumerate(cuts) if layer in cut) for layer in starts)
    layout = Layout(topology.pipeline, topology.virtual, config.run.microbatches, vee)
    return RowPlan(layout, made)


def stage_costs(config: Config, topology: Topology, cuts: list[range], rows: RowPlan | None = None) -> Costs:
    """Seconds that each stage takes for a micro-batch: its operators and exchanges, and what a policy adds.

    Every message takes as long as the widest one of `rows`, the configuration's own plan where left out.
    """
    rows = rows or row_plan(config, topology, cuts)
    return costs_of(config, topology, rows, *stage_parts(config, topology, cuts, rows))


def stage_parts(
    config: Config, topology: Topology, cuts: list[range], rows: RowPlan
) -> tuple[list[Work], list[Added]]:
    """What each stage does for a micro-batch, and what the policy of activations adds."""
    works = stage_work(config, topology, cuts, layered=recomputes(config, LAYER))
    forward, backward = map(list, zip(*(work.seconds for work in works), strict=True))
    return works, added(config, cuts, rows, forward, backward)


def costs_of(
    config: Config, topology: Topology, rows: RowPlan, works: Sequence[Work], extra: Sequence[Added]
) -> Costs:
    """The sums of `stage_parts`."""
    pairs = list(zip(works, extra, strict=True))
    return Costs(
        forward=[work.seconds[0] + more.coding + more.waits_out for work, more in pairs],
        backward=[work.seconds[1] + more.recompute + more.coding + more.waits_back for work, more in pairs],
        weight=[work.weight for work in works],
        hop=hop_seconds(config, topology, max(map(rows.width, range(1, len(works))), default=0)),
    )


def policy_costs(config: Config, topology: Topology, cuts: list[range], rows: RowPlan) -> list[Added]:
    """What the policy of activations adds to each stage's operations."""
    return stage_parts(config, topology, cuts, rows)[1]


def simulation(
    config: Config,
    topology: Topology,
    *,
    schedule: str | None = None,
    equal_chunks: bool = False,
    measured: Costs | None = None,
    measured_vision: tuple[float, float] | None = None,
    load: ImageLoad | None = None,
    progress: Progress | None = None,
    compare: bool = True,
) -> Simulation:
    """The timeline of one step, with the vision tower where the configuration has one.

    Args:
        equal_chunks: every chunk's forward takes 1, its backward 2, messages nothing; no tower.
        measured: seconds of each stage's operations in a run of this layout.
        measured_vision: mean seconds of the tower's forward and backward of a micro-batch in that run.
        load: images of every micro-batch, `image_load.default_load` where left out.
        progress: see `vision_table`.
        compare: also place the tower in the simple ways.
    """
    table = pipeline_table(config, topology, schedule)
    if equal_chunks:
        return Simulation(simulate(with_bursts(config, table), uniform(table.layout)), "units")
    cuts = layer_cuts(config, topology)
    costs = stage_costs(config, topology, cuts, row_plan(config, topology, cuts, vee=table.layout.vee))
    if measured is not None:
        costs = measured if measured.weight else replace(measured, weight=_weight_share(costs, measured))
    if not config.vision.enabled:
        return Simulation(simulate(with_bursts(config, table), costs), "s")
    load = load or default_load(config)
    modes = (config.vision.mode, "inline", "phase") if compare else (config.vision.mode,)
    return _with_vision(config, topology, table, costs, load, measured_vision, progress, modes)


def _with_vision(
    config: Config,
    topology: Topology,
    table: Table,
    costs: Costs,
    load: ImageLoad,
    measured: tuple[float, float] | None,
    progress: Progress | None,
    modes: Sequence[str],
) -> Simulation:
    """The timeline with the tower as `modes[0]` places it, beside those of the other ways."""
    grids = [load.grids] * table.layout.microbatches
    alone = recalled(table, replace(costs, vision_forward=(), vision_backward=()))
    found = {}
    for mode in dict.fromkeys(modes):
        other = replace(config, vision=replace(config.vision, mode=mode))
        found[mode] = vision_table(other, table, costs, grids, topology, measured=measured, progress=progress)
    timelines = {
        mode: recalled(with_bursts(config, placed), spent) for mode, (placed, spent, _) in found.items()
    }
    _, spent, bundles = found[config.vision.mode]
    seconds = sum(map(sum, spent.vision_forward)) + sum(map(sum, spent.vision_backward))
    idle = sum(map(alone.idle, range(table.layout.pipeline)))
    vision = VisionPlan(
        load=load,
        bundles=bundles,
        mode=config.vision.mode,
        seconds=seconds,
        hidden_fraction=hidden_share(timelines[config.vision.mode], alone, seconds),
        makespans={mode: float(timeline.makespan) for mode, timeline in timelines.items()}
        | {"none": float(alone.makespan)},
        room=load.count * idle / seconds,
        measured=measured is not None,
    )
    return Simulation(timelines[config.vision.mode], "s", vision)


def _weight_share(costs: Costs, measured: Costs) -> list[float]:
    """The weights' part of measured whole backwards, as large as in the planned ones."""
    triples = zip(measured.backward, costs.weight, costs.backward, strict=True)
    return [whole * part / planned for whole, part, planned in triples]


def attn_res_rows(rows: RowPlan) -> dict[str, dict[str, int]]:
    """Rows that cross ranks forward for one micro-batch: on the real cuts, and if each stage made one row.

    `cached`: a rank keeps the rows it received and the rows it made, as the executor does; `published`: those
    it received alone; `naive`: every message carries the whole bank.
    """
    one_a_stage = replace(rows, made=tuple(range(rows.layout.stages)))
    return {"real_cuts": _sent(rows), "row_a_stage": _sent(one_a_stage)}


def _sent(rows: RowPlan) -> dict[str, int]:
    return {
        "cached": rows.rows_sent(),
        "published": rows.published_rows_sent(),
        "naive": replace(rows, cache=False).rows_sent(),
    }
