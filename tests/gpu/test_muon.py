"""Newton-Schulz and Per-Head Muon on a GPU, at Kimi K3's shapes."""

from __future__ import annotations

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon

from k3train.optim.groups import Split
from k3train.optim.newton_schulz import orthogonalize, orthogonalize_reference, update_scale
from k3train.optim.owners import Span, cut, exchange
from k3train.optim.per_head import Matrix, PerHeadMuon, Settings

pytestmark = pytest.mark.gpu
SETTINGS = Settings(momentum=0.95, steps=5, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.parametrize("shape", [(128, 7168), (192, 1536), (128, 512), (3584, 3072), (12288, 128)])
def test_batches_follow_the_formula_and_have_the_right_size(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    blocks = torch.randn(3, *shape, device="cuda")
    solved = orthogonalize(blocks, 5)
    expected = torch.stack([orthogonalize_reference(block, 5) for block in blocks])
    assert (solved - expected).norm() / expected.norm() < 4e-2
    rms = update_scale(shape) * solved.square().mean((1, 2)).sqrt()
    assert all(0.15 < value < 0.25 for value in rms.tolist()), rms


def build(parameter: torch.nn.Parameter, split: Split) -> PerHeadMuon:
    blocks = cut(0, split.blocks(parameter.shape[1]), [Span(0, 0, parameter.numel())])
    return PerHeadMuon(
        [{"params": [parameter], "lr": 0.02, "weight_decay": 0.1}],
        [Matrix("q", (parameter.shape[0], parameter.shape[1]), parameter)],
        [exchange(blocks, [0] * len(blocks), 0, 1)],
        SETTINGS,
        torch.device("cuda"),
    )


def test_a_whole_matrix_moves_as_under_emerging_optimizers_muon() -> None:
    torch.manual_seed(0)
    mine = torch.nn.Parameter(torch.randn(1536, 7168, device="cuda"))
    theirs = torch.nn.Parameter(mine.detach().clone())
    other = Muon(
        [theirs], lr=0.02, momentum=0.95, weight_decay=0.1, nesterov=True, coefficient_type="simple",
        extra_scale_factor=0.2,
    )  # fmt: skip
    optimizer = build(mine, Split("whole", (1536,)))
    before = mine.detach().clone()
    for _ in range(3):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
        optimizer.step()
        other.step()
    # The batched product may round BF16 otherwise than the plain one.
    assert (mine - theirs).norm() / (mine - before).norm() < 5e-3


def test_a_head_does_not_feel_another() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(8 * 128, 7168, device="cuda"), torch.randn(8 * 128, 7168, device="cuda")
    ends = []
    for factor in (1.0, 1000.0):
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        parameter.grad[3 * 128 : 4 * 128] *= factor
        build(parameter, Split("heads", (128,), 8)).step()
        ends.append(parameter.detach().view(8, -1))
    assert [torch.equal(*pair) for pair in zip(*ends, strict=True)] == [head != 3 for head in range(8)]
