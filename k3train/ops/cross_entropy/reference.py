"""The loss by autograd, from all logits. Letters: t tokens, d hidden, v vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, words: int) -> Tensor:
    """See `ops.cross_entropy.token_losses`; logits in the dtype of `hidden`, all of them despite `words`."""
    logits = linear(hidden, weight)  # [t, v]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide, labels, reduction="none")
