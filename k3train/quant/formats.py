"""The microscaling formats and their rules, as plain data: imports no torch.

A block of 32 neighbours shares a scale 2^(code - 127), an E8M0 byte whose code 255 is NaN. Source: OCP
Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32
SCALE_BIAS = 127
SCALE_NAN = 255

ROUNDINGS = ("floor", "ceil", "even")
"""How a block's largest magnitude becomes its scale's exponent, before the element's own is taken off:
floor: its own exponent, the OCP rule: what lies above the element's largest number is clipped.
ceil: the next power of two, unless it is one: nothing is clipped, elements use the upper half less.
even: its exponent once it was rounded to the mantissa of the element, halves upwards."""


@dataclass(frozen=True)
class Format:
    """A block format by the numbers that its elements can be."""

    name: str
    bits: int
    """Of an element, sign included."""
    mantissa: int
    """Stored mantissa bits."""
    least: int
    """Exponent of the smallest normal number; below it numbers are as far apart as just above."""
    most: int
    """Exponent of the largest number."""
    largest: float
    """The largest number; greater ones are clipped to it."""

    @property
    def bits_per_value(self) -> float:
        """What a value takes, its share of the scale included."""
        return self.bits + 8 / BLOCK


MXFP4 = Format("mxfp4", 4, 1, 0, 2, 6.0)
MXFP8_E4M3 = Format("mxfp8_e4m3", 8, 3, -6, 8, 448.0)
MXFP8_E5M2 = Format("mxfp8_e5m2", 8, 2, -14, 15, 57344.0)

FORMATS = {each.name: each for each in (MXFP4, MXFP8_E4M3, MXFP8_E5M2)}


PRODUCTS = ("auto", "emulated", "te")
"""Values of `quant.products`."""

GPUS_WITH_MX = ("b200", "gb200", "b300", "gb300")
"""By `cluster.gpu`: compute capability 10, whose tensor cores multiply MX blocks."""


def native_refusal(weights: str, rows: str) -> str | None:
    """Why products of these formats cannot be had as MXFP8 E4M3 without loss, or None."""
    kept = (MXFP4.name, MXFP8_E4M3.name)
    if weights not in kept:
        return f"weights in {weights} do not fit into {MXFP8_E4M3.name} without loss"
    if rows not in kept:
        return f"rows in {rows} do not fit into {MXFP8_E4M3.name} without loss"
    return None
