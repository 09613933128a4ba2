"""The largest attention logit of each head, which no fused kernel reports.

Letters: b batch, s sequence, H heads, D width of queries and keys; n queries and m keys of fragments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import Packing
from .fragments import Fragments

QUERIES = 1024
"""Of one product with the keys."""
PRODUCTS = 1 << 27
"""Numbers in one product of fragments."""


@torch.no_grad()
def largest_logits(
    q: Tensor,  # [b, s, H, D]
    k: Tensor,  # [b, s, H, D]
    *,
    scale: float,
    packing: Packing | Fragments,
    above: float,
) -> Tensor:
    """Largest scale q k^T of each head within documents, earlier or same token: FP32 [H].

    A head whose logits cannot exceed `above`, since no query and key are long enough, gets 0: its logits are
    not computed. Reads the device once, for the heads that may.
    """
    longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax((0, 1)) for x in (q, k)]  # [H]
    suspected = (scale * longest[0] * longest[1] > above).tolist()
    largest = torch.zeros_like(longest[0])
    for head in [head for head, is_long in enumerate(suspected) if is_long]:
        q_head, k_head = q[:, :, head], k[:, :, head]
        if isinstance(packing, Fragments):
            found = _largest_in_fragments(q_head[0], k_head[0], packing)
        else:
            found = _largest_product(q_head, k_head, packing)
        largest[head] = scale * found
    return largest


def largest_logits_reference(q: Tensor, k: Tensor, *, scale: float, packing: Packing | Fragments) -> Tensor:
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


def _largest_in_fragments(q: Tensor, k: Tensor, fragments: Fragments) -> Tensor:
    """The same of q [n, D] and k [m, D], of which each fragment's queries see that fragment's keys."""
    found, start = [], 0
    while start < len(q):
        keys = fragments.keys_of(start, min(start + QUERIES, len(q)))
        rows = max(1, min(QUERIES, PRODUCTS // (keys.stop - keys.start)))
        stop = min(start + rows, len(q))
        keys = fragments.keys_of(start, stop)
        products = q[start:stop].float() @ k[keys].float().mT  # [queries, keys]
        seen = fragments.mask(slice(start, stop), keys)
        found.append(products.masked_fill(~seen, float("-inf")).amax())
        start = stop
    return torch.stack(found).amax()
