"""One of two GPUs that share rows in a layer of Gated MLA, beside the same rows on one GPU.

Letters: S columns of whole rows, d hidden.
"""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tests.dist.mla_context_worker import distance
from tests.parity.worker import SMALL

CUDA = ["model.backends.linear=local", "model.dtype=bfloat16", "data.micro_batch_size=1"]
HEAD = ["model.qk_nope_head_dim=128", "model.qk_extra_head_dim=64", "model.v_head_dim=128"]
SHAPES = {
    "small": [
        "model.hidden_size=512",
        "model.num_heads=4",
        "model.q_lora_rank=256",
        "model.kv_lora_rank=512",
    ],
    "k3": [
        "model.hidden_size=7168",
        "model.num_heads=96",
        "model.q_lora_rank=1536",
        "model.kv_lora_rank=512",
    ],
}


def build(groups: Any, shape: str, dtype: torch.dtype) -> Any:
    """A layer with the same weights on both GPUs."""
    from k3train.model.mla import GatedMLA, MLASubmodules
    from k3train.model.transformer_config import transformer_config
    from k3train.ops.backends import resolve
    from launch.compose import compose, resolve_layout

    config = resolve_layout(compose([*SMALL, *CUDA, *HEAD, *SHAPES[shape]]), 1)
    modules = resolve("linear", "local", "cuda").load()()
    submodules = MLASubmodules(modules.column_parallel_linear(), modules.row_parallel_linear())
    layer = GatedMLA(transformer_config(config), submodules, groups.pg_collection).to(groups.device, dtype)
    generator = torch.Generator(groups.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(generator=generator).mul_(1.5 * parameter.shape[-1] ** -0.5)
            if "norm" in name:
                parameter.mul_(0.1).add_(1)
    return layer


def rows(lengths: list[int], device: torch.device, width: int) -> tuple[Tensor, Any]:
    """[S, 1, d] BF16 and the packing of documents of these lengths."""
    from k3train.ops.packing import Packing

    borders = [0, *accumulate(lengths)]
    ends = torch.zeros(1, borders[-1], dtype=torch.int32, device=device)
    ends[0, [border - 1 for border in borders[1:]]] = 1
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(borders[-1], 1, width, generator=generator, device=device)
    return x.bfloat16(), Packing.from_tokens(ends, 1)


def run(layer: Any, backend: str, x: Tensor, upstream: Tensor, packing: Any) -> dict[str, Tensor]:
    """Output and gradients in FP32."""
    layer.config.k3.backends.attention = backend
    layer.zero_grad()
    x = x.detach().to(layer.q_a_norm.weight.dtype).requires_grad_()
    output = layer(x, packing)
    (output.float() * upstream.float()).sum().backward()
    gradients = {name: weight.grad.float() for name, weight in layer.named_parameters()}
    return {"output": output.detach().float(), "input": x.grad.float(), **gradients}


def compare(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Distance from FP32 with the softmax written out: of this GPU alone and of both together."""
    import torch.distributed as dist

    from k3train import context_plan
    from parallel.groups import initialize
    from parallel.topology import Topology

    groups = initialize(Topology(context=2), timeout_minutes=2, seed=1)
    group, answers = groups.pg_collection.cp, []
    layer, exact = (build(groups, "small", dtype) for dtype in (torch.bfloat16, torch.float32))
    exact.load_state_dict(layer.state_dict())
    for case in cases:
        context_plan.KEY_BYTES = case["key_bytes"]
        x, packing = rows(case["lengths"], groups.device, 512)
        upstream, starts = x.flip(0, 2).sin(), case["starts"]
        mine = slice(starts[group.rank()], starts[group.rank() + 1])
        best = run(exact, "reference", x, upstream, packing)
        alone = run(layer, case["backend"], x, upstream, packing)
        both = run(layer, case["backend"], x[mine], upstream[mine], packing.shard(group, starts))
        found = {}
        for name, expected in best.items():
            if name in ("output", "input"):
                expected, single = expected[mine], alone[name][mine]
            else:
                single = alone[name]
                dist.all_reduce(both[name], group=group)
            found[name] = (distance(single, expected), distance(both[name], expected))
        answers.append(found)
    return answers


def memory(length: int, backend: str) -> dict[str, float]:
    """Peaks of forward and backward of K3's layer over one document, in bytes above what was there before."""
    from k3train.context_plan import mla_bytes
    from offload import fp8
    from offload.manager import ActivationManager
    from offload.policy import Policy
    from parallel.context.exchange import even
    from parallel.groups import initialize
    from parallel.topology import Topology
    from tests.unit.model.saved import NoTier, backward

    groups = initialize(Topology(context=2), timeout_minutes=5, seed=1)
    group = groups.pg_collection.cp
    layer = build(groups, "k3", torch.bfloat16)
    layer.config.k3.backends.attention = backend
    plan = mla_bytes(layer.config.k3, length, 2)
    answer: dict[str, float] = {"kept": plan.kept, "expanded": plan.expanded, "backward": plan.backward}
    answer |= {"queries": plan.queries, "gathered": plan.gathered}
    x, packing = rows([length], groups.device, 7168)
    starts = even(length, 2)
    x = x[starts[group.rank()] : starts[group.rank() + 1]].clone().requires_grad_()
    packing = packing.shard(group, starts)
    for storage in ("recompute", "keep"):
        layer.zero_grad(set_to_none=False)
        keeper = ActivationManager(
            Policy.read({"mla.key": storage}),
            NoTier(),
            parameters=list(layer.parameters()),
            device=groups.device,
            codec=fp8,
            coded=torch.bfloat16,
            window=1 << 20,
            smallest=1 << 20,
        )
        for _ in range(2):  # the first one also makes gradients and workspaces
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward(lambda: layer(x, packing).float().square().mean(), keeper)
            answer[storage] = torch.cuda.max_memory_allocated() - before
    return answer
