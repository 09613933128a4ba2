"""How tokens reach their experts and come back: megatron-core's all-to-all, or MoonEP; with K3's numerics.

Experts are physical numbers (see `experts`). Shapes: t tokens, k experts of a token, E experts, l latent,
s sequence, b batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from offload.sites import collective, named, region, site
from parallel.moonep.dispatcher import MoonEPDispatcher
from parallel.moonep.layer import MoonEP, Routed
from parallel.moonep.plan import FILL, NONE, Eplb, Policy

from ..config import ExpertConfig
from ..ops.backends import current_device
from ..ops.host_copy import to_host
from .experts import LatentExpertMath, RoutedExperts
from .memo import LayerMemo
from .transformer_config import K3TransformerConfig


class Sizes(NamedTuple):
    """What the host knows of an exchange once it has waited for the device; names are megatron-core's."""

    input_splits: Any
    output_splits: Any
    output_splits_tp: Any
    num_global_tokens_per_local_expert: Any
    tokens_per_expert: Tensor


class Planned(NamedTuple):
    """A choice [t, k] on its way to `LatentDispatcher.mix`."""

    choice: Tensor
    memo: LayerMemo | None


class LatentDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all, with the weights applied to expert outputs where the token lives.

    K3 rounds each expert's output to the model's dtype, multiplies it by its FP32 weight after the down
    projection, and sums in FP32. Weights therefore never travel.
    """

    tokens_per_expert: Tensor
    num_global_tokens_per_local_expert: Tensor
    _known: Sizes | None = None
    """Of an earlier pass over the tokens that are at hand."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Rows of each local expert; they and the splits are on the host when megatron-core has waited."""
        if self._known is not None:
            self.num_out_tokens = routing_map.shape[0] * self.config.moe_router_topk
            for name, value in self._known._asdict().items():
                setattr(self, name, value)
            return self._known.tokens_per_expert
        rows: Tensor = super().preprocess(routing_map)
        if not rows.is_cuda:
            return rows
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            split = getattr(self, name)
            if isinstance(split, Tensor):
                setattr(self, name, to_host(split).numpy())
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = to_host(self.num_global_tokens_per_local_expert)
        return to_host(rows)

    def token_dispatch(self, rows: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange rows [t * k, l]; the second value stays where it is and only keeps the interface."""
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        received = collective(all_to_all(self.ep_group, rows, self.output_splits, self.input_splits))
        return received, received.new_ones(received.shape[0])

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Weight and sum rows [t * k, l] into tokens [s, b, l], in FP32, then round once."""
        # By value: under recompute this runs again when the dispatcher has long been busy with other tokens.
        weigh = partial(
            _weighted_sums,
            order=self.reversed_local_input_permutation_mapping,
            shape=self.hidden_shape_before_permute,
            counts=self.routing_map.sum(0),
        )
        # Kept: to sum again for a norm's sake would cost more than the few bytes are worth.
        combined = region("moe.combine", weigh, rows, self.probs, keep_results=True)
        return combined.view(self.hidden_shape)

    def plan(self, choice: Tensor, memo: LayerMemo | None, *, counted: bool = True) -> Planned:
        """Nothing to plan: the choice [t, k] itself; a filled `memo` has the sizes of its exchange."""
        return Planned(choice, memo)

    def mix[T](
        self,
        latent: Tensor,
        planned: Planned,
        weights: Tensor,
        experts: nn.Module,
        meanwhile: Callable[[], T],
    ) -> tuple[Tensor, T]:
        """Send latent [s, b, l] to its experts and bring the weighted sums back.

        Under recompute the second pass knows the sizes from the first one, and waits for nothing.

        Args:
            planned: what `plan` gave for the choice, int64 [t, k].
            weights: FP32 [t, k].
            experts: of rows [n, l] sorted by expert, and of the rows of each expert.
            meanwhile: work that waits for none of this; its value is handed through.
        """
        choice, memo = planned
        self._known = memo.plan if memo is not None else None
        shape = choice.shape[0], self.config.num_moe_experts
        with site("moe.dispatch"):
            probs = weights.new_zeros(shape).scatter(-1, choice, weights)
            routing_map = torch.zeros(shape, dtype=torch.bool, device=choice.device).scatter(-1, choice, True)
            rows, unused = self.dispatch_preprocess(latent, routing_map, probs)
            rows, unused = self.token_dispatch(rows, unused)
            rows, rows_per_expert, _ = self.dispatch_postprocess(rows, unused)
        if memo is not None and memo.plan is None:
            memo.plan = self._sizes(rows_per_expert)
        rows = self.combine_preprocess(experts(rows, rows_per_expert))
        returned = collective(self.token_combine(rows))
        return self.combine_postprocess(returned), meanwhile()

    def _sizes(self, rows_per_expert: Tensor) -> Sizes:
        """Of the exchange that the host has just waited for."""
        splits = self.input_splits, self.output_splits, self.output_splits_tp
        return Sizes(*splits, getattr(self, "num_global_tokens_per_local_expert", None), rows_per_expert)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """megatron-core's waiting, where there is something to wait for."""
        if self._known is not None:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


def _weighted_sums(
    rows: Tensor, probs: Tensor, *, order: Tensor, shape: torch.Size, counts: Tensor
) -> Tensor:
    """Each token's rows [t * k, l] weighted by probs [t, E], summed in FP32: `shape` [t, l], rounded once.

    Rows lie by expert, `counts` [E] of each; `order` [t * k] says of which token they are. `unpermute` could
    weight them as well, but waits for the device, behind all that is on its way to the host.
    """
    experts = torch.arange(counts.numel(), device=counts.device)
    experts = experts.repeat_interleave(counts, output_size=order.numel())
    weights = probs.flatten().index_select(0, order * counts.numel() + experts)
    # The product is FP32; backward keeps the rows as they are.
    sums = unpermute(rows * weights[:, None], order, restore_shape=shape)
    return sums.to(rows.dtype)


class BalancedDispatcher(MoonEPDispatcher):
    """MoonEP: every rank computes equally many rows, of its own experts and of borrowed ones.

    megatron-core's phases are there too; `mix` gives the same and keeps less for backward.
    """

    def __init__(self, config: K3TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        """Collective over the expert-parallel ranks."""
        assert config.expert_transport is not None
        experts, group = config.experts, pg_collection.ep
        moonep = MoonEP(
            group if group.size() > 1 else None,
            config.k3.num_experts,
            device=current_device(),
            policy=_policy(experts),
            slots=experts.slots,
            transport=config.expert_transport(),
            pad=config.expert_pad,
            # Ranks of a group have micro-batches of one shape.
            equal_tokens=True,
            codec=config.expert_codec(),
        )
        super().__init__(moonep, config, pg_collection)
        self.math = LatentExpertMath(config)

    def plan(self, choice: Tensor, memo: LayerMemo | None, *, counted: bool = True) -> Routed:
        """Start to plan; under recompute the second pass follows the first one's plan. choice [t, k].

        `counted`: for the step's numbers, as training is and evaluation is not.
        """
        if memo is None:
            return self.moonep.plan(choice, counted=counted)
        if memo.plan is None:
            memo.plan = self.moonep.plan(choice, counted=counted)
        return memo.plan  # type: ignore[no-any-return]

    def mix[T](
        self,
        latent: Tensor,
        routed: Routed,
        weights: Tensor,
        experts: RoutedExperts,
        meanwhile: Callable[[], T],
    ) -> tuple[Tensor, T]:
        """As `LatentDispatcher.mix`, with what `plan` gave; `meanwhile` hides the transfers.

        It stays on the same stream: Transformer Engine's products share one workspace.
        """
        tokens = latent.flatten(0, 1)
        first, second = experts.weights()
        self.moonep.send(tokens, routed, first, second)
        value = meanwhile()
        named("moe.dispatch_input", tokens)
        with site("moe.experts"):
            mixed = collective(self.moonep(tokens, weights, routed, self.math, first, second))
        return mixed.view_as(latent), value

    def memory(self) -> dict[str, Tensor]:
        """What the policy has learned, for checkpoints; changed in place."""
        policy, transport = self.moonep.planner.policy, self.moonep.transport
        if not isinstance(policy, Eplb):
            return {}
        return policy.memory(transport.ranks, self.moonep.num_experts, current_device())

    def place_copies(self) -> None:
        """Go on with a memory that was filled: the copies of experts on this layout's ranks."""
        policy = self.moonep.planner.policy
        if isinstance(policy, Eplb):
            policy.place()

    def observe(self, load: Tensor) -> None:
        """Let a policy that learns see a step's entries of each physical expert, int64 [E]."""
        policy = self.moonep.planner.policy
        counts = load.new_zeros(self.moonep.transport.ranks, load.numel())
        counts[0] = load
        policy.observe(counts)


def _policy(experts: ExpertConfig) -> Policy:
    if experts.policy == "eplb":
        return Eplb(every=experts.eplb_every, slots=experts.eplb_copies)
    return FILL if experts.policy == "fill" else NONE


def build_dispatcher(
    config: K3TransformerConfig, places: Sequence[int], pg_collection: ProcessGroupCollection
) -> LatentDispatcher | BalancedDispatcher:
    """The dispatcher that the configuration asks for; `places` are the rank's physical experts."""
    if config.experts.dispatcher == "moonep":
        return BalancedDispatcher(config, pg_collection)
    return LatentDispatcher(len(places), list(places), config=config, pg_collection=pg_collection)
