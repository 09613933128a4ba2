"""The optimizer over a few matrices in one process: heads apart from each other, AdamW for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3train.optim.groups import Split
from k3train.optim.newton_schulz import update_scale
from k3train.optim.owners import Span, cut, exchange
from k3train.optim.per_head import Matrix, PerHeadMuon, Settings

FP32 = Settings(momentum=0.95, steps=5, betas=(0.9, 0.95), eps=1e-8, dtype=torch.float32)
BF16 = Settings(momentum=0.95, steps=5, betas=(0.9, 0.95), eps=1e-8)
RATE, DECAY = 0.02, 0.1
Q, KV, WHOLE = Split("heads", (8,), 4), Split("heads", (6, 4), 4), Split("whole", (20,))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(
    shapes: dict[str, tuple[tuple[int, int], Split]],
    settings: Settings = FP32,
    decay: float = 0.0,
    limit: int = 1 << 20,
) -> tuple[PerHeadMuon, dict[str, torch.nn.Parameter]]:
    """An optimizer over matrices, and a vector beside them that AdamW updates."""
    tensors = {
        name: torch.nn.Parameter(noise(*shape, seed=index))
        for index, (name, (shape, _)) in enumerate(shapes.items())
    }
    vector = torch.nn.Parameter(noise(12, seed=50))
    matrices, blocks = [], []
    for index, (name, (shape, split)) in enumerate(shapes.items()):
        matrices.append(Matrix(name, shape, tensors[name]))
        numel = shape[0] * shape[1]
        blocks += cut(index, split.blocks(shape[1]), [Span(0, 0, numel)])
    groups = [{"params": [*tensors.values(), vector], "lr": RATE, "weight_decay": decay}]
    parts = [exchange(blocks, [0] * len(blocks), 0, 1, limit)]
    optimizer = PerHeadMuon(groups, matrices, parts, settings, torch.device("cpu"))
    return optimizer, {**tensors, "vector": vector}


def run(optimizer: PerHeadMuon, tensors: dict[str, torch.nn.Parameter], steps: int = 3) -> None:
    for step in range(steps):
        for index, tensor in enumerate(tensors.values()):
            tensor.grad = noise(*tensor.shape, seed=100 * step + index)
        optimizer.step()


MODEL = {"q": ((32, 24), Q), "kv": ((40, 16), KV), "o": ((20, 32), WHOLE)}


def test_equals_a_loop_of_muon_over_single_heads_bit_for_bit() -> None:
    optimizer, tensors = build(MODEL, decay=DECAY)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    run(optimizer, tensors)
    for index, (name, (shape, split)) in enumerate(MODEL.items()):
        for start, stop, (rows, columns) in split.blocks(shape[1]):
            first = start // columns
            single, one = build({"head": ((rows, columns), Split("whole", (rows,)))}, decay=DECAY)
            with torch.no_grad():
                one["head"].copy_(before[name].view(-1)[start:stop].view(rows, columns))
            for step in range(3):
                gradient = noise(*shape, seed=100 * step + index)
                one["head"].grad = gradient[first : first + rows].clone()
                one["vector"].grad = torch.zeros(12)
                single.step()
            assert torch.equal(one["head"], tensors[name][first : first + rows]), (name, first)


@pytest.mark.parametrize("settings", [FP32, BF16], ids=["fp32", "bf16"])
def test_batches_change_no_bit(settings: Settings) -> None:
    whole, pieces = (build(MODEL, settings, limit=limit) for limit in (1 << 20, 300))
    for optimizer, tensors in (whole, pieces):
        run(optimizer, tensors)
    assert len(whole[0].exchanges[0].batches) < len(pieces[0].exchanges[0].batches)
    assert all(torch.equal(tensor, pieces[1][name]) for name, tensor in whole[1].items())


@pytest.mark.parametrize("head", [0, 2])
def test_a_head_does_not_feel_another_heads_momentum(head: int) -> None:
    changes = []
    for factor in (1.0, 1000.0):
        optimizer, tensors = build({"q": ((32, 24), Q)})
        run(optimizer, tensors, steps=1)
        optimizer.state[tensors["q"]]["exp_avg"][8 * head : 8 * head + 8] *= factor
        before = tensors["q"].detach().clone()
        run(optimizer, tensors, steps=1)
        changes.append((tensors["q"] - before).detach())
    same = torch.isclose(changes[0], changes[1], rtol=0, atol=0).view(4, -1).all(1)
    assert same.tolist() == [index != head for index in range(4)]


def test_a_whole_matrix_does_feel_it() -> None:
    changes = []
    for factor in (1.0, 1000.0):
        optimizer, tensors = build({"q": ((32, 24), Split("whole", (32,)))})
        run(optimizer, tensors, steps=1)
        optimizer.state[tensors["q"]]["exp_avg"][:8] *= factor
        before = tensors["q"].detach().clone()
        run(optimizer, tensors, steps=1)
        changes.append((tensors["q"] - before).detach())
    assert not torch.isclose(changes[0], changes[1], rtol=1e-3)[8:].any(1).all()


def test_each_block_moves_by_a_fifth_of_the_rate() -> None:
    shapes = {"q": ((4 * 64, 96), Split("heads", (64,), 4)), "o": ((96, 160), Split("whole", (96,)))}
    optimizer, tensors = build(shapes, BF16)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    run(optimizer, tensors, steps=1)
    for name, (shape, split) in shapes.items():
        change = (tensors[name] - before[name]).detach().view(-1) / RATE
        for start, stop, _ in split.blocks(shape[1]):
            assert 0.15 < change[start:stop].square().mean().sqrt() < 0.25


def test_weights_decay_by_the_rate() -> None:
    for decay in (0.0, DECAY):
        optimizer, tensors = build({"q": ((32, 24), Q)}, decay=decay)
        before = tensors["q"].detach().clone()
        tensors["q"].grad, tensors["vector"].grad = torch.zeros(32, 24), torch.zeros(12)
        optimizer.step()
        torch.testing.assert_close(tensors["q"].detach(), before * (1 - RATE * decay), rtol=1e-7, atol=0)


def test_the_rest_is_adamw_bit_for_bit() -> None:
    optimizer, tensors = build({"q": ((32, 24), Q)}, decay=DECAY)
    other = torch.nn.Parameter(tensors["vector"].detach().clone())
    adamw = torch.optim.AdamW([other], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    for step in range(4):
        tensors["q"].grad = noise(32, 24, seed=step)
        tensors["vector"].grad = noise(12, seed=60 + step)
        other.grad = tensors["vector"].grad.clone()
        optimizer.step()
        adamw.step()
    assert torch.equal(tensors["vector"], other)
    assert optimizer.state[tensors["q"]].keys() == {"step", "exp_avg"}
    assert [optimizer.state[tensors[name]]["step"].item() for name in ("q", "vector")] == [4, 4]


def test_rows_are_scaled_once() -> None:
    plain, clipped = build({"q": ((32, 24), Q)}), build({"q": ((32, 24), Q)})
    scales = torch.linspace(0.5, 1, 32)
    clipped[0].row_scales = {"q": scales}
    for optimizer, tensors in (plain, clipped):
        run(optimizer, tensors, steps=1)
    assert torch.equal(clipped[1]["q"], plain[1]["q"] * scales[:, None])
    assert clipped[0].row_scales == {}


def test_the_scale_is_that_of_the_block() -> None:
    assert update_scale((192, 1536)) == pytest.approx(0.2 * 1536**0.5)
