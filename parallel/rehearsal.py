"""The process groups of any one rank of a layout, in a process without peers.

Collectives over them do nothing, and tensors are made on torch's meta device, which holds no data. What is
built inside is what the real rank would build, but for its values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from .groups import Groups, destroy, divide
from .topology import LayoutError, Topology

META = torch.device("meta")
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter_tensor",
    "broadcast", "broadcast_object_list", "all_to_all_single", "barrier",
)  # fmt: skip

DIVIDE = parallel_state.generate_masked_orthogonal_rank_groups


@dataclass
class Trail:
    """A sequence that other ranks must have made too, as its length and a number that stands for it."""

    count: int = 0
    digest: int = 0

    def add(self, entry: tuple[Any, ...]) -> None:
        """Append an entry; integers alone, whose hash is the same in every process."""
        self.count += 1
        self.digest = hash((self.digest, entry))


@dataclass
class Rehearsal:
    """The groups of a rank, and what it does that others must do with it."""

    groups: Groups
    communicators: Trail
    """Those that were made, also of other ranks: with NCCL, making one is collective over the world."""
    collectives: dict[tuple[int, ...], Trail] = field(default_factory=dict)
    """By the ranks that take part."""


@contextmanager
def rehearsed(topology: Topology, rank: int, *, timeout_minutes: float, seed: int) -> Iterator[Rehearsal]:
    """Be rank `rank` of a layout for a while. Not with CUDA, and not beside other process groups.

    Raises:
        LayoutError: the layout has no such rank.
    """
    if not 0 <= rank < topology.world_size:
        raise LayoutError(f"rank={rank}: the layout has ranks 0 to {topology.world_size - 1}")
    assert not torch.cuda.is_available() and not dist.is_initialized()
    communicators = Trail()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world_size)
    try:
        with _watched(rank, communicators) as collectives:
            groups = divide(topology, META, rank, timeout_minutes, seed)
            with META:
                yield Rehearsal(groups, communicators, collectives)
    finally:
        destroy()


@contextmanager
def _watched(rank: int, communicators: Trail) -> Iterator[dict[tuple[int, ...], Trail]]:
    """Note communicators and collectives, by way of torch.distributed's names for them."""
    originals = {name: getattr(dist, name) for name in ("new_group", *COLLECTIVES)}
    divided = parallel_state.generate_masked_orthogonal_rank_groups
    version = parallel_state.is_torch_min_version
    collectives: dict[tuple[int, ...], Trail] = {}
    try:
        parallel_state.generate_masked_orthogonal_rank_groups = _divided
        parallel_state.is_torch_min_version = functools.cache(version)
        dist.new_group = _noting_groups(dist.new_group, rank, communicators)
        for number, name in enumerate(COLLECTIVES):
            setattr(dist, name, _noting_calls(originals[name], number, collectives))
        yield collectives
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        parallel_state.generate_masked_orthogonal_rank_groups = divided
        parallel_state.is_torch_min_version = version


def _divided(world_size: int, sizes: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """megatron-core's division of the ranks, which takes half of the time and is the same for all of them."""
    return [list(ranks) for ranks in _divided_once(world_size, tuple(sizes), tuple(mask))]


@functools.cache
def _divided_once(world_size: int, sizes: tuple[int, ...], mask: tuple[bool, ...]) -> list[list[int]]:
    return DIVIDE(world_size, list(sizes), list(mask))


def _noting_groups(original: Callable[..., Any], rank: int, trail: Trail) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        chosen = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
        trail.add(chosen)
        if rank not in chosen:  # as the original, which takes a while to say so
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(ranks, *args, **kwargs)

    return new_group


def _noting_calls(
    original: Callable[..., Any], number: int, trails: dict[tuple[int, ...], Trail]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        sizes = [each.numel() for each in args if isinstance(each, torch.Tensor)]
        trails.setdefault(ranks, Trail()).add((number, *sizes))
        return original(*args, **kwargs)

    return call
