"""What one gloo process does for the tests of the optimizer."""

from __future__ import annotations

from typing import Any

import torch

from launch.compose import compose, resolve_layout
from tests.parity.worker import SMALL


def muon_updates() -> dict[str, Any]:
    """RMS of each matrix's update in units of the learning rate, and which parameters Muon leaves alone."""
    from k3train.optim.build import sub_optimizers
    from k3train.train.assemble import build_trainer, topology
    from parallel.groups import initialize

    config = resolve_layout(compose([*SMALL, "optim=muon", "optim.weight_decay=0"]), 1)
    groups = initialize(topology(config), timeout_minutes=1, seed=1)
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
