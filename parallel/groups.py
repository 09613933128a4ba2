"""Process groups of a run: torch.distributed and megatron-core's, started and ended in one place."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from .topology import LayoutError, Topology


class RankMismatchError(ValueError):
    """Ranks were started with different configurations."""


@dataclass(frozen=True)
class Groups:
    """This rank's place, and megatron-core's groups around it."""

    topology: Topology
    pg_collection: ProcessGroupCollection
    device: torch.device
    rank: int

    @property
    def is_first(self) -> bool:
        """The rank that speaks and writes for all."""
        return self.rank == 0


def initialize(topology: Topology, *, device: str = "auto", timeout_minutes: float, seed: int) -> Groups:
    """Join the other ranks, which torchrun's environment variables name; alone without them.

    Args:
        topology: its world size must be the number of processes.
        device: auto, cpu or cuda.
        timeout_minutes: after which a collective that misses a rank fails.
        seed: of megatron-core's random states; nothing in the model draws from them.

    Raises:
        LayoutError: the number of processes or the device does not fit.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size != topology.world_size:
        raise LayoutError(f"the layout needs {topology.world_size} ranks, {world_size} were started")
    place = _device(device)
    # Alone, on a port that nothing has to know; the environment stays as it is for whatever starts next.
    alone = "MASTER_ADDR" not in os.environ
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True) if alone else None,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=timeout_minutes),
        device_id=place if place.type == "cuda" else None,
    )
    return divide(topology, place, rank, timeout_minutes, seed)


def regroup(groups: Groups, topology: Topology, *, timeout_minutes: float, seed: int) -> Groups:
    """Divide the same ranks anew; `groups`, and whatever used them, must not be used any more. A collective.

    Raises:
        LayoutError: the number of ranks is another one.
    """
    if topology.world_size != groups.topology.world_size:
        raise LayoutError(f"the layout needs {topology.world_size} ranks, not {groups.topology.world_size}")
    if groups.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    # Its own list lacks those that were made beside it; communicators that nobody ends keep device memory.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return divide(topology, groups.device, groups.rank, timeout_minutes, seed)


def divide(topology: Topology, place: torch.device, rank: int, timeout_minutes: float, seed: int) -> Groups:
    """megatron-core's groups over all ranks, which torch.distributed knows already."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=topology.pipeline,
        # megatron-core's own schedules know several chunks on several pipeline ranks only.
        virtual_pipeline_model_parallel_size=topology.virtual if topology.is_interleaved else None,
        context_parallel_size=topology.context,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    model_parallel_cuda_manual_seed(seed)
    return Groups(topology, ProcessGroupCollection.use_mpu_process_groups(), place, rank)


def second_expert_group(groups: Groups) -> dist.ProcessGroup | None:
    """A communicator of its own over this rank's expert-parallel ranks, for transfers beside the first's.

    None on a CPU and where no rank shares its experts; a rehearsal makes it as GPUs do. A collective over all
    ranks of the run: NCCL splits communicators off the one of all ranks, whether they belong to it or not.
    """
    if groups.device.type == "cpu" or groups.topology.expert == 1:
        return None
    found: dist.ProcessGroup | None = None
    for ranks in groups.topology.groups("expert"):
        made = dist.new_group(ranks)
        if groups.rank in ranks:
            assert isinstance(made, dist.ProcessGroup)
            found = made
    return found


def destroy() -> None:
    """Leave all groups."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def assert_same_everywhere(name: str, digest: str) -> None:
    """Compare a digest over all ranks; a collective.

    Raises:
        RankMismatchError: on every rank, naming the ranks that differ from rank 0.
    """
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RankMismatchError(
            f"the {name} of rank 0 and of ranks {different} differ; start every node with the same command"
        )


def _device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise LayoutError("run.device=cuda, but torch sees no GPU here; use run.device=cpu or auto")
    if wanted == "cpu" and available:
        raise LayoutError("run.device=cpu on a machine with a GPU; hide it with CUDA_VISIBLE_DEVICES= first")
    if not available:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise LayoutError(f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
