"""The resize through torch's own interpolation.

Letters: G side of the grid, d hidden, h, w rows and columns.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def resize(weight: Tensor, h: int, w: int) -> Tensor:
    """Bilinear resize of weight [G, G, d] to [h, w, d]."""
    image = weight.permute(2, 0, 1)[None]  # [1, d, G, G]
    return F.interpolate(image, size=(h, w), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
