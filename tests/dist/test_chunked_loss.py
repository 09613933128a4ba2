"""The loss in chunks inside a training step: losses and gradients as megatron-core's own have them.

The sums of an SFT-like mask, MTP through the same head, its gradient added up in DDP's FP32 buffers over
micro-batches, virtual pipeline stages, rows that two context ranks share, the head's region run again.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.dist.launch import run_workers
from tests.parity.worker import MICROBATCHES, SMALL

WORDS = 50
"""Of a chunk, of a vocabulary of 320: seven, the last one smaller."""
LAYOUTS = {
    "pp2 x vpp2, head run again": (
        2,
        [
            "parallel.pipeline=2",
            "parallel.virtual=2",
            "parallel.layers_per_chunk=[1,3,1,1]",
            "offload.sites={head: recompute, mtp.head: recompute}",
        ],
    ),
    "cp2": (2, ["parallel.context=2"]),
}


def batches(config: Any, groups: Any) -> list[dict[str, Any]]:
    """Micro-batches of which a third of the tokens count; of the last one none do."""
    from tests.parity.worker import place_columns

    size, length = config.data.micro_batch_size, config.data.sequence_length
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 257, (MICROBATCHES, size, length + 1), generator=random)
    masks = (torch.rand(MICROBATCHES, size, length, generator=random) < 0.3).float()
    masks[-1] = 0
    found = []
    for row, mask in zip(tokens, masks, strict=True):
        batch = {"tokens": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous(), "loss_mask": mask}
        found.append(place_columns(batch, groups.pg_collection.cp))
    return found


def worker(overrides: list[str]) -> dict[str, Any]:
    """Losses by backend, and how far each gradient is from megatron-core's, relative to its norm."""
    from k3train.layout import layout_of
    from k3train.ops import cross_entropy
    from k3train.train.assemble import build_trainer
    from k3train.train.step import evaluate, run_batches
    from launch.compose import compose, resolve_layout
    from parallel.groups import initialize

    config = resolve_layout(compose([*SMALL, "parallel.zero=0", *overrides]), int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    groups = initialize(layout_of(config), timeout_minutes=1, seed=1)
    trainer = build_trainer(config, groups)
    seen: list[int] = []
    monkey: Any = cross_entropy
    monkey.chunk_words = lambda tokens, vocabulary, mib: seen.append(tokens) or WORDS
    found: dict[str, Any] = {"losses": {}, "validation": {}, "errors": {}}
    first: dict[str, torch.Tensor] = {}
    for backend in ("megatron", "chunked", "reference"):
        for model in trainer.models:
            model.train()
            model.config.k3.backends.cross_entropy = backend
        for module in trainer.modules:
            module.zero_grad_buffer()
        losses = run_batches(trainer, batches(config, groups))
        gradients = {
            name: parameter.main_grad.double()
            for model in trainer.models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        found["losses"][backend] = losses.loss_sum, losses.mtp_sum
        found["validation"][backend] = evaluate(trainer, batches(config, groups)).loss
        found["errors"][backend] = {
            name: ((gradients[name] - expected).norm() / expected.norm().clamp(min=1e-30)).item()
            for name, expected in first.items()
        }
    found["tokens"] = list(seen)
    if groups.pg_collection.pp.rank() == groups.pg_collection.pp.size() - 1:
        found["same bits"] = same_bits(trainer.models[-1])
    return found


def same_bits(model: Any) -> bool:
    """Whether backend `megatron` is what the head's own forward and megatron-core's loss are, to the bit."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from k3train.model.linear import project
    from k3train.ops.cross_entropy import token_losses

    weight = model.head.weight
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(40, 2, weight.shape[1], generator=random).requires_grad_()  # [s, b, d]
    labels = torch.randint(len(weight), (2, 40), generator=random)
    logits = project(model.head, hidden).transpose(0, 1).contiguous()
    flat = token_losses(hidden.flatten(0, 1), weight, labels.t().flatten(), backend="megatron")
    found = []
    for losses in (vocab_parallel_cross_entropy(logits, labels), flat.view(40, 2).t()):
        found.append([losses, *torch.autograd.grad(losses.square().sum(), (hidden, weight))])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_megatron_core_s(layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    answers = run_workers("tests.dist.test_chunked_loss:worker", ranks, {"overrides": overrides})
    for answer in answers:
        expected, plain = answer["losses"]["megatron"], answer["validation"]["megatron"]
        assert plain > 5 and min(expected) > 100
        for backend in ("chunked", "reference"):
            assert answer["losses"][backend] == pytest.approx(expected, rel=2e-6)
            assert answer["validation"][backend] == pytest.approx(plain, rel=2e-6)
            assert max(answer["errors"][backend].values()) < 1e-5, backend
    last = answers[-1]
    assert last["same bits"]
    assert last["errors"]["chunked"].keys() >= {"head.weight", "mtp.proj.weight"}
    # Rows of two, 40 tokens long; the head is passed twice.
    assert set(last["tokens"]) == {80 // (2 if layout == "cp2" else 1)}
