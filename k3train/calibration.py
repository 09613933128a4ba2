"""What `k3train bench calibrate` measured on a machine, as a configuration holds it. Needs no torch.

The file is JSON:

    {"schema": 2, "machine": {...}, "cluster": {keys of `cluster`}, "measured": {
       "collectives": {name: [seconds of an empty one, bytes a second]},
       "shapes": {SHAPE: {PROCESSES: {
          "layers": {"kda+moe": {SOURCES: [forward, backward]}}, "output": [forward, backward],
          "input": forward, "operation": [forward, backward], "step": seconds,
          "optimizer": {"seconds": of the update, "dense": {...}, "experts": {...}}}}}}}

SHAPE names widths, tokens, experts of a rank and dtype (`shape_key`), PROCESSES ranks that ran at once on the
machine, which share its memory, and SOURCES those of both AttnRes sites of a layer. Times are seconds of a
micro-batch. `dense` and `experts` are the sums (`weight_sums.Sums`) of the parameters that were updated. A
name of `collectives` is reduce, gather, exchange or message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ClusterConfig, Config
from .errors import UserError
from .microbatch import tokens_per_microbatch
from .weight_sums import Place, Sums

SCHEMA = 2
NOT_SHAPES = ("num_layers", "num_dense_layers", "full_attention_every", "attn_res_block_size", "num_experts")
"""Keys of the model that change which layers there are, not what one of them takes; experts by rank."""
Pair = tuple[float, float]


def shape_key(config: Config) -> str:
    """Name of all that the times of a layer depend on: two configurations with the same one agree in them."""
    model = {name: value for name, value in vars(config.model).items() if name not in NOT_SHAPES}
    model["backends"] = vars(config.model.backends)
    facts = {
        "model": model,
        "experts": config.model.num_experts // max(1, config.parallel.expert.size),
        "tokens": [tokens_per_microbatch(config), config.data.sequence_length],
        "quant": config.quant.recipe,
        "threads": config.run.threads,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return f"d{config.model.hidden_size}-t{tokens_per_microbatch(config)}-e{facts['experts']}-{digest}"


@dataclass(frozen=True)
class Shapes:
    """Times of the layers of one shape."""

    content: Mapping[str, Any]

    def layer(self, kind: str, sources: int) -> Pair | None:
        """Forward and backward of a layer of `kind`, as kda+moe, at the nearest number of sources."""
        found = self.content["layers"].get(kind)
        if not found:
            return None
        nearest = min(found, key=lambda count: abs(int(count) - sources))
        forward, backward = found[nearest]
        return forward, backward

    @property
    def output(self) -> Pair | None:
        """Of what stands behind the last layer."""
        found = self.content.get("output")
        return (found[0], found[1]) if found else None

    @property
    def operation(self) -> Pair:
        """That an operation of the pipeline takes beside its layers."""
        found = self.content.get("operation", (0.0, 0.0))
        return found[0], found[1]

    @property
    def step(self) -> float:
        """Of a step beside its operations and the update."""
        return float(self.content.get("step", 0.0))

    @property
    def optimizer(self) -> tuple[float, Place] | None:
        """Seconds of an update, and what was updated."""
        found = self.content.get("optimizer")
        if not found:
            return None
        return found["seconds"], (Sums(**found["dense"]), Sums(**found["experts"]))


def of_shapes(config: Config) -> Shapes | None:
    """What was measured of this configuration's layers, with as many ranks on the machine as come nearest."""
    found = config.cluster.measured.get("shapes", {}).get(shape_key(config))
    if not found:
        return None
    cluster = config.cluster
    ranks = cluster.ranks_per_node or cluster.gpus_per_node
    nearest = min(found, key=lambda count: abs(int(count) - ranks))
    return Shapes(found[nearest])


def collective(config: Config, name: str) -> Pair | None:
    """Seconds of an empty collective, and bytes a second, where they were measured."""
    found = config.cluster.measured.get("collectives", {}).get(name)
    return (found[0], found[1]) if found else None


def read(path: str) -> dict[str, Any]:
    """The content of a calibration's file. Raises UserError where it is something else."""
    try:
        content = json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise UserError(
            f"cluster.calibration={path}: cannot be read ({error.strerror or error}); "
            "`k3train bench calibrate out=FILE` writes one"
        ) from error
    except ValueError as error:
        raise UserError(f"cluster.calibration={path}: is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UserError(
            f"cluster.calibration={path}: has no calibration of schema {SCHEMA}; "
            "`k3train bench calibrate out=FILE` writes one"
        )
    return content


def apply(cluster: ClusterConfig, content: Mapping[str, Any], given: set[str]) -> ClusterConfig:
    """A cluster with a file's figures, but for keys that are `given` (dotted, as `cluster.link_gbps`).

    Raises UserError for a key that a cluster does not have.
    """
    changed = dataclasses.replace(cluster, efficiency=dataclasses.replace(cluster.efficiency))
    changed.measured = dict(content.get("measured", {}))
    for key, value in content.get("cluster", {}).items():
        section, _, name = key.rpartition(".")
        owner = changed.efficiency if section == "efficiency" else changed
        if not hasattr(owner, name or key) or section not in ("", "efficiency"):
            raise UserError(f"cluster.calibration={cluster.calibration}: cluster.{key} is no key")
        if f"cluster.{key}" not in given:
            setattr(owner, name, value)
    return changed


def assumption(config: Config) -> str:
    """What the times of layers rest on, in a line."""
    cluster = config.cluster
    if cluster.calibration is None:
        return f"operators reach the shares of the hardware entry {cluster.name} (cluster.efficiency)"
    if of_shapes(config) is None:
        return (
            f"{cluster.calibration} was measured at other shapes: layers take the entry's shares; "
            "`k3train bench calibrate` with this configuration measures its own"
        )
    return f"layers, update and collectives take what {cluster.calibration} measured"
