"""Bytes that one rank holds, by kind, from the configuration alone.

States are exact but for the padding of shards. Activations are what the policy leaves of what the model saves
(`activation_ledger`), experts evenly loaded. Letters as in `shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.policy import TIERS
from parallel.pipeline.rows import RowPlan
from parallel.pipeline.simulate import peak_held
from parallel.pipeline.table import Layout, Table
from parallel.pipeline.vision_fill import vision_peaks
from parallel.topology import Topology, split_layers

from . import activation_ledger
from .activation_ledger import (
    SPARE,
    Held,
    Stage,
    recomputed,
    stage_places,
    tower,
    tower_places,
    with_capacities,
)
from .activation_policy import lender, policy_of
from .config import Config, ModelConfig
from .expert_plan import slot_bytes, staging_bytes, working_bytes
from .gradient_plan import Gradients, costs_more, local_numel, rank_gradients, replicas
from .loss_plan import logits_bytes
from .microbatch import element_bytes, row_bytes, tokens_per_microbatch
from .optim.groups import moments
from .quant_plan import rounded_bytes
from .shapes import BYTES, Parameter, compact_parameters, model_dtype
from .vision_shapes import Grid, tokens
from .vision_shapes import parameters as vision_parameters

UNPLANNED = 0.1
"""Share of a rank's memory that the tower leaves for what no ledger has: the process, its libraries, the
allocator's unused blocks."""

Parts = Sequence[Sequence[Sequence[Grid]]]
"""Grids of the items in each part of each micro-batch."""


def rank_memory(
    config: Config,
    topology: Topology,
    cuts: list[range],
    table: Table,
    rows: RowPlan,
    parts: Parts = (),
) -> list[dict[str, int]]:
    """Bytes by kind for a rank of each pipeline stage; ranks of one stage hold equally much.

    Args:
        parts: the images of the table's vision operations; () where it has none.
    """
    layout = table.layout
    stages = activation_ledger.stages(config, cuts, rows)
    held = rank_activations(config, table, stages, parts)
    ledgers = []
    for rank, chunks in enumerate(stage_entries(config, cuts, layout)):
        entries = [entry for chunk in chunks for entry in chunk]
        own = [layout.stage(rank, chunk) for chunk in range(layout.virtual)]
        ledgers.append(
            {
                **state_ledger(config, topology, chunks),
                **held[rank].device,
                "workspace": _workspace(config, cuts, [stages[stage] for stage in own], own, rows),
                **_expert_buffers(config, topology, entries),
                "logits": logits_bytes(config) if len(cuts) - 1 in own else 0,
                "balance_histograms": sum(e.kind == "router" for e in entries) * _counters(config.model),
            }
        )
    if config.vision.enabled:
        for ledger, vision in zip(ledgers, _vision(config, topology, table, parts), strict=True):
            ledger.update(vision)
    return ledgers


@dataclass(frozen=True)
class RankActivations:
    """What a rank of each pipeline stage holds of activations at most, bytes."""

    device: dict[str, int]
    """By kind of the ledger."""
    tiers: dict[str, int]
    """Elsewhere: host, peer (in the memory of `activation_policy.lender`), nvme."""


def rank_activations(
    config: Config, table: Table, stages: Sequence[Stage], parts: Parts = ()
) -> list[RankActivations]:
    """Peaks of every rank; the tower's own are no part of `device`, as the table decides where they are."""
    found = []
    for rank in range(table.layout.pipeline):
        held = [stage_places(config, stage, rank) for stage in stages]
        capacities = tier_capacities(config)
        tiers = _tier_peaks(config, table, rank, held, parts)
        kept = with_capacities(tiers, capacities)
        kinds = [(h["bank"], h["device"] + h["alone"], h["fp8"]) for h in held]
        bank, activations, coded = map(int, peak_held(table, rank, kinds))
        device = {"activations": activations + int(kept["device"]), "attn_res_bank": bank}
        if coded:
            device["activations_fp8"] = coded
        if away := sum(kept[name] for name in TIERS):
            window = config.offload.inflight_mib << 20
            device["offload_windows"] = int(min(2 * window, away))
        found.append(RankActivations(device, {name: int(kept[name]) for name in TIERS if kept[name]}))
    for rank, part in enumerate(found):
        borrowed = lender(rank, len(found))
        if "peer" in part.tiers and borrowed is not None:
            given = config.offload.peer_gb
            lent = part.tiers["peer"] * SPARE if given is None else given * 1e9
            found[borrowed].device["lent_to_peers"] = int(lent)
    return found


def tier_capacities(config: Config) -> dict[str, float]:
    """Bytes of the tiers whose size is given."""
    given = {name: getattr(config.offload, f"{name}_gb") for name in TIERS}
    return {name: size * 1e9 for name, size in given.items() if size is not None}


def _tier_peaks(
    config: Config, table: Table, rank: int, held: Sequence[Held], parts: Parts
) -> dict[str, float]:
    """The most on each tier at a time; the tower's most is added to the rest's."""
    peaks = {}
    tower = tower_places(config, parts, rank) if parts else []
    for name in policy_of(config).tiers():
        (peaks[name],) = peak_held(table, rank, [(stage.get(name, 0.0),) for stage in held])
        sizes = [[part.get(name, 0.0) for part in row] for row in tower]
        peaks[name] += vision_peaks(table, sizes)[rank] if tower else 0
    return peaks


def gradient_warning(config: Config, topology: Topology) -> str | None:
    """That ZeRO-2 holds more than ZeRO-1 would, where it does."""
    layout = Layout(topology.pipeline, topology.virtual, config.run.microbatches)
    cuts = split_layers(config.model.num_layers, topology.num_chunks, config.parallel.layers_per_chunk)
    return costs_more(config, gradient_ledgers(config, topology, cuts, layout))


def _expert_buffers(config: Config, topology: Topology, entries: list[Parameter]) -> dict[str, int]:
    """What MoonEP and quantisation add, by name."""
    found = {
        "rounded_experts": rounded_bytes(config, topology, entries),
        "expert_slots": slot_bytes(config, topology),
        "expert_staging": staging_bytes(config, topology),
    }
    return {name: size for name, size in found.items() if size}


def _vision(config: Config, topology: Topology, table: Table, parts: Parts) -> list[dict[str, int]]:
    """What the tower adds on a rank of each stage.

    Every rank has all of its states. Activations are held from a part's forward to its backward, features on
    the first stage from the forward that reads them to the end of its backward, and once more as a gradient.
    """
    states = vision_states(config, topology)
    sizes, again = vision_sizes(config, parts)
    features = max((sum(features_bytes(config, part) for part in row) for row in parts), default=0)
    first = table.layout.home(0)[0]
    (read,) = peak_held(
        table, first, [(features if stage == 0 else 0,) for stage in range(table.layout.stages)]
    )
    return [
        {
            "vision_states": states,
            "vision_activations": int(peak) + (again if peak else 0),
            "vision_features": int(read) + features if rank == first else 0,
        }
        for rank, peak in enumerate(vision_peaks(table, sizes))
    ]


def memory_for_plan(config: Config) -> int:
    """Bytes of a rank that the placement of the vision tower may count on."""
    return int(config.cluster.memory_gib * 2**30 * (1 - UNPLANNED))


def vision_states(config: Config, topology: Topology) -> int:
    """Parameters, gradients, master copies and moments of the tower and its projector on any rank."""
    return sum(_states(config, topology, tower_parameters(config)).values())


def tower_parameters(config: Config) -> list[Parameter]:
    """Of the vision tower and the projector; none without `vision.enabled`."""
    if not config.vision.enabled:
        return []
    return list(vision_parameters(config.vision, config.model.hidden_size, model_dtype(config.model)))


def vision_bytes(config: Config, topology: Topology, grids: Sequence[Grid]) -> int:
    """What the tower adds to a rank at the very most: it runs all micro-batches and holds all of them."""
    once = vision_kept(config, grids) + features_bytes(config, grids)
    transient = vision_again(config, grids) + features_bytes(config, grids)
    return vision_states(config, topology) + config.run.microbatches * once + transient


def features_bytes(config: Config, grids: Sequence[Grid]) -> int:
    """Bytes of the embeddings that items become, and of their gradient."""
    made = sum(tokens(config.vision, grid) for grid in grids)
    return made * config.model.hidden_size * element_bytes(config.model)


def vision_sizes(config: Config, parts: Parts) -> tuple[list[list[int]], int]:
    """`vision_kept` of every part, and the most of `vision_again`; equal parts are looked at once."""
    unique = {tuple(part) for row in parts for part in row}
    kept = {part: vision_kept(config, part) for part in unique}
    again = max((vision_again(config, part) for part in unique), default=0)
    return [[kept[tuple(part)] for part in row] for row in parts], again


def vision_kept(config: Config, part: Sequence[Grid]) -> int:
    """What a part leaves on the device for its backward, without the one block that may be recomputed."""
    held = tower_places(config, [[part]], 0)[0][0]
    return int(sum(size for place, size in held.items() if place not in TIERS))


def vision_again(config: Config, part: Sequence[Grid]) -> int:
    """What a backward makes again at a time."""
    return int(tower(config, part).workspace(recomputed(policy_of(config))))


def stage_of(entry: Parameter, cuts: list[range]) -> int:
    """Position in the forward pass of the chunk that holds a parameter."""
    if entry.layer is not None:
        return next(stage for stage, layers in enumerate(cuts) if entry.layer in layers)
    return 0 if entry.kind == "embedding" else len(cuts) - 1


def stage_entries(config: Config, cuts: list[range], layout: Layout) -> list[list[list[Parameter]]]:
    """Parameters by pipeline rank and chunk."""
    owned: list[list[list[Parameter]]] = [[[] for _ in range(layout.virtual)] for _ in range(layout.pipeline)]
    for entry in compact_parameters(config.model):
        rank, chunk = layout.home(stage_of(entry, cuts))
        owned[rank][chunk].append(entry)
    return owned


def gradient_ledgers(
    config: Config, topology: Topology, cuts: list[range], layout: Layout
) -> list[Gradients]:
    """Gradients of the chunks of a rank of each pipeline stage."""
    return [rank_gradients(topology, chunks) for chunks in stage_entries(config, cuts, layout)]


def state_ledger(config: Config, topology: Topology, chunks: list[list[Parameter]]) -> dict[str, int]:
    """What a rank holds of its chunks from step to step, gradients among it, by kind."""
    entries = [entry for chunk in chunks for entry in chunk]
    return {
        **_states(config, topology, entries),
        **_rotating(config, rank_gradients(topology, chunks)),
        **_windows(config, topology, entries),
    }


def _states(config: Config, topology: Topology, entries: list[Parameter]) -> dict[str, int]:
    """Parameters, FP32 gradients, FP32 master copies of BF16 parameters, moments."""
    sizes = dict.fromkeys(("parameters", "gradients", "master_weights", "optimizer_states"), 0)
    for entry in entries:
        numel = local_numel(entry, topology)
        sizes["parameters"] += numel * BYTES[entry.dtype]
        if not entry.trainable:
            continue
        sizes["gradients"] += 4 * numel
        if config.offload.optimizer == "device":
            shard = math.ceil(numel / replicas(entry, topology)) if config.parallel.zero else numel
            sizes["master_weights"] += 4 * shard if entry.dtype == "bf16" else 0
            sizes["optimizer_states"] += 4 * shard * moments(entry, config)
    return sizes


def _rotating(config: Config, held: Gradients) -> dict[str, int]:
    """ZeRO-2's shards in place of whole gradients, and the slots in which the latter come and go."""
    if config.parallel.zero != 2:
        return {}
    shards = held.shards if config.offload.gradients == "device" else 0
    return {"gradients": shards, "gradient_slots": held.slots}


def _windows(config: Config, topology: Topology, entries: list[Parameter]) -> dict[str, int]:
    """The two buffers through which optimizer states pass that are elsewhere."""
    if config.offload.optimizer == "device":
        return {}
    on_device = replace(config, offload=replace(config.offload, optimizer="device"))
    held = _states(on_device, topology, [*entries, *tower_parameters(config)])
    streamed = held["master_weights"] + held["optimizer_states"]
    return {"optimizer_windows": min(2 * (config.offload.window_mib << 20), streamed)}


def _workspace(
    config: Config, cuts: list[range], stages: Sequence[Stage], numbers: list[int], rows: RowPlan
) -> int:
    """Transient: what is being recomputed, and the widest message with two gradients."""
    again = max(stage.workspace(recomputed(policy_of(config))) for stage in stages)
    again += tokens_per_microbatch(config) * working_bytes(config)
    if rows.layout.pipeline == 1:
        return int(again)
    borders = [border for stage in numbers for border in (stage, stage + 1) if 0 < border < len(cuts)]
    return int(again) + 3 * max(map(rows.width, borders)) * row_bytes(config)


def _counters(model: ModelConfig) -> int:
    """int32 histogram and two int64 loads of one router, and the copy that is summed over ranks."""
    return 2 * model.num_experts * (4 * model.balance_bins + 2 * 8)
