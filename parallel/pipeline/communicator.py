"""Point-to-point exchange of a payload that is wider than the hidden size.

megatron-core's schedules send one tensor [s, b, hidden_size] between stages. Block AttnRes carries a bank
of rows beside the running sum, so the same exchange happens with `rows * hidden_size` channels.
"""

from __future__ import annotations

from typing import Any

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.distributed import ProcessGroup


class PayloadCommunicator(P2PCommunicator):
    """P2PCommunicator whose tensors have `rows` times the width that the schedule asks for."""

    def __init__(self, pp_group: ProcessGroup, config: ModelParallelConfig, rows: int) -> None:
        super().__init__(pp_group, config)
        self.rows = rows

    def _communicate(self, *, tensor_shape: Any, **kwargs: Any) -> Any:
        if tensor_shape is not None:
            *outer, hidden_size = tensor_shape
            tensor_shape = (*outer, hidden_size * self.rows)
        return super()._communicate(tensor_shape=tensor_shape, **kwargs)
