"""Where gradient shards and optimizer states are kept, as the configuration says; part of `assemble`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from offload.files.engine import default_engine
from offload.gradients import ShelvedGradients
from offload.shelf import FileShelf, HostShelf, Shelf
from parallel.zero2.rotator import Rotator
from parallel.zero2.store import DeviceStore
from parallel.zero2.wrapper import shard_gradients

from ..config import Config
from ..optim.build import sub_optimizers
from ..optim.stream import StreamedUpdate


def build_rotator(config: Config, device: torch.device) -> Rotator | None:
    """ZeRO-2's gradient buffers over the store that `offload.gradients` names."""
    if config.parallel.zero != 2:
        return None
    tier = config.offload.gradients
    store = DeviceStore() if tier == "device" else ShelvedGradients(build_shelf(config, tier, device))
    return Rotator(store, device)


def build_stream(
    config: Config, device: torch.device, optimizer: MegatronOptimizer, rotator: Rotator | None
) -> StreamedUpdate | None:
    """The streamed update, where AdamW finds gradients or its states off the device."""
    offload = config.offload
    fetched = rotator is not None and not rotator.store.resident and config.optim.name == "adamw"
    if not fetched and offload.optimizer == "device":
        return None
    shard_gradients(optimizer)
    return StreamedUpdate(
        sub_optimizers(optimizer),
        rotator=rotator if fetched else None,
        shelf=None if offload.optimizer == "device" else build_shelf(config, offload.optimizer, device),
        window_bytes=offload.window_mib << 20,
        device=device,
    )


def build_shelf(config: Config, tier: str, device: torch.device) -> Shelf:
    """A shelf of this rank's on the host or on a disk."""
    pinned = device.type == "cuda"
    if tier == "host":
        return HostShelf(pinned=pinned)
    assert config.offload.nvme_dir is not None
    return FileShelf(
        Path(config.offload.nvme_dir).expanduser(),
        default_engine(),
        pinned=pinned,
        fallback=config.offload.on_failure == "fallback",
        warn=_warn,
    )


def _warn(problem: str) -> None:
    print(f"k3train: rank {dist.get_rank()}: {problem}", file=sys.stderr, flush=True)
