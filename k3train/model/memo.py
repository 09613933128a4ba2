"""What the first pass over a layer leaves to a later one, which decides and counts nothing anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class LayerMemo:
    """One layer's, for one micro-batch; empty until its first pass has been there."""

    choice: Tensor | None = None
    """int64 [t, k], the experts that the router chose and has counted."""
    plan: Any = None
    """What the dispatcher knows of the exchange: MoonEP's plan, or the all-to-all's sizes."""
    has_logits: bool = False
    """The largest attention logits have been taken into account."""
