"""Seconds of a model chunk's forward and backward for a micro-batch, by what they are spent on. Needs no
torch.

Computing is `operators`'; exchanges between expert-parallel and context-parallel ranks stand in the operation
that waits for them. What a policy of activations adds is `activation_time`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallel.topology import Topology

from .activation_policy import LAYER, recomputes
from .config import Config
from .context_traffic import layer_traffic as context_layer
from .expert_plan import pass_traffic
from .microbatch import tokens_per_microbatch
from .operators import Operators, summed
from .shapes import layer_kinds
from .traffic import collective_seconds, exchange_seconds, moe_layers

RECOMPUTE, OPERATION = "recompute", "operation"
EXPERTS, CONTEXT = "expert_exchange", "context_exchange"
ROWS, WEIGHTS = ("expert_dispatch", "expert_combine"), ("expert_weights", "expert_weight_gradients")
BORROWED = "expert_weights"
"""What a pass of MoonEP spends on weights of borrowed experts and their gradients."""


@dataclass(frozen=True)
class Work:
    """One chunk."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    weight: float
    """The part of `backward` that makes gradients of weights."""

    @property
    def seconds(self) -> tuple[float, float]:
        """Of forward and backward."""
        return sum(self.forward.values()), sum(self.backward.values())


def stage_work(config: Config, topology: Topology, cuts: list[range], *, layered: bool) -> list[Work]:
    """Every chunk in the order of the forward pass; under `layered` its decoder layers are run again."""
    operators = Operators(config)
    experts = _expert_exchanges(config, topology)
    context = _context_exchanges(config, topology)
    beside = operators.measured.operation if operators.measured else (0.0, 0.0)
    found = []
    for layers in cuts:
        own = operators.stage(layers)
        ahead, back = _exchanges(config, layers, experts, context)
        again: dict[str, float] = {}
        if layered:
            decoder = sum(sum(operators.layer(layer).forward.values()) for layer in layers)
            again = {RECOMPUTE: decoder, **ahead}
        found.append(
            Work(
                summed(own.forward, ahead, {OPERATION: beside[0]}),
                summed(own.backward, back, again, {OPERATION: beside[1]}),
                own.weight,
            )
        )
    return found


def base_costs(
    config: Config, topology: Topology, cuts: list[range], *, layered: bool
) -> tuple[list[float], list[float]]:
    """Seconds of each stage's forward and backward; under `layered` its decoder layers are run again."""
    works = [work.seconds for work in stage_work(config, topology, cuts, layered=layered)]
    return [forward for forward, _ in works], [backward for _, backward in works]


Passes = tuple[dict[str, float], dict[str, float]]
"""Seconds by name, forward and backward."""


def _exchanges(config: Config, layers: range, experts: Passes, context: dict[str, Passes]) -> Passes:
    """Of all layers of a chunk."""
    count = moe_layers(config.model, layers)
    ahead = {name: count * time for name, time in experts[0].items()}
    back = {name: count * time for name, time in experts[1].items()}
    if context:
        kinds = [kind for kind, _ in layer_kinds(config.model)]
        attentions = [kinds[layer] for layer in layers]
        if config.model.mtp_layers and layers.stop == config.model.num_layers:
            attentions.append(kinds[-1])
        for kind in attentions:
            ahead, back = summed(ahead, context[kind][0]), summed(back, context[kind][1])
    return ahead, back


def _expert_exchanges(config: Config, topology: Topology) -> Passes:
    """Of one MoE layer: rows on their way, and under MoonEP weights."""
    if topology.expert == 1 or not config.model.num_experts:
        return {}, {}
    found = []
    for sent in pass_traffic(config, topology, tokens_per_microbatch(config)):
        rows = sum(size for name, size in sent.items() if name in ROWS)
        weights = sum(size for name, size in sent.items() if name in WEIGHTS)
        spent = {EXPERTS: exchange_seconds(config, topology, rows, calls=len(ROWS))}
        if weights:
            calls = sum(name in sent for name in WEIGHTS)
            spent[BORROWED] = exchange_seconds(config, topology, weights, calls=calls)
        found.append(spent)
    return found[0], found[1]


def _context_exchanges(config: Config, topology: Topology) -> dict[str, Passes]:
    """Of one layer of each kind of attention."""
    if topology.context == 1:
        return {}
    passes = 2 + recomputes(config, LAYER)
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in layer_kinds(config.model)):
        sent = sum(context_layer(config, kind).values()) / passes
        once = {CONTEXT: collective_seconds(config, "gather", topology.context, 1, sent)}
        found[kind] = once, once
    return found
