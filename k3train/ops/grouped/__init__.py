"""Grouped matrix products: many small linear layers over rows sorted by layer, as routed experts need them.

Backends: te (Transformer Engine), grouped_mm (PyTorch) and loop (the reference). On a GPU, `auto` asks an
analytic cost model (`cost`) before each product; on a CPU it is the loop.
"""

from __future__ import annotations

from .linear import grouped_linear
from .products import input_gradient, multiply, padding, weight_gradients
from .segments import Segments

__all__ = ["Segments", "grouped_linear", "input_gradient", "multiply", "padding", "weight_gradients"]
