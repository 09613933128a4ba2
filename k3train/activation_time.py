"""Seconds that a policy of activations adds to the operations of a stage. Needs no torch.

Running a region again, or whole layers, takes what `operators` says. FP8 is read and written once in each
direction. A copy is hidden beside its own operation, and beside what follows as far as the window in flight
goes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.pipeline.rows import RowPlan

from . import activation_bytes, activation_costs
from .activation_ledger import Sizes, moved, place, recomputed, stages
from .activation_policy import LAYER, MTP_LAYER, policy_of, policy_of_rank
from .activation_sites import Cost
from .config import ClusterConfig, Config
from .flops import site_sources
from .microbatch import element_bytes
from .operators import Operators, known_layer_costs, memory_bandwidth
from .operators import region_seconds as seconds_of
from .shapes import layer_kinds

GIGA = 1e9
LATENCY = 2e-4
"""Seconds from asking a tier to its first byte, at the most."""
WHOLE_LAYERS = (LAYER, MTP_LAYER)


@dataclass(frozen=True)
class Rates:
    """GB/s of a tier for one rank."""

    out: float
    back: float


def rates(cluster: ClusterConfig) -> dict[str, Rates]:
    """Of every tier."""
    peer = cluster.link_gbps if cluster.peer_gbps is None else cluster.peer_gbps
    return {
        "host": Rates(cluster.host_gbps, cluster.host_gbps),
        "peer": Rates(peer, peer),
        "nvme": Rates(cluster.nvme_write_gbps, cluster.nvme_read_gbps),
    }


def region_seconds(config: Config, cuts: Sequence[range]) -> list[dict[str, float]]:
    """What running each region of each stage again takes for a micro-batch."""
    operators, known = Operators(config), _Regions(config)
    found = []
    for number, layers in enumerate(cuts):
        spent: dict[str, float] = defaultdict(float)
        for layer in layers:
            for region, seconds in known.of_layer(layer).items():
                spent[region] += seconds
            spent[LAYER] += sum(operators.layer(layer).forward.values())
        if number == len(cuts) - 1:
            for region, seconds in known.of_output().items():
                spent[region] += seconds
        found.append(dict(spent))
    return found


class _Regions:
    """Seconds of the regions of a layer, each kind of layer looked at once."""

    def __init__(self, config: Config) -> None:
        self.config, self.device = config, activation_bytes.device_type(config)
        self.kinds = layer_kinds(config.model)
        self._known: dict[object, dict[str, float]] = {}

    def of_layer(self, layer: int) -> dict[str, float]:
        """But for the whole of it."""
        key = self.kinds[layer], site_sources(self.config.model, layer)
        if key not in self._known:
            self._known[key] = self._seconds(known_layer_costs(self.config, layer, self.device))
        return self._known[key]

    def of_output(self) -> dict[str, float]:
        """Behind the last layer, the MTP layer as a whole among them."""
        behind = activation_costs.output_costs(self.config, self.device)
        ahead = activation_costs.mtp_costs(self.config, self.device)
        return {**self._seconds(behind), **self._seconds(ahead)}

    def _seconds(self, costs: Mapping[str, Cost]) -> dict[str, float]:
        return {
            region: seconds_of(self.config, region, cost) for region, cost in costs.items() if region != LAYER
        }


def coding_seconds(config: Config, size: Sizes) -> float:
    """Of a site's tensors into FP8, or back."""
    element = element_bytes(config.model)
    return size.model * (1 + 1 / element) / memory_bandwidth(config)


def window_seconds(config: Config, gigabytes_a_second: float) -> float:
    """For which a tier works on what the window of bytes in flight holds."""
    return (config.offload.inflight_mib << 20) / (gigabytes_a_second * GIGA)


def operations_ahead(config: Config, seconds: Sequence[float]) -> int:
    """How many operations before a backward its tensors must be asked for.

    So many that the shortest ones, of `seconds`, last as long as the slowest tier needs to fill the window.
    """
    used, speeds = policy_of(config).tiers(), rates(config.cluster)
    needed = [LATENCY + window_seconds(config, speeds[tier].back) for tier in used]
    return max(1, math.ceil(max(needed, default=0.0) / min(seconds)))


@dataclass(frozen=True)
class Added:
    """To the operations of one stage for a micro-batch, seconds."""

    recompute: float = 0.0
    """To the backward: regions that are run again; decoder layers as a whole are left out."""
    coding: float = 0.0
    """To either, for FP8."""
    waits_out: float = 0.0
    """To the forward, for tiers that take longer than it does."""
    waits_back: float = 0.0
    """To the backward, likewise."""


def added(
    config: Config,
    cuts: Sequence[range],
    rows: RowPlan,
    forward: Sequence[float],
    backward: Sequence[float],
) -> list[Added]:
    """What the policy adds to each stage, whose operations take `forward` and `backward` seconds without."""
    policy = policy_of(config)
    if not any(storage.recompute or storage.fp8 or storage.tier for storage in policy.values()):
        return [Added() for _ in cuts]
    # What is held matters where some of it is coded or moves, and takes long to list.
    held = any(storage.fp8 or storage.tier for storage in policy.values())
    listed = stages(config, cuts, rows) if held else [None] * len(cuts)
    found = []
    for number, (stage, spent) in enumerate(zip(listed, region_seconds(config, cuts), strict=True)):
        own = policy_of_rank(config, rows.layout.home(number)[0])
        sizes = stage.sizes(recomputed(policy), config.offload.min_kib << 10) if stage else {}
        again = sum(
            time
            for region, time in spent.items()
            if region != LAYER and own.storage(region).recompute and not _is_inside(config, region)
        )
        coding = sum(coding_seconds(config, size) for site, size in sizes.items() if own.storage(site).fp8)
        away: dict[str, float] = defaultdict(float)
        for site, size in sizes.items():
            storage = own.storage(site)
            if storage.tier is not None:
                away[place(storage)] += moved(size, storage, element_bytes(config.model))
        out, back = waits(config, away, forward[number], backward[number] + again)
        found.append(Added(again, coding, out, back))
    return found


def _is_inside(config: Config, region: str) -> bool:
    """Whether a region lies in layers that are run again as a whole."""
    policy = policy_of(config)
    whole = MTP_LAYER if region.startswith("mtp.") else LAYER
    ends = ("head", "mtp.head", "mtp.input", MTP_LAYER)
    return region not in ends and policy.storage(whole).recompute


def waits(config: Config, away: Mapping[str, float], forward: float, backward: float) -> tuple[float, float]:
    """Seconds that copies of `away` bytes by tier last beyond a forward, and beyond a backward."""
    out = back = 0.0
    for tier, speed in rates(config.cluster).items():
        size = away.get(tier, 0.0) / GIGA
        out += max(0.0, size / speed.out - forward - window_seconds(config, speed.out))
        back += max(0.0, size / speed.back - backward - window_seconds(config, speed.back))
    return out, back
