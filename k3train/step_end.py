"""Seconds of a step behind its pipeline: sums of gradients, the update, balancing; and checkpoints. Needs no
torch.

Every part is that of the pipeline rank for which it is longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from parallel.topology import Topology

from . import calibration, gradient_moves
from .config import Config
from .gradient_plan import FP32
from .memory import tower_parameters
from .operators import GIGA, memory_bandwidth, peak
from .shapes import layer_kinds
from .traffic import collective_seconds, link_class, ring_bandwidth
from .weight_sums import Place, Sums, rank_sums

UPDATE_BYTES = 40
"""Moved for an element that is updated: its gradient read for the norm, scaled and read again, master and two
moments read and written, the parameter written. Muon has one moment, and its momentum goes to
Newton-Schulz."""
BLOCK_LAUNCHES = 40
"""Operators that Newton-Schulz and its update launch for a block."""


class Part(NamedTuple):
    """Of a step."""

    seconds: float
    why: str
    """What it waits for, in one sentence."""


def parts(config: Config, topology: Topology, cuts: list[range]) -> dict[str, Part]:
    """By name; those that take no time among them."""
    ranks = rank_sums(config, topology, cuts)
    update, newton_schulz = _worst(ranks, lambda place: update_seconds(config, topology, place))
    streamed = _streamed_seconds(config, topology, ranks)
    moved = gradient_moves.seconds(config, topology, ranks)
    measured = calibration.of_shapes(config)
    zero = config.parallel.zero
    sums = gradient_moves.sums_in_a_step(config)
    share = 1 / sums if zero == 2 else 1.0
    why = (
        f"the last of {sums} sums of a chunk has no backward beside it; over "
        if zero == 2
        else "gradients are summed when the last backward has ended; over "
    ) + _over(config, topology)
    gradients, gathered = (
        max(_collectives(config, topology, place)[index] for place in ranks) for index in (0, 1)
    )
    return {
        "gradient_reduce": Part(share * gradients, why),
        "vision_gradients": _tower_gradients(config, topology),
        "optimizer": Part(update, "the update follows the sum of all gradients and their norm"),
        "newton_schulz": Part(newton_schulz, "Muon's iterations follow the sum of all gradients"),
        "muon_exchange": Part(
            _muon_exchange(config, topology, ranks),
            "blocks across shards go to their owner, and their updates back; over " + _over(config, topology),
        ),
        "optimizer_offload": Part(
            max(0.0, streamed - update - newton_schulz),
            f"states pass through windows from {config.offload.optimizer} slower than they are updated",
        ),
        "gradient_offload": Part(
            moved.last + moved.back,
            f"the last sum leaves for {config.offload.gradients} when no backward is left, and all of them "
            "come back for their norm and the update",
        ),
        "parameter_gather": Part(
            gathered, "the next forward needs all updated parameters; over " + _over(config, topology)
        ),
        "balance": Part(
            _histograms(config, topology), "biases of the routers follow the step's summed histograms"
        ),
        "step": Part(measured.step if measured else 0.0, "what a step takes beside all that, as measured"),
    }


def backlog(config: Config, topology: Topology, cuts: list[range], pipeline: float) -> Part:
    """What sums of gradients on their way below the device take longer than the `pipeline` beside them."""
    if config.offload.gradients == "device":
        return Part(0.0, "")
    beside = gradient_moves.seconds(config, topology, rank_sums(config, topology, cuts)).beside
    why = f"sums of gradients take {beside:.3g} s on their way to {config.offload.gradients}, longer than all"
    return Part(max(0.0, beside - pipeline), f"{why} operations beside them")


def update_seconds(config: Config, topology: Topology, place: Place) -> tuple[float, float]:
    """Of the update of a pipeline rank's parameters: what moves through memory, and Newton-Schulz."""
    shares = (topology.data * topology.context, topology.expert_data)
    if not config.parallel.zero:
        shares = (1, 1)
    memory, products = planned_update(config, place, shares)
    shapes = calibration.of_shapes(config)
    measured = shapes.optimizer if shapes else None
    if measured is None:
        return memory, products
    # Both by the same figures of the cluster, so that these do not matter where the work is the measured one.
    scale = measured[0] / sum(planned_update(config, measured[1], (1, 1)))
    return memory * scale, products * scale


def planned_update(config: Config, place: Place, shares: tuple[int, int]) -> tuple[float, float]:
    """The same as the figures of the cluster have it, of one of `shares` equal shards of dense and expert
    parameters."""
    elements = products = 0.0
    for sums, share in zip(place, shares, strict=True):
        elements += sums.trained / share
        products += _newton_schulz(config, sums, share)
    return elements * UPDATE_BYTES / memory_bandwidth(config), products


def _newton_schulz(config: Config, sums: Sums, share: int) -> float:
    """Of the busiest owner: an even share, and at least the largest block."""
    flops = max(sums.flops / share, sums.largest) / peak(config, "newton_schulz")
    host = sums.blocks / share * BLOCK_LAUNCHES * config.cluster.launch_us * 1e-6
    # Newton-Schulz of small blocks waits for the host, and batches of equal ones less than one by one.
    return flops + host if config.cluster.gpu == "cpu" else max(flops, host / 4)


def _worst(ranks: list[Place], of: Callable[[Place], tuple[float, float]]) -> tuple[float, float]:
    return max(map(of, ranks), key=sum)


def _collectives(config: Config, topology: Topology, place: Place) -> tuple[float, float]:
    """Seconds of a rank's sums of gradients, and of the gathering of its parameters."""
    groups = ((topology.data * topology.context, 1), (topology.expert_data, topology.expert))
    reduced = gathered = 0.0
    for sums, (size, stride) in zip(place, groups, strict=True):
        ring = (size - 1) / size
        times = 1 if config.parallel.zero else 2
        reduced += collective_seconds(config, "reduce", size, stride, times * FP32 * sums.trained * ring)
        if config.parallel.zero:
            gathered += collective_seconds(config, "gather", size, stride, sums.nbytes * ring)
    return reduced, gathered


def _tower_gradients(config: Config, topology: Topology) -> Part:
    ranks, beside = topology.pipeline, topology.data * topology.context
    tower = sum(entry.numel for entry in tower_parameters(config))
    sent = 2 * (ranks - 1) / ranks * FP32 * tower
    seconds = collective_seconds(config, "reduce", ranks, beside, sent)
    seconds += collective_seconds(config, "reduce", beside, 1, 2 * (beside - 1) / beside * FP32 * tower)
    return Part(seconds, "the tower's gradients are summed over the stages, then over data ranks")


def _muon_exchange(config: Config, topology: Topology, ranks: list[Place]) -> float:
    """Blocks that lie in several shards: about one for each border between shards, gathered and returned."""
    if config.optim.name != "muon_per_head" or not config.parallel.zero:
        return 0.0
    worst = 0.0
    for place in ranks:
        spent = 0.0
        groups = ((topology.data * topology.context, 1), (topology.expert_data, topology.expert))
        for sums, (size, stride) in zip(place, groups, strict=True):
            if size > 1 and sums.blocks:
                elements = min(sums.trained / size, sums.trained / sums.blocks)
                spent += collective_seconds(config, "exchange", size, stride, 6 * elements, calls=2)
        worst = max(worst, spent)
    return worst


def _streamed_seconds(config: Config, topology: Topology, ranks: list[Place]) -> float:
    """Of optimizer states from their tier and back."""
    store, cluster = config.offload.optimizer, config.cluster
    if store == "device":
        return 0.0
    nbytes = _elements(topology, ranks) * FP32 * 3
    out, back = (
        (cluster.host_gbps, cluster.host_gbps)
        if store == "host"
        else (cluster.nvme_write_gbps, cluster.nvme_read_gbps)
    )
    return nbytes / GIGA * (1 / out + 1 / back if store != "host" else 1 / out)


def _elements(topology: Topology, ranks: list[Place]) -> float:
    """Trained elements of which the fullest rank holds gradients and states."""
    shares = (topology.data * topology.context, topology.expert_data)
    return max(sum(sums.trained / n for sums, n in zip(place, shares, strict=True)) for place in ranks)


def _histograms(config: Config, topology: Topology) -> float:
    """Three sums over the ranks with other tokens, and a gathering of what is reported."""
    model, ranks = config.model, topology.data * topology.context
    routers = sum(mlp == "moe" for _, mlp in layer_kinds(model)) / topology.pipeline
    if not routers:
        return 0.0
    sent = 2 * (ranks - 1) / ranks * routers * model.num_experts * (4 * model.balance_bins + 2 * 8)
    return collective_seconds(config, "reduce", ranks, 1, sent, calls=3)


def checkpoint(
    config: Config, topology: Topology, cuts: list[range], step: float
) -> dict[str, tuple[float, str]]:
    """What saving adds to each step on the average: copies to the host, and writing that is not done in
    time."""
    every = config.checkpoint.every
    if not every:
        return {}
    nbytes = checkpoint_bytes(config, topology, cuts)
    copied = nbytes / (config.cluster.host_gbps * GIGA) if config.cluster.gpu != "cpu" else 0.0
    written = nbytes / (config.cluster.storage_gbps * GIGA)
    waits = max(0.0, written - every * step) if config.checkpoint.asynchronous else written
    size = f"{nbytes / GIGA:.3g} GB of a rank every {every} steps"
    why = f"{size} are written while training waits"
    if config.checkpoint.asynchronous:
        beside = f"{every * step:.3g} s of training"
        why = f"{size} are copied to the host, then written in {written:.3g} s beside {beside}"
    return {"checkpoint": ((copied + waits) / every, why)}


def checkpoint_bytes(config: Config, topology: Topology, cuts: list[range]) -> float:
    """What the fullest rank writes: its share of parameters, master weights and moments."""
    worst = 0.0
    for place in rank_sums(config, topology, cuts):
        held = 0.0
        for sums, ranks in zip(place, (topology.data * topology.context, topology.expert_data), strict=True):
            held += (sums.nbytes + 3 * FP32 * sums.trained) / ranks
        worst = max(worst, held)
    return worst


def _over(config: Config, topology: Topology) -> str:
    ranks = topology.data * topology.context
    kind = link_class(config, ranks, 1)
    if kind == "none":
        return "no link"
    rate = ring_bandwidth(config, ranks, 1) / GIGA
    return f"{'links' if kind == 'link' else 'the network'} at {rate:.3g} GB/s"
