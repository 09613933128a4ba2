"""Per-Head Muon: matrices block by block through Newton-Schulz, everything else by AdamW, in one optimizer.

Sources: Kimi K3 report; Moonlight (arXiv:2502.16982) for momentum, scale and weight decay. The momentum is
kept as a running average, as megatron-core's Muon does; Newton-Schulz divides by the norm, so that this is
Moonlight's sum. megatron-core's wrappers hold the FP32 master weights, their shards under ZeRO, and the
copies back to the model: what this file sees is FP32, whole or a flat part of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from .newton_schulz import orthogonalize, update_scale
from .owners import Batch, Copy, Exchange


@dataclass(frozen=True)
class Settings:
    """The rules' constants."""

    momentum: float
    steps: int
    """Newton-Schulz iterations."""
    betas: tuple[float, float]
    """AdamW's."""
    eps: float
    dtype: torch.dtype = torch.bfloat16
    """Of the products in Newton-Schulz."""


@dataclass(frozen=True)
class Matrix:
    """A parameter that Muon updates, and what this rank's optimizer holds of it."""

    name: str
    shape: tuple[int, int]
    shard: Tensor | None
    """FP32 master weights from flat element `start` on; None where the rank holds nothing."""
    start: int = 0


@dataclass
class _Flight:
    """Messages on their way; what is sent stays in memory until they have arrived."""

    sent: Tensor
    received: Tensor
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class PerHeadMuon(torch.optim.Optimizer):
    """The update rule of all parameters that one of megatron-core's optimizers holds.

    Args:
        param_groups: with `lr` and `weight_decay`, whose parameters are FP32 and, in a `Matrix`, may be flat.
        matrices: what Muon updates, by the numbers that `exchanges` use.
        exchanges: this rank's part in the update of each model chunk.
        group: the ranks among which the shards lie; None where each rank holds everything.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        matrices: Sequence[Matrix],
        exchanges: Sequence[Exchange],
        settings: Settings,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # Shards are views of parameters, which torch's own constructor would not take.
        super().__init__([{"params": []}], {"lr": 0.0, "weight_decay": 0.0})
        self.param_groups = param_groups
        self.matrices, self.exchanges = list(matrices), list(exchanges)
        self.settings, self.device, self.process_group = settings, device, group
        self.row_scales: dict[str, Tensor] = {}
        """Factor for each row of a matrix, by its name, applied once behind the next update."""
        self.sent_bytes = {"muon_gather": 0, "muon_return": 0}
        """What this rank sent in the last update."""
        self._by_muon = {id(matrix.shard) for matrix in self.matrices if matrix.shard is not None}

    @torch.no_grad()
    def start_state(self) -> None:
        """Give every parameter that has none the state of step zero."""
        for parameter in self._parameters():
            if not self.state[parameter]:
                self.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
                if id(parameter) not in self._by_muon:
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient; a collective over the group."""
        self.start_state()
        rates: set[float] = set()
        for group in self.param_groups:
            by_muon = [parameter for parameter in group["params"] if id(parameter) in self._by_muon]
            self._adamw(group, [each for each in group["params"] if id(each) not in self._by_muon])
            if by_muon:
                rates.add(float(group["lr"]))
                self._decay_and_average(group, by_muon)
        assert len(rates) <= 1, f"matrices have different learning rates: {rates}"
        # A rank without a part of any matrix may own blocks, but adds nothing to them.
        self._update_matrices(rates.pop() if rates else 0.0)
        self._scale_rows()

    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.settings.eps,
            maximize=False,
        )

    def _decay_and_average(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        averages = [state["exp_avg"] for state in states]
        gradients = [_gradient(parameter) for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - self.settings.momentum)

    def _update_matrices(self, rate: float) -> None:
        """The messages of a chunk travel while the chunk before it is computed, and back likewise."""
        self.sent_bytes = dict.fromkeys(self.sent_bytes, 0)
        waiting: tuple[Exchange, _Flight] | None = None
        flight = self._gather(self.exchanges[0]) if self.exchanges else None
        for index, exchange in enumerate(self.exchanges):
            received = flight.wait() if flight else None
            following = self.exchanges[index + 1 : index + 2]
            flight = self._gather(following[0]) if following else None
            update = self._solve(exchange, received, rate)
            if waiting:
                self._land(*waiting, rate)
            waiting = (exchange, self._return(exchange, update)) if exchange.moved else None
        if waiting:
            self._land(*waiting, rate)

    def _gather(self, exchange: Exchange) -> _Flight | None:
        """Start sending to the owners what this rank holds of their blocks."""
        if not exchange.moved:
            return None
        place = self.device
        sent = torch.empty(sum(exchange.sent), dtype=torch.float32, device=place)
        for copy in exchange.leaving:
            self._direction(copy, sent)
        received = torch.empty(sum(exchange.received), dtype=torch.float32, device=place)
        return self._exchange("muon_gather", sent, received, exchange.sent, exchange.received)

    def _solve(self, exchange: Exchange, received: Tensor | None, rate: float) -> Tensor:
        """Orthogonalise what this rank owns; update its own elements and return those of others."""
        update = torch.empty(sum(exchange.received), dtype=self.settings.dtype, device=self.device)
        for batch in exchange.batches:
            blocks = torch.empty(batch.count, *batch.shape, dtype=torch.float32, device=self.device)
            self._fill(batch, blocks.view(-1), received)
            solved = orthogonalize(blocks, self.settings.steps, self.settings.dtype).reshape(-1)
            for copy in batch.local:
                self._add(copy, solved, rate)
            for arrival in batch.remote:
                piece = solved[arrival.at : arrival.at + arrival.size]
                update[arrival.received : arrival.received + arrival.size] = piece
        return update

    def _fill(self, batch: Batch, blocks: Tensor, received: Tensor | None) -> None:
        for copy in batch.local:
            self._direction(copy, blocks)
        for arrival in batch.remote:
            assert received is not None
            piece = received[arrival.received : arrival.received + arrival.size]
            blocks[arrival.at : arrival.at + arrival.size] = piece

    def _return(self, exchange: Exchange, update: Tensor) -> _Flight:
        home = torch.empty(sum(exchange.sent), dtype=update.dtype, device=update.device)
        return self._exchange("muon_return", update, home, exchange.received, exchange.sent)

    def _land(self, exchange: Exchange, flight: _Flight, rate: float) -> None:
        home = flight.wait()
        for copy in exchange.leaving:
            self._add(copy, home, rate)

    def _exchange(
        self, name: str, sent: Tensor, received: Tensor, to: Sequence[int], from_: Sequence[int]
    ) -> _Flight:
        """Each rank sends to each other one what is meant for it; nothing where that is nothing."""
        self.sent_bytes[name] += sent.nbytes
        work = dist.all_to_all_single(
            received, sent, list(from_), list(to), group=self.process_group, async_op=True
        )
        return _Flight(sent, received, work)

    def _direction(self, copy: Copy, out: Tensor) -> None:
        """Nesterov's mix of gradient and momentum, into the copy's place."""
        shard, part = self._part(copy)
        gradient, average = _gradient(shard).view(-1)[part], self.state[shard]["exp_avg"].view(-1)[part]
        place = out[copy.at : copy.at + copy.stop - copy.start]
        torch.lerp(gradient, average, self.settings.momentum, out=place)

    def _add(self, copy: Copy, solved: Tensor, rate: float) -> None:
        shard, part = self._part(copy)
        piece = solved[copy.at : copy.at + copy.stop - copy.start]
        shard.view(-1)[part].add_(piece, alpha=-rate * update_scale(copy.shape))

    def _part(self, copy: Copy) -> tuple[Tensor, slice]:
        matrix = self.matrices[copy.matrix]
        assert matrix.shard is not None, f"{matrix.name} has no element here"
        return matrix.shard, slice(copy.start - matrix.start, copy.stop - matrix.start)

    def _scale_rows(self) -> None:
        for matrix in self.matrices:
            if matrix.shard is not None and matrix.name in self.row_scales:
                flat, columns = matrix.shard.view(-1), matrix.shape[1]
                scales = self.row_scales[matrix.name].repeat_interleave(columns)
                flat.mul_(scales[matrix.start : matrix.start + flat.numel()])
        self.row_scales = {}


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "a parameter of the optimizer has no gradient"
    return gradient
