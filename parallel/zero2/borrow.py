"""Weights of a model that only runs forward, held on the host and lent ZeRO-2's idle slots chunk by chunk.

A reference or a teacher is needed while no gradients are: before a step's first backward. Its chunks' weights
lie in host memory, pinned where a GPU is; `lend` copies one chunk into a slot and lets the module's
parameters point into it, without any allocation on the device. The next chunk goes into the other slot while
the first still computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from . import SLOTS
from .rotator import Rotator

ALIGNMENT = 256
"""Bytes at whose multiples a parameter begins."""


class LentWeights:
    """The weights of a forward-only model's chunks, which must each fit into a slot."""

    def __init__(self, chunks: Sequence[nn.Module], rotator: Rotator) -> None:
        """Move the chunks' parameters and buffers to the host; outside `lend` they hold no memory.

        Raises:
            ValueError: a chunk is larger than a slot.
        """
        self.rotator = rotator
        self.chunks = list(chunks)
        self._places = [_places(chunk) for chunk in self.chunks]
        room = FP32_BYTES * rotator.largest
        for number, places in enumerate(self._places):
            if places.nbytes > room:
                raise ValueError(
                    f"chunk {number} of the forward-only model has {places.nbytes} bytes and a gradient slot "
                    f"{room}: cut that model into smaller chunks"
                )
        pinned = rotator.device.type == "cuda"
        self._host = [places.take(pinned) for places in self._places]
        self._stream = torch.cuda.Stream(rotator.device) if pinned else None
        self._arriving: dict[int, torch.cuda.Event | None] = {}
        self._turn = -1

    @contextmanager
    def lend(self, chunk: int, following: int | None = None) -> Iterator[nn.Module]:
        """The chunk with its weights in a slot; no backward of the trained model may begin meanwhile.

        Args:
            following: chunk that will be lent next, to be copied meanwhile; of the other parity.
        """
        if self._turn != self.rotator.turn:
            # Somebody else has had the slots since: what was copied ahead is gone.
            self._arriving.clear()
        slots = self.rotator.borrow()
        self._turn = self.rotator.turn
        if chunk not in self._arriving:
            self._start(chunk, slots)
        if following is not None:
            assert (following - chunk) % SLOTS, "two chunks of the same parity share a slot"
            self._start(following, slots)
        arrived = self._arriving.pop(chunk)
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        self._places[chunk].point(_bytes(slots[chunk % SLOTS]))
        try:
            yield self.chunks[chunk]
        finally:
            self._places[chunk].park()

    def update(self, chunk: int, source: nn.Module) -> None:
        """Replace a chunk's weights by those of a module with the same parameters and buffers."""
        self._arriving.pop(chunk, None)
        self._places[chunk].copy(source, self._host[chunk])

    def _start(self, chunk: int, slots: list[Tensor]) -> None:
        target = _bytes(slots[chunk % SLOTS])[: self._places[chunk].nbytes]
        if self._stream is None:
            target.copy_(self._host[chunk])
            self._arriving[chunk] = None
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(self._host[chunk], non_blocking=True)
            self._arriving[chunk] = self._stream.record_event()


FP32_BYTES = 4


class _Places:
    """Tensors of a module and where their bytes lie."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.shapes = [tensor.shape for tensor in tensors]
        self.starts, self.nbytes = [], 0
        for tensor in tensors:
            self.starts.append(self.nbytes)
            self.nbytes += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT

    def take(self, pinned: bool) -> Tensor:
        """Copy everything to the host, uint8 [nbytes], and let go of it."""
        host = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        for view, tensor in zip(self.views(host), self.tensors, strict=True):
            view.copy_(tensor.detach())
        self.park()
        return host

    def copy(self, source: nn.Module, host: Tensor) -> None:
        """Copy another module's tensors."""
        for view, tensor in zip(self.views(host), _tensors(source), strict=True):
            view.copy_(tensor.detach())

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors' places in uint8 memory."""
        return [
            memory[start : start + prod(shape) * tensor.itemsize].view(tensor.dtype).view(shape)
            for start, shape, tensor in zip(self.starts, self.shapes, self.tensors, strict=True)
        ]

    def point(self, memory: Tensor) -> None:
        """Let the tensors be their places in `memory`."""
        for tensor, view in zip(self.tensors, self.views(memory), strict=True):
            tensor.data = view

    def park(self) -> None:
        """Let the tensors hold no memory: one element stands for all."""
        for tensor, shape in zip(self.tensors, self.shapes, strict=True):
            tensor.data = tensor.new_empty(()).expand(shape)


def _places(chunk: nn.Module) -> _Places:
    return _Places(_tensors(chunk))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes(slot: Tensor) -> Tensor:
    return slot.view(torch.uint8)
