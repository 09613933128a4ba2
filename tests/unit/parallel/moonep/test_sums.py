"""Weighted sums over lists of rows."""

from __future__ import annotations

import torch

from parallel.moonep.sums import sum_rows


def test_products_and_sums_are_wide_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 5, generator=generator).bfloat16()
    weights = torch.rand(6, generator=generator)
    entries, offsets = torch.tensor([3, 3, 0, 6, 5, 1]), torch.tensor([0, 4, 4, 6])
    found = sum_rows(rows, entries, offsets, weights, torch.bfloat16)
    for place, (begin, end) in enumerate(((0, 4), (4, 4), (4, 6))):
        total = torch.zeros(5)
        for j in range(begin, end):
            total = total + rows[entries[j]].float() * weights[j]
        assert torch.equal(found[place], total.bfloat16())
    narrow = (rows[entries] * weights[:, None].bfloat16())[:4].sum(0)
    assert not torch.equal(found[0], narrow)


def test_without_weights_and_without_lists() -> None:
    rows = torch.arange(6.0).view(3, 2)
    found = sum_rows(rows, torch.tensor([2, 0]), torch.tensor([0, 2]), None, torch.float64)
    assert found.tolist() == [[4.0, 6.0]]
    assert found.dtype == torch.float64
    assert sum_rows(rows, torch.tensor([], dtype=torch.int64), torch.tensor([0]), None, rows.dtype).shape == (
        0,
        2,
    )
