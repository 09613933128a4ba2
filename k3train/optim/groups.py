"""Which rule updates each parameter, and into which blocks Per-Head Muon cuts a matrix; imports no torch.

Source: Kimi K3 report: the projections of queries, keys and values are orthogonalised head by head,
everything else whole. Two of our matrices hold what the published model keeps apart, one above the other, and
are cut there: the gate and up halves of an FFN, and the queries, keys and values of the vision tower. Every
block is a run of whole rows, so that it is one piece of the flat matrix.

Letters as in `shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Config, ModelConfig
from ..shapes import EXPERT, Parameter, compact_parameters, model_dtype
from ..vision_shapes import parameters as vision_parameters

ADAMW_KINDS = ("embedding", "head")
# 2-D, but a table of patches' embeddings rather than a map between features.
ADAMW_NAMES = (".patch_embed.proj.weight",)


@dataclass(frozen=True)
class Split:
    """How the rows of a matrix are cut: `heights` from top to bottom, all of that `times` times."""

    name: str
    """For people: whole, heads, halves..."""
    heights: tuple[int, ...]
    times: int = 1

    def blocks(self, columns: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(first, past the last flat element, (rows, columns)) of each block, in order."""
        found, start = [], 0
        for rows in self.heights * self.times:
            found.append((start, start + rows * columns, (rows, columns)))
            start += rows * columns
        return found


@dataclass(frozen=True)
class Group:
    """Parameters of one kind and name, over all layers."""

    name: str
    rule: str
    """muon or adamw."""
    split: str
    """How each matrix is cut; "-" with AdamW."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the blocks: each different one once."""
    matrices: int
    """Tensors."""
    blocks: int
    """Blocks of all of them."""
    numel: int
    flops: float
    """Of the Newton-Schulz iterations of one step."""


def split(entry: Parameter, model: ModelConfig) -> Split | None:
    """How Per-Head Muon cuts a parameter, or None where AdamW updates it."""
    if len(entry.shape) != 2 or entry.kind in ADAMW_KINDS or entry.name.endswith(ADAMW_NAMES):
        return None
    rows, heads = entry.shape[0], model.num_heads
    name = entry.name.removesuffix(".weight").rpartition(".")[2]
    nope, extra, value = model.qk_nope_head_dim, model.qk_extra_head_dim, model.v_head_dim
    cuts = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), Split("heads", (model.kda_head_dim,), heads)),
        "q_b_proj": Split("heads", (nope + extra,), heads),
        "kv_b_proj": Split("heads, K and V", (nope, value), heads),
        "linear_fc1": Split("gate and up", (rows // 2,), 2),
        "wqkv": Split("Q, K and V", (rows // 3,), 3),
    }
    return cuts.get(name, Split("whole", (rows,)))


def newton_schulz_flops(shape: tuple[int, int], steps: int) -> float:
    """FLOPs of the iterations on one block: two products of its size and one of its smaller side cubed."""
    small, large = sorted(shape)
    return steps * (2 * 2 * small**2 * large + 2 * small**3)


def moments(entry: Parameter, config: Config) -> int:
    """FP32 tensors of the optimizer's state beside a parameter: Muon keeps one, AdamW two."""
    name = config.optim.name
    if name == "muon_per_head":
        return 2 if split(entry, config.model) is None else 1
    by_muon = name == "muon" and len(entry.shape) == 2 and entry.kind not in ADAMW_KINDS
    return 1 if by_muon else 2


def groups(config: Config) -> list[Group]:
    """The table of `optim.name=muon_per_head`: what Muon updates, then what AdamW does, in forward order."""
    model, vision = config.model, config.vision
    entries: list[Parameter] = list(compact_parameters(model))
    if vision.enabled:
        entries += vision_parameters(vision, model.hidden_size, model_dtype(model))
    named: dict[tuple[str, str], list[Parameter]] = {}
    for entry in entries:
        if entry.trainable:
            rule = "adamw" if split(entry, model) is None else "muon"
            named.setdefault((rule, _label(entry)), []).append(entry)
    described = [_group(label, rule, found, config) for (rule, label), found in named.items()]
    return sorted(described, key=lambda group: group.rule != "muon")


def _group(label: str, rule: str, entries: list[Parameter], config: Config) -> Group:
    shapes: dict[tuple[int, ...], None] = {}
    blocks, flops = 0, 0.0
    for entry in entries:
        cut = split(entry, config.model)
        if cut is None:
            shapes[entry.shape] = None
            blocks += entry.copies
            continue
        found = [shape for _, _, shape in cut.blocks(entry.shape[1])]
        shapes |= dict.fromkeys(found)
        blocks += len(found) * entry.copies
        flops += entry.copies * sum(newton_schulz_flops(shape, config.optim.muon_steps) for shape in found)
    first = split(entries[0], config.model)
    return Group(
        name=label,
        rule=rule,
        split=first.name if first else "-",
        shapes=tuple(shapes),
        matrices=sum(entry.copies for entry in entries),
        blocks=blocks,
        numel=sum(entry.numel for entry in entries),
        flops=flops,
    )


def _label(entry: Parameter) -> str:
    """Kind and own name, as in "kda q_proj"; vectors of one kind share a line."""
    if entry.kind in (*ADAMW_KINDS, "norm"):
        return entry.kind
    if len(entry.shape) == 1:
        return f"{entry.kind} vectors"
    if entry.name.endswith("_conv"):
        return f"{entry.kind} convolutions"
    parts = entry.name.removesuffix(".weight").replace(f".{EXPERT}", "").split(".")
    own = ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
    return own if own.startswith(entry.kind) else f"{entry.kind} {own}"


def total_flops(found: Iterable[Group]) -> float:
    """FLOPs of Newton-Schulz in one step, over all ranks."""
    return math.fsum(group.flops for group in found)
