"""A chunk's gradient tensors, and where they point.

megatron-core's buffers, buckets and parameters each hold a tensor of gradients. Those objects stay, since
autograd hooks, optimizers and checkpoints hold them too; only what they point to changes:

- bound: into a slot of the rotator, from a burst's first backward to its sum;
- parked: at one NaN, expanded to the right size: reads give NaN, writes in place raise;
- exposed: a parameter's alone, at this rank's piece of its gradient's shard, one-dimensional, perhaps empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .store import GradientStore, Key


class Piece(NamedTuple):
    """The part of a parameter's gradient that this rank owns: `start` to `end` of a shard."""

    key: Key
    start: int
    end: int


@dataclass(frozen=True)
class Shard:
    """This rank's part of a bucket: where its sum comes to lie in the slot."""

    key: Key
    start: int
    numel: int


def is_parked(gradient: Tensor) -> bool:
    """Whether a gradient is nowhere at the moment."""
    return gradient.untyped_storage().nbytes() < gradient.nbytes


class ChunkGradients:
    """The gradients of one chunk. Dense buffers, then expert buffers, lie back to back in a slot."""

    def __init__(self, index: int, buffers: list[Any]) -> None:
        """`buffers`: megatron-core's `_ParamAndGradBuffer`, FP32, whose storage is given up here."""
        self.index = index
        self.slot: Tensor | None = None
        self.numel = 0
        self.shards: list[Shard] = []
        self.shard_of: dict[Any, Shard] = {}
        """By megatron-core's bucket."""
        self.pieces: dict[nn.Parameter, Piece] = {}
        self._places: list[tuple[Tensor, int, torch.Size]] = []
        for number, buffer in enumerate(buffers):
            assert buffer.grad_dtype == torch.float32, buffer.grad_dtype
            assert not buffer.nccl_ub and not buffer.extra_main_grads, "not with ZeRO-2"
            self._add(number, buffer)
        device = buffers[0].grad_data.device
        self._nan = torch.full((), float("nan"), device=device)
        self.park()

    @property
    def keys(self) -> list[Key]:
        """Of all shards."""
        return [shard.key for shard in self.shards]

    def bind(self, slot: Tensor) -> None:
        """Let every tensor point into `slot`, FP32 [numel or more]."""
        self.slot = slot
        for tensor, start, shape in self._places:
            tensor.data = slot[start : start + prod(shape)].view(shape)

    def park(self) -> None:
        """Let no tensor point at memory of its size."""
        self.slot = None
        for tensor, _, shape in self._places:
            tensor.data = self._nan.expand(shape)

    def expose(self, store: GradientStore) -> None:
        """Let each parameter's `main_grad` be its piece of a resident shard."""
        for parameter, piece in self.pieces.items():
            view = store.view(piece.key)[piece.start : piece.end]
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            gradient.data = view.view(parameter.shape) if len(view) == parameter.numel() else view

    def assert_in_slot(self, tensor: Tensor, start: int) -> None:
        """Values would not reveal a stale view on every backend; the address does."""
        assert self.slot is not None, f"chunk {self.index} has no slot"
        wanted = self.slot.data_ptr() + start * self.slot.itemsize
        assert tensor.data_ptr() == wanted, f"chunk {self.index}: a view of another slot"

    def _add(self, number: int, buffer: Any) -> None:
        ranks, rank = buffer.data_parallel_world_size, buffer.data_parallel_group.rank()
        self._places.append((buffer.grad_data, self.numel, buffer.grad_data.shape))
        for bucket in buffer.buckets:
            start = self.numel + bucket.offset
            size, rest = divmod(bucket.grad_data.numel(), ranks)
            assert not rest, "a bucket is padded to a multiple of its ranks"
            key = Key(self.index, number, bucket.bucket_id)
            self.shard_of[bucket] = Shard(key, start + rank * size, size)
            self.shards.append(self.shard_of[bucket])
            self._places.append((bucket.grad_data, start, bucket.grad_data.shape))
            for parameter in bucket.params_list:
                low, high = bucket.param_to_index[parameter]
                self._places.append((parameter.main_grad, start + low, parameter.main_grad.shape))
                own = [min(max(edge - rank * size, 0), size) for edge in (low, high)]
                self.pieces[parameter] = Piece(key, *own)
        self.numel += buffer.numel
