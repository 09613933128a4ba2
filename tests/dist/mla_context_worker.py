"""What one rank of a context group does in the tests of Gated MLA: its share of rows through one layer.

Letters: b rows, S columns of whole rows, d hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.parity.worker import SMALL

HIDDEN, HEADS = 48, 2
BOUND = 0.3
"""Logits above it count, in FP32; every head has some."""
Case = dict[str, Any]


def distance(ours: Any, theirs: Any) -> float:
    """Largest difference over the largest value."""
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def make_documents(case: Case) -> Tensor:
    """Bool [b, S]: where a document starts."""
    rows, length = case["rows"], case["starts"][-1]
    first = torch.zeros(rows, length, dtype=torch.bool)
    first[:, 0] = True
    for row, borders in enumerate(case["borders"]):
        first[row, borders] = True
    return first


def make_input(case: Case) -> Tensor:
    """[b, S, d] FP64."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(case["rows"], case["starts"][-1], HIDDEN, generator=generator, dtype=torch.float64)


def build(groups: Any, dtype: torch.dtype) -> Any:
    """A layer with the same weights everywhere."""
    from k3train.config import Config
    from k3train.model.mla import GatedMLA, MLASubmodules
    from k3train.model.transformer_config import transformer_config
    from k3train.ops.backends import resolve
    from launch.compose import compose, resolve_layout

    config: Config = resolve_layout(compose([*SMALL, "model.num_heads=2"]), 1)
    modules = resolve("linear", "local", "cpu").load()()
    transformer = transformer_config(config)
    transformer.logit_bound = BOUND if dtype is torch.float32 else 0.0
    submodules = MLASubmodules(modules.column_parallel_linear(), modules.row_parallel_linear())
    layer = GatedMLA(transformer, submodules, groups.pg_collection).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 2 * values * parameter.shape[-1] ** -0.5)
    return layer


class Rank:
    """One rank, with a layer of each dtype."""

    def __init__(self) -> None:
        from parallel.groups import initialize
        from parallel.topology import Topology

        torch.set_num_threads(1)
        self.ranks = int(os.environ["WORLD_SIZE"])
        groups = initialize(Topology(context=self.ranks), timeout_minutes=1, seed=1)
        self.group = groups.pg_collection.cp
        self.rank = self.group.rank()
        self.layers = {name: build(groups, getattr(torch, name)) for name in ("float64", "float32")}
        self.take("float64")

    def take(self, dtype: str) -> None:
        """Compute in a dtype from now on."""
        self.layer, self.dtype = self.layers[dtype], getattr(torch, dtype)

    def packing(self, case: Case) -> Any:
        """Of this rank's columns, or of all on a single rank."""
        from k3train.ops.packing import Packing

        end = torch.roll(make_documents(case), -1, dims=1)
        whole = Packing.from_tokens(end.int(), 1)
        return whole.shard(self.group, case["starts"]) if self.ranks > 1 else whole

    def columns(self, case: Case, whole: Tensor) -> Tensor:
        """This rank's of [b, S, ...], as the layer takes them: [s, b, ...]."""
        starts = case["starts"] if self.ranks > 1 else [0, case["starts"][-1]]
        share = whole[:, starts[self.rank] : starts[self.rank + 1]]
        return share.to(self.dtype).transpose(0, 1).contiguous()

    def run(self, case: Case, rules: dict[str, str] | None = None, smallest: int = 0) -> Case:
        """Output, gradients and largest logits of this rank's columns."""
        from k3train import context_plan
        from offload.sites import region

        context_plan.KEY_BYTES = case.get("key_bytes", 1 << 30)
        packing = self.packing(case)
        x = self.columns(case, make_input(case)).requires_grad_()
        upstream = self.columns(case, make_input(case).flip(0, 1, 2).sin())
        self.layer.train()
        self.layer.zero_grad()
        if self.layer.config.logit_bound:
            self.layer.largest_logit.zero_()
        results: list[Tensor] = []

        def loss() -> Tensor:
            results.append(region("layer", lambda x: self.layer(x, packing), x))
            return (results[0] * upstream).sum()

        self.backward(loss, rules, smallest)
        return {
            "output": results[0].transpose(0, 1).tolist(),
            "input": x.grad.transpose(0, 1).tolist(),
            "weights": {name: weight.grad.tolist() for name, weight in self.layer.named_parameters()},
            "logits": self.layer.largest_logit.tolist() if self.layer.config.logit_bound else None,
        }

    def backward(self, loss: Callable[[], Tensor], rules: dict[str, str] | None, smallest: int) -> None:
        """Gradients of a loss, with a manager at work or none."""
        from offload import fp8
        from offload.manager import ActivationManager
        from offload.policy import Policy
        from tests.unit.model.saved import NoTier, backward

        keeper = rules and ActivationManager(
            Policy.read(rules),
            NoTier(),
            parameters=list(self.layer.parameters()),
            device=torch.device("cpu"),
            codec=fp8,
            coded=torch.bfloat16,
            window=1 << 20,
            smallest=smallest,
        )
        backward(loss, keeper or None)


def work(cases: dict[str, Case], seen: list[Case], again: list[Case]) -> dict[str, Any]:
    """All that this rank does for the tests: layers, tokens perturbed, regions run again."""
    rank = Rank()
    return {
        **{dtype: {name: layer(rank, each, dtype) for name, each in cases.items()} for dtype in rank.layers},
        "seen": [perturbed(rank, **each) for each in seen],
        "again": [recompute(rank, **each) for each in again],
    }


def layer(rank: Rank, case: Case, dtype: str) -> Case:
    """What a layer makes of a case, and the bytes that this rank gave to each exchange."""
    from parallel.context.exchange import traffic

    rank.take(dtype)
    traffic.clear()
    return {**rank.run(case), "traffic": dict(traffic)}


def recompute(rank: Rank, case: Case, policies: list[dict[str, str]], sizes: list[int]) -> list[list[str]]:
    """Names of what differs in any bit from a run without a manager, for each policy and least size."""
    rank.take("float64")
    plain = rank.run(case)
    found = []
    for rules in policies:
        for size in sizes:
            run = rank.run(case, rules, size)
            found.append([name for name in plain if plain[name] != run[name]])
    return found


def perturbed(rank: Rank, case: Case, columns: list[int], backend: str) -> list[Any]:
    """Outputs [b, s, d] as they are, and with row 0 changed at each of the columns alone."""
    rank.take("float64")
    backends = rank.layer.config.k3.backends
    backends.attention = backend
    packing, answers = rank.packing(case), []
    for column in [None, *columns]:
        x = make_input(case)
        if column is not None:
            x[0, column] += 5
        with torch.no_grad():
            answers.append(rank.layer(rank.columns(case, x), packing).transpose(0, 1).tolist())
    backends.attention = "auto"
    return answers
