"""Which tokens make up each chunk: documents are cut apart, none shares a chunk with another.

Letters: n documents, N room for chunks, b rows, s columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...packing import Packing
from .reference import C


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Chunks of all documents, document by document; made on the device without waiting for it."""

    table: Tensor  # [N, 4] int32: first token, tokens (0: not used), document, whether it is its first chunk
    offsets: Tensor  # [n + 1] int32, each document's first chunk, and how many there are

    @property
    def room(self) -> int:
        """Chunks that there may be at most; the number itself is on the device alone."""
        return self.table.shape[0]

    @property
    def documents(self) -> int:
        """Documents of the packing."""
        return self.offsets.numel() - 1


_tables: WeakKeyDictionary[Packing, ChunkTable] = WeakKeyDictionary()


def chunk_table(packing: Packing) -> ChunkTable:
    """Of a packing; made once for each."""
    if packing not in _tables:
        tokens = packing.document_ids.numel()
        longest = packing.document_ids.shape[1] if packing.whole_rows else None
        _tables[packing] = make_table(packing.cu_seqlens, tokens, longest)
    return _tables[packing]


def make_table(cu_seqlens: Tensor, tokens: int, length: int | None = None) -> ChunkTable:
    """Of documents that begin at `cu_seqlens` [n + 1] and have at least one token each.

    `length` is that of every document, where they are all equal.
    """
    documents, device = cu_seqlens.numel() - 1, cu_seqlens.device
    room = (tokens + (C - 1) * documents) // C
    if length is not None:
        room = documents * -(-length // C)
    begin = cu_seqlens.long()
    offsets = torch.zeros(documents + 1, dtype=torch.long, device=device)
    offsets[1:] = ((begin.diff() + C - 1) // C).cumsum(0)
    chunk = torch.arange(room, device=device)
    document = torch.searchsorted(offsets, chunk, right=True) - 1
    used = document < documents
    document = document.clamp_max(documents - 1)
    place = chunk - offsets[document]
    start = begin[document] + C * place
    count = torch.where(used, (begin[document + 1] - start).clamp_max(C), 0)
    table = torch.stack((torch.where(used, start, 0), count, document, (place == 0).long()), dim=1)
    return ChunkTable(table.int(), offsets.int())
