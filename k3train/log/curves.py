"""Numbers behind the report's charts: series, their reduction to what a screen can show, and axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_POINTS = 2000
SMOOTH_FROM = 120

Point = tuple[float, float]


@dataclass
class Series:
    """One metric over steps. Values that are not finite are counted, not drawn."""

    name: str
    points: list[Point] = field(default_factory=list)
    nonfinite: int = 0
    run: str = ""
    """The run that it is of, where several are on one chart; it then stands for the line."""
    place: int = 0
    """Number of that run on the page."""


def collect(records: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Every numeric metric of the records, in order of first appearance."""
    series: dict[str, Series] = {}
    for record in records:
        for name, value in record.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            line = series.setdefault(name, Series(name))
            if math.isfinite(value):
                line.points.append((record["step"], float(value)))
            else:
                line.nonfinite += 1
    return series


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the ends, and the least and the greatest of each of equal runs between."""
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    buckets = (limit - 2) // 2
    kept = [points[0]]
    for index in range(buckets):
        run = inner[index * len(inner) // buckets : (index + 1) * len(inner) // buckets]
        low, high = min(run, key=lambda point: point[1]), max(run, key=lambda point: point[1])
        kept += [low] if low == high else sorted((low, high))
    return [*kept, points[-1]]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Mean of each point's neighbours: a fiftieth of the series, less near its ends."""
    totals = [0.0, *itertools.accumulate(value for _, value in points)]
    reach, last = max(1, len(points) // 100), len(points) - 1
    smoothed = []
    for index, (step, _) in enumerate(points):
        near = min(reach, index, last - index)
        smoothed.append((step, (totals[index + near + 1] - totals[index - near]) / (2 * near + 1)))
    return smoothed


@dataclass(frozen=True)
class Axis:
    """A span of values laid over 0..1."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values within the span, about `count` of them."""
        return log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def value_axis(values: Sequence[float], *, log: bool) -> Axis:
    """An axis over `values` with a little air at both ends. A log axis needs positive values."""
    low, high = min(values), max(values)
    if log:
        air = max((high / low) ** 0.05, 1.02)
        return Axis(low / air, high * air, log=True)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    # A quantity that is never negative should not seem to be.
    bottom = max(0.0, low - air) if low >= 0 else low - air
    return Axis(bottom, high + air)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, or where they are too few, the round values between them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks[:: -(-len(ticks) // (2 * count))]
    return linear_ticks(low, high, count)


def short(value: float) -> str:
    """A value for an axis or a tile: four significant digits, thousands as k, M, G, T."""
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e4:
        return f"{value:.4g}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for power, suffix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if size >= 10**power:
            return f"{value / 10**power:.4g}{suffix}"
    return f"{value:.4g}"
