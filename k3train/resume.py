"""Which keys may differ between a run and its continuation: the one table behind refusals, events and docs.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .config import Config, flatten
from .errors import UserError

FREE = (
    "run.dir", "run.name", "run.resume", "run.steps", "parallel.timeout_minutes", "data.cache_dir",
    "parallel.expert.slots", "parallel.expert.transport", "quant.hold_weights", "quant.backend",
)  # fmt: skip
FREE_SECTIONS = ("log", "checkpoint", "cluster", "eval", "offload", "curriculum", "fault")
"""May differ, and change no bit of what is computed; `offload` keeps them with whatever is bitwise."""

LAYOUT = (
    "run.microbatches", "data.micro_batch_size", "run.device", "run.threads", "run.deterministic",
    "parallel.pipeline", "parallel.virtual", "parallel.context", "parallel.data", "parallel.zero",
    "parallel.microbatch_group", "parallel.layers_per_chunk", "parallel.expert.size",
    "parallel.expert.dispatcher", "parallel.expert.policy", "parallel.expert.eplb_every",
    "parallel.expert.eplb_copies", "vision.mode", "vision.attention", "quant.products",
)  # fmt: skip
LAYOUT_SECTIONS = ("model.backends",)
"""May differ, and change where and in which order the same numbers are summed: rounding, within a bound."""

BATCH = ("data.micro_batch_size", "run.microbatches", "parallel.data")
"""Their product, the samples of a step, must stay: the place in the data and the schedule count in it."""


@dataclass(frozen=True)
class Change:
    """A key that a continuation has otherwise."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {shown(self.before)} -> {shown(self.now)}"


def is_free(key: str) -> bool:
    """Whether a dotted key may differ without a change of what is computed."""
    return key in FREE or key.split(".")[0] in FREE_SECTIONS


def is_layout(key: str) -> bool:
    """Whether a dotted key says where, and in which order, things are computed."""
    return key in LAYOUT or key.startswith(tuple(f"{name}." for name in LAYOUT_SECTIONS))


def fixed_keys(config: Config) -> dict[str, Any]:
    """What a checkpoint remembers to compare with: every key that is not free, also those of the layout."""
    fixed = {key: value for key, value in flatten(config).items() if not is_free(key)}
    # ZeRO-1 and ZeRO-2 keep the same states in the same shards.
    if fixed["parallel.zero"] == 2:
        fixed["parallel.zero"] = 1
    return fixed


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Keys whose values differ, sorted; lists and tuples are the same to JSON."""
    keys = sorted(saved.keys() | current.keys())
    found = [Change(key, saved.get(key), current.get(key)) for key in keys]
    return [change for change in found if _plain(change.before) != _plain(change.now)]


def changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], free: Callable[[str], bool] = lambda key: False
) -> tuple[list[Change], list[Change]]:
    """What differs of two `fixed_keys`: (keys of the layout, keys that must stay), but for keys `free`."""
    found = [change for change in differences(saved, current) if not free(change.key)]
    layout = [change for change in found if is_layout(change.key)]
    return layout, [change for change in found if not is_layout(change.key)]


def refuse_batch(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise UserError where a step of `current` has not as many samples as one of `saved`, called `name`."""
    before, now = (_samples(values) for values in (saved, current))
    if before is None or now is None or before == now:
        return
    rest = current["data.micro_batch_size"] * current["parallel.data"]
    remedy = f"set run.microbatches={before // rest}" if before % rest == 0 else "choose factors that give it"
    raise UserError(
        f"{' x '.join(BATCH)} = {now} samples a step, and {name} has {before}; {remedy}, or change it "
        "in a new stage of curriculum.stages"
    )


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _samples(values: Mapping[str, Any]) -> int | None:
    sizes = [values.get(key) for key in BATCH]
    return math.prod(size for size in sizes if size) if all(sizes) else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
