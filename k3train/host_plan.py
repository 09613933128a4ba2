"""Host memory that states and activations of a rank take where they are not on its device. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.pipeline.rows import RowPlan
from parallel.pipeline.table import Table
from parallel.topology import Topology

from . import activation_ledger
from .activation_policy import policy_of
from .config import Config
from .gradient_plan import FP32
from .memory import Parts, rank_activations
from .weight_sums import rank_sums

MASTER_AND_MOMENTS = 3
"""FP32 numbers of an element whose optimizer state is in host memory."""


def host_ledgers(
    config: Config, topology: Topology, cuts: list[range], table: Table, rows: RowPlan, parts: Parts = ()
) -> list[dict[str, int]]:
    """Bytes by kind on a rank of each pipeline stage; none of what does not lie there."""
    found = _states(config, topology, cuts)
    if any(storage.tier == "host" for storage in policy_of(config).values()):
        stages = activation_ledger.stages(config, cuts, rows)
        for ledger, held in zip(found, rank_activations(config, table, stages, parts), strict=True):
            ledger["activations"] = held.tiers.get("host", 0)
    return found


def limit(config: Config) -> float:
    """Bytes of a rank; infinite where `cluster.host_gib` does not say."""
    given = config.cluster.host_gib
    return float("inf") if given is None else given * 2**30


def fullest(ledgers: Sequence[dict[str, int]]) -> int:
    """Bytes of the rank that holds most."""
    return max(sum(ledger.values()) for ledger in ledgers)


def warning(config: Config, ledgers: Sequence[dict[str, int]]) -> str:
    """One line where it is more than there is, else empty."""
    held, most = fullest(ledgers), limit(config)
    if held <= most:
        return ""
    largest = max(ledgers, key=lambda ledger: sum(ledger.values()))
    kinds = ", ".join(f"{kind} {size / 2**30:.3g}" for kind, size in largest.items() if size)
    return (
        f"host memory of a rank: {held / 2**30:.4g} GiB ({kinds}) of "
        f"cluster.host_gib={config.cluster.host_gib}; more data ranks share the states, or keep them there"
    )


def _states(config: Config, topology: Topology, cuts: list[range]) -> list[dict[str, int]]:
    """Shards of gradients under ZeRO-2, and optimizer states."""
    shares = (topology.data * topology.context, topology.expert_data)
    offload, found = config.offload, []
    for place in rank_sums(config, topology, cuts):
        elements = sum(sums.trained / ranks for sums, ranks in zip(place, shares, strict=True))
        ledger = {}
        if config.parallel.zero == 2 and offload.gradients == "host":
            ledger["gradients"] = int(FP32 * elements)
        if offload.optimizer == "host":
            ledger["optimizer"] = int(MASTER_AND_MOMENTS * FP32 * elements)
        found.append(ledger)
    return found
