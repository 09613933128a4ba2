"""Newton-Schulz: the update direction of Muon, for many blocks of one shape at a time.

Source: Muon is Scalable for LLM Training (Moonlight, arXiv:2502.16982): five steps of
X <- a X + (b A + c A^2) X with A = X X^T, on X divided by its norm, take every singular value to about 1.
Shapes: n blocks of r rows and c columns.
"""

from __future__ import annotations

import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
UPDATE_RMS = 0.2
"""What the scaled update of a block is to have, as AdamW's does."""
PRECISIONS = {torch.bfloat16: "medium", torch.float32: "highest"}


def orthogonalize(blocks: Tensor, steps: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Each block of FP32 blocks [n, r, c] by itself, with products in `dtype`: FP32 [n, r, c].

    The result holds values of `dtype`. A block of zeros stays zero.
    """
    # emerging-optimizers takes the type of its products from torch's switch for FP32 ones.
    with fp32_matmul_precision(PRECISIONS[dtype]):
        result: Tensor = newton_schulz(blocks, steps, "simple")
    return result


def orthogonalize_reference(matrix: Tensor, steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The formula, for one matrix [r, c]."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float().T if tall else matrix.float()
    x = (x / x.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.T if tall else x).float()


def update_scale(shape: tuple[int, int]) -> float:
    """Factor that gives an orthogonal block an RMS of `UPDATE_RMS`: its own size counts, not its matrix's."""
    factor: float = UPDATE_RMS * max(shape) ** 0.5
    return factor
