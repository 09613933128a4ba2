"""One rank of the tests of activation policies: short runs of one layout under several of them."""

from __future__ import annotations

import os
from typing import Any

import torch

from k3train.layout import layout_of
from k3train.train.assemble import build_trainer
from launch.compose import compose, resolve_layout
from parallel.groups import destroy
from tests.dist.zero2_worker import digest, join, parameters, train
from tests.parity.worker import SMALL


def run(layout: list[str], policies: list[list[str]], steps: int) -> list[dict[str, Any]]:
    """Each policy from its start: reports, parameters, and what the manager counted in the last step."""
    answers = []
    for policy in policies:
        config = resolve_layout(compose([*SMALL, *layout, *policy]), int(os.environ["WORLD_SIZE"]))
        torch.set_num_threads(1)
        trainer = build_trainer(config, join(layout_of(config)))
        answer = {"reports": train(trainer, range(1, steps + 1)), "parameters": digest(parameters(trainer))}
        manager = trainer.pipeline.activations
        if manager is not None:
            answer |= {
                "saved": manager.saved,
                "peak": dict(manager.ledger.peak),
                "left": manager.ledger.now(),
            }
            manager.close()
        answers.append(answer)
    destroy()
    return answers
