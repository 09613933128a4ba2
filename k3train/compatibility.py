"""Which features meet: the one table behind the refusals of `validate` and the table in the docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from .activation_policy import LAYER, TOWER_LAYER, policy_of, recomputes
from .config import Config


@dataclass(frozen=True)
class Feature:
    """Something a configuration turns on."""

    name: str
    key: str
    """The key that a refusal names."""
    settings: tuple[str, ...]
    """Overrides that turn it on."""
    active: Callable[[Config], bool]


@dataclass(frozen=True)
class Refusal:
    """Why two features (or one, when both names are equal) cannot run, and what to do about it."""

    first: str
    second: str
    why: str


FEATURES = (
    Feature("pipeline", "parallel.pipeline", ("parallel.pipeline=2",), lambda c: c.parallel.pipeline > 1),
    Feature(
        "virtual stages",
        "parallel.virtual",
        ("parallel.pipeline=2", "parallel.virtual=2"),
        lambda c: c.parallel.virtual > 1,
    ),
    Feature(
        "uneven cut",
        "parallel.layers_per_chunk",
        ("parallel.pipeline=2", "parallel.virtual=2", "parallel.layers_per_chunk=[3,1,3,2]"),
        lambda c: c.parallel.layers_per_chunk is not None,
    ),
    Feature(
        "expert parallelism",
        "parallel.expert.size",
        ("parallel.expert.size=2",),
        lambda c: c.parallel.expert.size > 1,
    ),
    Feature(
        "MoonEP",
        "parallel.expert.dispatcher",
        ("parallel.expert.size=2", "parallel.expert.dispatcher=moonep"),
        lambda c: c.parallel.expert.dispatcher == "moonep",
    ),
    Feature("data parallelism", "parallel.data", ("parallel.data=2",), lambda c: (c.parallel.data or 1) > 1),
    Feature(
        "context parallelism", "parallel.context", ("parallel.context=2",), lambda c: c.parallel.context > 1
    ),
    Feature("ZeRO-1", "parallel.zero", ("parallel.zero=1",), lambda c: c.parallel.zero == 1),
    Feature("ZeRO-2", "parallel.zero", ("parallel.zero=2",), lambda c: c.parallel.zero == 2),
    Feature(
        "gradients off device",
        "offload.gradients",
        ("offload.gradients=host",),
        lambda c: c.offload.gradients != "device",
    ),
    Feature(
        "states off device",
        "offload.optimizer",
        ("offload.optimizer=host",),
        lambda c: c.offload.optimizer != "device",
    ),
    Feature("AdamW", "optim.name", ("optim=adamw",), lambda c: c.optim.name == "adamw"),
    Feature("Muon", "optim.name", ("optim=muon",), lambda c: c.optim.name == "muon"),
    Feature(
        "Per-Head Muon", "optim.name", ("optim=muon_per_head",), lambda c: c.optim.name == "muon_per_head"
    ),
    Feature(
        "host activations",
        "offload.policy",
        ("offload.policy=host",),
        lambda c: "host" in policy_of(c).tiers(),
    ),
    Feature(
        "peer activations",
        "offload.policy",
        ("parallel.pipeline=2", "offload.policy=peer"),
        lambda c: "peer" in policy_of(c).tiers(),
    ),
    Feature(
        "nvme activations",
        "offload.policy",
        ("offload.policy=nvme", "offload.nvme_dir=scratch"),
        lambda c: "nvme" in policy_of(c).tiers(),
    ),
    Feature(
        "FP8 activations",
        "offload.policy",
        ("offload.policy=fp8_host",),
        lambda c: any(storage.fp8 for storage in policy_of(c).values()),
    ),
    Feature("QAT", "quant.recipe", ("quant=mxfp4_qat",), lambda c: c.quant.recipe != "none"),
    Feature("BF16", "model.dtype", ("model.dtype=bfloat16",), lambda c: c.model.dtype == "bfloat16"),
    Feature("recompute", "offload.policy", ("offload.policy=recompute",), lambda c: recomputes(c, LAYER)),
    Feature("dense model", "model.num_experts", ("model.num_experts=0",), lambda c: c.model.num_experts == 0),
    Feature("MTP", "model.mtp_layers", ("model.mtp_layers=1",), lambda c: c.model.mtp_layers > 0),
    Feature("vision", "vision.enabled", ("vision=tiny", "data.images=[digits]"), lambda c: c.vision.enabled),
    Feature(
        "vision recompute",
        "offload.sites",
        ("vision=tiny", "data.images=[digits]", "offload.sites={vit.layer: recompute}"),
        lambda c: c.vision.enabled and recomputes(c, TOWER_LAYER),
    ),
)

REFUSALS = (
    Refusal("QAT", "dense model", "only routed experts are quantised; use quant=none"),
    Refusal("MoonEP", "dense model", "a dense model has no experts to balance; use alltoall"),
    Refusal(
        "gradients off device",
        "Muon",
        "its gradients are not sharded; use optim=muon_per_head or adamw, or offload.gradients=device",
    ),
    Refusal(
        "Muon",
        "ZeRO-1",
        "a shard of a matrix cannot be orthogonalised, and megatron-core would train on silently; "
        "use parallel.zero=0 or optim=adamw",
    ),
    Refusal(
        "Muon",
        "ZeRO-2",
        "a shard of a matrix cannot be orthogonalised, and megatron-core would train on silently; "
        "use parallel.zero=0 or optim=adamw",
    ),
    Refusal(
        "gradients off device",
        "ZeRO-1",
        "a whole gradient buffer is in use from the first backward to the last; use parallel.zero=2",
    ),
    Refusal(
        "states off device",
        "Muon",
        "its matrices are not sharded; use optim=adamw, or offload.optimizer=device",
    ),
    Refusal(
        "states off device",
        "Per-Head Muon",
        "only AdamW's states are streamed; use optim=adamw, or offload.optimizer=device",
    ),
    Refusal(
        "expert parallelism",
        "dense model",
        "a dense model has no experts to spread; use parallel.expert.size=1",
    ),
)


def find(name: str) -> Feature:
    """The feature called `name`."""
    return next(feature for feature in FEATURES if feature.name == name)


def refusal(first: str, second: str) -> Refusal | None:
    """Why the two cannot meet, or None. A feature that is refused alone is refused with every other."""
    for entry in REFUSALS:
        alone = entry.first == entry.second and entry.first in (first, second)
        if alone or {entry.first, entry.second} == {first, second}:
            return entry
    return None


def clash(config: Config) -> Refusal | None:
    """The first refusal that a configuration meets, or None."""
    for entry in REFUSALS:
        if find(entry.first).active(config) and find(entry.second).active(config):
            return entry
    return None


def exclusive(first: str, second: str) -> bool:
    """Whether the two are values of one key, so that no configuration can ask for both."""
    return first != second and find(first).key == find(second).key


def pairs() -> list[tuple[str, str]]:
    """Every unordered pair of features that one configuration can ask for."""
    names = [feature.name for feature in FEATURES]
    return [pair for pair in combinations(names, 2) if not exclusive(*pair)]


def markdown() -> str:
    """The table as the docs print it: `yes`, a number that refers to the reason below, or `-`."""
    names = [feature.name for feature in FEATURES]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row, first in enumerate(names):
        cells = [_cell(first, second) if column <= row else "" for column, second in enumerate(names)]
        lines.append(f"| **{first}** | " + " | ".join(cells) + " |")
    reasons = [f"{number}. {_title(entry)}: {entry.why}." for number, entry in enumerate(REFUSALS, start=1)]
    return "\n".join([*lines, "", *reasons])


def _title(entry: Refusal) -> str:
    return entry.first if entry.first == entry.second else f"{entry.first} with {entry.second}"


def _cell(first: str, second: str) -> str:
    if exclusive(first, second):
        return "-"
    entry = refusal(first, second)
    return "yes" if entry is None else f"no ({REFUSALS.index(entry) + 1})"
