"""Point-to-point transfers of a pipeline: posted in the order of the program, waited for before use.

gloo matches by tag, so one group is enough. NCCL matches by order: every edge and flow gets a communicator of
its own, so that a late receive of one cannot hold back another, and every rank posts in one global order
(`messages.programs`), which no queueing discipline can deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .messages import FLOWS, Message

STAGES, MICROBATCHES = 1 << 10, 1 << 16
Edge = tuple[str, int, int]
"""(flow, source, target), pipeline ranks."""


def edges(pipeline: int, *, vision: bool) -> list[Edge]:
    """Every edge that a ring of pipeline ranks may use."""
    ring = [(rank, (rank + 1) % pipeline) for rank in range(pipeline)] if pipeline > 1 else []
    found = [(FLOWS[0], source, target) for source, target in ring]
    found += [(FLOWS[1], target, source) for source, target in ring]
    if vision:
        found += [(FLOWS[2], rank, 0) for rank in range(1, pipeline)]
        found += [(FLOWS[3], 0, rank) for rank in range(1, pipeline)]
    return found


@dataclass
class Wires:
    """Sends and receives of this rank; bytes are counted by flow."""

    group: dist.ProcessGroup
    channels: dict[Edge, dist.ProcessGroup] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FLOWS, 0))
    _received: dict[Message, tuple[Any, Tensor]] = field(default_factory=dict)
    _sent: list[tuple[Any, Tensor]] = field(default_factory=list)

    def receive(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> None:
        """Post a receive; `wait` hands out what came."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = None
        if buffer.numel():
            group, tag = self._channel(message)
            source = dist.get_global_rank(self.group, message.source)
            work = dist.irecv(buffer, source, group=group, tag=tag)
        self._received[message] = work, buffer

    def send(self, message: Message, tensor: Tensor) -> None:
        """Post a send; the tensor is kept until it is through."""
        self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
        if tensor.numel():
            group, tag = self._channel(message)
            target = dist.get_global_rank(self.group, message.target)
            work = dist.isend(tensor, target, group=group, tag=tag)
            self._sent.append((work, tensor))
        self.bytes_sent[message.flow] += tensor.numel() * tensor.element_size()

    def wait(self, message: Message) -> Tensor:
        """What a posted receive brought; on a GPU the current stream waits, not the host."""
        work, buffer = self._received.pop(message)
        if work is not None:
            work.wait()
        return buffer

    def finish(self) -> None:
        """Wait for the sends; nothing may be left to receive."""
        assert not self._received, f"received and never used: {list(self._received)}"
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _channel(self, message: Message) -> tuple[dist.ProcessGroup, int]:
        if self.channels:
            return self.channels[message.flow, message.source, message.target], 0
        flow = FLOWS.index(message.flow)
        return self.group, (flow * STAGES + message.stage) * MICROBATCHES + message.microbatch


def open_wires(group: dist.ProcessGroup, pipelines: list[list[int]], *, vision: bool = False) -> Wires:
    """Wires of this rank's pipeline; a collective over all ranks.

    Args:
        group: the ranks of this pipeline.
        pipelines: global ranks of every pipeline, in one order on all ranks: making a communicator is
            collective over the world, so each rank takes part in making all of them.
    """
    if dist.get_backend(group) == "gloo":
        return Wires(group)
    mine = dist.get_process_group_ranks(group)
    channels = {}
    for ranks in pipelines:
        for flow, source, target in edges(len(ranks), vision=vision):
            made = dist.new_group([ranks[source], ranks[target]])
            if ranks == mine and isinstance(made, dist.ProcessGroup):
                channels[flow, source, target] = made
    return Wires(group, channels)
