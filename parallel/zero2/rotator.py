"""Two full-size gradient buffers that the chunks of a rank share in turn.

A burst is what a chunk accumulates between two sums. It takes the slot that has rested longest, which it
gives up when its reduce-scatter is launched; that one runs, and its result is added to the shards, while the
next burst fills the other slot. The schedule's table says where bursts end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import SLOTS
from .store import GradientStore, Key, Ticket
from .views import ChunkGradients, Piece, Shard


@dataclass(eq=False)
class _Slot:
    memory: Tensor
    filling: ChunkGradients | None = None
    summing: ChunkGradients | None = None
    handles: list[Any] = field(default_factory=list)
    """Of the collectives that sum into the slot."""
    tickets: list[Ticket] = field(default_factory=list)
    """Of what still reads the sums."""

    @property
    def is_at_rest(self) -> bool:
        """Nobody fills, sums or reads it."""
        return self.filling is None and self.summing is None and not self.tickets


class Rotator:
    """Gives chunks their slots, and hands the sums to the store; a `pipeline.runtime.Gradients`."""

    def __init__(self, store: GradientStore, device: torch.device) -> None:
        self.store, self.device = store, device
        self.chunks: list[ChunkGradients] = []
        self.shards: dict[Key, Shard] = {}
        self._slots: list[_Slot] = []
        self.turn = 0
        """Grows whenever somebody may write into the slots."""
        # The store's work goes on beside the next burst's backward.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def largest(self) -> int:
        """Elements of a slot, those of the largest chunk."""
        return max(chunk.numel for chunk in self.chunks)

    def register(self, chunk: ChunkGradients) -> None:
        """Take part, before the first step; chunks come in the order of their index."""
        assert not self._slots and chunk.index == len(self.chunks)
        self.chunks.append(chunk)
        for shard in chunk.shards:
            self.shards[shard.key] = shard
            self.store.allocate(shard.key, shard.numel, self.device)

    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """What this rank owns of a parameter's gradient; None if no chunk has it."""
        found = (chunk.pieces.get(parameter) for chunk in self.chunks)
        return next((piece for piece in found if piece is not None), None)

    def begin(self, chunk: int) -> None:
        """Give a chunk its slot, zeroed, unless its burst is under way."""
        gradients = self.chunks[chunk]
        if gradients.slot is not None:
            return
        self.turn += 1
        slot = self._rested()
        slot.memory[: gradients.numel].zero_()
        gradients.bind(slot.memory)
        slot.filling = gradients

    def reduce(self, chunk: int, bucket_groups: Sequence[Any]) -> None:
        """End a burst: launch megatron-core's reduce-scatter of its bucket groups, and give up its slot."""
        gradients = self.chunks[chunk]
        (slot,) = (slot for slot in self._slots if slot.filling is gradients)
        slot.handles = [self._launch(gradients, group) for group in bucket_groups]
        gradients.park()
        slot.filling, slot.summing = None, gradients
        if self._stream is not None:
            # Only the side stream waits. gloo's wait would stop this thread: there it comes before reuse.
            self._store(slot)

    def drain(self) -> None:
        """Wait until all sums are in the store."""
        for slot in self._slots:
            assert slot.filling is None, f"the gradients of chunk {slot.filling.index} were never summed"
            self._settle(slot)

    def borrow(self, least: int = SLOTS) -> list[Tensor]:
        """The slots' memory, FP32 [largest] each, between a step's last sum and the next step's backward.

        Args:
            least: slots that must be there; a rank with one chunk may have made only one so far.
        """
        self.turn += 1
        while len(self._slots) < least:
            self._add_slot()
        self.drain()
        return [slot.memory for slot in self._slots]

    def device_bytes(self) -> int:
        """Gradient memory on the device: the slots in use, and the store's share."""
        return sum(slot.memory.nbytes for slot in self._slots) + self.store.device_bytes()

    def _add_slot(self) -> None:
        memory = torch.zeros(self.largest, dtype=torch.float32, device=self.device)
        self._slots.append(_Slot(memory))

    def _rested(self) -> _Slot:
        """The slot that nobody fills and that was given up first, free for use, and now the last in turn.

        The second one is made when the first is not at rest: one chunk that sums once a step needs no other.
        """
        if not any(slot.is_at_rest for slot in self._slots) and len(self._slots) < SLOTS:
            self._add_slot()
            self._slots.insert(0, self._slots.pop())
        slot = next((slot for slot in self._slots if slot.filling is None), None)
        assert slot is not None, "three chunks hold gradients at once"
        self._settle(slot)
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _launch(self, gradients: ChunkGradients, group: Any) -> Any:
        """Launch the sum of one bucket group; the burst owns its handle, since two may be under way."""
        group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
        group.start_grad_sync()
        rank = group.intra_distributed_optimizer_instance_rank
        for bucket, views in zip(group.buckets, group.cached_grad_buffer_shard_list, strict=True):
            gradients.assert_in_slot(views[rank], gradients.shard_of[bucket].start)
        handle, group.grad_reduce_handle = group.grad_reduce_handle, None
        return handle

    def _settle(self, slot: _Slot) -> None:
        """Nothing reads or writes the slot any more, in the order of the current stream."""
        self._store(slot)
        for ticket in slot.tickets:
            ticket.wait()
        slot.tickets = []

    def _store(self, slot: _Slot) -> None:
        """Add a slot's sums to the shards, behind the collectives that make them."""
        if slot.summing is None:
            return
        with self._beside():
            for handle in slot.handles:
                handle.wait()
            for shard in slot.summing.shards:
                part = slot.memory[shard.start : shard.start + shard.numel]
                slot.tickets.append(self.store.accumulate(shard.key, part))
        slot.summing, slot.handles = None, []

    def _beside(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)
