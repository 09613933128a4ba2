"""Executes a table with megatron-core's forward and backward step; stands in for its forward_backward_func.

Every rank walks its program: post receives and sends in the global order, wait for an input just before it
is used, run the operation. What a model chunk gets and gives is a list of sources, bank rows and a running
tensor [s, b, d] each; `bank.RowBank` turns them into the one tensor that travels. The first stage gets the
features of the micro-batch's images instead, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from .bank import RowBank, forget_values
from .clock import BusyClock, StepClock
from .messages import (
    ACTIVATION,
    EMBEDDING,
    EMBEDDING_GRADIENT,
    GRADIENT,
    Message,
    Step,
    consumes,
    programs,
)
from .place import Place as Standing
from .rows import RowPlan
from .simulate import simulate, uniform
from .table import (
    BACKWARD,
    FORWARD,
    PREFETCH,
    REDUCE,
    RELEASE,
    TOWER,
    VISION_BACKWARD,
    VISION_FORWARD,
    Op,
    Table,
)
from .wires import Wires

Place = tuple[int, int]
"""(chunk or part, micro-batch)"""

RUN = {
    FORWARD: "_forward",
    BACKWARD: "_backward",
    VISION_FORWARD: "_vision_forward",
    VISION_BACKWARD: "_vision_backward",
    REDUCE: "_reduce",
    PREFETCH: "_move",
    RELEASE: "_move",
}
"""The method of each kind of operation. Not bound ones, whose circle would keep an executor's tensors."""


class Tower(Protocol):
    """The vision tower as the executor sees it."""

    def shape(self, microbatch: int, part: int) -> tuple[int, ...]:
        """Shape of the features that `forward` gives, known on every rank."""
        ...

    def forward(self, microbatch: int, part: int) -> Tensor:
        """Features of part of a micro-batch's images, with their graph."""
        ...

    def reduce(self) -> None:
        """Start summing the tower's gradients."""
        ...


class Activations(Protocol):
    """What has the tensors that forwards save, wherever they are; a key names a forward."""

    def forward(self, key: Hashable) -> AbstractContextManager[None]:
        """The forward runs inside."""
        ...

    def backward(self, key: Hashable) -> AbstractContextManager[None]:
        """Its backward runs inside."""
        ...

    def release(self, key: Hashable) -> None:
        """The backward is far away."""
        ...

    def prefetch(self, key: Hashable) -> None:
        """The backward comes soon."""
        ...

    def hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor for later forwards; the answer gives it back."""
        ...

    def mark(self, operation: str) -> None:
        """An operation has ended."""
        ...


class Gradients(Protocol):
    """What gives chunks the memory that their gradients are accumulated in."""

    def begin(self, chunk: int) -> None:
        """A backward of the chunk follows."""
        ...


@dataclass
class _State:
    """Of one step."""

    chunks: list[nn.Module]
    data: list[Iterator[Any]]
    config: ModelParallelConfig
    forward_step_func: Callable[..., Any]
    forward_only: bool
    context_size: int
    tower: Tower | None
    shape: tuple[int, int, int]
    """[s, b, d] of one source."""
    device: torch.device
    bank: RowBank
    tokens: Tensor
    inputs: dict[Place, Tensor | None] = field(default_factory=dict)
    outputs: dict[Place, Tensor] = field(default_factory=dict)
    features: dict[Place, Tensor] = field(default_factory=dict)
    arrived: dict[Message, Tensor] = field(default_factory=dict)
    local: dict[Message, Tensor] = field(default_factory=dict)
    reports: list[Any] = field(default_factory=list)

    def assert_empty(self) -> None:
        """Nothing of a step is left over at its end."""
        assert self.bank.is_empty and not (self.inputs or self.outputs or self.features), "left over"
        assert not (self.arrived or self.local), "messages that nobody used"


class TableExecutor:
    """One rank's part of a table. Built once, called for every step."""

    def __init__(
        self,
        table: Table,
        rows: RowPlan,
        wires: Wires | None,
        rank: int,
        *,
        activations: Activations | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """Plan the transfers of `table`; `wires` may be None with one pipeline rank.

        Args:
            activations: of the forwards; None where what they save stays with autograd.
            gradients: told before each backward; None where chunks have buffers of their own.

        Raises:
            NotImplementedError: the table splits the backward, which the chunks' autograd graphs do not.
        """
        if table.splits_backward:
            raise NotImplementedError(
                f"schedule {table.name} splits the backward: it can be planned and drawn, not run"
            )
        assert wires is not None or table.layout.pipeline == 1
        self.table, self.rows, self.wires, self.rank = table, rows, wires, rank
        self.activations = None if is_forward_only(table) else activations
        self.gradients = gradients
        timeline = simulate(table, uniform(table.layout, parts=table.parts))
        self.program: list[Step] = programs(table, timeline)[rank]
        self.clock: StepClock | None = None
        self.busy: BusyClock | None = None
        """Set while the time of operations is added up."""
        self.place = Standing()

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any] | list[Iterator[Any]],
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        pg_collection: ProcessGroupCollection,
        force_all_reduce: bool = False,
        tower: Tower | None = None,
    ) -> list[Any]:
        """megatron-core's forward_backward_func, with the keywords that apply.

        Returns what the loss function reported for each micro-batch on the rank of the last stage, else [].
        """
        layout = self.table.layout
        assert num_microbatches == layout.microbatches, (num_microbatches, layout.microbatches)
        assert forward_only == is_forward_only(self.table)
        chunks = model if isinstance(model, list) else [model]
        data = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        assert len(chunks) == len(data) == layout.virtual
        config = get_model_config(chunks[0])
        context_size, device = pg_collection.cp.size(), next(chunks[0].parameters()).device
        self._state = state = _State(
            chunks=chunks,
            data=data,
            config=config,
            forward_step_func=forward_step_func,
            forward_only=forward_only,
            context_size=context_size,
            tower=tower,
            shape=(seq_length // context_size, micro_batch_size, config.hidden_size),
            device=device,
            bank=RowBank(self.rows, self.rank, self.activations.hold if self.activations else None),
            tokens=torch.zeros([], dtype=torch.int, device=device),
        )
        try:
            with (config.no_sync_func or nullcontext)():
                self._walk()
        finally:
            # An executor outlives its step by far: it must hold none of the step's tensors.
            del self._state
        state.assert_empty()
        if config.finalize_model_grads_func is not None and not forward_only:
            config.finalize_model_grads_func(
                chunks,
                state.tokens if config.calculate_per_token_loss else None,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        return state.reports

    def _walk(self) -> None:
        place = self.place
        for action, item in self.program:
            place.at(action, item)
            if isinstance(item, Op):
                self._timed(item)
                continue
            assert self.wires is not None
            if action == "recv":
                self.wires.receive(item, self._message_shape(item), self._dtype, self._state.device)
            elif action == "wait":
                self._state.arrived[item] = self.wires.wait(item)
            else:
                assert action == "send", action
                self.wires.send(item, self._state.local.pop(item))
        if self.wires is not None:
            place.at("finish", None)
            self.wires.finish()
        place.at("", None)

    def _timed(self, op: Op) -> None:
        run = getattr(self, RUN[op.kind])
        with (
            nullcontext() if self.clock is None else self.clock.measure(op),
            nullcontext() if self.busy is None else self.busy.measure(),
        ):
            run(op)
        if self.activations is not None:
            self.activations.mark(str(op))

    @property
    def _dtype(self) -> torch.dtype:
        return self._state.config.params_dtype  # type: ignore[no-any-return]

    def _message_shape(self, message: Message) -> tuple[int, ...]:
        if message.flow == ACTIVATION:
            return self._edge_shape(message.stage)
        if message.flow == GRADIENT:
            return self._edge_shape(message.stage + 1)
        assert self._state.tower is not None
        return self._state.tower.shape(message.microbatch, message.stage)

    def _edge_shape(self, stage: int) -> tuple[int, ...]:
        """Shape of the message into a stage, and of its gradient."""
        s, b, hidden_size = self._state.shape
        return s, b, self.rows.width(stage) * hidden_size

    def _take(self, op: Op, flow: str) -> dict[int, Tensor]:
        """What an operation consumes of a flow, by stage or part: off the wire, or from this rank."""
        found = {}
        for message in consumes(self.table, self.rank, op):
            if message.flow == flow:
                found[message.stage] = self._state.arrived.pop(message)
        for message in [held for held in self._state.local if held.target == self.rank == held.source]:
            if message.flow == flow and self._is_for(message, op):
                found[message.stage] = self._state.local.pop(message)
        return found

    def _is_for(self, message: Message, op: Op) -> bool:
        if message.microbatch != op.microbatch:
            return False
        if message.flow == EMBEDDING:
            return True
        if message.flow == EMBEDDING_GRADIENT:
            return message.stage == op.chunk
        return message.stage == self.table.layout.stage(self.rank, op.chunk)

    def _give(self, flow: str, target: int, stage: int, microbatch: int, tensor: Tensor) -> None:
        self._state.local[Message(flow, self.rank, target, stage, microbatch)] = tensor

    def _forward(self, op: Op) -> None:
        layout, state = self.table.layout, self._state
        stage = layout.stage(self.rank, op.chunk)
        last = stage == layout.stages - 1
        place = op.chunk, op.microbatch
        received = self._input(op, stage)
        sources: Sequence[Tensor | None] = [received]
        if stage:
            assert received is not None
            sources = state.bank.enter(stage, op.microbatch, received)

        def step(data: Iterator[Any], model: nn.Module) -> tuple[Any, Any]:
            output, loss = state.forward_step_func(data, model)
            return (output if last else state.bank.leave(stage, op.microbatch, output)), loss

        with self._saving(place):
            (output,), tokens = forward_step(
                step,
                state.data[op.chunk],
                state.chunks[op.chunk],
                layout.microbatches,
                sources,
                state.reports,
                state.config,
                state.context_size,
                is_first_microbatch=op.microbatch == 0 and not state.forward_only,
                current_microbatch=op.microbatch,
                vp_stage=op.chunk if layout.virtual > 1 else None,
                is_last_stage=last,
            )
        state.tokens += tokens
        if not last:
            self._give(ACTIVATION, layout.home(stage + 1)[0], stage + 1, op.microbatch, output.detach())
        if state.forward_only:
            if op.chunk == layout.virtual - 1:
                state.bank.forget(op.microbatch)
            return
        if not last:
            deallocate_output_tensor(output, state.config.deallocate_pipeline_outputs)
        state.inputs[place], state.outputs[place] = received, output
        if self.activations is not None:
            # Of what comes in, only the gradient is asked for later.
            forget_values(
                [*state.bank.leaves(stage, op.microbatch), *([] if received is None else [received])]
            )

    def _saving(self, key: Hashable) -> AbstractContextManager[None]:
        return nullcontext() if self.activations is None else self.activations.forward(key)

    def _using(self, key: Hashable) -> AbstractContextManager[None]:
        return nullcontext() if self.activations is None else self.activations.backward(key)

    def _input(self, op: Op, stage: int) -> Tensor | None:
        """What a forward starts from, a leaf: the message of the stage before, or image features."""
        if stage:
            (received,) = self._take(op, ACTIVATION).values()
        else:
            parts = self._take(op, EMBEDDING)
            if not parts:
                return None
            received = torch.cat([parts[part] for part in sorted(parts)])
        return received if self._state.forward_only else received.requires_grad_()

    def _backward(self, op: Op) -> None:
        layout, state = self.table.layout, self._state
        stage = layout.stage(self.rank, op.chunk)
        place = op.chunk, op.microbatch
        gradient = None
        if stage < layout.stages - 1:
            (gradient,) = self._take(op, GRADIENT).values()
        received, output = state.inputs.pop(place), state.outputs.pop(place)
        if self.gradients is not None:
            self.gradients.begin(op.chunk)
        with self._using(place):
            (gradient,) = backward_step([received], output, gradient, state.config)
        state.bank.collect(stage, op.microbatch, gradient if stage else None)
        if stage:
            assert gradient is not None
            self._give(GRADIENT, layout.home(stage - 1)[0], stage - 1, op.microbatch, gradient)
        elif received is not None:
            assert gradient is not None
            self._give_features_back(op.microbatch, gradient)

    def _give_features_back(self, microbatch: int, gradient: Tensor) -> None:
        """Hand the gradient of each part's features to the rank that made them."""
        assert self._state.tower is not None
        parts = range(self.table.parts[microbatch])
        sizes = [self._state.tower.shape(microbatch, part)[0] for part in parts]
        for part, piece in zip(parts, gradient.split(sizes), strict=True):
            target = self.table.tower_rank[microbatch, part]
            self._give(EMBEDDING_GRADIENT, target, part, microbatch, piece.contiguous())

    def _vision_forward(self, op: Op) -> None:
        assert self._state.tower is not None
        with self._saving((VISION_FORWARD, op.chunk, op.microbatch)):
            features = self._state.tower.forward(op.microbatch, op.chunk)
        if not self._state.forward_only:
            self._state.features[op.chunk, op.microbatch] = features
        target = self.table.layout.home(0)[0]
        self._give(EMBEDDING, target, op.chunk, op.microbatch, features.detach())

    def _vision_backward(self, op: Op) -> None:
        (gradient,) = self._take(op, EMBEDDING_GRADIENT).values()
        features = self._state.features.pop((op.chunk, op.microbatch))
        with self._using((VISION_FORWARD, op.chunk, op.microbatch)):
            if features.requires_grad:
                torch.autograd.backward(features, gradient)

    def _move(self, op: Op) -> None:
        if self.activations is not None:
            move = self.activations.release if op.kind == RELEASE else self.activations.prefetch
            move((op.chunk, op.microbatch))

    def _reduce(self, op: Op) -> None:
        if op.chunk != TOWER:
            wrapped: Any = self._state.chunks[op.chunk]
            wrapped.start_grad_sync()
        elif self._state.tower is not None:
            self._state.tower.reduce()


def is_forward_only(table: Table) -> bool:
    """Whether nothing has a backward."""
    return all(op.kind in (FORWARD, VISION_FORWARD) for op in table.ranks[0])
