"""RMSNorm with FP32 statistics, in the parameter's own dtype on the outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension.

    Args:
        size: width of the last dimension.
        eps: added to the mean square; K3 uses 1e-5, and 1e-6 inside MLA.
        dtype: dtype of the weight. Statistics are FP32, the result has the input's dtype.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        return rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
