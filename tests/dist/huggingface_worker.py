"""What the ranks of the Hugging Face tests do: load weights into their layout, and compare every tensor."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from k3train.checkpoint.huggingface.reader import HuggingFaceTensors
from k3train.checkpoint.sources import open_weights
from k3train.checkpoint.weights import fill
from k3train.config import Config
from k3train.initial import shapes_of
from k3train.layout import layout_of
from k3train.model.naming import named_parameters
from k3train.train.assemble import build_trainer, set_numerics
from k3train.train.step import Trainer, train_step
from parallel.groups import initialize

from .checkpoint_runs import SEQUENCE, batches


def load(source: str, sources: list[str], cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Load each of `sources` in each case, and compare with the folder `source`.

    A case: `layout` sets keys of the parallel section, `expert` of its section of experts, `optimizer` names
    one, `vision` keeps the tower. Without it a step of no length writes the FP32 masters into the parameters:
    they too must have been loaded.
    """
    answers: list[dict[str, Any]] = []
    truth = HuggingFaceTensors(Path(source))
    groups = None
    for name, case in cases.items():
        config = _config(source, case)
        set_numerics(config)
        groups = groups or initialize(layout_of(config), timeout_minutes=1, seed=1)
        trainer = build_trainer(config, groups)
        for folder in sources:
            _spoil(trainer)
            absent = fill(unwrap_model(trainer.modules), open_weights(Path(folder)))
            trainer.optimizer.reload_model_params()
            wrong, count = _differences(trainer, truth)
            if trainer.tower is None:
                train_step(trainer, batches(trainer, 1), 1)
            answers.append(
                {
                    "case": f"{name} {Path(folder).name}",
                    "absent": sorted(absent),
                    "count": count,
                    "wrong": wrong,
                    "after": [each for each in _differences(trainer, truth)[0] if "expert_bias" not in each],
                    "layers": [list(model.layer_range) for model in trainer.models],
                }
            )
    return answers


def _config(source: str, case: dict[str, Any]) -> Config:
    model, vision = shapes_of(source)
    config = Config(model=replace(model, mtp_layers=1, balance_bins=100))
    if vision is not None and case.get("vision"):
        config.vision = replace(vision, mode="phase")
    config.data.sequence_length, config.run.microbatches = SEQUENCE, 2
    config.optim.name, config.optim.lr, config.optim.weight_decay = case.get("optimizer", "adamw"), 0.0, 0.0
    config.optim.qk_clip = 0.0
    config.parallel.data, config.parallel.zero = 1, 1
    for key, value in case.get("layout", {}).items():
        setattr(config.parallel, key, value)
    for key, value in case.get("expert", {}).items():
        setattr(config.parallel.expert, key, value)
    config.cluster.ranks_per_node = int(os.environ["WORLD_SIZE"])
    return config


@torch.no_grad()
def _spoil(trainer: Trainer) -> None:
    for model in unwrap_model(trainer.modules):
        biases = (buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias"))
        for tensor in (*model.parameters(), *biases):
            tensor.fill_(7.0)


def _differences(trainer: Trainer, truth: HuggingFaceTensors) -> tuple[list[str], int]:
    """Names of this rank's tensors that are not what the folder says, and how many were looked at."""
    found: dict[str, Any] = {}
    for model in trainer.models:
        found.update(named_parameters(model))
        found.update({name: b for name, b in model.named_buffers() if name.endswith("expert_bias")})
    if trainer.tower is not None:
        found.update(unwrap_model(trainer.tower.model).named_parameters())
    found = {name: tensor for name, tensor in found.items() if not name.startswith("mtp.")}
    wrong = [
        name for name, tensor in found.items() if not torch.equal(tensor, truth.read(name).to(tensor.dtype))
    ]
    return wrong, len(found)
