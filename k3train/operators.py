"""Seconds of the model's operators on one rank for a micro-batch, by class. Needs no torch.

An operator takes its FLOPs over the share of the peak that its class reaches (`cluster.efficiency`), and what
it moves through memory takes that share of the memory's bandwidth; both add up, as products and what stands
between them follow each other. Backward: two products for one in forward; the cores take longer than their
FLOPs say. Where the host needs longer to launch a layer than the device to run it, the difference is
`launch`; a CPU's launches add to its work. A calibration of the same shapes (`calibration`) comes before all
of that, and keeps the proportions.

Letters as in `shapes`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import activation_bytes, activation_costs, calibration
from .activation_sites import Cost
from .config import Config, ModelConfig
from .flops import TERA, site_sources, sublayer_flops
from .loss_plan import FLOAT, IN_CHUNKS, chosen
from .microbatch import element_bytes, tokens_per_microbatch
from .quant.formats import GPUS_WITH_MX
from .shapes import block_starts, layer_kinds, vocab_rows

GIGA = 1e9
CLASSES = ("dense_gemm", "grouped_gemm", "kda_core", "attention", "memory", "launch")
"""What a rank computes with: keys of `cluster.efficiency`, and what the host adds."""

BACKWARD = {"dense_gemm": 2.0, "grouped_gemm": 2.0, "kda_core": 2.6, "attention": 2.5, "memory": 2.0}
"""Time of a backward over its forward. Cores: fla's KDA and FlashAttention on an H200, 1.8 and 3.6 at 8K and
32K tokens, 2.1 and 2.7."""
CLASS_OF = {"experts": "grouped_gemm", "kda_core": "kda_core", "mla_core": "attention", "attn_res": "memory"}
"""Sites of `flops`; all others are dense products. AttnRes takes what it moves."""
CLASS_OF_REGION = {"kda.core": "kda_core", "mla.core": "attention", "moe.dispatch_input": "grouped_gemm"}
"""Regions of `activation_costs`, likewise."""
LAUNCHES = {"kda": 110, "mla": 80, "dense": 25, "moe": 110, "output": 40, "site": 12}
"""Operators that the host launches forward, an AttnRes site for itself; backward launches twice as many."""
LAUNCHES_OF_EXPERT = 2
KNOWN = 512
"""Kinds of layers whose costs are remembered."""
ACCUMULATION = 12
"""Bytes that adding one weight's gradient to its FP32 sum moves: 4 read, 4 written, gradient written and
read."""


@dataclass(frozen=True)
class Seconds:
    """Of a micro-batch through some operators."""

    forward: dict[str, float] = field(default_factory=dict)
    """By class."""
    backward: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0
    """The part of `backward` that makes gradients of weights, which could wait."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            summed(self.forward, other.forward),
            summed(self.backward, other.backward),
            self.weight + other.weight,
        )

    def scaled(self, forward: float, backward: float) -> Seconds:
        """In the same proportions, with these sums."""
        ahead, back = (sum(part.values()) or 1.0 for part in (self.forward, self.backward))
        return Seconds(
            {name: time * forward / ahead for name, time in self.forward.items()},
            {name: time * backward / back for name, time in self.backward.items()},
            self.weight * backward / back,
        )


def peak(config: Config, kind: str) -> float:
    """FLOPs a second of a class of products."""
    cluster = config.cluster
    reached: float = getattr(cluster.efficiency, kind)
    tera = cluster.peak_tflops
    if kind == "grouped_gemm" and _in_mx(config) and cluster.peak_fp8_tflops is not None:
        tera = cluster.peak_fp8_tflops
    return tera * TERA * reached


def _in_mx(config: Config) -> bool:
    """Whether forward products of routed experts run in MX formats; their backward's do not."""
    quant = config.quant
    return quant.recipe != "none" and quant.products != "emulated" and config.cluster.gpu in GPUS_WITH_MX


def memory_bandwidth(config: Config) -> float:
    """Bytes a second of operators bound by memory."""
    return config.cluster.memory_gbps * GIGA * config.cluster.efficiency.memory


def region_seconds(config: Config, region: str, cost: Cost) -> float:
    """Of running a region again for a micro-batch: its class, and what it moves."""
    rate = peak(config, CLASS_OF_REGION.get(region.removeprefix("mtp."), "dense_gemm"))
    moved = cost.bytes / memory_bandwidth(config)
    return (cost.flops / rate + moved) * tokens_per_microbatch(config)


_costs: OrderedDict[object, dict[str, Cost]] = OrderedDict()


def known_layer_costs(config: Config, layer: int, device: str) -> dict[str, Cost]:
    """`activation_costs.layer_costs`, remembered: a search asks for the same layers again and again."""
    model = config.model
    starts = block_starts(model, layer + 1) > block_starts(model, layer)
    of_layer = layer_kinds(model)[layer], site_sources(model, layer), starts
    key = of_layer, _dependencies(config), device
    if key not in _costs:
        _costs[key] = activation_costs.layer_costs(config, layer, device)
        if len(_costs) > KNOWN:
            _costs.popitem(last=False)
    return _costs[key]


def _dependencies(config: Config) -> tuple[object, ...]:
    """Of the configuration, what the costs of a layer depend on for a token."""
    data, parallel = config.data, config.parallel
    return (
        repr(config.model), repr(config.quant), repr(parallel.expert), parallel.context,
        data.sequence_length, data.micro_batch_size, config.cluster.gpu, config.run.device,
    )  # fmt: skip


class Operators:
    """What each layer of a configuration takes; equal layers are looked at once."""

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model
        self.device = activation_bytes.device_type(config)
        self.kinds = layer_kinds(config.model)
        self.measured = calibration.of_shapes(config)
        self._known: dict[object, Seconds] = {}

    def layer(self, layer: int) -> Seconds:
        """Decoder layer `layer` (0-based)."""
        sources = site_sources(self.model, layer)
        starts = block_starts(self.model, layer + 1) > block_starts(self.model, layer)
        key = self.kinds[layer], sources, starts
        if key not in self._known:
            cost = known_layer_costs(self.config, layer, self.device)["layer"]
            planned = self._sublayers(self.kinds[layer], cost.bytes, 2)
            found = self.measured and self.measured.layer("+".join(self.kinds[layer]), sum(sources))
            self._known[key] = planned.scaled(*found) if found else planned
        return self._known[key]

    def output(self) -> Seconds:
        """What stands behind the last layer: mixture, head, loss, MTP."""
        if "output" not in self._known:
            found = self.measured and self.measured.output
            planned = self._planned_output()
            self._known["output"] = planned.scaled(*found) if found else planned
        return self._known["output"]

    def stage(self, layers: range) -> Seconds:
        """A model chunk without its exchanges."""
        total = Seconds()
        for layer in layers:
            total += self.layer(layer)
        if layers.stop == self.model.num_layers:
            total += self.output()
        return total

    def _planned_output(self) -> Seconds:
        model, config = self.model, self.config
        head = 2.0 * model.hidden_size * vocab_rows(model)
        costs = activation_costs.output_costs(config, self.device)
        found = self._operators({"head": head}, sum(c.bytes for c in costs.values()), LAUNCHES["output"])
        if model.mtp_layers:
            parts = activation_costs.mtp_costs(config, self.device)
            moved = sum(cost.bytes for name, cost in parts.items() if name != "mtp.layer")
            found += self._sublayers(self.kinds[-1], moved, 0)
            more = {"fusion": 4.0 * model.hidden_size**2, "head": head}
            found += self._operators(more, 0.0, LAUNCHES["output"])
        if chosen(config) in IN_CHUNKS:
            moved = 2.0 * FLOAT * vocab_rows(model)
            passes = 1 + bool(model.mtp_layers)
            found += Seconds({}, self._again({"head": passes * head}, passes * moved))
        return found

    def _again(self, flops: Mapping[str, float], moved: float) -> dict[str, float]:
        """What backward takes for a forward that it repeats, by class."""
        return self._operators(flops, moved, 0.0).forward

    def _sublayers(self, kind: tuple[str, str], moved: float, sites: int) -> Seconds:
        """Attention and feed-forward sublayers that move `moved` bytes of a token, beside AttnRes sites."""
        launches = sum(LAUNCHES[part] for part in kind) + sites * LAUNCHES["site"]
        if kind[1] == "moe":
            launches += LAUNCHES_OF_EXPERT * self.local_experts
        return self._operators(sublayer_flops(self.model, kind, self._length), moved, launches)

    @property
    def _length(self) -> int:
        return self.config.data.sequence_length

    @property
    def local_experts(self) -> int:
        """Routed experts of a layer on a rank."""
        return self.model.num_experts // self.config.parallel.expert.size

    def _operators(self, flops: Mapping[str, float], moved: float, launches: float) -> Seconds:
        """`flops` and `moved` bytes of a token; each weight is read by every pass, and its gradient added."""
        config, tokens = self.config, tokens_per_microbatch(self.config)
        experts = self.local_experts
        weights = sum(site_weights(self.model, site, work, experts) for site, work in flops.items())
        forward: dict[str, float] = {}
        for site, work in flops.items():
            kind = CLASS_OF.get(site, "dense_gemm")
            if kind != "memory":
                forward[kind] = forward.get(kind, 0.0) + tokens * work / peak(config, kind)
        read = weights * element_bytes(self.model)
        forward["memory"] = (tokens * moved + read) / memory_bandwidth(config)
        backward = {kind: BACKWARD[kind] * time for kind, time in forward.items()}
        if "grouped_gemm" in backward and _in_mx(config) and config.cluster.peak_fp8_tflops is not None:
            backward["grouped_gemm"] *= config.cluster.peak_fp8_tflops / config.cluster.peak_tflops
        products = sum(time for kind, time in forward.items() if kind.endswith("gemm"))
        backward["memory"] += ACCUMULATION * weights / memory_bandwidth(config)
        return Seconds(
            self._with_launches(forward, launches), self._with_launches(backward, 2 * launches), products
        )

    def _with_launches(self, spent: dict[str, float], launches: float) -> dict[str, float]:
        host = launches * self.config.cluster.launch_us * 1e-6
        beyond = host if self.device == "cpu" else host - sum(spent.values())
        return {**spent, "launch": max(0.0, beyond)}


def site_weights(model: ModelConfig, site: str, flops: float, experts: int) -> float:
    """Weights on a rank of a site that spends `flops` on a token."""
    if site == "experts":
        return 3.0 * model.latent_size * model.expert_ffn_size * experts
    return 0.0 if site in CLASS_OF else flops / 2


def summed(*parts: Mapping[str, float]) -> dict[str, float]:
    """By name."""
    found: dict[str, float] = {}
    for part in parts:
        for name, time in part.items():
            found[name] = found.get(name, 0.0) + time
    return found
