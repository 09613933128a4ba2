"""Cross-entropy of the next token, from features and the head's weight.

Letters: t tokens, d hidden, v vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ...loss_plan import chunk_words
from .. import backends

__all__ = ["token_losses"]


def token_losses(
    hidden: Tensor,  # [t, d]
    weight: Tensor,  # [v, d]
    labels: Tensor,  # [t], int64 in [0, v)
    *,
    backend: str = "auto",
    logits_mib: int = 512,
) -> Tensor:
    """-log softmax(hidden weight^T)[label] of each token, nats: [t] FP32, or FP64 of FP64.

    Backends: megatron (megatron-core's linear and vocabulary-parallel cross-entropy: all logits, and their
    softmax for backward), chunked and triton (logits of some words at a time, of `logits_mib` in FP32),
    reference. One tensor-parallel rank.
    """
    words = chunk_words(len(hidden), len(weight), logits_mib)
    losses: Tensor = backends.call("cross_entropy", backend, hidden, hidden, weight, labels, words)
    return losses
