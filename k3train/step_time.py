"""How long a training step takes, from the configuration and the hardware entry `config.cluster`. No torch.

`predict` simulates the pipeline's table with the seconds of every operation; `estimate` takes the same costs,
and a closed form in place of the simulation, for a search over thousands of layouts. What follows the
pipeline, the sums of gradients and the update, is `step_end`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallel.pipeline.simulate import Costs, Timeline, recalled, simulate
from parallel.pipeline.table import Layout
from parallel.topology import Topology

from . import stage_time, step_end, vision_shapes
from .activation_time import Added
from .config import Config
from .flops import TERA, train_flops_per_token
from .image_load import default_load
from .layout import layout_of
from .operators import CLASSES, peak, summed
from .schedule import Simulation, costs_of, layer_cuts, pipeline_table, row_plan, simulation, stage_parts
from .stage_time import Work
from .traffic import GIGA, link_class, ring_bandwidth

BACKLOG = "gradient_backlog"
"""The one part behind the pipeline that depends on how long it takes."""
BUBBLE, MESSAGES, VISION, OFFLOAD, FP8 = "bubble", "messages", "vision", "offload", "fp8"
COMPUTING = (*CLASSES, stage_time.RECOMPUTE, stage_time.OPERATION, FP8, VISION)
"""Parts in which a rank works for the model."""


@dataclass(frozen=True)
class StepTime:
    """One optimizer step of all ranks."""

    seconds: float
    tokens_per_second: float
    """Of all ranks."""
    mfu: float
    """Model FLOPs over what `cluster.peak_tflops` allows in that time."""
    parts: dict[str, float]
    """Seconds of the busiest rank by what they are spent on; they sum to `seconds`. Those of `COMPUTING` are
    the model's, by class of operators."""
    exposed: dict[str, tuple[float, str]]
    """Seconds that nothing hides, by part, and one sentence that says why."""


def predict(config: Config) -> StepTime:
    """The step of a resolved configuration (`parallel.data` is set), its pipeline simulated.

    Raises:
        LayoutError, UserError: what `validate` would refuse.
    """
    topology = layout_of(config)
    return of_simulation(config, topology, simulation(config, topology))


def estimate(config: Config) -> StepTime:
    """`predict` without the simulation: the fast path, some milliseconds at any size.

    The pipeline takes what its busiest rank works, and of the others what comes before and behind that. The
    vision tower is spread evenly and hidden as far as there is idle time. Raises what `predict` does.
    """
    topology = layout_of(config)
    cuts = layer_cuts(config, topology)
    rows = row_plan(config, topology, cuts)
    works, extra = stage_parts(config, topology, cuts, rows)
    costs = costs_of(config, topology, rows, works, extra)
    layout = rows.layout
    tower = _tower_seconds(config)
    span, busiest, busy, messages = _closed_form(layout, costs)
    hidden = min(tower / layout.pipeline, max(0.0, span - sum(busy) / layout.pipeline))
    own = tower / layout.pipeline
    pipe = _Pipe(busiest, span + own - hidden, busy[busiest] + own, own, messages)
    return _composed(config, topology, cuts, _Stages(rows.layout, works, extra), pipe)


def of_simulation(config: Config, topology: Topology, simulated: Simulation) -> StepTime:
    """The step whose pipeline was simulated, in seconds."""
    timeline, cuts = simulated.timeline, layer_cuts(config, topology)
    rows = row_plan(config, topology, cuts, vee=timeline.table.layout.vee)
    ranks = range(topology.pipeline)
    busiest = max(ranks, key=timeline.busy)
    tower = _tower_on(timeline, busiest)
    works, extra = stage_parts(config, topology, cuts, rows)
    costs = costs_of(config, topology, rows, works, extra)
    messages = _message_seconds(config, topology, simulated, costs, busiest) if costs.hop else 0.0
    pipe = _Pipe(busiest, float(timeline.makespan), float(timeline.busy(busiest)), tower, messages)
    grids = simulated.vision.load.grids if simulated.vision else None
    return _composed(config, topology, cuts, _Stages(rows.layout, works, extra), pipe, grids)


@dataclass(frozen=True)
class _Pipe:
    """The pipeline's part of a step, seconds."""

    rank: int
    """The busiest."""
    makespan: float
    busy: float
    """Of that rank."""
    tower: float
    """The tower's part of `busy`."""
    messages: float
    """Of the idle time, what messages under way make."""


def _tower_on(timeline: Timeline, rank: int) -> float:
    ops = zip(timeline.table.ranks[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    return float(sum(end - start for op, start, end in ops if op.kind in ("VF", "VB")))


def _message_seconds(
    config: Config, topology: Topology, simulated: Simulation, costs: Costs, rank: int
) -> float:
    """Idle time of a rank that is there because messages take time; the tower left out."""
    if topology.pipeline == 1:
        return 0.0
    table = pipeline_table(config, topology, simulated.schedule)
    bare = replace(costs, vision_forward=(), vision_backward=())
    with_hops, without = recalled(table, bare), simulate(table, replace(bare, hop=0.0))
    return max(0.0, float(with_hops.makespan - without.makespan))


def _closed_form(layout: Layout, costs: Costs) -> tuple[float, int, list[float], float]:
    """Makespan, the busiest rank, the work of each, and what messages add.

    A rank waits for the first forward of all ranks before it and, at the end, for their last backwards. While
    a micro-batch is under way, the message of each of its hops is exposed where no other work is left: once
    in each direction of the first and of the last one, and between single chunks of 1F1B in each micro-batch.
    """
    p, m = layout.pipeline, layout.microbatches
    whole = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    busy = [m * sum(whole[rank::p]) for rank in range(p)]
    first = [costs.forward[rank] + costs.backward[rank] for rank in range(p)]
    busiest = max(range(p), key=lambda rank: busy[rank])
    spans = []
    for rank in range(p):
        before = sum(first[:rank])
        behind = sum(whole[layout.stages - p + rank + 1 :]) if layout.virtual == 1 else 0.0
        after = behind if layout.virtual == 1 else sum(first[rank + 1 :])
        spans.append(busy[rank] + before + after)
    hops = 2 * (p - 1) + (m - 1 if layout.virtual == 1 and p > 1 else 0)
    messages = hops * costs.hop
    return max(spans) + messages, busiest, busy, messages


def _tower_seconds(config: Config) -> float:
    """Of the tower's work in a step, over all pipeline ranks."""
    if not config.vision.enabled:
        return 0.0
    return vision_flops(config) / peak(config, "dense_gemm")


def vision_flops(config: Config, grids: Sequence[vision_shapes.Grid] | None = None) -> float:
    """Of the tower's forwards and backwards in one step of one pipeline, without what is recomputed."""
    if not config.vision.enabled:
        return 0.0
    found = default_load(config).grids if grids is None else grids
    once = vision_shapes.train_flops(config.vision, config.model.hidden_size, found)
    return config.run.microbatches * once


@dataclass(frozen=True)
class _Stages:
    """What the chunks of a pipeline do for a micro-batch."""

    layout: Layout
    works: Sequence[Work]
    extra: Sequence[Added]


def _composed(
    config: Config,
    topology: Topology,
    cuts: list[range],
    stages: _Stages,
    pipe: _Pipe,
    grids: Sequence[vision_shapes.Grid] | None = None,
) -> StepTime:
    """The step of a pipeline and all that follows it; `grids` of the images, the planned ones if left out."""
    parts = _pipeline_parts(stages, pipe)
    ends = step_end.parts(config, topology, cuts)
    ends[BACKLOG] = step_end.backlog(config, topology, cuts, pipe.makespan)
    parts |= {name: part.seconds for name, part in ends.items()}
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
    seconds = sum(parts.values())
    tokens = config.run.microbatches * config.data.micro_batch_size * config.data.sequence_length
    tokens *= topology.data
    model = train_flops_per_token(config.model, config.data.sequence_length) * tokens
    model += vision_flops(config, grids) * topology.data
    whole = topology.world_size * config.cluster.peak_tflops * TERA
    exposed = {**_exposed(config, topology, parts), **{n: (p.seconds, p.why) for n, p in ends.items()}}
    exposed |= step_end.checkpoint(config, topology, cuts, seconds)
    shown = {name: each for name, each in exposed.items() if each[0] > 0}
    return StepTime(seconds, tokens / seconds, model / (seconds * whole), parts, shown)


def _pipeline_parts(stages: _Stages, pipe: _Pipe) -> dict[str, float]:
    """The busiest rank's work by what it is spent on, and its idle time; they sum to the makespan."""
    spent: dict[str, float] = {}
    for number, (work, more) in enumerate(zip(stages.works, stages.extra, strict=True)):
        if stages.layout.home(number)[0] != pipe.rank:
            continue
        added = {
            stage_time.RECOMPUTE: more.recompute,
            FP8: 2 * more.coding,
            OFFLOAD: more.waits_out + more.waits_back,
        }
        spent = summed(spent, work.forward, work.backward, added)
    scale = (pipe.busy - pipe.tower) / (sum(spent.values()) or 1.0)
    parts = {name: scale * seconds for name, seconds in spent.items()}
    idle = max(0.0, pipe.makespan - pipe.busy)
    messages = min(idle, pipe.messages)
    return parts | {VISION: pipe.tower, BUBBLE: idle - messages, MESSAGES: messages}


def _exposed(config: Config, topology: Topology, parts: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Of the pipeline's parts that are no computing: why nothing hides them."""
    p, v, m = topology.pipeline, topology.virtual, config.run.microbatches
    beside = topology.data * topology.context
    sentences = {
        stage_time.EXPERTS: "experts wait for their rows and the layer for its outputs; over "
        + _over(config, topology.expert, 1, ring=False),
        stage_time.BORROWED: "weights of borrowed experts arrive before their rows are computed, and their "
        "gradients leave behind them; over " + _over(config, topology.expert, 1, ring=False),
        stage_time.CONTEXT: "attention waits for states or keys of the other ranks; over "
        + _over(config, topology.context, 1),
        BUBBLE: f"{p} pipeline ranks fill and drain {m} micro-batches in {v} chunks, and the busiest waits "
        "for what others do longer",
        MESSAGES: "the first and last micro-batches, and each turn to backward, wait for rows; over "
        + _over(config, 2 if p > 1 else 1, beside),
        OFFLOAD: "copies to and from tiers outlast the operations beside them and the window",
        "launch": "the host takes longer to launch operators than the device to run them"
        if config.cluster.gpu != "cpu"
        else "a CPU launches its own operators",
    }
    return {name: (parts[name], text) for name, text in sentences.items() if parts.get(name, 0) > 0}


def _over(config: Config, size: int, stride: int, *, ring: bool = True) -> str:
    """A group's slowest links in words, with the bandwidth that a rank reaches, in a ring or by itself."""
    kind = link_class(config, size, stride)
    if kind == "none":
        return "no link"
    rate = ring_bandwidth(config, size, stride) / GIGA
    if kind == "network" and not ring:
        rate = config.cluster.network_gbps * config.cluster.efficiency.network
    return f"{'links' if kind == 'link' else 'the network'} at {rate:.3g} GB/s"
