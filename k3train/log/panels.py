"""The panels of a run, defined once for TensorBoard, wandb and the report page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

BEFORE_BALANCE = "moe/unbiased_load_max_over_mean/layer_*"
AFTER_BALANCE = "moe/expert_load_max_over_mean/layer_*"


@dataclass(frozen=True)
class Panel:
    """One chart: the metrics on it share a unit and an axis."""

    section: str
    title: str
    metrics: tuple[str, ...]
    """Names; a `*` stands for any run of characters other than a slash."""
    unit: str = ""
    scale: str = "linear"
    """linear or log: how the value axis is first shown."""
    smooth: bool = False
    """Draw a moving average over the raw values of long series."""
    summary: str = "last"
    """last, min or max: the value that stands for the whole run in a table of runs."""

    def select(self, names: Iterable[str]) -> list[str]:
        """The metrics of this panel among `names`, in the panel's order, layers by number."""
        known = set(names)
        chosen: list[str] = []
        for pattern in self.metrics:
            regex = re.compile(as_regex(pattern))
            chosen += sorted((name for name in known if regex.fullmatch(name)), key=natural_key)
        return list(dict.fromkeys(chosen))

    @property
    def by_layer(self) -> bool:
        return any(pattern.endswith("layer_*") for pattern in self.metrics)


def with_mtp(layers: str) -> tuple[str, str]:
    """A pattern of layers, and the same metric of the MTP layer."""
    return layers, layers.replace("layer_*", "mtp")


PANELS = (
    Panel("Loss", "Loss", ("loss", "mtp_loss", "val_loss"), "nats per token", smooth=True, summary="min"),
    Panel("Loss", "Held-out captions", ("caption_accuracy",), "share named rightly", summary="max"),
    Panel("Loss", "Codes found in the window", ("needle_accuracy",), "share", summary="max"),
    Panel("Optimizer", "Learning rate", ("lr",)),
    Panel("Optimizer", "Gradient norm", ("grad_norm",), scale="log", smooth=True),
    Panel("Loss", "Skipped steps", ("skipped_steps",), "steps", summary="max"),
    Panel("Throughput", "Tokens per second", ("tokens_per_second",), "tokens/s", smooth=True),
    Panel("Throughput", "Model compute of a rank", ("tflops_per_rank",), "TFLOP/s", smooth=True),
    Panel("Throughput", "Model FLOP utilisation", ("mfu",), "share of peak", smooth=True),
    Panel("Throughput", "Unmasked tokens of a step", ("tokens",), "tokens"),
    Panel("Throughput", "Window of the stage", ("sequence_length",), "tokens"),
    Panel(
        "Experts", "Expert load before balancing", with_mtp(BEFORE_BALANCE), "max over mean", summary="max"
    ),
    Panel("Experts", "Expert load after balancing", with_mtp(AFTER_BALANCE), "max over mean", summary="max"),
    Panel("Experts", "Router bias range", with_mtp("moe/bias_range/layer_*"), "max minus min"),
    Panel("Experts", "Rows of a rank", ("moe_rows_max_over_mean",), "max over mean", summary="max"),
    Panel(
        "MoonEP",
        "Rows of a rank before and after balancing",
        ("moonep/max_over_mean_before", "moonep/max_over_mean_after"),
        "max over mean",
        summary="max",
    ),
    Panel("MoonEP", "Borrowed experts of a rank", ("moonep/replicas_mean", "moonep/replicas_max"), "experts"),
    Panel(
        "MoonEP",
        "Rows moved and padding",
        ("moonep/moved_share", "moonep/padding_share"),
        "share of all rows",
    ),
    Panel("MoonEP", "Waves of a layer", ("moonep/waves_mean",), "waves"),
    Panel("MoonEP", "Time to plan a layer", ("moonep/plan_ms",), "milliseconds", scale="log"),
    Panel("MoonEP", "Borrowed weights of a layer and pass", ("moonep/prefetch_bytes",), "bytes"),
    Panel("MoonEP", "Rows sent for a layer and pass", ("moonep/entries_sent", "moonep/rows_sent"), "rows"),
    Panel("System", "Own time of the slowest rank", ("rank_time_max_over_median",), "max over median"),
    Panel("System", "Slowest rank", ("rank_time_slowest",), "rank"),
    Panel("System", "Memory", ("memory/*",), "GiB", summary="max"),
    Panel("System", "Time by phase", ("time/*",), "seconds per step", scale="log"),
)


def as_regex(pattern: str) -> str:
    """A pattern of a panel as a regular expression for the whole name."""
    return "[^/]*".join(re.escape(part) for part in pattern.split("*"))


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer_2 comes before layer_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def sections(panels: Iterable[Panel] = PANELS) -> dict[str, list[Panel]]:
    """Panels by section, in order."""
    grouped: dict[str, list[Panel]] = {}
    for panel in panels:
        grouped.setdefault(panel.section, []).append(panel)
    return grouped
