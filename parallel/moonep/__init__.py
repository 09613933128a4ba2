"""Expert parallelism in which every rank computes the same number of rows.

Source: MoonEP, in the Kimi K3 report (arXiv:2607.24653). `plan` decides, `transport` carries, `exchange`
moves rows and experts along a `route`; `lean` is a layer as one step of autograd, `dispatcher` its readable
twin.
"""

from __future__ import annotations

from .codec import EXACT, Codec
from .experts import ExpertMath, Segments, activate_backward
from .layer import MoonEP, Routed

__all__ = ["EXACT", "Codec", "ExpertMath", "MoonEP", "Routed", "Segments", "activate_backward"]
