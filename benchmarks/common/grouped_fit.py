"""Fits the coefficients of k3train/ops/grouped/cost.py to measured times.

All coefficients are kept from falling below zero, and errors count relative to the measured time.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3train.ops.grouped import cost

SWEEPS = 20_000
BUSY, HOST_BOUND = 1.5, 1.25
"""The device's terms are fitted where the whole took this much longer than the host alone, the host's where
it took less than this."""
FEWEST = 12
"""With fewer such samples than this, the device is fitted to all of them."""


@dataclass(frozen=True)
class Sample:
    """One measured product; `variant` is a backend and its order, `copied` counts weights it had to stack."""

    variant: str
    product: str
    counts: tuple[int, ...]
    inputs: int
    outputs: int
    copied: int
    total_us: float
    host_us: float


def fit(samples: list[Sample], machine: dict[str, Any], multiprocessors: int) -> dict[str, Any]:
    """What `cost.Model.read` takes, for the variants and products in `samples`."""
    device: dict[str, dict[str, list[float]]] = defaultdict(dict)
    host: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for variant, product in dict.fromkeys((s.variant, s.product) for s in samples):
        chosen = [s for s in samples if (s.variant, s.product) == (variant, product)]
        host[variant][product] = _fit_host(chosen)
        device[variant][product] = _fit_device(chosen, multiprocessors)
    return {
        "machine": machine,
        "multiprocessors": multiprocessors,
        "units": [*cost.FEATURES, "copied_megabytes"],
        "device": device,
        "host": host,
    }


def put(found: dict[str, Any], file: Path) -> None:
    """Add `found` to the list in `file`, in the place of an earlier entry of the same hardware."""
    entries = json.loads(file.read_text()) if file.exists() else []
    hardware = found["machine"]["hardware"]
    entries = [entry for entry in entries if entry["machine"]["hardware"] != hardware]
    text = json.dumps([*entries, found], indent=1)
    lists = re.compile(r"\[[^\[\]{}]*\]")
    file.write_text(lists.sub(lambda match: re.sub(r"\s+", " ", match[0]), text) + "\n")


def quality(found: dict[str, Any], samples: list[Sample]) -> list[dict[str, Any]]:
    """Expected over measured time of each variant and product: the median and the outer tenths."""
    model, rows = cost.Model.read(found), []
    for variant, product in dict.fromkeys((s.variant, s.product) for s in samples):
        ratios = sorted(
            model.microseconds(variant, product, cost.Load.of(s.counts), s.inputs, s.outputs, s.copied)
            / s.total_us
            for s in samples
            if (s.variant, s.product) == (variant, product)
        )
        tenth = len(ratios) // 10
        spread = {
            "tenth": ratios[tenth],
            "median": ratios[len(ratios) // 2],
            "nine tenths": ratios[-1 - tenth],
        }
        rows.append({"variant": variant, "product": product, "samples": len(ratios), **spread})
    return rows


def _fit_host(samples: list[Sample]) -> list[float]:
    """To the slower part of the samples: a host shared with others is slow for a while, then fast again."""
    bound = [s for s in samples if s.total_us < HOST_BOUND * s.host_us]
    samples = bound if len(bound) >= FEWEST else samples
    terms = np.array([[1.0, cost.Load.of(s.counts).groups, s.copied] for s in samples])
    times = np.array([s.total_us for s in samples])
    for _ in range(3):
        ratios = times / (terms @ non_negative(terms, times))
        if len(times) < 2 * FEWEST:
            break
        slower = ratios >= np.quantile(ratios, 0.25)
        terms, times = terms[slower], times[slower]
    return non_negative(terms, times)


def _fit_device(samples: list[Sample], multiprocessors: int) -> list[float]:
    busy = [s for s in samples if s.total_us > BUSY * s.host_us]
    samples = busy if len(busy) >= FEWEST else samples
    rows = []
    for s in samples:
        terms = cost.features(s.product, cost.Load.of(s.counts), s.inputs, s.outputs, multiprocessors)
        rows.append([*terms, s.copied * s.inputs * s.outputs * 2e-6])
    return non_negative(np.array(rows), np.array([s.total_us for s in samples]))


def non_negative(terms: np.ndarray, times: np.ndarray) -> list[float]:
    """Coefficients >= 0 with the least sum of squared relative errors, by coordinate descent.

    terms [samples, coefficients], times [samples], all above zero.
    """
    relative = terms / times[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1
    unit = relative / scale
    gram, target = unit.T @ unit, unit.T @ np.ones(len(times))
    found = np.zeros(len(target))
    for _ in range(SWEEPS):
        before = found.copy()
        for j in range(len(found)):
            if gram[j, j]:
                found[j] = max(0.0, found[j] + (target[j] - gram[j] @ found) / gram[j, j])
        if np.abs(found - before).max() < 1e-9:
            break
    return [float(f"{value:.6g}") for value in found / scale]
