"""Bytes that one rank holds, by kind, from the configuration alone.

States are exact but for the padding of shards. Activations are those that autograd keeps with the fast
backends, experts evenly loaded; they are estimates. Letters as in `shapes`, and a for the bytes of one
element of the model's dtype, t for the tokens of a micro-batch on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from parallel.pipeline.rows import RowPlan
from parallel.pipeline.simulate import peak_held
from parallel.pipeline.table import Table
from parallel.pipeline.vision_fill import vision_peaks
from parallel.topology import Topology

from .config import Config, ModelConfig
from .flops import KDA_CHUNK
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
    owned: list[list[Parameter]] = [[] for _ in range(layout.pipeline)]
    for entry in compact_parameters(config.model):
        owned[layout.home(stage_of(entry, cuts))[0]].append(entry)
    saved = saved_bytes(config, cuts, rows)
    ledgers = []
    for rank, entries in enumerate(owned):
        bank, activations = peak_held(table, rank, saved)
        stages = [layout.stage(rank, chunk) for chunk in range(layout.virtual)]
        ledgers.append(
            {
                **_states(config, topology, entries),
                "activations": int(activations),
                "attn_res_bank": int(bank),
                "workspace": _workspace(config, cuts, stages, rows),
                "logits": _logits(config) if len(cuts) - 1 in stages else 0,
                "balance_histograms": sum(e.kind == "router" for e in entries) * _counters(config.model),
            }
        )
    if config.vision.enabled:
        for ledger, vision in zip(ledgers, _vision(config, topology, table, parts), strict=True):
            ledger.update(vision)
    return ledgers


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


def local_numel(entry: Parameter, topology: Topology) -> int:
    """Elements of an entry on one of the ranks that hold it."""
    return entry.numel // topology.expert if entry.kind == "expert" else entry.numel


def replicas(entry: Parameter, topology: Topology) -> int:
    """Ranks of a stage that hold the same elements of an entry and sum its gradient."""
    return topology.expert_data if entry.kind == "expert" else topology.data * topology.context


def tokens_per_microbatch(config: Config) -> int:
    """Tokens of one micro-batch on one rank."""
    return config.data.micro_batch_size * config.data.sequence_length // config.parallel.context


def element_bytes(model: ModelConfig) -> int:
    """Bytes of one activation element."""
    return {"float32": 4, "bfloat16": 2}[model.dtype]


def _states(config: Config, topology: Topology, entries: list[Parameter]) -> dict[str, int]:
    """Parameters, FP32 gradients, FP32 master copies of BF16 parameters, moments."""
    sizes = dict.fromkeys(("parameters", "gradients", "master_weights", "optimizer_states"), 0)
    for entry in entries:
        numel = local_numel(entry, topology)
        sizes["parameters"] += numel * BYTES[entry.dtype]
        if not entry.trainable:
            continue
        shard = math.ceil(numel / replicas(entry, topology)) if config.parallel.zero == 1 else numel
        sizes["gradients"] += 4 * numel
        sizes["master_weights"] += 4 * shard if entry.dtype == "bf16" else 0
        sizes["optimizer_states"] += 4 * shard * _moments(config, entry)
    return sizes


def _moments(config: Config, entry: Parameter) -> int:
    by_muon = (
        config.optim.name == "muon" and len(entry.shape) == 2 and entry.kind not in ("embedding", "head")
    )
    return 1 if by_muon else 2


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
            kept = sum(tokens * layer_bytes(model, kinds[layer]) for layer in layers)
        if stage == len(cuts) - 1:
            kept += row * 2 + _mtp_saved(model, tokens, row)
        saved.append((row * rows.width(stage), kept))
    return saved


def _mtp_saved(model: ModelConfig, tokens: int, row: int) -> int:
    """Shifted embedding, its norm and the other half of the fusion (two rows), the layer, the final norm."""
    if not model.mtp_layers:
        return 0
    layer = row if model.recompute == "layer" else tokens * layer_bytes(model, layer_kinds(model)[-1])
    return row * (1 + 2 + 2) + layer


def layer_bytes(model: ModelConfig, kind: tuple[str, str]) -> int:
    """Bytes that one decoder layer keeps for its backward for each token, without recomputation."""
    attention, mlp = kind
    core = _kda_bytes(model) if attention == "kda" else _mla_bytes(model)
    ffn = _moe_bytes(model) if mlp == "moe" else 3 * model.dense_ffn_size * element_bytes(model)
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


def _moe_bytes(model: ModelConfig) -> int:
    latent, width, k = model.latent_size, model.expert_ffn_size, model.top_k
    # Sorted and received rows, gate, up and activation. The combined rows and the router's input are FP32.
    routed = k * (2 * latent + 3 * width) * element_bytes(model) + 4 * k * latent
    shared = 3 * model.num_shared_experts * width * element_bytes(model)
    router = 4 * model.hidden_size + (4 + 4 + 1) * model.num_experts
    return routed + shared + router + 3 * latent * element_bytes(model)


def _workspace(config: Config, cuts: list[range], stages: list[int], rows: RowPlan) -> int:
    """Transient: the layer that is being recomputed, and the widest message with two gradients."""
    model, tokens = config.model, tokens_per_microbatch(config)
    kinds = layer_kinds(model)
    layers: Iterator[int] = (layer_bytes(model, kinds[layer]) for stage in stages for layer in cuts[stage])
    again = tokens * max(layers) if model.recompute == "layer" else 0
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
