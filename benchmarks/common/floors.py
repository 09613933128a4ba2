"""The least that operators of a step can take: FLOPs and bytes of the plan's lists over measured ceilings.

FLOPs and bytes are those of `k3train.flops`, `activation_costs` and `operators`; nothing is counted anew. A
floor is the larger of FLOPs over the fastest product measured, and bytes over the fastest copy. Bytes are
what enters and leaves an operator and the weights it reads; backward has twice the FLOPs and bytes of
forward, what is run again those of forward. Sums of weights' gradients and the update move what the plan
says they move.

Needs no torch. Letters as in `k3train.shapes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from k3train import activation_bytes, activation_costs, flops, operators, step_end
from k3train.activation_policy import LAYER, MTP_LAYER, recomputes
from k3train.activation_sites import Cost, Saved, sites
from k3train.config import Config
from k3train.expert_plan import balanced
from k3train.flops import TERA
from k3train.gradient_plan import FP32
from k3train.layout import layout_of
from k3train.microbatch import element_bytes, tokens_per_microbatch
from k3train.operators import ACCUMULATION, CLASS_OF_REGION, GIGA
from k3train.schedule import layer_cuts
from k3train.shapes import layer_kinds, vocab_rows
from k3train.weight_sums import Place, rank_sums

from .attribution import ACCUMULATE, AGAIN, BACKWARD, FORWARD

REST = {
    "kda.output": ("kda_projection", ("kda.input", "kda.decay", "kda.gate_input")),
    "mla.output": ("mla_projection", ("mla.input", "mla.query", "mla.key", "mla.gate_input")),
    "ffn.output": ("dense", ("ffn.input",)),
    "moe.experts": ("experts", ("moe.dispatch_input",)),
    "moe.output": ("latent", ("moe.input",)),
    "moe.shared.output": ("shared", ("moe.shared.input",)),
}
"""Sites that are no region have what is left of a site of `flops` behind those regions."""
PRODUCTS = {
    *REST, *(region for _, regions in REST.values() for region in regions), "head", "fusion", "moe.router",
}  # fmt: skip
"""Sites whose FLOPs are those of products with weights."""
WITHOUT_WORK = {"attn_res.bank": "names tensors, computes nothing"}
BESIDE = ("head", "input")
"""Regions of MTP that do not lie in its layer."""
HOST_ONLY = ("launch",)
"""Classes of `operators` that are no operator of the device: `idle` and the launches stand for them."""


@dataclass(frozen=True)
class Ceilings:
    """Of one device."""

    flops: float
    """A second, of the fastest product."""
    bandwidth: float
    """Bytes a second, read and written, of the fastest copy."""
    source: str
    """Measured in this run, or the hardware entry's."""

    def floor(self, work: Work) -> float:
        """Seconds."""
        return max(work.flops / self.flops, work.bytes / self.bandwidth)


@dataclass(frozen=True)
class Work:
    """Of an operator in a step of one rank."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, factor: float) -> Work:
        """So many of it."""
        return Work(self.flops * factor, self.bytes * factor)


Key = tuple[str, str, str]
"""Part of the model, operator, way."""


def of_entry(config: Config) -> Ceilings:
    """What the hardware entry of a configuration says."""
    bandwidth = operators.memory_bandwidth(config)
    return Ceilings(operators.peak(config, "dense_gemm"), bandwidth, f"cluster={config.cluster.name}")


def at_ceilings(config: Config, ceilings: Ceilings) -> Config:
    """The configuration on a machine that reaches the ceilings with everything, at no cost of launches."""
    full = replace(
        config.cluster.efficiency, **{each.name: 1.0 for each in fields(config.cluster.efficiency)}
    )
    cluster = replace(
        config.cluster, peak_tflops=ceilings.flops / TERA, peak_fp8_tflops=None, launch_us=0.0,
        memory_gbps=ceilings.bandwidth / GIGA, efficiency=full, measured={}, calibration=None,
    )  # fmt: skip
    return replace(config, cluster=cluster)


def work_of_step(config: Config) -> dict[Key, Work]:
    """What every operator of the first pipeline rank's step does. `optimizer.*` is `optimizer_floors`'."""
    once: dict[tuple[str, str], Work] = defaultdict(Work)
    device, tokens = activation_bytes.device_type(config), tokens_per_microbatch(config)
    layers, weights = _layers(config), 0.0
    for layer in layers:
        kind = layer_kinds(config.model)[layer]
        costs = activation_costs.layer_costs(config, layer, device)
        found = _sublayers(config, kind, costs, activation_bytes.decoder_layer(config, layer, device))
        weights += _weights(config, kind)
        for name, work in found.items():
            once["+".join(kind), name] += work.times(tokens)
    if 0 in layers:
        row = config.model.hidden_size * element_bytes(config.model)
        once["", "embedding"] = Work(bytes=2 * row * tokens)
    if config.model.num_layers - 1 in layers:
        for name, work in _output(config, device).items():
            once["mtp" if name.startswith("mtp.") else "output", name] += work.times(tokens)
        weights += _output_weights(config)
    return _ways(config, once, weights)


def optimizer_floors(config: Config, ceilings: Ceilings) -> dict[str, float]:
    """Seconds of a step's update by operator, of the first pipeline rank."""
    full, topology = at_ceilings(config, ceilings), layout_of(config)
    place: Place = rank_sums(full, topology, layer_cuts(full, topology))[0]
    shares = (topology.data * topology.context, topology.expert_data) if config.parallel.zero else (1, 1)
    update, newton_schulz = step_end.planned_update(full, place, shares)
    elements = sum(sums.trained / share for sums, share in zip(place, shares, strict=True))
    read = FP32 * elements / ceilings.bandwidth
    return {
        "gradients.zero": sum(FP32 * sums.trained for sums in place) / ceilings.bandwidth,
        "optimizer.norm": read,
        "optimizer.clip": 2 * read,
        "optimizer.update": max(0.0, update - 3 * read),
        "optimizer.newton_schulz": newton_schulz,
    }


def class_of(operator: str) -> str:
    """Of `operators.CLASSES`, or newton_schulz."""
    name = operator.removeprefix("mtp.")
    if name in ("moe.dispatch_input", "moe.experts"):
        return "grouped_gemm"
    if name == "optimizer.newton_schulz":
        return "newton_schulz"
    found = CLASS_OF_REGION.get(name)
    return found or ("dense_gemm" if name in PRODUCTS else "memory")


def absent(config: Config, measured: set[str]) -> dict[str, str]:
    """Sites of the model and classes of operators that no row has, each with the reason."""
    found = {name: "the host's: see idle, waits and launches" for name in HOST_ONLY}
    classes = {class_of(name) for name in measured}
    kinds = {part for kind in layer_kinds(config.model) for part in kind}
    needs = {"kda_core": "kda", "attention": "mla", "grouped_gemm": "moe"}
    for name in operators.CLASSES:
        if name not in (*HOST_ONLY, *classes):
            there = needs.get(name) in kinds or name not in needs
            found[name] = "nothing ran under its names" if there else f"no layer is {needs[name]}"
    for site in sites(config):
        if site.name not in measured:
            found[site.name] = WITHOUT_WORK.get(site.name, "nothing ran under this name")
    return found


def _layers(config: Config) -> list[int]:
    """Of the first pipeline rank."""
    topology = layout_of(config)
    return [layer for cut in layer_cuts(config, topology)[:: topology.pipeline] for layer in cut]


def _ways(config: Config, once: Mapping[tuple[str, str], Work], weights: float) -> dict[Key, Work]:
    """A step's forwards, backwards and second forwards, of what one forward of a micro-batch does."""
    count = config.run.microbatches
    found: dict[Key, Work] = {}
    for (part, name), work in once.items():
        found[part, name, FORWARD] = work.times(count)
        found[part, name, BACKWARD] = work.times(flops.BACKWARD_OVER_FORWARD * count)
        whole = MTP_LAYER if part == "mtp" else LAYER
        in_layer = part not in ("", "output") and name != "mtp.head"
        if (in_layer and recomputes(config, whole)) or recomputes(config, name):
            found[part, name, AGAIN] = work.times(count)
    found["", ACCUMULATE, BACKWARD] = Work(bytes=count * ACCUMULATION * weights)
    return found


def _sublayers(
    config: Config, kind: tuple[str, str], costs: Mapping[str, Cost], tensors: Iterable[Saved]
) -> dict[str, Work]:
    """Of a token through a layer, by site."""
    model, tensors = config.model, list(tensors)
    spent = flops.sublayer_flops(model, kind, config.data.sequence_length)
    work = {name: Work(cost.flops, cost.bytes) for name, cost in costs.items() if name != "layer"}
    for name, (whole, regions) in REST.items():
        if whole in spent:
            left = spent[whole] - sum(costs[region].flops for region in regions)
            made = 0 if name == "moe.experts" else model.hidden_size * element_bytes(model)
            taken = sum(each.bytes for each in tensors if name in each.saved_by)
            work[name] = work.get(name, Work()) + Work(left, taken + made)
    if kind[1] == "moe":
        if balanced(config):
            work["moe.experts"] += work.pop("moe.dispatch_input")
        else:
            sent = [each for each in tensors if each.site == "moe.dispatch_input" and each.made_in is None]
            work["moe.dispatch"] = Work(bytes=2 * sum(each.bytes for each in sent))
    inside = sum(cost.bytes for name, cost in costs.items() if name not in ("layer", *BESIDE))
    work["layer"] = Work(bytes=costs["layer"].bytes - inside)
    return {name: each + Work(bytes=_read(config, spent, name, each)) for name, each in work.items()}


def _read(config: Config, spent: Mapping[str, float], name: str, work: Work) -> float:
    """Bytes of weights that a product reads once for all tokens of a micro-batch, a token's part."""
    kind = class_of(name)
    if kind not in ("dense_gemm", "grouped_gemm"):
        return 0.0
    elements = work.flops / 2
    if kind == "grouped_gemm":
        whole = spent["experts"]
        elements = (
            operators.site_weights(config.model, "experts", whole, _experts(config)) * work.flops / whole
        )
    return elements * element_bytes(config.model) / tokens_per_microbatch(config)


def _output(config: Config, device: str) -> dict[str, Work]:
    """Of a token behind the last layer, MTP with its prefix."""
    model = config.model
    found = {n: Work(c.flops, c.bytes) for n, c in activation_costs.output_costs(config, device).items()}
    found["head"] += Work(bytes=_read(config, {}, "head", found["head"]))
    if not model.mtp_layers:
        return found
    costs = {_bare(n): c for n, c in activation_costs.mtp_costs(config, device).items()}
    tensors = [
        replace(each, site=_bare(each.site), saved_by=tuple(map(_bare, each.saved_by)))
        for each in activation_bytes.mtp(config, device)
    ]
    work = _sublayers(config, layer_kinds(model)[-1], costs, tensors)
    row = model.hidden_size * element_bytes(model)
    work["fusion"] = Work(4.0 * model.hidden_size**2, 3 * row)
    return {**found, **{f"mtp.{name}": each for name, each in work.items()}}


def _bare(name: str) -> str:
    return name.removeprefix("mtp.")


def _weights(config: Config, kind: tuple[str, str]) -> float:
    """Elements of a rank that the products of a layer read."""
    spent = flops.sublayer_flops(config.model, kind, config.data.sequence_length)
    return sum(
        operators.site_weights(config.model, site, each, _experts(config)) for site, each in spent.items()
    )


def _output_weights(config: Config) -> float:
    model = config.model
    found = float(model.hidden_size * vocab_rows(model))
    if model.mtp_layers:
        found += _weights(config, layer_kinds(model)[-1]) + 2.0 * model.hidden_size**2
    return found


def _experts(config: Config) -> int:
    """Routed experts of a layer on a rank."""
    return config.model.num_experts // max(1, config.parallel.expert.size)
