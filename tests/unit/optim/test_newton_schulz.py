"""Newton-Schulz on batches against the formula on one matrix, and the size of the updates it gives."""

from __future__ import annotations

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from torch import Tensor

from k3train.optim.newton_schulz import orthogonalize, orthogonalize_reference, update_scale

SHAPES = [(16, 48), (48, 16), (32, 32), (8, 200)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_a_batch_equals_the_formula_on_each(shape: tuple[int, int], dtype: torch.dtype, bound: float) -> None:
    blocks = noise(5, *shape)
    expected = torch.stack([orthogonalize_reference(block, 5) for block in blocks])
    error = (orthogonalize(blocks, 5, dtype) - expected).norm() / expected.norm()
    assert error <= bound


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_equals_a_loop_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    blocks = noise(7, *shape)
    loop = torch.cat([orthogonalize(block[None], 5, dtype) for block in blocks])
    parts = torch.cat([orthogonalize(blocks[:3], 5, dtype), orthogonalize(blocks[3:], 5, dtype)])
    together = orthogonalize(blocks, 5, dtype)
    assert torch.equal(together, loop) and torch.equal(together, parts)
    assert torch.equal(together, together.to(dtype).float()), "the update does not travel losslessly"


def test_singular_values_end_near_one() -> None:
    solved = orthogonalize(noise(1, 64, 160), 5, torch.float32)[0]
    values = torch.linalg.svdvals(solved)
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(128, 512), (192, 384), (96, 64), (64, 64)])
def test_an_update_has_an_rms_of_a_fifth(shape: tuple[int, int]) -> None:
    update = update_scale(shape) * orthogonalize(noise(3, *shape), 5)
    rms = update.square().mean((1, 2)).sqrt()
    assert all(0.15 < value < 0.25 for value in rms.tolist()), rms


def test_the_size_of_the_whole_matrix_would_be_wrong() -> None:
    """12 heads of [16, 48]: an RMS of 0.2 needs the head's 48, not the matrix's 192 rows."""
    solved = orthogonalize(noise(12, 16, 48), 5)
    assert (update_scale((192, 48)) * solved).square().mean().sqrt() > 0.3


def test_a_whole_matrix_moves_as_under_emerging_optimizers_muon() -> None:
    mine, theirs = (torch.nn.Parameter(noise(24, 40, seed=1)) for _ in range(2))
    other = Muon(
        [theirs], lr=0.1, momentum=0.95, weight_decay=0.0, nesterov=True, coefficient_type="simple",
        extra_scale_factor=0.2,
    )  # fmt: skip
    average = torch.zeros(24, 40)
    for step in range(3):
        gradient = noise(24, 40, seed=10 + step)
        theirs.grad = gradient.clone()
        other.step()
        average.lerp_(gradient, 0.05)
        solved = orthogonalize(gradient.lerp(average, 0.95)[None], 5)[0]
        with torch.no_grad():
            mine -= 0.1 * update_scale((24, 40)) * solved
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 6), 5), torch.zeros(2, 4, 6))
