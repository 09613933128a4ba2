"""Routed experts: the local ones one after another, or as grouped products.

Experts are dealt to the ranks of their group like cards, so that experts which a checkpoint numbers side by
side, and which may be popular together, live apart. A rank's experts are numbered by place; "physical"
numbers count the places of all ranks. Letters: n rows, l latent, f half the width of the first projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor, nn

from parallel.moonep.experts import Segments, activate_backward
from parallel.moonep.plan.place import dealt, inverse

from ..ops import grouped
from ..ops.situ import situ_glu
from .linear import project
from .transformer_config import K3TransformerConfig


class SiTUGLU(nn.Module):
    """SiTU-GLU of [..., 2 f] into [..., f], for megatron-core's activation hook."""

    def __init__(self, *, config: K3TransformerConfig) -> None:
        super().__init__()
        self.beta, self.linear_beta = config.k3.situ_beta, config.k3.situ_linear_beta
        self.backend = config.k3.backends.situ

    def forward(self, gate_up: Tensor) -> Tensor:
        return situ_glu(gate_up, self.beta, self.linear_beta, backend=self.backend)


class RoutedExperts(Protocol):
    """The experts of a rank."""

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """First [2 f, l] and second [l, f] weights of each, by place."""
        ...


class SequentialExperts(SequentialMLP):
    """The local experts one after another; outputs are not weighted here."""

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:  # type: ignore[override]
        """rows [n, l], sorted by expert, to [n, l]."""
        counts = rows_per_expert.tolist()
        gate_up = self._project("linear_fc1", rows, counts)
        # The activation has no weights: one call over all experts' rows instead of one each.
        return self._project("linear_fc2", self.local_experts[0].activation_func(gate_up), counts)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """See `RoutedExperts.weights`."""
        experts = self.local_experts
        return [each.linear_fc1.weight for each in experts], [each.linear_fc2.weight for each in experts]

    def _project(self, linear: str, rows: Tensor, counts: list[int]) -> Tensor:
        pieces = rows.split(counts)
        experts = zip(self.local_experts, pieces, strict=True)
        return torch.cat([project(getattr(expert, linear), piece) for expert, piece in experts])


class GroupedExperts(TEGroupedMLP):
    """The local experts as grouped products of `ops.grouped`; outputs are not weighted here.

    Parameters, their names and checkpoints are those of megatron-core's grouped MLP.
    """

    config: K3TransformerConfig

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:  # type: ignore[override]
        """rows [n, l], sorted by expert, to [n, l]."""
        segments = grouped.Segments.of(rows_per_expert.tolist(), rows.device)
        backend = self.config.k3.backends.grouped
        first, second = self.weights()
        gate_up = grouped.grouped_linear(rows, first, segments, backend=backend)
        return grouped.grouped_linear(self.activation_func(gate_up), second, segments, backend=backend)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """See `RoutedExperts.weights`."""
        places = range(self.num_local_experts)
        first, second = (
            [getattr(linear, f"weight{place}") for place in places]
            for linear in (self.linear_fc1, self.linear_fc2)
        )
        return first, second


class LatentExpertMath:
    """Products and activation of the experts for `parallel.moonep`, see its `ExpertMath`."""

    def __init__(self, config: K3TransformerConfig) -> None:
        self.activation = SiTUGLU(config=config)
        self.backend = config.k3.backends.grouped
        self._last: tuple[Segments, grouped.Segments] | None = None

    def multiply(self, rows: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        """rows [n, i], weights [o, i] to [n, o]."""
        return grouped.multiply(rows, weights, self._grouped(segments), backend=self.backend)

    def input_gradient(self, grad: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        """grad [n, o], weights [o, i] to [n, i]."""
        return grouped.input_gradient(grad, weights, self._grouped(segments), backend=self.backend)

    def weight_gradients(self, grad: Tensor, rows: Tensor, segments: Segments) -> Sequence[Tensor | None]:
        """grad [n, o], rows [n, i] to [o, i] for each group."""
        return grouped.weight_gradients(grad, rows, self._grouped(segments), backend=self.backend)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[n, 2 f] to [n, f]."""
        activated: Tensor = self.activation(gate_up)
        return activated

    def activate_backward(
        self, gate_up: Tensor, grad: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `parallel.moonep.experts.activate_backward`."""
        return activate_backward(self.activation, gate_up, grad, weights)

    def _grouped(self, segments: Segments) -> grouped.Segments:
        """The same object for all products of a wave: it keeps what it works out."""
        if self._last is None or self._last[0] is not segments:
            self._last = segments, grouped.Segments(segments.counts, segments.ends)
        return self._last[1]


def name_globally(described: Mapping[str, Any], num_experts: int, ranks: int) -> None:
    """Let a checkpoint know routed experts by their number in the whole model, whatever rank holds them.

    `described`: megatron-core's sharded state of the experts, which numbers them by physical place.
    """
    logical = inverse(dealt(num_experts, ranks))
    for entry in described.values():
        if isinstance(entry, ShardedTensorFactory):
            entry.build_fn = partial(_build_renamed, entry.build_fn, logical)
        else:
            assert isinstance(entry, ShardedTensor | ShardedObject), entry
            _rename(entry, logical)


def _build_renamed(build: Callable[..., list[ShardedTensor]], logical: list[int], *args: Any) -> list[Any]:
    pieces = build(*args)
    for piece in pieces:
        _rename(piece, logical)
    return pieces


def _rename(entry: ShardedTensor | ShardedObject, logical: list[int]) -> None:
    if isinstance(entry, ShardedTensor):
        assert entry.axis_fragmentations is not None and entry.axis_fragmentations[0] == len(logical)
        entry.global_offset = (logical[entry.global_offset[0]], *entry.global_offset[1:])
