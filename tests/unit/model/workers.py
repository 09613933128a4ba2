"""What one gloo process does for the tests of the model."""

from __future__ import annotations

import os
from typing import Any

import torch

from launch.compose import compose, resolve_layout
from tests.parity.worker import SMALL
from tests.unit.model import plain


def build(*overrides: str) -> tuple[Any, Any]:
    """(configuration, bare chunk) of the small model, its queries and biases away from zero."""
    from k3train.train.assemble import build_trainer, topology
    from parallel.groups import initialize

    os.environ.pop("MASTER_PORT", None)
    os.environ.pop("MASTER_ADDR", None)
    config = resolve_layout(compose([*SMALL, "model.mtp_layers=0", *overrides]), 1)
    groups = initialize(topology(config), timeout_minutes=1, seed=1)
    (model,) = build_trainer(config, groups).models
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query", "A_log")):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 2:
                # Wider than at initialisation, so that every part moves the logits.
                parameter.mul_(6)
        for _, moe in model.moe_layers():
            router = moe.router
            router.expert_bias.copy_(0.05 * torch.randn(router.expert_bias.shape, generator=generator))
    return config, model


def compare_with_plain() -> dict[str, float]:
    """Largest difference of logits of standard deviation 1, ours in FP32, and the experts' agreement."""
    from k3train.model.naming import named_parameters
    from k3train.ops.packing import Packing

    config, model = build()
    model.eval()
    tokens = torch.randint(0, 257, (2, 37), generator=torch.Generator().manual_seed(3))
    tokens[0, [4, 20]] = 256
    with torch.no_grad():
        ours = model(tokens, Packing.from_tokens(tokens, 256)).double()
        weights = {name: parameter.detach().double() for name, parameter in named_parameters(model)}
        biases = {name: buffer.double() for name, buffer in model.named_buffers()}
        theirs = plain.forward(config.model, weights, biases, tokens, 256)
    scale = theirs.std()
    return {
        "error": ((ours - theirs).abs().max() / scale).item(),
        "spread": (theirs.std(1).mean() / scale).item(),
    }


def count_router() -> dict[str, Any]:
    """What the router counts: in training, under recompute, in evaluation, and for padding."""
    from k3train.ops.packing import Packing

    _, model = build()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    packing = Packing.from_tokens(tokens, 256)
    router = model.moe_layers()[0][1].router

    def counted(**options: Any) -> int:
        router.reset_counts()
        model(tokens, packing, labels=tokens, loss_mask=torch.ones(2, 16), **options)[0].sum().backward()
        return int(router.histogram.sum() // router.histogram.shape[0])

    model.train()
    answers: dict[str, Any] = {"train": counted()}
    model.config.k3.recompute = "layer"
    answers["recompute"] = counted()
    model.config.k3.recompute = "none"
    valid = torch.ones(2, 16, dtype=torch.bool)
    valid[1, 10:] = False
    answers["padded"] = counted(valid=valid)
    answers["load"] = int(router.load.sum())
    model.eval()
    answers["eval"] = counted()
    return answers


def count_moonep() -> dict[str, Any]:
    """Calls that MoonEP's numbers are of, and steps that its policy has seen."""
    from k3train.ops.packing import Packing
    from k3train.train.balance import balance_experts

    _, model = build("parallel.expert.dispatcher=moonep", "parallel.expert.policy=eplb")
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    layers = model.moe_layers()
    dispatcher = layers[0][1].token_dispatcher

    def run(training: bool) -> int:
        model.train(training)
        model(tokens, Packing.from_tokens(tokens, 256), labels=tokens, loss_mask=torch.ones(2, 16))
        return int(dispatcher.moonep.stats.calls)

    def balance(update: bool) -> list[int]:
        reports = balance_experts([model], model.pg_collection, update=update)
        assert all(report.moonep and report.rows_max_over_mean == 1 for report in reports.values())
        assert len(reports) == len(layers)
        return [int(layer.token_dispatcher.memory()["seen"]) for _, layer in layers]

    answers: dict[str, Any] = {"eval": run(training=False), "train": run(training=True)}
    answers["skipped"] = balance(update=False)
    answers["empty"] = int(dispatcher.moonep.stats.calls)
    run(training=True)
    answers["updated"] = balance(update=True)
    return answers
