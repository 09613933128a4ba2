"""One rank of the tests of Per-Head Muon over shards: what it ends with, and what it sent."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch

from launch.compose import compose, resolve_layout
from tests.parity.worker import SMALL

MICROBATCHES = 4


def two_steps(overrides: list[str], worth_sending: float | None = None) -> dict[str, Any]:
    """Digest of every weight after two steps on seeded tokens, and bytes sent in the last by each optimizer.

    Args:
        worth_sending: FLOPs for a byte from which on a block may leave its rank.
    """
    from k3train.layout import layout_of
    from k3train.model.naming import named_parameters
    from k3train.ops.packing import Packing
    from k3train.optim import owners
    from k3train.optim.build import sub_optimizers
    from k3train.train.assemble import build_trainer
    from k3train.train.step import train_step
    from parallel.groups import destroy, initialize

    if worth_sending is not None:
        owners.WORTH_SENDING = worth_sending
    config = resolve_layout(
        compose([*SMALL, "optim=muon_per_head", *overrides]), int(os.environ["WORLD_SIZE"])
    )
    groups = initialize(layout_of(config), timeout_minutes=1, seed=1)
    trainer = build_trainer(config, groups)
    rank, ranks = groups.pg_collection.dp.rank(), groups.pg_collection.dp.size()
    windows = torch.randint(0, 257, (MICROBATCHES, 2, 41), generator=torch.Generator().manual_seed(3))
    share = MICROBATCHES // ranks
    batches = [
        {
            "tokens": window[:, :-1].contiguous(),
            "labels": window[:, 1:].contiguous(),
            "loss_mask": torch.ones(2, 40),
            "sample_ids": torch.arange(2),
            "packing": Packing.single(2, 40, "cpu"),
        }
        for window in windows[rank * share : (rank + 1) * share]
    ]
    for step in (1, 2):
        train_step(trainer, [dict(batch) for batch in batches], step)
    inner = [part.optimizer for part in sub_optimizers(trainer.optimizer)]
    answer = {
        "weights": {
            name: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
            for model in trainer.models
            for name, parameter in named_parameters(model)
        },
        "sent": [part.sent_bytes for part in inner],
        "blocks": sum(batch.count for part in inner for each in part.exchanges for batch in each.batches),
        "names": [
            [name for name, parameter in named_parameters(model) if parameter.requires_grad]
            for model in trainer.models
        ],
        "buffer_bytes": sum(
            buffer.grad_data.nbytes
            for module in trainer.modules
            for buffer in (*module.buffers, *module.expert_parallel_buffers)
        ),
    }
    destroy()
    return answer
