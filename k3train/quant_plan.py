"""What quantisation-aware training holds and sends, from the configuration alone. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parallel.topology import Topology

from .config import Config
from .gradient_plan import local_numel
from .quant.formats import FORMATS, GPUS_WITH_MX, native_refusal
from .shapes import BYTES, Parameter, model_dtype


def travel_share(config: Config) -> float:
    """Bytes of a routed expert on its way to another rank, over those that it has in the model's dtype."""
    if config.quant.recipe == "none":
        return 1.0
    bits = FORMATS[config.quant.weight_format].bits_per_value
    return bits / (8 * BYTES[model_dtype(config.model)])


def rounded_bytes(config: Config, topology: Topology, entries: Sequence[Parameter]) -> int:
    """The most that rounded copies of a rank's routed experts take, what travels of them included.

    Of all layers where they are held through a step, else of one layer.
    """
    if config.quant.recipe == "none":
        return 0
    layers: Counter[int | None] = Counter()
    for entry in entries:
        if entry.kind == "expert":
            layers[entry.layer] += local_numel(entry, topology) * BYTES[entry.dtype]
    held = sum(layers.values()) if config.quant.hold_weights else max(layers.values(), default=0)
    lends = config.parallel.expert.dispatcher == "moonep" and topology.expert > 1
    return int(held * (1 + travel_share(config) * lends))


def assumptions(config: Config) -> list[str]:
    """Where the forward products of quantised experts are computed, and why."""
    quant, gpu = config.quant, config.cluster.gpu
    if quant.recipe == "none":
        return []
    emulated = f"forward products of rounded experts are emulated in {config.model.dtype}"
    native = "forward products of rounded experts run in MXFP8 through Transformer Engine"
    if quant.products == "emulated":
        return [f"{emulated}: quant.products=emulated"]
    if quant.products == "te":
        return [f"{native}: quant.products=te"]
    if refusal := native_refusal(quant.weight_format, quant.activation_format):
        return [f"{emulated}: {refusal}"]
    if config.model.dtype != "bfloat16":
        return [f"{emulated}: tensor cores for MX blocks are used from bfloat16"]
    if gpu not in GPUS_WITH_MX:
        return [f"{emulated}: cluster.gpu={gpu} is not known to have tensor cores for MX blocks"]
    return [f"{native} where `k3train doctor` finds that it can on {gpu}, else they are emulated"]
