"""What a grouped product will cost with each backend, from sizes that the host knows before the launch.

A backend's time is the larger of two sums with calibrated coefficients, in microseconds: what the host needs
to launch it, and what the device needs to run it. The device's sum has a term for each of FEATURES: the plain
work, the work after rounding up to tiles and to full waves of tiles over all multiprocessors (a loop of
products pays whole waves for every group), bytes moved and copied. Coefficients belong to a machine;
`benchmarks/grouped_gemm.py --calibrate` measures them. No torch here.

Letters: i inputs, o outputs of a weight [o, i]; n, k sides of a GEMM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

PRODUCTS = ("multiply", "input_gradient", "weight_gradients")
FEATURES = ("launch", "groups", "gflop", "tile_gflop", "wave_gflop", "tiles", "ragged_gflop", "megabytes")
"""Terms of the device's time, beside `copied_megabytes` of weights that a backend has to stack."""
LARGEST_FIRST = "+largest_first"
"""Behind a backend's name: its groups launched in falling order of their rows."""

ORDER_GAIN = 0.95
"""Groups are reordered where that promises to take less than this part of the time."""

TILE = 128
K_STEP = 64
ALIGNED = 8
"""Weight gradients sum over a group's rows; cuBLAS can be slower where they are no multiple of this."""

_STEPS_PER_OCTAVE = 32


@dataclass(frozen=True)
class Load:
    """How rows are spread over groups, as sums rounded to a 32nd of an octave (2 %).

    A choice depends on nothing finer, so that loads which call for the same launch share an entry of the
    cache, and a run that is repeated or resumed makes the same choices.
    """

    groups: int
    """Those that have rows."""
    rows: int
    tiles: int
    """Sum over groups of rows / TILE, rounded up."""
    steps: int
    """Sum over groups of rows / K_STEP, rounded up."""
    aligned: bool
    """Whether the rows of every group are a multiple of ALIGNED."""

    @classmethod
    def of(cls, counts: Sequence[int]) -> Load:
        """The load of the rows of each group."""
        filled = [count for count in counts if count]
        # Without a call for each count: this is host time of every product.
        tiles = sum([-(-count // TILE) for count in filled])
        steps = sum([-(-count // K_STEP) for count in filled])
        aligned = math.gcd(*filled) % ALIGNED == 0
        return cls(len(filled), _rounded(sum(filled)), _rounded(tiles), _rounded(steps), aligned)


@dataclass(frozen=True)
class Choice:
    """How to run a product."""

    backend: str
    largest_first: bool = False


@dataclass(frozen=True, eq=False)
class Model:
    """Coefficients of one machine.

    `device`, `host`: by "backend" or "backend+largest_first", then by product; in microseconds for each unit
    of FEATURES and of a copied megabyte, and for each of (launch, group, copied weight).
    """

    machine: str
    multiprocessors: int
    device: dict[str, dict[str, tuple[float, ...]]]
    host: dict[str, dict[str, tuple[float, ...]]]

    @classmethod
    def read(cls, described: dict[str, Any]) -> Model:
        """From the JSON that a calibration writes."""
        device, host = (
            {name: {p: tuple(c) for p, c in by.items()} for name, by in described[side].items()}
            for side in ("device", "host")
        )
        return cls(described["machine"]["hardware"], described["multiprocessors"], device, host)

    def microseconds(
        self, variant: str, product: str, load: Load, inputs: int, outputs: int, copied: int = 0
    ) -> float:
        """Expected time of `product` with `variant`; `copied` weights have to be stacked first."""
        if variant.partition("+")[0] != "grouped_mm":
            copied = 0
        terms = features(product, load, inputs, outputs, self.multiprocessors)
        device = self.device[variant][product]
        host = self.host[variant][product]
        on_device = sum(map(float.__mul__, device, terms)) + device[-1] * copied * inputs * outputs * 2e-6
        return max(on_device, host[0] + host[1] * load.groups + host[2] * copied)


@cache
def model_for(hardware: str) -> Model:
    """The calibrated model of this device; of the first calibrated one where it has none of its own."""
    models = [Model.read(entry) for entry in json.loads(_file().read_text())]
    return next((model for model in models if model.machine == hardware), models[0])


@lru_cache(maxsize=4096)
def features(product: str, load: Load, inputs: int, outputs: int, multiprocessors: int) -> tuple[float, ...]:
    """The value of each of FEATURES: 1e9 multiplications and additions, 1e6 bytes of 2-byte elements."""
    groups, gflop = load.groups, 2e-9 * load.rows * inputs * outputs
    if product == "weight_gradients":
        of_group, k = _up(outputs, TILE) * _up(inputs, TILE), load.steps * K_STEP
        tiles = groups * of_group
        tiled, waves = of_group * k, _up(of_group, multiprocessors) * multiprocessors * k
    else:
        n, k = (outputs, inputs) if product == "multiply" else (inputs, outputs)
        tiles = load.tiles * _up(n, TILE)
        # A group's last wave is half full on average, and it has one at least.
        waves = max(groups * multiprocessors, tiles + groups * multiprocessors // 2) * k
        tiled = tiles * k
    of_tile = 2e-9 * TILE * TILE
    moved = load.rows * (inputs + outputs) + groups * inputs * outputs
    ragged = 0.0 if load.aligned else gflop
    return (
        1.0, float(groups), gflop, of_tile * tiled, of_tile * waves, float(tiles), ragged, 2e-6 * moved,
    )  # fmt: skip


@lru_cache(maxsize=16384)
def choose(
    model: Model, product: str, load: Load, inputs: int, outputs: int, copied: int, names: tuple[str, ...]
) -> Choice:
    """The cheapest of the backends `names`, and the order of its groups. Equal loads get equal choices."""
    if not load.groups:
        return Choice("loop")

    def time(variant: str) -> float:
        return model.microseconds(variant, product, load, inputs, outputs, copied)

    best = min((name for name in names if name in model.device), key=time)
    ordered = best + LARGEST_FIRST
    return Choice(best, ordered in model.device and time(ordered) < ORDER_GAIN * time(best))


def padding(
    model: Model,
    rows: int,
    groups: int,
    shapes: Sequence[tuple[int, int]],
    names: tuple[str, ...],
    candidates: Sequence[int] = (1, ALIGNED, TILE),
) -> int:
    """To what multiple to round the rows of every group up, so that all products together cost least.

    `rows` routed rows spread over `groups` in a mildly skewed way (Zipf, exponent 0.5), through weights of
    `shapes` (inputs, outputs). The rows that padding adds are counted as work.
    """
    shares = [(group + 1) ** -0.5 for group in range(groups)]
    counts = [max(1, round(rows * share / sum(shares))) for share in shares]

    def total(pad: int) -> float:
        load = Load.of([-(-count // pad) * pad for count in counts])
        best = [
            min(model.microseconds(v, p, load, i, o) for v in model.device if v.partition("+")[0] in names)
            for p in PRODUCTS
            for i, o in shapes
        ]
        return sum(best)

    return min(candidates, key=total)


def _file() -> Path:
    return Path(__file__).with_name("coefficients.json")


def _up(length: int, step: int) -> int:
    return -(-length // step)


def _rounded(amount: int) -> int:
    """To the nearest 32nd of an octave; exact below 46."""
    if not amount:
        return 0
    return round(2 ** (round(math.log2(amount) * _STEPS_PER_OCTAVE) / _STEPS_PER_OCTAVE))
