"""The loss by megatron-core's own linear and vocabulary-parallel cross-entropy, which keeps the softmax.

Letters: t tokens, d hidden, v vocabulary.
"""

from __future__ import annotations

from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, words: int) -> Tensor:
    """See `ops.cross_entropy.token_losses`; logits in the dtype of `hidden`, all of them despite `words`."""
    group = get_tensor_model_parallel_group()
    assert group.size() == 1, "the head is not cut"
    logits = linear_with_grad_accumulation_and_async_allreduce(
        input=hidden,
        weight=weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=group,
    )  # [t, v]
    losses: Tensor = vocab_parallel_cross_entropy(logits.float(), labels, tp_group=group)
    return losses
