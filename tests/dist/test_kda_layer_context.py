"""The KDA layer over a context group, its regions kept or run again, against one rank with whole rows."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.launch import run_workers

WIDTH, S = 32, 24
STARTS = {2: (0, 7, 24), 4: (0, 7, 8, 15, 24)}
POLICIES: dict[str, dict[str, str]] = {
    "kept": {},
    "every region": {"kda.*": "recompute"},
    "core": {"kda.core": "recompute"},
    "convolution": {"kda.qkv": "recompute"},
}
MODEL = (
    "recipe=tiny", "parallel=single", "vision=none", "data.images=[]", "model.num_layers=4",
    f"model.hidden_size={WIDTH}", "model.num_heads=2", "model.kda_head_dim=8", "model.num_experts=0",
    "model.backends.linear=local", "model.backends.kda=chunk", "model.backends.short_conv=shift",
)  # fmt: skip


def build(collection: Any) -> Any:
    """The layer, the same numbers on every rank."""
    from megatron.core.transformer.spec_utils import build_module

    from k3train.model.spec import layer_submodules
    from k3train.model.transformer_config import transformer_config
    from launch.compose import compose, resolve_layout

    config = resolve_layout(compose([*MODEL]), 1)
    spec = layer_submodules(config.model, 0).attention
    layer = build_module(spec, config=transformer_config(config), pg_collection=collection)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer


def once(
    layer: Any, x: Tensor, weight: Tensor, packing: Any, policy: dict[str, str] | None
) -> dict[str, Any]:
    """Output [s, b, d], and gradients of input and parameters."""
    from offload import fp8
    from offload.manager import ActivationManager
    from offload.policy import Policy

    layer.zero_grad()
    x = x.clone().requires_grad_()
    manager = None
    if policy is not None:
        manager = ActivationManager(
            Policy.read(policy),
            SimpleNamespace(used=dict),  # type: ignore[arg-type]
            parameters=layer.parameters(),
            device=x.device,
            codec=fp8,
            coded=torch.float64,
            window=1 << 20,
            smallest=1,
        )
    with manager.forward(0) if manager else nullcontext():
        output = layer(x, packing)
        loss = (output * weight).sum()
    with manager.backward(0) if manager else nullcontext():
        loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "x": x.grad, **grads}


def worker(ranks: int) -> dict[str, Any]:
    """What this rank's columns give under each policy, and with one rank whole rows."""
    from k3train.ops.packing import Packing
    from parallel.context.exchange import traffic
    from parallel.groups import initialize
    from parallel.topology import Topology

    collection = initialize(Topology(context=ranks), timeout_minutes=1, seed=1).pg_collection
    layer, starts = build(collection), STARTS[ranks]
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(2, S, 2, WIDTH, generator=generator)
    tokens = torch.zeros(2, S)
    tokens[0, [4, 13]] = 1
    whole = Packing.from_tokens(tokens, 1)
    packing, share = whole.shard(collection.cp, starts), slice(*starts[collection.cp.rank() :][:2])
    answer: dict[str, Any] = {"bytes": {}}
    found = {}
    for name, policy in {"alone": None, **POLICIES}.items():
        traffic.clear()
        found[name] = once(layer, x[share], weight[share], packing, policy)
        answer["bytes"][name] = dict(traffic)
    answer["equal"] = {
        name: all(torch.equal(found[name][key], value) for key, value in found["alone"].items())
        for name in POLICIES
    }
    one = once(layer, x, weight, whole, None)
    for key, value in found["alone"].items():
        by_columns = key in ("output", "x")
        if not by_columns:
            torch.distributed.all_reduce(value, group=collection.cp)
        exact = one[key][share] if by_columns else one[key]
        answer.setdefault("errors", {})[key] = ((value - exact).norm() / exact.norm()).item()
    return answer


@pytest.mark.parametrize("ranks", [2, 4])
def test_layer_equals_one_rank_however_its_regions_are_held(ranks: int) -> None:
    for answer in run_workers("tests.dist.test_kda_layer_context:worker", ranks, {"ranks": ranks}):
        assert max(answer["errors"].values()) < 1e-5, answer["errors"]
        assert answer["equal"] == dict.fromkeys(POLICIES, True)
        once_each = {"kda.state", "kda.state.backward", "short_conv.halo", "short_conv.halo.backward"}
        kept = answer["bytes"]["kept"]
        assert set(kept) == once_each
        again = answer["bytes"]["every region"]
        assert again["kda.state"] == 2 * kept["kda.state"]
        assert again["kda.state.backward"] == kept["kda.state.backward"]
