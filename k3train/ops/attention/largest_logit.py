"""The largest attention logit of each head, which no fused kernel reports.

Letters: b batch, s sequence, H heads, D width of queries and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import Packing

QUERIES = 1024
"""Of one product with the keys."""


@torch.no_grad()
def largest_logits(
    q: Tensor,  # [b, s, H, D]
    k: Tensor,  # [b, s, H, D]
    *,
    scale: float,
    packing: Packing,
    above: float,
) -> Tensor:
    """Largest scale q k^T of each head within documents, earlier or same token: FP32 [H].

    A head whose logits cannot exceed `above`, since no query and key are long enough, gets 0: its logits are
    not computed. Reads the device once, for the heads that may.
    """
    longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax((0, 1)) for x in (q, k)]  # [H]
    suspects = (scale * longest[0] * longest[1] > above).nonzero().flatten().tolist()
    largest = torch.zeros_like(longest[0])
    for head in suspects:
        largest[head] = scale * _largest_product(q[:, :, head], k[:, :, head], packing)
    return largest


def largest_logits_reference(q: Tensor, k: Tensor, *, scale: float, packing: Packing) -> Tensor:
    """The same for every head, from all logits at once."""
    logits = scale * torch.einsum("bihd,bjhd->bhij", q.float(), k.float())
    return logits.masked_fill(~packing.attention_mask, float("-inf")).amax((0, 2, 3))


def _largest_product(q: Tensor, k: Tensor, packing: Packing) -> Tensor:
    """Largest q k^T of one head, q and k [b, s, D], a slice of the queries at a time."""
    found = []
    documents, places = packing.document_ids, torch.arange(q.shape[1], device=q.device)
    for start in range(0, q.shape[1], QUERIES):
        stop = min(start + QUERIES, q.shape[1])
        products = q[:, start:stop].float() @ k[:, :stop].float().mT  # [b, queries, keys]
        same = documents[:, start:stop, None] == documents[:, None, :stop]
        seen = same & (places[start:stop, None] >= places[:stop])
        found.append(products.masked_fill(~seen, float("-inf")).amax())
    return torch.stack(found).amax()
