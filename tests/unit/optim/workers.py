"""What one gloo process does for the tests of the optimizer."""

from __future__ import annotations

import os
from typing import Any

import torch

from launch.compose import compose, resolve_layout
from tests.parity.worker import SMALL


def muon_updates() -> dict[str, Any]:
    """RMS of each matrix's update in units of the learning rate, and which parameters Muon leaves alone."""
    from k3train.layout import layout_of
    from k3train.optim.build import sub_optimizers
    from k3train.train.assemble import build_trainer
    from parallel.groups import initialize

    config = resolve_layout(compose([*SMALL, "optim=muon", "optim.weight_decay=0"]), 1)
    groups = initialize(layout_of(config), timeout_minutes=1, seed=1)
    trainer = build_trainer(config, groups)
    (model,) = trainer.models
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    trainer.scheduler.num_steps = 1
    trainer.scheduler.step(0)
    rate = trainer.optimizer.param_groups[0]["lr"]
    trainer.optimizer.prepare_grads()
    trainer.optimizer.step_with_ready_grads()
    muon = {
        id(parameter)
        for part in sub_optimizers(trainer.optimizer)
        if "Muon" in type(part.optimizer).__name__
        for parameter in part.get_parameters()
    }
    rms = {
        name: ((parameter - before[name]).square().mean().sqrt() / rate).item()
        for name, parameter in model.named_parameters()
        if id(parameter) in muon
    }
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in muon]
    return {"rms": rms, "left": left}


def schedule(steps: int, warmup_fraction: float) -> list[float]:
    """Learning rates of every step."""
    from types import SimpleNamespace

    from k3train.optim.build import build_scheduler

    config = compose([f"run.steps={steps}", f"optim.warmup_fraction={warmup_fraction}", "optim.lr=1.0"])
    group: dict[str, Any] = {"wd_mult": 1.0}
    scheduler = build_scheduler(config, SimpleNamespace(param_groups=[group]))  # type: ignore[arg-type]
    rates = []
    for step in range(1, steps + 1):
        scheduler.num_steps = step
        scheduler.step(0)
        rates.append(group["lr"])
    return rates


def clipped_logits(overrides: list[str], bound: float) -> dict[str, Any]:
    """Logits of Gated MLA over two steps on the same tokens in which nothing but QK-Clip moves a weight."""
    from k3train.layout import layout_of
    from k3train.model.naming import named_parameters
    from k3train.ops.packing import Packing
    from k3train.train.assemble import build_trainer
    from k3train.train.step import train_step
    from parallel.groups import destroy, initialize

    # Without experts, since a new balance bias would route tokens of the second step otherwise.
    settings = ["optim=muon_per_head", "optim.lr=0", f"optim.qk_clip={bound}", "model.num_experts=0"]
    config = resolve_layout(compose([*SMALL, *settings, *overrides]), int(os.environ["WORLD_SIZE"]))
    groups = initialize(layout_of(config), timeout_minutes=1, seed=1)
    trainer = build_trainer(config, groups)
    (model,) = trainer.models
    assert trainer.qk_clip is not None
    generator = torch.Generator().manual_seed(groups.rank)
    windows = torch.randint(0, 257, (2, 41), generator=generator)
    batch = {
        "tokens": windows[:, :-1].contiguous(),
        "labels": windows[:, 1:].contiguous(),
        "loss_mask": torch.ones(2, 40),
        "sample_ids": torch.arange(2),
        "packing": Packing.single(2, 40, "cpu"),
    }
    before = {name: parameter.detach().clone() for name, parameter in named_parameters(model)}
    steps = []
    for step in (1, 2):
        train_step(trainer, [dict(batch)], step)
        seen = torch.stack([layer.largest_logit for _, layer in trainer.qk_clip.layers])
        torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX)
        steps.append(seen.tolist())
        if step == 1:
            ratios = {
                name: (parameter / before[name]).mean(1).tolist()
                for name, parameter in named_parameters(model)
                if not torch.equal(parameter, before[name])
            }
    destroy()
    return {"names": [name for name, _ in trainer.qk_clip.layers], "steps": steps, "ratios": ratios}


def difference_to_muon() -> dict[str, float]:
    """Of Per-Head Muon's first update of each parameter to that of megatron-core's Muon, relative."""
    from k3train.layout import layout_of
    from k3train.model.naming import named_parameters
    from k3train.train.assemble import build_trainer
    from parallel.groups import initialize

    updates: list[dict[str, torch.Tensor]] = []
    groups = None
    for name in ("muon", "muon_per_head"):
        config = resolve_layout(compose([*SMALL, f"optim={name}", "parallel.zero=0"]), 1)
        groups = groups or initialize(layout_of(config), timeout_minutes=1, seed=1)
        trainer = build_trainer(config, groups)
        (model,) = trainer.models
        found = {name: each for name, each in named_parameters(model) if each.requires_grad}
        before = {name: each.detach().clone() for name, each in found.items()}
        generator = torch.Generator().manual_seed(2)
        for parameter in found.values():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        trainer.scheduler.num_steps = 1
        trainer.scheduler.step(0)
        trainer.optimizer.prepare_grads()
        trainer.optimizer.step_with_ready_grads()
        updates.append({name: each.detach() - before[name] for name, each in found.items()})
    theirs, mine = updates
    return {name: float((mine[name] - each).norm() / each.norm()) for name, each in theirs.items()}
