"""What one gloo process does for the tests of the model."""

from __future__ import annotations

import os
from typing import Any

import torch

from k3train.vision_config import VisionConfig
from k3train.vision_shapes import Grid, patches, tokens
from launch.compose import compose, resolve_layout
from tests.parity.worker import SMALL
from tests.unit.model import plain
from tests.unit.model.saved import Recorder, backward, manager


def build(*overrides: str) -> tuple[Any, Any]:
    """(configuration, bare chunk) of the small model, its queries and biases away from zero."""
    from k3train.layout import layout_of
    from k3train.train.assemble import build_trainer
    from parallel.groups import initialize

    os.environ.pop("MASTER_PORT", None)
    os.environ.pop("MASTER_ADDR", None)
    config = resolve_layout(compose([*SMALL, "model.mtp_layers=0", "run.deterministic=false", *overrides]), 1)
    torch.use_deterministic_algorithms(config.run.deterministic)
    groups = initialize(layout_of(config), timeout_minutes=1, seed=1)
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

    def counted(keeper: Any = None, **options: Any) -> int:
        router.reset_counts()
        data = {"labels": tokens, "loss_mask": torch.ones(2, 16), **options}
        backward(lambda: model(tokens, packing, **data)[0].sum(), keeper)
        return int(router.histogram.sum() // router.histogram.shape[0])

    model.train()
    answers: dict[str, Any] = {"train": counted()}
    answers["recompute"] = counted(manager(model.parameters(), layer="recompute"))
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


def saved_by_site(overrides: list[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """(measured, calculated) bytes of one token by layer, or "end", and site, in a forward."""
    from k3train.ops.packing import Packing

    config, model = build(*overrides)
    batch, tokens = config.data.micro_batch_size, config.data.sequence_length
    device = next(model.parameters()).device
    return held_by_site(config, model, Packing.single(batch, tokens, device))


def held_by_site(config: Any, model: Any, packing: Any) -> dict[str, dict[str, tuple[float, float]]]:
    """The same of a chunk that holds the whole model, for this rank's columns of random tokens."""
    from k3train import activation_bytes
    from k3train.activation_sites import held_bytes

    model.train()
    batch, tokens = packing.document_ids.shape
    recorder = Recorder([*model.parameters(), *model.buffers()])
    for index, layer in model.layers.items():
        layer.register_forward_pre_hook(lambda *_, unit=index: setattr(recorder, "unit", unit))
        layer.register_forward_hook(lambda *_: setattr(recorder, "unit", "end"))
    device = next(model.parameters()).device
    data = torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones(batch, tokens, device=device)
    with recorder.recording():
        held = model(data, packing, data, mask)
    measured = recorder.counted()
    del held

    def seen(tensors: list[Any]) -> list[Any]:
        return [tensor for tensor in tensors if tensor.what != activation_bytes.ROUTE]

    expected = {
        index: held_bytes(seen(activation_bytes.decoder_layer(config, int(index), device.type)))
        for index in model.layers
    }
    end = [*activation_bytes.output(config, device.type), *activation_bytes.mtp(config, device.type)]
    expected["end"] = held_bytes(seen(end))
    measured.pop("")  # token ids
    assert measured.keys() == expected.keys()
    return {
        unit: {
            site: (measured[unit].get(site, 0) / (batch * tokens), expected[unit].get(site, 0.0))
            for site in sorted(measured[unit].keys() | expected[unit].keys())
        }
        for unit in expected
    }


def held_under(overrides: list[str], policies: list[dict[str, str]]) -> list[dict[str, tuple[float, float]]]:
    """(measured, calculated) bytes of one token by site, of what a manager holds on a CPU by each policy."""
    from k3train import activation_bytes
    from k3train.activation_sites import held_bytes
    from k3train.ops.packing import Packing

    config, model = build(*overrides)
    model.train()
    batch, length = config.data.micro_batch_size, config.data.sequence_length
    tokens = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))
    packing, mask = Packing.single(batch, length, "cpu"), torch.ones(batch, length)
    parts = [activation_bytes.decoder_layer(config, int(index), "cpu") for index in model.layers]
    parts += [activation_bytes.output(config, "cpu"), activation_bytes.mtp(config, "cpu")]
    floats = [tensor for part in parts for tensor in part if tensor.kind != "index"]

    def held(rules: dict[str, str]) -> dict[str, tuple[float, float]]:
        keeper = manager([*model.parameters(), *model.buffers()], **rules)
        with keeper.forward("micro-batch"):
            output = model(tokens, packing, tokens, mask)
        measured = {site: size / (batch * length) for site, size in keeper.saved.items() if site != "other"}
        expected = held_bytes(floats, lambda site: keeper.rule(site).recompute)
        del output
        names = measured.keys() | expected.keys()
        return {site: (measured.get(site, 0.0), expected.get(site, 0.0)) for site in names}

    return [held(rules) for rules in policies]


def saved_by_tower(vision: VisionConfig, dtype: str, device: str) -> tuple[dict[str, int], dict[str, float]]:
    """Measured and calculated bytes by site of a forward of the vision tower; `dtype`: fp32 or bf16."""
    from k3train import activation_bytes
    from k3train.activation_sites import held_bytes
    from k3train.model.vision import VisionModel
    from k3train.model.vision_init import initialize_vision

    grids: list[Grid] = [(1, 16, 16), (2, 16, 8)]
    model = VisionModel(vision, 96, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).to(device)
    initialize_vision(model, 1, 0.02)
    recorder = Recorder(model.parameters())
    length = sum(map(patches, grids))
    with recorder.recording():
        output = model(torch.randn(length, 588, device=device), grids)
    measured = recorder.counted()[""]
    del output
    expected: dict[str, float] = {}
    for tensors, times in (
        (activation_bytes.tower_block(vision, dtype, device), vision.depth * length),
        (activation_bytes.tower_ends(vision, dtype, device), length),
        (activation_bytes.tower_positions(vision, grids), 1),
        (activation_bytes.projector(vision, 96, dtype, device), sum(tokens(vision, grid) for grid in grids)),
    ):
        for site, size in held_bytes(tensors).items():
            expected[site] = expected.get(site, 0) + times * size
    return measured, expected
