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

from offload.sites import region, site
from parallel.moonep import EXACT, Segments, activate_backward
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
    """The local experts one after another; outputs are not weighted here.

    Their own linear layers see nothing of a codec: with one, they are grouped products.
    """

    config: K3TransformerConfig

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:  # type: ignore[override]
        """rows [n, l], sorted by expert, to [n, l]."""
        if self.config.expert_codec() is not EXACT:
            activation = self.local_experts[0].activation_func
            return _grouped(self.config, self.weights(), activation, rows, rows_per_expert)
        counts = rows_per_expert.tolist()
        gate_up = region("moe.dispatch_input", partial(self._project, "linear_fc1", counts), rows)
        # The activation has no weights: one call over all experts' rows instead of one each.
        activated = region("moe.activation", self.local_experts[0].activation_func, gate_up)
        with site("moe.experts"):
            return self._project("linear_fc2", counts, activated)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """See `RoutedExperts.weights`."""
        experts = self.local_experts
        return [each.linear_fc1.weight for each in experts], [each.linear_fc2.weight for each in experts]

    def _project(self, linear: str, counts: list[int], rows: Tensor) -> Tensor:
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
        return _grouped(self.config, self.weights(), self.activation_func, rows, rows_per_expert)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """See `RoutedExperts.weights`."""
        places = range(self.num_local_experts)
        first, second = (
            [getattr(linear, f"weight{place}") for place in places]
            for linear in (self.linear_fc1, self.linear_fc2)
        )
        return first, second


def _grouped(
    config: K3TransformerConfig,
    weights: tuple[list[Tensor], list[Tensor]],
    activation: Callable[[Tensor], Tensor],
    rows: Tensor,
    rows_per_expert: Tensor,
) -> Tensor:
    """rows [n, l], sorted by expert, through grouped products, as the codec lets them see all: [n, l]."""
    codec, (first, second) = config.expert_codec(), weights
    multiply = partial(
        grouped.grouped_linear,
        segments=grouped.Segments.of(rows_per_expert.tolist(), rows.device),
        seen=codec.weights,
        multiply=config.expert_multiply(),
        backend=config.k3.backends.grouped,
    )
    # What a product sees is what it keeps: rounding is a part of the region before it.
    gate_up = region("moe.dispatch_input", lambda rows: multiply(codec.rows(rows), first), rows)
    activated = region("moe.activation", lambda gate_up: codec.rows(activation(gate_up)), gate_up)
    with site("moe.experts"):
        return multiply(activated, second)


class LatentExpertMath:
    """Products and activation of the experts for `parallel.moonep`, see its `ExpertMath`."""

    def __init__(self, config: K3TransformerConfig) -> None:
        self.activation = SiTUGLU(config=config)
        self.backend, self.codec = config.k3.backends.grouped, config.expert_codec()
        self._multiply = config.expert_multiply()
        self._last: tuple[Segments, grouped.Segments] | None = None

    def multiply(self, rows: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        """rows [n, i], weights [o, i] to [n, o]."""
        return self._multiply(rows, weights, self._grouped(segments), backend=self.backend)

    def input_gradient(self, grad: Tensor, weights: Sequence[Tensor], segments: Segments) -> Tensor:
        """grad [n, o], weights [o, i] to [n, i]."""
        return grouped.input_gradient(grad, weights, self._grouped(segments), backend=self.backend)

    def weight_gradients(self, grad: Tensor, rows: Tensor, segments: Segments) -> Sequence[Tensor | None]:
        """grad [n, o], rows [n, i] to [o, i] for each group."""
        return grouped.weight_gradients(grad, rows, self._grouped(segments), backend=self.backend)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[n, 2 f] to what the second product sees, [n, f]."""
        return self.codec.rows(self.activation(gate_up))

    def activate_backward(
        self, gate_up: Tensor, grad: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `parallel.moonep.experts.activate_backward`."""
        return activate_backward(self.activation, gate_up, grad, weights, self.codec.rows)

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
