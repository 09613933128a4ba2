"""Bytes that one rank holds, by kind, from the configuration alone.

States are exact but for the padding of shards. Activations are those that autograd keeps with the fast
backends, experts evenly loaded; they are estimates. Letters as in `shapes`, and a for the bytes of one
element of the model's dtype, t for the tokens of a micro-batch on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parallel.pipeline.rows import RowPlan
from parallel.pipeline.simulate import peak_held
from parallel.pipeline.table import Layout, Table
from parallel.pipeline.vision_fill import vision_peaks
from parallel.topology import Topology, split_layers

from .config import Config, ModelConfig
from .expert_plan import kept_bytes, slot_bytes, staging_bytes, working_bytes
from .flops import KDA_CHUNK
from .gradient_plan import Gradients, costs_more, local_numel, rank_gradients, replicas
from .optim.groups import moments
from .shapes import BYTES, Parameter, compact_parameters, layer_kinds, model_dtype, vocab_rows
from .vision_shapes import Grid, activation_bytes, block_bytes_per_patch, patches, tokens
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
    saved = saved_bytes(config, cuts, rows)
    ledgers = []
    for rank, chunks in enumerate(stage_entries(config, cuts, layout)):
        entries = [entry for chunk in chunks for entry in chunk]
        bank, activations = peak_held(table, rank, saved)
        stages = [layout.stage(rank, chunk) for chunk in range(layout.virtual)]
        ledgers.append(
            {
                **_states(config, topology, entries),
                **_rotating(config, rank_gradients(topology, chunks)),
                **_windows(config, topology, entries),
                "activations": int(activations),
                "attn_res_bank": int(bank),
                "workspace": _workspace(config, cuts, stages, rows),
                **_expert_buffers(config, topology),
                "logits": _logits(config) if len(cuts) - 1 in stages else 0,
                "balance_histograms": sum(e.kind == "router" for e in entries) * _counters(config.model),
            }
        )
    if config.vision.enabled:
        for ledger, vision in zip(ledgers, _vision(config, topology, table, parts), strict=True):
            ledger.update(vision)
    return ledgers


def gradient_warning(config: Config, topology: Topology) -> str | None:
    """That ZeRO-2 holds more than ZeRO-1 would, where it does."""
    layout = Layout(topology.pipeline, topology.virtual, config.run.microbatches)
    cuts = split_layers(config.model.num_layers, topology.num_chunks, config.parallel.layers_per_chunk)
    return costs_more(config, gradient_ledgers(config, topology, cuts, layout))


def _expert_buffers(config: Config, topology: Topology) -> dict[str, int]:
    """What MoonEP adds, by name."""
    found = {
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
    sizes = [[vision_kept(config, part) for part in row] for row in parts]
    again = max((vision_again(config, part) for row in parts for part in row), default=0)
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


def vision_kept(config: Config, part: Sequence[Grid]) -> int:
    """What a part leaves behind for its backward, without the one block that may be recomputed."""
    out_size, element = config.model.hidden_size, element_bytes(config.model)
    whole = sum(activation_bytes(config.vision, out_size, grid, element) for grid in part)
    return whole - vision_again(config, part)


def vision_again(config: Config, part: Sequence[Grid]) -> int:
    """The block of the tower that a backward is recomputing."""
    if not config.vision.recompute:
        return 0
    return sum(map(patches, part)) * block_bytes_per_patch(config.vision, element_bytes(config.model))


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


def tokens_per_microbatch(config: Config) -> int:
    """Tokens of one micro-batch on one rank."""
    return config.data.micro_batch_size * config.data.sequence_length // config.parallel.context


def element_bytes(model: ModelConfig) -> int:
    """Bytes of one activation element."""
    return BYTES[model_dtype(model)]


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


def row_bytes(config: Config) -> int:
    """Bytes of one AttnRes row of a micro-batch, and of any other tensor [s, b, hidden_size]."""
    return tokens_per_microbatch(config) * config.model.hidden_size * element_bytes(config.model)


def saved_bytes(config: Config, cuts: list[range], rows: RowPlan) -> list[tuple[int, int]]:
    """(message received, everything else) that each stage keeps for the backward of one micro-batch.

    The message has the AttnRes rows that are new to the stage's rank and the running sum; rows that the rank
    has from earlier chunks stand in the ledger once.
    """
    model, tokens, row = config.model, tokens_per_microbatch(config), row_bytes(config)
    kinds = layer_kinds(model)
    saved = []
    for stage, layers in enumerate(cuts):
        if model.recompute == "layer":
            kept = row * len(layers)
        else:
            kept = sum(tokens * layer_bytes(config, kinds[layer]) for layer in layers)
        if stage == len(cuts) - 1:
            kept += row * 2 + _mtp_saved(config, tokens, row)
        saved.append((row * rows.width(stage), kept))
    return saved


def _mtp_saved(config: Config, tokens: int, row: int) -> int:
    """Shifted embedding, its norm and the other half of the fusion (two rows), the layer, the final norm."""
    model = config.model
    if not model.mtp_layers:
        return 0
    layer = row if model.recompute == "layer" else tokens * layer_bytes(config, layer_kinds(model)[-1])
    return row * (1 + 2 + 2) + layer


def layer_bytes(config: Config, kind: tuple[str, str]) -> int:
    """Bytes that one decoder layer keeps for its backward for each token, without recomputation."""
    (attention, mlp), model = kind, config.model
    core = _kda_bytes(model) if attention == "kda" else _mla_bytes(model)
    ffn = _moe_bytes(config) if mlp == "moe" else 3 * model.dense_ffn_size * element_bytes(model)
    # Of each sublayer the mixture, its norm, and the running sum that later sites read.
    around = 2 * 3 * model.hidden_size * element_bytes(model)
    return around + core + ffn


def _kda_bytes(model: ModelConfig) -> int:
    channels = model.num_heads * model.kda_head_dim
    # q, k, v before and after convolution, q and k normalised; output, norm, gate logits, gate, product.
    rows = (3 + 3 + 2) * channels + 5 * channels
    decay = model.kda_head_dim + channels
    chunk = 2 * model.num_heads * KDA_CHUNK
    return (rows + decay + chunk) * element_bytes(model) + 4 * (channels + model.num_heads)


def _mla_bytes(model: ModelConfig) -> int:
    heads, values = model.num_heads, model.num_heads * model.v_head_dim
    query = heads * (model.qk_nope_head_dim + model.qk_extra_head_dim)
    latents = 2 * model.q_lora_rank + 2 * model.kv_lora_rank + model.qk_extra_head_dim
    # Query, key, value, attention output, gate logits, gate and their product; a log-sum for each head.
    return (latents + 2 * query + 5 * values) * element_bytes(model) + 4 * heads


def _moe_bytes(config: Config) -> int:
    """Of the routed and shared experts and the router, whose input is FP32; the combined rows' norm."""
    model = config.model
    shared = 3 * model.num_shared_experts * model.expert_ffn_size * element_bytes(model)
    router = 4 * model.hidden_size + (4 + 4 + 1) * model.num_experts
    return kept_bytes(config) + shared + router + 3 * model.latent_size * element_bytes(model)


def _workspace(config: Config, cuts: list[range], stages: list[int], rows: RowPlan) -> int:
    """Transient: the layer that is being recomputed, and the widest message with two gradients."""
    model, tokens = config.model, tokens_per_microbatch(config)
    kinds = layer_kinds(model)
    layers: Iterator[int] = (layer_bytes(config, kinds[layer]) for stage in stages for layer in cuts[stage])
    again = tokens * max(layers) if model.recompute == "layer" else 0
    again += tokens * working_bytes(config)
    if rows.layout.pipeline == 1:
        return again
    borders = [border for stage in stages for border in (stage, stage + 1) if 0 < border < len(cuts)]
    return again + 3 * max(map(rows.width, borders)) * row_bytes(config)


def _logits(config: Config) -> int:
    """Logits, their FP32 copy and exponentials of each head pass, and the gradients of one."""
    model = config.model
    passes = 2 if model.mtp_layers else 1
    kept, gradient = element_bytes(model) + 8, element_bytes(model) + 4
    return tokens_per_microbatch(config) * vocab_rows(model) * (passes * kept + gradient)


def _counters(model: ModelConfig) -> int:
    """int32 histogram and two int64 loads of one router, and the copy that is summed over ranks."""
    return 2 * model.num_experts * (4 * model.balance_bins + 2 * 8)
