"""megatron-core's own schedules behind the executor's interface: what the execution of a table must equal.

They send one tensor of fixed shape between stages, so every edge carries the whole bank, padded to the
widest. Shapes: s sequence, b batch, d hidden, R rows of the padded payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from .rows import RowPlan


class PaddedCommunicator(P2PCommunicator):
    """P2PCommunicator whose tensors have `rows` times the width that the schedule asks for."""

    rows: int

    def _communicate(self, *, tensor_shape: Any, **kwargs: Any) -> Any:
        if tensor_shape is not None:
            *outer, hidden_size = tensor_shape
            tensor_shape = (*outer, hidden_size * self.rows)
        return super()._communicate(tensor_shape=tensor_shape, **kwargs)


class ReferenceSchedule:
    """Stands where `runtime.TableExecutor` does."""

    def __init__(self, rows: RowPlan, rank: int) -> None:
        assert not rows.cache, "megatron-core's schedules know no cache"
        self.rows, self.rank = rows, rank
        self.width = max(rows.width(stage) for stage in range(rows.layout.stages))

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        model: list[nn.Module],
        data_iterator: list[Any],
        pg_collection: ProcessGroupCollection,
        tower: None = None,
        **keywords: Any,
    ) -> list[Any]:
        """megatron-core's forward_backward_func; it has no place for a tower."""
        assert tower is None
        layout, communicator = self.rows.layout, None
        stages = {id(chunk): layout.stage(self.rank, index) for index, chunk in enumerate(model)}

        def step(data: Any, chunk: nn.Module) -> tuple[Any, Any]:
            return self._step(forward_step_func, data, chunk, stages[id(chunk)])

        schedule: Callable[..., list[Any]] = forward_backward_no_pipelining
        if layout.pipeline > 1:
            communicator = PaddedCommunicator(pg_collection.pp, get_model_config(model[0]))
            communicator.rows = self.width
            schedule = forward_backward_pipelining_without_interleaving
        if layout.virtual > 1:
            schedule = forward_backward_pipelining_with_interleaving
        return schedule(
            forward_step_func=step,
            model=model if layout.virtual > 1 else model[0],
            data_iterator=data_iterator if layout.virtual > 1 else data_iterator[0],
            p2p_communicator=communicator,
            pg_collection=pg_collection,
            **keywords,
        )

    def _step(self, function: Callable[..., Any], data: Any, chunk: nn.Module, stage: int) -> tuple[Any, Any]:
        bare = unwrap_model(chunk)
        if stage:
            (payload,) = bare.inputs
            bare.set_input_tensor(payload.chunk(self.width, dim=-1)[: self.rows.width(stage)])
        output, loss = function(data, chunk)
        return (self._pad(output) if stage < self.rows.layout.stages - 1 else output), loss

    def _pad(self, sources: Sequence[Tensor]) -> Tensor:
        """Sources [s, b, d] to one tensor [s, b, R * d]."""
        padding = [torch.zeros_like(sources[-1])] * (self.width - len(sources))
        return torch.cat([*sources, *padding], dim=-1)
