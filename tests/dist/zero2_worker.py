"""One rank of the ZeRO-2 tests: short runs in any layout, and the plain reference that they must equal."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from k3train import gradient_moves
from k3train.checkpoint.manager import CheckpointManager
from k3train.config import Config
from k3train.layout import layout_of
from k3train.model.naming import named_parameters
from k3train.schedule import layer_cuts
from k3train.train.assemble import build_trainer
from k3train.train.diagnose import _bad_gradients, explain_nonfinite
from k3train.train.step import Batch, Trainer, train_step
from k3train.weight_sums import rank_sums
from launch.compose import compose, resolve_layout
from parallel.groups import Groups, initialize
from parallel.pipeline.build import with_reductions
from parallel.pipeline.table import REDUCE, Table
from parallel.topology import Topology
from parallel.zero2.views import is_parked
from parallel.zero2.wrapper import RotatingDataParallel
from tests.parity.worker import SMALL, images, leave, place_columns

Case = dict[str, Any]


class GroupedZero1(DistributedDataParallel):
    """Stock buffers and a stock optimizer, summed burst by burst: slow, obvious, independent of ZeRO-2."""

    def start_grad_sync(self, *unused: Any) -> None:
        """Sum what the buffers hold, add this rank's slices to their sums, and clear the buffers."""
        self.sums: list[Tensor] = getattr(self, "sums", [])
        sums = iter(self.sums)
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.start_grad_sync()
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
            for bucket in group.buckets:
                part = self._own(group, bucket)
                held = next(sums, None)
                self.sums.append(part.clone()) if held is None else held.add_(part)
                bucket.grad_data.zero_()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Write the sums where the optimizer looks for them."""
        sums = iter(self.sums)
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                self._own(group, bucket).copy_(next(sums))
        self.sums = []

    def _own(self, group: Any, bucket: Any) -> Tensor:
        size = group.intra_distributed_optimizer_instance_size
        pieces = bucket.grad_data.chunk(size)
        return pieces[group.intra_distributed_optimizer_instance_rank]  # type: ignore[no-any-return]


def build(case: Case) -> Trainer:
    """The trainer of a case: `overrides`, and for some `grouped` or `most` micro-batches in a burst."""
    config = resolve_layout(compose([*SMALL, *case["overrides"]]), int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    trainer = build_trainer(config, join(layout_of(config)))
    if case.get("grouped"):
        for chunk in trainer.chunks:
            chunk.__class__ = GroupedZero1
    if case.get("grouped") or case.get("most"):
        _cut_bursts(trainer, case.get("most"))
    return trainer


@lru_cache(maxsize=1)
def join(layout: Topology) -> Groups:
    """The groups of a layout; the processes stay connected from one case to the next."""
    if not dist.is_initialized():
        return initialize(layout, timeout_minutes=2, seed=1)
    parallel_state.destroy_model_parallel()
    with patch.object(dist, "init_process_group"):
        return initialize(layout, timeout_minutes=2, seed=1)


def _cut_bursts(trainer: Trainer, most: int | None) -> None:
    planned = trainer.pipeline.table

    def table(grids: Any) -> tuple[Table, Any]:
        found, bundles = planned(grids)
        ranks = tuple(tuple(op for op in ops if op.kind != REDUCE) for ops in found.ranks)
        return with_reductions(dataclasses.replace(found, ranks=ranks), bursts=True, most=most), bundles

    trainer.pipeline.table = table  # type: ignore[method-assign]


def batches(config: Config, groups: Groups, step: int) -> list[Batch]:
    """Micro-batches of a step, different on each data-parallel rank and with different token counts."""
    rank, place = groups.pg_collection.dp.rank(), groups.device
    length, size = config.data.sequence_length, config.data.micro_batch_size
    generator = torch.Generator().manual_seed(1000 * step + rank)
    made = []
    for index in range(config.run.microbatches):
        window = torch.randint(0, 257, (size, length + 1), generator=generator)
        mask = torch.ones(size, length)
        mask[-1, : index + rank] = 0
        window = window.to(place)
        batch = {
            "tokens": window[:, :-1].contiguous(),
            "labels": window[:, 1:].contiguous(),
            "loss_mask": mask.to(place),
            "sample_ids": torch.arange(size),
        }
        made.append(place_columns(batch, groups.pg_collection.cp))
        if config.vision.enabled:
            made[-1] |= images(step, (index + rank) % 4, place)
    return made


def train(trainer: Trainer, steps: range) -> list[list[float]]:
    """Loss sums and gradient norm of each step."""
    reports = []
    for step in steps:
        made = batches(trainer.config, trainer.groups, step)
        result = train_step(trainer, made, step)
        assert result.updated
        reports.append([result.losses.loss_sum, result.losses.mtp_sum, result.grad_norm])
    return reports


def digest(tensors: Any) -> str:
    """SHA-256 of tensors' bytes, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def parameters(trainer: Trainer) -> list[Tensor]:
    """All that this rank trains."""
    named = itertools.chain.from_iterable(named_parameters(model) for model in trainer.models)
    tower = trainer.tower.model.parameters() if trainer.tower else ()
    return [*(parameter for _, parameter in named), *tower]


def gradient_bytes(trainer: Trainer) -> int:
    """Bytes of the distinct storages behind every gradient of this rank's chunks."""
    tensors: list[Tensor] = []
    for chunk in trainer.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            tensors.append(buffer.grad_data)
            tensors += [bucket.grad_data for bucket in buffer.buckets]
        tensors += [p.main_grad for p in chunk.module.parameters() if p.requires_grad]
        if isinstance(chunk, RotatingDataParallel):
            store = chunk.rotator.store
            tensors += [slot.memory for slot in chunk.rotator._slots]
            tensors += store._shards.values() if store.resident else []
    tensors += [
        each.grad
        for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        for each in part.get_parameters()
        if each.grad is not None and not getattr(each, "shared", False)
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def run(cases: list[Case], steps: int) -> list[dict[str, Any]]:
    """Each case from its start: reports, parameters and the most gradient bytes seen between operations."""
    answers = []
    for case in cases:
        trainer = build(case)
        peak = Peak(trainer)
        reports = train(trainer, range(1, steps + 1))
        answers.append(
            {
                "reports": reports,
                "parameters": digest(parameters(trainer)),
                "values": [p.detach().double().sum().item() for p in parameters(trainer)],
                "peak": peak.bytes,
                "numel": [
                    [(b.numel, b.data_parallel_world_size) for b in c.buffers + c.expert_parallel_buffers]
                    for c in trainer.chunks
                ],
            }
        )
    leave()
    return answers


class Peak:
    """Counts gradient bytes at every backward, at the step's end and before the update."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.bytes = trainer, 0
        firsts = (next(p for p in chunk.module.parameters() if p.requires_grad) for chunk in trainer.chunks)
        self._handles = [first.register_post_accumulate_grad_hook(self._count) for first in firsts]
        self._prepare = trainer.optimizer.prepare_grads
        trainer.optimizer.prepare_grads = self._prepared  # type: ignore[method-assign]

    def stop(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()
        self.trainer.optimizer.prepare_grads = self._prepare  # type: ignore[method-assign]

    def _prepared(self) -> Any:
        answer = self._prepare()
        self._count()
        return answer

    def _count(self, *unused: Any) -> None:
        self.bytes = max(self.bytes, gradient_bytes(self.trainer))


def resumed(pairs: list[list[Case]], root: str) -> list[dict[str, Any]]:
    """For each pair of cases: four steps of the first, saved after the second; the last two by the other one,
    built anew and loaded."""
    answers = []
    for number, (first, second) in enumerate(pairs):
        trainer = build(first)
        manager = _manager(trainer, f"{root}/{number}")
        train(trainer, range(1, 3))
        with trainer.at_hand():
            manager.save(2, trainer.modules, trainer.optimizer, {})
        whole = train(trainer, range(3, 5)), digest(parameters(trainer)), _states(trainer)
        assert manager.wait(), "a second manager would remove what is still being written"
        trainer = build(second)
        with trainer.at_hand():
            assert _manager(trainer, f"{root}/{number}").load(trainer.modules, trainer.optimizer) == {}
        rest = train(trainer, range(3, 5)), digest(parameters(trainer)), _states(trainer)
        answers.append({"whole": whole, "rest": rest})
    leave()
    return answers


def _manager(trainer: Trainer, root: str) -> CheckpointManager:
    return CheckpointManager(
        Path(root), groups=trainer.groups, keep=0, asynchronous=True, fixed={}, message=lambda text: None
    )


def _states(trainer: Trainer) -> list[str]:
    """Digests of all optimizer states and master weights of this rank."""
    with trainer.at_hand():
        return sorted(
            digest([torch.as_tensor(value)])
            for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
            for main in part.get_parameters()
            for value in (main.detach(), *part.optimizer.state[main].values())
        )


def moved(cases: list[Case]) -> list[dict[str, Any]]:
    """Bytes that a store below the device moves in a step, and what the plan says of them."""
    answers = []
    for case in cases:
        trainer = build(case)
        config, rotator = trainer.config, trainer.pipeline.rotator
        topology = layout_of(config)
        assert rotator is not None
        seen = []
        for step in (1, 2):
            before = dict(rotator.store.moved)  # type: ignore[attr-defined]
            train(trainer, range(step, step + 1))
            now = rotator.store.moved  # type: ignore[attr-defined]
            seen.append([now[name] - before[name] for name in ("in", "out")])
        ranks = rank_sums(config, topology, layer_cuts(config, topology))
        answers.append({"steps": seen, "planned": gradient_moves.of_step(config, topology, ranks)._asdict()})
    return answers


def watched(case: Case) -> dict[str, Any]:
    """What the rotator does in one step, and what must hold while it does."""
    import pytest

    trainer = build(case)
    rotator = trainer.pipeline.rotator
    assert rotator is not None
    slots, order = {}, []
    begin = rotator.begin

    def begun(chunk: int) -> None:
        begin(chunk)
        gradients = rotator.chunks[chunk]
        assert gradients.slot is not None
        number = slots.setdefault(gradients.slot.data_ptr(), len(slots))
        if not order or order[-1][:2] != [chunk, number]:
            order.append([chunk, number, 0])
        order[-1][2] += 1
        for wrapper in trainer.chunks:
            for group in wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups:
                assert not group.is_last_microbatch and group.grad_reduce_handle is None
                group.param_gather_dispatched = True
        others = [other for other in rotator.chunks if other is not gradients]
        parked = [p.main_grad for other in others for p in other.pieces]
        assert all(is_parked(gradient) and gradient.isnan().all() for gradient in parked)
        with pytest.raises(RuntimeError, match="single memory location"):
            parked[0].add_(1)

    groups = [g for w in trainer.chunks for g in w.bucket_groups + w.expert_parallel_bucket_groups]
    dispatched: list[bool] = []
    prepare = trainer.optimizer.prepare_grads

    def prepared() -> Any:
        dispatched.extend(group.param_gather_dispatched for group in groups)
        return prepare()

    rotator.begin = begun  # type: ignore[method-assign]
    trainer.optimizer.prepare_grads = prepared  # type: ignore[method-assign]
    train(trainer, range(1, 2))
    shown = [p.main_grad.numel() for chunk in rotator.chunks for p in chunk.pieces]
    owned = [piece.end - piece.start for chunk in rotator.chunks for piece in chunk.pieces.values()]
    answer = {
        "order": [list(entry) for entry in order],
        "dispatched": list(dispatched),
        "exposed": shown == owned,
        "refused": _refused(trainer.chunks[0]),
    }
    if case.get("stale"):
        answer["stale"] = _stale_views(trainer)
    leave()
    return answer


def _refused(chunk: Any) -> list[str]:
    """Features that the wrapper refuses."""
    features = {
        "nccl_ub": True,
        "delay_wgrad_compute": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
        "param_name_patterns_for_fp32_local_accumulation": ["all"],
        "num_distributed_optimizer_instances": 2,
        "overlap_grad_reduce": False,
    }
    found = []
    for name, value in features.items():
        with patch.object(chunk.ddp_config, name, value), suppress(AssertionError):
            chunk._refuse_what_moves_gradients()
            found.append(name)
    assert not found, found
    return list(features)


def _stale_views(trainer: Trainer) -> str:
    """Keep megatron-core's cached views from one burst to the next: the address must tell."""
    kept: dict[int, Any] = {}

    class Group(type(trainer.chunks[0].bucket_groups[0])):  # type: ignore[misc]
        @property
        def cached_grad_buffer_shard_list(self) -> Any:
            return kept[id(self)]

        @cached_grad_buffer_shard_list.setter
        def cached_grad_buffer_shard_list(self, views: Any) -> None:
            kept.setdefault(id(self), views)

    for chunk in trainer.chunks:
        for group in chunk.bucket_groups:
            group.__dict__.pop("cached_grad_buffer_shard_list")
            group.__class__ = Group
    try:
        train(trainer, range(2, 3))
    except AssertionError as error:
        return str(error)
    return ""


def long_loop(case: Case, steps: int) -> list[float]:
    """Many steps, for the allocator's checks; the last step's report."""
    trainer = build(case)
    reports = train(trainer, range(1, steps + 1))
    leave()
    return reports[-1]


def not_finite(cases: list[Case]) -> list[str]:
    """What each case says about a step that a weight of infinity spoils, and that it updates nothing."""
    told = []
    for case in cases:
        trainer = build(case)
        with torch.no_grad():
            trainer.models[1].layers["2"].post_norm.weight.fill_(float("inf"))
        before = digest(parameters(trainer))
        made = batches(trainer.config, trainer.groups, 1)
        assert not train_step(trainer, made, 1).updated
        assert digest(parameters(trainer)) == before
        told.append(str(explain_nonfinite(trainer, made, 1)))
        if trainer.stream is not None:
            assert _bad_gradients(trainer)
    leave()
    return told
