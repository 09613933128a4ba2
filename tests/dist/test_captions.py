"""The model reads digits, from the picture alone: a few steps, then the same pictures in another order."""

from __future__ import annotations

import pytest

from tests.dist.launch import run_workers


@pytest.mark.timeout(180)
def test_held_out_digits_are_read_from_their_pictures() -> None:
    (answer,) = run_workers("tests.dist.test_captions:learn", 1, {"steps": 8}, timeout=150)
    # Chance is a tenth; an untrained model does not even know that the answer is a digit.
    assert answer["untrained"] < 0.15
    assert answer["trained"] > 0.5
    assert answer["shuffled"] < 0.25 and answer["blank"] < 0.25


def learn(steps: int) -> dict[str, float]:
    """Accuracies before and after a few steps of the recipe tiny on one rank."""
    import torch

    from k3train.layout import layout_of
    from k3train.train.assemble import build_trainer, set_numerics
    from k3train.train.inputs import Inputs
    from k3train.train.step import caption_accuracy, train_step
    from launch.compose import compose, resolve_layout
    from parallel.groups import destroy, initialize

    config = resolve_layout(compose(["recipe=tiny", "parallel=single", f"run.steps={steps}"]), 1)
    set_numerics(config)
    groups = initialize(layout_of(config), timeout_minutes=2, seed=1)
    trainer, inputs = build_trainer(config, groups), Inputs(config, groups)
    answers = {"untrained": caption_accuracy(trainer, inputs.captions())}
    for step in range(1, steps + 1):
        train_step(trainer, inputs.next_step(), step)
    held_out = inputs.captions()
    answers["trained"] = caption_accuracy(trainer, held_out)
    generator = torch.Generator().manual_seed(0)
    for batch in held_out:
        pictures = batch["patches"].unflatten(0, (-1, 4))
        batch["patches"] = pictures[torch.randperm(len(pictures), generator=generator)].flatten(0, 1)
    answers["shuffled"] = caption_accuracy(trainer, held_out)
    for batch in held_out:
        batch["patches"] = torch.zeros_like(batch["patches"])
    answers["blank"] = caption_accuracy(trainer, held_out)
    inputs.close()
    destroy()
    return answers
