"""megatron-core's data-parallel wrapper with rotating gradient buffers, and the optimizer's one seam to it.

Buffers, buckets, bucket groups and their layout stay megatron-core's; a step goes
`zero_grad_buffer`, for each burst `Rotator.begin`, backwards and `start_grad_sync`, then `finish_grad_sync`,
`scale_gradients` and the optimizer's `prepare_grads`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from .rotator import Rotator
from .store import Key
from .views import ChunkGradients


class RotatingDataParallel(DistributedDataParallel):
    """A model chunk whose gradients accumulate in one of two slots and are kept as a shard."""

    def __init__(self, *args: Any, rotator: Rotator, **keywords: Any) -> None:
        """`args`, `keywords`: megatron-core's, with the distributed optimizer and overlapped sums."""
        super().__init__(*args, **keywords)
        self._refuse_what_moves_gradients()
        self.rotator = rotator
        self.gradients = ChunkGradients(len(rotator.chunks), [*self.buffers, *self.expert_parallel_buffers])
        rotator.register(self.gradients)
        self._forget_microbatches()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sums are never started by themselves; megatron-core's own would allow them at its exit."""
        yield

    def zero_grad_buffer(self) -> None:
        """Start a step: no slot, and shards that count as empty."""
        for parameter in self.params_with_grad:
            parameter.grad_added_to_main_grad = False
        self.gradients.park()
        self.rotator.store.reset(self.gradients.keys)
        self._forget_microbatches()

    def start_grad_sync(self, *unused: Any) -> None:
        """End the chunk's burst."""
        self.rotator.reduce(self.gradients.index, self._groups)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait until all sums are in the shards; show them as `main_grad` where the store is resident."""
        assert not force_all_reduce, "the whole gradient is nowhere"
        self.rotator.drain()
        for group in self._groups:
            # Or the next forward would not wait for the parameters that the optimizer is about to change.
            group.param_gather_dispatched = False
        if self.rotator.store.resident:
            self.gradients.expose(self.rotator.store)

    def scale_gradients(self, scaling_factor: Tensor | float) -> None:
        """Multiply the shards."""
        self.rotator.store.scale(self.gradients.keys, scaling_factor)

    @property
    def _groups(self) -> list[Any]:
        return [*self.bucket_groups, *self.expert_parallel_bucket_groups]

    def _forget_microbatches(self) -> None:
        for group in self._groups:
            group.reset()
            # Else megatron-core's hooks start a sum when all gradients of a backward are there.
            group.is_last_microbatch = False

    def _refuse_what_moves_gradients(self) -> None:
        """Features of megatron-core that hold or fill gradient buffers on their own."""
        config, ddp = self.config, self.ddp_config
        assert ddp.use_distributed_optimizer and ddp.overlap_grad_reduce and ddp.grad_reduce_in_fp32
        assert ddp.num_distributed_optimizer_instances == 1 and not ddp.nccl_ub
        assert not ddp.reuse_grad_buf_for_mxfp8_param_ag and not ddp.delay_wgrad_compute
        assert not ddp.param_name_patterns_for_fp32_local_accumulation
        assert not ddp.reduce_scatter_with_fp32_accumulation and not ddp.check_for_nan_in_grad
        # What it sums over other groups at the step's end would have to act on shards.
        assert config.tensor_model_parallel_size == 1 and not config.sequence_parallel
        assert not getattr(self.module, "share_embeddings_and_output_weights", False)


class ShardedOptimizer(DistributedOptimizer):
    """Takes gradients from shards where a chunk has no whole gradient."""

    is_streamed = False
    """Whether something else brings gradients and states to the device, a window of parameters at a time."""

    def _copy_model_grads_to_main_grads(self) -> None:
        """Give each parameter shard its gradient: a view of the store's, so that clipping is in place."""
        if self.is_stub_optimizer or self.is_streamed:
            return
        fetched = _Fetched(self._rotator())
        for model, main in self.parameter_shards():
            main.grad = self.gradient(model, fetched)

    def gradient(self, model: nn.Parameter, fetched: _Fetched | None = None) -> Tensor:
        """This rank's part of a parameter's gradient; of a store that is not resident, out of `fetched`."""
        whole: Tensor = model.main_grad.view(-1)  # type: ignore[attr-defined]
        rotator = self._rotator()
        piece = rotator.piece(model) if rotator else None
        if piece is None:
            within = self._get_model_param_range_map(model)["param"]
            return whole[within.start : within.end]
        if rotator.store.resident:
            return whole
        assert fetched is not None
        return fetched.shard(piece.key)[piece.start : piece.end]

    def parameter_shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, its FP32 shard that the optimizer updates) in the optimizer's order of groups."""
        for models, mains in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, main_group in zip(models, mains, strict=True):
                yield from zip(model_group, main_group, strict=True)

    def write_back(self, model: nn.Parameter, main: Tensor) -> None:
        """Round an updated master shard into this rank's part of the parameter; FP32 ones share memory."""
        if model.dtype != main.dtype:
            place = self._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            number, _, bucket = self.model_param_gbuf_map[model]
            data = self.buffers[number].buckets[bucket].param_data.view(-1)
            data[place.start : place.end].copy_(main)

    def _rotator(self) -> Any:
        rotating = (chunk for chunk in self.model_chunks if isinstance(chunk, RotatingDataParallel))
        return next((chunk.rotator for chunk in rotating), None)


class _Fetched:
    """All shards of a store that is not resident, on the device: in the idle slots as far as they fit."""

    def __init__(self, rotator: Rotator | None) -> None:
        self._rotator = rotator
        self._shards: dict[Key, Tensor] = {}
        self._room: list[Tensor] = []

    def shard(self, key: Key) -> Tensor:
        """A shard, FP32, read when it is first asked for."""
        if key not in self._shards:
            assert self._rotator is not None
            if not self._shards:
                self._room = self._rotator.borrow(1)
            self._shards[key] = self._place(self._rotator.shards[key].numel)
            self._rotator.store.fetch(key, self._shards[key])
        return self._shards[key]

    def _place(self, numel: int) -> Tensor:
        for index, memory in enumerate(self._room):
            if len(memory) >= numel:
                self._room[index] = memory[numel:]
                return memory[:numel]
        assert self._rotator is not None
        return torch.empty(numel, dtype=torch.float32, device=self._rotator.device)


def shard_gradients(optimizer: Any) -> None:
    """Make megatron-core's distributed optimizers, chained or not, take their gradients from shards.

    Its factory takes no class; the methods of the subclass add no state.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if type(part) is DistributedOptimizer:
            part.__class__ = ShardedOptimizer
