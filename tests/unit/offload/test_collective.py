"""A collective inside a region is run again wherever the region is, whatever a rank had saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.sites import collective, region, site
from tests.unit.model.saved import backward, manager


class Exchange:
    """Counts how often it is run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += 1
        return collective(2 * x)


def gradients(rows: int, rules: dict[str, str], smallest: int) -> tuple[int, Tensor, list[str]]:
    """Runs of an exchange inside regions "layer" and "core", the gradient of a weight, and regions run."""
    exchange, order = Exchange(), []
    weight = torch.linspace(1, 2, 4, dtype=torch.float64).requires_grad_()

    def core(x: Tensor) -> Tensor:
        order.append("core")
        return exchange(x.exp()).sin()

    def layer(x: Tensor) -> Tensor:
        order.append("layer")
        return region("core", core, x * weight).cos()

    def loss() -> Tensor:
        x = torch.linspace(0, 1, 4 * rows, dtype=torch.float64).view(rows, 4)
        with site("vit"):
            return region("layer", layer, x.requires_grad_(), keep_results=True).sum()

    keeper = manager([weight], **rules)
    keeper._smallest = smallest
    backward(loss, keeper)
    keeper.end_step()
    assert weight.grad is not None
    return exchange.runs, weight.grad, order


@pytest.mark.parametrize("smallest", [0, 1 << 20])
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(
    ("rules", "runs"),
    [
        ({}, 1),
        ({"vit.core": "recompute"}, 2),
        ({"vit.layer": "recompute"}, 2),
        ({"vit.layer": "recompute", "vit.core": "recompute"}, 3),
        ({"vit.other": "recompute"}, 1),
    ],
)
def test_it_runs_as_often_with_much_saved_as_with_nothing(
    rules: dict[str, str], runs: int, rows: int, smallest: int
) -> None:
    found, gradient, _ = gradients(rows, rules, smallest)
    assert found == runs
    assert torch.equal(gradient, gradients(rows, {}, 0)[1])
    assert bool(gradient.any()) == bool(rows)


def test_nothing_is_marked_without_a_manager_or_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    assert collective(x) is x
    keeper = manager([])
    frozen: Callable[[], Tensor] = lambda: collective(torch.ones(2))  # noqa: E731
    with keeper.forward("micro-batch"):
        assert frozen().grad_fn is None
    keeper.end_step()
