"""Rotary embedding, position grid and attention of packed images and clips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from k3train.ops import backends
from k3train.ops.item_attention import item_attention
from k3train.ops.items import Items, Share
from k3train.ops.position_grid import interpolation, position_grid, reference, resize, time_wave
from k3train.ops.rotary_2d import reference as rotary_reference
from k3train.ops.rotary_2d import rotary_table, rotate
from k3train.vision_context import Assignment

GRIDS = [(1, 2, 3), (1, 3, 2), (1, 3, 2), (2, 2, 2)]
THETA = 1e4


def make_items(grids: list[tuple[int, int, int]] = GRIDS) -> Items:
    return Items.pack(grids, torch.device("cpu"))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def table_of(grid: tuple[int, int, int], width: int = 8, dtype: torch.dtype = torch.float64):  # type: ignore[no-untyped-def]
    return rotary_table(make_items([grid]), width, THETA, dtype)


def test_borders_and_runs_of_a_pack() -> None:
    items = make_items()
    assert items.cu_seqlens.tolist() == [0, 6, 12, 18, 26]
    assert items.cu_seqlens.dtype == torch.int32
    assert [(piece.grid, count) for piece, count in items.runs] == [
        ((1, 2, 3), 1), ((1, 3, 2), 2), ((2, 2, 2), 1),
    ]  # fmt: skip
    assert items.length_runs == [((6, 6), 3), ((8, 8), 1)]
    assert items.cu_keys is items.cu_seqlens
    parts = items.split(torch.arange(26))
    assert [part.shape for _, part in parts] == [(1, 6), (2, 6), (1, 8)]
    assert items.spread([part[0] for _, part in parts]).tolist() == [
        *range(6), *range(6, 12), *range(6, 12), *range(18, 26),
    ]  # fmt: skip


def test_rotation_equals_the_reference_with_gradients() -> None:
    x = normal(26, 2, 8).requires_grad_()
    outputs = [
        rotate(x, rotary_table(make_items(), 8, THETA, x.dtype)),
        rotary_reference.rotate(x, GRIDS, THETA),
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-14)
    torch.testing.assert_close(*[torch.autograd.grad(y.sin().sum(), x) for y in outputs])


def test_rotation_of_one_patch_by_hand() -> None:
    x = torch.eye(8, dtype=torch.float64)[None, [0, 3, 4, 6]]  # unit vectors in pairs 0, 1, 2, 3
    table = table_of((1, 4, 6))
    place = 2 * 6 + 5  # row 2, column 5
    turned = rotate(x, type(table)(table.cos[[place]], table.sin[[place]]))[0]
    fine = THETA**-0.5
    expected = torch.zeros(4, 8, dtype=torch.float64)
    expected[0, 0], expected[0, 1] = math.cos(5), math.sin(5)
    expected[1, 2], expected[1, 3] = -math.sin(2), math.cos(2)
    expected[2, 4], expected[2, 5] = math.cos(5 * fine), math.sin(5 * fine)
    expected[3, 6], expected[3, 7] = math.cos(2 * fine), math.sin(2 * fine)
    torch.testing.assert_close(turned, expected)


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    q, k = normal(1, 1, 8, seed=1).expand(48, 1, 8), normal(1, 1, 8, seed=2).expand(48, 1, 8)
    table = table_of((1, 6, 8))
    turned_q, turned_k = rotate(q, table), rotate(k, table)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    scores = torch.einsum("ihd,jhd->ij", turned_q, turned_k).view(6, 8, 6, 8)
    torch.testing.assert_close(scores[0, 0, 2, 3], scores[3, 4, 5, 7])
    torch.testing.assert_close(scores[5, 1, 1, 6], scores[4, 0, 0, 5])
    assert (scores[0, 0, 2, 3] - scores[0, 0, 3, 2]).abs() > 1e-2
    assert (scores[0, 0, 2, 3] - scores[2, 3, 0, 0]).abs() > 1e-2


def test_the_origin_and_the_frames_do_not_turn() -> None:
    table = table_of((3, 2, 4))
    x = normal(24, 2, 8)
    turned = rotate(x, table)
    assert torch.equal(turned[[0, 8, 16]], x[[0, 8, 16]])
    assert torch.equal(table.cos[:8], table.cos[16:])


def test_a_low_precision_input_is_turned_in_fp32() -> None:
    x = normal(1024, 1, 128, dtype=torch.bfloat16)
    table = table_of((1, 2, 512), 128, torch.bfloat16)
    exact = rotate(x.double(), table_of((1, 2, 512), 128))
    assert table.cos.dtype == torch.float32
    assert rotate(x, table).dtype == torch.bfloat16
    assert (rotate(x, table).double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()
    assert (rotate(x.float(), table).double() - exact).abs().max() < 1e-6


def test_gradcheck_of_rotation_and_positions() -> None:
    items = make_items([(1, 2, 3), (2, 1, 2)])
    table = rotary_table(items, 4, THETA, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), normal(10, 1, 4).requires_grad_())
    weight = normal(3, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: position_grid(w, items), weight)


def test_resize_to_the_own_size_changes_nothing() -> None:
    weight = normal(5, 5, 3, dtype=torch.float32)
    assert torch.equal(resize(weight, 5, 5), weight)
    assert torch.equal(position_grid(weight, make_items([(1, 5, 5)])), weight.flatten(0, 1))
    assert torch.equal(interpolation(5, 5, weight), torch.eye(5))


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 3), (13, 5), (7, 64), (10, 10)])
def test_resize_equals_torchs_interpolation_with_gradients(size: tuple[int, int]) -> None:
    weight = normal(5, 5, 3).requires_grad_()
    outputs = [resize(weight, *size), reference.resize(weight, *size)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    torch.testing.assert_close(*[torch.autograd.grad(y.sin().sum(), weight) for y in outputs])


def test_weights_of_a_resize_sum_to_one_without_antialiasing() -> None:
    weights = interpolation(64, 10, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(weights.sum(1), torch.ones(10, dtype=torch.float64))
    assert (weights > 0).sum(1).max() == 2


def test_time_is_added_to_clips_and_not_to_images() -> None:
    weight = normal(3, 3, 4)
    image, clip = (position_grid(weight, make_items([(t, 2, 2)])) for t in (1, 2))
    added = clip.view(2, 4, 4) - image
    wave = [[0, 0, 1, 1], [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)]]
    torch.testing.assert_close(added, torch.tensor(wave, dtype=torch.float64)[:, None].expand(2, 4, 4))
    assert time_wave(4, 1024, weight).shape == (4, 1024)


def test_positions_of_a_bf16_grid_are_rounded_once() -> None:
    weight = normal(5, 5, 8, dtype=torch.bfloat16)
    items = make_items([(3, 7, 4)])
    exact = position_grid(weight.double(), items)
    assert torch.equal(position_grid(weight, items), exact.float().bfloat16())


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_attention_by_hand(backend: str) -> None:
    q, k, v = (normal(26, 2, 4, seed=seed).requires_grad_() for seed in range(3))
    output = item_attention(q, k, v, make_items(), backend)
    weights = (k[12:18, 1] @ q[13, 1] / 2).softmax(0)  # the third item
    torch.testing.assert_close(output[13, 1], weights @ v[12:18, 1])


def test_backends_agree_with_gradients() -> None:
    inputs = [normal(26, 2, 4, seed=seed).requires_grad_() for seed in range(3)]
    outputs = [item_attention(*inputs, make_items(), name) for name in ("sdpa", "reference")]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*[torch.autograd.grad(y.sin().sum(), inputs) for y in outputs])


class SecondOfTwo:
    """Stands in for a process group, of which this is the last rank."""

    def rank(self) -> int:
        return 1


def make_share(device: str) -> Items:
    """Rank 1 of two has the last two rows of a clip (2, 6, 2), a whole image (1, 2, 3), half of (1, 4, 4)."""
    grids = ((2, 6, 2), (1, 2, 2), (1, 2, 3), (1, 4, 4))
    assignment = Assignment(grids, ((0, 4, 6), (0, 2, 2), (0, 0, 2), (0, 2, 4)), (1.0, 1.0))
    share: Any = Share(assignment, SecondOfTwo())  # type: ignore[arg-type]
    return Items.of(share, torch.device(device))


def test_pieces_have_positions_and_angles_of_the_whole_item() -> None:
    items, weight = make_share("cpu"), normal(3, 3, 4)
    assert items.lengths == [8, 6, 8] and items.key_lengths == [24, 6, 16]
    assert items.cu_keys.tolist() == [0, 24, 30, 46] and items.cu_seqlens.tolist() == [0, 8, 14, 22]
    clip, image, cut = (make_items([grid]) for grid in ((2, 6, 2), (1, 2, 3), (1, 4, 4)))
    rows = [*range(8, 12), *range(20, 24)]
    expected = [
        position_grid(weight, clip)[rows],
        position_grid(weight, image),
        position_grid(weight, cut)[8:],
    ]
    torch.testing.assert_close(position_grid(weight, items), torch.cat(expected), rtol=0, atol=1e-14)
    for mine, *whole in zip(
        *(rotary_table(each, 8, THETA, weight.dtype) for each in (items, clip, image, cut)),
        strict=True,
    ):
        assert torch.equal(mine, torch.cat([whole[0][rows], whole[1], whole[2][8:]]))


def test_queries_of_a_piece_look_at_all_keys_of_their_item() -> None:
    q, k, v = (normal(n, 2, 4, seed=n).requires_grad_() for n in (22, 46, 46))
    v = normal(46, 2, 4, seed=5).requires_grad_()
    outputs = [
        backends.call("item_attention", name, q, q, k, v, make_share("cpu")) for name in ("sdpa", "reference")
    ]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*[torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in outputs])
    weights = (k[30:, 1] @ q[15, 1] / 2).softmax(0)
    torch.testing.assert_close(outputs[0][15, 1], weights @ v[30:, 1])


def test_gradcheck_of_attention() -> None:
    items = make_items([(1, 1, 2), (1, 1, 2), (1, 1, 3)])
    inputs = [normal(7, 1, 2, seed=seed).requires_grad_() for seed in range(3)]
    for name in ("sdpa", "reference"):
        assert torch.autograd.gradcheck(lambda q, k, v, n=name: item_attention(q, k, v, items, n), inputs)
