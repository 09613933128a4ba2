"""megatron-core's pipeline schedules, called with our groups and our payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from .communicator import PayloadCommunicator


def forward_backward(
    forward_step: Callable[..., Any],
    batches: Sequence[Any],
    chunks: list[nn.Module],
    *,
    sequence_length: int,
    micro_batch_size: int,
    payload_rows: int,
    pg_collection: ProcessGroupCollection,
    forward_only: bool = False,
) -> list[Any]:
    """Run every micro-batch through every chunk of this rank, and back unless `forward_only`.

    Args:
        forward_step: megatron-core's forward_step_func.
        batches: the micro-batches of this step; each chunk walks them from the start.
        chunks: this rank's model chunks in the order of the forward pass, wrapped or bare.
        payload_rows: width of the tensor between stages in units of the hidden size.

    Returns:
        what the loss function reported for each micro-batch; empty unless this rank holds the last stage.
    """
    iterators: list[Iterator[Any]] = [iter(batches) for _ in chunks]
    interleaved = len(chunks) > 1
    schedule: Callable[..., list[Any]]
    communicator = None
    if pg_collection.pp.size() == 1:
        schedule = forward_backward_no_pipelining
    else:
        config = chunks[0].config
        communicator = PayloadCommunicator(pg_collection.pp, config, payload_rows)
        schedule = (
            forward_backward_pipelining_with_interleaving
            if interleaved
            else forward_backward_pipelining_without_interleaving
        )
    return schedule(
        forward_step_func=forward_step,
        data_iterator=iterators if interleaved else iterators[0],
        model=chunks if interleaved else chunks[0],
        num_microbatches=len(batches),
        seq_length=sequence_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        p2p_communicator=communicator,
        pg_collection=pg_collection,
    )
